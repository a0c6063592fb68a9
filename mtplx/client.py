"""The client for programs with threads: `with Client() as client: print(client.run("Hello").text)`.

There is no thread behind it. Whoever waits for something moves the connection on for everybody: one
waiting thread at a time sits on the file descriptors, the others wait for it to share what came.
"""

from __future__ import annotations

import os
import select
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self, Unpack

from mtplx.errors import BrokerUnreachableError
from mtplx.keys import Credentials, credentials
from mtplx.link import Link
from mtplx.messages import Delete, Kick, Status
from mtplx.patience import Patience
from mtplx.request import Asked, SubmitArguments, request_of
from mtplx.session import Question, Session
from mtplx.settings import Settings
from mtplx.stream import Piece, Result, StreamState
from mtplx.view import StreamView, result_of

DEFAULT_TIMEOUT_S: Final = 10.0
CLIENT_NAME: Final = "mtplx-python"
# What a request that nobody answers is told by.
NOT_WELCOMED: Final = "No broker answers"
NOT_ADMITTED: Final = "The broker does not admit the job"
NO_STATUS: Final = "The broker does not answer STATUS"
CLOSED: Final = "This client is closed."
UNREAD: Final = "A stream with credit was dropped before its end; its job is cancelled."
WITHDRAWN: Final = "The job was withdrawn: its submit was interrupted."


def endpoint_of(endpoint: str | None, settings: Settings | None) -> str:
    """The producers' endpoint: the one given, or that of the settings in force."""
    if endpoint is not None:
        return endpoint
    return (settings or Settings.load()).endpoint("front")


def credentials_of(endpoint: str, settings: Settings | None) -> Credentials | None:
    """The keys for *endpoint* by the settings given, or by those in force; an ipc endpoint needs none.

    Raises:
        SettingsError: a key is missing, cannot be read, or is open to others.
    """
    return credentials(settings or Settings.load(), endpoint) if endpoint.startswith("tcp://") else None


class Stream(StreamView):
    """One job's answer as it comes. Iterate it for `Piece`s, or ask for the `result`.

    Iteration ends with the job, also when it was cancelled, and raises its error if it failed.
    """

    def __init__(self, client: Client, state: StreamState) -> None:
        super().__init__(state)
        self._client = client

    def __del__(self) -> None:
        if self._unreadable:
            # The collector may come in the middle of anything: the client cancels when it moves next.
            self._client._dropped.append(self._state)  # noqa: SLF001 - a stream is a handle of its client
            warnings.warn(UNREAD, ResourceWarning, stacklevel=1)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        piece = self._client._next(self._state, None)  # noqa: SLF001 - a stream is a handle of its client
        if piece is None:
            raise StopIteration
        return piece

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the last word; pieces nobody has read are dropped, the result has them all.

        Raises:
            TimeoutError: after *timeout* seconds; the job goes on.
            JobError: the job failed; `code` and `retryable` say how.
            BrokerUnreachableError: no word of the broker for the client's `idle_timeout`.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._client._next(self._state, deadline) is not None:  # noqa: SLF001 - as above
            pass
        return result_of(self._state)

    def cancel(self) -> None:
        """Ask for the job's end; its last word still comes: `result()` then has the part that was drawn."""
        self._client._cancel(self._state)  # noqa: SLF001 - as above


