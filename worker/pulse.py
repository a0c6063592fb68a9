"""The worker's sign of life: a thread with a connection of its own that beats on a clock.

It reads plain numbers that the main thread writes, and never touches MLX.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass

import zmq

from mtplx import messages as m
from mtplx.errors import ProtocolError
from mtplx.sockets import worker_dealer
from mtplx.stdin import stdin_ended
from mtplx.wire import decode, encode


@dataclass(slots=True)
class Vitals:
    """What the main thread is doing. Each field is one assignment, which needs no lock.

    progress only grows; disowned is set when the broker says that it does not know this worker.
    """

    lease: int | None = None
    progress: int = 0
    phase: str = "idle"
    done: int = 0
    total: int = 0
    disowned: bool = False

    def note(self, phase: str, done: int, total: int) -> None:
        """Something got done."""
        self.phase, self.done, self.total = phase, done, total
        self.progress += 1

    def rest(self) -> None:
        """Nothing runs."""
        self.lease, self.phase, self.done, self.total = None, "idle", 0, 0


class Pulse(threading.Thread):
    """Beats every `beat_s` seconds until `stop`. With *watch_stdin*, the end of stdin ends the process."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        worker_id: bytes,
        vitals: Vitals,
        *,
        watch_stdin: bool = False,
    ) -> None:
        super().__init__(name="pulse", daemon=True)
        self.beat_s = 2.0
        self._context = context
        self._endpoint = endpoint
        self._worker_id = worker_id
        self._vitals = vitals
        self._watch_stdin = watch_stdin
        self._stopping = threading.Event()

    def run(self) -> None:
        """Beat and listen."""
        socket = worker_dealer(self._context, self._endpoint)
        while not self._stopping.wait(self.beat_s):
            self._beat(socket)
            self._listen(socket)
            if self._watch_stdin and stdin_ended():
                self._watch_stdin = False
                os.kill(os.getpid(), signal.SIGTERM)
        socket.close(linger=0)

    def stop(self) -> None:
        """End the thread; returns when its socket is closed."""
        self._stopping.set()
        self.join()

    def _beat(self, socket: zmq.Socket[bytes]) -> None:
        vitals = self._vitals
        beat = m.WorkerBeat(
            self._worker_id, vitals.progress, vitals.lease, vitals.phase, vitals.done, vitals.total
        )
        # With no broker there is nobody to tell, and the next beat says the same.
        if socket.poll(0, zmq.POLLOUT):
            socket.send_multipart(encode(beat), zmq.NOBLOCK)

    def _listen(self, socket: zmq.Socket[bytes]) -> None:
        # An answer takes a moment; it is read now or after the next beat.
        while socket.poll(10):
            try:
                message = decode(socket.recv_multipart(), m.TO_WORKER)
            except ProtocolError:
                continue
            if isinstance(message, m.Error) and message.code == "E_UNKNOWN_WORKER":
                self._vitals.disowned = True
