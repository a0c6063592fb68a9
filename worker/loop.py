"""The worker's loop: the only file here that talks to the broker. One job at a time, on the main thread.

The main thread owns MLX and the socket of jobs; between two steps it looks for a cancel without waiting.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Final, Protocol

import zmq

from mtplx import messages as m
from mtplx.cli.signals import install
from mtplx.errors import MtplxError, ProtocolError, WireError, WorkerRefusedError
from mtplx.job import Job
from mtplx.keys import credentials
from mtplx.logs import of_job
from mtplx.process import host_id, look
from mtplx.settings import Settings
from mtplx.sockets import Handshakes, worker_dealer
from mtplx.wire import MAX_FRAME_BYTES, decode, encode, unpack_body
from worker.attempt import Attempt, Chunk, Progress
from worker.attempt import Final as JobFinal
from worker.pulse import STOP_SIGNALS, Pulse, Vitals

log = logging.getLogger("mtplx.worker")

# How often an idle worker looks at its signals and at what the pulse heard.
IDLE_MS: Final = 500
# READY is repeated where no answer came: it may have been lost with its connection.
READY_AGAIN_S: Final = 1.0
# A broker that takes nothing for this long is gone, and the attempt with it.
SEND_LIMIT_S: Final = 5.0
# How long a leaving worker waits for QUIET from a broker that says nothing.
LEAVE_S: Final = 2.0
GOODBYE_MS: Final = 500


class Runner(Protocol):
    """Runs one attempt; see `worker.job.run_job`."""

    def __call__(
        self, attempt: Attempt, *, cancelled: Callable[[], bool], progress: Progress
    ) -> Iterator[Chunk | JobFinal]:
        """Chunks, then one Final."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What the worker says of itself in READY.

    context: the most positions that a job can have here. model_hash, build_hash: as in READY.
    """

    mode: str
    stage: str
    model: str
    vocabulary: int
    context: int
    info: dict[str, Any]
    model_hash: str = ""
    build_hash: str = ""


class BrokerLostError(MtplxError):
    """The broker took nothing for too long; the attempt is void and READY is sent again."""


class Worker:
    """Serves one broker until it is told to stop.

    *counts*: as in `Engine`, asked after each attempt. *width*: rows of the latest decode forward.
    """

    def __init__(
        self,
        settings: Settings,
        offer: Offer,
        run: Runner,
        *,
        counts: Callable[[], dict[str, int] | None] = lambda: None,
        width: Callable[[], int] = lambda: 1,
        watch_stdin: bool = False,
    ) -> None:
        self._settings = settings
        self._run = run
        self._counts = counts
        self._width = width
        self._worker_id = secrets.token_bytes(16)
        me = look(os.getpid())
        self._ready = m.Ready(
            worker_id=self._worker_id,
            pid=os.getpid(),
            mode=offer.mode,
            stage=offer.stage,
            model=offer.model,
            vocabulary=offer.vocabulary,
            context=offer.context,
            info=offer.info,
            model_hash=offer.model_hash,
            build_hash=offer.build_hash,
            host=host_id(),
            born=me.born if me else 0.0,
        )
        self._vitals = Vitals(prefix=counts())
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        endpoint = settings.endpoint("back")
        self._handshakes = Handshakes(credentials(settings, endpoint))
        self._socket = worker_dealer(self._context, endpoint, self._handshakes.credentials, self._handshakes)
        self._pulse = Pulse(self._context, settings, self._worker_id, self._vitals, watch_stdin=watch_stdin)
        self._cancelled_lease: int | None = None
        self._drawn: m.Drawn | None = None
        self._quiet = False
        self._said_bye = False
        self._signals = 0
        self._stop_at = float("inf")

    def serve(self) -> None:
        """Offer this worker and run what comes, until SIGTERM, SIGINT or SIGHUP.

        Raises:
            WorkerRefusedError: the broker will not take this worker.
        """
        for number in STOP_SIGNALS:
            install(number, self._on_signal)
        self._pulse.watch_signals()
        self._pulse.start()
        while not self._signals:
            if self._vitals.disowned:
                self._announce()
            else:
                self._take(IDLE_MS)
        self._leave()

    def close(self) -> None:
        """Say goodbye where that was not done, end the pulse, and leave within GOODBYE_MS."""
        if self._pulse.is_alive():
            self._pulse.stop()
        self._say_bye()
        self._handshakes.close()
        self._socket.close(linger=GOODBYE_MS)
        self._context.term()

    # --- the conversation

    def _announce(self) -> None:
        """Send READY until a broker answers, in whichever order the two were started."""
        self._vitals.epoch = 0
        self._ready = replace(self._ready, epoch=self._ready.epoch + 1)
        again_at = 0.0
        while self._vitals.disowned and not self._signals:
            self._check_handshakes()
            if time.monotonic() >= again_at:
                if not self._try_send(self._ready):
                    self._socket.poll(IDLE_MS, zmq.POLLOUT)
                    continue
                again_at = time.monotonic() + READY_AGAIN_S
            # Whatever lay in the pipe before the answer is of an epoch that is over.
            answer = self._receive(IDLE_MS)
            if isinstance(answer, m.Error) and not answer.retryable:
                raise WorkerRefusedError(answer.message)

    def _check_handshakes(self) -> None:
        known, cause = self._handshakes.cause(), self._handshakes.look()
        if self._handshakes.refused:
            raise WorkerRefusedError(f"No broker takes this worker at {self._settings.endpoint('back')}: {cause}")
        if cause and not known:
            log.warning("no broker answers at %s: %s", self._settings.endpoint("back"), cause)

    def _accepted(self, message: m.Accepted) -> None:
        if self._vitals.epoch == self._ready.epoch or message.epoch != self._ready.epoch:
            return
        # A new broker counts its leases from 1 again.
        self._cancelled_lease, self._drawn, self._quiet = None, None, False
        self._vitals.epoch = message.epoch
        self._pulse.beat_s = message.beat_ms / 1000
        self._pulse.poke()
        log.info("accepted by the broker")

    def _take(self, wait_ms: int) -> bool:
        """Run the job that comes within *wait_ms*; False where none came."""
        message = self._receive(wait_ms)
        if not isinstance(message, m.Run) or self._vitals.disowned:
            return False
        self._attempt(message)
        return True

    def _leave(self) -> None:
        """Say BYE and wait for QUIET: a job that crossed the BYE is still run."""
        self._say_bye()
        ends = time.monotonic() + LEAVE_S
        while self._said_bye and not self._quiet and time.monotonic() < ends:
            if self._take(IDLE_MS):
                ends = time.monotonic() + LEAVE_S

    def _say_bye(self) -> None:
        if not self._said_bye:
            self._said_bye = self._try_send(m.WorkerBye(self._worker_id))

    def _receive(self, wait_ms: int) -> m.Message | None:
        """The next message, or None; heeds all but RUN and refusals on the way."""
        if not self._socket.poll(wait_ms):
            return None
        try:
            message = decode(self._socket.recv_multipart(zmq.NOBLOCK), m.TO_WORKER)
        except ProtocolError as error:
            log.warning("the broker sent what is no message: %s", error)
            return None
        if isinstance(message, m.Accepted):
            self._accepted(message)
        elif isinstance(message, m.CancelRun):
            self._cancelled_lease = message.lease
        elif isinstance(message, m.Drawn):
            self._drawn = message
        elif isinstance(message, m.Quiet):
            self._quiet = True
            log.info("the broker has no more jobs for this worker")
        return message

    def _try_send(self, message: m.Message) -> bool:
        """False where nobody takes it now. A look at the pipe before would prove nothing."""
        try:
            self._socket.send_multipart(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _send(self, message: m.Message) -> None:
        ends = time.monotonic() + SEND_LIMIT_S
        while not self._try_send(message):
            if self._vitals.disowned or time.monotonic() >= min(ends, self._stop_at):
                raise BrokerLostError("The broker takes nothing; the attempt is void.")
            self._socket.poll(IDLE_MS, zmq.POLLOUT)

    # --- one attempt

    def _attempt(self, run: m.Run) -> None:
        self._vitals.lease = run.lease
        try:
            self._report(run, self._chunks(run))
        except BrokerLostError:
            log.warning("the broker was lost during a job", extra=of_job(run.id))
            self._vitals.epoch = 0
        except WireError as error:
            self._fail(run, error)
        except Exception as error:
            # MLX may be left in any state by an error out of an evaluation: this process must be replaced.
            log.exception("the job failed in an unforeseen way", extra=of_job(run.id))
            fault = WireError(
                f"The worker failed on this job ({type(error).__name__}) and is replaced.", code="E_INTERNAL"
            )
            # Said first: the next of the line must wait for the next worker.
            self._say_bye()
            self._fail(run, fault)
            raise
        finally:
            self._vitals.prefix = self._counts()
            self._vitals.rest()

    def _chunks(self, run: m.Run) -> Iterator[Chunk | JobFinal]:
        job = replace(Job.parse(unpack_body(run.job, MAX_FRAME_BYTES)), seed=run.seed)
        # Kept for the RUN that follows it, and for no other.
        told, self._drawn = self._drawn, None
        drawn = told.ids if told is not None and told.lease == run.lease else ()
        return self._run(
            Attempt(job=job, seed=run.seed, drawn=drawn),
            cancelled=lambda: self._is_cancelled(run.lease),
            progress=self._note,
        )

    def _note(self, phase: str, done: int, total: int) -> None:
        self._vitals.width = self._width()
        self._vitals.note(phase, done, total)

    def _report(self, run: m.Run, chunks: Iterator[Chunk | JobFinal]) -> None:
        for item in chunks:
            if self._vitals.disowned:
                return
            if isinstance(item, Chunk):
                self._send(
                    m.WorkerChunk(
                        run.id,
                        run.attempt,
                        run.lease,
                        item.first,
                        len(item.ids),
                        item.ids,
                        item.text,
                        item.logprobs,
                    )
                )
            elif item.finish_reason == "cancelled" and self._cancelled_lease != run.lease:
                self._fail(run, _unfinished(item))
            else:
                self._send(_final(run, item))

    def _is_cancelled(self, lease: int) -> bool:
        while self._receive(0) is not None:
            pass
        if self._signals:
            self._say_bye()
        return self._cancelled_lease == lease or self._vitals.disowned or time.monotonic() >= self._stop_at

    def _fail(self, run: m.Run, error: WireError) -> None:
        fail = m.Fail(run.id, run.attempt, run.lease, error.code, error.message, error.field, error.detail or None)
        try:
            self._send(fail)
        except BrokerLostError:
            self._vitals.epoch = 0

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        # The running job has until the drain limit to end; a second signal ends it at the next step.
        self._signals += 1
        limit = self._settings.drain_s if self._signals == 1 else 0.0
        self._stop_at = min(self._stop_at, time.monotonic() + limit)


def _unfinished(final: JobFinal) -> WireError:
    # Nobody cancelled it: it is handed back, to go on behind these tokens.
    return WireError(
        "The worker was stopped and hands the job back, which could not end within the drain limit.",
        code="E_WORKER_LOST",
        detail={"reason": "left", "tokens": final.completion_tokens},
    )


def _final(run: m.Run, final: JobFinal) -> m.Final:
    return m.Final(
        run.id,
        run.attempt,
        run.lease,
        finish_reason=final.finish_reason,
        prompt_tokens=final.prompt_tokens,
        cached_tokens=final.cached_tokens,
        max_tokens_used=final.max_tokens_used,
        prefill_s=final.prefill_s,
        decode_s=final.decode_s,
        sha256=final.sha256,
        route=final.route,
        row_invariant=final.row_invariant,
        speculation=final.speculation,
        prefix_exact=final.prefix_exact,
    )
