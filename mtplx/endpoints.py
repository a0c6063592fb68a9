"""Endpoints of ZeroMQ: what is one, where it leads, and whether other machines reach it."""

from __future__ import annotations

import os
import re
from typing import Final

from mtplx import paths
from mtplx.errors import SettingsError

LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")
MAX_PORT: Final = 65_535
_WILDCARDS: Final = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - none is bound here
_TCP: Final = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+(%\w+)?\]|[\w.*-]+):(?P<port>[0-9]{1,5})")


def one_place(endpoint: str) -> str:
    """One spelling for each place that can be bound."""
    if endpoint.startswith("ipc://"):
        return os.path.realpath(endpoint.removeprefix("ipc://"))
    # The loopback names share their ports, or may: one port is taken for one place.
    return f"port {int(endpoint.rpartition(':')[2])}"


def leaves_machine(endpoint: str) -> bool:
    """Whether *endpoint* is reached from other machines, and so must be encrypted."""
    found = _TCP.fullmatch(endpoint)
    return found is not None and found["host"].lower() not in LOOPBACK


def dialled(endpoint: str) -> str:
    """*endpoint* as one connects to it: one for all addresses of this machine is reached on loopback."""
    for anywhere, here in _WILDCARDS.items():
        if endpoint.startswith(f"tcp://{anywhere}:"):
            return endpoint.replace(anywhere, here, 1)
    return endpoint


def check_endpoint(where: str, endpoint: str) -> None:
    """Refuse what is no endpoint: an over-long ipc path, or tcp without a port."""
    if endpoint.startswith("ipc:///"):
        paths.check_ipc_path(endpoint.removeprefix("ipc://"))
        return
    if not endpoint.startswith("tcp://"):
        raise SettingsError(
            f"{where} {endpoint!r} is no endpoint; write ipc:///absolute/path or tcp://127.0.0.1:PORT."
        )
    # No more than host and port: libzmq reads further parts in ways of its own.
    found = _TCP.fullmatch(endpoint)
    if found is None or not 0 < int(found["port"]) <= MAX_PORT:
        raise SettingsError(f"{where} {endpoint} has no port or no host; write tcp://127.0.0.1:5555.")
