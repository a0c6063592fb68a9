"""Whatever jobs do, in any order: every row read is the right one, nothing leaks, and the books can be proved."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from kv.rig import Rig, Run

PICK = st.integers(0, 1000)
ROWS = st.sampled_from([0, 1, 2, 5, 16, 31, 32, 33, 63, 64, 65])
CACHE = st.sampled_from([True, True, "answers", "answers", False])
ALIGN = st.sampled_from([1, 1, 64, 128])


class Moves:
    """The moves of many jobs over one rig, told apart by plain numbers."""

    def __init__(self, count: int, limit_pages: int, align: int = 1) -> None:
        self.rig = Rig(count, limit_pages, align)
        self.most = 4
        self.texts: list[list[int]] = [[]]

    def run(self, pick: int) -> Run | None:
        return self.rig.runs[pick % len(self.rig.runs)] if self.rig.runs else None

    def open(self, pick: int, cut: int, more: int, budget: int, owner: int, cache) -> None:
        """A prompt that begins like one seen before, all of it for -1, and goes on with ids of a small vocabulary."""
        if len(self.rig.runs) >= self.most:
            self.end(pick, store=True)
        known = self.texts[pick % len(self.texts)]
        prompt = known[: cut % (len(known) + 1)] + [(pick + place * place) % 3 for place in range(more)]
        run = self.rig.open(prompt[:200], budget, b"%d" % owner, cache)
        if run is not None:
            self.note(run.ids)

    def note(self, ids: list[int]) -> None:
        self.texts = [*self.texts[-9:], list(ids)]

    def read(self, pick: int, rows: int) -> None:
        run = self.run(pick)
        if run is not None:
            self.rig.drop_unverified(run)
            self.rig.read(run, rows)

    def draw(self, pick: int, drafts: int, kept: int) -> None:
        run = self.run(pick)
        if run is not None and not run.unread:
            self.rig.draw(run, [(pick + place) % 3 for place in range(drafts)], kept)
            self.note(run.ids)

    def fail(self, pick: int, rows: int) -> None:
        run = self.run(pick)
        if run is not None:
            self.rig.start_step(run, rows)

    def store(self, pick: int) -> None:
        run = self.run(pick)
        if run is not None:
            self.rig.store(run)

    def end(self, pick: int, *, store: bool) -> None:
        run = self.run(pick)
        if run is not None:
            self.rig.end(run, store=store)

    def fork(self, pick: int, more: int) -> None:
        run = self.run(pick)
        if run is not None and len(self.rig.runs) < self.most:
            self.rig.fork(run, run.verified + more)

    def cut(self, pick: int, length: int) -> None:
        run = self.run(pick)
        if run is not None:
            self.rig.cut(run, length % (run.sequence.length + 1))

    def clear(self) -> None:
        self.rig.clear()

    def close(self) -> None:
        """Everything ends: not a page may be missing."""
        while self.rig.runs:
            self.end(0, store=False)
        self.rig.clear()
        self.rig.check()
        assert self.rig.pages.free == self.rig.pages.count


class Jobs(RuleBasedStateMachine):
    """`Moves` chosen and shrunk by hypothesis."""

    moves: Moves

    @initialize(count=st.integers(2, 24), limit=st.integers(0, 24), roomy=st.booleans(), align=ALIGN)
    def begin(self, count, limit, roomy, align):
        self.moves = Moves(80, 80, align) if roomy else Moves(count, limit, align)

    @rule(
        pick=PICK,
        cut=st.one_of(PICK, st.just(-1)),
        more=ROWS,
        budget=ROWS,
        owner=st.sampled_from([0, 0, 1]),
        cache=CACHE,
    )
    def open(self, **move):
        self.moves.open(**move)

    @rule(pick=PICK, rows=ROWS)
    def read(self, pick, rows):
        self.moves.read(pick, rows)

    @rule(pick=PICK, drafts=st.integers(1, 16), kept=st.integers(0, 16))
    def draw(self, **move):
        self.moves.draw(**move)

    @rule(pick=PICK, rows=st.integers(1, 16))
    def fail(self, pick, rows):
        self.moves.fail(pick, rows)

    @rule(pick=PICK)
    def store(self, pick):
        self.moves.store(pick)

    @rule(pick=PICK, store=st.booleans())
    def end(self, pick, store):
        self.moves.end(pick, store=store)

    @rule(pick=PICK)
    def read_all_and_end(self, pick):
        self.moves.read(pick, 1000)
        self.moves.end(pick, store=True)

    @rule(pick=PICK, more=ROWS)
    def fork(self, pick, more):
        self.moves.fork(pick, more)

    @rule(pick=PICK, length=PICK)
    def cut(self, pick, length):
        self.moves.cut(pick, length)

    @rule(sure=st.integers(0, 9))
    def clear(self, sure):
        if not sure:
            self.moves.clear()

    @invariant()
    def the_books_and_all_rows_are_right(self):
        if hasattr(self, "moves"):
            self.moves.rig.check()

    def teardown(self):
        if hasattr(self, "moves"):
            self.moves.close()


QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def test_any_order_of_moves_keeps_the_books():
    once = settings(
        max_examples=80, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=QUIET
    )
    run_state_machine_as_test(Jobs, settings=once)


@pytest.mark.prove
def test_any_order_of_moves_keeps_the_books_over_many_more_runs():
    many = settings(
        max_examples=1500, stateful_step_count=60, deadline=None, derandomize=True, suppress_health_check=QUIET
    )
    run_state_machine_as_test(Jobs, settings=many)


def random_moves(seed: int, steps: int) -> Rig:
    """*steps* random moves with `check` after each, in pools of changing size."""
    draw = random.Random(seed)
    rows = [0, 1, 2, 5, 16, 31, 32, 33, 63, 64, 65]
    moves = Moves(draw.randrange(4, 40), draw.randrange(40), [1, 64, 1, 128][seed % 4])
    choices = {
        "open": lambda pick: moves.open(
            pick,
            draw.choice([draw.randrange(1000), -1]),
            draw.choice(rows),
            draw.choice(rows),
            draw.choice([0, 0, 1]),
            draw.choice([True, True, "answers", "answers", False]),
        ),
        "read": lambda pick: moves.read(pick, draw.choice([draw.choice(rows), 1000])),
        "draw": lambda pick: moves.draw(pick, draw.randrange(1, 17), draw.randrange(17)),
        "fail": lambda pick: moves.fail(pick, draw.randrange(1, 17)),
        "store": moves.store,
        "end": lambda pick: moves.end(pick, store=draw.random() < 0.7),
        "fork": lambda pick: moves.fork(pick, draw.choice(rows)),
        "cut": lambda pick: moves.cut(pick, draw.randrange(1000)),
    }
    for _ in range(steps):
        choices[draw.choice(["open", "open", "read", "read", "draw", "draw", *choices])](draw.randrange(1000))
        moves.rig.check()
    moves.close()
    return moves.rig


@pytest.mark.parametrize("seed", range(20))
def test_ten_thousand_random_page_operations(seed):
    random_moves(seed, 500)


@pytest.mark.prove
def test_a_hundred_thousand_random_page_operations():
    hits = evicted = 0
    for seed in range(100, 200):
        figures = random_moves(seed, 1000).index.figures
        hits += figures.hits
        evicted += figures.evicted_pages
    assert hits > 1000
    assert evicted > 1000
