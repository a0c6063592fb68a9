"""The admission gate: the one seam where jobs enter, run and leave, and where all accounting happens.

One line, one slot. The gate counts, keeps the waits, and notes a Moment for every span event; nothing
else in mtplx does.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Final

from broker.moves import Move, Phase
from broker.recent import Recent
from broker.record import Now, Record
from broker.words import POISON, clocked
from mtplx.errors import CODES, BusyError
from mtplx.job import Job
from mtplx.logs import of_job
from mtplx.messages import Done

log = logging.getLogger("mtplx.broker")

# Waits and runs of the last jobs that health summarises.
WINDOW: Final = 1000
Key = tuple[str, bytes]
# What a log line says of a moment.
LOGGED: Final = ("attempt", "model", "outcome", "reason", "code", "tokens")
DEFAULT_RETRY_MS: Final = 1000
# Characters of a prompt or an answer that are kept for spans, which wait in memory.
PROMPT_CHARS: Final = 16_384
PROMPTS: Final = 64
# Widths as the worker spells them; no forward has more rows.
WIDTHS: Final = {str(width): width for width in range(1, 1025)}


@dataclass(frozen=True, slots=True)
class Moment:
    """Something a span begins, ends or is marked with. `wall_ns` is when it happened."""

    what: str
    job: Key
    wall_ns: int
    attributes: dict[str, Any] = field(default_factory=dict)


class Gate:
    """The line, the slot, and their books."""

    def __init__(self, max_jobs: int, max_bytes: int) -> None:
        self.max_jobs = max_jobs
        self.max_bytes = max_bytes
        self.line: OrderedDict[Key, Record] = OrderedDict()
        self.line_bytes = 0
        self.slot: Record | None = None
        self.admitted_total = 0
        self.returned_total = 0
        self.requeued_total = 0
        self.completed_total = 0
        self.failed_total = 0
        self.abandoned_before_start_total = 0
        self.refused_total = 0
        self.queue_wait_s: deque[float] = deque(maxlen=WINDOW)
        self.run_s: deque[float] = deque(maxlen=WINDOW)
        self.widths: Counter[str] = Counter()
        self.rows = Counter[str]()
        self.recent = Recent()
        self.keep_moments = self.keep_prompts = False
        self._moments: list[Moment] = []

    def keep(self, *, moments: bool, prompts: bool) -> None:
        """Keep moments from now on, for spans and metrics, with or without what was asked and answered."""
        self.keep_moments, self.keep_prompts = moments, moments and prompts

    def refusal(self, size: int, open_here: int, client_jobs: int) -> BusyError | None:
        """Why a job of *size* bytes cannot wait now; None where it can.

        open_here: jobs its connection has open, of *client_jobs* that one may have.
        """
        jobs, room = len(self.line), self.max_bytes - self.line_bytes
        if jobs >= self.max_jobs:
            what, limit = f"jobs waiting: {jobs}", self.max_jobs
        elif size > room:
            what, limit = f"bytes waiting: {self.line_bytes}", self.max_bytes
        elif open_here >= client_jobs:
            what, limit = f"jobs open on this connection: {open_here}", client_jobs
        else:
            return None
        return BusyError(
            f"The line is full: {what}, the limit is {limit}. Submit again after retry_after_ms.",
            code="E_QUEUE_FULL",
            retry_after_ms=self._retry_ms(),
            detail={
                "depth": jobs,
                "limit": self.max_jobs,
                "bytes": self.line_bytes,
                "limit_bytes": self.max_bytes,
                "limit_client": client_jobs,
            },
        )

    def admit(self, record: Record, job: Job) -> None:
        """Put *record* at the end of the line."""
        self.admitted_total += 1
        self.wait_again(record, job)

    def wait_again(self, record: Record, job: Job | None) -> None:
        """Put *record* at the end of the line, and begin its spans if its *job* is given."""
        self.line[record.key] = record
        self.line_bytes += record.size
        log.info("waiting as number %d, %d in line", record.admit_seq, len(self.line), extra=of_job(record.id))
        if job is not None and self.keep_moments:
            place: dict[str, Any] = {"seq": record.admit_seq, "depth": len(self.line), "headers": record.headers}
            if self.keep_prompts:
                place["messages"] = _messages(job)
            asked = {"seed": record.seed, "restored": record.restored, **_request(job)}
            self.note("admitted", record.key, record.admitted, **place, **asked)

    def kick(self, record: Record, job: Job | None) -> None:
        """Put a buried *record* at the end of the line."""
        record.move(Move.KICK)
        self.returned_total += 1
        self.wait_again(record, job)

    def requeue(self, record: Record, now: Now, outcome: str) -> None:
        """Put the job of the slot at the head of the line: its attempt ended with *outcome*, and it goes on."""
        if self.slot is not record:
            raise AssertionError("a job was put back that was not in the slot")
        record.move(Move.REQUEUE)
        self.slot = None
        self.line[record.key] = record
        self.line.move_to_end(record.key, last=False)
        self.line_bytes += record.size
        self.requeued_total += 1
        new = record.tokens - (record.run.behind if record.run else 0)
        self.note("requeued", record.key, now, outcome=outcome, tokens=new, timings=clocked(record, now))

    def rescind(self, record: Record, now: Now) -> None:
        """Take out *record*, which was never taken after all. Its end is the refusal of its submit."""
        if self.slot is record:
            self.slot = None
        elif record.key in self.line:
            self._leave_line(record)
        self.refused_total += 1
        if not record.over:
            # One that ended in the turn in which it came was counted at its end.
            self.admitted_total -= 1
            record.move(Move.END)
        told = {"tokens": 0, "chunks": 0, "timings": {}, "took_s": now.mono - record.admitted.mono}
        self.note("ended", record.key, now, outcome="refused", error="E_JOURNAL", **told)

    def first(self) -> Record | None:
        """The job whose turn is next; None while one runs or nobody waits."""
        if self.slot is not None or not self.line:
            return None
        return next(iter(self.line.values()))

    def dispatch(self, record: Record, model: str, stage: str, now: Now) -> None:
        """Move the first of the line into the slot, to run on *model*, whose worker is at *stage*."""
        if self.slot is not None or self.first() is not record:
            raise AssertionError("the slot is taken, or the job is not first")
        assert record.run is not None
        run = {"model": model, "stage": stage, "attempt": record.run.attempt, "behind": record.run.behind}
        record.move(Move.DISPATCH)
        self._leave_line(record)
        self.slot = record
        if record.first_run == record.run.started:
            self.queue_wait_s.append(now.mono - record.admitted.mono)
            self.recent.began(now.mono - record.admitted.mono, now)
        self.note("dispatched", record.key, now, **run)

    def end(self, record: Record, now: Now, outcome: str, attributes: dict[str, Any]) -> None:
        """Count the end of *record*, waiting or running, and free its place."""
        waiting = record.phase is Phase.WAITING
        record.move(Move.BURY if outcome == POISON else Move.END)
        record.ended = now
        if waiting:
            self._leave_line(record)
        else:
            self._leave_slot(record, now)
        if isinstance(record.last_word, Done) and record.begun:
            self.completed_total += 1
        elif waiting and not record.begun:
            self.abandoned_before_start_total += 1
        else:
            self.failed_total += 1
        self.recent.ended(record, now)
        took: dict[str, Any] = {"took_s": now.mono - record.admitted.mono}
        if self.keep_prompts and record.answer is not None:
            took["text"] = record.answer.text()[:PROMPT_CHARS]
        self.note("ended", record.key, now, outcome=outcome, **attributes, **took)

    def _leave_slot(self, record: Record, now: Now) -> None:
        if self.slot is not record:
            raise AssertionError("a job ended that was not in the slot")
        self.slot = None
        assert record.run is not None
        self.run_s.append(now.mono - record.run.started.mono)
        if isinstance(record.last_word, Done):
            self._count_widths(record.last_word.run.get("speculation") or {})

    def _leave_line(self, record: Record) -> None:
        del self.line[record.key]
        self.line_bytes -= record.size

    def _count_widths(self, speculation: dict[str, Any]) -> None:
        # The worker's figures are for people: strange ones count as none and never cost a job its end.
        told = speculation.get("widths")
        widths = [WIDTHS[width] for width in told if width in WIDTHS] if isinstance(told, dict) else []
        self.widths[str(max(widths, default=1))] += 1
        for name in ("rows_launched", "rows_committed", "fork_attempts", "fork_wins"):
            count = speculation.get(name)
            # Below 2^53 a sum of any number of jobs still fits a frame.
            self.rows[name] += count if type(count) is int and 0 <= count < 2**53 else 0

    def refused(self, job_id: bytes, now: Now, code: str, headers: dict[str, str] | None) -> None:
        """Count a refusal."""
        self.refused_total += 1
        self.recent.fault("refusal", code, CODES[code].meaning, now)
        self.note("refused", ("", job_id), now, code=code, headers=headers)

    def note(self, what: str, job: Key, now: Now, **attributes: Any) -> None:
        """Log a moment, and keep it for the spans, if anybody wants spans."""
        if what != "admitted" and log.isEnabledFor(logging.INFO):
            about = (f"{name}={attributes[name]}" for name in LOGGED if name in attributes)
            log.info("%s", " ".join((what, *about)), extra=of_job(job[1]))
        if self.keep_moments:
            self._moments.append(Moment(what, job, now.wall_ns, attributes))

    def take_moments(self) -> list[Moment]:
        """The moments since the last call."""
        taken, self._moments = self._moments, []
        return taken

    def positions(self) -> Iterator[tuple[int, Record]]:
        """The waiting jobs with the number of jobs before each, the running one included."""
        return enumerate(self.line.values(), start=1 if self.slot else 0)

    def check(self) -> None:
        """Prove the books: every admitted job waits, runs or has been counted at its end."""
        ended = self.completed_total + self.failed_total + self.abandoned_before_start_total
        open_jobs = len(self.line) + (self.slot is not None)
        begun = self.admitted_total + self.returned_total
        assert begun == ended + open_jobs, (begun, ended, open_jobs)
        assert self.line_bytes == sum(record.size for record in self.line.values())
        assert all(record.phase is Phase.WAITING for record in self.line.values())
        assert self.slot is None or self.slot.phase in (Phase.RUNNING, Phase.CANCELLING)

    def hyper_block(self, stage: str, *, executor: bool, width: int) -> dict[str, Any]:
        """The `scheduler.hyper` part of health. *width*: rows of the running job's latest forward."""
        return {
            "stage": stage,
            "admission_cap": 1,
            "width": width,
            "passthrough": "serial_b1",
            "width_executor_installed": executor,
            "active": int(self.slot is not None),
            "queue_depth": len(self.line),
            "admitted_total": self.admitted_total,
            "completed_total": self.completed_total,
            "failed_total": self.failed_total,
            "abandoned_before_start_total": self.abandoned_before_start_total,
            "queue_wait_s": summary(self.queue_wait_s),
            "run_s": summary(self.run_s),
            "width_stats": {
                "requests_by_width": dict(self.widths),
                "self_spec_rows_launched": self.rows["rows_launched"],
                "self_spec_rows_committed": self.rows["rows_committed"],
                "fork_attempts": self.rows["fork_attempts"],
                "fork_wins": self.rows["fork_wins"],
            },
        }

    def _retry_ms(self) -> int:
        if not self.run_s:
            return DEFAULT_RETRY_MS
        return max(1, round(1000 * sum(self.run_s) / len(self.run_s)))


