"""Prompt lookup: the longest and latest match, against a search of the whole text; what it costs; where it forks."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from worker.speculation.draft import MAX_NODES, Proposal
from worker.speculation.ngram import LONG, SHORT, Ngram

ENDLESS = {"tries": 10**6, "longest": 10**6}


def match(text: list[int]) -> tuple[int, int]:
    """The place behind the longest earlier occurrence of the last ids, the latest of equally long ones; its length."""
    place, length = 0, 0
    for end in range(1, len(text)):
        same = 0
        while same < end and text[end - 1 - same] == text[len(text) - 1 - same]:
            same += 1
        if same >= max(SHORT, length):
            place, length = end, same
    return place, length


def goes_on(text: list[int], place: int, count: int) -> list[int]:
    ids = list(text)
    for _ in range(count):
        ids.append(ids[place])
        place += 1
    return ids[len(text) :]


def texts(letters: int) -> st.SearchStrategy[list[int]]:
    """Random texts, and texts of pieces that come again with little changes."""
    ids = st.integers(0, letters - 1)
    pieces = st.lists(ids, min_size=1, max_size=12)
    repeated = st.tuples(st.lists(pieces, min_size=1, max_size=3), st.lists(st.integers(0, 2), max_size=12))
    return st.lists(ids, max_size=80) | repeated.map(
        lambda one: [x for at in one[1] for x in one[0][at % len(one[0])]]
    )


@settings(max_examples=300)
@given(
    st.integers(2, 6).flatmap(texts),
    st.integers(0, 40),
    st.integers(1, MAX_NODES),
    st.randoms(use_true_random=False),
)
def test_it_proposes_what_followed_the_longest_and_latest_match(text, prompt, limit, luck):
    drafter = Ngram(**ENDLESS)
    drafter.begin(text[:prompt], None)
    at = min(prompt, len(text))
    while True:
        # Not at every place: between proposals ids come one by one, or several at once.
        place, length = match(text[:at])
        proposal = drafter.propose(limit, 0)
        if not length:
            assert proposal == Proposal()
        else:
            count = min(limit, 2 * length + 1)
            assert list(proposal.draft.tokens) == goes_on(text[:at], place, count)
            assert proposal.draft.is_chain
            assert proposal.margins == tuple(float(length + depth) for depth in range(count))
        if at >= len(text):
            return
        step = luck.randrange(1, 5)
        drafter.extend(text[at : at + step])
        at = min(at + step, len(text))


@given(texts(3), st.integers(1, 4))
def test_a_search_looks_at_the_latest_places_of_6_ids_and_then_of_2(text, tries):
    drafter = Ngram(tries=tries, longest=10**6)
    drafter.begin(text)
    found = []
    for size in (LONG, SHORT):
        ends = [
            end
            for end in range(len(text) - 1, size - 1, -1)
            if len(text) > size and text[end - size : end] == text[-size:]
        ]
        found += ends[:tries]
    length, wanted = 0, None
    for end in found:
        same = 0
        while same < end and text[end - 1 - same] == text[len(text) - 1 - same]:
            same += 1
        if same > length:
            length, wanted = same, end
    proposal = drafter.propose(4, 0)
    assert list(proposal.draft.tokens) == ([] if wanted is None else goes_on(text, wanted, 4))


@given(st.integers(2, 4).flatmap(texts), st.integers(1, MAX_NODES), st.integers(1, 3))
@example([0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0], 10, 3)
def test_forks_take_other_ways_that_the_text_took_before_and_never_more_than_asked(text, limit, forks):
    drafter = Ngram()
    drafter.begin(text)
    plain, proposal = drafter.propose(limit, 0), drafter.propose(limit, forks)
    draft = proposal.draft
    assert len(draft) <= limit
    assert bool(len(draft)) == bool(len(plain.draft))
    assert draft.tokens[: draft.trunk] == plain.draft.tokens[: draft.trunk]
    assert proposal.margins == plain.margins
    twice = [row for row in range(draft.width) if draft.parents.count(row) > 1]
    assert sum(draft.parents.count(row) - 1 for row in twice) <= forks
    paths = draft.paths()
    turned = [
        draft.depths[row - 1]
        for row in range(1, draft.width)
        if row > draft.trunk and draft.parents[row - 1] <= draft.trunk and draft.parents[row - 1] != row - 1
    ]
    assert sorted(turned) == sorted(depth for depth in proposal.turns[: len(turned)])
    for path in paths[1:]:
        ids = [draft.tokens[row - 1] for row in path[1:]]
        # Some occurrence of the last two ids goes on so; what begins at its end goes on with itself.
        ends = [end for end in range(SHORT, len(text)) if text[end - SHORT : end] == text[-SHORT:]]
        assert any(goes_on(text, end, len(ids)) == ids for end in ends)


def test_a_fork_and_the_trunk_are_both_there_where_a_text_went_on_in_two_ways():
    drafter = Ngram()
    drafter.begin([1, 2, 3, 7, 8, 9, 1, 2, 3, 4, 5, 6, 1, 2, 3])
    proposal = drafter.propose(10, 1)
    assert proposal.draft.tokens == (4, 5, 6, 1, 2, 3, 4, 7, 8, 9)
    assert proposal.draft.parents == (0, 1, 2, 3, 4, 5, 6, 0, 8, 9)
    assert proposal.turns == (1,)


def test_nothing_is_proposed_behind_one_known_id_or_of_another_job():
    drafter = Ngram()
    drafter.begin([1, 2, 3, 1])
    assert drafter.propose(5, 0) == Proposal()
    drafter.extend([2])
    assert drafter.propose(5, 0).draft.tokens == (3, 1, 2, 3, 1)
    assert drafter.propose(0, 0) == Proposal()
    drafter.end()
    drafter.begin([])
    assert drafter.propose(5, 2) == Proposal()
    drafter.extend([1, 2])
    assert drafter.propose(5, 2) == Proposal()


def test_ids_of_any_size_are_told_apart():
    drafter = Ngram()
    drafter.begin([2**21 + 5, 7, 9, 5, 7])
    assert drafter.propose(5, 0) == Proposal()


@pytest.mark.parametrize("kind", ["random", "one id", "period", "two ids"])
def test_the_work_of_an_id_does_not_grow_with_the_text(kind):
    """Counted, not timed: comparisons of ids, of which a search makes at most tries * longest for each table."""
    luck = random.Random(7)
    ids = {
        "random": lambda at: luck.randrange(5000),
        "one id": lambda at: 1,
        "period": lambda at: at % 40 if at % 97 else luck.randrange(40),
        "two ids": lambda at: luck.randrange(2),
    }[kind]
    drafter = Ngram()
    drafter.begin([])
    worst, totals = 0, []
    for at in range(16_000):
        before = drafter.compared
        drafter.extend([ids(at)])
        drafter.propose(15, 0)
        worst = max(worst, drafter.compared - before)
        if at in (3_999, 7_999, 15_999):
            totals.append(drafter.compared)
    assert worst <= 2 * drafter.tries * (drafter.longest + 1) + 1
    assert totals[2] - totals[1] <= 1.2 * 2 * (totals[1] - totals[0]) + 100


def test_its_memory_is_bounded_by_bytes_for_each_id_and_by_the_span():
    luck = random.Random(3)
    tracemalloc.start()
    try:
        drafter = Ngram(span=2_000)
        drafter.begin([luck.randrange(50_000) for _ in range(40_000)])
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held <= 40_000 * 20 + 2 * 2_000 * 2 * 200
    for index in (drafter._long, drafter._short):
        assert len(index.young) <= 2_000
        assert len(index.old) <= 2_000


def test_what_fell_out_of_the_span_is_forgotten_and_the_rest_is_found():
    drafter = Ngram(span=50)
    drafter.begin(list(range(500)))
    drafter.extend([3, 4, 5])
    assert drafter.propose(3, 0) == Proposal()
    drafter.extend([470, 471])
    assert drafter.propose(3, 0).draft.tokens == (472, 473, 474)
