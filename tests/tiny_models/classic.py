"""The two models of the older tests, and the tokenizer of all tiny models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama, mamba
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SENTENCE = "the quick brown fox jumps over the lazy dog while 12 wise owls watch from the old oak tree"
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
PADDED_ROWS = 20
# Raises for one made-up role, as templates with a fixed order of roles do.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'oracle' %}{{ raise_exception('no oracle speaks here') }}{% endif %}"
    "<|user|>{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What to make; the defaults are the target of the tests."""

    layers: int = 2
    context: int = 512
    seed: int = 1
    template: str | None = TEMPLATE
    begin: bool = True
    spoiled: bool = False


def make_llama(folder: Path, kind: Kind | None = None) -> Path:
    kind = kind or Kind()
    vocabulary = make_tokenizer(folder, kind)
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": kind.layers,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocabulary + PADDED_ROWS,
        "max_position_embeddings": kind.context,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    }
    return _save(folder, llama.Model(llama.ModelArgs.from_dict(config)), config, kind)


def make_mamba(folder: Path, kind: Kind | None = None) -> Path:
    kind = kind or Kind()
    config = {
        "model_type": "mamba",
        "vocab_size": make_tokenizer(folder, kind) + PADDED_ROWS,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 8,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
        "tie_word_embeddings": True,
    }
    # Its biases, which are not scaled up below, are drawn where the module is made.
    mx.random.seed(kind.seed)
    return _save(folder, mamba.Model(mamba.ModelArgs.from_dict(config)), config, kind)


def _save(folder: Path, model: object, config: dict, kind: Kind) -> Path:
    keys = iter(mx.random.split(mx.random.key(kind.seed), 200))
    # Scaled up so that greedy text varies; 1-D weights are norms and biases.
    parameters = tree_map(
        lambda x: mx.random.normal(x.shape, key=next(keys)) * 3 / x.shape[-1] ** 0.5 if x.ndim > 1 else x,
        model.parameters(),
    )
    weights = dict(tree_flatten(parameters))
    if kind.spoiled:
        weights["model.norm.weight"] = weights["model.norm.weight"] * float("nan")
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_tokenizer(folder: Path, kind: Kind) -> int:
    """Saves the tokenizer in *folder* and returns how many ids it has."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SENTENCE], trainer)
    if kind.begin:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = kind.template
    wrapped.save_pretrained(folder)
    return len(wrapped)
