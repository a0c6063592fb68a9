"""How a command reaches its broker: one that is not there is told in a second, one that is slow is waited for."""

from __future__ import annotations

import socket
from typing import Final
from urllib.parse import urlsplit

from mtplx.client import DEFAULT_TIMEOUT_S, Client
from mtplx.endpoints import dialled
from mtplx.settings import Settings

# For a broker that is only just being started.
ABSENT_S: Final = 1.0


def connect(settings: Settings) -> Client:
    """A client of the broker of *settings*; errors as those of `Client`."""
    there = listens(settings.endpoint("front"))
    client = Client(settings=settings, timeout=DEFAULT_TIMEOUT_S if there else ABSENT_S)
    client.timeout = DEFAULT_TIMEOUT_S
    return client


def listens(endpoint: str) -> bool:
    """Whether somebody takes connections there."""
    try:
        if endpoint.startswith("ipc://"):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(ABSENT_S)
                probe.connect(endpoint.removeprefix("ipc://"))
        else:
            place = urlsplit(dialled(endpoint))
            socket.create_connection((place.hostname or "", place.port or 0), ABSENT_S).close()
    except OSError:
        return False
    return True
