"""The pool's arrays: rows go where the table says, an update copies nothing but its rows, and no old number leaks."""

from __future__ import annotations

import random
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from worker.kv.pages import PAGE, Copy, runs
from worker.kv.pool import Place, Pool, Shape

NAN = float("nan")
SHAPE = Shape(layers=2, kv_heads=2, dim=64, dtype=mx.float32)
PAGES = 512
LAYER_BYTES = SHAPE.page_bytes * PAGES // SHAPE.layers
ROW_BYTES = SHAPE.page_bytes // PAGE
IN_SEQUENCE = list(range(5, 45))
SCATTERED = random.Random(3).sample(range(PAGES), 40)
TABLES = {"in sequence": IN_SEQUENCE, "two runs": [*range(300, 320), *range(20)], "scattered": SCATTERED}


@pytest.fixture(params=TABLES, ids=list(TABLES))
def table(request):
    return TABLES[request.param]


def numbers(count: int, seed: int = 0, shape: Shape = SHAPE) -> list[mx.array]:
    """Rows T [2, Hkv, count, D] for each layer, evaluated."""
    draw = np.random.default_rng(seed)
    size = (2, shape.kv_heads, count, shape.dim)
    rows = [
        mx.array(draw.standard_normal(size, dtype=np.float32)).astype(shape.dtype) for _ in range(shape.layers)
    ]
    mx.eval(rows)
    return rows


