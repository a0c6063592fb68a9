"""Whether rows that a kernel writes in place are seen by every later reader, tried on this device.

MLX knows nothing of such a write. The trial has the flow of a decode step: what attention gives goes into the next
layer and into the next step, which is built while this one runs; the host reads one number a step. The pool holds
NaN at first, and every round begins again at its start, over rows of the round before, so that a row that is
missed, late or lost shows in the outputs; wide steps are taken back in part. Then plain operations compute it all
again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, cast

import mlx.core as mx
import numpy as np

from worker.kernels.attention import attend
from worker.kernels.dialect import PAGE, chosen
from worker.kernels.rope_write import Heads

# Largest error by type, of the largest value in the row: roundings. A product of float32 may be one of TF32.
BOUNDS: Final = {mx.float32: 5e-3, mx.float16: 5e-3, mx.bfloat16: 2e-2}

STEPS: Final = 208
# Enough that one step needs several command buffers on every device.
LAYERS: Final = 12
_ROUND: Final = 52
_WIDE: Final = (2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Seen:
    """The outcome. error: the largest, of the largest value in its row; first_bad: the first step gone wrong."""

    ok: bool
    steps: int
    error: float
    bound: float
    first_bad: int | None = None

    def __str__(self) -> str:
        if self.ok:
            return f"seen in {self.steps} steps"
        where = "the rows that are left" if self.first_bad is None else f"step {self.first_bad} of {self.steps}"
        return f"rows written in place are not all seen: {where} off by {self.error:.2g}, bound {self.bound:.2g}"


def apart(got: mx.array, want: mx.array) -> mx.array:
    """The largest error of *got*, of the largest value in its row: float32 scalar, infinite for no number."""
    have, aim = got.astype(mx.float32), want.astype(mx.float32)
    error = mx.abs(have - aim).max(axis=-1) / mx.maximum(mx.abs(aim).max(axis=-1), 1e-3)
    return mx.where(mx.isfinite(error), error, math.inf).max()


def pools_apart(got: mx.array, want: mx.array) -> mx.array:
    """As `apart`, for pools: a slot that nobody wrote holds NaN in both."""
    unwritten = mx.isnan(want)
    stray = mx.any(unwritten & ~mx.isnan(got))
    return mx.where(stray, math.inf, apart(mx.where(unwritten, 0, got), mx.where(unwritten, 0, want)))


def number_of(scalar: mx.array) -> float:
    """The value of a real *scalar*, computed now."""
    return float(cast("float", scalar.item()))


@dataclass(frozen=True, slots=True)
class _Step:
    """rows: of the forward; kept: how many stay; length: rows before it."""

    rows: int
    kept: int
    length: int


def plan(steps: int) -> list[_Step]:
    """What each step does: one row, now and then several, of which some are taken back."""
    found, length = [], 0
    for number in range(steps):
        if number % _ROUND == 0:
            length = 0
        rows = _WIDE[number // 4 % len(_WIDE)] if number % 4 == 3 else 1
        kept = 1 + number // 16 % rows
        found.append(_Step(rows, kept, length))
        length += kept
    return found


class Trial:
    """The trial on pools of its own. Operands as in `kernels.attention`.

    Args:
        heads, table: of the model's layers.
        dtype: of its activations.
        layers: each has its own pool.
        use_kernel: as in `attend`.
        ahead: whether a step is built while the one before it runs.
    """

    def __init__(
        self,
        heads: Heads,
        table: mx.array,
        dtype: mx.Dtype,
        *,
        layers: int = LAYERS,
        use_kernel: bool | None = None,
        ahead: bool = True,
    ) -> None:
        self._heads = heads
        self._constants = table
        self._dtype = dtype
        self._layers = layers
        self._use_kernel = use_kernel
        self._ahead = ahead
        self._in_place = chosen(use_kernel) is not None
        width = heads.heads * heads.dim
        joint = (heads.heads + 2 * heads.kv_heads) * heads.dim
        # Numbers are made by the host: MLX on CUDA would have to compile its generator first.
        self._numbers = np.random.default_rng(3)
        self._mix = self._some((width, joint), width**-0.5)
        self._compiled: dict[int, Callable[..., list[mx.array]]] = {}
        self._table: list[int] = []

    def run(self, steps: int = STEPS) -> Seen:
        """Run the trial; a kernel that cannot be run raises what MLX raises."""
        script = plan(steps)
        pages = max(7, -(-max(step.length + step.rows for step in script) // PAGE))
        self._table = random.Random(7).sample(range(pages + 2), pages)  # noqa: S311 - any shuffle will do
        pools = self._poisoned(pages + 2)
        made = self._carry_out(script, pools)
        return self._compare(script, made, pools)

    def _some(self, shape: Sequence[int], deviation: float = 1.0) -> mx.array:
        numbers = self._numbers.standard_normal(shape, dtype=np.float32)
        return mx.array(numbers * np.float32(deviation)).astype(self._dtype)

    def _poisoned(self, pages: int) -> list[mx.array]:
        shape = (2, self._heads.kv_heads, pages * PAGE, self._heads.dim)
        pools = [mx.full(shape, math.nan, dtype=self._dtype) for _ in range(self._layers)]
        mx.eval(pools)
        return pools

    def _meta(self, length: int) -> mx.array:
        return mx.array([length, *self._table], dtype=mx.int32)

    def _carry_out(self, script: list[_Step], pools: list[mx.array]) -> list[list[mx.array]]:
        """For each step the joint projection and the output of every layer. *pools* are written, or replaced."""
        made: list[list[mx.array]] = []
        x, mark, meta = mx.ones((1, len(self._mix)), dtype=self._dtype), None, self._meta(0)
        for step in script:
            if step.length == 0:
                meta = self._meta(0)
            x = mx.take(x, mx.arange(step.rows, dtype=mx.uint32) % x.shape[0], axis=0)
            # Without something new in every row, rows become alike, and one could stand for the other.
            new = self._some(x.shape)
            more = mx.array([step.kept, *[0] * len(self._table)], dtype=mx.int32)
            meta, read, *rest = self._compiled_for(step.rows)(x, new, meta, more, *pools)
            layers, pools[:] = rest[: 2 * self._layers], rest[2 * self._layers :] or pools
            mx.async_eval(meta, read, *layers)  # type: ignore[no-untyped-call]
            if not self._ahead:
                mx.eval(read, layers)
            elif mark is not None:
                mark.item()
            made.append(layers)
            x, mark = layers[-1], read
        mx.eval(made, pools)
        return made

    def _compiled_for(self, rows: int) -> Callable[..., list[mx.array]]:
        if rows not in self._compiled:
            # mx.compile types its result as a plain callable.
            self._compiled[rows] = cast("Callable[..., list[mx.array]]", mx.compile(self._forward))
        return self._compiled[rows]

    def _forward(
        self, x: mx.array, new: mx.array, meta: mx.array, more: mx.array, *pools: mx.array
    ) -> list[mx.array]:
        made, written = [], []
        for pool in pools:
            qkv = (mx.fast.rms_norm(x, None, 1e-5) + new) @ self._mix
            x, after = attend(qkv, self._constants, pool, meta, self._heads, use_kernel=self._use_kernel)
            made += [qkv, x]
            written.append(after)
        return [meta + more, x[0, :1], *made, *([] if self._in_place else written)]

    def _compare(self, script: list[_Step], made: list[list[mx.array]], pools: list[mx.array]) -> Seen:
        """Compute every step again from the projections that were made, and compare outputs and what is left."""
        bound = BOUNDS[self._dtype]
        again = self._poisoned(pools[0].shape[2] // PAGE)
        errors = []
        for step, layers in zip(script, made, strict=True):
            worst = mx.array(0.0)
            for number in range(self._layers):
                qkv, got = layers[2 * number], layers[2 * number + 1]
                want, again[number] = attend(
                    qkv, self._constants, again[number], self._meta(step.length), self._heads, use_kernel=False
                )
                worst = mx.maximum(worst, apart(got, want))
            mx.eval(worst, again)
            errors.append(number_of(worst))
        bad = next((number for number, error in enumerate(errors) if not error <= bound), None)
        if bad is not None:
            return Seen(False, len(script), errors[bad], bound, bad)
        left = max(number_of(pools_apart(got, want)) for got, want in zip(pools, again, strict=True))
        return Seen(left <= bound, len(script), max(left, *errors), bound)
