"""How the broker stops: nothing new is taken, the running job gets its time, readers get theirs."""

from __future__ import annotations

import math
from typing import Final

from broker import words
from broker.back import Back
from broker.jobs import Jobs
from broker.moves import Phase
from broker.record import Now, Record
from mtplx import messages as m

# After the drain limit the running job is cancelled and gets this long to say so.
LAST_GRACE_S: Final = 2.0
# When the last job has ended, readers get this long to take what is theirs.
GOODBYE_S: Final = 2.0


class Drain:
    """Ends what runs; what waits stays in the journal, and ends where there is none."""

    def __init__(self, jobs: Jobs, back: Back) -> None:
        self._jobs = jobs
        self._back = back
        self.draining = False
        self._limit_at: float | None = None
        self._goodbye_at: float | None = None
        self._goodbye_over = False

    def start(self, now: Now, limit_s: float) -> None:
        """The running job has *limit_s* to end from now on."""
        self._limit_at = now.mono + limit_s
        if self.draining:
            return
        self.draining = True
        for route in [route for route, client in self._jobs.outboxes.clients.items() if client.jobs]:
            self._jobs.tell(route, m.Draining())
        self._end_waiting(now)
        self._back.quiet()

    def go_on(self, now: Now) -> None:
        """Do what the clock asks for."""
        # A job may have come back from a worker that was lost.
        self._end_waiting(now)
        slot = self._jobs.gate.slot
        if slot is None:
            self._limit_at = None
            self._goodbye_at = self._goodbye_at or now.mono + GOODBYE_S
            self._goodbye_over = now.mono >= self._goodbye_at
        elif self._limit_at is not None and now.mono >= self._limit_at:
            self._stop_running(slot, now)

    def next(self) -> float:
        """When `go_on` next has something to do."""
        moments = [self._limit_at, None if self._goodbye_over else self._goodbye_at]
        return min((at for at in moments if at is not None), default=math.inf)

    @property
    def over(self) -> bool:
        """True once nothing runs, and everything was said or its readers had their time."""
        if not self.draining or self._jobs.gate.slot is not None:
            return False
        if self._goodbye_over:
            return True
        outboxes = self._jobs.outboxes
        # A reader without credit has nothing pending, but its last word is still to come.
        ended = any(record.over for client in outboxes.clients.values() for record in client.jobs.values())
        return not (outboxes.pending or ended)

    def _end_waiting(self, now: Now) -> None:
        if self._jobs.journal.keeps:
            return
        for record in list(self._jobs.gate.line.values()):
            self._jobs.end(record, words.draining(record), now)

    def _stop_running(self, record: Record, now: Now) -> None:
        self._limit_at = now.mono + LAST_GRACE_S
        if record.phase is Phase.RUNNING:
            record.handing_back = self._jobs.journal.keeps
            self._back.cancel_run(record, None if record.handing_back else words.draining(record), now)
        elif record.handing_back:
            self._back.hand_back(record, now)
        else:
            self._jobs.end(record, record.cancel_reason or words.cancelled(record, now), now)
