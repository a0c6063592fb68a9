"""What every mtplx socket has in common: options, encryption, why a handshake failed; and the workers' DEALER."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from shlex import quote
from typing import Any, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from mtplx.endpoints import dialled, leaves_machine
from mtplx.errors import SettingsError
from mtplx.keys import Credentials
from mtplx.wire import MAX_FRAME_BYTES

# A peer that speaks something else, or a machine that is gone, is noticed by libzmq or the system; who is silent,
# by our own beats. libzmq's heartbeats stay off: with them 4.3.5 aborts the process where a peer leaves messages
# behind that are not read yet, or reads too slowly.
# IPv6 lets tcp://[::1] work; a frame above MAXMSGSIZE ends its connection.
COMMON: Final[dict[int, int]] = {
    zmq.HANDSHAKE_IVL: 2000,
    zmq.HEARTBEAT_IVL: 0,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 5,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.TCP_MAXRT: 20_000,
    zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
    zmq.IPV6: 1,
}
HANDSHAKE_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
# Values of HANDSHAKE_FAILED_PROTOCOL: one side encrypts and the other does not; what came could not be decrypted.
MECHANISM_MISMATCH: Final = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
CRYPTOGRAPHIC: Final = int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)
RECONNECT: Final[dict[int, int]] = {zmq.RECONNECT_IVL: 100, zmq.RECONNECT_IVL_MAX: 3000}


def set_all(socket: zmq.Socket[bytes], *options: Mapping[Any, int]) -> None:
    """Set many options; before bind or connect."""
    for some in options:
        for option, value in some.items():
            socket.setsockopt(option, value)


def check_encrypted(endpoint: str, credentials: Credentials | None) -> None:
    """Refuse to go beyond this machine without encryption.

    Raises:
        SettingsError: *endpoint* is there, and there are no *credentials*.
    """
    if credentials is None and leaves_machine(endpoint):
        raise SettingsError(
            f"{endpoint} leaves this machine, and nothing does unencrypted: give --server-key and --key; "
            "`mtplx keys new` makes keys."
        )


def reach(socket: zmq.Socket[bytes], endpoint: str, credentials: Credentials | None) -> None:
    """Connect *socket*, encrypted where there are *credentials*; errors as those of `check_encrypted`."""
    check_encrypted(endpoint, credentials)
    if credentials is not None:
        socket.curve_serverkey = credentials.server.encode()
        socket.curve_publickey = credentials.own.public.encode()
        socket.curve_secretkey = credentials.own.secret.encode()
    socket.connect(dialled(endpoint))


@dataclass(slots=True)
class Handshakes:
    """Why connections to a broker did not come about, from what a monitor tells.

    refused: why libzmq has given this socket up for good: it never connects again. cut: handshakes in a row that
    ended halfway. odd: what answered does not speak ZeroMQ.
    """

    credentials: Credentials | None
    refused: str = ""
    cut: int = 0
    odd: bool = False
    _watched: zmq.Socket[bytes] | None = None
    _monitor: zmq.Socket[bytes] | None = None

    def watch(self, socket: zmq.Socket[bytes]) -> None:
        """Listen to what becomes of the connections of *socket*; before it connects."""
        self._watched, self._monitor = socket, socket.get_monitor_socket(HANDSHAKE_EVENTS)

    def look(self) -> str:
        """Heed what was heard since; returns the `cause`."""
        while self._monitor is not None and self._monitor.poll(0):
            self.take(parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK)))
        return self.cause()

    def close(self) -> None:
        """Listen no more; before the socket is closed."""
        if self._watched is not None and self._monitor is not None:
            self._watched.disable_monitor()
            self._monitor.close(linger=0)
            self._watched = self._monitor = None

    def take(self, event: Mapping[str, Any]) -> None:
        """Heed one event of the monitor."""
        kind, value = event["event"], event["value"]
        if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.refused, self.cut, self.odd = "", 0, False
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.refused = self._not_allowed()
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == MECHANISM_MISMATCH:
            self.refused = self._mismatch()
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL or value == CRYPTOGRAPHIC:
            self.cut += 1
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self.odd = True

    def cause(self) -> str:
        """The likely cause, as the end of a sentence; empty where no handshake failed."""
        if self.refused:
            return self.refused
        # One alone is a broker that was stopped at that moment.
        if self.cut > 1 and self.credentials is not None and not self.odd:
            return (
                f"the handshake is cut off there. Most likely --server-key {self.credentials.server} is not that "
                "broker's key; compare it with `mtplx keys list` where the broker runs."
            )
        return ""

    def _not_allowed(self) -> str:
        own = self.credentials.own.public if self.credentials is not None else ""
        return (
            "the broker does not allow this key, or no longer. "
            f"Who runs it can allow it: mtplx keys allow {quote(own)}"
        )

    def _mismatch(self) -> str:
        if self.credentials is None:
            return (
                "what listens there wants CURVE encryption. Give the broker's public key with --server-key, and a "
                "key that it allows with --key; `mtplx keys new` makes one."
            )
        return (
            "what listens there does not encrypt. Leave --server-key and --curve away, or start that broker with "
            "--curve."
        )


def worker_dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    credentials: Credentials | None = None,
    handshakes: Handshakes | None = None,
) -> zmq.Socket[bytes]:
    """A worker's DEALER: sends on a live connection only, and comes back by itself."""
    socket = context.socket(zmq.DEALER)
    set_all(socket, COMMON, RECONNECT, {zmq.IMMEDIATE: 1, zmq.LINGER: 0, zmq.SNDHWM: 10_000})
    if handshakes is not None:
        handshakes.watch(socket)
    reach(socket, endpoint, credentials)
    return socket
