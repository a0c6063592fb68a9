"""The broker's loop: the only file here that sends, receives and reads a clock.

One turn: receive what is there, let the machine decide, send what it says, then build the spans.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket as sockets
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from broker import endpoints, processes, words
from broker.access import Peer, named_by_itself
from broker.guard import Guard
from broker.http import Window
from broker.machine import Machine
from broker.record import Now
from broker.telemetry import Telemetry
from mtplx import messages as m
from mtplx.cli.signals import STOPS, install
from mtplx.errors import ProtocolError
from mtplx.settings import Settings
from mtplx.stdin import STDIN, stdin_ended
from mtplx.wire import decode, encode, speaks_mtx

log = logging.getLogger("mtplx.broker")

# Messages read from one socket in one turn, so that a flood on one cannot starve the other.
MAX_PER_TURN: Final = 100
# Messages sent to one producer in one turn, and the seconds a turn may send for: packing a kept answer takes time.
MAX_SENT_PER_TURN: Final = 16
RECEIVE_FOR_S: Final = 0.02
SEND_FOR_S: Final = 0.02
# A loop that fails turn after turn serves nobody; it ends, and is started anew.
MAX_FAILED_TURNS: Final = 20
# libzmq may report a broken connection a moment before it refuses to send on it.
PROBE_AGAIN_S: Final = 0.05
RETRY_S: Final = 0.01
# How long the broker reads what a worker that is gone has left in its pipe.
LAST_WORDS_FOR_S: Final = 0.25
NO_ROUTING_ID: Final = (
    "Set no routing id on an encrypted endpoint: another client could take what is meant for this one."
)

# Plain numbers: pyzmq's enums cost more than the calls they are handed to.
RECEIVE_NOW: Final = int(zmq.NOBLOCK)
FIRST_FRAME: Final = int(zmq.NOBLOCK) | int(zmq.SNDMORE)
MORE_FOLLOWS: Final = int(zmq.SNDMORE)
# What pyzmq puts before it, for draft options, costs as much again.
SEND: Final = zmq.backend.Socket.send


def now() -> Now:
    """The time, as the machine wants it."""
    return Now(time.monotonic(), time.time_ns())


def _frames(socket: zmq.Socket[bytes]) -> tuple[zmq.Frame, list[bytes]]:
    """The first frame, which is the routing id and knows who sent it, and the others."""
    # A Frame knows whether more follow; asking the socket costs as much again as receiving.
    first = frame = socket.recv(RECEIVE_NOW, copy=False)
    frames = []
    while frame.more:
        frame = socket.recv(RECEIVE_NOW, copy=False)
        frames.append(frame.bytes)
    return first, frames


class Loop:
    """Runs a machine on two ROUTER sockets until it is told to stop and has drained."""

    def __init__(
        self, settings: Settings, machine: Machine, telemetry: Telemetry | None, *, watch_stdin: bool = False
    ) -> None:
        self._settings = settings
        self._front_encrypted = settings.encrypted("front")
        self._watch_stdin = watch_stdin
        self._machine = machine
        self._telemetry = telemetry
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guard = Guard(settings, self._context, machine.jobs.counters)
        self._front = endpoints.router(self._context, endpoints.FRONT_RECEIVE_MESSAGES)
        self._back = endpoints.router(self._context, endpoints.BACK_RECEIVE_MESSAGES)
        self._monitor = self._back.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._wake_reader, self._wake_writer = sockets.socketpair()
        self._locks: list[endpoints.Claim] = []
        self._probe_at: float | None = None
        self._failed_turns = 0
        self._stop_signals = 0
        self._window: Window | None = None

    def bind(self) -> None:
        """Take both endpoints; raises LockedError where another broker has them."""
        for socket, side in ((self._front, "front"), (self._back, "back")):
            endpoint = self._settings.endpoint(side)
            lock = endpoints.claim(endpoint)
            if lock is not None:
                self._locks.append(lock)
            self._guard.secure(socket, side)
            endpoints.bind(socket, endpoint)

    def run(self, window: Window | None = None) -> None:
        """Serve, and show it in *window*, until SIGTERM or SIGINT; then drain, until a second signal."""
        self._window = window
        self._watch_signals()
        poller = zmq.Poller()
        if self._watch_stdin:
            poller.register(STDIN, zmq.POLLIN)
        for socket in (self._front, self._back, self._monitor):
            poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_reader.fileno(), zmq.POLLIN)
        while not self._machine.drained:
            ready = dict(poller.poll(self._timeout_ms()))
            if STDIN in ready and stdin_ended():
                poller.unregister(STDIN)
                os.kill(os.getpid(), signal.SIGTERM)
            self._turn(ready)
        unread = len(self._machine.jobs.outboxes.clients)
        self._machine.commits.commit_at_last(now())
        self._trace(idle=True)
        if unread:
            log.warning("stopped; %d producers have not read all that was theirs", unread)
        else:
            log.info("drained")

    def close(self) -> None:
        """Say goodbye within GOODBYE_MS, flush spans, free the endpoints."""
        self._back.disable_monitor()
        self._monitor.close(linger=0)
        self._front.close()
        self._back.close()
        self._guard.close()
        self._context.term()
        if self._telemetry is not None:
            self._telemetry.close()
        endpoints.release(self._locks)
        self._wake_reader.close()
        self._wake_writer.close()

    # --- one turn

    def _turn(self, ready: Mapping[object, int]) -> None:
        # Finding out that a socket has nothing costs as much as a message: only those with something are asked.
        if self._wake_reader.fileno() in ready:
            self._heed_signals()
        self._look_at_keys()
        self._watch_disconnects(seen=self._monitor in ready)
        if self._back in ready:
            self._receive(self._back, self._on_worker_frames)
        if self._front in ready:
            self._receive(self._front, self._on_client_frames)
        # Nothing is sent that the journal does not hold.
        well = self._guarded(self._machine.tick)
        self._end_condemned()
        if self._guarded(self._machine.commits.commit):
            self._failed_turns = 0 if well else self._failed_turns
            self._send_to_worker()
            # What a worker said last before it was found gone.
            if self._guarded(self._machine.commits.commit):
                self._send_to_clients()
        self._trace(idle=not ready)

    def _guarded(self, act: Callable[[Now], None]) -> bool:
        """Whether *act* could be done."""
        try:
            act(now())
        except Exception:
            log.exception("a turn could not be ended")
            self._machine.jobs.counters["internal_errors"] += 1
            self._failed_turns += 1
            if self._failed_turns >= MAX_FAILED_TURNS:
                raise
            return False
        return True

    def _end_condemned(self) -> None:
        back = self._machine.back
        while back.condemned:
            ready = back.condemned.popleft()
            try:
                back.lost_process = processes.end(ready)
            except Exception:
                # A process that stays is a nuisance; a broker that goes is a loss.
                log.exception("worker process %d could not be ended", ready.pid)
                back.lost_process = "left alone: it could not be looked at; the broker's log says more"

    def _trace(self, *, idle: bool) -> None:
        try:
            if self._window is not None:
                self._window.publish(self._machine.report, now())
            if self._telemetry is not None:
                self._telemetry.take(self._machine.jobs.gate.take_moments(), idle=idle)
                self._machine.jobs.counters.update(self._telemetry.newly_lost())
        except Exception:
            # Telemetry can never hurt a job.
            log.exception("spans could not be built, or health not shown")
            self._machine.jobs.counters["trace_errors"] += 1

    def _receive(self, socket: zmq.Socket[bytes], handle: Callable[[bytes, list[bytes], Peer], None]) -> bool:
        """Read for a while; False where nothing is left."""
        side = "front" if socket is self._front else "back"
        until = time.monotonic() + RECEIVE_FOR_S
        for _ in range(MAX_PER_TURN):
            if time.monotonic() >= until:
                return True
            try:
                first, frames = _frames(socket)
            except zmq.Again:
                return False
            route = first.bytes
            try:
                peer = self._guard.who(side, first)
                if peer is not None:
                    handle(route, frames, peer)
            except Exception:
                # One message must never end the service; its sender is told, the log says more.
                log.exception("a message could not be handled")
                self._machine.jobs.counters["internal_errors"] += 1
                if socket is self._front:
                    fault = words.coded("E_INTERNAL", "The broker failed on this message; see its log.")
                    self._machine.jobs.tell(route, fault)
        return True

    def _on_client_frames(self, route: bytes, frames: list[bytes], peer: Peer) -> None:
        try:
            if self._front_encrypted and named_by_itself(route):
                raise ProtocolError(NO_ROUTING_ID, field="routing_id")
            message = decode(frames, m.FROM_CLIENT)
        except ProtocolError as error:
            self._answer_bad_frames(route, frames, error, peer)
            return
        self._machine.on_client(route, message, now(), peer)

    def _answer_bad_frames(self, route: bytes, frames: list[bytes], error: ProtocolError, peer: Peer) -> None:
        if frames and not frames[0]:
            # A REQ socket only reads answers that begin with an empty frame.
            self._machine.jobs.counters["bad_frames"] += 1
            self._try_send(self._front, [route, b"", *encode(words.error(error, None))])
        elif speaks_mtx(frames):
            self._machine.on_bad_frame(route, error, peer)
        else:
            self._machine.jobs.counters["foreign_frames"] += 1

    def _on_worker_frames(self, route: bytes, frames: list[bytes], _: Peer) -> None:
        try:
            message = decode(frames, m.FROM_WORKER)
        except ProtocolError as error:
            self._machine.back.on_bad_frame(route, error, now())
            return
        self._machine.back.on_message(route, message, now())

    def _look_at_keys(self) -> None:
        for side, route in self._guard.revoked(time.monotonic()):
            log.warning("a connection to the %s endpoint ends: its key was revoked", side)
            if side == "front":
                self._machine.on_client_gone(route, now())
            elif self._machine.back.is_worker(route):
                self._machine.back.lose("revoked", now())
            self._guard.cut(side, route)

    def _watch_disconnects(self, *, seen: bool) -> None:
        while seen and self._monitor.poll(0):
            recv_monitor_message(self._monitor, zmq.NOBLOCK)
        at = time.monotonic()
        if seen or (self._probe_at is not None and at >= self._probe_at):
            self._machine.back.beat()
            self._probe_at = at + PROBE_AGAIN_S if seen else None

    # --- sending

    def _send_to_worker(self) -> None:
        outgoing = self._machine.back.outgoing
        while outgoing:
            route, message = outgoing[0]
            sent = self._say(self._back, route, message)
            if sent is None and self._machine.back.is_worker(route):
                return
            # What a lost or refused worker does not read is dropped: it must not stand before the worker's own.
            outgoing.popleft()
            if sent is None:
                self._machine.jobs.counters["worker_messages_dropped"] += 1
            elif not sent:
                self._read_last_words(route)
                self._machine.back.on_unreachable(route, message, now())

    def _read_last_words(self, route: bytes) -> None:
        # A worker that says FINAL or FAIL and goes at once may be found gone before these are read.
        until = time.monotonic() + LAST_WORDS_FOR_S
        while self._machine.back.is_worker(route) and time.monotonic() < until:
            if not self._receive(self._back, self._on_worker_frames):
                return

    def _send_to_clients(self) -> None:
        outboxes = self._machine.jobs.outboxes
        at = now()
        for route in outboxes.due(at.mono):
            self._send_some(route, at)
            # Whoever was served is last in the next turn, however early this one has to stop.
            outboxes.rotate(route)
            if time.monotonic() - at.mono >= SEND_FOR_S:
                return

    def _send_some(self, route: bytes, at: Now) -> None:
        outboxes = self._machine.jobs.outboxes
        until = at.mono + SEND_FOR_S
        for _ in range(MAX_SENT_PER_TURN):
            message = self._machine.jobs.offer(route, at)
            if message is None:
                return
            sent = self._say(self._front, route, message)
            if sent is None:
                outboxes.blocked(route, at.mono)
                return
            if not sent:
                self._machine.on_client_gone(route, at)
                return
            self._machine.jobs.sent(route, at)
            if time.monotonic() >= until:
                return

    def _say(self, socket: zmq.Socket[bytes], route: bytes, message: m.Message) -> bool | None:
        try:
            frames = encode(message)
        except Exception:
            # What no frame can hold must never end the service; its peer counts as gone.
            log.exception("a message could not be encoded")
            self._machine.jobs.counters["internal_errors"] += 1
            return False
        return self._try_send(socket, [route, *frames])

    def _try_send(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> bool | None:
        """True when sent, False when the peer is gone, None when its pipe is full."""
        try:
            # Only the first frame, the routing id, can find a full pipe or no peer.
            SEND(socket, frames[0], FIRST_FRAME)
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        for frame in frames[1:-1]:
            SEND(socket, frame, MORE_FOLLOWS)
        SEND(socket, frames[-1])
        return True

    # --- time and signals

    def _timeout_ms(self) -> int:
        shown = self._window.next() if self._window is not None else math.inf
        wakes = [self._machine.next_wake(), self._guard.next_look(), shown]
        at = time.monotonic()
        if self._machine.back.outgoing:
            wakes.append(at + RETRY_S)
        if self._probe_at is not None:
            wakes.append(self._probe_at)
        if self._telemetry is not None:
            wakes.append(at + self._telemetry.wake_s())
        # Round up: waking a moment early would spin.
        return max(0, int((min(wakes) - at) * 1000) + 1) if min(wakes) > at else 0

    def _watch_signals(self) -> None:
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        for number in STOPS:
            install(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._stop_signals += 1

    def _heed_signals(self) -> None:
        try:
            self._wake_reader.recv(64)
        except BlockingIOError:
            return
        if self._stop_signals:
            limit = self._settings.drain_s if self._stop_signals == 1 else 0.0
            log.info("stopping: the running job has %.0f s to end", limit)
            self._machine.drain(now(), limit)
