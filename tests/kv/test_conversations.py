"""Jobs after each other, as field reports tell them: what is reused is what a cold run would have written."""

from __future__ import annotations

import random

import pytest
from kv.rig import Rig, text

A = text(1, 200)
B = A[:160] + text(2, 40)


def test_a_then_b_that_shares_most_of_it_then_a_again():
    rig = Rig(40, 40)
    assert rig.answer(A, draws=text(3, 20)).cached == 0
    assert rig.answer(B, draws=text(4, 20)).cached == 160
    again = rig.answer(A, draws=text(3, 20))
    assert (again.cached, again.exact) == (199, True)
    assert rig.index.pages_held == 7 + 2, "five pages are shared, each has two of its own"


@pytest.mark.parametrize("chunk", [1, 7, 31, 32, 33, 64, 200])
def test_a_cancelled_at_each_chunk_leaves_what_it_read_and_nothing_else(chunk):
    for read in range(0, 200, chunk):
        rig = Rig(20, 20)
        run = rig.open(A, 20)
        for _ in range(read // chunk):
            rig.read(run, chunk)
        rig.start_step(run, min(chunk, run.unread))
        rig.end(run)
        rig.check()
        again = rig.answer(A, draws=[1, 2])
        assert (again.cached, again.exact) == (read, True)


@pytest.mark.parametrize("drawn", [0, 1, 24, 56, 57])
def test_a_cancelled_while_it_draws_then_a_again(drawn):
    rig = Rig(20, 20)
    run = rig.open(A, 60)
    rig.read(run, 200)
    for one in range(drawn):
        rig.draw(run, [one, one, one], kept=1)
    rig.start_step(run)
    rig.end(run)
    again = rig.answer(A, draws=range(20))
    assert (again.cached, again.exact) == (199, True)


def test_a_failed_job_stores_what_was_verified_before_the_failure():
    rig = Rig(20, 20)
    run = rig.open(A)
    rig.read(run, 96)
    rig.start_step(run, 32)
    rig.end(run, store=False)
    rig.check()
    assert rig.pages.free == 20
    assert rig.answer(A).cached == 0


def turns(count: int):
    """Five turns: what the user adds, and what the model answers."""
    return [(text(10 + turn, 90), text(50 + turn, 45)) for turn in range(count)]


@pytest.mark.parametrize("cache", [True, "answers"])
def test_each_turn_of_a_chat_reuses_the_turns_before(cache):
    rig = Rig(60, 60)
    talk: list[int] = []
    for turn, (asked, answered) in enumerate(turns(5)):
        prompt = talk + asked
        opened = rig.answer(prompt, cache=cache, draws=answered)
        if cache == "answers":
            assert (opened.cached, opened.exact) == (len(talk), not turn)
        else:
            # The answer before is read once more; all that was a prompt is there.
            assert (opened.cached, opened.exact) == (max(len(talk) - 45, 0), True)
        talk = prompt + answered
    assert rig.index.pages_held == -(-len(talk) // 32), "no page is kept twice"


def test_a_chat_reuses_nothing_of_another_owner_who_says_the_same():
    rig = Rig(60, 60)
    for owner in (b"one", b"two"):
        talk: list[int] = []
        for asked, answered in turns(3):
            opened = rig.answer(talk + asked, owner=owner, draws=answered)
            assert opened.cached == max(len(talk) - 45, 0)
            talk += asked + answered


def schedule(seed: int) -> None:
    """Chats of three owners in a pool that cannot keep them all."""
    draw = random.Random(seed)
    rig = Rig(draw.randrange(14, 30), draw.randrange(0, 24))
    talks = [text(draw.randrange(3), draw.randrange(1, 60)) for _ in range(4)]
    hits = 0
    for _ in range(25):
        place = draw.randrange(len(talks))
        prompt = talks[place] + [draw.randrange(3) for _ in range(draw.randrange(1, 40))]
        draws = [draw.randrange(3) for _ in range(draw.randrange(30))]
        cache = draw.choice([True, True, "answers", False])
        opened = rig.answer(prompt, owner=b"%d" % (place % 3), cache=cache, draws=draws, chunk=64)
        hits += opened.cached > 0
        talks[place] = prompt + draws if len(prompt) < 250 else text(draw.randrange(3), 20)
    assert rig.bytes_held <= rig.index._limit_pages * 1000


@pytest.mark.parametrize("seed", range(20))
def test_evictions_never_bring_wrong_rows(seed):
    schedule(seed)


@pytest.mark.prove
def test_a_hundred_eviction_schedules_never_bring_wrong_rows():
    for seed in range(20, 120):
        schedule(seed)
