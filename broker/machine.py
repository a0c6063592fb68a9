"""The broker's rules: an event and the time go in, messages to be sent come out. No sockets, no clock.

Messages to producers wait in `outboxes`, messages to workers in `to_worker`; whoever runs the machine
sends them after each turn and reports what could not be sent as another event.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any, Final

from broker import health, words
from broker.back import Back, Identity
from broker.jobs import Jobs
from broker.moves import Move, Phase
from broker.record import Now, Reading, Record, digest_of
from mtplx import messages as m
from mtplx.errors import JobError, ProtocolError, WireError
from mtplx.job import Job
from mtplx.settings import Settings

# PROGRESS goes to this many of a client's jobs at each beat, the ones that are next first.
PROGRESS_JOBS: Final = 16
# After the drain limit the running job is cancelled and gets this long to say so.
LAST_GRACE_S: Final = 2.0


class Machine:
    """Admits, dispatches, relays and ends jobs. All methods take the time of the event."""

    def __init__(
        self, settings: Settings, identity: Identity, draw_seed: Callable[[], int], *, keep_moments: bool = False
    ) -> None:
        self.settings = settings
        self.identity = identity
        self.jobs = Jobs(settings, keep_moments=keep_moments)
        self.back = Back(self.jobs, identity)
        self.draining = False
        self._draw_seed = draw_seed
        self._admit_seq = 0
        self._timers: list[tuple[float, int, str, Record]] = []
        self._timer_ids = count()
        self._next_beat = identity.started.mono + settings.beat_s
        self._drain_at: float | None = None
        self._last_turn = identity.started.mono
        self._handlers: dict[type[m.Message], Callable[[bytes, Any, Now], None]] = {
            m.Hello: self._hello,
            m.Submit: self._submit,
            m.Cancel: self._cancel,
            m.Resume: self._resume,
            m.GiveCredit: self._give_credit,
            m.Ack: self._ack,
            m.Status: self._status,
            m.Ping: self._ping,
            m.Bye: self._bye,
        }

    # --- events from producers

    def on_client(self, route: bytes, message: m.Message, now: Now) -> None:
        """A producer said *message*."""
        self._handlers[type(message)](route, message, now)

    def on_bad_frame(self, route: bytes, error: ProtocolError) -> None:
        """A producer sent bytes that are no message; tell it which field is wrong."""
        self.jobs.counters["bad_frames"] += 1
        self.jobs.tell(route, words.error(error, error.job_id))

    def on_client_gone(self, route: bytes, now: Now) -> None:
        """The connection *route* no longer exists. Its jobs live on for `orphan_s`."""
        for record in self.jobs.outboxes.drop(route):
            self._orphan(record, now, self.settings.orphan_s)

    def _hello(self, route: bytes, message: m.Hello, _now: Now) -> None:
        if m.VERSION not in message.versions:
            self.jobs.tell(route, words.version_error(message.versions))
            return
        limits = {
            "max_job_bytes": self.settings.max_job_bytes,
            "queue_jobs": self.settings.queue_jobs,
            "queue_bytes": self.settings.queue_bytes,
            "retain_s": int(self.settings.retain_s),
            "orphan_s": int(self.settings.orphan_s),
        }
        beat_ms = int(1000 * self.settings.beat_s)
        server = f"mtplx-broker {self.identity.version}"
        self.jobs.tell(route, m.Welcome(m.VERSION, self.identity.boot_id, beat_ms, limits, server))

    def _submit(self, route: bytes, message: m.Submit, now: Now) -> None:
        known = self.jobs.records.get(message.id)
        if known is not None:
            self._submit_again(known, route, message, now)
            return
        try:
            job = self._admissible(message)
        except WireError as error:
            self.jobs.gate.refused(message.id, now, error.code, message.h)
            self.jobs.tell(route, words.error(error, message.id))
            return
        self._admit(route, message, job, now)

    def _admissible(self, message: m.Submit) -> Job:
        if self.draining:
            raise JobError("The broker is stopping; submit again when it is back.", code="E_DRAINING")
        size, limit = len(message.job), self.settings.max_job_bytes
        if size > limit:
            raise ProtocolError(
                f"The job has {size} bytes; at most {limit} are taken.",
                field="body",
                code="E_TOO_LARGE",
                detail={"bytes": size, "limit": limit},
            )
        refusal = self.jobs.gate.refusal(_charge(message))
        if refusal is not None:
            raise refusal
        return self.jobs.parse(message.job, self.back.limits)

    def _admit(self, route: bytes, message: m.Submit, job: Job, now: Now) -> None:
        record = Record(
            id=message.id,
            body=message.job,
            size=_charge(message),
            digest=digest_of(message.job),
            seed=self._draw_seed() if job.seed is None else job.seed,
            admit_seq=self._admit_seq,
            admitted=now,
            reading=Reading(route, message.credit),
            finish=message.finish,
            headers=message.h,
            checked=self.back.generation,
        )
        self._admit_seq += 1
        self.jobs.admit(record, job)
        position = len(self.jobs.gate.line) - 1 + (self.jobs.gate.slot is not None)
        self.jobs.tell(route, words.admitted(record, position, self.identity.boot_id, dup=False))
        self.jobs.outboxes.attach(record)
        for kind, after_ms in (("ttl", message.queue_ttl_ms), ("deadline", message.deadline_ms)):
            if after_ms is not None:
                self._set_timer(now.mono + after_ms / 1000, kind, record)

    def _submit_again(self, record: Record, route: bytes, message: m.Submit, now: Now) -> None:
        if record.digest != digest_of(message.job):
            error = JobError("This job id is taken by another job; draw a new one.", code="E_CONFLICT")
            self.jobs.gate.refused(message.id, now, error.code, message.h)
            self.jobs.tell(route, words.error(error, message.id))
            return
        self.jobs.tell(route, words.admitted(record, self.jobs.position(record), self.identity.boot_id, dup=True))
        if record.reading.route != route:
            self.jobs.read_from(record, Reading(route, message.credit))

    def _cancel(self, route: bytes, message: m.Cancel, now: Now) -> None:
        record = self._known(route, message.id)
        if record is None:
            return
        self.cancel(record, None, now)
        if record.reading.route != route:
            self.jobs.tell(route, m.StatusReply(health.job_status(self.jobs, record)))

    def _resume(self, route: bytes, message: m.Resume, _now: Now) -> None:
        record = self._known(route, message.id)
        if record is None:
            return
        piece = record.answer.index_of(message.tokens) if record.answer else (0 if message.tokens == 0 else None)
        if piece is None:
            error = ProtocolError("No chunk of this job ended there.", field="tokens")
            self.jobs.tell(route, words.error(error, None))
            return
        self.jobs.read_from(record, Reading(route, message.credit, piece, message.next_seq))

    def _give_credit(self, route: bytes, message: m.GiveCredit, _now: Now) -> None:
        record = self._known(route, message.id)
        if record is not None and record.reading.credit is not None:
            record.reading.credit = max(record.reading.credit, message.upto_seq)
            self.jobs.outboxes.mark(record)

    def _ack(self, _route: bytes, message: m.Ack, _now: Now) -> None:
        self.jobs.forget(message.id)

    def _status(self, route: bytes, message: m.Status, now: Now) -> None:
        if message.id is not None:
            record = self._known(route, message.id)
            if record is None:
                return
            status = health.job_status(self.jobs, record)
        elif message.jobs:
            status = health.job_list(self.jobs)
        else:
            status = self.report(now)
        self.jobs.tell(route, m.StatusReply(status))

    def _ping(self, route: bytes, message: m.Ping, _now: Now) -> None:
        self.jobs.tell(route, m.Pong(message.n))

    def _bye(self, route: bytes, _message: m.Bye, now: Now) -> None:
        for record in self.jobs.outboxes.drop(route):
            self._orphan(record, now, 0.0)

    # --- what ends a job, whoever asks

    def cancel(self, record: Record, reason: m.Error | None, now: Now) -> None:
        """End *record*: at once while it waits, by the worker's FINAL while it runs.

        reason None is the producer's own wish (DONE, outcome `cancelled`); else it becomes the last word.
        """
        if record.phase is Phase.WAITING:
            self.jobs.end(record, reason or words.cancelled(record, now), now)
        elif record.phase is Phase.RUNNING:
            record.move(Move.CANCEL)
            record.cancel_reason = reason
            self.jobs.gate.note("cancelling", record.id, now)
            self.back.cancel_run()

    def _orphan(self, record: Record, now: Now, after_s: float) -> None:
        if record.phase is Phase.ENDED or record.finish:
            return
        if after_s > 0:
            self._set_timer(now.mono + after_s, "orphan", record)
            return
        self.jobs.counters["orphans_cancelled"] += 1
        self.cancel(record, None, now)

    # --- time

    def tick(self, now: Now) -> None:
        """Do what the clock asks for. Called once a turn, after the turn's messages."""
        if now.mono - self._last_turn > 2 * self.settings.beat_s:
            # The loop itself was away (sleep, a stopped process): silence proves nothing.
            self.back.pardon(now)
        self._last_turn = now.mono
        while self.jobs.flooders:
            self.jobs.counters["flooders_dropped"] += 1
            self.on_client_gone(self.jobs.flooders.pop(), now)
        self.back.check_liveness(now)
        while self._timers and self._timers[0][0] <= now.mono:
            _, _, kind, record = heapq.heappop(self._timers)
            self._ring(kind, record, now)
        self.jobs.expire(now)
        if now.mono >= self._next_beat:
            self._next_beat = now.mono + self.settings.beat_s
            self._beat()
        if self._drain_at is not None and now.mono >= self._drain_at and self.jobs.gate.slot is not None:
            self._stop_running(self.jobs.gate.slot, now)
        if not self.draining:
            self.back.dispatch(now)

    def next_wake(self) -> float:
        """The monotonic time at which `tick` has something to do even if nothing happens."""
        moments = [self._next_beat, self.back.next_check()]
        if self._timers:
            moments.append(self._timers[0][0])
        if self._drain_at is not None:
            moments.append(self._drain_at)
        retry = self.jobs.outboxes.next_retry()
        if retry is not None:
            moments.append(retry)
        return min(moments)

    def _set_timer(self, at: float, kind: str, record: Record) -> None:
        heapq.heappush(self._timers, (at, next(self._timer_ids), kind, record))

    def _ring(self, kind: str, record: Record, now: Now) -> None:
        if record.phase is Phase.ENDED or (kind == "ttl" and record.phase is not Phase.WAITING):
            return
        if kind == "orphan":
            if record.reading.route is None:
                self._orphan(record, now, 0.0)
            return
        self.cancel(record, words.expired(record, kind), now)

    def _beat(self) -> None:
        self.back.beat()
        wanted = self._progress_wanted()
        waiting = sum(record.phase is Phase.WAITING for record, _ in wanted)
        positions: dict[bytes, int] = {}
        for position, record in self.jobs.gate.positions():
            if len(positions) == waiting:
                break
            if record.reading.route in self.jobs.outboxes.clients:
                positions[record.id] = position
        for record, route in wanted:
            self.jobs.tell(route, self.back.progress_of(record, positions.get(record.id, 0)))

    def _progress_wanted(self) -> list[tuple[Record, bytes]]:
        return [
            (record, route)
            for route, client in self.jobs.outboxes.clients.items()
            if not client.queue
            for record in list(client.jobs.values())[:PROGRESS_JOBS]
            if record.phase is not Phase.ENDED
        ]

    # --- drain

    def drain(self, now: Now, limit_s: float) -> None:
        """Stop taking jobs; the running one has *limit_s* to end, the waiting ones hear at once."""
        self._drain_at = now.mono + limit_s
        if self.draining:
            return
        self.draining = True
        for route in [route for route, client in self.jobs.outboxes.clients.items() if client.jobs]:
            self.jobs.tell(route, m.Draining())
        for record in list(self.jobs.gate.line.values()):
            self.jobs.end(record, words.draining(record), now)
        self.back.quiet()

    @property
    def drained(self) -> bool:
        """True once nothing runs, nothing waits and everything was said."""
        return self.draining and self.jobs.gate.slot is None and not self.jobs.outboxes.pending

    def _stop_running(self, record: Record, now: Now) -> None:
        self._drain_at = now.mono + LAST_GRACE_S
        if record.phase is Phase.RUNNING:
            self.cancel(record, words.draining(record), now)
        else:
            self.jobs.end(record, record.cancel_reason or words.cancelled(record, now), now)

    # --- small things

    def report(self, now: Now) -> dict[str, Any]:
        """The health report."""
        return health.report(self.jobs, self.back, self.identity, now, draining=self.draining)

    def _known(self, route: bytes, job_id: bytes) -> Record | None:
        record = self.jobs.records.get(job_id)
        if record is None:
            error = JobError("No job of that id is known; it never came or is forgotten.", code="E_UNKNOWN_JOB")
            self.jobs.tell(route, words.error(error, job_id))
        return record


def _charge(message: m.Submit) -> int:
    headers = message.h or {}
    return len(message.job) + sum(len(key) + len(value) for key, value in headers.items())
