"""What a planner learns of a job: how often drafts are kept, by margin and depth, and how fast the text comes."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from worker.speculation.draft import MAX_NODES, Traits

# A draft that hardly anything reaches is not thought further.
_LEAST_REACH: Final = 0.01
# Weights of what is older: of a test of acceptance, by tests and by drafts; of a step's pace.
_KEPT_FADES, _STALE_FADES, _PACE_FADES = 0.975, 0.975, 0.97
# Believed tests, beside the measured ones: of a kind in its prior, of a depth in its kind.
_PRIOR_TESTS, _KIND_TESTS = 3.0, 3.0


@dataclass(slots=True)
class Pace:
    """Tokens and time, in plain steps, of the latest steps, as if some plain ones had gone before."""

    tokens: float = 8.0
    time: float = 8.0

    @property
    def worth(self) -> float:
        """Of a token, in plain steps; at most 1."""
        return min(self.time / self.tokens, 1.0)

    def learn(self, tokens: int, times: float, steps: int) -> None:
        """So many *steps* in a row of *tokens* and *times* each."""
        fades = _PACE_FADES**steps
        weight = (1 - fades) / (1 - _PACE_FADES)
        self.tokens = self.tokens * fades + weight * tokens
        self.time = self.time * fades + weight * times


@dataclass(slots=True)
class Share:
    """How often something came true; older tests fade with newer ones, and with drafts that tested others."""

    true: float = 0.0
    tests: float = 0.0
    at: int = 0

    def learn(self, value: float, now: int) -> None:
        """A test came to *value*."""
        self.true = self.true * _KEPT_FADES + value
        self.tests = self.tests * _KEPT_FADES + 1
        self.at = now

    def near(self, believed: float, tests: float, now: int) -> float:
        """With so many believed *tests* beside the measured ones; *now* counts drafts."""
        fresh = _STALE_FADES ** (now - self.at)
        return (self.true * fresh + believed * tests) / (self.tests * fresh + tests)

    def doubt(self) -> None:
        """What comes next is to count for more."""
        self.true, self.tests = self.true / 16, self.tests / 16


@dataclass(slots=True)
class Acceptance:
    """By kind of margin, for the first depth and for all deeper ones, and by kind and depth.

    The last kind: whatever the margin, for drafts not made yet; those of a free drafter always are. hope: the
    least that is believed before tests.
    """

    traits: Traits
    kinds: defaultdict[tuple[int, bool], Share] = field(default_factory=lambda: defaultdict(Share))
    depths: defaultdict[tuple[int, int], Share] = field(default_factory=lambda: defaultdict(Share))
    gained: Share = field(default_factory=Share)
    hope: float = 0.0
    now: int = 0

    def kind(self, margin: float | None) -> int:
        """The kind of a margin; None: whatever it is."""
        edges = self.traits.edges
        return len(edges) + 1 if margin is None else bisect_right(edges, margin)

    def learn(self, kind: int, depth: int, kept: bool) -> None:
        """A depth was tested."""
        for one in (kind,) if self.traits.free else {kind, self.kind(None)}:
            self.kinds[one, depth > 1].learn(kept, self.now)
            self.depths[one, depth].learn(kept, self.now)

    def believed(self, kind: int) -> float:
        """Of a kind, before tests."""
        kept = self.traits.kept
        return max(kept[kind] if kind < len(kept) else sum(kept) / len(kept), self.hope)

    def reach(self, kinds: Sequence[int]) -> list[float]:
        """The chance that each depth, 0 first, is kept together with those before it."""
        reach, latest, whole = [1.0], (-1, False), 0.0
        for depth, kind in enumerate(kinds, start=1):
            if latest != (kind, depth > 1):
                latest, whole = (kind, depth > 1), self._of_kind(kind, depth > 1)
            own = self.depths.get((kind, depth))
            kept = own.near(whole, _KIND_TESTS, self.now) if own else whole
            reach.append(reach[-1] * kept)
            if reach[-1] < _LEAST_REACH:
                break
        return reach

    def _of_kind(self, kind: int, deep: bool) -> float:
        alike = self.kinds.get((kind, deep))
        whole = self.believed(kind)
        return alike.near(whole, _PRIOR_TESTS, self.now) if alike else whole

    def gain(self) -> float:
        """Tokens that a fork brings where the trunk misses at its depth."""
        return self.gained.near(self.traits.gained, _PRIOR_TESTS, self.now)

    def doubt(self) -> None:
        """What comes next is to count for more."""
        for share in (*self.kinds.values(), *self.depths.values()):
            share.doubt()


@dataclass(slots=True)
class Counts:
    """What came of the drafts of a job.

    steps: with drafts. off_steps: that left a draft alone, by the gate or by what it promised. offs: how often the
    gate shut. drafted_by_depth, accepted_by_depth: steps whose trunk, and whose kept path, reached each depth.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_by_depth: list[int] = field(default_factory=lambda: [0] * MAX_NODES)
    accepted_by_depth: list[int] = field(default_factory=lambda: [0] * MAX_NODES)
    fork_attempts: int = 0
    fork_wins: int = 0
    off_steps: int = 0
    offs: int = 0
    why: str = ""

    def add(self, other: Counts) -> None:
        """Those of another drafter of the same job."""
        for name in ("steps", "drafted", "accepted", "fork_attempts", "fork_wins", "off_steps", "offs"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, others in (
            (self.drafted_by_depth, other.drafted_by_depth),
            (self.accepted_by_depth, other.accepted_by_depth),
        ):
            mine[:] = map(sum, zip(mine, others, strict=True))

    def figures(self) -> dict[str, Any]:
        """Plain numbers for a job's last word, by the names above."""
        deep = max((depth for depth in range(MAX_NODES) if self.drafted_by_depth[depth]), default=-1) + 1
        by_depth = {
            "drafted_by_depth": self.drafted_by_depth[:deep],
            "accepted_by_depth": self.accepted_by_depth[:deep],
        }
        return {**asdict(self), **by_depth}
