"""Speculation with a drafter whose drafts only the device knows: no read between a draft and its verify forward.

Where the lane pipelines, the next draft and the forward over it are launched before the host reads what came of
the forward before: they stand behind whatever row of it will be the last that holds. So the device does not wait
for the host; what the host learns comes one step late, to the planner too.
"""

from __future__ import annotations

from worker.engine.draw import NOT_A_NUMBER
from worker.engine.engine import EngineRequest, PrefillProgress
from worker.engine.serial import SerialEngine
from worker.speculation.draft import Draft
from worker.speculation.executor import Parts, SpeculatingEngine
from worker.speculation.mtp.drafter import Mtp
from worker.speculation.planner import Plan


class DeviceDrafts(SpeculatingEngine):
    """The `Engine` of a job whose drafts stay on the device."""

    def __init__(self, widest: int, serial: SerialEngine, parts: Parts) -> None:
        super().__init__(widest, serial, parts)
        assert isinstance(parts.drafter, Mtp), "a drafter over a head"
        self._head = parts.drafter

    def start(self, request: EngineRequest, progress: PrefillProgress) -> None:
        """As in `Engine`."""
        self._head.follow()
        super().start(request, progress)

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

    def _launch_what_is_asked_for(self, limit: int, newest: int | None) -> None:
        serial, head = self._serial, self._head
        plan = self._planner.plan(serial.position, None)
        self._left_alone(plan)
        if not plan.nodes:
            return
        if newest is None:
            newest = serial.resolve()
            if newest == NOT_A_NUMBER:
                return
            self._became_text((newest,))
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
        if not nodes:
            return None
        chain = Draft.chain((0,) * nodes)
        serial.launch(chain, head.draft_behind(flight, nodes))
        return _cut(plan, nodes), chain


def _cut(plan: Plan, nodes: int) -> Plan:
    """*plan* with at most *nodes* nodes, and no forks."""
    nodes = min(plan.nodes, nodes)
    return plan._replace(nodes=nodes, depth=nodes, forks=0, turns=(), kinds=plan.kinds[:nodes])
