"""Runs a job's own speculative rows: a draft, one forward over it, and what of it holds.

The serial engine computes and draws; here is decided when a forward has more rows than one. While nothing is
drafted it runs one token ahead, as it does alone, and its newest id is not known yet: what was expected in its
place is left out of the first draft. After a forward with drafts all is known, and the next one begins behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from worker.engine.draw import NOT_A_NUMBER
from worker.engine.engine import Engine, EngineRequest, Figures, PrefillProgress, Step
from worker.engine.serial import SerialEngine
from worker.speculation.costs import Measured
from worker.speculation.draft import MAX_NODES, Draft, Drafter, Terms, left_trunk
from worker.speculation.planner import Plan, Planner
from worker.speculation.shadow import Shadow
from worker.width import Meta, WideEngine, WidthPlan

ROUTE: Final = "hyper_width"
"""What DONE calls a job whose forwards may have more rows than one."""

# Contexts at which rows are weighed before any job is planned.
_LOOKED_AT: Final = (64, 2048)
# The newest id, one drafted behind it, and one drawn behind that.
_LEAST_BUDGET: Final = 3
# Of what rows would bring if all were kept, the share that they must not cost: drafts err, and clocks do.
_HOPED: Final = 0.9
_MOST_FORKS: Final = 3
# A text that offered no draft for so many steps is looked at every so often: a look costs the host time.
_QUIET_AFTER, _LOOK_EVERY = 32, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What speculation is made of. trees: whether drafts may fork. clock: seconds."""

    drafter: Drafter
    measured: Measured
    trees: bool
    clock: Callable[[], float]


