"""The worker's loop: the only file here that talks to the broker. One job at a time, on the main thread.

The main thread owns MLX and the socket of jobs; between two steps it looks for a cancel without waiting.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Final, Protocol

import zmq

from mtplx import messages as m
from mtplx.errors import MtplxError, ProtocolError, WireError, WorkerRefusedError
from mtplx.job import Job
from mtplx.settings import Settings
from mtplx.sockets import worker_dealer
from mtplx.wire import MAX_FRAME_BYTES, decode, encode, unpack_body
from worker.attempt import Attempt, Chunk, Progress
from worker.attempt import Final as JobFinal
from worker.pulse import Pulse, Vitals

log = logging.getLogger("mtplx.worker")

# How often an idle worker looks at its signals and at what the pulse heard.
IDLE_MS: Final = 500
# A broker that takes nothing for this long is gone, and the attempt with it.
SEND_LIMIT_MS: Final = 5000
GOODBYE_MS: Final = 500


class Runner(Protocol):
    """Runs one attempt; see `worker.job.run_job`."""

    def __call__(
        self, attempt: Attempt, *, cancelled: Callable[[], bool], progress: Progress
    ) -> Iterator[Chunk | JobFinal]:
        """Chunks, then one Final."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What the worker says of itself in READY."""

    mode: str
    stage: str
    model: str
    vocabulary: int
    context: int
    info: dict[str, Any]


class BrokerLostError(MtplxError):
    """The broker took nothing for too long; the attempt is void and READY is sent again."""


class Worker:
    """Serves one broker until it is told to stop."""

    def __init__(self, settings: Settings, offer: Offer, run: Runner, *, watch_stdin: bool = False) -> None:
        self._settings = settings
        self._run = run
        self._worker_id = secrets.token_bytes(16)
        self._ready = m.Ready(
            worker_id=self._worker_id,
            pid=os.getpid(),
            mode=offer.mode,
            stage=offer.stage,
            model=offer.model,
            vocabulary=offer.vocabulary,
            context=offer.context,
            info=offer.info,
        )
        self._vitals = Vitals()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        endpoint = settings.endpoint("back")
        self._socket = worker_dealer(self._context, endpoint)
        self._pulse = Pulse(self._context, endpoint, self._worker_id, self._vitals, watch_stdin=watch_stdin)
        self._pulse.beat_s = settings.beat_s
        self._cancelled_lease = -1
        self._signals = 0
        self._stop_at = float("inf")

    def serve(self) -> None:
        """Offer this worker and run what comes, until SIGTERM or SIGINT.

        Raises:
            WorkerRefusedError: the broker will not take this worker.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._pulse.start()
        self._announce()
        while not self._signals:
            message = self._receive(IDLE_MS)
            if isinstance(message, m.Run):
                self._attempt(message)
            elif self._vitals.disowned:
                self._announce()

    def close(self) -> None:
        """Say goodbye, end the pulse, and leave within GOODBYE_MS."""
        if self._pulse.is_alive():
            self._pulse.stop()
        if self._socket.poll(0, zmq.POLLOUT):
            self._socket.send_multipart(encode(m.WorkerBye(self._worker_id)), zmq.NOBLOCK)
        self._socket.close(linger=GOODBYE_MS)
        self._context.term()

    # --- the conversation

    def _announce(self) -> None:
        """Send READY until a broker answers, in whichever order the two were started."""
        self._vitals.disowned = False
        while not self._signals:
            if not self._socket.poll(IDLE_MS, zmq.POLLOUT):
                continue
            self._socket.send_multipart(encode(self._ready), zmq.NOBLOCK)
            answer = self._receive(SEND_LIMIT_MS)
            if isinstance(answer, m.Accepted):
                self._pulse.beat_s = answer.beat_ms / 1000
                log.info("accepted by the broker")
                return
            if isinstance(answer, m.Error) and answer.code in ("E_WORKER_EXISTS", "E_WORKER_MODE"):
                raise WorkerRefusedError(answer.message)

    def _receive(self, wait_ms: int) -> m.Message | None:
        """The next message that matters, or None; heeds cancels and beats on the way."""
        if not self._socket.poll(wait_ms):
            return None
        try:
            message = decode(self._socket.recv_multipart(zmq.NOBLOCK), m.TO_WORKER)
        except ProtocolError as error:
            log.warning("the broker sent what is no message: %s", error)
            return None
        if isinstance(message, m.CancelRun):
            self._cancelled_lease = max(self._cancelled_lease, message.lease)
        elif isinstance(message, m.Quiet):
            log.info("the broker is stopping")
        return message

    def _send(self, message: m.Message) -> None:
        frames = encode(message)
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            if not self._socket.poll(SEND_LIMIT_MS, zmq.POLLOUT):
                raise BrokerLostError("The broker takes nothing; the attempt is void.") from None
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    # --- one attempt

    def _attempt(self, run: m.Run) -> None:
        self._vitals.lease = run.lease
        try:
            self._report(run, self._chunks(run))
        except BrokerLostError:
            log.warning("the broker was lost during a job")
            self._vitals.disowned = True
        except WireError as error:
            self._fail(run, error)
        except Exception as error:
            # MLX may be left in any state by an error out of an evaluation: this process must be replaced.
            log.exception("the job failed in an unforeseen way")
            fault = WireError(
                f"The worker failed on this job ({type(error).__name__}) and is replaced.", code="E_INTERNAL"
            )
            self._fail(run, fault)
            raise
        finally:
            self._vitals.rest()

    def _chunks(self, run: m.Run) -> Iterator[Chunk | JobFinal]:
        job = replace(Job.parse(unpack_body(run.job, MAX_FRAME_BYTES)), seed=run.seed)
        return self._run(
            Attempt(job=job, seed=run.seed),
            cancelled=lambda: self._is_cancelled(run.lease),
            progress=self._vitals.note,
        )

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
            else:
                self._send(_final(run, item))

    def _is_cancelled(self, lease: int) -> bool:
        while self._receive(0) is not None:
            pass
        return self._cancelled_lease >= lease or self._vitals.disowned or time.monotonic() >= self._stop_at

    def _fail(self, run: m.Run, error: WireError) -> None:
        fail = m.Fail(run.id, run.attempt, run.lease, error.code, error.message, error.field, error.detail or None)
        try:
            self._send(fail)
        except BrokerLostError:
            self._vitals.disowned = True

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        # The running job has until the drain limit to end; a second signal ends it at the next step.
        self._signals += 1
        limit = self._settings.drain_s if self._signals == 1 else 0.0
        self._stop_at = min(self._stop_at, time.monotonic() + limit)


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
    )
