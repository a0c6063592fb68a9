"""The broker's rules: an event and the time go in, messages to be sent come out. No sockets, no clock.

Messages to producers wait in `jobs.outboxes`, messages to workers in `back.outgoing`; whoever runs the machine
sends them after each turn and reports what could not be sent as another event.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, Final

from broker import delivery, health, words
from broker.access import NO_PEER, Peer
from broker.admission import Key
from broker.back import Back, Identity
from broker.commits import Commits
from broker.desk import Desk
from broker.drain import Drain
from broker.jobs import Jobs
from broker.journal import Journal, NoJournal
from broker.moves import Phase
from broker.record import Now, Reading, Record, charge, digest_of, headers_bytes, moment
from broker.restore import restore
from broker.timers import Timers
from mtplx import messages as m
from mtplx.errors import JobError, JournalError, ProtocolError, WireError
from mtplx.job import Job
from mtplx.settings import Settings

# PROGRESS goes to this many of a client's jobs at each beat, the ones that are next first.
PROGRESS_JOBS: Final = 16
# Numbering goes on from what RESUME says, and must stay a number that every language can hold.
MAX_NEXT_SEQ: Final = 2**53
# RUN carries the headers of SUBMIT beside keys of its own, in a frame of the same limit.
MAX_JOB_HEADERS: Final = 32 * 1024


class Machine:
    """Admits, dispatches, relays and ends jobs. All methods take the time of the event."""

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        draw_seed: Callable[[], int],
        *,
        journal: Journal | None = None,
        keep_moments: bool = False,
    ) -> None:
        self.settings = settings
        self.identity = identity
        # Where a browser finds this broker, for health; empty where there is no HTTP port.
        self.http = ""
        self.journal = NoJournal() if journal is None else journal
        self.jobs = Jobs(settings, self.journal, keep_moments=keep_moments)
        self.back = Back(self.jobs, identity)
        self.commits = Commits(self.jobs, self.back)
        self._drain = Drain(self.jobs, self.back)
        self._draw_seed = draw_seed
        # Who said the message that is being handled.
        self._peer = NO_PEER
        self._timers = Timers()
        self._desk = Desk(self.jobs, self.back, self.commits, identity)
        self._next_beat = identity.started.mono + settings.beat_s
        self._last_turn = identity.started.mono
        self._handlers: dict[type[m.Message], Callable[[bytes, Any, Now], None]] = {
            m.Hello: self._hello,
            m.Submit: self._submit,
            m.Cancel: self._cancel,
            m.Resume: self._resume,
            m.GiveCredit: self._give_credit,
            m.Ack: self._ack,
            m.Status: self._status,
            m.Kick: self._kick,
            m.Delete: self._delete,
            m.Ping: self._ping,
            m.Bye: self._bye,
        }

    def restore(self, now: Now) -> None:
        """Take over what the journal holds: the line, limits and ended jobs. Called once, before anything else.

        Raises:
            JournalError: it cannot be read.
        """
        restore(self.jobs, self.back, self._timers, now)

    # --- events from producers

    def on_client(self, route: bytes, message: m.Message, now: Now, peer: Peer = NO_PEER) -> None:
        """A producer said *message*; *peer* tells whose jobs it may mean."""
        self._peer = peer
        self._handlers[type(message)](route, message, now)

    def on_bad_frame(self, route: bytes, error: ProtocolError, peer: Peer = NO_PEER) -> None:
        """A producer sent bytes that are no message; tell it which field is wrong."""
        self.jobs.counters["bad_frames"] += 1
        # Under the id of a known job the answer would read as that job's last word.
        about = None if error.job_id and self.jobs.find(error.job_id, peer.owner) else error.job_id
        self.jobs.tell(route, words.error(error, about))

    def on_client_gone(self, route: bytes, now: Now) -> None:
        """The connection *route* no longer exists. Its jobs live on for `orphan_s`."""
        for record in self.jobs.outboxes.drop(route):
            # What it said last may be read after what its producer says on the next connection.
            if not self.jobs.hand_back(record, now):
                self._orphan(record, now, self.settings.orphan_s)

    def _hello(self, route: bytes, message: m.Hello, _now: Now) -> None:
        if m.VERSION not in message.versions:
            self.jobs.tell(route, words.version_error(message.versions))
            return
        limits = {
            "max_job_bytes": min(self.settings.max_job_bytes, self.settings.queue_bytes),
            "queue_jobs": self.settings.queue_jobs,
            "queue_bytes": self.settings.queue_bytes,
            "client_jobs": self.settings.client_jobs,
            "retain_s": int(self.settings.retain_s),
            "orphan_s": int(self.settings.orphan_s),
        }
        beat_ms = int(1000 * self.settings.beat_s)
        server = f"mtplx-broker {self.identity.version}"
        self.jobs.tell(route, m.Welcome(m.VERSION, self.identity.boot_id, beat_ms, limits, server))

    def _submit(self, route: bytes, message: m.Submit, now: Now) -> None:
        known = self.jobs.find(message.id, self._peer.owner)
        if known is not None:
            self._submit_again(known, route, message, now)
            return
        try:
            job = self._admissible(route, message)
        except WireError as error:
            self.jobs.gate.refused(message.id, now, error.code, message.h)
            self.jobs.tell(route, words.error(error, message.id))
            return
        self._admit(route, message, job, now)

    def _admissible(self, route: bytes, message: m.Submit) -> Job:
        size = charge(message.job, message.h)
        if self.draining:
            raise JobError("The broker is stopping; submit again when it is back.", code="E_DRAINING")
        # What could not wait in an empty line must not be told to come back later.
        for field, found, limit in (
            ("body", len(message.job), self.settings.max_job_bytes),
            ("h", headers_bytes(message.h), MAX_JOB_HEADERS),
            ("body", size, self.settings.queue_bytes),
        ):
            if found > limit:
                raise ProtocolError(
                    f"The job has {found} bytes in {field}; at most {limit} are taken.",
                    field=field,
                    code="E_TOO_LARGE",
                    detail={"bytes": found, "limit": limit},
                )
        open_here = self.jobs.outboxes.jobs_of(route)
        refusal = self.commits.refusal() or self.jobs.gate.refusal(size, open_here, self.settings.client_jobs)
        if refusal is not None:
            raise refusal
        return self.jobs.parse(message.job, self.back.limits)

    def _admit(self, route: bytes, message: m.Submit, job: Job, now: Now) -> None:
        record = Record(
            id=message.id,
            owner=self._peer.owner,
            body=message.job,
            size=charge(message.job, message.h),
            digest=digest_of(message.job),
            seed=self._draw_seed() if job.seed is None else job.seed,
            admit_seq=self.jobs.next_seq,
            admitted=now,
            reading=Reading(route, message.credit),
            finish=message.finish,
            headers=message.h,
            checked=self.back.generation,
            ttl_ns=moment(message.queue_ttl_ms, now),
            deadline_ns=moment(message.deadline_ms, now),
        )
        self.jobs.admit(record, job)
        self.commits.admitted(record)
        position = len(self.jobs.gate.line) - 1 + (self.jobs.gate.slot is not None)
        self.jobs.tell(route, words.admitted(record, position, self.identity.boot_id, dup=False))
        self.jobs.outboxes.attach(record)
        self._timers.set_limits(record, now)

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
        record = self._known(route, message.id, anyones=True)
        if record is None:
            return
        self.cancel(record, None, now)
        if record.reading.route != route:
            self.jobs.tell(route, m.StatusReply(health.job_status(self.jobs, record)))

    def _resume(self, route: bytes, message: m.Resume, now: Now) -> None:
        record = self._known(route, message.id)
        if record is None:
            return
        try:
            wrong = self._no_place(record, message)
        except JournalError as error:
            self.jobs.tell(route, words.not_readable(record, str(error)))
            return
        if wrong is not None:
            self.jobs.tell(route, wrong)
            return
        credit = None if message.credit is None else message.next_seq + message.credit
        self.jobs.read_from(record, Reading(route, credit, message.tokens, message.next_seq), now)

    def _no_place(self, record: Record, message: m.Resume) -> m.Error | None:
        if message.next_seq > MAX_NEXT_SEQ:
            text = f"next_seq may be at most {MAX_NEXT_SEQ}."
            return words.error(ProtocolError(text, field="next_seq"), None)
        if record.restored and message.tokens > record.tokens:
            # What a power loss took is drawn again, where the job still runs; `delivery` sees to it.
            return None
        if delivery.has_place(record, self.journal, message.tokens):
            return None
        return words.error(ProtocolError("No chunk of this job ended there.", field="tokens"), None)

    def _give_credit(self, route: bytes, message: m.GiveCredit, _now: Now) -> None:
        record = self._known(route, message.id)
        if record is not None and record.reading.credit is not None:
            record.reading.credit = max(record.reading.credit, message.upto_seq)
            self.jobs.outboxes.mark(record)

    def _ack(self, _route: bytes, message: m.Ack, _now: Now) -> None:
        record = self.jobs.find(message.id, self._peer.owner)
        if record is not None:
            self.jobs.acknowledge(record)

    def _kick(self, route: bytes, message: m.Kick, _now: Now) -> None:
        record = self._known(route, message.id, anyones=True)
        if record is not None:
            self.jobs.tell(route, self._desk.kick(record))

    def _delete(self, route: bytes, message: m.Delete, _now: Now) -> None:
        record = self._known(route, message.id, anyones=True)
        if record is not None:
            self.jobs.tell(route, self._desk.delete(record))

    def _status(self, route: bytes, message: m.Status, now: Now) -> None:
        if message.id is not None:
            record = self._known(route, message.id, anyones=True)
            if record is not None:
                self.jobs.tell(route, self._desk.status(record, whole=message.whole))
        elif message.jobs:
            owner = None if self._peer.operator else self._peer.owner
            self.jobs.tell(route, m.StatusReply(health.job_list(self.jobs, message.state, owner)))
        else:
            self.jobs.tell(route, m.StatusReply(self.report(now)))

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
            self.back.cancel_run(record, reason, now)
        elif record.handing_back:
            # The broker stops and takes it off the worker: now to end, and not to go on later.
            record.handing_back, record.cancel_reason = False, reason

    def _orphan(self, record: Record, now: Now, after_s: float) -> None:
        if record.over:
            self.jobs.left(record, now)
        if record.over or record.finish:
            return
        if after_s > 0:
            self._timers.await_return(record, now, after_s)
            return
        self.jobs.counters["orphans_cancelled"] += 1
        self.cancel(record, None, now)

    # --- time

    def tick(self, now: Now) -> None:
        """Do what the clock asks for. Called once a turn, after the turn's messages."""
        if now.mono - self._last_turn > 2 * self.settings.beat_s:
            # The loop itself was away (sleep, a stopped process): silence proves nothing.
            self._pardon(now)
        self._last_turn = now.mono
        while self.jobs.flooders:
            self.jobs.counters["flooders_dropped"] += 1
            self.on_client_gone(self.jobs.flooders.popitem()[0], now)
        self.back.check_liveness(now)
        self._timers.heed_clock(self.jobs, now)
        for kind, record in self._timers.due(now):
            self._ring(kind, record, now)
        self.jobs.expire(now)
        if now.mono >= self._next_beat:
            self._next_beat = now.mono + self.settings.beat_s
            self._beat()
            self.jobs.gate.recent.sample(self.jobs.gate.slot, now)
            # Some may have been read to their end since.
            self.jobs.trim(now)
        if self.draining:
            self._drain.go_on(now)
        else:
            self.back.dispatch(now)

    def next_wake(self) -> float:
        """The monotonic time at which `tick` has something to do even if nothing happens."""
        moments = [self._next_beat, self.back.next_check(), self._timers.next()]
        moments += [self._drain.next(), self.commits.next_try()]
        retry = self.jobs.outboxes.next_retry()
        if retry is not None:
            moments.append(retry)
        return min(moments)

    def _pardon(self, now: Now) -> None:
        self.back.pardon(now)
        for record in self.jobs:
            if not record.over and record.reading.route is None and not record.finish:
                # After a restart there may have been more time left than that.
                left = max(self.settings.orphan_s, record.orphan_until - self._last_turn)
                self._timers.await_return(record, now, left)

    def _ring(self, kind: str, record: Record, now: Now) -> None:
        if kind == "ttl" and (record.phase is not Phase.WAITING or record.begun):
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
        waiting = {record.key for record, _ in wanted if record.phase is Phase.WAITING}
        positions: dict[Key, int] = {}
        for position, record in self.jobs.gate.positions():
            if len(positions) == len(waiting):
                break
            if record.key in waiting:
                positions[record.key] = position
        for record, route in wanted:
            self.jobs.tell(route, self.back.progress_of(record, positions.get(record.key, 0)))

    def _progress_wanted(self) -> list[tuple[Record, bytes]]:
        wanted: list[tuple[Record, bytes]] = []
        for route, client in self.jobs.outboxes.clients.items():
            if not client.queue:
                open_jobs = (record for record in client.jobs.values() if not record.over)
                wanted += ((record, route) for record in islice(open_jobs, PROGRESS_JOBS))
        return wanted

    # --- drain

    def drain(self, now: Now, limit_s: float) -> None:
        """Stop taking jobs; the running one has *limit_s* to end."""
        self._drain.start(now, limit_s)

    @property
    def draining(self) -> bool:
        """True from the first `drain` on."""
        return self._drain.draining

    @property
    def drained(self) -> bool:
        """True once nothing runs, and everything was said or its readers had their time."""
        return self._drain.over

    def report(self, now: Now) -> dict[str, Any]:
        """The health report."""
        return self._desk.report(now, draining=self.draining, http=self.http)

    def _known(self, route: bytes, job_id: bytes, *, anyones: bool = False) -> Record | None:
        """The job that this peer calls *job_id*, or where *anyones* serves an operator finds; else it is told."""
        record = self.jobs.find(job_id, self._peer.owner)
        if record is None and anyones and self._peer.operator:
            record = self.jobs.find_any(job_id)
        if record is None:
            error = JobError("No job of that id is known; it never came or is forgotten.", code="E_UNKNOWN_JOB")
            self.jobs.tell(route, words.error(error, job_id))
        return record
