"""What the kernels compute, in float64 NumPy, written from the contracts; and the inputs of the tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from worker.kernels.dialect import MAX_ROWS, PAGE

TYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
# The largest error by type, relative to the largest value of the row: a few roundings of the type.
BOUND = {mx.float32: 1e-5, mx.float16: 2.5e-3, mx.bfloat16: 2e-2}


def wide(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def bits(array: mx.array) -> np.ndarray:
    return np.array(array.view({2: mx.uint16, 4: mx.uint32}[array.dtype.size]))


def close(got: mx.array, want: np.ndarray, slack: float = 1) -> None:
    """Within *slack* times the bound of its type, row by row; NaN is never close."""
    have = wide(got)
    assert have.shape == want.shape
    error = np.abs(have - want).max(-1) / np.maximum(np.abs(want).max(-1), 1e-3)
    assert (error <= slack * BOUND[got.dtype]).all(), (
        f"relative error {np.nanmax(error):.2e}, NaN: {np.isnan(have).any()}"
    )


def same(one: mx.array, other: mx.array) -> None:
    assert (bits(one) == bits(other)).all(), f"{(bits(one) != bits(other)).sum()} values differ in their bits"


def draw(random: np.random.Generator, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    return mx.array(random.standard_normal(shape).astype(np.float32)).astype(dtype)


def paths(parents: Sequence[int]) -> list[list[int]]:
    """Each row's path, from the root to the row itself."""
    found: list[list[int]] = []
    for row, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), row])
    return found


def random_tree(random: np.random.Generator, rows: int) -> list[int]:
    return [int(random.integers(-1 if row < 2 else 0, row)) if row else -1 for row in range(rows)]


@dataclass
class History:
    """A sequence of known keys and values, laid out in a pool with a shuffled table; the other slots hold NaN."""

    random: np.random.Generator
    positions: int
    kv_heads: int
    dim: int
    dtype: mx.Dtype
    rows: mx.array = field(init=False)

    def __post_init__(self) -> None:
        self.rows = draw(self.random, (2, self.kv_heads, self.positions, self.dim), self.dtype)

    def pool(self, length: int, new: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Pool and meta: the first *length* positions, then for each number in *new* the row of that position."""
        pages = max(7, -(-(length + MAX_ROWS) // PAGE))
        table = self.random.permutation(pages + 2)[:pages].astype(np.int32)
        order = [*range(length), *new]
        pool = np.full((2, self.kv_heads, (pages + 2) * PAGE, self.dim), np.nan, np.float32)
        at = table[np.arange(len(order)) // PAGE] * PAGE + np.arange(len(order)) % PAGE
        pool[:, :, at] = np.array(self.rows.astype(mx.float32))[:, :, order]
        return mx.array(pool).astype(self.dtype), mx.array(np.array([length, *table], np.int32))


def attention(query: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float) -> np.ndarray:
    """One row: query [H, D], keys and values [Hkv, n, D]; [H, D]."""
    group = query.shape[0] // keys.shape[0]
    scores = np.einsum("hd,hnd->hn", query, np.repeat(keys, group, 0)) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hn,hnd->hd", weights / weights.sum(-1, keepdims=True), np.repeat(values, group, 0))
