"""A text that offers no drafts is looked at now and then; one that begins to repeat itself is soon drafted."""

from __future__ import annotations

import random
from collections import deque
from itertools import count
from typing import Any

from speculating.rig import DEVICES

from worker.engine.engine import EngineRequest, Figures, Step, unheard
from worker.engine.sample import Sampling
from worker.speculation.costs import Measured
from worker.speculation.draft import Draft, Proposal
from worker.speculation.executor import Parts, SpeculatingEngine
from worker.speculation.ngram import Ngram

PROMPT, FRESH, COPIED = 60, 240, 120


class Told:
    """A serial engine that says a text it was given; a draft is kept as far as the text goes."""

    capacity = 10**6

    def __init__(self, text: list[int]) -> None:
        self.text, self.at = text, PROMPT
        self.newest: int | None = None
        self.ready: deque[int] = deque()
        self.drafted_at: list[int] = []

    decided = property(lambda self: len(self.ready))
    left = property(lambda self: len(self.text) - self.at - len(self.ready) - 1)
    position = property(lambda self: self.at)

    def start(self, request: EngineRequest, progress: Any) -> None:
        del request, progress

    def step(self) -> Step:
        if not self.ready:
            self.ready.append(self.text[self.at])
            self.newest = None
        self.at += 1
        return Step(self.ready.popleft())

    def verify(self, draft: Draft) -> tuple[int, ...]:
        """The newest id, then the drafted ones while they are the text's."""
        self.drafted_at.append(self.at)
        known = self.text[self.at + 1 :]
        kept = next(
            (place for place, token in enumerate(draft.tokens) if token != known[place]), len(draft.tokens)
        )
        self.ready += [self.text[self.at], *known[:kept]]
        self.newest = known[kept]
        return tuple(range(kept + 1))

    def stop(self) -> Figures:
        return Figures(route="", row_invariant=True)


class Counted(Ngram):
    """Counts what it is asked."""

    asked = 0

    def propose(self, limit: int, forks: int = 0) -> Proposal:
        self.asked += 1
        return super().propose(limit, forks)


def answered(text: list[int]) -> tuple[list[int], Told, Counted]:
    serial, drafter, seconds = Told(text), Counted(), count()
    parts = Parts(
        drafter=drafter, measured=Measured(DEVICES["H200"]), trees=False, clock=lambda: next(seconds) / 1000
    )
    engine = SpeculatingEngine(16, serial, parts)  # type: ignore[arg-type]
    request = EngineRequest(prompt=tuple(text[:PROMPT]), sampling=Sampling(seed=0), max_tokens=len(text) - PROMPT)
    engine.start(request, unheard)
    said = [engine.step().token for _ in range(len(text) - PROMPT - 1)]
    return said, serial, drafter


def fresh(size: int) -> list[int]:
    return random.Random(5).sample(range(10_000), size)


def test_a_quiet_text_is_looked_at_every_eighth_step() -> None:
    text = fresh(PROMPT + FRESH)
    said, serial, drafter = answered(text)
    assert said == text[PROMPT:-1]
    assert not serial.drafted_at
    assert drafter.asked <= 32 + FRESH / 8


def test_a_quiet_text_that_begins_to_copy_is_drafted_within_eight_ids_and_a_match() -> None:
    for begin in range(8):
        new = fresh(PROMPT + FRESH + begin)
        text = [*new, *new[10 : 10 + COPIED]]
        said, serial, _ = answered(text)
        assert said == text[PROMPT:-1]
        copied = PROMPT + FRESH + begin
        assert copied < serial.drafted_at[0] <= copied + 8 + 4
        assert len(serial.drafted_at) < COPIED / 4
