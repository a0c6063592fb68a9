"""The first positions of a sequence, gathered from its pages.

Contract: pool T [2, Hkv, slots, D], meta as in `rows`, count positions; out T [2, Hkv, count, D]. The pool may be
written in place by an earlier kernel: `after`, any array that comes from that kernel, is an operand only so that
the read comes after the write. A row of D values is a multiple of 16 bytes.
"""

from __future__ import annotations

from typing import Final

import mlx.core as mx

from worker.kernels import rows
from worker.kernels.dialect import PAGE, Kernel, Launch, chosen

# A thread copies 16 bytes; `span` is the count, in an operand so that one kernel serves every count.
KERNEL: Final = Kernel(
    name="read_pages",
    inputs=("pool", "meta", "span", "after"),
    output="out",
    body=r"""
const int count = span[0], position = (bx * 256 + tid) / WORDS, word = (bx * 256 + tid) % WORDS;
if (position >= count) return;
const long slot = (long)meta[1 + position / PAGE] * PAGE + position % PAGE;
((OUT(uint4))out)[((long)by * count + position) * WORDS + word] =
  ((GLOBAL(uint4))pool)[((long)by * pool_shape[2] + slot) * WORDS + word];
""",
    defines=(("PAGE", str(PAGE)),),
)


def launch(pool: mx.array, meta: mx.array, count: int, after: mx.array) -> Launch:
    """The kernel on the operands of the contract."""
    rows.check_meta(meta)
    planes, dim = 2 * pool.shape[1], pool.shape[3]
    words = dim * pool.dtype.size // 16
    return Launch(
        KERNEL,
        (pool, meta, mx.full((8,), count, dtype=mx.int32), after),
        (("T", pool.dtype), ("WORDS", words)),
        (-(-count * words // 256), planes, 1),
        256,
        (2, pool.shape[1], count, dim),
        pool.dtype,
    )


def reference(pool: mx.array, meta: mx.array, count: int) -> mx.array:
    """The same in plain operations."""
    return mx.take(pool, rows.all_slots(meta)[:count], axis=2)


def read_pages(
    pool: mx.array, meta: mx.array, count: int, after: mx.array, *, use_kernel: bool | None = None
) -> mx.array:
    """K and V of the first *count* positions, T [2, Hkv, count, D]. `use_kernel=False` forces plain operations."""
    target = chosen(use_kernel)
    if target is None or pool.shape[3] * pool.dtype.size % 16 or not count:
        return reference(pool, meta, count)
    return launch(pool, meta, count, after).run(target)
