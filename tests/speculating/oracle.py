"""Drafters that know the text or nothing, what rows cost, and the executor of both: speculation without luck."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from worker.engine.engine import Engine, Figures
from worker.engine.serial import SerialEngine
from worker.speculation.costs import Costs, Measured
from worker.speculation.draft import Draft, Drafter, Proposal, Terms, Traits
from worker.speculation.executor import HyperWidthExecutor, Parts
from worker.speculation.ngram import Ngram
from worker.width import WidthPlan

FREE = Costs((1, 16), (0,), ((1.0, 1.01),), 0.0)
# Each row more makes a step cheaper: whatever is proposed is verified, and the gate never shuts.
EAGER = Costs((1, 16), (0,), ((2.0, 1.0),), 0.0)
LINEAR = Costs((1, 16), (0,), ((1.0, 16.0),), 0.1)


class Oracle:
    """Knows *text*, prompt and answer; a *share* of the trunk is wrong, and forks hold what is right there."""

    name = "oracle"
    traits = Traits(edges=(), kept=(0.9,), branch=2)

    def __init__(self, text: Sequence[int], vocabulary: int, share: float) -> None:
        self.text = tuple(text)
        self.vocabulary = vocabulary
        self.share = share
        self.held = False
        self._at = 0

    def begin(self, ids: Sequence[int], sampling: Any, terms: Terms) -> None:
        assert not self.held, "the job before was ended"
        assert tuple(ids) == self.text[: len(ids)], "prompt, and what an earlier attempt drew"
        self.held, self._at = True, len(ids)

    def extend(self, ids: Sequence[int]) -> None:
        for token in ids:
            assert token == self.text[self._at], "told what became text, in order"
            self._at += 1

    def catch_up(self) -> None:
        """Nothing is kept beside the text."""

    def propose(self, limit: int, forks: int) -> Proposal:
        right = self.text[self._at : self._at + limit]
        if not right:
            return Proposal()
        luck = random.Random(self._at)
        trunk = [(one + 1) % self.vocabulary if luck.random() < self.share else one for one in right]
        turns = [depth for depth, pair in enumerate(zip(trunk, right, strict=True), start=1) if pair[0] != pair[1]]
        taken = turns[: min(forks, (limit - 1) // self.traits.branch)]
        trunk = trunk[: limit - len(taken) * self.traits.branch]
        tokens, parents = list(trunk), list(range(len(trunk)))
        for depth in sorted((turn for turn in taken if turn <= len(trunk)), reverse=True):
            parent = depth - 1
            for token in right[depth - 1 : depth - 1 + self.traits.branch]:
                tokens.append(token)
                parents.append(parent)
                parent = len(tokens)
        return Proposal(Draft(tuple(tokens), tuple(parents)), (1.0,) * len(trunk), tuple(turns))

    def end(self) -> None:
        self.held = False


class Careless:
    """Always proposes: what the text says, or else anything from id *least* on, as a chain or as a tree."""

    name = "careless"
    traits = Traits(edges=(), kept=(0.5,))

    def __init__(self, vocabulary: int, least: int = 0) -> None:
        self.vocabulary = vocabulary
        self.least = least
        self.ngram = Ngram()
        self.length = 0

    def begin(self, ids: Sequence[int], sampling: Any, terms: Terms) -> None:
        self.ngram.begin(ids, sampling, terms)
        self.length = len(ids)

    def extend(self, ids: Sequence[int]) -> None:
        self.ngram.extend(ids)
        self.length += len(ids)

    def catch_up(self) -> None:
        """Nothing is kept beside the text."""

    def propose(self, limit: int, forks: int) -> Proposal:
        found = () if self.least else self.ngram.propose(limit, 0).draft.tokens
        luck = random.Random(self.length)
        tokens = [*found, *(luck.randrange(self.least, self.vocabulary) for _ in range(limit - len(found)))]
        if forks and limit > 1:
            trunk = tokens[: limit - 1]
            fork = self.least + (trunk[-1] + 1 - self.least) % (self.vocabulary - self.least)
            turn = len(trunk)
            draft = Draft((*trunk, fork), (*range(turn), turn - 1))
            return Proposal(draft, (1.0,) * turn, (turn,))
        return Proposal(Draft.chain(tokens), (1.0,) * len(tokens), (len(tokens),))

    def end(self) -> None:
        self.ngram.end()


class Priced:
    """A clock that goes on with each forward of *engine*, by what its rows cost."""

    def __init__(self, engine: SerialEngine, costs: Costs) -> None:
        self.now = 0.0
        rows: Callable[..., Any] = engine.forward.rows

        def priced(tokens: Any, parents: Any = None, last: Any = None) -> Any:
            self.now += costs.forward(0, tokens.size) / 1e3
            return rows(tokens, parents) if last is None else rows(tokens, parents, last)

        engine.forward.rows = priced  # type: ignore[method-assign]

    def __call__(self) -> float:
        return self.now


class Watched(HyperWidthExecutor):
    """Notes what each job left when it ended.

    left: ids that were decided and not handed out, those of an accepted block. dropped: whether a forward over a
    draft, launched behind such a block, was still running.
    """

    left = 0
    dropped = False

    def run(self, plan: WidthPlan, singleton: Engine) -> Engine:
        engine = super().run(plan, singleton)
        stop = engine.stop
        assert isinstance(singleton, SerialEngine)

        def noted() -> Figures:
            running = singleton._run
            self.dropped = running is not None and bool(running.flights)
            self.left = 0 if running is None else len(running.decided) + (running.newest is not None)
            return stop()

        engine.stop = noted  # type: ignore[method-assign]
        return engine


def executor(
    engine: SerialEngine,
    drafter: Drafter,
    costs: Costs = FREE,
    *,
    width: int | None = None,
    trees: bool = True,
    clock: Callable[[], float] | None = None,
) -> Watched:
    """Of *drafter* over *engine*. width: rows at most; clock: None, one that `Priced` makes."""
    forward = engine.forward
    parts = Parts(
        drafter=drafter,
        measured=Measured(costs),
        trees=trees and forward.trees,
        clock=clock or Priced(engine, costs),
    )
    return Watched(parts, min(width or forward.width, forward.width))
