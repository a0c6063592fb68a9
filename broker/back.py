"""The worker's side of the machine: one worker, one lease, and what its messages may change."""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass
from typing import Final

from broker import attempts, words
from broker.jobs import Jobs
from broker.liveness import LiveWorker, next_check, verdict
from broker.moves import Move, Phase
from broker.names import HANDED_BACK
from broker.record import Answer, Now, Piece, Record
from mtplx import messages as m
from mtplx.errors import CODES, WireError
from mtplx.job import MAX_INT, ModelLimits

log = logging.getLogger("mtplx.broker")

OF_A_JOB: Final = (m.WorkerChunk, m.Final, m.Fail)
FINISH_REASONS: Final = ("stop", "length", "cancelled")
# Rule 6 of docs/protocol.md: the first three answer a message and end no job; the others are the broker's own.
NO_LAST_WORDS: Final = ("E_PROTOCOL", "E_TOO_LARGE", "E_CONFLICT", "E_POISON", "E_MODEL_CHANGED", "E_ANSWER_LOST")
LOSSES: Final = {
    "exited": "the worker ended or crashed",
    "silent": "the worker fell silent",
    "stalled": "the worker made no progress",
    "left": "the worker left",
    "replaced": "the worker was started anew",
    "broken": "the worker broke the protocol",
    "gave_up": "the worker gave up",
    "failed": "the worker failed on the job and left",
    "revoked": "the worker had its key revoked",
}
# Of these the process may still be there, and hold the device.
HANGING: Final = ("silent", "stalled")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this broker is, told to producers, to the worker and in health."""

    boot_id: bytes
    version: str
    pid: int
    started: Now


class Back:
    """The one worker as the broker sees it. `outgoing` waits for the back socket, with routing ids.

    condemned: workers given up whose process may hang; who acts on them notes in lost_process what came of it.
    """

    def __init__(self, jobs: Jobs, identity: Identity) -> None:
        self._jobs = jobs
        self._identity = identity
        self._lease = 0
        self.worker: LiveWorker | None = None
        self.limits: ModelLimits | None = None
        self.generation = 0
        self.last_loss = ""
        self.lost_pid = 0
        self.lost_process = ""
        self.condemned: deque[m.Ready] = deque()
        self.outgoing: deque[tuple[bytes, m.Message]] = deque()
        # No job is handed out, because too much that would have to be written down is not.
        self.held_up = False

    # --- events

    def on_message(self, route: bytes, message: m.Message, now: Now) -> None:
        """A process on the worker's endpoint said *message*."""
        if isinstance(message, m.Ready):
            self._ready(route, message, now)
        elif isinstance(message, m.WorkerBeat):
            self._beat(route, message, now)
        elif isinstance(message, m.WorkerBye):
            self._bye(route, message, now)
        elif self._holds_lease(route, message):
            self._of_running_job(message, now)
        else:
            self._jobs.counters["stale_worker_messages"] += 1

    def on_bad_frame(self, route: bytes, error: WireError, now: Now) -> None:
        """Bytes on the worker's endpoint that are no worker message."""
        self._jobs.counters["bad_worker_frames"] += 1
        self.outgoing.append((route, words.error(error, None)))
        if self.is_worker(route):
            self.lose("broken", now)

    def is_worker(self, route: bytes) -> bool:
        """Whether *route* is the one worker's connection for jobs."""
        return self.worker is not None and self.worker.route == route

    def on_unreachable(self, route: bytes, message: m.Message, now: Now) -> None:
        """*message* to *route* could not be sent: the connection is gone."""
        if not self.is_worker(route):
            return
        record = self._jobs.gate.slot
        unsent = [message, *(waiting for _, waiting in self.outgoing)]
        if record is not None and any(isinstance(one, m.Run) and one.lease == self._lease for one in unsent):
            # A worker that never got the job did not fail on it. One that is to end does not come back for that.
            record.handing_back |= record.phase is Phase.RUNNING
        self.lose("exited", now)

    def lose(self, reason: str, now: Now) -> None:
        """Give the worker up; its lease ends here, and with it the attempt that runs."""
        if self.worker is None:
            return
        if reason in HANGING:
            self.condemned.append(self.worker.ready)
        log.log(logging.INFO if reason == "left" else logging.WARNING, "%s", LOSSES[reason])
        self.lost_process = ""
        self.last_loss, self.lost_pid, self.worker = reason, self.worker.ready.pid, None
        self._jobs.counters[f"worker_{reason}"] += 1
        if reason != "left":
            self._jobs.gate.recent.fault("worker", reason, f"{LOSSES[reason].capitalize()}.", now)
        record = self._jobs.gate.slot
        if record is not None:
            self._attempt_ended(record, reason, now)

    def hand_back(self, record: Record, now: Now) -> None:
        """Put the running *record* back to the head of the line; the attempt does not count."""
        attempts.take_back(record)
        self._jobs.journal.attempt(record)
        self._jobs.requeue(record, now, HANDED_BACK)

    def _attempt_ended(self, record: Record, reason: str, now: Now) -> None:
        """The attempt of the running *record* ended without an end of the job: it goes on, if it may."""
        if record.handing_back:
            self.hand_back(record, now)
            return
        self._jobs.gate.note("worker_lost", record.key, now, reason=reason)
        if record.phase is Phase.CANCELLING:
            # A job that was to end anyway ends as it was to, whatever becomes of its worker.
            self._jobs.end(record, record.cancel_reason or words.cancelled(record, now), now)
        elif attempts.is_poison(record):
            self._jobs.bury(record, LOSSES[reason], now)
        else:
            self._jobs.requeue(record, now, reason)

    # --- what the machine asks for

    def dispatch(self, now: Now) -> None:
        """Hand the first of the line to the worker, if both are there."""
        record = self._jobs.gate.first()
        while self.worker is not None and not self.worker.leaving and not self.held_up and record is not None:
            if self._may_run(record, self.worker.ready, now):
                self._begin(record, self.worker, now)
            record = self._jobs.gate.first()

    def _begin(self, record: Record, worker: LiveWorker, now: Now) -> None:
        self._lease += 1
        run = attempts.begin(record, worker.ready, self._lease, now)
        self._jobs.journal.attempt(record)
        self._jobs.gate.dispatch(record, run.model, worker.ready.stage, now)
        worker.progress_at = now.mono
        worker.phase, worker.done, worker.total = "prefill", 0, 0
        if record.answer is not None:
            self.outgoing.append((worker.route, m.Drawn(run.lease, record.answer.ids())))
        said = m.Run(record.id, run.attempt, run.lease, record.seed, record.body, record.headers)
        self.outgoing.append((worker.route, said))
        self._jobs.tell_reader(record, words.started(record, run))

    def unsay(self, record: Record) -> None:
        """Take back the RUN of *record*, which was not sent yet."""
        if self._jobs.gate.slot is record:
            kinds = (m.Drawn, m.Run, m.CancelRun)
            said = [
                one for one in self.outgoing if not (isinstance(one[1], kinds) and one[1].lease == self._lease)
            ]
            self.outgoing = deque(said)

    def cancel_run(self, record: Record, reason: m.Error | None, now: Now) -> None:
        """Ask the worker to end the running *record*, whose last word is to be *reason* or DONE."""
        record.move(Move.CANCEL)
        record.cancel_reason = reason
        self._jobs.gate.note("cancelling", record.key, now)
        if self.worker is not None:
            self.outgoing.append((self.worker.route, m.CancelRun(self._lease)))

    def quiet(self) -> None:
        """Tell the worker that no more jobs will come from this broker."""
        if self.worker is not None:
            self.outgoing.append((self.worker.route, m.Quiet()))

    def beat(self) -> None:
        """Tell the worker that the broker lives; a failure to send shows that the worker does not."""
        if self.worker is not None:
            self.outgoing.append((self.worker.route, m.BrokerBeat()))

    def pardon(self, now: Now) -> None:
        """Start the liveness clocks anew."""
        if self.worker is not None:
            self.worker.heard(now.mono, progressed=True)

    def check_liveness(self, now: Now) -> None:
        """Give up a worker that is silent or stalled."""
        if self.worker is None:
            return
        limits = self._jobs.settings
        busy = self._jobs.gate.slot is not None
        reason = verdict(self.worker, now.mono, busy=busy, dead_s=limits.dead_s, stall_s=limits.stall_s)
        if reason is not None:
            self.lose(reason, now)

    def next_check(self) -> float:
        """When `check_liveness` may next find something."""
        if self.worker is None:
            return math.inf
        limits = self._jobs.settings
        busy = self._jobs.gate.slot is not None
        return next_check(self.worker, busy=busy, dead_s=limits.dead_s, stall_s=limits.stall_s) + 1e-3

    @property
    def state(self) -> str:
        """`ready`, `busy` or `absent`."""
        if self.worker is None:
            return "absent"
        return "busy" if self._jobs.gate.slot is not None else "ready"

    def progress_of(self, record: Record, position: int) -> m.Progress:
        """The sign of life for *record*."""
        if record.phase is Phase.WAITING or self.worker is None:
            return m.Progress(record.id, "waiting", position, worker=self.state)
        if record.tokens:
            return m.Progress(record.id, "decode", 0, record.tokens, self.worker.total, self.state)
        return m.Progress(record.id, "prefill", 0, self.worker.done, self.worker.total, self.state)

    # --- messages

    def _ready(self, route: bytes, message: m.Ready, now: Now) -> None:
        beat_ms = int(1000 * self._jobs.settings.beat_s)
        accepted = m.Accepted(self._identity.boot_id, beat_ms, message.epoch)
        if self.worker is not None and self.worker.route == route and self.worker.ready == message:
            # Sent before our answer was read: nothing began anew, and the job in its pipe is still its job.
            self.worker.heard(now.mono, progressed=False)
            self.outgoing.append((route, accepted))
            return
        refusal = self._refusal(route, message)
        if refusal is not None:
            self._jobs.counters["workers_refused"] += 1
            self.outgoing.append((route, refusal))
            return
        if self.worker is not None:
            self.lose("replaced", now)
        self.generation += 1
        self.worker = LiveWorker(route, message, self.generation, now.mono, now.mono)
        self._note_limits(ModelLimits(message.vocabulary, message.context))
        self._jobs.counters["workers_accepted"] += 1
        self.outgoing.append((route, accepted))

    def _note_limits(self, limits: ModelLimits) -> None:
        if limits != self.limits:
            self.limits = limits
            self._jobs.journal.limits(limits.vocabulary, limits.context)

    def _refusal(self, route: bytes, message: m.Ready) -> m.Error | None:
        ours = str(self._jobs.settings.scheduler_mode)
        if message.mode != ours:
            return words.coded(
                "E_WORKER_MODE",
                f"The broker runs in {ours} mode and this worker in {message.mode[:32]} mode; "
                "start both with the same --scheduler-mode.",
                detail={"broker": ours, "worker": message.mode[:32]},
            )
        if message.vocabulary > MAX_INT or message.context > MAX_INT:
            return words.coded("E_PROTOCOL", f"A model has at most {MAX_INT} ids and positions; READY tells more.")
        live = self.worker
        if live is not None and live.route != route and live.ready.worker_id != message.worker_id:
            return words.coded(
                "E_WORKER_EXISTS",
                f"Worker process {live.ready.pid} is live; a broker takes one worker at a time. Stop it first.",
                detail={"pid": live.ready.pid},
            )
        return None

    def _bye(self, route: bytes, message: m.WorkerBye, now: Now) -> None:
        worker = self.worker
        if worker is not None and worker.ready.worker_id == message.worker_id and not worker.leaving:
            worker.leaving = True
            self._jobs.counters["workers_leaving"] += 1
            self._let_go(now)
        # It goes when it reads this: a RUN that crossed its BYE lies before it in the pipe.
        self.outgoing.append((route, m.Quiet()))

    def _let_go(self, now: Now) -> None:
        if self.worker is not None and self.worker.leaving and self._jobs.gate.slot is None:
            self.lose("left", now)

    def _beat(self, route: bytes, message: m.WorkerBeat, now: Now) -> None:
        worker = self.worker
        if worker is None or worker.ready.worker_id != message.worker_id:
            text = "The broker does not know this worker; send READY again."
            # The epoch lets the worker see whether this answer is older than its last READY.
            unknown = words.coded("E_UNKNOWN_WORKER", text, detail={"epoch": message.epoch})
            self.outgoing.append((route, unknown))
            return
        worker.heard(now.mono, progressed=message.progress != worker.progress)
        worker.progress, worker.prefix = message.progress, message.prefix
        if message.lease == self._lease:
            worker.width = message.width
            worker.phase, worker.done, worker.total = message.phase, message.done, message.total

    def _holds_lease(self, route: bytes, message: m.Message) -> bool:
        record = self._jobs.gate.slot
        return (
            isinstance(message, OF_A_JOB)
            and self.worker is not None
            and self.worker.route == route
            and record is not None
            and record.run is not None
            and (message.lease, message.id, message.attempt) == (record.run.lease, record.id, record.run.attempt)
        )

    def _of_running_job(self, message: m.Message, now: Now) -> None:
        record = self._jobs.gate.slot
        assert record is not None
        assert self.worker is not None
        self.worker.heard(now.mono, progressed=True)
        if isinstance(message, m.WorkerChunk):
            self._chunk(record, message, now)
        elif isinstance(message, m.Final):
            self._final(record, message, now)
        elif isinstance(message, m.Fail):
            self._fail(record, message, now)
        self._let_go(now)

    def _chunk(self, record: Record, message: m.WorkerChunk, now: Now) -> None:
        if not self._follows(record, message):
            self.lose("broken", now)
            return
        record.move(Move.CHUNK)
        if record.answer is None:
            record.answer = Answer()
        if record.run is not None and record.run.first_token is None:
            record.run.first_token = now
            record.first_token = record.first_token or (None if record.run.behind else now)
            record.barren = 0
            self._jobs.gate.note("first_token", record.key, now)
        piece = Piece(message.first, message.ids, message.text, message.logprobs)
        record.answer.add(piece)
        self._jobs.journal.piece(record, piece)
        self._jobs.outboxes.mark(record)

    def _follows(self, record: Record, message: m.WorkerChunk) -> bool:
        # A chunk without a token would have no place of its own for RESUME to name.
        ids = message.ids
        return (
            message.first == record.tokens
            and message.n == len(ids) > 0
            and max(ids) < (self.limits.vocabulary if self.limits else 0)
            and (message.logprobs is None or len(message.logprobs) == len(ids))
        )

    def _final(self, record: Record, message: m.Final, now: Now) -> None:
        assert self.worker is not None
        if message.finish_reason not in FINISH_REASONS:
            self.lose("broken", now)
            return
        if message.finish_reason == "cancelled":
            if record.phase is not Phase.CANCELLING or record.handing_back:
                self._attempt_ended(record, "gave_up", now)
                return
            if record.cancel_reason is not None:
                self._jobs.end(record, record.cancel_reason, now)
                return
        self._jobs.end(record, words.done(record, message, self.worker.ready.model), now)

    def _fail(self, record: Record, message: m.Fail, now: Now) -> None:
        assert self.worker is not None
        lost = message.code == "E_WORKER_LOST"
        if lost or (message.code == "E_INTERNAL" and self.worker.leaving):
            # One that said BYE and hands its job back does what it was told.
            record.handing_back |= lost and self.worker.leaving and record.phase is Phase.RUNNING
            self._attempt_ended(record, "gave_up" if lost else "failed", now)
            return
        # A code that answers a faulty message would leave the producer waiting for the job's last word.
        code = message.code if message.code in CODES and message.code not in NO_LAST_WORDS else "E_INTERNAL"
        last_word = m.Error(
            code, message.message, CODES[code].retryable, record.id, None, message.field, message.detail
        )
        self._jobs.end(record, last_word, now)

    def _may_run(self, record: Record, ready: m.Ready, now: Now) -> bool:
        """Whether this worker can run *record*; ends it where it cannot."""
        change = attempts.change_of(record, ready)
        if change is None and record.checked != self.generation:
            try:
                self._jobs.parse(record.body, self.limits)
            except WireError as error:
                change = words.error(error, record.id)
            record.checked = self.generation
        if change is not None:
            self._jobs.end(record, change, now)
        return change is None
