"""A random model of two layers whose greedy text soon goes in circles, and prompts for it."""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import llama
from tiny_models import Kind
from tiny_models.classic import SENTENCE, make_tokenizer

# Small weights between embedding and LM head: the next token depends on the newest one before all else.
GAINS = {"embed_tokens": 1.0, "lm_head": 3.0 / 8}
INNER = 0.5 / 8


def make_periodic(folder: Path) -> Path:
    """Saves it in *folder*."""
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": make_tokenizer(folder, Kind(template=None)),
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.update(tree_map_with_path(_drawn, model.parameters()))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def _drawn(path: str, weight: mx.array) -> mx.array:
    if weight.ndim == 1:
        return weight
    gain = next((gain for name, gain in GAINS.items() if name in path), INNER)
    return mx.random.normal(weight.shape, key=mx.random.key(zlib.crc32(path.encode()))) * gain


def write_prompts(file: Path, count: int = 120) -> Path:
    """Prompts of a few words each, written to *file*."""
    luck, words = random.Random(1), SENTENCE.split()
    file.write_text("\n".join(" ".join(luck.choices(words, k=luck.randint(1, 6))) for _ in range(count)))
    return file
