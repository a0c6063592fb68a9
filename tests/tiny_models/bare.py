"""A dense module of mlx-lm's with random weights, without a checkpoint: for tests of what the engine makes of it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import llama, qwen2, qwen3, smollm3

VOCABULARY = 96
BARE = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3, "smollm3": smollm3}
_SHAPE: dict[str, Any] = {
    "model_type": "tiny",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}


def bare(kind: str = "llama", **changed: object) -> nn.Module:
    """The model of that kind; *changed*: what differs in its config."""
    mx.random.seed(5)
    model: nn.Module = BARE[kind].Model(BARE[kind].ModelArgs.from_dict({**_SHAPE, **changed}))
    mx.eval(model.parameters())
    return model
