"""The HTTP port of a real broker, and its server alone: what it answers, to whom, and what hostile clients cost."""

from __future__ import annotations

import json
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from whole.harness import Service, service

from broker import http, http_request
from broker.record import Now
from mtplx import messages as m
from mtplx.errors import LockedError, SettingsError
from mtplx.http_place import HttpPlace, http_place
from mtplx.settings import Settings
from mtplx.testing import ManualClock

SECRET = "sesamic xylographers quokkafied"
LIMIT_S = 10.0


def ask(port: int, request: str | bytes, host: str = "127.0.0.1") -> tuple[int, dict[str, str], bytes]:
    """Send bytes, read to the end: status, headers, body."""
    with socket.create_connection((host, port), LIMIT_S) as connection:
        connection.sendall(request.encode() if isinstance(request, str) else request)
        answer = b"".join(iter(lambda: connection.recv(65_536), b""))
    return parted(answer)


def parted(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body


def get(port: int, path: str = "/health", host: str = "127.0.0.1:1", method: str = "GET", **more: str):
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *(f"{name}: {value}" for name, value in more.items())]
    return ask(port, "\r\n".join(lines) + "\r\n\r\n")


def report(**given: Any) -> dict[str, Any]:
    return {"service": {"able": True, "why": ""}, "worker": {"state": "ready"}, **given}


@contextmanager
def serving(window: http.Window, metrics: Any = None, *, remote: bool = False) -> Iterator[int]:
    """The server alone, in this process."""
    server = http.open_server(HttpPlace("127.0.0.1", 0), http.answers(window, metrics), remote=remote)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(LIMIT_S)


@pytest.fixture
def port() -> Iterator[int]:
    window = http.Window(clock=lambda: 100.0)
    window.publish(lambda _: report(), Now(100.0, 0))
    with serving(window) as port:
        yield port


@pytest.fixture(scope="module")
def broker() -> Iterator[tuple[Service, int]]:
    with service("--http", "127.0.0.1:0", "--beat-s", "0.1") as running:
        with running.producer() as producer:
            url = producer.health()["broker"]["http"]
        yield running, urlsplit(url).port


def until(port: int, code: int) -> dict[str, Any]:
    """Ask for health until it answers with *code*."""
    end = time.monotonic() + LIMIT_S
    while (found := get(port))[0] != code:
        assert time.monotonic() < end, found
        time.sleep(0.05)
    return json.loads(found[2])


def test_health_is_503_while_no_job_could_run_and_what_the_command_tells_otherwise(broker) -> None:
    running, port = broker
    assert until(port, 503)["service"]["why"] == "No worker is connected."
    worker = running.worker()
    found = until(port, 200)
    with running.producer() as producer:
        told = producer.health()
    assert found.keys() == told.keys()
    for name in ("scheduler", "worker", "line", "journal", "broker"):
        assert found[name].keys() == told[name].keys(), name
    assert found["scheduler"]["mode"] == "hyper"
    assert found["scheduler"]["hyper"]["admission_cap"] == 1
    worker.send(signal.SIGKILL)
    worker.ended()
    assert "ended or crashed" in until(port, 503)["service"]["why"]


def test_no_word_of_any_job_is_told_under_any_path(broker) -> None:
    running, port = broker
    running.worker()
    with running.producer() as producer:
        told = producer.submit(prompt=SECRET)
        assert producer.last_word(told).text == SECRET
        producer.submit(script={"tokens": 50, "token_s": 0.05}, prompt=SECRET)
        producer.submit(prompt=SECRET)
        producer.until(lambda message: getattr(message, "n", 0) > 0)
        end = time.monotonic() + LIMIT_S
        while json.loads(get(port)[2])["running"] is None:
            assert time.monotonic() < end
        for path in ("/", "/health", "/state", "/metrics", f"/{SECRET.replace(' ', '%20')}"):
            for word in SECRET.encode().split():
                assert word not in get(port, path)[2]


