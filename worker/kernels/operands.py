"""Operands of a matrix-vector product, and the product in plain operations.

x T [R, K]; weight T [N, K], or affine quantised: words uint32 [N, K bits / 32], scales and biases T
[N, K / group], bits 4 or 8, group 32, 64 or 128, as mx.quantize packs them. Out: T [R, N] = x weight^T. Options:

- norm T [K] and eps: x is RMS-normed first;
- glu: weight has 2 N rows, gates first, and the output is silu(gate) * up;
- add: T [R, N] (a residual) or [N] (a bias), added to the product. Not together with glu.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from worker.kernels.dialect import number


@dataclass(frozen=True, slots=True)
class Affine:
    """A quantised weight: words uint32 [N, K bits / 32], scales and biases T [N, K / group]."""

    words: mx.array
    scales: mx.array
    biases: mx.array
    group: int
    bits: int

    def product(self, x: mx.array) -> mx.array:
        """X T [..., K] times the weight, T [..., N], by MLX's own operation."""
        return mx.quantized_matmul(
            x,
            self.words,
            self.scales,
            self.biases,
            transpose=True,
            group_size=self.group,
            bits=self.bits,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What is done in the same launch: norm weight T [K] with eps; glu; add T [R, N] or [N]."""

    norm: mx.array | None = None
    eps: float = 0.0
    glu: bool = False
    add: mx.array | None = None


PLAIN: Final = Extras()


def width_of(weight: mx.array | Affine) -> int:
    """K, the numbers of a line."""
    return int(weight.words.shape[1] * 32 // weight.bits if isinstance(weight, Affine) else weight.shape[1])


def arrays(x: mx.array, weight: mx.array | Affine, extras: Extras) -> dict[str, mx.array]:
    """The operands of a kernel by name."""
    named = {"x": x, "weight": weight.words if isinstance(weight, Affine) else weight}
    if isinstance(weight, Affine):
        named |= {"scales": weight.scales, "biases": weight.biases}
    named |= {} if extras.norm is None else {"norm": extras.norm}
    return named | ({} if extras.add is None else {"add": extras.add})


def defines(extras: Extras) -> tuple[tuple[str, str], ...]:
    """Words for the options: EPS, NORM_WEIGHT, ADDED(row, output)."""
    added = "0.0f"
    if extras.add is not None:
        added = "(float)add[(long)(w) * N + (n)]" if extras.add.ndim == 2 else "(float)add[n]"
    norm = "x" if extras.norm is None else "norm"
    return ("EPS", number(extras.eps)), ("NORM_WEIGHT", norm), ("ADDED(w, n)", added)


def reference(x: mx.array, weight: mx.array | Affine, extras: Extras = PLAIN) -> mx.array:
    """The same in plain operations, with MLX's roundings in between."""
    if extras.norm is not None:
        x = mx.fast.rms_norm(x, extras.norm, extras.eps)
    y = weight.product(x) if isinstance(weight, Affine) else x @ weight.T
    if extras.glu:
        gate, up = mx.split(y, 2, axis=-1)
        return gate * mx.sigmoid(gate) * up
    return y if extras.add is None else y + extras.add