def _messages(job: Job) -> list[dict[str, str]]:
    """What was asked, as role and content; token ids as their number."""
    if job.messages is not None:
        return [{"role": one["role"], "content": one["content"][:PROMPT_CHARS]} for one in job.messages[-PROMPTS:]]
    text = job.prompt[:PROMPT_CHARS] if job.prompt is not None else f"({len(job.token_ids or ())} token ids)"
    return [{"role": "user", "content": text}]


def _request(job: Job) -> dict[str, Any]:
    """What spans tell of a job; never its text."""
    asked = ("max_tokens", "temperature", "top_p", "top_k", "stop")
    return {"chat": job.messages is not None, **{name: getattr(job, name) for name in asked}}


def summary(values: deque[float]) -> dict[str, float | int | None]:
    """Count, mean, p50, p95 and max in seconds of the last WINDOW jobs; None where there are none."""
    if not values:
        return {"count": 0, "mean": None, "p50": None, "p95": None, "max": None}
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "mean": sum(ordered) / len(ordered),
        # Nearest rank: the smallest value that so many percent of the values do not exceed.
        "p50": ordered[ceil(len(ordered) * 0.5) - 1],
        "p95": ordered[ceil(len(ordered) * 0.95) - 1],
        "max": ordered[-1],
    }
