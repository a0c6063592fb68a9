"""The HTTP port: health, metrics, and a page to leave open.

The loop publishes what there is to see, once a second, as bytes that never change; threads of this file read those
and touch nothing else of the broker. What clients cost is bounded, in threads and in time.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import socket as sockets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any, Final, Protocol

from broker.http_answer import Answer, page_answer, text_answer
from broker.http_request import Handler
from broker.machine import Machine
from broker.record import Now
from mtplx.errors import LockedError, SettingsError
from mtplx.http_place import HttpPlace
from mtplx.overview import overview
from mtplx.settings import Settings

log = logging.getLogger("mtplx.broker")

# The loop publishes this often, and counts as hanging when it has not for so long.
PUBLISH_S: Final = 1.0
STALE_S: Final = 10.0
# Connections at once; beyond them the oldest is cut, which a client that asks and reads has left long before.
MAX_CONNECTIONS: Final = 16
# Connections taken a second, and at once after a rest. More would take the loop's time: the interpreter is shared.
PER_SECOND: Final = 50.0
BURST: Final = 50.0
# Out of descriptors: looking again at once would only burn time.
NO_FILES_S: Final = 0.5
JSON: Final = "application/json"
PLACES: Final = "Here are / (a page for people), /health, /metrics and /state."
NO_METRICS: Final = "No metrics are kept here. They need the extra: pip install 'mtplx-line[otlp]'."


class Metrics(Protocol):
    """Where metrics come from; asked by threads of the HTTP port, at any time."""

    def exposition(self) -> tuple[bytes, str]:
        """The metrics as text, and its content type."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of the broker at *at*, in monotonic seconds. health is its JSON."""

    at: float
    health: bytes
    able: bool


class Window:
    """Between the loop, which publishes, and the threads that look in. One assignment changes hands."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._snapshot: Snapshot | None = None
        self._due = -math.inf

    def next(self) -> float:
        """When `publish` has something to do."""
        return self._due

    def publish(self, report: Callable[[Now], dict[str, Any]], at: Now) -> None:
        """Show what *report* tells, if it is time."""
        if at.mono < self._due:
            return
        self._due = at.mono + PUBLISH_S
        found = report(at)
        self._snapshot = Snapshot(at.mono, as_json(found), found["service"]["able"])

    def health(self) -> tuple[bool, bytes]:
        """Whether a job could run, and health as JSON. A loop that has stopped publishing hangs, and runs none."""
        shown = self._snapshot
        if shown is None:
            return False, as_json({"service": {"able": False, "why": "The broker is starting."}})
        silent = self._clock() - shown.at
        if silent <= STALE_S:
            return shown.able, shown.health
        why = f"The broker's loop has hung for {silent:.0f} s; its log may say why. Start the broker again."
        return False, as_json({**json.loads(shown.health), "service": {"able": False, "why": why}})


def as_json(found: dict[str, Any]) -> bytes:
    """*found* as JSON that browsers read: what a worker told of itself may hold anything."""
    try:
        return json.dumps(found, allow_nan=False, default=repr).encode()
    except ValueError:
        return json.dumps(_plain(found), default=repr).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Pace:
    """How long the next connection has to wait, so that no more than PER_SECOND are taken for long."""

    def __init__(self, now: float) -> None:
        self._tokens = BURST
        self._at = now

    def wait(self, now: float) -> float:
        """Seconds to wait before a connection is taken at *now*."""
        self._tokens = min(BURST, self._tokens + (now - self._at) * PER_SECOND) - 1
        self._at = now
        return max(0.0, -self._tokens / PER_SECOND)


class Server(ThreadingTCPServer):
    """Accepts connections at a bounded pace, and holds a bounded number."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(self, place: HttpPlace, port: int, handler: type[BaseRequestHandler]) -> None:
        self.address_family = sockets.AF_INET6 if ":" in place.host else sockets.AF_INET
        self._open: dict[Any, None] = {}
        self._lock = threading.Lock()
        self._pace = Pace(time.monotonic())
        super().__init__((place.host, port), handler)

    def get_request(self) -> tuple[Any, Any]:
        """The next connection."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(NO_FILES_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer *request* in a thread, once it is its turn and there is room."""
        time.sleep(self._pace.wait(time.monotonic()))
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                # Its thread reads the end of the stream, and ends.
                with suppress(OSError):
                    oldest.shutdown(sockets.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close *request*."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the library's signature
        """A request could not be answered; a client that went away is none of our faults."""
        error = sys.exception()
        if isinstance(error, OSError):
            return
        log.error("an HTTP request could not be answered", exc_info=error)
        with suppress(OSError):
            request.sendall(b"HTTP/1.0 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n")


def answers(window: Window, metrics: Metrics | None) -> dict[str, Callable[[], Answer]]:
    """What is answered under each path."""
    page = page_answer()

    def health() -> Answer:
        able, body = window.health()
        return Answer(200 if able else 503, JSON, body)

    def state() -> Answer:
        return Answer(200, JSON, as_json(overview(json.loads(window.health()[1]))))

    def exposition() -> Answer:
        if metrics is None:
            return text_answer(404, NO_METRICS)
        body, kind = metrics.exposition()
        return Answer(200, kind, body)

    return {"/": lambda: page, "/health": health, "/state": state, "/metrics": exposition}


def open_server(place: HttpPlace, paths: dict[str, Callable[[], Answer]], *, remote: bool) -> Server:
    """A server that is bound and does not serve yet.

    Raises:
        LockedError: the port is taken.
        SettingsError: the address cannot be bound.
    """

    class _Handler(Handler):
        answers = paths
        names = host_names(remote=remote)
        any_address = remote
        hint = PLACES

    try:
        return Server(place, place.port, _Handler)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and place.yields:
            server = Server(place, 0, _Handler)
            log.warning("port %d is in use, so the page is at %s", place.port, place.url(server.server_address[1]))
            return server
        raise _refusal(place, error) from error


def _refusal(place: HttpPlace, error: OSError) -> LockedError | SettingsError:
    where = f"--http {place.host}:{place.port}"
    if error.errno == errno.EADDRINUSE:
        return LockedError(
            f"{where} is in use; stop what holds it, or choose another port, or --http auto for any free one."
        )
    if error.errno == errno.EACCES:
        return SettingsError(f"{where} is not allowed to this user; choose a port above 1023.")
    return SettingsError(f"{where} cannot be bound: {error.strerror}. Use an address of this machine.")


def host_names(*, remote: bool) -> frozenset[str]:
    """Names under which a browser may have found us. Others may be an attacker's, made to point here."""
    own = sockets.gethostname().lower()
    return frozenset({"localhost", own, f"{own}.local"} if remote else {"localhost"})


@contextmanager
def serving(settings: Settings, machine: Machine, metrics: Metrics | None = None) -> Iterator[Window | None]:
    """The window of an HTTP port that is open within the block; None where there is to be none.

    Raises:
        LockedError, SettingsError: as `open_server`.
    """
    place = settings.http_place
    if place is None:
        yield None
        return
    window = Window()
    server = open_server(place, answers(window, metrics), remote=not ip_address(place.host).is_loopback)
    machine.http = place.url(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, name="http", daemon=True)
    thread.start()
    try:
        yield window
    finally:
        server.shutdown()
        server.server_close()
