"""From a model directory to a model that can answer: weights, tokenizer and limits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, load_tokenizer, maybe_set_recommended_wired_limit
from transformers.utils import logging as transformers_logging

from mtplx.errors import ModelFilesError
from mtplx.job import MAX_INT, ModelLimits
from worker.engine.files import check_model_files, model_dir, model_name, resolve_model

__all__ = ["LoadedModel", "check_model_files", "load", "model_dir", "resolve_model"]

_CONTEXT_KEYS: Final = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that is ready to run.

    model: mlx-lm's module. tokenizer: mlx-lm's wrapper. vocabulary: ids below it have a token and a row.
    width: rows of the head, padding included. context: positions, prompt and answer together.
    dtype: type of the logits, and so of the activations. eos_ids: ids that end an answer.
    """

    model: Any
    tokenizer: Any
    vocabulary: int
    width: int
    context: int
    name: str
    eos_ids: frozenset[int]
    dtype: str

    @property
    def limits(self) -> ModelLimits:
        """What a job is checked against."""
        return ModelLimits(vocabulary=self.vocabulary, context=self.context)


def load(path: Path) -> LoadedModel:
    """Load the checked model directory *path* through mlx-lm, running no code of the checkpoint.

    On MLX's CPU build, where 16-bit floats are slow and coarse, all float weights, scales and biases become
    float32; quantized weights stay packed.

    Raises:
        ModelFilesError: naming the directory and what mlx-lm could not use.
    """
    check_model_files(path)
    # Its warning that a long prompt "will result in indexing errors" is wrong here: such prompts are refused.
    transformers_logging.set_verbosity_error()
    try:
        model, config = load_model(path, lazy=True)
        tokenizer = load_tokenizer(
            path, {"trust_remote_code": False}, eos_token_ids=config.get("eos_token_id", None)
        )
        if mx.default_device().type == mx.DeviceType.cpu:
            model.set_dtype(mx.float32)
        mx.eval(model.parameters())
        # The graph knows shape and type of the logits; nothing is computed here.
        logits = model(mx.array([[0]]))
    except (ValueError, LookupError, TypeError, AttributeError, ImportError, OSError, RuntimeError) as error:
        raise ModelFilesError(f"mlx-lm cannot load {path}: {type(error).__name__}: {error}") from error
    # One process owns the device, so the memory that MLX may wire down is set once.
    maybe_set_recommended_wired_limit()
    width = logits.shape[-1]
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        vocabulary=min(len(tokenizer), width),
        width=width,
        context=_context(config),
        name=model_name(path),
        eos_ids=frozenset(tokenizer.eos_token_ids),
        dtype=str(logits.dtype).removeprefix("mlx.core."),
    )


def _context(config: dict[str, Any]) -> int:
    """Positions of the model. A recurrent model has no such number: then only the job's budget limits it."""
    for part in (config, config.get("text_config") or {}):
        for name in _CONTEXT_KEYS:
            positions = part.get(name)
            if isinstance(positions, int):
                return min(positions, MAX_INT)
    return MAX_INT


def weight_bytes(model: Any) -> int:
    """Bytes of the weights of mlx-lm's *model*; a weight that stands in two places counts twice."""
    return sum(weight.nbytes for _, weight in tree_flatten(model.parameters()))


def device_name() -> str:
    """Where MLX computes: `cpu`, `metal` or `cuda`."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def chip_name() -> str:
    """The device as its maker calls it; empty where MLX does not tell."""
    return str(mx.device_info().get("device_name", ""))
