"""What the cases of the kernel sweep stand on: numbers, launches into memory that held NaN, and the judge.

Inputs are made by NumPy from a seed and rounded to the type there; what is wanted is float64 of these very values.
MLX computes little here beside the kernels: copies, selections and comparisons, which it has compiled already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx
import numpy as np

from worker.kernels import dialect
from worker.kernels.dialect import MAX_ROWS, Launch

KINDS = ("float32", "float16", "bfloat16")
TYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
# The largest error by type, relative to the largest value of the row: a few roundings of the type.
BOUND = {"float32": 1e-5, "float16": 2.5e-3, "bfloat16": 2e-2}
EVERY = tuple(range(1, MAX_ROWS + 1))
"""Every row count of a forward."""

Wide = np.ndarray
"""Float64."""


class Numbers:
    """Seeded numbers: in a type on the device, and the same values in float64."""

    def __init__(self, *seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def normal(self, *shape: int, kind: str, scale: float = 1.0) -> tuple[mx.array, Wide]:
        """Normal numbers of *shape*, times *scale*, in the type *kind*."""
        if _noting:
            return mx.zeros(shape, dtype=TYPES[kind]), np.zeros(shape)
        return narrow(self.random.standard_normal(shape, np.float32) * np.float32(scale), kind)

    def tree(self, count: int) -> list[int]:
        """Parents of *count* rows, at random; -1 for a root."""
        return [int(self.random.integers(-1 if row < 2 else 0, row)) if row else -1 for row in range(count)]


def narrow(values: np.ndarray, kind: str) -> tuple[mx.array, Wide]:
    """Float32 *values* rounded to the type *kind*, and what they are then."""
    if kind == "bfloat16":
        bits = values.view(np.uint32)
        halves = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        return mx.array(halves).view(mx.bfloat16), _of_halves(halves)
    own = values.astype(kind)
    return mx.array(own), own.astype(np.float64)


def wide(array: mx.array) -> Wide:
    """The values of an array on the device."""
    if array.dtype == mx.bfloat16:
        return _of_halves(np.array(array.view(mx.uint16)))
    return np.array(array).astype(np.float64)


def _of_halves(halves: np.ndarray) -> Wide:
    return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


_noting: list[dict[object, Launch]] = []


@contextmanager
def noted() -> Iterator[dict[object, Launch]]:
    """Launches are noted instead of run, one of each kernel, and give zeros; numbers are zeros too."""
    found: dict[object, Launch] = {}
    _noting.append(found)
    try:
        yield found
    finally:
        _noting.pop()


def run(launch: Launch) -> mx.array:
    """The output of *launch*, in memory that held NaN before, of integers -1."""
    if _noting:
        kinds = tuple((str(array.dtype), array.ndim) for array in launch.arrays)
        _noting[-1].setdefault((launch.kernel, str(launch.template), kinds, str(launch.dtype)), launch)
        return mx.zeros(launch.shape, dtype=launch.dtype)
    kind = dialect.target()
    assert kind is not None, "kernels run on a GPU"
    return launch.run(kind, -1.0 if launch.dtype == mx.int32 else math.nan)


def groups(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, count) of all groups of each of *counts* rows among sixteen."""
    for count in counts:
        for start in range(MAX_ROWS - count + 1):
            yield start, count


class Judge(Protocol):
    """Who hears of results."""

    def error(self, name: str, kind: str, got: mx.array, want: Callable[[], Wide]) -> None:
        """The result of a kernel, and what makes the right one."""

    def bits(self, name: str, got: mx.array, want: mx.array) -> None:
        """Two results that shall be the same bits."""

    def wrong(self, name: str, count: Callable[[], int]) -> None:
        """What counts the places where a promise is not kept."""


class Silent:
    """Listens to nothing: for a run that only shows which kernels there are."""

    def error(self, name: str, kind: str, got: mx.array, want: Callable[[], Wide]) -> None:
        """As in `Judge`."""

    def bits(self, name: str, got: mx.array, want: mx.array) -> None:
        """As in `Judge`."""

    def wrong(self, name: str, count: Callable[[], int]) -> None:
        """As in `Judge`."""


@dataclass
class Findings:
    """The largest error by name, in bounds of its type, and how many values by name were wrong, of how many."""

    errors: dict[str, float] = field(default_factory=dict)
    differing: dict[str, int] = field(default_factory=dict)
    compared: int = 0
    _pending: list[tuple[str, mx.array]] = field(default_factory=list)

    def error(self, name: str, kind: str, got: mx.array, want: Callable[[], Wide]) -> None:
        """The largest error of a row relative to the row's largest value; what is no number is infinitely far."""
        have, true = wide(got), want()
        size = np.maximum(np.abs(true).max(-1), 1e-3)
        worst = float((np.abs(have - true).max(-1) / size).max()) / BOUND[kind]
        self.errors[name] = max(self.errors.get(name, 0.0), worst if math.isfinite(worst) else math.inf)

    def bits(self, name: str, got: mx.array, want: mx.array) -> None:
        """Counted when the case is settled."""
        assert got.shape == want.shape, "results of the same rows"
        whole = {2: mx.uint16, 4: mx.uint32}[got.dtype.size]
        self.compared += got.size
        self._pending.append((name, (got.view(whole) != want.view(whole)).sum()))

    def wrong(self, name: str, count: Callable[[], int]) -> None:
        """Added up."""
        self.differing[name] = self.differing.get(name, 0) + count()

    def settle(self) -> None:
        """Count what was compared since the last call."""
        mx.eval([count for _, count in self._pending])
        for name, count in self._pending:
            self.differing[name] = self.differing.get(name, 0) + int(count.item())
        self._pending.clear()

    @property
    def right(self) -> bool:
        """Whether all is within its bound, and nothing differs."""
        return max(self.errors.values(), default=0.0) <= 1.0 and not any(self.differing.values())


class Case(Protocol):
    """Operands of one shape and type, and what is to be shown of them."""

    def check(self, judge: Judge) -> None:
        """Run the kernels, and tell *judge* of it."""
