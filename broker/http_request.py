"""One request to the HTTP port: read within bounds, from somebody who may ask, and answered."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from ipaddress import ip_address
from typing import Any, ClassVar, Final

from broker.http_answer import HEADERS, Answer, text_answer

# What a client may send, and how long it may take over it, and again over the answer.
MAX_HEAD_BYTES: Final = 16 * 1024
REQUEST_S: Final = 5.0
END: Final = b"\r\n\r\n"


class Handler(BaseHTTPRequestHandler):
    """Answers one GET or HEAD, and closes.

    answers: by path. names: hosts by which we are known; any_address: every address is, besides those of loopback.
    hint: what there is, for who asks for something else.
    """

    answers: ClassVar[dict[str, Callable[[], Answer]]]
    names: ClassVar[frozenset[str]]
    any_address: ClassVar[bool]
    hint: ClassVar[str]
    server_version = "mtplx"
    sys_version = ""

    def handle(self) -> None:
        """Read the head of the request, all of it or nothing, and answer."""
        self.close_connection = True
        # Set by the parser, which a bad head never reaches.
        self.requestline, self.request_version, self.command = "", "HTTP/1.0", ""
        head = self._head()
        if head is not None:
            self.rfile.close()
            self.rfile = io.BytesIO(head)
            self.handle_one_request()

    def _head(self) -> bytes | None:
        """The head; None where there is none within the limits, and that was told."""
        until = time.monotonic() + REQUEST_S
        head = b""
        while END not in head and b"\n\n" not in head:
            left = until - time.monotonic()
            if left <= 0:
                self._tell(408, f"The request did not come within {REQUEST_S:.0f} s.")
                return None
            self.connection.settimeout(left)
            try:
                some = self.connection.recv(MAX_HEAD_BYTES + 1 - len(head))
            except TimeoutError:
                continue
            except OSError:
                return None
            head += some
            if not some:
                return None
            if len(head) > MAX_HEAD_BYTES:
                self._tell(431, f"The request has more than {MAX_HEAD_BYTES} bytes.")
                return None
        self.connection.settimeout(REQUEST_S)
        return head

    def _tell(self, code: int, sentence: str) -> None:
        self.connection.settimeout(REQUEST_S)
        self._say(text_answer(code, sentence))

    def do_GET(self) -> None:
        """Answer with what lies under the path."""
        self._say(self._refusal() or self._found())

    def do_HEAD(self) -> None:
        """The same, without the body."""
        self.do_GET()

    def _not_allowed(self) -> None:
        self._say(text_answer(405, "Only GET and HEAD are answered here; jobs go over ZeroMQ."), Allow="GET, HEAD")

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _not_allowed  # noqa: N815

    def _found(self) -> Answer:
        answer = self.answers.get(self.path.partition("?")[0])
        return text_answer(404, self.hint) if answer is None else answer()

    def _refusal(self) -> Answer | None:
        """Why this asker gets nothing: a page of somebody else may make a browser here ask us."""
        hosts, origins = self.headers.get_all("Host") or [], self.headers.get_all("Origin") or []
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            return text_answer(421, "This host is not known here; open the port by 127.0.0.1, localhost or [::1].")
        if any(origin.lower() != f"http://{hosts[0].lower()}" for origin in origins):
            return text_answer(403, "Pages of other origins are not answered.")
        return None

    def _is_ours(self, host: str) -> bool:
        # The port is whatever the browser came by, through a tunnel for instance.
        name, colon, port = host.strip().lower().rpartition(":")
        if not colon or not port.isdigit():
            name = host.strip().lower()
        if name.rstrip(".") in self.names:
            return True
        try:
            address = ip_address(name.strip("[]"))
        except ValueError:
            return False
        return self.any_address or address.is_loopback

    def _say(self, answer: Answer, **headers: str) -> None:
        self.send_response(answer.code)
        length = {"Content-Type": answer.kind, "Content-Length": str(len(answer.body))}
        for name, value in {**length, **HEADERS, "Content-Security-Policy": answer.policy, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Tell of a request that the library could not read."""
        self._say(text_answer(code, message or "The request cannot be read."))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """Nothing: what strangers send does not fill the log."""
