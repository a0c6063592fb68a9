"""The table of frequencies that `rope_write` turns by, read from a model's own rope module.

Every rope of mlx-lm's dense models turns a pair by position times a constant of the pair, after scaling the
input by one number; only the constants differ. They are computed here as MLX computes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn


@dataclass(frozen=True, slots=True)
class RopeTable:
    """`frequencies` float32 [dims / 2], radians a position; `dims` are turned, times `input_scale` first."""

    frequencies: mx.array
    dims: int
    traditional: bool
    input_scale: float


def rope_of(module: Any) -> RopeTable | None:
    """The table of an `nn.RoPE` or one of mlx-lm's ropes; None where it is no constant of the model."""
    if isinstance(module, nn.RoPE):
        half = module.dims // 2
        steps = mx.arange(half, dtype=mx.float32) / half
        frequencies = mx.exp(steps * -math.log(module.base))
        return RopeTable(frequencies * module.scale, 2 * half, bool(module.traditional), 1.0)
    wavelengths = getattr(module, "_freqs", None)
    if wavelengths is None:
        return None
    scale = getattr(module, "mscale", getattr(module, "_scale", 1.0))
    traditional = bool(getattr(module, "traditional", False))
    return RopeTable(1.0 / wavelengths.astype(mx.float32), 2 * wavelengths.size, traditional, float(scale))
