"""What people ask of the broker: its state, one job, lists, and what is to become of buried jobs."""

from __future__ import annotations

from typing import Any

from broker import health, words
from broker.back import Back, Identity
from broker.commits import Commits
from broker.jobs import Jobs
from broker.moves import Phase
from broker.record import Now, Record
from mtplx import messages as m
from mtplx.errors import JobError, JournalError, WireError


class Desk:
    """Answers STATUS, KICK and DELETE."""

    def __init__(self, jobs: Jobs, back: Back, commits: Commits, identity: Identity) -> None:
        self._jobs = jobs
        self._back = back
        self._commits = commits
        self._identity = identity

    def report(self, now: Now, *, draining: bool, http: str) -> dict[str, Any]:
        """The health report. *http*: where the page is; empty where there is none."""
        found = health.report(self._jobs, self._back, self._identity, now, draining=draining)
        found["broker"]["http"] = http
        found["journal"] = self._commits.state()
        return {"service": health.service(self._back, found), **found}

    def status(self, record: Record, *, whole: bool) -> m.StatusReply:
        """The state of *record*; with *whole* also what it asks and its answer."""
        return m.StatusReply((health.job_whole if whole else health.job_status)(self._jobs, record))

    def kick(self, record: Record) -> m.StatusReply | m.Error:
        """Put a buried *record* at the end of the line."""
        if record.phase is not Phase.BURIED or record.unread:
            return _in_no_state(record, "Only a buried job is kicked")
        fault: WireError | None = self._commits.refusal()
        if fault is None:
            try:
                self._jobs.kick(record)
            except JournalError as error:
                fault = JobError(f"The job cannot be read: {error}", code="E_JOURNAL")
        if fault is not None:
            return words.error(fault, record.id)
        return self.status(record, whole=False)

    def delete(self, record: Record) -> m.StatusReply | m.Error:
        """Forget an ended *record*."""
        if not record.over or record.unread:
            return _in_no_state(record, "Only an ended job is deleted")
        status = {**health.job_status(self._jobs, record), "state": "deleted"}
        self._jobs.forget(record)
        return m.StatusReply(status)


def _in_no_state(record: Record, rule: str) -> m.Error:
    state = "still being read" if record.over and record.unread else record.phase.value
    return words.coded("E_CONFLICT", f"{rule}; this one is {state}.", record.id, {"state": record.phase.value})
