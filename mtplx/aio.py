"""The client for asyncio programs: `async with AsyncClient() as client: await client.run("Hello")`.

The event loop watches the socket's descriptors; all rules are in `session.py` and `stream.py`.
"""

from __future__ import annotations

import asyncio
import time
import warnings
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, Unpack

from mtplx.client import (
    CLIENT_NAME,
    CLOSED,
    DEFAULT_TIMEOUT_S,
    NO_STATUS,
    NOT_ADMITTED,
    NOT_WELCOMED,
    UNREAD,
    WITHDRAWN,
    credentials_of,
    endpoint_of,
)
from mtplx.errors import BrokerUnreachableError
from mtplx.link import Link
from mtplx.messages import Delete, Kick, Status
from mtplx.patience import Patience
from mtplx.request import Asked, SubmitArguments, request_of
from mtplx.session import Question, Session
from mtplx.settings import Settings
from mtplx.stream import Piece, Result, StreamState
from mtplx.view import StreamView, result_of


class AsyncStream(StreamView):
    """One job's answer as it comes: `async for piece in stream`, or `await stream.result()`."""

    def __init__(self, client: AsyncClient, state: StreamState) -> None:
        super().__init__(state)
        self._client = client

    def __del__(self) -> None:
        if self._unreadable:
            # The collector may come in the middle of anything: the client cancels when it moves next.
            self._client._dropped.append(self._state)  # noqa: SLF001 - a stream is a handle of its client
            warnings.warn(UNREAD, ResourceWarning, stacklevel=1)

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        piece = await self._client._next(self._state, None)  # noqa: SLF001 - a stream is a handle of its client
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def result(self, timeout: float | None = None) -> Result:  # noqa: ASYNC109 - as `Stream.result`
        """Wait for the last word; as `Stream.result`, with the same errors."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while await self._client._next(self._state, deadline) is not None:  # noqa: SLF001 - as above
            pass
        return result_of(self._state)

    async def cancel(self) -> None:
        """Ask for the job's end; its last word still comes."""
        self._client._cancel(self._state)  # noqa: SLF001 - as above


