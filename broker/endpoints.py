"""The broker's two sockets: who may bind them, how they are set up.

libzmq unlinks whatever lies at an ipc path when it binds, so a lock file decides who may, and the path is
looked at before.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final, NamedTuple

import zmq

from broker import lock
from mtplx.errors import LockedError, SettingsError
from mtplx.paths import private_folder
from mtplx.sockets import COMMON, set_all

GOODBYE_MS: Final = 500
FRONT_RECEIVE_MESSAGES: Final = 64
# A whole answer of a fast worker can be under way.
BACK_RECEIVE_MESSAGES: Final = 10_000
SEND_MESSAGES: Final = 256


class Claim(NamedTuple):
    """The right to an ipc path: an open lock file, and the socket file it guards."""

    lock: int
    path: Path


def release(claims: list[Claim]) -> None:
    """Take the socket files away and give the locks back; the lock files stay, for the next to lock.

    Where a lock file was deleted meanwhile, another broker may have made one, and the socket there is its own.
    """
    for claimed in claims:
        if lock.is_at(claimed.lock, lock_of(claimed.path)):
            claimed.path.unlink(missing_ok=True)
        os.close(claimed.lock)


def lock_of(path: Path) -> Path:
    """The lock file beside the socket at *path*."""
    return Path(f"{path}.lock")


def claim(endpoint: str) -> Claim | None:
    """Lock an ipc *endpoint* and clear a stale socket file.

    Raises:
        LockedError: another broker holds it.
        SettingsError: the folder is not private, or something that is no socket of ours lies there.
    """
    if not endpoint.startswith("ipc://"):
        return None
    path = Path(endpoint.removeprefix("ipc://"))
    private_folder(path.parent)
    busy = f"Another broker (process {{holder}}) serves {endpoint}; stop it, or choose another --run-dir."
    held = lock.take(lock_of(path), busy)
    _clear_stale(path)
    return Claim(held, path)


def _clear_stale(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.getuid():
        raise SettingsError(f"{path} exists and is no socket of yours; remove it or choose another endpoint.")
    path.unlink()


def router(context: zmq.Context[zmq.Socket[bytes]], receive_messages: int) -> zmq.Socket[bytes]:
    """A ROUTER that never drops in silence, never blocks, and never waits for ever at its end."""
    socket = context.socket(zmq.ROUTER)
    own = {
        zmq.ROUTER_MANDATORY: 1,
        zmq.ROUTER_HANDOVER: 0,
        zmq.RCVHWM: receive_messages,
        zmq.SNDHWM: SEND_MESSAGES,
        zmq.BACKLOG: 128,
        zmq.LINGER: GOODBYE_MS,
    }
    set_all(socket, COMMON, own)
    return socket


def bind(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Bind *socket*; a tcp port in use is another broker's, as far as we can tell."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise LockedError(f"{endpoint} is in use; stop what holds it, or choose another port.") from error
        raise SettingsError(f"{endpoint} cannot be bound: {error.strerror}.") from error
