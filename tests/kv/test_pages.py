"""Page accounting by itself: reserving, growing, rolling back, forking, and books that can be proved."""

from __future__ import annotations

import pytest

from worker.kv.pages import PAGE, Copy, Pages, PoolTooSmallError, pages_for, runs

EDGES = [0, 1, 31, 32, 33, 63, 64, 65]


@pytest.fixture
def pages():
    pages = Pages(8)
    yield pages
    pages.check()
    for sequence in list(pages.sequences):
        sequence.release()
    pages.check()
    assert pages.free == pages.count, "every page came back"


@pytest.mark.parametrize(("tokens", "count"), list(zip(EDGES, [0, 1, 1, 1, 2, 2, 2, 3], strict=True)))
def test_a_sequence_reserves_the_pages_its_tokens_fill(pages, tokens, count):
    sequence = pages.reserve(tokens)
    assert pages_for(tokens) == count == len(sequence.table) == pages.count - pages.free
    assert sequence.capacity == count * PAGE
    assert (sequence.length, sequence.exact) == (0, 0)
    sequence.append(tokens, prompt=True)
    assert (sequence.length, sequence.exact) == (tokens, tokens)


def test_the_lowest_pages_are_given_first_and_lie_in_sequence(pages):
    first, second = pages.reserve(64), pages.reserve(96)
    assert (first.table, second.table) == ([0, 1], [2, 3, 4])
    first.release()
    assert pages.reserve(33).table == [0, 1]


def test_a_sequence_gets_one_run_where_there_is_one_even_if_lower_pages_are_free(pages):
    small, middle = pages.reserve(32), pages.reserve(32)
    small.release()
    assert pages.reserve(96).table == [2, 3, 4]
    assert middle.table == [1]


def test_a_growing_sequence_continues_right_behind_its_last_page(pages):
    low, sequence = pages.reserve(32), pages.reserve(32)
    low.release()
    sequence.reserve(96)
    assert sequence.table == [1, 2, 3]
    sequence.reserve(10)
    assert sequence.table == [1, 2, 3]


def test_a_growing_sequence_prefers_the_pages_behind_it_to_lower_ones(pages):
    low, sequence = pages.reserve(96), pages.reserve(32)
    low.release()
    sequence.reserve(96)
    assert sequence.table == [3, 4, 5]


def test_a_torn_pool_gives_the_longest_runs_first(pages):
    held = [pages.reserve(32) for _ in range(8)]
    for place in (0, 2, 3, 5, 6, 7):
        held[place].release()
    sequence = pages.reserve(6 * 32)
    assert sequence.table == [5, 6, 7, 2, 3, 0]
    assert runs(sequence.table) == [(5, 3), (2, 2), (0, 1)]


def test_runs_tell_a_reader_which_slices_to_read():
    assert runs([]) == []
    assert runs([4]) == [(4, 1)]
    assert runs([4, 5, 6]) == [(4, 3)]
    assert runs([6, 5, 4, 5]) == [(6, 1), (5, 1), (4, 2)]


def test_a_pool_that_is_too_small_refuses_with_numbers_and_changes_nothing(pages):
    sequence = pages.reserve(5 * 32)
    with pytest.raises(PoolTooSmallError, match="needs 4 more pages") as refused:
        pages.reserve(3 * 32 + 1)
    assert (refused.value.needed, refused.value.free, refused.value.count) == (4, 3, 8)
    with pytest.raises(PoolTooSmallError):
        sequence.reserve(8 * 32 + 1)
    assert (pages.free, sequence.table, len(pages.sequences)) == (3, [0, 1, 2, 3, 4], 1)


def test_a_pool_without_pages_is_refused():
    with pytest.raises(ValueError, match="at least one page"):
        Pages(0)


def test_more_rows_than_reserved_are_a_fault_of_the_caller(pages):
    sequence = pages.reserve(33)
    sequence.append(64, prompt=True)
    with pytest.raises(AssertionError):
        sequence.append(1, prompt=False)


@pytest.mark.parametrize("length", EDGES)
def test_rejected_drafts_are_rolled_back_without_giving_pages_up(pages, length):
    sequence = pages.reserve(96)
    sequence.append(length, prompt=True)
    sequence.append(16, prompt=False)
    assert sequence.truncate(length) == ()
    assert (sequence.length, sequence.exact, sequence.capacity) == (length, length, 96)


def test_rows_after_the_first_answer_row_are_never_exact(pages):
    sequence = pages.reserve(96)
    sequence.append(10, prompt=True)
    sequence.append(2, prompt=False)
    sequence.append(20, prompt=True)
    assert (sequence.length, sequence.exact) == (32, 10)
    sequence.truncate(10)
    sequence.append(5, prompt=True)
    assert sequence.exact == 15


