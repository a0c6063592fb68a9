"""The models that the benches measure: their shapes with random weights, made where they run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import llama, qwen3

from worker.engine.load import LoadedModel

GROUP = 64
BITS = 4

# Hidden size, layers, MLP, heads, key heads, head dimension, vocabulary.
_SMOL = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": 49152,
    "rope_theta": 1e5,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
_LARGE = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}
_TINY = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's shape. title: in figures; config: as in config.json; quantised: affine, 4 bits.

    group: of quantised weights. head_bits: of their embedding.
    """

    title: str
    config: dict[str, Any]
    quantised: bool
    group: int = GROUP
    head_bits: int = BITS

    def with_layers(self, layers: int) -> Shape:
        """The same with another number of layers."""
        return replace(self, config={**self.config, "num_hidden_layers": layers})

    @property
    def tiny(self) -> Shape:
        """The same kind of model, small enough for a trial of the bench itself."""
        return replace(self, title=f"tiny {self.title}", config={**self.config, **_TINY})


SHAPES = {
    "smol-bf16": Shape(title="SmolLM2-135M bf16", config=_SMOL, quantised=False),
    "smol-4bit": Shape(title="SmolLM2-135M 4-bit", config=_SMOL, quantised=True),
    "8b-bf16": Shape(title="Qwen3-8B shape bf16", config=_LARGE, quantised=False),
    "8b-4bit": Shape(title="Qwen3-8B shape 4-bit", config=_LARGE, quantised=True),
}

# As `mtplx pull` converts it: the shapes of the 16-bit form are those of "smol-bf16".
REAL = {
    "smol-real-4bit": Shape(title="SmolLM2-135M 4-bit, real", config=_SMOL, quantised=True, group=32, head_bits=8),
}


def make(shape: Shape, *, evaluated: bool = True) -> nn.Module:
    """mlx-lm's module with random bfloat16 weights, quantised where the shape says so.

    Weights are made layer by layer, so that no more than one layer exists in a wider form.
    """
    mx.random.seed(0)
    kind: Any = {"llama": llama, "qwen3": qwen3}[shape.config["model_type"]]
    model: nn.Module = kind.Model(kind.ModelArgs.from_dict(shape.config))
    model.set_dtype(mx.bfloat16)
    parts = [*model.model.layers, model]
    for part in parts:
        if shape.quantised:
            nn.quantize(part, shape.group, shape.head_bits if part is model else BITS)
        if evaluated:
            mx.eval(part.parameters())
            mx.clear_cache()
    return model


def loaded(shape: Shape, model: nn.Module) -> LoadedModel:
    """The module as the engine takes it. It has no tokenizer: these benches count ids."""
    width = shape.config["vocab_size"]
    return LoadedModel(
        model=model,
        tokenizer=None,
        vocabulary=width,
        width=width,
        context=shape.config["max_position_embeddings"],
        name=shape.title,
        eos_ids=frozenset(),
        dtype="bfloat16",
    )


def weight_bytes(shape: Shape, model: nn.Module) -> int:
    """Bytes of the weights that a token reads; the row of an embedding that is not the head too is left out."""
    tied = shape.config["tie_word_embeddings"]
    parts = tree_flatten(model.parameters())
    return sum(array.nbytes for name, array in parts if tied or not name.startswith("model.embed_tokens"))


def kv_bytes(shape: Shape, context: int) -> int:
    """Bytes of the keys and values of *context* positions."""
    config = shape.config
    row = config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return 2 * row * context * int(mx.bfloat16.size)
