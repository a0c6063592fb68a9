"""A layer's cache as mlx-lm's models call it: the same as mlx-lm's own, whatever pages it lies in."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, can_trim_prompt_cache, trim_prompt_cache

from worker.kv.cache import PagedCache, Table
from worker.kv.pages import PAGE, Pages, Sequence
from worker.kv.pool import Pool, Shape

NAN = float("nan")
HEADS, DIM = 2, 8


def torn(pages: Pages, tokens: int, *, whole: bool) -> Sequence:
    """A sequence in one run of pages, or in as many runs as it has pages."""
    if whole:
        return pages.reserve(tokens)
    singles = [pages.reserve(PAGE) for _ in range(pages.count)]
    for place in range(0, pages.count, 2):
        singles[place].release()
    sequence = pages.reserve(tokens)
    assert sequence.table[1] != sequence.table[0] + 1
    return sequence


class Pair:
    """Our cache and mlx-lm's, told the same."""

    def __init__(self, *, whole: bool, count: int = 32) -> None:
        self.pages = Pages(count)
        self.pool = Pool(Shape(2, HEADS, DIM, mx.float32), count, fill=NAN)
        self.sequence = torn(self.pages, 300, whole=whole)
        self.table = Table(self.sequence)
        self.ours, self.theirs = PagedCache(self.pool, 1, self.table), KVCache()
        self.draw = np.random.default_rng(4)

    def update(self, rows: int) -> None:
        keys, values = (
            mx.array(self.draw.standard_normal((1, HEADS, rows, DIM), dtype=np.float32)) for _ in range(2)
        )
        self.table.refresh()
        found, known = self.ours.update_and_fetch(keys, values), self.theirs.update_and_fetch(keys, values)
        for one, other in zip(found, known, strict=True):
            assert one.shape == other.shape
            assert mx.array_equal(one, other).item()

    def check(self) -> None:
        assert self.ours.offset == self.ours.size() == self.theirs.offset
        assert self.ours.empty() == (self.ours.offset == 0)
        assert self.ours.is_trimmable()
        if not self.ours.empty():
            for one, other in zip(self.ours.keys_and_values(), self.theirs.keys_and_values(), strict=True):
                assert mx.array_equal(one, other).item()
        assert mx.isnan(self.pool.arrays[0]).all().item(), "the other layer is not touched"


@pytest.fixture(params=[True, False], ids=["in sequence", "scattered"])
def pair(request):
    return Pair(whole=request.param)


def test_it_holds_what_mlx_lms_own_cache_holds(pair):
    draw = random.Random(5)
    pair.check()
    for _ in range(120):
        rows = draw.choice([1, 1, 1, 2, 16, 31, 32, 33, 70])
        if pair.ours.offset + rows > 300 or draw.random() < 0.2:
            count = draw.choice([0, 1, 5, 32, 33, 400])
            assert pair.ours.trim(count) == pair.theirs.trim(count)
        else:
            pair.update(rows)
        pair.check()


def test_it_is_true_and_makes_the_masks_that_mlx_lms_own_cache_makes(pair):
    """mlx-lm asks `if cache`: a cache of length nought must not be false."""
    for rows in (1, 7):
        for window in (None, 3):
            for array in (False, True):
                hidden = mx.zeros((1, rows, 4))
                ours, theirs = (
                    create_attention_mask(hidden, one, window_size=window, return_array=array)
                    for one in (pair.ours, pair.theirs)
                )
                if isinstance(theirs, mx.array):
                    assert mx.array_equal(ours, theirs).item()
                else:
                    assert ours == theirs
        pair.update(40)


def test_mlx_lms_helpers_trim_it(pair):
    pair.update(40)
    assert can_trim_prompt_cache([pair.ours])
    assert trim_prompt_cache([pair.ours], 15) == 15
    assert pair.ours.offset == 25


def test_its_state_can_be_evaluated_and_its_size_is_told(pair):
    assert pair.ours.state == (None, None, 0)
    mx.eval(pair.ours.state)
    pair.update(33)
    keys, values, offset = pair.ours.state
    mx.eval(keys, values)
    assert (keys.shape, values.shape, offset) == ((1, HEADS, 33, DIM), (1, HEADS, 33, DIM), 33)
    assert pair.ours.nbytes == 10 * PAGE * 2 * HEADS * DIM * 4, "the ten pages reserved, in one layer"
    assert not hasattr(pair.ours, "bits"), "mlx-lm takes a cache with bits for a quantized one"


def test_a_new_cache_goes_on_behind_the_rows_the_sequence_has(pair):
    pair.update(45)
    pair.sequence.append(45, prompt=True)
    pair.ours = PagedCache(pair.pool, 1, pair.table)
    pair.check()
    pair.update(3)
    pair.check()


def test_it_reads_from_the_pages_it_has_now(pair):
    """A table changes when rows are taken back that others rely on."""
    pair.update(70)
    pair.sequence.append(70, prompt=True)
    twin, copies = pair.sequence.fork(70)
    pair.pool.copy(copies)
    old = list(pair.sequence.table)
    pair.pool.copy(pair.sequence.truncate(40))
    assert pair.sequence.table != old
    pair.theirs.trim(30)
    pair.ours.trim(30)
    pair.update(1)
    pair.check()
    assert twin.table[:2] == old[:2]


@pytest.mark.parametrize("whole", [True, False])
def test_a_decode_evaluated_step_by_step_writes_in_place(whole):
    pair = Pair(whole=whole, count=1024)
    layer_bytes = pair.pool.arrays[1].nbytes
    row = mx.ones((1, HEADS, 1, DIM))
    for _ in range(300):
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        pair.table.refresh()
        keys, values = pair.ours.update_and_fetch(row, row)
        out = mx.fast.scaled_dot_product_attention(row, keys, values, scale=1.0)
        del keys, values
        mx.eval(out)
        assert mx.get_peak_memory() - before < layer_bytes // 10
    # And with views of the step before still alive it copies: the count can fail.
    keys, values = pair.ours.keys_and_values()
    mx.eval(keys, values)
    pair.ours.trim(1)
    mx.reset_peak_memory()
    mx.eval(pair.ours.update_and_fetch(row, row))
    assert (mx.get_peak_memory() - before > layer_bytes) == whole, "what was gathered is no view"


def test_only_one_sequence_and_keys_like_values_are_taken(pair):
    one, wide, two = mx.zeros((1, HEADS, 1, DIM)), mx.zeros((1, HEADS, 1, 2 * DIM)), mx.zeros((2, HEADS, 1, DIM))
    with pytest.raises(AssertionError, match="of one shape"):
        pair.ours.update_and_fetch(one, wide)
    with pytest.raises(AssertionError, match="one sequence"):
        pair.ours.update_and_fetch(two, two)