class Client:
    """A connection to the broker.

    settings: for *endpoint* where it is not given, and for the keys of an encrypted one (`server_key`, `key`).
    timeout: seconds to wait for answers to requests (connection, admission, status).
    idle_timeout: seconds without any word of the broker after which an open stream is given up; None = 60 s
    without a connection, as a broker that is started anew goes on with its jobs, and five of its beats, at least
    10 s, with one. The broker beats while a job waits or reads its prompt.

    Streams of one client may be read in any order and from several threads; a lock guards the connection.
    A stream itself belongs to one thread at a time. Do not use a client in a forked child.

    Raises:
        BrokerUnreachableError: no broker answered in time, or it refuses this key; the message says which.
        ProtocolError: something else answered.
        SettingsError: the endpoint is none, or a key that it needs is missing.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        idle_timeout: float | None = None,
        settings: Settings | None = None,
    ) -> None:
        self._link: Link | None = None
        self.timeout = timeout
        self.idle_timeout = idle_timeout
        self.endpoint = endpoint_of(endpoint, settings)
        self._changed = threading.Condition()
        # Streams that the collector took, to be cancelled.
        self._dropped: deque[StreamState] = deque()
        # The thread that waits on the descriptors.
        self._reader: int | None = None
        self._session = Session(self.endpoint, client=CLIENT_NAME)
        self._link = Link(self._session, credentials_of(self.endpoint, settings))
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poll = select.poll()
        for fd in (*self._link.fds, self._wake_read):
            self._poll.register(fd, select.POLLIN)
        try:
            self._wait_for_answer(lambda: self._session.welcome is not None, NOT_WELCOMED)
        finally:
            if self._session.welcome is None:
                self._close(goodbye=False)

    def submit(self, job: Asked = None, **arguments: Unpack[SubmitArguments]) -> Stream:
        """Submit a job and wait until it is admitted.

        job: a Job, a map of job fields, or a prompt; further job fields are keywords (`max_tokens=100`).
        deadline_s, queue_ttl_s: seconds after which the job, or its waiting, ends with E_EXPIRED.
        finish: run to the end even if this client is gone. credit: chunks the broker may send ahead of
        the reader, at least 1. headers: trace context (`traceparent`, `tracestate`) and `x-*`.

        Raises:
            BadJobError: a field or option is wrong; nothing was admitted.
            BusyError: the line is full or the broker stops; `retry_after_ms` says when to come back.
        """
        wanted, options = request_of(job, arguments)
        with self._changed:
            self._check_open()
            state = self._session.submit(wanted, options)
            self._push()
        waited = False
        try:
            self._wait_for_answer(lambda: state.admitted is not None or state.ended, NOT_ADMITTED)
            waited = True
        finally:
            # Also when it was admitted in the same moment: nobody would hold its stream.
            if not waited:
                self._withdraw(state)
        if state.admitted is None and state.error is not None:
            raise state.error
        return Stream(self, state)

    def run(self, job: Asked = None, **arguments: Unpack[SubmitArguments]) -> Result:
        """Submit a job and wait for its result; arguments as for `submit`.

        Interrupted, it cancels the job, unless that is to `finish`.
        """
        stream = self.submit(job, **arguments)
        try:
            return stream.result()
        finally:
            if stream._orphaned:  # noqa: SLF001 - as above
                stream.cancel()

    def cancel(self, job_id: bytes) -> dict[str, Any]:
        """Cancel any job of this broker by its id; returns the job's state afterwards.

        Raises:
            JobError: E_UNKNOWN_JOB.
        """
        return self._ask(Status(id=job_id), cancel=True)

    def status(
        self, job_id: bytes | None = None, *, jobs: bool = False, state: str | None = None, whole: bool = False
    ) -> dict[str, Any]:
        """The broker's health; with *job_id* one job's state; with *jobs* `{"jobs": [states]}`.

        state: only jobs in this state. whole: also what the job asks, and its answer so far.

        Raises:
            JobError: E_UNKNOWN_JOB.
        """
        return self._ask(Status(id=job_id, jobs=jobs, state=state, whole=whole))

    def kick(self, job_id: bytes) -> dict[str, Any]:
        """Put a buried job into the line again; returns its state.

        Raises:
            JobError: E_UNKNOWN_JOB, or E_CONFLICT where it is not buried.
        """
        return self._ask(Kick(id=job_id))

    def delete(self, job_id: bytes) -> dict[str, Any]:
        """Forget an ended job, a buried one among them; returns its last state.

        Raises:
            JobError: E_UNKNOWN_JOB, or E_CONFLICT where it has not ended.
        """
        return self._ask(Delete(id=job_id))

    def health(self) -> dict[str, Any]:
        """The broker's health: scheduler, worker, line, broker, counters."""
        return self.status()

    def close(self) -> None:
        """Say goodbye; the broker cancels this client's open jobs, those with `finish` go on."""
        self._close(goodbye=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._link is not None and not self._link.closed:
            # There is no caller to blame: the collector runs this.
            warnings.warn(f"Client of {self.endpoint} was dropped unclosed.", ResourceWarning, stacklevel=1)
            self._close(goodbye=False)

    def _close(self, *, goodbye: bool) -> None:
        with self._changed:
            if self._link is None or self._link.closed:
                return
            self._session.fail(BrokerUnreachableError(CLOSED))
            # Its descriptors may go only when nobody waits on them.
            self._wake()
            self._changed.notify_all()
            while self._reader is not None:
                self._changed.wait()
            self._link.close(goodbye=goodbye)
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _check_open(self) -> None:
        if self._session.failure is not None:
            raise self._session.failure

    def _cancel(self, state: StreamState) -> None:
        with self._changed:
            self._session.cancel(state)
            self._push()

    def _withdraw(self, state: StreamState) -> None:
        with self._changed:
            self._session.give_up(state, BrokerUnreachableError(WITHDRAWN))
            self._push()

    def _ask(self, question: Question, *, cancel: bool = False) -> dict[str, Any]:
        with self._changed:
            self._check_open()
            ticket = self._session.ask(question, cancel=cancel)
            self._push()
        try:
            self._wait_for_answer(lambda: ticket.settled, NO_STATUS)
        finally:
            with self._changed:
                self._session.drop(ticket)
        return ticket.result()

    def _next(self, state: StreamState, deadline: float | None) -> Piece | None:
        if not state.readable:
            self._wait(lambda: state.readable, self._connected().stream_patience(deadline, self.idle_timeout))
        with self._changed:
            piece = self._session.read(state)
            if self._session.outbox:
                self._push()
        return piece

    def _connected(self) -> Link:
        if self._link is None:
            raise RuntimeError("The client is not connected.")
        return self._link

    def _wait_for_answer(self, ready: Callable[[], bool], what: str) -> None:
        self._wait(ready, self._connected().answer_patience(what, self.timeout))

    def _wait(self, ready: Callable[[], bool], patience: Patience) -> None:
        """Move the connection on until *ready*."""
        link, me = self._connected(), threading.get_ident()
        try:
            while True:
                with self._changed:
                    if self._reader == me:
                        self._rise()
                    if ready():
                        return
                    self._check_open()
                    self._cancel_dropped()
                    if self._reader is not None:
                        self._changed.wait(patience.left(time.monotonic()))
                        continue
                    if link.turn():
                        self._changed.notify_all()
                        continue
                    left = patience.left(time.monotonic())
                    self._reader = me
                # Without the lock: the socket itself is only touched under it.
                self._poll.poll(None if left is None else left * 1000 + 1)
        finally:
            # An interrupt can come at any line above: whoever still sits on the descriptors gives them up.
            with self._changed:
                if self._reader == me:
                    self._rise()
                self._changed.notify_all()

    def _cancel_dropped(self) -> None:
        while self._dropped:
            self._session.give_up(self._dropped.popleft(), BrokerUnreachableError(UNREAD))

    def _rise(self) -> None:
        """Give up the descriptors."""
        self._reader = None
        with suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _push(self) -> None:
        """Send what was queued. That may swallow the reader's signal for what came in: wake it."""
        self._cancel_dropped()
        if self._link is not None:
            while self._link.turn():
                pass
        if self._reader is not None:
            self._wake()
        self._changed.notify_all()

    def _wake(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._wake_write, b".")
