"""Runs a job's own speculative rows: a draft, one forward over it, and what of it holds.

The serial engine computes and draws; here is decided when a forward has more rows than one. While nothing is
drafted it runs one token ahead, as it does alone, and its newest id is not known yet: what was expected in its
place is left out of the first draft. After a forward with drafts all is known; the next one is launched at once,
and what the last one decided is handed out while the device runs.

To look for a draft costs the host time, which a small model has not to spare. The longer nothing was drafted, the
more steps are the serial engine's alone until the next look; the drafter is told of their ids then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from worker.engine.draw import NOT_A_NUMBER
from worker.engine.engine import Engine, EngineRequest, Figures, PrefillProgress, Step
from worker.engine.serial import SerialEngine
from worker.speculation.acceptance import Counts
from worker.speculation.costs import Measured, too_dear
from worker.speculation.draft import MAX_NODES, Draft, Drafter, Terms, left_trunk
from worker.speculation.planner import Plan, Planner
from worker.speculation.shadow import Shadow
from worker.width import Meta, WideEngine, WidthPlan

ROUTE: Final = "hyper_width"
"""What DONE calls a job whose forwards may have more rows than one."""

# The newest id, one drafted behind it, and one drawn behind that.
_LEAST_BUDGET: Final = 3
_MOST_FORKS: Final = 3
# Of steps without a draft so many make the time between two looks a step longer, and more in a job of whose drafts
# this share was kept; there are at most so many steps from look to look.
_IMPATIENT, _PATIENT, _PAYS, _LOOK_EVERY = 4, 8, 0.3, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What speculation is made of.

    trees: whether drafts may fork. clock: seconds. engine: of a job, made of the most rows of a forward, the
    serial engine and these; None: `SpeculatingEngine`. beside: a free drafter that is asked, too.
    """

    drafter: Drafter
    measured: Measured
    trees: bool
    clock: Callable[[], float]
    engine: Callable[[int, SerialEngine, Parts], SpeculatingEngine] | None = None
    beside: Parts | None = None


class HyperWidthExecutor:
    """Plans the width of jobs, and runs those that are wider than 1.

    Args:
        parts: drafter, costs and clock.
        width: the most rows that the lane verifies at once.
        why: where that is 1, the reason in words.
    """

    def __init__(self, parts: Parts, width: int, why: str = "") -> None:
        self._parts = parts
        self.trees = parts.trees
        self.width = width
        self.why = why
        dear = too_dear(parts.measured, width)
        if dear:
            self.width, self.why = 1, dear

    def plan(self, meta: Meta) -> WidthPlan:
        """As in `WidthExecutor`."""
        if meta.speculation == "off":
            return WidthPlan(1, "the job asks for no speculation")
        if meta.budget < _LEAST_BUDGET:
            return WidthPlan(1, "the answer is too short for a draft")
        return WidthPlan(self.width, self.why)

    def run(self, plan: WidthPlan, singleton: Engine) -> WideEngine:
        """As in `WidthExecutor`."""
        assert isinstance(singleton, SerialEngine), "only the serial engine verifies drafts"
        return (self._parts.engine or SpeculatingEngine)(plan.width, singleton, self._parts)


