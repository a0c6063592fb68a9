"""What is reused of an earlier prompt, and what never is."""

from __future__ import annotations

import pytest
from kv.rig import Rig, text

from worker.kv import tree
from worker.kv.pages import PAGE, Copy
from worker.kv.prefix import Match

EDGES = [0, 1, 31, 32, 33, 63, 64, 65]


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


@pytest.mark.parametrize("length", EDGES)
def test_the_same_prompt_again_reads_only_its_last_id(rig, length):
    prompt = text(1, length)
    assert rig.answer(prompt).cached == 0
    again = rig.answer(prompt)
    assert again.cached == max(length - 1, 0)
    assert again.exact
    assert rig.index.pages_held == -(-length // PAGE)


@pytest.mark.parametrize("length", EDGES)
@pytest.mark.parametrize("more", [1, 31, 32, 33])
def test_a_longer_prompt_reuses_all_of_a_shorter_one(rig, length, more):
    rig.answer(text(1, length))
    assert rig.answer(text(1, length) + text(2, more)).cached == length


@pytest.mark.parametrize("length", EDGES[1:])
@pytest.mark.parametrize("stored", [97, 128])
def test_prompts_that_part_inside_a_page_share_up_to_that_id(rig, length, stored):
    rig.answer(text(1, stored))
    assert rig.answer(text(1, length) + text(2, 40)).cached == length
    assert rig.answer(text(1, length) + text(3, 40)).cached == length


@pytest.mark.parametrize("length", EDGES[1:])
def test_full_pages_are_shared_and_a_page_filled_in_part_is_copied(rig, length):
    rig.answer(text(1, length))
    full, rest = divmod(length, PAGE)
    run = rig.open([*text(1, length), 7], 10)
    shared = [node.page for node in rig.index._nodes.values()][::-1]
    assert run.sequence.table[:full] == shared[:full]
    assert run.opened.copies == ((Copy(shared[full], run.sequence.table[full], rest),) if rest else ())


def test_a_hit_goes_on_right_behind_its_shared_pages(rig):
    rig.answer(text(1, 32))
    rig.open(text(2, 32))
    rig.answer(text(1, 64))
    low = rig.runs[0]
    rig.end(low, store=False)
    run = rig.open(text(1, 65), 20)
    assert run.sequence.table == [0, 2, 3]
    assert rig.pages.references(1) == 0


def test_looking_holds_nothing_and_says_what_there_is(rig):
    assert rig.index.lookup(text(1, 50), owner=b"", cache=True) == Match()
    rig.answer(text(1, 50))
    match = rig.index.lookup(text(1, 50), owner=b"", cache=True)
    assert match == Match(pages=(0,), tail=1, tail_rows=17, exact_rows=49)
    assert (match.length, match.exact) == (49, True)
    assert match.without_tail() == Match(pages=(0,), exact_rows=32)


# --- how rows were written


@pytest.mark.parametrize("prompt", EDGES[1:])
@pytest.mark.parametrize("drawn", [1, 31, 32, 33])
def test_answer_rows_are_reused_only_by_a_job_that_asks_for_them(rig, prompt, drawn):
    draws = text(2, drawn)
    rig.answer(text(1, prompt), draws=draws)
    follow = text(1, prompt) + draws + text(3, 5)
    exact = rig.index.lookup(follow, owner=b"", cache=True)
    assert (exact.length, exact.exact) == (prompt, True)
    both = rig.index.lookup(follow, owner=b"", cache="answers")
    assert (both.length, both.exact, both.exact_rows) == (prompt + drawn, False, prompt)


def test_a_job_that_asks_for_answers_is_exact_where_it_meets_none(rig):
    rig.answer(text(1, 40), draws=text(2, 40))
    opened = rig.answer(text(1, 41), cache="answers")
    assert (opened.cached, opened.exact) == (40, True)


def test_prompt_rows_on_top_of_answer_rows_do_not_count_as_prompt_written(rig):
    talk = text(1, 40) + text(2, 10)
    rig.answer(text(1, 40), draws=text(2, 10))
    rig.answer(talk + text(3, 40), cache="answers")
    match = rig.index.lookup(talk + text(3, 40), owner=b"", cache=True)
    assert (match.length, match.exact) == (40, True)
    assert rig.index.lookup(talk + text(3, 40), owner=b"", cache="answers").length == 89


def test_prompt_written_rows_take_the_place_of_answer_rows_of_the_same_ids(rig):
    talk = text(1, 40) + text(2, 60)
    rig.answer(text(1, 40), draws=text(2, 60))
    held = rig.index.pages_held
    rig.answer(talk)
    assert rig.index.pages_held == held
    assert rig.pages.free == rig.pages.count - held
    again = rig.answer([*talk, 1])
    assert (again.cached, again.exact) == (100, True)


def test_answer_rows_never_take_the_place_of_prompt_written_ones(rig):
    talk = text(1, 40) + text(2, 60)
    rig.answer(talk)
    rig.answer(text(1, 40), draws=text(2, 60))
    again = rig.answer([*talk, 1])
    assert (again.cached, again.exact) == (100, True)


def mixed_and_exact_forms(rig, *, exact_first: bool):
    """The same ids twice: 52 rows of a prompt, and 40 of a prompt with 24 of its answer; the first runs on."""
    talk = text(1, 40) + text(2, 24)
    runs = [rig.open(talk), rig.open(text(1, 40), 24)]
    rig.read(runs[0], 52)
    rig.read(runs[1], 40)
    for one in text(2, 24):
        rig.draw(runs[1], [one], 1)
    for run in runs if exact_first else runs[::-1]:
        rig.store(run)
        rig.check()
    rig.end(runs[1])
    return talk, runs[0]


@pytest.mark.parametrize("exact_first", [True, False])
def test_a_longer_page_with_answer_rows_does_not_displace_a_shorter_one_without(rig, exact_first):
    talk, _ = mixed_and_exact_forms(rig, exact_first=exact_first)
    match = rig.index.lookup([*talk, 5], owner=b"", cache=True)
    assert (match.length, match.exact) == (52, True)
    match = rig.index.lookup([*talk, 5], owner=b"", cache="answers")
    assert (match.length, match.exact_rows) == (64, 40)


@pytest.mark.parametrize("exact_first", [True, False])
def test_of_two_pages_that_reach_as_far_the_prompt_written_one_is_taken(rig, exact_first):
    talk, _ = mixed_and_exact_forms(rig, exact_first=exact_first)
    match = rig.index.lookup([*talk[:50], 5, 5], owner=b"", cache="answers")
    assert (match.length, match.exact) == (50, True)


@pytest.mark.parametrize("exact_first", [True, False])
def test_a_page_that_becomes_prompt_written_in_full_replaces_both_forms(rig, exact_first):
    talk, run = mixed_and_exact_forms(rig, exact_first=exact_first)
    assert rig.index.pages_held == 3
    rig.read(run, 12)
    rig.end(run)
    rig.check()
    assert rig.index.pages_held == 2
    assert rig.index.lookup([*talk, 5], owner=b"", cache=True).length == 64


def test_a_page_that_is_stored_already_stays_where_it_is(rig):
    first, second = rig.open(text(1, 32)), rig.open(text(1, 32))
    for run in (first, second):
        rig.read(run, 32)
        rig.end(run)
    assert [node.page for node in rig.index._nodes.values()] == [0]


# --- what is never stored or found


@pytest.mark.parametrize("cache", [True, "answers"])
def test_a_job_that_opts_out_stores_and_reuses_nothing(rig, cache):
    rig.answer(text(1, 70), cache=False, draws=[5])
    assert rig.index.pages_held == 0
    rig.answer(text(1, 70), cache=cache)
    assert rig.answer(text(1, 70), cache=False).cached == 0
    assert rig.index.figures.opened == 1


def test_owners_never_share(rig):
    rig.answer(text(1, 70), owner=b"a", draws=[5, 6])
    for owner in (b"b", b"", b"a\0", b"aa"):
        for cache in (True, "answers"):
            assert rig.index.lookup(text(1, 70), owner=owner, cache=cache).length == 0
    assert rig.answer(text(1, 70), owner=b"b").cached == 0
    assert rig.answer(text(1, 70), owner=b"a").cached == 69
    assert rig.index.pages_held == 6


def test_a_page_is_known_by_its_place_and_not_by_its_ids_alone(rig):
    page = text(1, 32)
    rig.answer(page + page + page)
    assert rig.answer([*page, 5]).cached == 32
    assert rig.answer(text(2, 32) + page).cached == 0


def test_a_hit_compares_the_ids_and_not_the_hash_alone(monkeypatch):
    rig = Rig(12, 12)
    monkeypatch.setattr(tree, "page_key", lambda _before, _owner, ids: bytes([len(ids)]))
    first = rig.open(text(1, 70))
    rig.read(first, 70)
    assert rig.index.store(first.opened, first.ids, 70) == 32, "the second page has the key of the first"
    assert rig.index.lookup(text(2, 70), owner=b"", cache=True).length == 0
    assert rig.index.lookup(text(1, 70), owner=b"b", cache=True).length == 0
    for owner in (b"", b"b"):
        second = rig.open(text(2, 70), owner=owner)
        rig.read(second, 70)
        assert rig.index.store(second.opened, second.ids, 70) == 0
        assert rig.index.lookup(text(2, 70), owner=owner, cache=True).length == 0


def test_a_hit_compares_all_ids_before_the_page_too(monkeypatch):
    rig = Rig(12, 12)
    monkeypatch.setattr(tree, "page_key", lambda _before, _owner, ids: bytes(one % 256 for one in ids[:3]))
    page = text(3, 32)
    for seed in (1, 2):
        run = rig.open(text(seed, 32) + page)
        rig.read(run, 64)
        assert rig.store(run) == (64 if seed == 1 else 32), (
            "the second page has the key of one that goes on elsewhere"
        )
    assert rig.index.lookup([*text(2, 32), *page, 5], owner=b"", cache=True).length == 32


def test_owner_and_ids_cannot_be_mistaken_for_each_other():
    assert tree.page_key(b"x", b"\5\0\0\0", (6,)) != tree.page_key(b"x", b"", (5, 6))


def test_a_key_longer_than_the_rows_is_a_fault(rig):
    run = rig.open(text(1, 40), 10)
    rig.read(run, 32)
    with pytest.raises(AssertionError, match="as many ids as rows"):
        rig.index.store(run.opened, run.ids, 33)
    rig.read(run, 8)
    rig.start_step(run)
    with pytest.raises(AssertionError, match="as many ids as rows"):
        rig.index.store(run.opened, run.ids, 41)


def test_a_sequence_is_not_stored_under_the_ids_of_another_job(rig):
    run = rig.open(text(1, 40))
    rig.read(run, 40)
    with pytest.raises(AssertionError, match="another job"):
        rig.index.store(run.opened, text(2, 40), 40)


@pytest.mark.parametrize("length", EDGES[1:])
def test_rows_of_a_step_that_failed_or_was_in_flight_are_never_found(rig, length):
    run = rig.open(text(1, length), 60)
    rig.read(run, length)
    rig.draw(run, [1, 2, 3], kept=1)
    rig.start_step(run, 16)
    rig.end(run)
    rig.check()
    stored = [*text(1, length), 1]
    assert rig.index.lookup([*stored, 2, 3, 4], owner=b"", cache="answers").length == length + 1
    assert rig.index.lookup([*stored, 0, 0], owner=b"", cache="answers").length == length + 1


# --- a sequence that goes on after it was stored


@pytest.mark.parametrize("length", EDGES[1:])
def test_a_running_sequence_can_be_stored_and_goes_on(rig, length):
    run = rig.open(text(1, length), 40)
    rig.read(run, length)
    assert rig.store(run) == length
    for one in range(20):
        rig.draw(run, [one, 999], kept=1)
        rig.check()
    assert rig.store(run) == length + 20
    rig.check()
    follow = text(1, length) + list(range(20))
    assert rig.index.lookup([*follow, 5], owner=b"", cache="answers").length == length + 20
    assert rig.index.lookup([*text(1, length), 5], owner=b"", cache=True).length == length
    assert rig.index.pages_held == -(-(length + 20) // PAGE), "the shorter form of a page is not kept beside it"


@pytest.mark.parametrize("cut", [0, 1, 31, 32, 33, 63])
def test_rows_taken_back_after_they_were_stored_stay_stored(rig, cut):
    run = rig.open(text(1, 64), 40)
    rig.read(run, 64)
    rig.store(run)
    assert rig.cut(run, cut)
    rig.check()
    rig.write(run, [0] * (64 - cut), prompt=False)
    rig.check()
    assert rig.index.lookup(text(1, 64), owner=b"", cache=True).length == 63


def test_a_hit_can_be_rolled_back_like_any_sequence(rig):
    rig.answer(text(1, 50))
    run = rig.open(text(1, 50), 64)
    rig.read(run, 1)
    for kept in (0, 3, 16, 1, 0, 5):
        rig.draw(run, list(range(16)), kept=kept)
        rig.check()
    assert run.sequence.length == 50 + 25


def test_a_fork_of_a_hit_shares_the_stored_pages(rig):
    rig.answer(text(1, 70))
    run = rig.open(text(1, 70), 20)
    rig.read(run, 1)
    twin = rig.fork(run, 90)
    rig.draw(twin, [1, 2, 3], kept=3)
    rig.draw(run, [4, 5], kept=2)
    rig.end(twin)
    rig.end(run)
    rig.check()
    assert rig.index.lookup([*text(1, 70), 1, 2, 9], owner=b"", cache="answers").length == 72
    assert rig.index.lookup([*text(1, 70), 4, 5, 9], owner=b"", cache="answers").length == 72


# --- false books


def swap_ids(nodes):
    nodes[0].ids = (*nodes[0].ids[:-1], 5)


def claim_more_exact_rows(nodes):
    nodes[-1].exact, nodes[0].exact = 3, nodes[0].exact or 1


def store_a_page_twice(nodes):
    nodes[0].page = nodes[1].page


def cut_a_page_off(nodes):
    nodes[0].parent.children.clear()


@pytest.mark.parametrize("fault", [swap_ids, claim_more_exact_rows, store_a_page_twice, cut_a_page_off])
def test_false_books_of_the_index_are_found(fault):
    rig = Rig(12, 12)
    rig.answer(text(1, 70), draws=[1])
    rig.check()
    fault(list(rig.index._nodes.values()))
    with pytest.raises(AssertionError):
        rig.index.check()


def test_the_order_of_forgetting_is_part_of_the_books(rig):
    rig.answer(text(1, 70))
    first = next(iter(rig.index._nodes))
    rig.index._nodes.move_to_end(first)
    with pytest.raises(AssertionError, match="leaves are older"):
        rig.index.check()
    rig.index._nodes.move_to_end(first, last=False)
