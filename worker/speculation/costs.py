"""What a forward costs on this device, as measured before and while jobs run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from worker.speculation.draft import MAX_NODES

# A measured time counts by this share; one that is twice as long as expected by a quarter of it, and as no longer
# than thrice, for the machine was busy with something else.
_SHARE: Final = 0.06
_LEAST, _MOST = 0.5, 3.0
# After so many steps a kind of draft that was none of them comes nearer by this part to the nearest kind that was:
# what looked dear while the machine was busy would not be measured again.
_FADE_EVERY, _FADE = 64, 0.25
# Contexts at which rows are weighed before any job is planned, and of what they would bring if all were kept the
# share that they must not cost: drafts err, and clocks do.
_LOOKED_AT: Final = (64, 2048)
_HOPED: Final = 0.9
# Contexts so near are one.
_CONTEXTS: Final = 256
# Steps of so many rows, or fewer down to the size before, share a correction; 0: the plain step.
_KINDS: Final = (0, *(next(size for size in (2, 4, 8, 16) if size > nodes) for nodes in range(1, MAX_NODES + 1)))


@dataclass(frozen=True, slots=True)
class Costs:
    """The table of the geometry probe, and what a step costs beside its forward.

    rows: ascending, from 1. contexts: ascending. ms: for each context, of a step of each number of rows, one ahead
    of the host. overhead_ms: what a step takes longer because the host waits for its result. draft_ms: of one
    drafted token. sizes: the numbers of rows that are compiled, of which the next larger one runs; empty: any.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    ms: tuple[tuple[float, ...], ...]
    overhead_ms: float
    draft_ms: float = 0.0
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.rows[0] == 1, "the plain step is in the table"
        assert len(self.ms) == len(self.contexts) > 0
        assert all(len(line) == len(self.rows) for line in self.ms)

    def launched(self, rows: int) -> int:
        """How many rows run where *rows* are wanted."""
        return next((size for size in self.sizes if size >= rows), rows)

    def forward(self, context: int, rows: int) -> float:
        """Milliseconds of a forward; straight lines between the measured points, the last ones beyond them."""
        rows = self.launched(rows)
        at = bisect_left(self.contexts, context)
        if at in (0, len(self.contexts)):
            return self._line(self.ms[min(at, len(self.contexts) - 1)], rows)
        low, high = self.contexts[at - 1], self.contexts[at]
        part = (context - low) / (high - low)
        return (1 - part) * self._line(self.ms[at - 1], rows) + part * self._line(self.ms[at], rows)

    def _line(self, ms: tuple[float, ...], rows: int) -> float:
        at = bisect_left(self.rows, rows)
        if at == len(self.rows):
            # Beyond the table every row costs what it did on average: more than the truth rather than less.
            return ms[-1] * rows / self.rows[-1]
        if self.rows[at] == rows:
            return ms[at]
        low, high = self.rows[at - 1], self.rows[at]
        return ms[at - 1] + (ms[at] - ms[at - 1]) * (rows - low) / (high - low)


@dataclass(slots=True)
class Measured:
    """The table, corrected by the steps that ran; this outlives a job."""

    costs: Costs
    _factors: dict[int, float] = field(default_factory=lambda: dict.fromkeys(_KINDS, 1.0))
    _seen: set[int] = field(default_factory=set)
    # How many steps were told, and the kinds of the latest of them.
    _told: int = 0
    _lately: set[int] = field(default_factory=set)
    _tables: dict[int, list[float]] = field(default_factory=dict)
    # The steps at the place of the latest context, with the factors as they are; -1: nowhere.
    _at: int = -1
    _steps: list[float] = field(default_factory=list)

    def steps(self, context: int) -> Sequence[float]:
        """Milliseconds of steps that verify 0, 1, ... `MAX_NODES` nodes; the first is one ahead of the host.

        Good until the next call of any kind: a plain step must cost the host next to nothing here.
        """
        place = context // _CONTEXTS
        if place != self._at:
            factors = self._factors
            self._steps = [ms * factors[kind] for ms, kind in zip(self._uncorrected(place), _KINDS, strict=True)]
            self._at = place
        return self._steps

    def learn(self, context: int, nodes: int, ms: float) -> None:
        """A step that verified *nodes* took *ms*."""
        times = min(ms / self.steps(context)[nodes], _MOST)
        share = _SHARE if times < 2 else _SHARE / 4
        kind = _KINDS[nodes]
        factor = self._factors[kind] * (1 + share * (times - 1))
        self._factors[kind] = min(max(factor, _LEAST), _MOST)
        self._told += 1
        self._lately.add(kind)
        if kind:
            self._at = -1
            # What no step has shown yet is like the nearest that one has: they share the wait.
            self._seen.add(kind)
            for other in set(_KINDS[1:]) - self._seen:
                self._factors[other] = self._factors[min(self._seen, key=lambda one: abs(one - other))]
        else:
            self._steps[0] = self._tables[self._at][0] * self._factors[0]
        if self._told % _FADE_EVERY == 0:
            self._fade()

    def _fade(self) -> None:
        for kind in set(_KINDS[1:]) - self._lately:
            near = min(self._lately, key=lambda one: abs(one - kind))
            self._factors[kind] += _FADE * (self._factors[near] - self._factors[kind])
        self._lately.clear()
        self._at = -1

    def _uncorrected(self, place: int) -> list[float]:
        table = self._tables.get(place)
        if table is None:
            middle = place * _CONTEXTS + _CONTEXTS // 2
            table = self._tables[place] = [self._table(middle, nodes) for nodes in range(MAX_NODES + 1)]
        return table

    def _table(self, context: int, nodes: int) -> float:
        forward = self.costs.forward(context, nodes + 1)
        return forward + (self.costs.overhead_ms + nodes * self.costs.draft_ms if nodes else 0.0)


def too_dear(measured: Measured, width: int) -> str:
    """Why no draft that *width* rows hold could win, in words; empty where one could, or where none has room."""
    if width == 1 or _could_pay(measured, width):
        return ""
    if not _could_pay(measured, width, spared_ms=measured.costs.draft_ms):
        return "rows cost too much here: no draft could win, even if all of it were kept"
    plain = measured.steps(_LOOKED_AT[0])[0]
    return (
        f"drafts cost too much here, {measured.costs.draft_ms:.3g} ms a token where a plain step takes "
        f"{plain:.3g} ms: none could win, even if all of it were kept"
    )


def _could_pay(measured: Measured, width: int, spared_ms: float = 0.0) -> bool:
    """Whether a draft could win if each token of it took *spared_ms* less."""
    for context in _LOOKED_AT:
        steps = measured.steps(context)
        if any(steps[nodes] - nodes * spared_ms < _HOPED * steps[0] * (nodes + 1) for nodes in range(1, width)):
            return True
    return False
