"""Rows of the pool read in order and moved in place, over the stand-in."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from kernels import standin
from kernels.oracle import TYPES, History, draw, same

from worker.kernels import move_rows, read_pages, rope_write, rows
from worker.kernels.rope_write import Heads

AFTER = mx.zeros((3,), dtype=mx.float32)


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 300])
@pytest.mark.parametrize(("dim", "dtype"), [(64, "bfloat16"), (80, "float16"), (256, "float32")])
def test_the_first_positions_come_in_order(count: int, dim: int, dtype: str) -> None:
    known = History(np.random.default_rng(count), 300, 2, dim, TYPES[dtype])
    pool, meta = known.pool(300, [])
    got, _ = standin.run(read_pages.launch(pool, meta, count, AFTER))
    same(got, known.rows[:, :, :count])
    same(read_pages.read_pages(pool, meta, count, AFTER, use_kernel=False), known.rows[:, :, :count])


def test_one_kernel_reads_every_count() -> None:
    pool, meta = History(np.random.default_rng(1), 64, 1, 64, mx.float32).pool(64, [])
    one, other = (read_pages.launch(pool, meta, count, AFTER) for count in (5, 64))
    assert (one.kernel, one.template) == (other.kernel, other.template)


def moved(pool: mx.array, pairs: list[tuple[int, int]]) -> mx.array:
    want = np.array(pool.astype(mx.float32))
    read = {target: want[:, :, source].copy() for source, target in pairs if min(source, target) >= 0}
    for target, row in read.items():
        want[:, :, target] = row
    return mx.array(want).astype(pool.dtype)


PAIRS = {
    "one": [(3, 70)],
    "a swap": [(3, 70), (70, 3)],
    "a page that moves by one": [(slot, slot + 1) for slot in range(32)],
    "left out": [(-1, 5), (6, -1), (0, 1), (-1, -1), (40, 0)],
    "the most": [(slot, 95 - slot) for slot in range(64)][::-1],
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(("dim", "dtype"), [(64, "bfloat16"), (80, "float16"), (256, "float32")])
def test_rows_move_as_if_all_were_read_first(name: str, dim: int, dtype: str) -> None:
    pool = draw(np.random.default_rng(dim), (2, 2, 96, dim), TYPES[dtype])
    moves = mx.array(np.array(PAIRS[name], np.int32).T)
    again, written = standin.run(move_rows.launch(pool, moves), written="pool")
    assert again.tolist() == moves.tolist()
    assert written is not None
    want = moved(pool, PAIRS[name])
    same(written, want)
    again, plain = move_rows.move_rows(pool, moves, use_kernel=False)
    assert again.tolist() == moves.tolist()
    same(plain, want)


@pytest.mark.parametrize("count", [0, 65])
def test_too_many_moves_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="takes 1 to 64"):
        move_rows.launch(mx.zeros((2, 1, 32, 64)), mx.zeros((2, count), dtype=mx.int32))


@pytest.mark.parametrize(("start", "count"), [(0, 512), (512, 64), (256, 256)])
def test_a_prefill_chunk_is_written_in_one_launch_and_read_in_order(start: int, count: int) -> None:
    random = np.random.default_rng(count)
    heads = Heads(heads=2, kv_heads=1, dim=64, rotated=64, norm_eps=1e-6)
    known = History(random, start + count, 1, 64, mx.bfloat16)
    full, meta = known.pool(start + count, [])
    meta[0] = start
    slots = rows.slots(meta, mx.arange(start, start + count, dtype=mx.int32))
    pool = mx.put_along_axis(full, slots[None, None, :, None], mx.array(np.nan).astype(mx.bfloat16), axis=2)
    table = rope_write.constants(
        heads, mx.array(1e4 ** -(np.arange(32) / 32)), *draw(random, (2, 64), mx.bfloat16)
    )
    qkv = draw(random, (count, 4 * 64), mx.bfloat16)
    q, written = standin.run(rope_write.launch(qkv, table, pool, meta, heads), written="pool")
    assert written is not None
    got, _ = standin.run(read_pages.launch(written, meta, start + count, q))
    same(got[:, :, :start], known.rows[:, :, :start])
    assert not mx.isnan(got).any()

    # Rows of a chunk have the bits of rows written one by one.
    for row in (0, 1, 31, count - 1):
        one = mx.array(meta)
        one[0] = start + row
        some, alone = standin.run(rope_write.launch(qkv[row : row + 1], table, pool, one, heads), written="pool")
        assert alone is not None
        same(some[0], q[row])
        same(alone[:, :, slots[row]], got[:, :, start + row])
