"""The broker's rules: an event and the time go in, messages to be sent come out. No sockets, no clock.

Messages to producers wait in `jobs.outboxes`, messages to workers in `back.outgoing`; whoever runs the machine
sends them after each turn and reports what could not be sent as another event.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, Final

from broker import health, words
from broker.back import Back, Identity
from broker.jobs import Jobs
from broker.moves import Move, Phase
from broker.record import Now, Reading, Record, digest_of
from broker.timers import Timers
from mtplx import messages as m
from mtplx.errors import JobError, ProtocolError, WireError
from mtplx.job import Job
from mtplx.settings import Settings

# PROGRESS goes to this many of a client's jobs at each beat, the ones that are next first.
PROGRESS_JOBS: Final = 16
# After the drain limit the running job is cancelled and gets this long to say so.
LAST_GRACE_S: Final = 2.0
# When the last job has ended, readers get this long to take what is theirs.
GOODBYE_S: Final = 2.0
# Numbering goes on from what RESUME says, and must stay a number that every language can hold.
MAX_NEXT_SEQ: Final = 2**53
# RUN carries the headers of SUBMIT beside keys of its own, in a frame of the same limit.
MAX_JOB_HEADERS: Final = 32 * 1024


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
        self._timers = Timers()
        self._next_beat = identity.started.mono + settings.beat_s
        self._drain_at: float | None = None
        self._goodbye_at: float | None = None
        self._goodbye_over = False
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
        # Under the id of a known job the answer would read as that job's last word.
        about = None if error.job_id in self.jobs.records else error.job_id
        self.jobs.tell(route, words.error(error, about))

    def on_client_gone(self, route: bytes, now: Now) -> None:
        """The connection *route* no longer exists. Its jobs live on for `orphan_s`."""
        for record in self.jobs.outboxes.drop(route):
            self._orphan(record, now, self.settings.orphan_s)

    def _hello(self, route: bytes, message: m.Hello, _now: Now) -> None:
        if m.VERSION not in message.versions:
            self.jobs.tell(route, words.version_error(message.versions))
            return
        limits = {
            "max_job_bytes": min(self.settings.max_job_bytes, self.settings.queue_bytes),
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
        # What could not wait in an empty line must not be told to come back later.
        for field, size, limit in (
            ("body", len(message.job), self.settings.max_job_bytes),
            ("h", _headers_bytes(message), MAX_JOB_HEADERS),
            ("body", _charge(message), self.settings.queue_bytes),
        ):
            if size > limit:
                raise ProtocolError(
                    f"The job has {size} bytes in {field}; at most {limit} are taken.",
                    field=field,
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
                self._timers.set(now.mono + after_ms / 1000, kind, record)

    def _submit_again(self, record: Record, route: bytes, message: m.Submit, now: Now) -> None:
        if record.digest != digest_of(message.job):
            error = JobError("This job id is taken by another job; draw a new one.", code="E_CONFLICT")
            self.jobs.gate.refused(message.id, now, error.code, message.h)
            self.jobs.tell(route, words.error(error, message.id))
            return
        self.jobs.tell(route, words.admitted(record, self.jobs.position(record), self.identity.boot_id, dup=True))
        if record.reading.route != route:
            if record.run is not None:
                self.jobs.tell(route, words.started(record, record.run))
            self.jobs.read_from(record, Reading(route, message.credit), now)

    def _cancel(self, route: bytes, message: m.Cancel, now: Now) -> None:
        record = self._known(route, message.id)
        if record is None:
            return
        self.cancel(record, None, now)
        if record.reading.route != route:
            self.jobs.tell(route, m.StatusReply(health.job_status(self.jobs, record)))

    def _resume(self, route: bytes, message: m.Resume, now: Now) -> None:
        record = self._known(route, message.id)
        if record is None:
            return
        piece = record.answer.index_of(message.tokens) if record.answer else (0 if message.tokens == 0 else None)
        if piece is None or message.next_seq > MAX_NEXT_SEQ:
            wrong = ("tokens", "No chunk of this job ended there.")
            if message.next_seq > MAX_NEXT_SEQ:
                wrong = ("next_seq", f"next_seq may be at most {MAX_NEXT_SEQ}.")
            self.jobs.tell(route, words.error(ProtocolError(wrong[1], field=wrong[0]), None))
            return
        credit = None if message.credit is None else message.next_seq + message.credit
        self.jobs.read_from(record, Reading(route, credit, piece, message.next_seq), now)

    def _give_credit(self, route: bytes, message: m.GiveCredit, _now: Now) -> None:
        record = self._known(route, message.id)
        if record is not None and record.reading.credit is not None:
            record.reading.credit = max(record.reading.credit, message.upto_seq)
            self.jobs.outboxes.mark(record)

    def _ack(self, _route: bytes, message: m.Ack, _now: Now) -> None:
        self.jobs.acknowledge(message.id)

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
        if record.phase is Phase.ENDED:
            self.jobs.left(record, now)
        if record.phase is Phase.ENDED or record.finish:
            return
        record.orphan_until = now.mono + after_s
        if after_s > 0:
            self._timers.set(record.orphan_until, "orphan", record)
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
            self.on_client_gone(self.jobs.flooders.popitem()[0], now)
        self.back.check_liveness(now)
        for kind, record in self._timers.due(now.mono):
            self._ring(kind, record, now)
        self.jobs.expire(now)
        if now.mono >= self._next_beat:
            self._next_beat = now.mono + self.settings.beat_s
            self._beat()
            # Some may have been read to their end since.
            self.jobs.trim(now)
        if self.draining:
            self._go_on_draining(now)
        else:
            self.back.dispatch(now)

    def next_wake(self) -> float:
        """The monotonic time at which `tick` has something to do even if nothing happens."""
        moments = [self._next_beat, self.back.next_check(), self._timers.next()]
        if self._drain_at is not None:
            moments.append(self._drain_at)
        if self._goodbye_at is not None and not self._goodbye_over:
            moments.append(self._goodbye_at)
        retry = self.jobs.outboxes.next_retry()
        if retry is not None:
            moments.append(retry)
        return min(moments)

    def _ring(self, kind: str, record: Record, now: Now) -> None:
        if kind == "ttl" and record.phase is not Phase.WAITING:
            return
        if kind == "orphan":
            # The reader may have come back and left again since this timer was set.
            if record.reading.route is None and record.orphan_until <= now.mono:
                self._orphan(record, now, 0.0)
            return
        self.cancel(record, words.expired(record, kind), now)

    def _beat(self) -> None:
        self.back.beat()
        wanted = self._progress_wanted()
        waiting = {record.id for record, _ in wanted if record.phase is Phase.WAITING}
        positions: dict[bytes, int] = {}
        for position, record in self.jobs.gate.positions():
            if len(positions) == len(waiting):
                break
            if record.id in waiting:
                positions[record.id] = position
        for record, route in wanted:
            self.jobs.tell(route, self.back.progress_of(record, positions.get(record.id, 0)))

    def _progress_wanted(self) -> list[tuple[Record, bytes]]:
        wanted: list[tuple[Record, bytes]] = []
        for route, client in self.jobs.outboxes.clients.items():
            if not client.queue:
                open_jobs = (record for record in client.jobs.values() if record.phase is not Phase.ENDED)
                wanted += ((record, route) for record in islice(open_jobs, PROGRESS_JOBS))
        return wanted

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
        """True once nothing runs or waits, and everything was said or its readers had their time."""
        if not self.draining or self.jobs.gate.slot is not None:
            return False
        outboxes = self.jobs.outboxes
        # A reader without credit has nothing pending, but its last word is still to come.
        return self._goodbye_over or not (outboxes.pending or any(c.jobs for c in outboxes.clients.values()))

    def _go_on_draining(self, now: Now) -> None:
        slot = self.jobs.gate.slot
        if slot is None:
            self._drain_at = None
            self._goodbye_at = self._goodbye_at or now.mono + GOODBYE_S
            self._goodbye_over = now.mono >= self._goodbye_at
        elif self._drain_at is not None and now.mono >= self._drain_at:
            self._stop_running(slot, now)

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
    return len(message.job) + _headers_bytes(message)


def _headers_bytes(message: m.Submit) -> int:
    # Strings of msgpack have up to 5 bytes of their own.
    return sum(len(key.encode()) + len(value.encode()) + 10 for key, value in (message.h or {}).items())
