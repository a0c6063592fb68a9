"""One DEALER socket and its monitor, moved forward without ever blocking; used by both clients."""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from mtplx import wire
from mtplx.endpoints import check_endpoint
from mtplx.errors import BrokerUnreachableError
from mtplx.keys import Credentials
from mtplx.patience import Patience
from mtplx.session import Session
from mtplx.sockets import COMMON, HANDSHAKE_EVENTS, RECONNECT, Handshakes, check_encrypted, reach, set_all

# A flood must not keep a reader from what has already arrived.
MESSAGES_PER_TURN: Final = 256
GOODBYE_MS: Final = 300
_WATCHED: Final = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | HANDSHAKE_EVENTS
# Not IMMEDIATE: with it libzmq drops what arrived but was not yet read when a connection ends.
_OPTIONS: Final = {zmq.LINGER: GOODBYE_MS}


class Link:
    """Carries a session's messages. Not thread-safe: its owner calls it under a lock, or from one loop.

    After `turn` returned False, waiting on `fds` is safe from any thread: they are edge-triggered, so
    turn again, until False, whenever one of them fires and after every message that was queued.
    """

    def __init__(self, session: Session, credentials: Credentials | None = None) -> None:
        check_endpoint("endpoint", session.endpoint)
        check_encrypted(session.endpoint, credentials)
        self.session = session
        self.closed = False
        self._handshakes = 0
        self._connected = False
        self._handshake = Handshakes(credentials)
        self._encoded: deque[list[bytes]] = deque()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        set_all(self._socket, COMMON, RECONNECT, _OPTIONS)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(_WATCHED)
        self._monitor.setsockopt(zmq.LINGER, 0)
        session.hello()
        reach(self._socket, session.endpoint, credentials)
        self.fds: tuple[int, ...] = (self._socket.getsockopt(zmq.FD), self._monitor.getsockopt(zmq.FD))

    def turn(self) -> bool:
        """Send and receive what can be; True where something moved and another turn may move more."""
        if self.closed:
            return False
        moved = self._watch()
        moved |= self._receive()
        # Last: what came in may have queued something, and the caller may not turn again soon.
        moved |= self._send()
        return moved

    def close(self, *, goodbye: bool) -> None:
        """Say BYE where asked and possible, and let the socket go; the rest of its queue is dropped."""
        if self.closed:
            return
        if goodbye:
            self.session.bye()
            self._send()
        self.closed = True
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=GOODBYE_MS if goodbye else 0)

    def unreachable(self, what: str) -> BrokerUnreachableError:
        """The error for silence: *what* failed, and the likely causes by what the connection showed."""
        return BrokerUnreachableError(f"{what} at {self.session.endpoint}: {self._cause()}")

    def answer_patience(self, what: str, limit: float) -> Patience:
        """How long to wait for the answer to a request; *what* begins the sentence on its absence."""
        return Patience(
            session=self.session,
            began=time.monotonic(),
            limit=limit,
            idle=None,
            missing=lambda: self.unreachable(what),
            lost=self._silent,
        )

    def stream_patience(self, deadline: float | None, idle: float | None) -> Patience:
        """How long to wait for a job: until *deadline*, and *idle* seconds without a word (None: `idle_limit`)."""
        now = time.monotonic()
        return Patience(
            session=self.session,
            began=now,
            limit=None if deadline is None else max(0.0, deadline - now),
            idle=self.session.idle_limit if idle is None else lambda: idle,
            missing=_not_ended,
            lost=self._silent,
        )

    def _silent(self, idle_s: float) -> BrokerUnreachableError:
        return self.unreachable(f"No word for {idle_s:g} s from the broker")

    def _cause(self) -> str:
        if self._handshake.cause():
            return self._handshake.cause()
        if self._handshakes and not self.session.up:
            return "the connection is gone and the broker has not come back. Is `mtplx serve` running?"
        if self._handshakes and self.session.welcome is None:
            return (
                "something is connected there but does not answer MTX/1. It may be another program's "
                "socket, or a broker that hangs."
            )
        if self._handshakes:
            return "the broker is connected but silent; it hangs or is stopped."
        if self._connected:
            return "something listens there that does not speak this protocol (ZeroMQ): it is another program."
        return self._nobody()

    def _nobody(self) -> str:
        if not self.session.endpoint.startswith("ipc://"):
            return "nothing listens there. Start the broker with `mtplx serve`."
        path = Path(self.session.endpoint.removeprefix("ipc://"))
        try:
            path.lstat()
        except FileNotFoundError:
            return "there is no such socket file. Start the broker with `mtplx serve`."
        except OSError as error:
            return f"{error.strerror}. Is it another user's broker?"
        if not os.access(path, os.R_OK | os.W_OK):
            return "no permission to use that socket. Is it another user's broker?"
        return "the socket file is there but nobody listens. Start the broker with `mtplx serve`."

    def _watch(self) -> bool:
        moved = False
        while True:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return moved
            moved = True
            event = parse_monitor_message(frames)
            kind = event["event"]
            self._handshake.take(event)
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.session.up, self.session.heard = True, time.monotonic()
                if self._handshakes:
                    # What the last connection had brought counts before the rest is asked for.
                    while self._receive():
                        pass
                    self._encoded.clear()
                    self.session.reconnected()
                self._handshakes += 1
            elif kind == zmq.EVENT_CONNECTED:
                self._connected = True
            elif kind == zmq.EVENT_DISCONNECTED:
                self.session.up = False
            elif self._handshake.refused and self.session.failure is None:
                # There will be no other connection: whoever waits need not wait on.
                what = "No broker answers" if self.session.welcome is None else "The connection is lost"
                self.session.fail(self.unreachable(what))

    def _send(self) -> bool:
        moved = False
        outbox = self.session.outbox
        while self.session.up and (outbox or self._encoded):
            if not self._encoded:
                self._encoded.append(wire.encode(outbox.popleft()))
            try:
                self._socket.send_multipart(self._encoded[0], zmq.NOBLOCK)
            except zmq.Again:
                return moved
            self._encoded.popleft()
            moved = True
        return moved

    def _receive(self) -> bool:
        for number in range(MESSAGES_PER_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return number > 0
            self.session.receive(frames, time.monotonic())
        return True


def _not_ended() -> Exception:
    return TimeoutError("The job has not ended in the time given; it goes on. Wait again, or cancel it.")
