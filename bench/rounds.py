"""Rounds of several ways over the same prompts, and ratios of neighbours: a host has fast and slow phases.

In a round every prompt is answered by each way in turn before the next prompt is, so that what is compared ran
within a second or two; every second round goes through the ways backwards. A ratio of two ways is the median of
its rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from ways import Answer, Prompt, Way

Asked = Sequence[tuple[Prompt, list[int]]]
"""Prompts with their plain answers."""


@dataclass
class Tally:
    """What one way came to.

    rates, forward_ms: by round, ids a second and milliseconds a forward. answers: of the latest round.
    right, all: how many answers began as the plain ones do, of how many.
    """

    rates: dict[int, float] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    forward_ms: dict[int, float] = field(default_factory=dict)
    right: int = 0
    all: int = 0

    def take(self, turn: int, answers: list[Answer], asked: Asked) -> None:
        """The answers of the round *turn*."""
        self.answers = answers
        seconds = sum(one.seconds for one in answers)
        self.rates[turn] = sum(one.counted for one in answers) / seconds
        self.forward_ms[turn] = seconds * 1e3 / sum(one.forwards for one in answers)
        self.right += sum(
            one.ids == ids[: prompt.tokens] for one, (prompt, ids) in zip(answers, asked, strict=True)
        )
        self.all += len(answers)

    @property
    def median(self) -> float:
        """Ids a second."""
        return statistics.median(self.rates.values())

    @property
    def ms(self) -> float:
        """Milliseconds a forward of the target."""
        return statistics.median(self.forward_ms.values())

    def draft_ms(self, plain: Tally) -> float:
        """Milliseconds of a step with a draft, if those without take as long as *plain* ones; 0: there is none."""
        single = sum(one.widths.get(1, 0) for one in self.answers)
        wide = self.total("forwards") - single
        if not wide:
            return 0.0
        shared = self.forward_ms.keys() & plain.forward_ms.keys()
        beside = statistics.median(self.forward_ms[turn] - plain.forward_ms[turn] for turn in shared)
        return plain.ms + beside * (single + wide) / wide

    def total(self, name: str) -> int:
        """The sum over the answers of the latest round."""
        return sum(getattr(one, name) for one in self.answers)

    @property
    def forwards_per_token(self) -> float:
        """Forwards of the target for each id."""
        return self.total("forwards") / sum(len(one.ids) for one in self.answers)

    @property
    def depths(self) -> list[int]:
        """Drafts that were kept down to each depth."""
        return [sum(counts) for counts in zip_longest(*(one.depths for one in self.answers), fillvalue=0)]

    @property
    def widths(self) -> dict[int, int]:
        """Forwards by rows."""
        found: dict[int, int] = {}
        for one in self.answers:
            for rows, count in one.widths.items():
                found[rows] = found.get(rows, 0) + count
        return dict(sorted(found.items()))


class Rounds:
    """Rounds over *asked*, numbered on. tallies: by the name of the way."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.tallies: dict[str, Tally] = {}
        self._turn = 0

    def run(self, ways: Mapping[str, Way], least: int, seconds: float = 0.0) -> None:
        """At least *least* rounds of *ways*, and further ones until *seconds* are over."""
        began, done = time.perf_counter(), 0
        # The last round begins where it is likely to end in time.
        while done < least or (time.perf_counter() - began) * (done + 1) < seconds * done:
            names = list(ways) if self._turn % 2 == 0 else list(reversed(ways))
            answers: dict[str, list[Answer]] = {name: [] for name in names}
            for prompt, _ in self.asked:
                for name in names:
                    answers[name].append(ways[name](prompt))
            for name in names:
                self.tallies.setdefault(name, Tally()).take(self._turn, answers[name], self.asked)
            self._turn += 1
            done += 1

    def over(self, name: str, other: str) -> float:
        """How many times as fast as *other* the way *name* is: the median of the rounds that had both."""
        one, two = (self.tallies[each].rates for each in (name, other))
        return statistics.median(one[turn] / two[turn] for turn in one.keys() & two.keys())

    def fastest(self, names: Sequence[str]) -> str:
        """Of *names* the one with the highest median."""
        return max(names, key=lambda name: self.tallies[name].median)