class SpeculatingEngine:
    """The `Engine` of a job each step of which may verify a draft. *widest*: the most rows of a forward."""

    def __init__(self, widest: int, serial: SerialEngine, parts: Parts) -> None:
        self.capacity = serial.capacity
        self.width = 1
        self._widest = widest
        self._serial = serial
        self._drafter = parts.drafter
        self._clock = parts.clock
        self._planner = Planner(parts.measured, widest - 1, parts.trees, parts.drafter.traits)
        self._forks = _MOST_FORKS if parts.trees else 0
        self._shadow = Shadow()
        self._forget()

    def warm_up(self) -> None:
        """As in `Engine`."""
        self._serial.warm_up()

    def start(self, request: EngineRequest, progress: PrefillProgress) -> None:
        """As in `Engine`."""
        self._planner.begin()
        self._shadow.drop()
        self._forget()
        self._serial.start(request, progress)
        ids = (*request.prompt, *request.drawn)
        terms = Terms(
            budget=request.max_tokens,
            keep=request.cache is not False,
            owner=request.owner,
            look=lambda: progress(len(ids), len(ids)),
        )
        self._drafter.begin(ids, request.sampling, terms)
        self._began = self._clock()

    def _forget(self) -> None:
        """What is known of a job before its first step."""
        # What came of the latest step with a draft, or of one that left a draft alone, told when the next one
        # begins: it lasts until then. And the draft whose forward runs.
        self._outcome: _Outcome | None = None
        self._flight: tuple[Plan, Draft] | None = None
        # The account of steps: when it began, how many plain ones it has, whether more than they took the time.
        self._began, self._steps, self._mixed = 0.0, 0, False
        self._launched = self._committed = 0
        # Steps since the latest draft, and until the next look.
        self._plain = self._left = 0
        # Ids of plain steps that the drafter was not told of.
        self._unseen: list[int] = []

    def step(self) -> Step:
        """As in `Engine`."""
        serial = self._serial
        if not serial.decided:
            if self._left:
                self._left -= 1
                step = serial.step()
                self._unseen.append(step.token)
                return step
            self._go_on()
        return serial.step()

    def stop(self) -> Figures:
        """As in `Engine`."""
        self._tell(0.0)
        self._drafter.end()
        figures = self._serial.stop()
        told = self._told().figures()
        drafting = {
            "rows_launched": self._launched,
            "rows_committed": self._committed,
            **{name: told[name] for name in ("fork_attempts", "fork_wins", "off_steps", "offs")},
        }
        depths = tuple(told["accepted_by_depth"])
        return replace(figures, route=ROUTE, drafted=self._launched, accepted_by_depth=depths, drafting=drafting)

    def counts(self) -> dict[str, int] | None:
        """As in `Engine`."""
        return self._serial.counts()

    def _told(self) -> Counts:
        """What came of the job's drafts."""
        return self._planner.counts

    def _go_on(self) -> None:
        """Start what comes next, now that all that was decided is handed out; something is decided then."""
        while not self._serial.decided:
            if self._flight is not None:
                self._land(*self._flight)
            self._start_next()

    def _land(self, plan: Plan, draft: Draft) -> None:
        self._flight = None
        path, ids = self._serial.land()
        self.width = draft.width
        self._launched += len(draft)
        self._committed += len(path) - 1
        self._outcome = _Outcome(plan, len(path) - 1, left_trunk(draft, path))
        self._became_text(ids)

    def _start_next(self) -> None:
        """Launch a forward over a draft that is worth it, else a plain one."""
        serial = self._serial
        newest = serial.newest
        if newest == NOT_A_NUMBER and serial.decided:
            # The answer breaks off, behind what is decided.
            return
        if self._unseen:
            self._became_text(self._unseen)
            self._unseen = []
        # Behind the last node one more is drawn.
        limit = min(self._widest, serial.left) - 1
        if limit >= 1 and newest != NOT_A_NUMBER:
            if self._drafter.traits.free:
                self._launch_what_there_is(limit, newest)
            else:
                self._account()
                self._launch_what_is_asked_for(limit, newest)
        if self._flight is None:
            self._run_plain()

    def _run_plain(self) -> None:
        """One plain step, and how many follow it before the next look."""
        serial = self._serial
        known = serial.newest is not None
        # Where ids wait to be handed out, that is part of the time until the next look, which is no plain step's.
        self._mixed = bool(serial.decided)
        if not self._mixed:
            self.width = 1
        serial.advance()
        if not known:
            self._unseen.append(serial.last)
        self._plain += 1
        self._steps += 1
        if self._drafter.traits.free:
            patience = _PATIENT if self._committed >= _PAYS * self._launched else _IMPATIENT
            self._left = min(self._plain // patience, _LOOK_EVERY - 1)
            self._plain += self._left
            self._steps += self._left

    def _account(self) -> None:
        """The steps since the latest account are over: what came of them is told, and another account begins."""
        now = self._clock()
        if self._outcome is None and self._steps:
            self._outcome = _Outcome(Plan(self._serial.position))
        self._tell(0.0 if self._mixed else (now - self._began) * 1e3)
        self._began, self._steps, self._mixed = now, 0, False

    def _tell(self, ms: float) -> None:
        """Tell the planner what came of the latest steps. *ms*: how long they lasted; 0 where nobody knows."""
        if self._outcome is not None:
            plan, accepted, turned = self._outcome
            steps = max(self._steps, 1)
            self._planner.told(plan, accepted, ms / steps, turned, steps)
            self._outcome = None

    def _became_text(self, ids: Sequence[int]) -> None:
        watched = self._shadow.extend(ids)
        if watched is not None:
            self._planner.watched(self._serial.position, *watched)
        self._drafter.extend(ids)

    def _launch_what_there_is(self, limit: int, newest: int | None) -> None:
        """Of what the drafter proposes, whatever comes of it."""
        position = self._serial.position
        # Where the newest id is being drawn it is the first of the proposal; no forks, for the text behind it is a
        # guess.
        guessed = int(newest is None)
        forks = 0 if guessed else self._most_forks(limit)
        whole = self._drafter.propose(min(limit + guessed, MAX_NODES), forks)
        offered = len(whole.margins) > guessed
        # Plain steps in a row have one account: each look at them costs the host little more than the look.
        if offered or self._outcome is not None or self._mixed:
            self._account()
        if not offered:
            self._shadow.take(whole)
            return
        plan = self._planner.plan(position, whole.margins[guessed:], whole.turns if forks else ())
        self._outcome = _Outcome(plan)
        if not plan.nodes:
            self._shadow.take(whole)
            return
        self._shadow.drop()
        if plan.forks or guessed + plan.depth > whole.draft.trunk:
            self._launch(plan, self._drafter.propose(plan.nodes, plan.forks).draft)
        else:
            self._launch(plan, Draft.chain(whole.draft.tokens[guessed : guessed + plan.depth]))

    def _launch_what_is_asked_for(self, limit: int, newest: int | None) -> None:
        """Of a drafter that takes time: it is asked only if a draft is planned, and knows all of the text."""
        serial, drafter = self._serial, self._drafter
        plan = self._planner.plan(serial.position, None)
        self._left_alone(plan)
        if not plan.nodes:
            return
        if newest is None:
            newest = serial.resolve()
            if newest == NOT_A_NUMBER:
                return
            self._became_text((newest,))
        # A drafter that was left alone has to read; neither that nor the wait for the newest id is a draft's.
        drafter.catch_up()
        self._began = self._clock()
        proposal = drafter.propose(min(plan.depth, limit), 0)
        if not proposal.margins:
            return
        turns = proposal.turns if self._most_forks(limit) else ()
        plan = self._planner.refined(plan, proposal.margins, turns)
        self._launch(plan, drafter.propose(plan.nodes, plan.forks).draft)

    def _left_alone(self, plan: Plan) -> None:
        """What comes of the step if nothing of *plan* is launched."""
        self._outcome = _Outcome(plan if not plan.nodes else Plan(plan.context))

    def _most_forks(self, limit: int) -> int:
        """None near the end of the budget: the planner knows no end, and forks come beside the trunk."""
        return self._forks if limit == self._widest - 1 else 0

    def _launch(self, plan: Plan, draft: Draft, tokens: Any = None) -> None:
        self._serial.launch(draft, tokens)
        self._flight = plan.launched(draft), draft
        self._outcome = None
        self._plain = 0


class _Outcome(NamedTuple):
    """Of a step: what was planned, how deep the kept path is, and where it left the trunk."""

    plan: Plan
    accepted: int = 0
    turned: int = 0