class HyperWidthExecutor:
    """Plans the width of jobs, and runs those that are wider than 1.

    Args:
        parts: drafter, costs and clock.
        width: the most rows that the lane verifies at once.
        why: where that is 1, the reason in words.
    """

    def __init__(self, parts: Parts, width: int, why: str = "") -> None:
        self._parts = parts
        self.width = width
        self.why = why
        if width > 1 and not self._could_pay():
            self.width, self.why = 1, "rows cost too much here: no draft could win, even if all of it were kept"

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
        return SpeculatingEngine(plan.width, singleton, self._parts)

    def _could_pay(self) -> bool:
        for context in _LOOKED_AT:
            steps = self._parts.measured.steps(context)
            if any(steps[nodes] < _HOPED * steps[0] * (nodes + 1) for nodes in range(1, self.width)):
                return True
        return False


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
        self._shadow = Shadow()
        # What the latest step came to, told when the next one begins: it lasts until then.
        self._outcome: _Outcome | None = None
        self._began = 0.0
        # Whether the drafter knows the newest id before it is handed out.
        self._told = False
        self._launched = self._committed = 0
        # Steps since the latest draft, the ids of those that the drafter was not told of, and whether it proposed
        # anything when it was last asked.
        self._plain = 0
        self._unseen: list[int] = []
        self._offered = False

    def warm_up(self) -> None:
        """As in `Engine`."""
        self._serial.warm_up()

    def start(self, request: EngineRequest, progress: PrefillProgress) -> None:
        """As in `Engine`."""
        self._planner.begin()
        self._shadow.drop()
        self._outcome, self._told = None, False
        self._launched = self._committed = 0
        self._plain, self._unseen, self._offered = 0, [], False
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

    def step(self) -> Step:
        """As in `Engine`."""
        self._plain += 1
        if self._rests():
            step = self._serial.step()
            self._unseen.append(step.token)
            return step
        if not self._serial.decided:
            self.width = 1
            now = self._clock()
            self._tell((now - self._began) * 1e3 / (1 + len(self._unseen)))
            self._catch_up()
            self._began = now
            self._verify_a_draft()
        step = self._serial.step()
        if not self._told:
            self._became_text((step.token,))
        self._told = False
        return step

    def stop(self) -> Figures:
        """As in `Engine`."""
        self._tell(0.0)
        self._drafter.end()
        figures = self._serial.stop()
        told = self._planner.figures()
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

    def _rests(self) -> bool:
        """Whether this step is the serial engine's alone."""
        quiet = self._plain > _QUIET_AFTER and self._plain % _LOOK_EVERY != 0 and not self._offered
        return quiet and self._drafter.traits.free and not self._serial.decided

    def _catch_up(self) -> None:
        """Tell of the ids of steps that were not looked at."""
        if self._unseen:
            self._became_text(self._unseen)
            self._unseen = []

    def _tell(self, ms: float) -> None:
        """Tell the planner what came of the latest step. *ms*: how long it lasted; 0 where nobody knows."""
        if self._outcome is not None:
            self._planner.told(self._outcome.plan, self._outcome.accepted, ms, self._outcome.turned)
            self._outcome = None

    def _became_text(self, ids: Sequence[int]) -> None:
        for token in ids:
            watched = self._shadow.extend((token,))
            if watched is not None:
                self._planner.watched(self._serial.position, *watched)
        self._drafter.extend(ids)

    def _verify_a_draft(self) -> None:
        """Run a forward over a draft in place of the next plain one, if there is one that is worth it."""
        newest = self._serial.newest
        # Behind the last node one more is drawn.
        limit = min(self._widest, self._serial.left) - 1
        if limit < 1 or newest == NOT_A_NUMBER:
            return
        if newest is not None:
            self._became_text((newest,))
            self._told = True
        if self._drafter.traits.free:
            self._verify_what_there_is(limit, newest)
        else:
            self._verify_what_is_asked_for(limit, newest)

    def _verify_what_there_is(self, limit: int, newest: int | None) -> None:
        """Of what the drafter proposes, whatever comes of it."""
        serial = self._serial
        if newest is None:
            whole = self._drafter.propose(min(limit + 1, MAX_NODES), 0)
            # The first id is being drawn; no forks, for the text behind it is a guess.
            plan = self._planner.plan(serial.position, whole.margins[1:])
        else:
            whole = self._drafter.propose(limit, _MOST_FORKS)
            plan = self._planner.plan(serial.position, whole.margins, whole.turns)
        self._outcome = _Outcome(plan)
        self._offered = bool(whole.margins)
        if not plan.nodes:
            self._shadow.take(whole)
            return
        self._shadow.drop()
        if newest is None:
            draft = Draft.chain(whole.draft.tokens[1 : 1 + plan.depth])
        else:
            draft = self._drafter.propose(plan.nodes, plan.forks).draft
        self._verify(plan, draft)

    def _verify_what_is_asked_for(self, limit: int, newest: int | None) -> None:
        """Of a drafter that takes time: it is asked only if a draft is planned, and knows all of the text."""
        serial, drafter = self._serial, self._drafter
        plan = self._planner.plan(serial.position, None)
        self._outcome = _Outcome(plan if not plan.nodes else Plan(plan.context))
        if not plan.nodes:
            return
        if newest is None:
            newest = serial.resolve()
            if newest == NOT_A_NUMBER:
                return
            self._became_text((newest,))
            self._told = True
        # A drafter that was left alone has to read; neither that nor the wait for the newest id is a draft's.
        drafter.catch_up()
        self._began = self._clock()
        proposal = drafter.propose(min(plan.depth, limit), 0)
        if not proposal.margins:
            return
        plan = self._planner.refined(plan, proposal.margins, proposal.turns)
        self._verify(plan, drafter.propose(plan.nodes, plan.forks).draft)

    def _verify(self, plan: Plan, draft: Draft) -> None:
        path = self._serial.verify(draft)
        self._plain = 0
        self.width = draft.width
        self._launched += len(draft)
        self._committed += len(path) - 1
        self._outcome = _Outcome(plan, len(path) - 1, left_trunk(draft, path))


class _Outcome(NamedTuple):
    """Of a step: what was planned, how deep the kept path is, and where it left the trunk."""

    plan: Plan
    accepted: int = 0
    turned: int = 0
