"""What a head shares with the model that it sits on: embedding, final norm and LM head of mlx-lm's module."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from mtplx.errors import ModelFilesError
from worker.engine.load import LoadedModel

# Where mlx-lm's modules keep the stack of layers, and what the stack calls its embedding and its final norm.
_STACKS = ("model", "backbone")
_EMBEDDINGS = ("embed_tokens", "embeddings")
_NORMS = ("norm", "norm_f")


class Tap(nn.Module):  # type: ignore[misc]  # MLX ships no types
    """A final norm that shows what it is given: the states of the latest rows, before it."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norm = norm
        self._seen: list[mx.array] = []

    def __call__(self, x: mx.array) -> mx.array:
        """RMSNorm of x."""
        self._seen[:] = [x]
        normed: mx.array = self.norm(x)
        return normed

    def states(self) -> mx.array:
        """T [R, K] of the latest forward; forgotten here, for its graph holds the caches."""
        (states,) = self._seen
        self._seen.clear()
        return states[0]


@dataclass(frozen=True, slots=True)
class Trunk:
    """The model below a head.

    text: mlx-lm's language model. stack: the module whose last step is the final norm. norm_name: of that norm.
    """

    text: Any
    stack: Any
    embedding: Any
    norm_name: str

    @classmethod
    def of(cls, loaded: LoadedModel) -> Trunk:
        """Of *loaded*.

        Raises:
            ModelFilesError: its module keeps embedding or norm under names that nobody knows.
        """
        text = getattr(loaded.model, "language_model", loaded.model)
        stack = next((text[name] for name in _STACKS if isinstance(text.get(name), nn.Module)), None)
        embedding = None if stack is None else next((stack[name] for name in _EMBEDDINGS if name in stack), None)
        norm = None if stack is None else next((name for name in _NORMS if name in stack), None)
        if embedding is None or norm is None:
            raise ModelFilesError(f"{loaded.name} keeps its embedding and final norm in a way that no head knows.")
        return cls(text, stack, embedding, norm)

    @property
    def norm(self) -> Any:
        """The final norm."""
        return self.stack[self.norm_name]

    def normed(self, states: mx.array) -> mx.array:
        """States T [..., K] behind the final norm; where there is a tap, it does not hear of it."""
        norm = self.norm
        rows: mx.array = norm.norm(states) if isinstance(norm, Tap) else norm(states)
        return rows

    def embed(self, ids: mx.array) -> mx.array:
        """Of ids uint32 [...]: T [..., K]."""
        rows: mx.array = self.embedding(ids)
        return rows

    def logits(self, normed: mx.array) -> mx.array:
        """Of normed states T [..., K]: T [..., V]."""
        head = self.text.get("lm_head")
        rows: mx.array = self.embedding.as_linear(normed) if head is None else head(normed)
        return rows

    def tap(self) -> Tap:
        """Put a tap at the final norm, once."""
        norm = self.norm
        if not isinstance(norm, Tap):
            norm = self.stack[self.norm_name] = Tap(norm)
        return norm

    @property
    def norm_width(self) -> int:
        """K: numbers of a state."""
        width: int = self._norm_weight().size
        return width

    def _norm_weight(self) -> Any:
        return (self.norm.norm if isinstance(self.norm, Tap) else self.norm).weight

    def fingerprint(self) -> str:
        """What says whether a head was made for this model: of the final norm, which no quantisation changes."""
        weight = self._norm_weight().astype(mx.bfloat16).astype(mx.float32)
        return hashlib.sha256(np.array(weight).tobytes()).hexdigest()[:16]
