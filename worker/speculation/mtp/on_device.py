"""Speculation with a drafter whose drafts only the device knows: no read between a draft and its verify forward.

Where the lane pipelines, the next draft and the forward over it are launched before the host reads what came of
the forward before: they stand behind whatever row of it will be the last that holds. So the device does not wait
for the host; what the host learns comes one step late, to the planner too.

A free drafter may be asked beside it. Its drafts are the host's, and so are made behind ids that the host knows:
they have to promise more than the device's, for which nobody waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import NamedTuple

from worker.engine.draw import NOT_A_NUMBER
from worker.engine.engine import EngineRequest, Figures, PrefillProgress
from worker.engine.serial import SerialEngine
from worker.speculation.acceptance import Counts
from worker.speculation.draft import MAX_NODES, Draft, Terms
from worker.speculation.executor import Parts, SpeculatingEngine
from worker.speculation.mtp.drafter import Mtp
from worker.speculation.planner import Plan, Planner


class DeviceDrafts(SpeculatingEngine):
    """The `Engine` of a job whose drafts stay on the device."""

    def __init__(self, widest: int, serial: SerialEngine, parts: Parts) -> None:
        beside = parts.beside
        self._beside = None if beside is None else _Beside(beside, widest)
        super().__init__(widest, serial, parts)
        assert isinstance(parts.drafter, Mtp), "a drafter over a head"
        self._head = parts.drafter

    def start(self, request: EngineRequest, progress: PrefillProgress) -> None:
        """As in `Engine`."""
        self._head.follow()
        super().start(request, progress)
        if self._beside is not None:
            ids = (*request.prompt, *request.drawn)
            self._beside.begin(self._planner, ids, request)

    def stop(self) -> Figures:
        """As in `Engine`."""
        figures = super().stop()
        if self._beside is not None:
            self._beside.drafter.end()
        return figures

    def _told(self) -> Counts:
        counts = deepcopy(self._planner.counts)
        if self._beside is not None:
            counts.add(self._beside.planner.counts)
        return counts

    def _go_on(self) -> None:
        while not self._serial.decided:
            flight = self._flight
            if flight is None:
                self._start_next()
                continue
            behind = self._launch_behind(*flight)
            self._land(*flight)
            if behind is not None and self._serial.flight is not None:
                self._account()
                self._flight = behind

    def _tell(self, ms: float) -> None:
        outcome, beside = self._outcome, self._beside
        if beside is None or outcome is None or not beside.flies:
            if beside is not None and outcome is not None and not outcome.plan.nodes and ms:
                beside.planner.measured.learn(outcome.plan.context, 0, ms / max(self._steps, 1))
            super()._tell(ms)
            return
        plan, accepted, turned = outcome
        beside.planner.told(plan, accepted, ms, turned)
        self._outcome, beside.flies = None, False

    def _became_text(self, ids: Sequence[int]) -> None:
        self._head.extend(ids)
        if self._beside is not None:
            self._beside.drafter.extend(ids)

    def _launch_what_is_asked_for(self, limit: int, newest: int | None) -> None:
        serial, head = self._serial, self._head
        plan = self._planner.plan(serial.position, None)
        self._left_alone(plan)
        if newest is None:
            # Before the newest id is waited for, what is known of the text has to promise something.
            if not plan.nodes and not self._copies(plan):
                return
            newest = serial.resolve()
            if newest == NOT_A_NUMBER:
                return
            self._became_text((newest,))
        if self._launch_copy(plan, limit) or not plan.nodes:
            return
        # A head that was left alone has to read; neither that nor the wait for the newest id is a draft's.
        head.catch_up()
        self._began = self._clock()
        plan = _cut(plan, limit)
        self._launch(plan, Draft.chain((0,) * plan.nodes), head.draft(plan.nodes))

    def _launch_behind(self, flying: Plan, draft: Draft) -> tuple[Plan, Draft] | None:
        """Launch a forward behind the one in flight; None where that cannot be, or would not pay."""
        serial, head = self._serial, self._head
        flight = serial.flight
        assert flight is not None, "one is in flight"
        if not head.may_draft_behind() or not serial.may_go_behind(1):
            return None
        plan = self._planner.plan(flying.context + draft.width, None)
        nodes = min(plan.nodes, self._widest - 1)
        while nodes and not serial.may_go_behind(nodes):
            nodes -= 1
        if not nodes or self._copies(plan):
            return None
        chain = Draft.chain((0,) * nodes)
        serial.launch(chain, head.draft_behind(flight, nodes))
        return _cut(plan, nodes), chain

    def _launch_copy(self, plan: Plan, limit: int) -> bool:
        """Launch a forward over the free drafter's draft if it promises more than *plan*."""
        beside = self._beside
        found = None if beside is None else beside.look(plan.context, limit)
        if beside is None or found is None or (plan.nodes and found.plan.gain <= plan.gain):
            return False
        self._began = self._clock()
        self._launch(found.plan, found.draft)
        beside.flies = True
        return True

    def _copies(self, plan: Plan) -> bool:
        """Whether the free drafter promises more than *plan* once the host knows what is in flight."""
        if self._beside is None:
            return False
        if self._beside.flies:
            # What was copied goes on more often than not.
            return True
        found = self._beside.look(plan.context, MAX_NODES)
        return found is not None and found.plan.gain > plan.gain


class _Found(NamedTuple):
    """A draft that promises to pay."""

    plan: Plan
    draft: Draft


class _Beside:
    """A free drafter, with a planner of its own. flies: whether its draft is in flight, or not yet told of."""

    def __init__(self, parts: Parts, widest: int) -> None:
        self.drafter = parts.drafter
        self.planner = Planner(parts.measured, widest - 1, False, parts.drafter.traits)
        self.flies = False

    def begin(self, planner: Planner, ids: Sequence[int], request: EngineRequest) -> None:
        """A job begins; tokens are worth what they are to *planner*."""
        self.planner.begin()
        self.planner.pace = planner.pace
        self.flies = False
        self.drafter.begin(ids, request.sampling, Terms(budget=request.max_tokens))

    def look(self, context: int, limit: int) -> _Found | None:
        """A draft behind the text that would pay, of at most *limit* nodes."""
        whole = self.drafter.propose(min(limit, MAX_NODES), 0)
        if not whole.margins:
            return None
        plan = self.planner.plan(context, whole.margins)
        if not plan.nodes:
            return None
        return _Found(plan, Draft.chain(whole.draft.tokens[: plan.depth]))


def _cut(plan: Plan, nodes: int) -> Plan:
    """*plan* with at most *nodes* nodes, and no forks."""
    nodes = min(plan.nodes, nodes)
    return plan._replace(nodes=nodes, depth=nodes, forks=0, turns=(), kinds=plan.kinds[:nodes])
