"""Heads made by `mtplx forge`: their files, and their module.

A directory with `config.json` and `model.safetensors`. The block is a llama layer of the trunk's own shape; the
embedding and the LM head are the trunk's. Names: `enorm`, `hnorm`, `eh_proj`, `block.*`, `norm`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.llama import ModelArgs, TransformerBlock

from mtplx.errors import ModelFilesError
from worker.engine.files import write_tensors
from worker.engine.load import LoadedModel
from worker.engine.trunk import Trunk
from worker.speculation.mtp.head import Head

MODEL_TYPE: Final = "mtplx_mtp"
CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgedConfig:
    """Shape of a forged head, as its `config.json` has it.

    trunk: fingerprint of the model that it was made for. quantization: {"group_size", "bits"}, empty: none.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    trunk: str
    rope_theta: float = 10000.0
    rope_traditional: bool = False
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = 8192
    quantization: dict[str, int] = field(default_factory=dict)

    def module(self) -> Head:
        """The head with random weights, quantised if its weights are."""
        args = {name: value for name, value in asdict(self).items() if name not in ("trunk", "quantization")}
        block = TransformerBlock(ModelArgs(model_type="llama", num_hidden_layers=1, **args))
        head = Head(self.hidden_size, self.rms_norm_eps, block)
        if self.quantization:
            nn.quantize(head, **self.quantization)
        return head


def read_config(folder: Path) -> ForgedConfig:
    """The config in *folder*.

    Raises:
        ModelFilesError: it is missing, or of another kind.
    """
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if found.pop("model_type") != MODEL_TYPE:
            raise ValueError(f"its model_type is not {MODEL_TYPE}")
        return ForgedConfig(**found)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFilesError(
            f"{folder} holds no head that `mtplx forge` wrote ({error}). --mtp takes such a directory, or "
            "one with a head of the model's own family."
        ) from error


def load(folder: Path, loaded: LoadedModel, trunk: Trunk) -> Head:
    """The head in *folder* for *loaded*, in the type of its activations.

    Raises:
        ModelFilesError: it is not whole, or was made for another model.
    """
    config = read_config(folder)
    if config.trunk != trunk.fingerprint() or config.hidden_size != trunk.norm_width:
        raise ModelFilesError(
            f"The head in {folder} was made for another model than {loaded.name}; "
            "make one with: mtplx forge MODEL --out DIR"
        )
    try:
        head = config.module()
        head.load_weights(str(folder / WEIGHTS))
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ModelFilesError(f"{folder / WEIGHTS} is not the weights of its config ({error}).") from error
    head.set_dtype(getattr(mx, loaded.dtype))
    head.eval()
    mx.eval(head.parameters())
    return head


def save(folder: Path, config: ForgedConfig, head: Head) -> None:
    """Write the head to *folder*, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, dict(tree_flatten(head.parameters())), {"format": "mlx"})
    text = json.dumps({"model_type": MODEL_TYPE, **asdict(config)}, indent=2)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def quantized(config: ForgedConfig, head: Head, group_size: int, bits: int) -> tuple[ForgedConfig, Head]:
    """The same head in *bits* bits by groups of *group_size* inputs; the one given stays as it is."""
    parts = {**asdict(config), "quantization": {"group_size": group_size, "bits": bits}}
    dense = config.module()
    dense.update(tree_unflatten(tree_flatten(head.parameters())))
    nn.quantize(dense, group_size=group_size, bits=bits)
    return ForgedConfig(**parts), dense