def taken(update: Callable[[], object]) -> int:
    """Bytes that *update* had allocated at most at one time, beyond those in use before it."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    update()
    return max(mx.get_peak_memory() - before, 0)


def same(found: mx.array, wanted: mx.array) -> bool:
    return bool(mx.array_equal(found, wanted).item())


# --- where rows lie


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 65, 500])
@pytest.mark.parametrize("start", [0, 1, 31, 32, 33])
def test_what_is_written_is_read_and_nothing_else(table, start, count):
    pool = Pool(SHAPE, PAGES, fill=NAN)
    before, rows = numbers(start + 3, seed=1), numbers(count, seed=2)
    pool.write(before, table, 0)
    pool.write(rows, table, start)
    for layer, new in enumerate(rows):
        found = pool.read(layer, table, start + count)
        assert found.shape == (2, 2, start + count, 64)
        assert same(found, mx.concatenate([before[layer][:, :, :start], new], axis=2))
        written = mx.isfinite(pool.arrays[layer]).all(axis=(0, 1, 3)).sum().item()
        assert written == max(start + count, start + 3), "no other slot was touched"


def test_a_place_is_one_slice_for_each_run_of_pages():
    assert Place([4, 5, 6, 9], 33, 90).spans == [(5 * PAGE + 1, 63), (9 * PAGE, 27)]
    assert Place([4, 5, 6, 9], 0, 1).spans == [(4 * PAGE, 1)]
    assert Place([7, 6], 31, 2).spans == [(7 * PAGE + 31, 1), (6 * PAGE, 1)]
    with pytest.raises(AssertionError, match="a page for every position"):
        Place([1, 2], 63, 2)
    with pytest.raises(AssertionError, match="a page for every position"):
        Place([1, 2], 3, 0)


def test_pages_in_sequence_are_read_without_a_copy_and_scattered_ones_with_one():
    pool = Pool(SHAPE, PAGES)
    assert taken(lambda: mx.eval(pool.read(0, IN_SEQUENCE, 1000))) == 0
    spread = taken(lambda: mx.eval(pool.read(0, SCATTERED, 1000)))
    assert 1000 * ROW_BYTES // 2 <= spread < 1100 * ROW_BYTES // 2 + 4096


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_copy_brings_the_leading_rows_of_a_page_into_another(dtype):
    shape = Shape(layers=3, kv_heads=1, dim=16, dtype=dtype)
    pool = Pool(shape, 8, fill=NAN)
    rows = numbers(64, shape=shape)
    pool.write(rows, [2, 6], 0)
    pool.copy([Copy(2, 5, 20), Copy(6, 7, 31)])
    for layer, known in enumerate(rows):
        assert same(pool.read(layer, [5], 20), known[:, :, :20])
        assert same(pool.read(layer, [7], 31), known[:, :, 32:63])
        assert same(pool.read(layer, [2, 6], 64), known)
        assert mx.isnan(pool.arrays[layer][:, :, 5 * PAGE + 20 : 6 * PAGE]).all().item()
        assert mx.isnan(pool.arrays[layer][:, :, 8 * PAGE - 1 :]).all().item()


def test_any_order_of_writes_and_copies_keeps_every_row():
    shape = Shape(layers=2, kv_heads=2, dim=8, dtype=mx.float32)
    pool, draw = Pool(shape, 12, fill=NAN), random.Random(7)
    known = [np.full((2, 2, 12 * PAGE, 8), NAN, dtype=np.float32) for _ in range(2)]
    for step in range(150):
        if draw.random() < 0.3:
            source, target = draw.sample(range(12), 2)
            rows = draw.randrange(1, PAGE)
            pool.copy([Copy(source, target, rows)])
            for one in known:
                one[:, :, target * PAGE : target * PAGE + rows] = one[:, :, source * PAGE : source * PAGE + rows]
        else:
            table = draw.sample(range(12), 4)
            start = draw.randrange(3 * PAGE)
            rows = numbers(draw.randrange(1, 4 * PAGE - start), seed=step, shape=shape)
            pool.write(rows, table, start)
            slots = [table[at // PAGE] * PAGE + at % PAGE for at in range(start, start + rows[0].shape[2])]
            for one, new in zip(known, rows, strict=True):
                one[:, :, slots] = np.array(new)
    for array, one in zip(pool.arrays, known, strict=True):
        np.testing.assert_array_equal(np.array(array), one)


def test_rows_of_another_type_are_refused():
    pool = Pool(Shape(1, 1, 4, mx.float16), 1)
    with pytest.raises(AssertionError, match="float32 into a pool of"):
        pool.write([mx.zeros((2, 1, 1, 4))], [0], 0)


# --- what an update costs


def test_the_size_of_a_pool_is_that_of_its_pages():
    before = mx.get_active_memory()
    pool = Pool(SHAPE, PAGES)
    assert pool.nbytes == SHAPE.page_bytes * PAGES == 2 * LAYER_BYTES
    assert pool.nbytes <= mx.get_active_memory() - before < pool.nbytes + 100_000


@pytest.mark.parametrize("start", [0, 17])
def test_a_write_allocates_nothing_of_the_size_of_the_pool(table, start):
    pool, rows = Pool(SHAPE, PAGES), numbers(1000)
    for _ in range(3):
        assert taken(lambda: pool.write(rows, table, start)) < 1000
    # Rows that are still to be computed cost themselves.
    assert taken(lambda: pool.write([2 * row for row in rows], table, start)) < 1100 * ROW_BYTES < LAYER_BYTES // 7


def test_a_write_of_one_row_allocates_nothing_whatever_was_read_before(table):
    pool, row = Pool(SHAPE, PAGES), numbers(1)
    for position in range(990, 1030):
        assert taken(lambda at=position: pool.write(row, table, at)) < 1000
        mx.eval([pool.read(layer, table, position + 1).sum() for layer in range(SHAPE.layers)])


def test_copies_allocate_their_rows_and_nothing_else():
    pool = Pool(SHAPE, PAGES)
    copies = [Copy(source, source + 100, 31) for source in range(50)]
    assert taken(lambda: pool.copy(copies[:1])) < 64 * ROW_BYTES
    assert taken(lambda: pool.copy(copies)) < 64 * ROW_BYTES, "one after the other"
    scattered = [Copy(source, target, 31) for source, target in zip(SCATTERED[:20], SCATTERED[20:], strict=True)]
    assert len(runs([one.target for one in scattered])) > 10
    assert taken(lambda: pool.copy(scattered)) < 64 * ROW_BYTES


@pytest.mark.parametrize("update", ["write", "copy"])
def test_a_second_reference_makes_mlx_copy_a_whole_layer(update):
    """Shows that the counts above can fail, and why nobody may keep a view."""
    pool, rows = Pool(SHAPE, PAGES), numbers(1)
    work = {"write": lambda: pool.write(rows, IN_SEQUENCE, 0), "copy": lambda: pool.copy([Copy(1, 2, 5)])}[update]
    held = pool.read(1, IN_SEQUENCE, 10)
    mx.eval(held)
    assert LAYER_BYTES <= taken(work) < LAYER_BYTES + 64 * ROW_BYTES
    assert mx.all(held == 0).item(), "and the view still shows what was there"
    del held
    assert taken(work) < 64 * ROW_BYTES