def test_a_broker_that_stops_takes_its_port_with_it_in_time() -> None:
    with service("--http", "127.0.0.1:0") as running:
        with running.producer() as producer:
            port = urlsplit(producer.health()["broker"]["http"]).port
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        began = time.monotonic()
        running.broker.send(signal.SIGTERM)
        assert running.broker.ended() == 0
        assert time.monotonic() - began < LIMIT_S / 2
        for one in held:
            one.close()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port))


def test_a_port_that_is_taken_ends_the_broker_with_what_to_do_and_auto_takes_another(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with ExitStack() as stack:
            running = Service("--http", f"127.0.0.1:{port}")
            stack.callback(running.close)
            assert running.broker.ended() == 4
            assert f"--http 127.0.0.1:{port} is in use" in running.broker.said()
            assert "Traceback" not in running.broker.said()
        place = HttpPlace("127.0.0.1", port, yields=True)
        server = http.open_server(place, {}, remote=False)
        server.server_close()
        assert server.server_address[1] != port


def test_an_address_that_cannot_be_bound_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="Use an address of this machine"):
        http.open_server(HttpPlace("192.0.2.7", 0), {}, remote=True)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(http, "Server", refuse)
    with pytest.raises(SettingsError, match="choose a port above 1023"):
        http.open_server(HttpPlace("127.0.0.1", 80), {}, remote=False)
    assert issubclass(LockedError, Exception)


@pytest.mark.parametrize("text", ["0.0.0.0:8000", "[::]:8000", "10.0.0.7:80"])
def test_other_machines_reach_it_only_where_that_is_said(text: str) -> None:
    with pytest.raises(SettingsError, match="--http-remote"):
        http_place(text, remote=False)
    assert http_place(text, remote=True) is not None
    with pytest.raises(SettingsError, match="without encryption"):
        Settings(http=text)


@pytest.mark.parametrize(
    "text", ["8000", "127.0.0.1", "127.0.0.1:99999", "example.com:80", ":80", "http://127.0.0.1:80"]
)
def test_what_is_no_address_is_refused_with_how_to_write_one(text: str) -> None:
    with pytest.raises(SettingsError, match=r"write 127\.0\.0\.1:8000"):
        http_place(text, remote=True)


def test_the_address_for_a_browser_is_one_that_it_can_open() -> None:
    assert HttpPlace("0.0.0.0", 0).url(81) == "http://127.0.0.1:81/"
    assert HttpPlace("::", 0).url(81) == HttpPlace("::1", 0).url(81) == "http://[::1]:81/"
    assert http_place("localhost:80", remote=False) == HttpPlace("127.0.0.1", 80)
    assert http_place("off", remote=False) is http_place("", remote=False) is None


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8000", "localhost:9", "LOCALHOST", "localhost.:80", "[::1]:8000", "127.9.9.9"]
)
def test_it_answers_under_every_name_of_loopback(port: int, host: str) -> None:
    assert get(port, host=host)[0] == 200
    assert get(port, host=host, Origin=f"http://{host}")[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "10.0.0.1",
        "",
        "[::1",
        "127.0.0.1@evil.example",
    ],
)
def test_a_name_that_an_attacker_may_have_made_point_here_is_refused(port: int, host: str) -> None:
    assert get(port, host=host)[0] == 421


def test_no_host_or_two_are_refused(port: int) -> None:
    assert ask(port, "GET /health HTTP/1.1\r\n\r\n")[0] == 421
    assert ask(port, "GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")[0] == 421


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:1", "http://127.0.0.1:2"])
def test_pages_of_other_origins_get_nothing(port: int, origin: str) -> None:
    code, _, body = get(port, Origin=origin)
    assert (code, b"worker" in body) == (403, False)


def test_where_other_machines_may_reach_it_addresses_are_known_and_foreign_names_are_not() -> None:
    with serving(http.Window(), remote=True) as port:
        assert get(port, "/state", host="192.168.1.7:8000")[0] == 200
        assert get(port, "/state", host=socket.gethostname())[0] == 200
        assert get(port, "/state", host="evil.example")[0] == 421


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_only_get_and_head_are_answered(port: int, method: str) -> None:
    code, headers, _ = get(port, method=method)
    assert (code, headers["Allow"]) == (405, "GET, HEAD")
    assert get(port, method="BREW")[0] == 501


