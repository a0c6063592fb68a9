"""What every mtplx socket has in common, and the DEALER that workers use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import zmq

from mtplx.wire import MAX_FRAME_BYTES

# A dead or stopped process, or a peer that speaks something else, is noticed by libzmq itself.
# IPv6 lets tcp://[::1] work; a frame above MAXMSGSIZE ends its connection.
COMMON: Final[dict[int, int]] = {
    zmq.HANDSHAKE_IVL: 2000,
    zmq.HEARTBEAT_IVL: 2000,
    zmq.HEARTBEAT_TIMEOUT: 6000,
    zmq.HEARTBEAT_TTL: 6000,
    zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
    zmq.IPV6: 1,
}
RECONNECT: Final[dict[int, int]] = {zmq.RECONNECT_IVL: 100, zmq.RECONNECT_IVL_MAX: 3000}


def set_all(socket: zmq.Socket[bytes], *options: Mapping[Any, int]) -> None:
    """Set many options; before bind or connect."""
    for some in options:
        for option, value in some.items():
            socket.setsockopt(option, value)


def worker_dealer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """A worker's DEALER: sends on a live connection only, and comes back by itself."""
    socket = context.socket(zmq.DEALER)
    set_all(socket, COMMON, RECONNECT, {zmq.IMMEDIATE: 1, zmq.LINGER: 0, zmq.SNDHWM: 10_000})
    socket.connect(endpoint)
    return socket
