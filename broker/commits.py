"""When the entries of a turn are written down, and what happens while that fails."""

from __future__ import annotations

import logging
import math
from typing import Any

from broker import words
from broker.back import Back
from broker.jobs import Jobs
from broker.record import Now, Record
from mtplx.errors import BusyError, JournalError

log = logging.getLogger("mtplx.broker")


class Commits:
    """Commits once a turn.

    Jobs that came in a turn whose commit fails were never taken, and no more are until one works. What else
    happens goes on meanwhile, and its entries wait in memory.
    """

    def __init__(self, jobs: Jobs, back: Back) -> None:
        self._jobs = jobs
        self._back = back
        # Admitted in this turn; their producers do not know yet.
        self._fresh: list[Record] = []
        self._again_at = 0.0
        self.error = ""

    def admitted(self, record: Record) -> None:
        """*record* came in this turn."""
        self._fresh.append(record)

    def refusal(self) -> BusyError | None:
        """Why no job is taken now; None where jobs are."""
        return words.journal_fault(self.error) if self.error else None

    def commit(self, now: Now) -> None:
        """Write down what happened since the last call. Nothing of it may be sent before."""
        journal = self._jobs.journal
        if journal.pending or self.error:
            if not self.error or now.mono >= self._again_at:
                self._try(now)
            self._back.held_up = bool(self.error) and journal.pending_bytes > self._jobs.settings.retain_bytes
        self._fresh.clear()

    def commit_at_last(self, now: Now) -> None:
        """The last commit of the process."""
        self._again_at = now.mono
        self.commit(now)
        if self.error:
            log.error("what happened last is not in the journal, and jobs of it may run again: %s", self.error)

    def next_try(self) -> float:
        """When a commit is due even if nothing happens."""
        return self._again_at if self.error else math.inf

    def state(self) -> dict[str, Any]:
        """What health tells of the journal."""
        journal = self._jobs.journal
        if not journal.keeps:
            return {"state": "none"}
        found = {"state": "failing" if self.error else "well", "path": journal.path, "bytes": journal.nbytes}
        found["waiting_bytes"] = journal.pending_bytes
        return {**found, "error": self.error} if self.error else found

    def _try(self, now: Now) -> None:
        try:
            self._jobs.journal.commit()
        except JournalError as error:
            if not self.error:
                log.warning("no jobs are taken: %s", error)
            self._jobs.counters["journal_errors"] += 1
            self.error, self._again_at = str(error), now.mono + words.JOURNAL_RETRY_MS / 1000
            for record in self._fresh:
                self._back.unsay(record)
                refusal = words.error(words.journal_fault(self.error), record.id)
                self._jobs.rescind(record, refusal, now)
        else:
            if self.error:
                log.warning("the journal is written again, and jobs are taken")
            self.error = ""
            self._jobs.spill()