def test_head_tells_the_same_without_a_body(port: int) -> None:
    _, headers, body = get(port)
    assert (get(port, method="HEAD")[1]["Content-Length"], get(port, method="HEAD")[2]) == (
        headers["Content-Length"],
        b"",
    )
    assert len(body) == int(headers["Content-Length"])


def test_what_is_not_there_is_told_with_what_is(port: int) -> None:
    for path in ("/x", "/health/", "http://evil.example/health"):
        code, _, body = get(port, path)
        assert (code, b"/health, /metrics" in body) == (404, True)
    assert get(port, "/health?x=1")[0] == 200


def test_a_browser_may_run_nothing_but_the_page_itself(port: int) -> None:
    _, headers, body = get(port, "/")
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert re.findall(rb"""(?:src|href)=["'](?!data:)""", body) == []
    assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b"")


class FakeMetrics:
    """Metrics of one line, until they fail."""

    broken = False

    def exposition(self) -> tuple[bytes, str]:
        if self.broken:
            raise RuntimeError("no metrics")
        return b"mtplx_jobs 3\n", "text/plain; version=0.0.4"


def test_metrics_are_whatever_their_object_tells_and_their_failure_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = FakeMetrics()
    with serving(http.Window(), metrics) as port:
        code, headers, body = get(port, "/metrics")
        assert (code, headers["Content-Type"], body) == (200, "text/plain; version=0.0.4", b"mtplx_jobs 3\n")
        metrics.broken = True
        assert get(port, "/metrics")[0] == 500
    assert "could not be answered" in caplog.text


def test_without_metrics_it_says_what_brings_them(port: int) -> None:
    code, _, body = get(port, "/metrics")
    assert (code, b"mtplx-line[otlp]" in body) == (404, True)


def test_a_loop_that_hangs_is_told_with_503_and_so_is_one_that_starts() -> None:
    clock = ManualClock(50.0)
    window = http.Window(clock=clock.monotonic)
    assert "starting" in json.loads(window.health()[1])["service"]["why"]
    window.publish(lambda _: report(line={"depth": 3}), Now(50.0, 0))
    assert window.health()[0]
    clock.advance(http.STALE_S + 4)
    able, body = window.health()
    assert (able, json.loads(body)["line"]) == (False, {"depth": 3})
    assert "hung for 14 s" in json.loads(body)["service"]["why"]


def test_the_loop_publishes_once_a_second_however_often_it_turns() -> None:
    calls: list[float] = []
    window = http.Window()
    for tenth in range(50):
        window.publish(lambda at: calls.append(at.mono) or report(), Now(tenth / 10, 0))
    assert calls == pytest.approx([0.0, 1.0, 2.0, 3.0, 4.0])
    assert window.next() == pytest.approx(5.0)


def test_whatever_a_worker_tells_of_itself_stays_json_for_browsers() -> None:
    told = {
        "service": {},
        "worker": {"info": {"nan": float("nan"), "list": [float("inf")], "bytes": b"\xff", 3: 1}},
    }
    found = json.loads(http.as_json(told), parse_constant=pytest.fail)
    assert found["worker"]["info"] == {"nan": "nan", "list": ["inf"], "bytes": "b'\\xff'", "3": 1}


def test_a_head_that_is_too_large_is_refused_before_it_is_read_to_its_end(port: int) -> None:
    many = "GET / HTTP/1.1\r\nHost: localhost\r\n" + "X: y\r\n" * 10_000
    with socket.create_connection(("127.0.0.1", port), LIMIT_S) as connection:
        connection.sendall(many.encode()[: http_request.MAX_HEAD_BYTES + 1])
        assert parted(connection.recv(65_536))[0] == 431


@pytest.mark.parametrize(
    "bytes_",
    [
        b"\x00\xff\x16\x03\x01\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\r\n\r\n",
        b"GET / \xff\r\n\r\n",
        b"MTX\x01\n\n",
    ],
)
def test_bytes_that_are_no_request_are_refused_and_nothing_breaks(port: int, bytes_: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), LIMIT_S) as connection:
        connection.sendall(bytes_)
        answer = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert b" 200 " not in answer.split(b"\r\n")[0]
    assert get(port)[0] == 200


