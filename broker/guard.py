"""Who may connect: CURVE on encrypted endpoints, the thread that ZAP asks, and the end of revoked connections."""

from __future__ import annotations

import logging
import math
import os
import socket as sockets
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import Final

import zmq
from zmq.auth.thread import ThreadAuthenticator

from broker.access import Door, KeyDoor, KeyList, Line, OpenDoor, Peer, UserDoor, own_uid
from mtplx.endpoints import leaves_machine
from mtplx.errors import SettingsError
from mtplx.keys import KeyPair, broker_pair, key_folder
from mtplx.settings import Settings

log = logging.getLogger("mtplx.broker")

SIDES: Final = ("front", "back")
# How often the list of allowed keys is looked at: a revoked one is out within a second.
LOOK_EVERY_S: Final = 0.4
# How long the thread gets to hear that it is to end.
STOP_MS: Final = 500


class Guard:
    """Decides who may connect, and cuts off whoever may no longer. Made before anything is bound.

    counters: where `keys_refused`, `keys_revoked` and `messages_unheard` are counted.

    Raises:
        SettingsError: an endpoint is to be encrypted, and the broker's key or the list of allowed keys is wrong.
    """

    def __init__(
        self, settings: Settings, context: zmq.Context[zmq.Socket[bytes]], counters: Counter[str]
    ) -> None:
        self._settings = settings
        self._keys: KeyList | None = None
        self._thread: ThreadAuthenticator | None = None
        self._enforced = 0
        self._look_at = 0.0
        self._counters = counters
        # Handshakes; the thread counts them, and the loop puts them with the other counters.
        self._refused = 0
        if any(settings.encrypted(side) for side in SIDES):
            self._pair = own_pair(settings)
            self._keys = KeyList(key_folder(settings), self._pair.public)
            self._thread = ThreadAuthenticator(context)
            self._thread.start()
            # A thread that is gone takes nothing off this pipe, and must not hold up our end.
            self._thread.pipe.sndtimeo = STOP_MS
            for side in SIDES:
                self._thread.configure_curve_callback(side, self)
        self.doors: dict[str, Door] = {side: self._door(side) for side in SIDES}

    def _door(self, side: str) -> Door:
        if self._keys is not None and self._settings.encrypted(side):
            return KeyDoor(side, self._keys, line_of)
        return UserDoor(own_uid()) if self._settings.endpoint(side).startswith("ipc://") else OpenDoor()

    def callback(self, domain: str, key: bytes) -> bool:
        """ZAP's question, on a thread of its own: may *key* connect to the endpoint of side *domain*?"""
        assert self._keys is not None
        # A key allowed or revoked a moment ago counts already.
        self._keys.look()
        allowed = self._keys.find(domain, key.decode())
        if allowed is None:
            self._refused += 1
            log.info("a key that is not allowed tried the %s endpoint: %s", domain, key.decode())
        return allowed is not None

    def secure(self, socket: zmq.Socket[bytes], side: str) -> None:
        """Make *socket* the server of an encrypted endpoint, where that of *side* is one; before it is bound."""
        if self._keys is None or not self._settings.encrypted(side):
            return
        socket.curve_secretkey = self._pair.secret.encode()
        socket.curve_server = True
        socket.zap_domain = side.encode()
        # Without it libzmq lets everybody in where the thread that is to be asked is gone.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def who(self, side: str, first: zmq.Frame) -> Peer | None:
        """Who sent what begins with *first*, the routing id; None where it may not speak, and is cut off."""
        route = first.bytes
        peer = self.doors[side].who(route, partial(told, first))
        if peer is None:
            self._counters["messages_unheard"] += 1
            self.cut(side, route)
        return peer

    def next_look(self) -> float:
        """When `revoked` has something to do."""
        return self._look_at if self._keys is not None else math.inf

    def revoked(self, at: float) -> list[tuple[str, bytes]]:
        """Look after list and thread, if it is time: sides and routing ids whose key is allowed no longer.

        Raises:
            RuntimeError: nobody can connect any more; the broker must be started anew.
        """
        if self._keys is None or self._thread is None or at < self._look_at:
            return []
        self._look_at = at + LOOK_EVERY_S
        self._counters["keys_refused"] = self._refused
        if not self._thread.is_alive():
            raise RuntimeError("The thread that checks keys has ended, so nobody can connect any more.")
        self._keys.watch_own_key()
        self._keys.look()
        changes = self._keys.changes
        if changes == self._enforced:
            return []
        self._enforced = changes
        doors = [(side, door) for side, door in self.doors.items() if isinstance(door, KeyDoor)]
        found = [(side, route) for side, door in doors for route in door.revoked()]
        self._counters["keys_revoked"] += len(found)
        return found

    def cut(self, side: str, route: bytes) -> None:
        """End the connection of *route*, if it is there still."""
        door = self.doors[side]
        line = door.forget(route) if isinstance(door, KeyDoor) else None
        if line is not None:
            shut(line)

    def close(self) -> None:
        """End the thread; after the sockets are closed, and before their context is."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with suppress(zmq.Again):
            thread.stop()
        # What `stop` leaves open where it failed would keep the context from ending.
        for socket in (thread.pipe, thread.zap_socket):
            if socket is not None:
                socket.close(linger=0)
        thread.pipe = thread.zap_socket = None  # type: ignore[assignment]


def check_keys(settings: Settings) -> None:
    """Refuse settings that need a key of the broker where there is none, before anything is made or bound.

    Raises:
        SettingsError: naming the endpoint, and the command that makes a key.
    """
    if any(settings.encrypted(side) for side in SIDES):
        own_pair(settings)


def own_pair(settings: Settings) -> KeyPair:
    """The broker's own pair; errors as those of `check_keys`."""
    try:
        return broker_pair(settings)
    except SettingsError as error:
        side = next(side for side in SIDES if settings.encrypted(side))
        endpoint = settings.endpoint(side)
        why = "leaves this machine" if leaves_machine(endpoint) else "is to be encrypted"
        raise SettingsError(f"--{side} {endpoint} {why}. {error}") from None


def told(frame: zmq.Frame, name: str) -> str:
    """What libzmq knows of the connection that *frame* came by; empty where it does not."""
    try:
        return str(frame.get(name))
    except zmq.ZMQError:
        return ""


def line_of(descriptor: int) -> Line | None:
    """The TCP connection at *descriptor* now; None where there is none."""
    try:
        with sockets.socket(fileno=os.dup(descriptor)) as found:
            host, port, *_ = found.getpeername()
            return Line(descriptor, (str(host), int(port)))
    except (OSError, ValueError):
        return None


def shut(line: Line) -> None:
    """End a TCP connection of libzmq's: its next read or write finds it gone."""
    with suppress(OSError, ValueError), sockets.socket(fileno=os.dup(line.descriptor)) as found:
        # The descriptor may be another connection's by now; what was duplicated stays what it is.
        host, port, *_ = found.getpeername()
        if (str(host), int(port)) == line.address:
            found.shutdown(sockets.SHUT_RDWR)
