"""An OTLP/HTTP collector inside the test: it takes spans, refuses them, or never answers."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

# Below the time the broker gives an export.
SLOW_S = 0.6


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
    """mode: `take`, `slow` (takes them, SLOW_S later), `refuse` (503) or `hang`."""

    def __init__(self, mode: str = "take") -> None:
        self.spans: list[SpanSeen] = []
        self.raw = b""
        self.asked = 0
        self._grew = threading.Condition()
        self._over = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                owner.asked += 1
                if mode == "hang":
                    owner._over.wait(60)
                if mode == "slow":
                    owner._over.wait(SLOW_S)
                if mode in ("take", "slow"):
                    owner._take(body)
                self.send_response(503 if mode == "refuse" else 200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()

    def _take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._grew:
            self.raw += body
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    self.spans += [_seen(span) for span in scope.spans]
            self._grew.notify_all()

    def of(self, job: bytes) -> dict[str, SpanSeen]:
        """The spans of one job by the first word of their name."""
        process = [one for one in self.spans if one.attributes.get("messaging.message.id") == job.hex()]
        assert len(process) == 1, self.spans
        children = [one for one in self.spans if one.parent == process[0].span]
        return {one.name.split()[0]: one for one in process + children}


def _seen(span: Any) -> SpanSeen:
    return SpanSeen(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes},
        [one.name for one in span.events],
        [one.span_id.hex() for one in span.links],
        span.status.code == 2,
    )
