"""`mtplx top` and `mtplx trace`: the page in a terminal, and spans as trees with times."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console
from whole.fake_broker import FakeBroker
from whole.page_states import busy, page_service

from mtplx.cli import doctor, spans
from mtplx.cli import top as top_module
from mtplx.cli.checkup import wrong
from mtplx.cli.main import main
from mtplx.cli.top import Watcher, drawn, watch
from mtplx.settings import Settings


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("MTPLX_CONFIG", str(tmp_path / "config.toml"))


def mtplx(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_top_tells_the_line_the_running_job_and_the_broker_that_went_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_module, "PATIENCE_S", 0.5)
    with page_service() as (service, _):
        busy(service)
        said = mtplx("top", "--once", "--run-dir", str(service.run))
        assert said.exit_code == 0, said.output
        for text in ("Running job 0", "20 jobs behind it.", "20 waiting", "decode", "Job 1", "next", "E_EXPIRED"):
            assert text in said.stdout
        watcher = Watcher(Settings(run_dir=service.run))
        try:
            assert watcher.look()["headline"] == "Running job 0"
            service.broker.send(signal.SIGKILL)
            service.broker.ended()
            gone = watcher.look()
            assert (gone["headline"], gone["tone"]) == ("The broker is gone", "wrong")
            assert "It last answered at" in gone["sentence"]
            assert gone["line"], "what was last known stays to be seen"
            service.start_broker("--http", "off")
            service.answers().socket.close()
            # Each look waits for an answer; the worker may be back before it.
            seen = next(one for _ in range(40) if (one := watcher.look()["headline"]) != "The broker is gone")
            assert seen in ("No worker", "Starting", "Running job 0")
        finally:
            watcher.close()


def test_top_draws_anew_only_what_changed_and_survives_any_size(broker: FakeBroker) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=30, height=10)
    watcher = Watcher(Settings(front=broker.endpoint))
    written: list[int] = []

    def pause(_: float) -> None:
        written.append(screen.tell())
        if len(written) == 3:
            broker.health = {"service": {"able": True}, "worker": {"state": "busy", "model": "[bold]x[/bold]"}}

    broker.health = {"service": {"able": True}, "worker": {"state": "ready", "model": "[red]m"}}
    watch(watcher, console, pause, lambda: len(written) == 5)
    assert written[0] == written[1] == written[2] < written[3] == written[4]
    wide = Console(file=io.StringIO(), width=200)
    wide.print(drawn(Watcher(Settings(front=broker.endpoint)).look()))
    assert "[bold]x[/bold]" in wide.file.getvalue()


def test_top_without_a_broker_says_how_to_start_one(tmp_path: Path) -> None:
    said = mtplx("top", "--front", f"ipc://{tmp_path}/front.sock")
    assert (said.exit_code, "mtplx serve" in said.stderr) == (6, True)


def span(name: str, own: str, parent: str, start: int, end: int, **more: object) -> dict:
    attributes = more.pop("attributes", {})
    told = [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()]
    times = {"startTimeUnixNano": str(start * 10**6), "endTimeUnixNano": str(end * 10**6)}
    return {
        "name": name,
        "traceId": "77aa",
        "spanId": own,
        "parentSpanId": parent,
        "attributes": told,
        **times,
        **more,
    }


def line(*spans: dict) -> str:
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}) + "\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "spans.jsonl"
    first = {"name": "mtplx.first_token", "timeUnixNano": str(1600 * 10**6)}
    chat = span("chat m", "c", "p", 1500, 2000, events=[first], status={"code": 2})
    job = {"messaging.message.id": "beef01"}
    path.write_text(
        line(chat, span("queue mtplx.jobs", "q", "p", 1000, 1500))
        + line(span("process mtplx.jobs", "p", "elsewhere", 1000, 2000, attributes=job))
        + line(span("process mtplx.jobs", "r", "", 3000, 3100, attributes={"messaging.message.id": "cafe02"}))
    )
    return path


def test_trace_draws_each_job_as_a_tree_with_times_from_its_start(file: Path) -> None:
    said = mtplx("trace", str(file))
    assert said.exit_code == 0, said.output
    process, queue, chat, first, other = (" ".join(one.split()) for one in said.stdout.splitlines())
    assert process.startswith(
        "process mtplx.jobs +0.000 s 1.000 s ━━━━━━━━━━━━━━━━━━━━━━━━ job beef01, trace 77aa"
    )
    assert queue == "├─ queue mtplx.jobs +0.000 s 0.500 s ━━━━━━━━━━━━"
    assert chat == "└─ chat m +0.500 s 0.500 s ━━━━━━━━━━━━"
    assert first == "└─ mtplx.first_token +0.600 s"
    assert "cafe02" in other


def test_trace_shows_one_job_or_the_last_ones(file: Path) -> None:
    assert "cafe02" not in mtplx("trace", str(file), "--job", "BEEF").stdout
    said = mtplx("trace", str(file), "--last", "1")
    assert ("beef01" in said.stdout, "cafe02" in said.stdout) == (False, True)
    assert "1 earlier ones are left out" in said.stderr
    assert "has no such spans" in mtplx("trace", str(file), "--trace", "00").stderr


def test_a_damaged_or_growing_trace_file_is_read_as_far_as_it_goes(file: Path) -> None:
    whole = file.read_bytes()
    damaged = (
        b"\xff\xfe\n",
        b"[]\n",
        b"{}\n",
        b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"name": 1}]}]}]}\n',
        b"3\n",
    )
    file.write_bytes(b"".join(damaged) + whole + whole[:40])
    said = mtplx("trace", str(file))
    assert (said.exit_code, len(said.stdout.splitlines())) == (0, 5)
    assert "5 lines of" in said.stderr


@pytest.mark.parametrize(
    "odd",
    [
        {"startTimeUnixNano": "1" * 400},
        {"endTimeUnixNano": "-1"},
        {"startTimeUnixNano": 1e400},
        {"events": [{"name": "far", "timeUnixNano": "9" * 400}]},
        {"attributes": [{"key": "mtplx.attempt", "value": {"intValue": 1e400}}]},
        {"attributes": [{"key": ["mtplx.attempt"], "value": {"intValue": 1}}]},
        {"status": None},
    ],
)
def test_a_span_that_is_none_costs_its_line_alone(file: Path, odd: dict) -> None:
    file.write_text(file.read_text() + line(span("x", "x", "", 1, 2) | odd))
    said = mtplx("trace", str(file))
    assert (said.exit_code, len(said.stdout.splitlines())) == (0, 5), said.output
    assert "1 lines of" in said.stderr


def test_lines_without_end_or_of_endless_depth_are_counted_and_left_out(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "MAX_LINE", 4096)
    file.write_text("[" * 4000 + "\n" + "[" * 9000 + "\n" + file.read_text() + "\0" * 9000)
    said = mtplx("trace", str(file))
    assert (said.exit_code, len(said.stdout.splitlines())) == (0, 5), said.output
    assert "3 lines of" in said.stderr


def test_trace_keeps_ids_whole_on_a_narrow_terminal(file: Path) -> None:
    screen = io.StringIO()
    tree = spans.tree_of(spans.read_spans(file).roots, 60)
    Console(file=screen, width=60).print(tree)
    shown = screen.getvalue()
    assert "beef01" in shown
    assert "└─ mtplx.first_token" in shown
    assert "…" not in shown


# What sets a title, clears a screen, colours, turns the direction of text, and goes back to the line's start.
CONTROLS = "\x1b\x07\x9b\u202e\r"
ESCAPES = "\x1b]0;mine\x07\x1b[2J\x9b31m\u202e\r"


def test_nothing_that_a_file_or_a_broker_tells_speaks_to_the_terminal(
    file: Path, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "findings", lambda *_: [wrong(ESCAPES, ESCAPES, ESCAPES)])
    attributes = {"mtplx.outcome": ESCAPES, "messaging.message.id": ESCAPES}
    events = [{"name": ESCAPES, "timeUnixNano": "1"}]
    file.write_text(line(span(ESCAPES, "x", "", 1, 2, events=events, attributes=attributes, traceId=ESCAPES)))
    info = {"device": ESCAPES, "versions": {ESCAPES: ESCAPES}}
    broker.health = {
        "service": {"able": False, "why": ESCAPES},
        "worker": {"state": ESCAPES, "model": ESCAPES, "info": info},
    }
    front = ("--front", broker.endpoint)
    for words in (("trace", str(file)), ("top", *front), ("health", *front), ("doctor",), ("trace", ESCAPES)):
        said = mtplx(*words)
        assert "mine" in said.output, words
        assert not set(said.output) & set(CONTROLS), words


def test_spans_that_are_each_others_parents_end_no_command(tmp_path: Path) -> None:
    file = tmp_path / "ring.jsonl"
    chain = [span("deep", str(number), str(number - 1), 1, 2) for number in range(1, 200)]
    file.write_text(line(span("a", "x", "y", 1, 2), span("b", "y", "x", 1, 2), span("c", "z", "z", 1, 2), *chain))
    said = mtplx("trace", str(file))
    assert said.exit_code == 0
    assert "..." in said.stdout


def test_trace_of_no_file_says_what_makes_one(tmp_path: Path) -> None:
    for arguments in (("trace",), ("trace", str(tmp_path / "none.jsonl"))):
        said = mtplx(*arguments)
        assert (said.exit_code, "--trace-file" in said.stderr) == (2, True)
