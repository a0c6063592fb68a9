"""A text that offers no drafts is looked at now and then; one that begins to repeat itself is soon drafted."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from speculating.rig import DEVICES

from worker.engine.engine import EngineRequest, Figures, Step, unheard
from worker.engine.sample import Sampling
from worker.engine.serial import Landed
from worker.speculation.costs import Measured
from worker.speculation.draft import Draft, Proposal
from worker.speculation.executor import Parts, SpeculatingEngine
from worker.speculation.ngram import Ngram

PROMPT, FRESH, COPIED = 60, 240, 120


class Told:
    """A serial engine that says a text it was given; a draft is kept as far as the text goes."""

    capacity = 10**6

    def __init__(self, text: list[int]) -> None:
        # at: ids handed out; known: decided ones.
        self.text, self.at, self.known = text, PROMPT, PROMPT
        self.newest: int | None = None
        self.ready: deque[int] = deque()
        self.drafted_at: list[int] = []
        self.forwards = 0

    decided = property(lambda self: len(self.ready))
    last = property(lambda self: self.ready[-1])
    left = property(lambda self: len(self.text) - self.known - 1)
    position = property(lambda self: self.known)

    def start(self, request: EngineRequest, progress: Any) -> None:
        del request, progress

    def step(self) -> Step:
        if not self.ready:
            self.advance()
        self.at += 1
        return Step(self.ready.popleft())

    def advance(self) -> None:
        """The newest id is decided."""
        self._decide()
        self.forwards += 1

    def _decide(self) -> None:
        self.ready.append(self.text[self.known])
        self.known += 1
        self.newest = None

    def launch(self, draft: Draft, tokens: object = None) -> None:
        self.drafted_at.append(self.known)
        self.fresh = self.newest is None
        self.flying = draft
        if not self.fresh:
            self._decide()

    def land(self) -> Landed:
        """The newest id, then the drafted ones while they are the text's."""
        self.forwards += 1
        tokens = self.flying.tokens
        known = self.text[self.known + self.fresh :]
        kept = next((place for place, token in enumerate(tokens) if token != known[place]), len(tokens))
        ids = self.text[self.known : self.known + self.fresh + kept + 1]
        self.ready += ids[:-1]
        self.known += len(ids) - 1
        self.newest = ids[-1]
        return Landed(tuple(range(kept + 1)), ids)

    def stop(self) -> Figures:
        return Figures(route="", row_invariant=True)


class Counted(Ngram):
    """Counts what it is asked."""

    asked = 0

    def propose(self, limit: int, forks: int = 0) -> Proposal:
        self.asked += 1
        return super().propose(limit, forks)


def answered(text: list[int]) -> tuple[list[int], Told, Counted]:
    serial, drafter = Told(text), Counted()
    parts = Parts(
        drafter=drafter,
        measured=Measured(DEVICES["H200"]),
        trees=False,
        clock=lambda: 1e4 + serial.forwards / 1000,
    )
    engine = SpeculatingEngine(16, serial, parts)  # type: ignore[arg-type]
    request = EngineRequest(prompt=tuple(text[:PROMPT]), sampling=Sampling(seed=0), max_tokens=len(text) - PROMPT)
    engine.start(request, unheard)
    said = [engine.step().token for _ in range(len(text) - PROMPT - 1)]
    plain = parts.measured.steps(PROMPT)[0]
    assert 1.0 <= plain <= DEVICES["H200"].forward(PROMPT, 1), "a step takes one millisecond here, as is learnt"
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
