"""Who speaks on an endpoint, and may they: by OS user on ipc, by CURVE key on encrypted tcp. No sockets.

A message whose sender cannot be told, or is not allowed, has no `Peer`, and nothing comes of it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from mtplx.allowed import FILE, OPERATOR, PRODUCER, WORKER, Allowed, Mark, mark, read
from mtplx.errors import SettingsError
from mtplx.keys import BROKER, SECRET

log = logging.getLogger("mtplx.broker")

# What libzmq knows of a message's connection, by name; empty where it does not.
Told = Callable[[str], str]
MAY: Final = {"front": (PRODUCER, OPERATOR), "back": (WORKER,)}
ROOT: Final = 0
# ipc connections whose user was looked up and logged; beyond it the oldest are looked up anew. Nothing tells that
# one has ended, so that a busy broker always remembers so many.
MAX_CONNECTIONS: Final = 1024
# Connections are looked through for those that ended when this many came.
PRUNE_FROM: Final = 256


class Peer(NamedTuple):
    """Who sent a message. owner: whose jobs are theirs. operator: sees and ends the jobs of all."""

    owner: str
    operator: bool = False


# Nobody in particular: the owner of what has none.
NO_PEER: Final = Peer("")
# Everybody on this machine who can reach a loopback port: tcp does not tell who.
LOCAL: Final = Peer("local")


class Line(NamedTuple):
    """A TCP connection: its descriptor, and the address at its other end, which tells it from a later one."""

    descriptor: int
    address: tuple[str, int]


class Door(Protocol):
    """Tells who sent a message on one endpoint."""

    def who(self, route: bytes, told: Told) -> Peer | None:
        """The sender; None where it may not speak."""


class OpenDoor:
    """tcp on loopback, unencrypted: nobody is told from anybody."""

    def who(self, route: bytes, told: Told) -> Peer | None:  # noqa: ARG002 - all are one
        """Everybody is `LOCAL`."""
        return LOCAL


class UserDoor:
    """ipc: the OS user, where the system tells it; the folder's mode keeps all others out anyway.

    The broker's own user is an operator, and root, who could read all there is.
    """

    def __init__(self, uid: int) -> None:
        self._uid = uid
        self._known: dict[bytes, Peer | None] = {}
        # One for all connections of a user.
        self._peers: dict[int, Peer] = {uid: Peer(owner_of(uid), operator=True) for uid in (uid, ROOT)}

    def who(self, route: bytes, told: Told) -> Peer | None:
        """The user of the process at the other end, looked up once for each connection."""
        if named_by_itself(route):
            # The next connection may take the same name.
            return self._looked_up(told("Peer-Address"))
        if route not in self._known:
            if len(self._known) >= MAX_CONNECTIONS:
                del self._known[next(iter(self._known))]
            self._known[route] = self._looked_up(told("Peer-Address"))
        return self._known[route]

    def _looked_up(self, address: str) -> Peer | None:
        # `localhost:UID:GID:PID`, as libzmq writes it; macOS does not tell the process.
        _, *words = address.split(":")
        if not words or not words[0].isdecimal():
            log.warning("the system does not tell whose process connects; the folder's mode decides")
            return self._peers[self._uid]
        uid, pid = int(words[0]), words[2] if len(words) > 2 else ""
        if uid not in self._peers:
            log.warning("user %d (process %s) may not speak here and is not heard", uid, pid)
            return None
        log.info("user %d (process %s) connected", uid, pid)
        return self._peers[uid]


def owner_of(uid: int) -> str:
    """The owner of what an OS user submits."""
    return f"uid:{uid}"


class KeyList:
    """The allowed keys as of the last look, for any thread. changes: how often the list was another.

    own: the broker's own public key, which may do all.
    """

    def __init__(self, folder: Path, own: str = "") -> None:
        self._folder = folder
        self._looking = threading.Lock()
        self.changes = 0
        self._mark: Mark | None = mark(folder / FILE)
        self._broker_mark = mark(folder / f"{BROKER}{SECRET}")
        # Whoever can read the broker's secret key is who runs it.
        self._own = own
        self._keys: dict[str, Allowed] = read(folder)
        if not self._keys:
            log.warning("no key is allowed yet, so nobody else can connect; `mtplx keys allow` allows one")

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, side: str, key: str) -> Allowed | None:
        """What is allowed to *key* on the endpoint of *side*."""
        if key and key == self._own:
            return Allowed(OPERATOR if side == "front" else WORKER, BROKER, key)
        found = self._keys.get(key)
        return found if found is not None and found.role in MAY[side] else None

    def look(self) -> None:
        """Read the list anew where it changed. One that cannot be read allows nobody."""
        with self._looking:
            found = mark(self._folder / FILE)
            if found == self._mark:
                return
            # The mark is older than what is read: a change in between is seen at the next look.
            self._mark = found
            try:
                self._keys = read(self._folder)
            except SettingsError as error:
                log.error("nobody is allowed to connect: %s", error)  # noqa: TRY400 - the sentence says it all
                self._keys = {}
            else:
                log.info("%d keys are allowed", len(self._keys))
            self.changes += 1

    def watch_own_key(self) -> None:
        """Say it where the broker's key file is another than at start."""
        found = mark(self._folder / f"{BROKER}{SECRET}")
        if found != self._broker_mark:
            self._broker_mark = found
            log.warning("the broker's key file changed; the key read at start stays in use until the next start")


class KeyDoor:
    """Encrypted tcp: the CURVE key, as the handshake proved it."""

    def __init__(self, side: str, keys: KeyList, line_of: Callable[[int], Line | None]) -> None:
        self._side = side
        self._keys = keys
        self._line_of = line_of
        # The connections that were heard of, by routing id.
        self._routes: dict[bytes, tuple[str, Line | None]] = {}
        self._prune_at = PRUNE_FROM

    def who(self, route: bytes, told: Told) -> Peer | None:
        """The owner of the key, if it is allowed still."""
        key = told("User-Id")
        known = self._routes.get(route)
        if known is None:
            known = self._routes[route] = key, self._line(told("__fd"))
            self._prune()
        allowed = self._keys.find(self._side, key)
        if allowed is None or known[0] != key:
            return None
        return Peer(key, operator=allowed.role == OPERATOR)

    def revoked(self) -> Iterator[bytes]:
        """Routing ids of connections whose key is allowed no longer."""
        return (route for route, (key, _) in list(self._routes.items()) if not self._keys.find(self._side, key))

    def forget(self, route: bytes) -> Line | None:
        """Drop what is known of *route*; returns its connection, where that can be told."""
        return self._routes.pop(route, ("", None))[1]

    def _line(self, descriptor: str) -> Line | None:
        return self._line_of(int(descriptor)) if descriptor.isdecimal() else None

    def _prune(self) -> None:
        # Nothing tells that a route is gone: one whose descriptor is closed, or another connection's by now, is.
        if len(self._routes) < self._prune_at:
            return
        live: dict[bytes, tuple[str, Line | None]] = {
            route: (key, line)
            for route, (key, line) in self._routes.items()
            if line is not None and self._line_of(line.descriptor) == line
        }
        self._routes = live
        self._prune_at = max(PRUNE_FROM, 2 * len(live))


def named_by_itself(route: bytes) -> bool:
    """Whether a client chose this routing id: the next to choose it would get what is meant for the first.

    libzmq draws a zero byte and a number of four bytes; it also takes names of clients that begin with zero.
    """
    return len(route) != 5 or route[0] != 0


def own_uid() -> int:
    """The user this broker runs as."""
    return os.getuid()
