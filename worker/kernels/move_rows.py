"""Rows of the pool from slots to slots, in place: forked pages, tails of shared beginnings, accepted branches.

Contract: pool T [2, Hkv, slots, D]; moves int32 [2, n], slots to read, then slots to write, n in 1..64; a pair
with a negative number is left out. Every row is read before any is written; no slot is written twice. Out: the
moves again: whoever must come after the write takes them as an operand, as does the same move in the next layer's
pool. A row of D values is a multiple of 16 bytes.
"""

from __future__ import annotations

from typing import Final

import mlx.core as mx

from worker.kernels.dialect import Kernel, Launch, chosen

MOST: Final = 64

# A threadgroup has one head of K or V and keeps all of its rows in registers between reading and writing.
KERNEL: Final = Kernel(
    name="move_rows",
    inputs=("pool", "moves"),
    output="again",
    body=r"""
const int n = moves_shape[1], each = (LIMIT * WORDS + 255) / 256;
const long plane = (long)bx * pool_shape[2];
uint4 kept[each];
UNROLL for (int i = 0; i < each; i++) {
  const int row = (i * 256 + tid) / WORDS, word = (i * 256 + tid) % WORDS;
  if (row < n && moves[row] >= 0) kept[i] = ((GLOBAL(uint4))pool)[(plane + moves[row]) * WORDS + word];
}
DEVICE_BARRIER();
UNROLL for (int i = 0; i < each; i++) {
  const int row = (i * 256 + tid) / WORDS, word = (i * 256 + tid) % WORDS;
  if (row < n && moves[row] >= 0 && moves[n + row] >= 0)
    ((OUT(uint4))pool)[(plane + moves[n + row]) * WORDS + word] = kept[i];
}
if (bx == 0 && tid < 2 * n) again[tid] = moves[tid];
""",
)


def launch(pool: mx.array, moves: mx.array) -> Launch:
    """The kernel on the operands of the contract.

    Raises:
        ValueError: More than 64 moves, or none.
    """
    count = moves.shape[1]
    if not 1 <= count <= MOST:
        raise ValueError(f"{count} moves: a launch takes 1 to {MOST}")
    words = pool.shape[3] * pool.dtype.size // 16
    template = (("T", pool.dtype), ("WORDS", words), ("LIMIT", 16 if count <= 16 else MOST))
    return Launch(KERNEL, (pool, moves), template, (2 * pool.shape[1], 1, 1), 256, (2, count), mx.int32)


def reference(pool: mx.array, moves: mx.array) -> mx.array:
    """The same in plain operations: a new pool."""
    slots = pool.shape[2]
    left_out = (moves[0] < 0) | (moves[1] < 0)
    targets = mx.where(left_out, slots, moves[1])
    source = mx.put_along_axis(mx.arange(slots + 1, dtype=mx.int32), targets, mx.maximum(moves[0], 0), axis=0)
    return mx.take(pool, source[:slots], axis=2)


def move_rows(pool: mx.array, moves: mx.array, *, use_kernel: bool | None = None) -> tuple[mx.array, mx.array]:
    """The moves once they are done, and the pool with its rows moved.

    The kernel writes the pool it was given and returns it; the plain operations (`use_kernel=False`) return a new
    one.

    Raises:
        ValueError: More than 64 moves, or none.
    """
    target = chosen(use_kernel)
    if target is None or pool.shape[3] * pool.dtype.size % 16:
        return moves, reference(pool, moves)
    return launch(pool, moves).run(target), pool
