"""The worker's sign of life: a thread with a connection of its own that beats on a clock.

It reads plain numbers that the main thread writes, and never touches MLX. It also ends the process where the
main thread cannot: without progress, deaf to the loss of its lease, stuck beyond the drain limit, or left without
a pulse.
"""

from __future__ import annotations

import logging
import os
import signal
import socket as sockets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import zmq

from mtplx import messages as m
from mtplx.errors import EXITS, Exit, ProtocolError
from mtplx.keys import credentials
from mtplx.settings import Settings
from mtplx.sockets import worker_dealer
from mtplx.stdin import stdin_ended
from mtplx.wire import decode, encode
from worker.watchdog import Watchdog

log = logging.getLogger("mtplx.worker")

# Beyond the drain limit, for a main thread that runs at all to say its last words and leave.
HANG_GRACE_S: Final = 5.0
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(slots=True)
class Vitals:
    """What the main thread is doing. Each field has one writer and is one assignment, which needs no lock.

    progress only grows. width: rows of the latest decode forward. prefix: what the engine counts of reuse, a new
    dict each time. epoch is that of the READY that was accepted, 0 while none is; unknown, written by the pulse,
    is the latest epoch that the broker did not know.
    """

    lease: int | None = None
    progress: int = 0
    phase: str = "idle"
    done: int = 0
    total: int = 0
    epoch: int = 0
    unknown: int = 0
    prefix: dict[str, int] | None = None
    width: int = 1

    @property
    def disowned(self) -> bool:
        """True while no broker knows this worker: its job is void, and READY must be sent."""
        return self.epoch in (0, self.unknown)

    def note(self, phase: str, done: int, total: int) -> None:
        """Something got done."""
        self.phase, self.done, self.total = phase, done, total
        self.progress += 1

    def rest(self) -> None:
        """Nothing runs."""
        self.lease, self.phase, self.done, self.total, self.width = None, "idle", 0, 0, 1


class Pulse(threading.Thread):
    """Beats every `beat_s` seconds until `stop`. With *watch_stdin*, the end of stdin ends the process."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: Settings,
        worker_id: bytes,
        vitals: Vitals,
        *,
        watch_stdin: bool = False,
    ) -> None:
        super().__init__(name="pulse", daemon=True)
        self.beat_s = settings.beat_s
        self._context = context
        self._endpoint = settings.endpoint("back")
        self._credentials = credentials(settings, self._endpoint)
        self._drain_s = settings.drain_s
        self._worker_id = worker_id
        self._vitals = vitals
        self._watchdog = Watchdog(settings.stall_s)
        self._watch_stdin = watch_stdin
        self._stopping = False
        self._signals = 0
        self._end_at = float("inf")
        self._beat_at = 0.0
        self._wake_reader, self._wake_writer = sockets.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)

    def run(self) -> None:
        """Beat and listen; a pulse that ends unasked takes the process with it."""
        try:
            self._live()
        except BaseException:
            log.critical("the pulse failed, and the worker ends with it", exc_info=True)
            raise
        finally:
            # To the broker a worker without a beat is dead, whatever its main thread does.
            if not self._stopping:
                os._exit(Exit.INTERNAL)

    def watch_signals(self) -> None:
        """Hear of signals even while the main thread is in native code, where no Python handler runs."""
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)

    def poke(self) -> None:
        """Beat now; what the main thread changed counts from here on."""
        self._beat_at = 0.0
        with suppress(BlockingIOError):
            self._wake_writer.send(b"\0")

    def stop(self) -> None:
        """End the thread; returns when its socket is closed."""
        self._stopping = True
        self.poke()
        self.join()
        signal.set_wakeup_fd(-1)
        self._wake_reader.close()
        self._wake_writer.close()

    def _live(self) -> None:
        with worker_dealer(self._context, self._endpoint, self._credentials) as socket:
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(self._wake_reader.fileno(), zmq.POLLIN)
            while not self._stopping:
                until = min(self._beat_at, self._end_at) - time.monotonic()
                poller.poll(max(0, int(min(until, self._watchdog.every_s) * 1000) + 1))
                self._heed_signals()
                self._listen(socket)
                self._watch()
                if time.monotonic() >= self._beat_at:
                    self._beat_at = time.monotonic() + self.beat_s
                    self._beat(socket)
                    self._look_at_stdin()

    def _beat(self, socket: zmq.Socket[bytes]) -> None:
        vitals = self._vitals
        epoch = vitals.epoch
        # Before ACCEPTED no broker could know the beat.
        if epoch == 0:
            return
        beat = m.WorkerBeat(
            self._worker_id,
            vitals.progress,
            vitals.lease,
            vitals.phase,
            vitals.done,
            vitals.total,
            epoch,
            vitals.prefix,
            vitals.width,
        )
        # With no broker there is nobody to tell, and the next beat says the same.
        with suppress(zmq.Again):
            socket.send_multipart(encode(beat), zmq.NOBLOCK)

    def _listen(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                message = decode(socket.recv_multipart(zmq.NOBLOCK), m.TO_WORKER)
            except zmq.Again:
                return
            except ProtocolError:
                continue
            if isinstance(message, m.Error) and message.code == "E_UNKNOWN_WORKER":
                epoch = (message.detail or {}).get("epoch")
                self._vitals.unknown = epoch if isinstance(epoch, int) else 0

    def _watch(self) -> None:
        vitals = self._vitals
        code = self._watchdog.look(vitals.lease, vitals.progress, time.monotonic(), disowned=vitals.disowned)
        if code is not None:
            log.critical("%s; the worker ends (exit code %d)", EXITS[code].meaning, code)
            os._exit(code)

    def _look_at_stdin(self) -> None:
        if self._watch_stdin and stdin_ended():
            self._watch_stdin = False
            os.kill(os.getpid(), signal.SIGTERM)

    def _heed_signals(self) -> None:
        with suppress(BlockingIOError):
            self._signals += sum(number in STOP_SIGNALS for number in self._wake_reader.recv(64))
        if self._signals:
            limit = (self._drain_s if self._signals == 1 else 0.0) + HANG_GRACE_S
            self._end_at = min(self._end_at, time.monotonic() + limit)
        if time.monotonic() >= self._end_at:
            log.critical("the main thread did not come back within the drain limit; the worker ends without it")
            os._exit(Exit.INTERNAL)
