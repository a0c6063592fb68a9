"""What is forgotten first, what is not forgotten at all, and what a job may claim of a pool full of stored pages."""

from __future__ import annotations

import pytest
from kv.rig import PAGE_BYTES, Rig, text

from worker.kv.pages import PAGE, Pages, PoolTooSmallError
from worker.kv.prefix import PrefixIndex


@pytest.fixture
def rig():
    """Twelve pages, of which the index may keep all."""
    rig = Rig(12, 12)
    yield rig
    rig.check()
    for run in list(rig.runs):
        rig.end(run, store=False)
    rig.clear()
    rig.check()
    assert rig.pages.free == rig.pages.count, "every page came back"


def test_the_page_used_longest_ago_is_forgotten_first():
    rig = Rig(20, 4)
    for seed in (1, 2):
        rig.answer(text(seed, 64))
    rig.answer(text(1, 64))
    rig.answer(text(3, 64))
    cached = {seed: rig.index.lookup(text(seed, 64), owner=b"", cache=True).length for seed in (1, 2, 3)}
    assert cached == {1: 63, 2: 0, 3: 63}
    assert rig.index.figures.evicted_pages == 2


def test_reading_a_page_counts_as_use_even_if_the_job_fails():
    rig = Rig(20, 4)
    for seed in (1, 2):
        rig.answer(text(seed, 64))
    rig.end(rig.open(text(1, 64)), store=False)
    rig.answer(text(3, 64))
    assert rig.index.lookup(text(1, 64), owner=b"", cache=True).length == 63
    assert rig.index.lookup(text(2, 64), owner=b"", cache=True).length == 0


def test_a_page_is_not_forgotten_for_the_one_that_goes_on_from_it():
    rig = Rig(20, 1)
    short, long = rig.open(text(1, 32)), rig.open(text(1, 64))
    rig.read(short, 32)
    rig.end(short)
    rig.read(long, 64)
    assert rig.store(long) == 32
    rig.check()


def test_a_page_is_not_forgotten_before_one_that_a_running_sequence_holds():
    rig = Rig(6, 2)
    short, long = rig.open(text(1, 32)), rig.open(text(1, 64))
    rig.read(short, 32)
    rig.end(short)
    rig.read(long, 64)
    assert rig.store(long) == 64
    rig.answer(text(3, 32))
    assert rig.index.lookup(text(1, 64), owner=b"", cache=True).length == 63
    assert (rig.pages.free, rig.room()) == (3, 3 * PAGE)
    assert rig.open(text(2, 32), 3 * PAGE) is None
    assert rig.open(text(2, 32), 2 * PAGE) is not None
    rig.check()


def test_leaves_are_forgotten_before_the_beginning_they_stand_on():
    rig = Rig(20, 5)
    for tail in (1, 2):
        rig.answer(text(9, 64) + text(tail, 32))
    rig.answer(text(8, 64))
    assert rig.index.lookup(text(9, 65), owner=b"", cache=True).length == 64
    assert rig.index.lookup(text(9, 64) + text(1, 33), owner=b"", cache=True).length == 64
    assert rig.index.lookup(text(9, 64) + text(2, 33), owner=b"", cache=True).length == 96
    rig.check()


def test_a_sequence_above_the_limit_keeps_its_beginning():
    rig = Rig(20, 3)
    rig.answer(text(1, 40))
    rig.answer(text(2, 200))
    assert rig.index.lookup(text(2, 200), owner=b"", cache=True).length == 96
    assert rig.bytes_held == 3 * PAGE_BYTES


def test_a_limit_below_one_page_switches_the_index_off():
    rig = Rig(20, 0)
    rig.answer(text(1, 40))
    assert rig.answer(text(1, 40)).cached == 0
    assert rig.pages.free == 20


def test_pages_that_a_running_sequence_holds_are_not_forgotten():
    rig = Rig(20, 2)
    rig.answer(text(1, 64))
    run = rig.open(text(1, 65), 10)
    rig.answer(text(2, 64))
    assert rig.index.lookup(text(1, 65), owner=b"", cache=True).length == 64
    assert rig.index.lookup(text(2, 64), owner=b"", cache=True).length == 0
    rig.end(run, store=False)
    rig.answer(text(2, 64))
    assert rig.index.lookup(text(2, 64), owner=b"", cache=True).length == 63


def test_stored_pages_make_room_for_a_job_that_needs_the_pool(rig):
    for seed in range(6):
        rig.answer(text(seed, 64))
    assert (rig.pages.free, rig.room()) == (0, 12 * PAGE)
    run = rig.open(text(5, 64), 10 * PAGE)
    assert run.opened.cached == 32, "a copy of the second page would be one page too many"
    assert len(run.sequence.table) == 12
    rig.check()


def test_a_job_as_large_as_the_pool_is_never_refused_for_what_is_stored(rig):
    rig.answer(text(1, 12 * PAGE))
    for length in (12 * PAGE, 12 * PAGE - 1, 11 * PAGE):
        run = rig.open(text(1, length), 12 * PAGE - length)
        assert run is not None
        rig.read(run, length)
        rig.end(run)
        rig.check()


def test_a_refusal_counts_what_could_be_had(rig):
    rig.answer(text(1, 64))
    rig.open(text(2, 200), 24)
    with pytest.raises(PoolTooSmallError) as refused:
        rig.index.open(text(1, 64), 6 * PAGE, owner=b"", cache=True)
    assert (refused.value.needed, refused.value.free, refused.value.count) == (5, 4, 12)
    assert rig.index.pages_held == 2
    assert rig.room() == 5 * PAGE


def test_settings_without_sense_are_refused():
    for page_bytes, limit_bytes in ((0, 5), (5, -1)):
        with pytest.raises(ValueError, match="bytes a page"):
            PrefixIndex(Pages(1), page_bytes=page_bytes, limit_bytes=limit_bytes)


def test_memory_of_the_index_is_flat_over_many_owners():
    rig = Rig(6, 3)
    for seed in range(50):
        rig.answer(text(seed, 40), owner=b"%d" % seed)
    assert len(rig.index._roots) <= 3
    assert rig.index.pages_held == 3