class AsyncClient:
    """A connection to the broker for one event loop; arguments and errors as those of `Client`.

    It connects on `async with`, `connect()` or the first request; what failed to connect may try again.
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
        self._loop: asyncio.AbstractEventLoop | None = None
        self.timeout = timeout
        self.idle_timeout = idle_timeout
        self.endpoint = endpoint_of(endpoint, settings)
        self._settings = settings
        self._session = Session(self.endpoint, client=CLIENT_NAME)
        self._closed = False
        self._connecting = 0
        self._changed = asyncio.Event()
        # Streams that the collector took, to be cancelled.
        self._dropped: deque[StreamState] = deque()
        # The loop must not keep a dropped client alive.
        self._weak_turn = weakref.WeakMethod(self._turn)

    async def connect(self) -> None:
        """Reach the broker and agree on the protocol; further calls only wait for the same.

        Raises:
            BrokerUnreachableError: no broker answered in time; the message says what was found instead.
            ProtocolError: something else answered.
        """
        if self._closed:
            raise BrokerUnreachableError(CLOSED)
        if self._link is None:
            self._session = Session(self.endpoint, client=CLIENT_NAME)
            self._link = Link(self._session, credentials_of(self.endpoint, self._settings))
            self._loop = asyncio.get_running_loop()
            for descriptor in self._link.fds:
                self._loop.add_reader(descriptor, _call, self._weak_turn)
        session = self._session
        self._turn()
        self._connecting += 1
        try:
            await self._wait_for_answer(lambda: session.welcome is not None, NOT_WELCOMED)
        finally:
            self._connecting -= 1
            # The others who wait for the same may have more patience; whoever comes later begins anew.
            if session.welcome is None and not self._connecting:
                self._disconnect(goodbye=False)

    async def submit(self, job: Asked = None, **arguments: Unpack[SubmitArguments]) -> AsyncStream:
        """Submit a job and wait until it is admitted; arguments and errors as for `Client.submit`."""
        wanted, options = request_of(job, arguments)
        await self._open()
        state = self._session.submit(wanted, options)
        self._turn()
        waited = False
        try:
            await self._wait_for_answer(lambda: state.admitted is not None or state.ended, NOT_ADMITTED)
            waited = True
        finally:
            # Also when it was admitted in the same moment: nobody would hold its stream.
            if not waited:
                self._session.give_up(state, BrokerUnreachableError(WITHDRAWN))
                self._turn()
        if state.admitted is None and state.error is not None:
            raise state.error
        return AsyncStream(self, state)

    async def run(self, job: Asked = None, **arguments: Unpack[SubmitArguments]) -> Result:
        """Submit a job and wait for its result; arguments as for `submit`.

        Cancelled, it cancels the job, unless that is to `finish`.
        """
        stream = await self.submit(job, **arguments)
        try:
            return await stream.result()
        finally:
            if stream._orphaned:  # noqa: SLF001 - a stream is a handle of its client
                self._cancel(stream._state)  # noqa: SLF001 - as above

    async def cancel(self, job_id: bytes) -> dict[str, Any]:
        """Cancel any job of this broker by its id; returns the job's state afterwards."""
        return await self._ask(Status(id=job_id), cancel=True)

    async def status(
        self, job_id: bytes | None = None, *, jobs: bool = False, state: str | None = None, whole: bool = False
    ) -> dict[str, Any]:
        """As `Client.status`."""
        return await self._ask(Status(id=job_id, jobs=jobs, state=state, whole=whole))

    async def kick(self, job_id: bytes) -> dict[str, Any]:
        """As `Client.kick`."""
        return await self._ask(Kick(id=job_id))

    async def delete(self, job_id: bytes) -> dict[str, Any]:
        """As `Client.delete`."""
        return await self._ask(Delete(id=job_id))

    async def health(self) -> dict[str, Any]:
        """The broker's health: scheduler, worker, line, broker, counters."""
        return await self.status()

    async def close(self) -> None:
        """Say goodbye; the broker cancels this client's open jobs, those with `finish` go on."""
        self._closed = True
        self._disconnect(goodbye=True)

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        if self._link is not None and not self._link.closed:
            # There is no caller to blame: the collector runs this.
            warnings.warn(f"AsyncClient of {self.endpoint} was dropped unclosed.", ResourceWarning, stacklevel=1)
            self._disconnect(goodbye=False)

    async def _open(self) -> None:
        if self._link is None or self._session.welcome is None:
            await self.connect()
        if self._session.failure is not None:
            raise self._session.failure

    def _disconnect(self, *, goodbye: bool) -> None:
        link, self._link = self._link, None
        if link is None:
            return
        if self._loop is not None and not self._loop.is_closed():
            for descriptor in link.fds:
                self._loop.remove_reader(descriptor)
        self._session.fail(BrokerUnreachableError(CLOSED))
        link.close(goodbye=goodbye)
        self._changed.set()

    def _turn(self) -> None:
        """Move everything that can move. Descriptors fire once for many messages, so ask to be called again."""
        while self._dropped:
            self._session.give_up(self._dropped.popleft(), BrokerUnreachableError(UNREAD))
        if self._link is not None and self._loop is not None and self._link.turn():
            self._loop.call_soon(_call, self._weak_turn)
            self._changed.set()

    def _cancel(self, state: StreamState) -> None:
        self._session.cancel(state)
        self._turn()

    async def _ask(self, question: Question, *, cancel: bool = False) -> dict[str, Any]:
        await self._open()
        session = self._session
        ticket = session.ask(question, cancel=cancel)
        self._turn()
        try:
            await self._wait_for_answer(lambda: ticket.settled, NO_STATUS)
        finally:
            session.drop(ticket)
        return ticket.result()

    async def _next(self, state: StreamState, deadline: float | None) -> Piece | None:
        if not state.readable:
            await self._wait(
                lambda: state.readable, self._connected().stream_patience(deadline, self.idle_timeout)
            )
        piece = self._session.read(state)
        if self._session.outbox:
            self._turn()
        return piece

    def _connected(self) -> Link:
        if self._link is None:
            raise BrokerUnreachableError(CLOSED)
        return self._link

    async def _wait_for_answer(self, ready: Callable[[], bool], what: str) -> None:
        await self._wait(ready, self._connected().answer_patience(what, self.timeout))

    async def _wait(self, ready: Callable[[], bool], patience: Patience) -> None:
        """Wait until *ready*."""
        while not ready():
            if patience.session.failure is not None:
                raise patience.session.failure
            # Each wait has an event of its own generation: whoever sets it wakes all who wait now.
            if self._changed.is_set():
                self._changed = asyncio.Event()
            left = patience.left(time.monotonic())
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    bound = method()
    if bound is not None:
        bound()
