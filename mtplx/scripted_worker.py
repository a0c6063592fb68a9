"""The worker double of `mtplx.testing`: speaks MTX/1 on the back endpoint and follows a script."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import zmq

from mtplx import messages as m
from mtplx import wire
from mtplx.errors import Exit
from mtplx.job import Job
from mtplx.script import Fault, Persona, Script, answer_of, chunk_of, chunks, encoded, final_of, prompt_words
from mtplx.sockets import worker_dealer

# How long a waiting worker may take to see that it was told to stop.
LOOK_MS: Final = 20
FIRST_BEAT_S: Final = 0.1
# READY is repeated where no answer came: it may have been lost with its connection.
READY_AGAIN_S: Final = 1.0
# How long a leaving worker waits for QUIET from a broker that says nothing.
LEAVE_S: Final = 0.5


class Event(NamedTuple):
    """One line of a worker's log: `at` is `time.monotonic()`, the same clock in all processes of a machine.

    Events: ready, accepted, refused, unknown, run, first, cancel, final, fail, fault, drop, overlap (a RUN
    while one runs), astray (DRAWN does not begin the answer), quiet, bye. `tokens` counts those drawn so far,
    by earlier attempts too.
    """

    event: str
    id: str
    lease: int
    at: float
    tokens: int


class _Dropped(Exception):  # noqa: N818 - a way out of the run, no error
    """The attempt ends here: stopped, or unknown to the broker."""


class ScriptedWorker:
    """A worker on the back endpoint *back*, as a thread (`with`) or in this thread (`serve`).

    script: one script for all jobs, or a function of RUN and job.
    log_file: where each event is also written as a JSON line.
    own_process: let ABORT and EXIT end the process.
    drain_s: how long the running job may go on once the worker is told to stop.
    """

    def __init__(
        self,
        back: str,
        script: Script | Callable[[m.Run, Job], Script] | None = None,
        *,
        persona: Persona | None = None,
        log_file: Path | None = None,
        own_process: bool = False,
        drain_s: float = 0.0,
    ) -> None:
        self.back = back
        self.persona = persona or Persona()
        self.worker_id = secrets.token_bytes(16)
        self.log: list[Event] = []
        self.refused: m.Error | None = None
        self._script = script or Script()
        self._own_process = own_process
        self._log_file = log_file.open("a") if log_file else None
        self._grew = threading.Condition()
        self._drain_s = drain_s
        # Plain flags: `stop` may come in a signal handler, which must take no lock.
        self._told = self._mute = self._quiet = self._said_bye = False
        self._farewell = True
        self._ended = threading.Event()
        # The READY said last, the one accepted, and the latest of which the broker knew nothing.
        self._epoch = self._accepted = self._unknown = 0
        self._beat_s = FIRST_BEAT_S
        self._progress = 0
        self._drawn: m.Drawn | None = None
        self._drain_until = self._again_at = 0.0
        self._now: tuple[str, int | None, int, int] = ("idle", None, 0, 0)  # phase, lease, done, total
        self._thread = threading.Thread(target=self.serve, name="scripted-worker", daemon=True)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = worker_dealer(self._context, self.back)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End with BYE, as a worker does on SIGTERM; safe to call twice, and in a signal handler of `serve`."""
        self._told = True
        if self._thread.ident is not None:
            self._thread.join()

    def kill(self) -> None:
        """End without a word, as a process does on SIGKILL."""
        self._farewell = False
        self.stop()

    def events(self, name: str) -> list[Event]:
        """The logged events of that name, in order."""
        return [event for event in list(self.log) if event.event == name]

    def wait_for(self, name: str, count: int = 1, timeout: float = 10.0) -> list[Event]:
        """Wait until *count* events of that name are logged, and return them.

        Raises:
            TimeoutError: with the log so far.
        """
        with self._grew:
            if not self._grew.wait_for(lambda: len(self.events(name)) >= count, timeout):
                raise TimeoutError(f"No {count} x {name} in {timeout} s; the log is {self.log}.")
        return self.events(name)

    def serve(self) -> None:
        """Speak to the broker until stopped or refused."""
        beats = threading.Thread(target=self._beat, name="scripted-beats", daemon=True)
        beats.start()
        try:
            while not self._told:
                if self._disowned and (self._accepted or time.monotonic() >= self._again_at):
                    self._say_ready()
                self._listen()
            self._leave()
        except _Dropped:
            pass
        finally:
            self._told = True
            self._ended.set()
            self._socket.close(linger=500 if self._farewell else 0)
            beats.join()
            self._context.term()
            if self._log_file:
                self._log_file.close()

    def _note(self, event: str, run: m.Run | None = None, tokens: int = 0) -> None:
        job, lease = (run.id.hex(), run.lease) if run else ("", 0)
        with self._grew:
            self.log.append(Event(event, job, lease, time.monotonic(), tokens))
            self._grew.notify_all()
        if self._log_file:
            self._log_file.write(json.dumps(self.log[-1]._asdict()) + "\n")
            self._log_file.flush()

    def _say_ready(self) -> None:
        if self._accepted or not self._epoch:
            self._epoch, self._accepted = self._epoch + 1, 0
        self._again_at = time.monotonic() + READY_AGAIN_S
        who = dataclasses.asdict(self.persona)
        self._send(m.Ready(worker_id=self.worker_id, pid=os.getpid(), epoch=self._epoch, **who))
        self._note("ready")

    @property
    def _disowned(self) -> bool:
        return self._accepted in (0, self._unknown)

    def _listen(self) -> None:
        if self._socket.poll(LOOK_MS):
            self._obey(self._receive())

    def _say_bye(self) -> None:
        if self._farewell and not self._said_bye:
            self._said_bye = self._try_send(self._socket, m.WorkerBye(self.worker_id))
            self._note("bye")

    def _leave(self) -> None:
        """Say BYE and wait for QUIET: a job that crossed the BYE is still taken."""
        self._say_bye()
        ends = time.monotonic() + LEAVE_S
        while self._said_bye and not self._quiet and time.monotonic() < ends:
            self._listen()

    def _obey(self, message: m.Message) -> None:
        match message:
            case m.Run() if not self._disowned:
                self._run(message)
            case m.Drawn():
                self._drawn = message
            case m.Accepted() if message.epoch == self._epoch != self._accepted:
                self._beat_s, self._quiet = message.beat_ms / 1000, False
                self._accepted, self._drawn = message.epoch, None
                self._note("accepted")
            case m.Error(retryable=False):
                self.refused = message
                self._note("refused")
                raise _Dropped
            case m.Quiet():
                self._quiet = True
                self._note("quiet")

    def _receive(self) -> m.Message:
        return wire.decode(self._socket.recv_multipart(), m.TO_WORKER)

    def _send(self, message: m.Message) -> None:
        self._send_frames(wire.encode(message))

    def _send_frames(self, frames: list[bytes]) -> None:
        send = self._socket.send
        while True:
            try:
                # Frame by frame costs a third of send_multipart; only the first can find the pipe full.
                send(frames[0], zmq.NOBLOCK | zmq.SNDMORE)
            except zmq.Again:
                if self._told or self._accepted == self._unknown != 0:
                    raise _Dropped from None
                self._socket.poll(LOOK_MS, zmq.POLLOUT)
            else:
                break
        for frame in frames[1:-1]:
            send(frame, zmq.SNDMORE)
        send(frames[-1])

    @staticmethod
    def _try_send(socket: zmq.Socket[bytes], message: m.Message) -> bool:
        try:
            socket.send_multipart(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:  # nobody is there to hear it
            return False
        return True

    def _beat(self) -> None:
        # A connection of its own: sockets belong to one thread, and a busy main thread must not stop the beats.
        with worker_dealer(self._context, self.back) as socket:
            while not self._ended.wait(self._beat_s):
                epoch, (phase, lease, done, total) = self._accepted, self._now
                if self._mute or epoch == 0:
                    continue
                self._try_send(
                    socket, m.WorkerBeat(self.worker_id, self._progress, lease, phase, done, total, epoch)
                )
                while socket.poll(0):
                    answer = wire.decode(socket.recv_multipart(), m.TO_WORKER)
                    if isinstance(answer, m.Error) and answer.code == "E_UNKNOWN_WORKER":
                        self._note("unknown")
                        self._unknown = (answer.detail or {}).get("epoch", 0)

    # --- one job

    def _run(self, run: m.Run) -> None:
        told, self._drawn = self._drawn, None
        drawn = told.ids if told is not None and told.lease == run.lease else ()
        self._note("run", run, len(drawn))
        job = Job.parse(wire.unpack_body(run.job, wire.MAX_FRAME_BYTES))
        script = self._script(run, job) if callable(self._script) else self._script
        try:
            self._attempt(run, job, Script.of_job(job, script), drawn)
        except _Dropped:
            self._drop(run)
        finally:
            self._now = ("idle", None, 0, 0)

    def _drop(self, run: m.Run) -> None:
        if self._told and self._farewell and not self._disowned:
            # As the real worker at its drain limit: nobody cancelled the job.
            self._say_bye()
            why = "The worker was stopped and hands the job back."
            word = m.Fail(run.id, run.attempt, run.lease, "E_WORKER_LOST", why, detail={"reason": "left"})
            self._try_send(self._socket, word)
            self._note("fail", run)
        else:
            self._note("drop", run)

    def _attempt(self, run: m.Run, job: Job, script: Script, drawn: tuple[int, ...]) -> None:
        ids, texts = answer_of(job, script, self.persona.vocabulary, run.seed)
        if ids[: len(drawn)] != drawn:
            self._note("astray", run, len(drawn))
        answer = encoded(ids, texts, len(drawn), script.per_chunk, job.logprobs)
        begun, prompt = time.monotonic(), len(prompt_words(job))
        pending = script.faulty(run.attempt)
        if pending and script.fault_after < 0:
            pending = False
            if self._fault(run, script, len(drawn)):
                return
        cancelled = self._prefill(run, script, prompt)
        first_at = due = time.monotonic()
        sent, total = len(drawn), len(answer.ids)
        for first, frames in () if cancelled else chunks(run, answer, script.per_chunk):
            if pending and first >= script.fault_after:
                pending = False
                if self._fault(run, script, first):
                    return
            due += script.token_s * script.per_chunk
            # A look costs as much as a chunk: one in sixteen where nothing is waited for.
            if (script.token_s or first % 16 == 0) and self._cancelled_by(due, run):
                cancelled = True
                break
            self._send_frames(frames)
            sent = min(first + script.per_chunk, total)
            if first == len(drawn):
                self._note("first", run, sent)
            self._progress += 1
            self._now = ("decode", run.lease, sent, job.max_tokens)
        if pending and not cancelled and self._fault(run, script, sent):
            return
        reason = "cancelled" if cancelled else script.finish_reason
        reason = reason or ("length" if sent == job.max_tokens else "stop")
        spent = (first_at - begun, time.monotonic() - first_at)
        self._send(final_of(run, job, answer.ids[:sent], reason, spent=spent, script=script))
        self._note("final", run, sent)

    def _prefill(self, run: m.Run, script: Script, prompt: int) -> bool:
        """Read the prompt step by step; True where a cancel came."""
        due = time.monotonic()
        for step in range(script.prefill_steps):
            self._now = ("prefill", run.lease, prompt * step // script.prefill_steps, prompt)
            due += script.prefill_step_s
            if self._cancelled_by(due, run):
                return True
            self._progress += 1
        self._now = ("prefill", run.lease, prompt, prompt)
        return self._cancelled_by(0.0, run)

    def _cancelled_by(self, due: float, run: m.Run) -> bool:
        """Wait until *due* while listening; True as soon as a cancel of this lease is read."""
        while True:
            left = due - time.monotonic()
            if self._disowned or self._over():
                raise _Dropped
            # Whole milliseconds in the poll, the rest in a sleep; no call at all when it is due.
            if left > 0 and not self._socket.poll(min(int(left * 1000), LOOK_MS)) and left < 0.001:
                time.sleep(left)
            while int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
                message = self._receive()
                if isinstance(message, m.CancelRun) and message.lease == run.lease:
                    self._note("cancel", run)
                    return True
                if isinstance(message, m.Run):
                    self._note("overlap", message)
                elif not isinstance(message, m.CancelRun):
                    self._obey(message)
            if due - time.monotonic() <= 0:
                return False

    def _over(self) -> bool:
        """Whether the drain limit has passed; BYE is said when it begins."""
        if not self._told:
            return False
        if not self._said_bye:
            self._say_bye()
            self._drain_until = time.monotonic() + self._drain_s
        return time.monotonic() >= self._drain_until

    def _fault(self, run: m.Run, script: Script, tokens: int) -> bool:
        """Do the script's fault; True where the attempt ends with it."""
        self._note("fault", run, tokens)
        match script.fault:
            case Fault.ABORT | Fault.EXIT if not self._own_process:
                self._farewell = False
                self._told = True
                raise _Dropped
            case Fault.ABORT:
                os.abort()
            case Fault.EXIT:
                os._exit(Exit.FAILED)
            case Fault.FAIL:
                self._send(m.Fail(run.id, run.attempt, run.lease, script.fail_code, "The script asked for it."))
                self._note("fail", run, tokens)
                return True
            case Fault.HANG | Fault.SILENT:
                self._mute = script.fault is Fault.SILENT
                while not self._told:
                    time.sleep(LOOK_MS / 1000)
                self._farewell = False
                raise _Dropped
            case Fault.STALE:
                self._send_frames(chunk_of(run, run.lease - 1, tokens))
            case Fault.GAP:
                self._send_frames(chunk_of(run, run.lease, tokens + 1))
        return False