def test_a_client_that_sends_its_request_drop_by_drop_is_cut_at_the_limit(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_request, "REQUEST_S", 0.4)
    with socket.create_connection(("127.0.0.1", port), LIMIT_S) as connection:
        began = time.monotonic()
        connection.settimeout(0.05)
        answer = b""
        while not answer:
            assert time.monotonic() - began < LIMIT_S
            connection.send(b"X")
            try:
                answer = connection.recv(4096)
            except TimeoutError:
                continue
    assert parted(answer)[0] == 408
    assert 0.3 < time.monotonic() - began < LIMIT_S


def test_many_silent_connections_keep_nobody_out_and_no_more_threads_than_allowed(port: int) -> None:
    before = set(threading.enumerate())

    def answering() -> int:
        return len(set(threading.enumerate()) - before)

    with ExitStack() as stack:
        for _ in range(3 * http.MAX_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), LIMIT_S))
        assert get(port)[0] == 200
        # The thread of a connection that made room ends when it has read so.
        end = time.monotonic() + LIMIT_S
        while answering() > http.MAX_CONNECTIONS and time.monotonic() < end:
            time.sleep(0.01)
        assert answering() <= http.MAX_CONNECTIONS


def test_connections_beyond_the_pace_wait_their_turn() -> None:
    pace = http.Pace(0.0)
    waits = [pace.wait(0.0) for _ in range(200)]
    assert waits[: int(http.BURST)] == [0.0] * int(http.BURST)
    assert waits[-1] == pytest.approx((200 - http.BURST) / http.PER_SECOND)
    assert pace.wait(1000.0) == 0.0


def test_a_flood_of_http_clients_holds_up_no_job(broker) -> None:
    running, port = broker
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            try:
                get(port, "/state")
            except (OSError, IndexError, ValueError):
                continue

    if not any(one.process.poll() is None for one in running.programs[1:]):
        running.worker()
    threads = [threading.Thread(target=flood) for _ in range(4)]
    with running.producer() as producer:
        for thread in threads:
            thread.start()
        try:
            for _ in range(20):
                job = producer.submit(script={"tokens": 50})
                assert producer.last_word(job, limit=5.0).outcome == "stop"
        finally:
            stop.set()
            for thread in threads:
                thread.join(LIMIT_S)


FLOOD = """
import socket, sys, threading
port, held = int(sys.argv[1]), []
def flood(slow):
    while True:
        try:
            one = socket.create_connection(("127.0.0.1", port), 5)
            one.sendall(b"GET /state HTTP/1.1\\r\\nHost: localhost\\r\\n" + (b"X: y" if slow else b"\\r\\n"))
            held.append(one) if slow else one.recv(65536)
            while len(held) > 200:
                held.pop(0).close()
        except OSError:
            pass
for number in range(8):
    threading.Thread(target=flood, args=(number % 2,), daemon=True).start()
sys.stdin.read()
"""


def pings(producer: Any, count: int = 200) -> float:
    """The median round trip of PING through the loop, in seconds."""
    took = []
    for number in range(count):
        began = time.perf_counter()
        producer.ask(m.Ping(number), m.Pong)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


@pytest.mark.prove
def test_the_loop_answers_as_fast_under_a_flood_of_http_clients() -> None:
    quiet, flooded = [], []
    with service("--http", "127.0.0.1:0") as running, running.producer() as producer:
        port = urlsplit(producer.health()["broker"]["http"]).port
        for _ in range(6):
            quiet.append(pings(producer))
            with subprocess.Popen([sys.executable, "-c", FLOOD, str(port)], stdin=subprocess.PIPE) as flood:
                time.sleep(0.5)
                flooded.append(pings(producer))
                flood.kill()
    # The flood itself takes a part of the machine.
    assert statistics.median(flooded) <= 3 * statistics.median(quiet), (quiet, flooded)
