"""How much of a draft the next forward verifies: as much as pays, and none where speculation loses.

A step is worth the tokens it is expected to yield, at what a token costs at present, less what the step costs. The
acceptance of each depth is learnt from the drafts of this job, by the kind of their margin; only depths whose
ancestors were all accepted were tested. So a short match, or a small gap, is left alone where a step that waits
costs more than it brings, while rows may be nearly free.

Over that stands the gate, which believes no estimate: once drafts cost more time than they saved, by one plain
step over 16 drafts or by two at once, speculation is off for a pause. Each pause is four times as long as the one
before, until speculation has won. It is on again earlier where drafts that were only watched would have won. A
drafter whose drafts cost time is not watched: after a pause it gets a trial of 16 cheap drafts, or as many as the
gate bears.

No clock: times are told. Of a job nothing stays but the times.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, NamedTuple

from worker.speculation.acceptance import Acceptance, Counts, Pace
from worker.speculation.costs import Costs, Measured
from worker.speculation.draft import MAX_NODES, Draft, Traits

WINDOW: Final = 16
"""Steps with drafts after which the gate judges."""
# Plain steps lost at which the gate shuts at once, and over a full window.
_PURSE, _DOUBT = 2.0, 1.0
_FIRST_PAUSE, _LONGEST_PAUSE, _LONGER = 16, 512, 4
_MOST_FORKS: Final = 3
# A step has to promise this share of its time, more to begin drafting than to go on: times are not known better.
_BEGIN, _GO_ON = 0.04, 0.02
# The acceptance that a trial hopes for, whatever the traits believe.
_HOPE: Final = 0.9
_CHEAP: Final = 1.15
# Weight of an older watched round.
_WATCHED_FADES: Final = 0.8


class Plan(NamedTuple):
    """What the next step verifies: *nodes* in all, *forks* of them with their branches beside the trunk.

    depth: of the trunk. kinds: of the margin of each depth. turns: depths of the forks. why: in words, where it is
    nothing. beside_ms: what was drafted longer than *nodes* say; forks, which cost no draft, count against it.
    gain: what it promises beyond what it has to, in plain steps.
    """

    context: int
    nodes: int = 0
    forks: int = 0
    depth: int = 0
    kinds: tuple[int, ...] = ()
    turns: tuple[int, ...] = ()
    why: str = ""
    beside_ms: float = 0.0
    gain: float = 0.0

    def launched(self, draft: Draft) -> Plan:
        """What is verified of it where *draft* has fewer forks than were planned."""
        if len(draft) == self.nodes and not self.forks:
            return self
        beside = Counter(draft.parents)
        turns = tuple(depth for depth in range(1, draft.trunk + 1) for _ in range(beside[depth - 1] - 1))
        return self._replace(nodes=len(draft), depth=draft.trunk, forks=len(turns), turns=turns)


@dataclass(slots=True)
class _Gate:
    """Whether speculation is on, by the time it saved; times in plain steps."""

    saved: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    pause: int = 0
    next_pause: int = _FIRST_PAUSE
    would: float = 0.0
    trial: int = 0

    @property
    def stake(self) -> float:
        """What the next draft may lose."""
        return _PURSE + max(sum(self.saved), 0.0)

    def judge(self, saved: float) -> bool:
        """A step with a draft saved this much; whether speculation goes off now."""
        self.saved.append(saved)
        self.trial = max(self.trial - 1, 0)
        total, full = sum(self.saved), len(self.saved) == WINDOW
        if total < -_PURSE or (full and total < -_DOUBT):
            self.shut()
            return True
        if full and total > 0:
            self.next_pause = _FIRST_PAUSE
        return False

    def shut(self) -> None:
        self.pause, self.next_pause = self.next_pause, min(self.next_pause * _LONGER, _LONGEST_PAUSE)
        self.would, self.trial = 0.0, 0
        self.saved.clear()

    def watch(self, saved: float) -> None:
        """A draft that was not verified would have saved this much."""
        self.would = self.would * _WATCHED_FADES + saved
        if self.would > 1:
            self.pause = 0


class Planner:
    """Plans the steps of one job after the other.

    Args:
        costs: What forwards cost; a `Measured` goes on with what other planners measured.
        limit: The most nodes that a forward may have; 0: never any.
        trees: Whether drafts may fork.
        traits: Of the drafter.
    """

    def __init__(self, costs: Costs | Measured, limit: int, trees: bool, traits: Traits) -> None:
        self.measured = costs if isinstance(costs, Measured) else Measured(costs)
        self._limit = min(limit, MAX_NODES)
        self._forks = _MOST_FORKS if trees else 0
        self._traits = traits
        self.begin()

    def begin(self) -> None:
        """A job begins: nothing of the one before counts but the times."""
        self._kept = Acceptance(self._traits)
        self._gate = _Gate()
        self.counts = Counts()
        self._would: Plan | None = None
        self._drafting = False
        self._watched = False
        self._idle = 0
        self.pace = Pace()

    def plan(self, context: int, margins: Sequence[float] | None, turns: Sequence[int] = ()) -> Plan:
        """What the next step verifies of a draft.

        context: rows that the forward reads. margins: of the depths that the drafter proposes; None where it has
        yet to draft, and so is asked how much. turns: depths at which it could fork, the best first.
        """
        if self._limit == 0 or (margins is not None and not margins):
            return self._nothing(context, "nothing to verify", held=False)
        kinds = tuple(map(self._kept.kind, (None,) * self._limit if margins is None else margins[: self._limit]))
        self._kept.hope = _HOPE if self._gate.trial else 0.0
        plan, gain = self._best(context, kinds, turns, self.measured.steps(context))
        plan = plan._replace(gain=gain)
        self._would = plan if gain > 0 else None
        if self._gate.pause:
            self._gate.pause -= 1
            if not self._gate.pause:
                self._try(context)
            return self._nothing(context, "off: it lost")
        if gain > 0 or self._gate.trial:
            self._idle = 0
            return plan if gain > 0 else Plan(context, 1, 0, 1, kinds)
        self._idle += 1
        if not self._watched and self._idle >= self._gate.next_pause:
            self._idle = 0
            self._gate.next_pause = min(self._gate.next_pause * _LONGER, _LONGEST_PAUSE)
            self._try(context)
        return self._nothing(context, "would not pay")

    def refined(self, plan: Plan, margins: Sequence[float], turns: Sequence[int]) -> Plan:
        """*plan*, made before there was a draft, now that there is one of *margins*: always something to verify.

        turns: as in `plan`. What was drafted has been paid for.
        """
        assert margins, "a draft"
        drafted, draft_ms = len(margins), self.measured.costs.draft_ms
        steps = list(self.measured.steps(plan.context))
        steps[1:] = (ms + (drafted - nodes) * draft_ms for nodes, ms in enumerate(steps[1:], start=1))
        best, _ = self._best(plan.context, tuple(map(self._kept.kind, margins)), turns, steps)
        if not best.nodes:
            best = plan._replace(nodes=min(plan.depth, drafted), depth=min(plan.depth, drafted), forks=0)
        return best._replace(beside_ms=(drafted - best.nodes) * draft_ms)

    def told(self, plan: Plan, accepted: int, ms: float, turned: int = 0, steps: int = 1) -> None:
        """The step of *plan* took *ms* and kept *accepted* nodes, the depth that its path reached.

        ms: 0 where nobody knows: as long as expected. turned: the depth at which the path left the trunk; 0:
        nowhere. steps: how many alike there were in a row, of *ms* each.
        """
        if ms > 0:
            self.measured.learn(plan.context, plan.nodes, max(ms - plan.beside_ms, 0.0))
        expected = self.measured.steps(plan.context)
        plain, ms = expected[0], ms or expected[plan.nodes]
        self.pace.learn(1 + accepted, ms / plain, steps)
        self._drafting = plan.nodes > 0
        if not plan.nodes:
            return
        self._kept.now += 1
        self._learn(plan.kinds[: plan.depth], turned - 1 if turned else accepted)
        self._learn_forks(plan, accepted, turned)
        self._count(plan, accepted, turned)
        if self._gate.judge(1 + accepted - ms / plain):
            self.counts.offs += 1
            self._drafting = False

    def watched(self, context: int, margins: Sequence[float], kept: int) -> None:
        """A draft that was not verified would have had *kept* of its trunk accepted (`Shadow` says it)."""
        self._watched = True
        self._learn(tuple(map(self._kept.kind, margins)), kept)
        if self._gate.pause and self._would is not None:
            steps = self.measured.steps(context)
            saved = 1 + min(kept, self._would.depth) - steps[self._would.nodes] / steps[0]
            self._gate.watch(saved)

    def figures(self) -> dict[str, Any]:
        """Of the job so far: plain numbers for its last word."""
        return self.counts.figures()

    def _nothing(self, context: int, why: str, *, held: bool = True) -> Plan:
        self.counts.why = why
        self.counts.off_steps += held
        return Plan(context, why=why)

    def _try(self, context: int) -> None:
        """Give a drafter that is not watched another chance, if there is any: what is long ago counts for less."""
        steps = self.measured.steps(context)
        if not self._watched and steps[1] < (1 + _HOPE) * steps[0]:
            self._kept.doubt()
            self._gate.trial = WINDOW

    def _best(
        self, context: int, kinds: tuple[int, ...], turns: Sequence[int], steps: Sequence[float]
    ) -> tuple[Plan, float]:
        """The draft that gains most, and how much more than it has to, in plain steps; *steps*: what they take."""
        worth = self.pace.worth
        reluctance = _GO_ON if self._drafting or self._gate.trial else _BEGIN
        reach = self._kept.reach(kinds)
        # A trial is to last: it takes what costs hardly more than the least draft. And no draft may lose more than
        # the latest ones saved, beside what the gate bears.
        dearest = steps[1] * _CHEAP if self._gate.trial else steps[0] * (1 + self._gate.stake)
        best, most = Plan(context), -1e9
        sums = list(accumulate(reach))
        for forks in range(min(len(turns), self._forks) + 1):
            taken = tuple(turns[:forks])
            branches = forks * self._traits.branch
            gained = self._fork_gains(taken, reach)
            deepest = min(len(reach) - 1, self._limit - branches)
            for depth in range(1, deepest + 1):
                nodes = depth + branches
                # Where one more costs nothing it is taken.
                if depth < deepest and steps[nodes + 1] <= steps[nodes]:
                    continue
                if steps[nodes] > dearest:
                    break
                tokens = sums[depth] - 1 + sum(gain for turn, gain in gained.items() if turn <= depth)
                price = steps[nodes] / steps[0]
                gain = worth * tokens - (price - 1) - reluctance * price
                if gain > most:
                    most, best = gain, Plan(context, nodes, forks, depth, kinds, taken)
        return best, most

    def _fork_gains(self, turns: tuple[int, ...], reach: list[float]) -> dict[int, float]:
        """Tokens that the forks are expected to bring, by depth: where the trunk misses there."""
        gained: dict[int, float] = {}
        left = dict.fromkeys(turns, self._kept.gain())
        for turn in turns:
            if turn < len(reach):
                gained[turn] = gained.get(turn, 0.0) + (reach[turn - 1] - reach[turn]) * left[turn]
                # A second fork at a depth gets what the first one leaves.
                left[turn] /= 2
        return gained

    def _learn(self, kinds: tuple[int, ...], kept: int) -> None:
        """Of the depths drafted those up to the first miss were tested."""
        for depth, kind in enumerate(kinds[: kept + 1], start=1):
            self._kept.learn(kind, depth, depth <= kept)

    def _learn_forks(self, plan: Plan, accepted: int, turned: int) -> None:
        missed = turned or accepted + 1
        if missed in plan.turns and missed <= plan.depth:
            self._kept.gained.learn(accepted - (turned - 1) if turned else 0, self._kept.now)

    def _count(self, plan: Plan, accepted: int, turned: int) -> None:
        counts = self.counts
        counts.steps += 1
        counts.drafted += plan.nodes
        counts.accepted += accepted
        counts.fork_attempts += plan.forks
        counts.fork_wins += turned > 0
        for depth in range(plan.depth):
            counts.drafted_by_depth[depth] += 1
        for depth in range(accepted):
            counts.accepted_by_depth[depth] += 1
        counts.why = ""
