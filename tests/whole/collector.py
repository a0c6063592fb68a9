"""An OTLP/HTTP collector inside the test, or a process of its own: it takes spans and metrics, or fails in its way.

python tests/whole/collector.py --mode hang       prints its address, ends with stdin
"""

from __future__ import annotations

import contextlib
import gzip
import socket
import struct
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

# Below the time the broker gives an export.
SLOW_S = 0.6
DRIP_S = 0.3
FAULTS = ("dead", "hang", "503", "slow", "reset", "drip")


class SpanSeen(NamedTuple):
    """One exported span; ids in hex, times in nanoseconds."""

    name: str
    trace: str
    span: str
    parent: str
    kind: int
    begin: int
    end: int
    attributes: dict[str, Any]
    events: list[str]
    links: list[str]
    failed: bool


class Collector:
    """mode: `take`, `slow` (takes them, SLOW_S later), `503`, `hang`, `reset` (drops the connection), `drip`
    (answers a byte each DRIP_S, for ever), or `dead`: nobody listens at `url`.
    """

    def __init__(self, mode: str = "take") -> None:
        self.mode = mode
        self.spans: list[SpanSeen] = []
        self.metrics: dict[str, Any] = {}
        self.resource: dict[str, Any] = {}
        self.schemas: set[str] = set()
        self.headers: list[dict[str, str]] = []
        self.raw = b""
        self.asked = 0
        self._grew = threading.Condition()
        self._over = threading.Event()
        handler = type("Asked", (Handler,), {"owner": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        if mode == "dead":
            self._server.server_close()

    def __enter__(self) -> Self:
        if self.mode != "dead":
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self.mode != "dead":
            self._server.shutdown()
            self._server.server_close()

    def rest(self, seconds: float) -> bool:
        """Wait; True once the collector ends."""
        return self._over.wait(seconds)

    def take(self, path: str, body: bytes) -> None:
        """Keep what one request brought."""
        with self._grew:
            if path == "/v1/metrics":
                for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                    for scope in resource.scope_metrics:
                        self.metrics |= {one.name: one for one in scope.metrics}
            else:
                assert path == "/v1/traces", path
                self.raw += body
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    self.resource = _plain(resource.resource.attributes)
                    for scope in resource.scope_spans:
                        self.schemas.add(scope.schema_url)
                        self.spans += [_seen(span) for span in scope.spans]
            self._grew.notify_all()

    def wait_for(self, spans: int, limit: float = 20.0) -> list[SpanSeen]:
        """The spans, once there are so many."""
        with self._grew:
            assert self._grew.wait_for(lambda: len(self.spans) >= spans, limit), self.spans
            return list(self.spans)

    def of(self, job: bytes) -> dict[str, SpanSeen]:
        """The spans of one job by the first word of their name."""
        process = [one for one in self.spans if one.attributes.get("messaging.message.id") == job.hex()]
        assert len(process) == 1, self.spans
        children = [one for one in self.spans if one.parent == process[0].span]
        return {one.name.split()[0]: one for one in process + children}


class Handler(BaseHTTPRequestHandler):
    """One request; `owner` is the collector."""

    owner: Collector

    def do_POST(self) -> None:
        assert self.headers["Content-Type"] == "application/x-protobuf"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Content-Encoding"] == "gzip":
            body = gzip.decompress(body)
        self.owner.asked += 1
        self.owner.headers.append(dict(self.headers))
        mode = self.owner.mode
        if mode == "hang":
            self.owner.rest(60)
        if mode == "slow":
            self.owner.rest(SLOW_S)
        if mode == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return
        if mode == "drip":
            self._drip()
            return
        if mode in ("take", "slow"):
            self.owner.take(self.path, body)
        self.send_response(503 if mode == "503" else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _drip(self) -> None:
        for byte in b"HTTP/1.1 200 OK\r\nX-Slow: " + b"x" * 1000:
            if self.owner.rest(DRIP_S):
                return
            try:
                self.connection.sendall(bytes([byte]))
            except OSError:
                return

    def handle(self) -> None:
        try:
            super().handle()
        except (OSError, ValueError):
            self.close_connection = True

    def finish(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def log_message(self, *_: Any) -> None:
        pass


def _plain(attributes: Any) -> dict[str, Any]:
    found = {}
    for one in attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = (
            [getattr(v, v.WhichOneof("value")) for v in value.values] if kind == "array_value" else value
        )
    return found


def _seen(span: Any) -> SpanSeen:
    return SpanSeen(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _plain(span.attributes),
        [one.name for one in span.events],
        [one.span_id.hex() for one in span.links],
        span.status.code == 2,
    )


def main(mode: str) -> None:
    """Be a collector of *mode* until stdin ends."""
    with Collector(mode) as collector:
        sys.stdout.write(f"{collector.url}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[sys.argv.index("--mode") + 1] if "--mode" in sys.argv else "take")