@pytest.mark.parametrize("length", EDGES)
def test_a_fork_shares_full_pages_and_copies_the_last_one(pages, length):
    sequence = pages.reserve(96)
    sequence.append(length, prompt=True)
    full, rest = divmod(length, PAGE)
    twin, copies = sequence.fork(96)
    assert twin.table[:full] == sequence.table[:full]
    assert not set(twin.table[full:]) & set(sequence.table)
    assert copies == ((Copy(sequence.table[full], twin.table[full], rest),) if rest else ())
    assert (twin.length, twin.exact, twin.capacity) == (length, length, 96)
    pages.check()
    sequence.append(96 - length, prompt=False)
    assert twin.length == length
    sequence.release()
    twin.append(96 - length, prompt=False)


def test_a_fork_has_room_for_the_rows_it_begins_with(pages):
    sequence = pages.reserve(96)
    sequence.append(70, prompt=True)
    twin, _ = sequence.fork(0)
    assert (twin.length, twin.capacity) == (70, 96)


def test_a_fork_that_does_not_fit_changes_nothing(pages):
    sequence = pages.reserve(6 * 32)
    sequence.append(40, prompt=True)
    with pytest.raises(PoolTooSmallError):
        sequence.fork(6 * 32)
    assert (pages.free, len(pages.sequences), sequence.fixed) == (2, 1, 0)


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 63])
def test_taking_back_shared_rows_leaves_them_to_the_other(pages, length):
    sequence = pages.reserve(64)
    sequence.append(64, prompt=True)
    twin, _ = sequence.fork(64)
    theirs = list(twin.table)
    copies = sequence.truncate(length)
    full, rest = divmod(length, PAGE)
    assert copies == ((Copy(theirs[full], sequence.table[full], rest),) if rest else ())
    assert sequence.table[:full] == theirs[:full] == twin.table[:full]
    assert not set(sequence.table[full:]) & set(theirs)
    pages.check()
    sequence.append(64 - length, prompt=False)
    assert (twin.table, twin.length, twin.exact) == (theirs, 64, 64)


def test_taking_back_rows_costs_nothing_once_the_other_is_gone(pages):
    sequence = pages.reserve(8 * 32)
    sequence.append(64, prompt=True)
    twin, _ = sequence.fork(0)
    twin.release()
    assert sequence.truncate(31) == ()
    assert sequence.table == list(range(8))


def test_taking_back_shared_rows_of_a_full_pool_is_refused_and_changes_nothing(pages):
    sequence = pages.reserve(8 * 32)
    sequence.append(8 * 32, prompt=True)
    sequence.fork(8 * 32)
    with pytest.raises(PoolTooSmallError):
        sequence.truncate(31)
    assert (sequence.length, sequence.table) == (256, list(range(8)))


def test_a_released_sequence_is_not_used_again(pages):
    sequence = pages.reserve(64)
    sequence.release()
    for use in (sequence.release, lambda: sequence.append(0, prompt=True), lambda: sequence.fork(1)):
        with pytest.raises(AssertionError, match="released"):
            use()
    for use in (lambda: sequence.reserve(1), lambda: sequence.truncate(0)):
        with pytest.raises(AssertionError, match="released"):
            use()


def test_a_position_has_its_slot_in_the_page_of_its_table(pages):
    pages.reserve(32)
    sequence = pages.reserve(64)
    assert [sequence.slot(position) for position in (0, 31, 32, 63)] == [32, 63, 64, 95]


def lose_a_page(pages):
    pages._references[7] = 1


def count_a_holder_too_few(pages):
    pages._references[0] -= 1


def free_a_held_page(pages):
    pages._free.give(0)


def list_a_page_twice(pages):
    one = next(iter(pages.sequences))
    pages.hold(one.table[0])
    one.table.append(one.table[0])


def share_a_page_that_is_written(pages):
    one = next(iter(pages.sequences))
    twin = pages.reserve(0)
    twin.table.append(one.table[0])
    pages.hold(one.table[0])


def write_beyond_the_reserve(pages):
    next(iter(pages.sequences)).length += 100


def shift_a_shared_page(pages):
    one = next(iter(pages.sequences))
    one.length = 64
    twin, _ = one.fork(64)
    twin.table.reverse()


@pytest.mark.parametrize(
    "fault",
    [
        lose_a_page,
        count_a_holder_too_few,
        free_a_held_page,
        list_a_page_twice,
        share_a_page_that_is_written,
        write_beyond_the_reserve,
        shift_a_shared_page,
    ],
)
def test_false_books_are_found(fault):
    pages = Pages(8)
    pages.reserve(64).append(40, prompt=True)
    pages.check()
    fault(pages)
    with pytest.raises(AssertionError):
        pages.check()
