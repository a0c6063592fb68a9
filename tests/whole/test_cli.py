"""The command line against a fake broker, and the whole of it against a real one with a scripted worker."""

from __future__ import annotations

import json
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from whole.fake_broker import WORDS, FakeBroker, chunks, done
from whole.harness import service

from mtplx.cli import demo, pull, run, serve
from mtplx.cli.main import main
from mtplx.cli.ops import print_map
from mtplx.cli.options import load_settings
from mtplx.cli.signals import Signals, ctrl_c_by_sigterm
from mtplx.cli.spans import read_spans
from mtplx.errors import SettingsError
from mtplx.link import Link
from mtplx.messages import Bye, Cancel, Error, Submit
from mtplx.settings import SchedulerMode, Settings
from mtplx.wire import unpack_body

TEXT = "".join(WORDS)
JOB = "ab" * 16


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("MTPLX_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def mtplx(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, arguments, input=stdin)


def test_run_streams_the_answer_of_a_chat(broker: FakeBroker) -> None:
    said = mtplx(
        "run", "--front", broker.endpoint, "--system", "Be brief.", "--max-tokens", "9", "--stop", "x", "Hi"
    )
    assert (said.exit_code, said.stdout) == (0, TEXT + "\n")
    assert unpack_body(broker.wait_for(Submit).job, 4096) == {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "max_tokens": 9,
        "stop": ["x"],
    }


def test_run_reads_stdin_and_sends_it_raw(broker: FakeBroker) -> None:
    said = mtplx("--front", broker.endpoint, "run", "--raw", "--stats", "-", stdin="Once")
    assert said.exit_code == 0
    assert unpack_body(broker.wait_for(Submit).job, 4096) == {"prompt": "Once"}
    assert "4 tokens, stop, seed 7" in said.stderr
    assert "10.0 tokens/s" in said.stderr


def test_run_prints_the_whole_last_word_as_json(broker: FakeBroker) -> None:
    said = mtplx("run", "--front", broker.endpoint, "--json", "Hi")
    told = json.loads(said.stdout)
    assert (told["text"], told["ids"], told["finish_reason"]) == (TEXT, [0, 1, 2, 3], "stop")
    assert told["run"]["route"] == "serial_b1"


def test_ctrl_c_cancels_the_job_and_prints_its_last_word(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.reply = lambda it, submit: [it.admit(submit), *chunks(submit.id)[:2]]
    echo = click.echo

    def interrupt(text: str = "", **options: bool) -> None:
        echo(text, **options)
        if text == WORDS[1]:
            monkeypatch.setattr(click, "echo", echo)
            raise KeyboardInterrupt

    replies = broker._replies
    broker._replies = lambda message: (
        [done(message.id, WORDS[:2], outcome="cancelled")] if isinstance(message, Cancel) else replies(message)
    )
    monkeypatch.setattr(click, "echo", interrupt)
    said = mtplx("run", "--front", broker.endpoint, "Hi")
    assert (said.exit_code, said.stdout) == (130, "The sky \n")
    assert "cancelled after 2 tokens" in said.stderr


@pytest.mark.parametrize("words", ["none", "error"])
def test_ctrl_c_without_a_last_word_in_time_is_no_traceback(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    lost = [Error(code="E_WORKER_LOST", message="The worker died.", retryable=True)] if words == "error" else []
    broker.reply = lambda it, submit: [it.admit(submit), *chunks(submit.id)[:1]]
    replies = broker._replies
    broker._replies = lambda message: (
        [replace(one, id=message.id) for one in lost] if isinstance(message, Cancel) else replies(message)
    )
    echo = click.echo

    def interrupt(text: str = "", **options: bool) -> None:
        echo(text, **options)
        if text == WORDS[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(click, "echo", interrupt)
    monkeypatch.setattr(run, "LAST_WORD_S", 0.1 if not lost else 10.0)
    said = mtplx("run", "--front", broker.endpoint, "Hi")
    assert said.exit_code == 130
    assert ("The worker died" if lost else "no last word") in said.stderr
    assert "Traceback" not in said.output
    broker.wait_for(Cancel)


def test_a_failing_job_is_one_sentence_and_exit_code_1(broker: FakeBroker) -> None:
    broker.reply = lambda it, submit: [
        it.admit(submit),
        Error(code="E_NUMERIC", message="The model gave NaN.", retryable=False, id=submit.id),
    ]
    said = mtplx("run", "--front", broker.endpoint, "Hi")
    assert (said.exit_code, said.stderr) == (1, "mtplx: The model gave NaN.\n")


def test_an_error_after_half_an_answer_begins_a_line_of_its_own(broker: FakeBroker) -> None:
    broker.reply = lambda it, submit: [
        it.admit(submit),
        *chunks(submit.id)[:2],
        Error(
            code="E_WORKER_LOST",
            message="The worker died while it ran this job; submit it again under a new id.",
            retryable=True,
            id=submit.id,
        ),
    ]
    said = mtplx("run", "--front", broker.endpoint, "Hi")
    assert (said.exit_code, said.stdout) == (1, "The sky \n")
    assert said.stderr == "mtplx: The worker died while it ran this job; run it again.\n"


def test_a_full_line_says_when_to_come_back(broker: FakeBroker) -> None:
    broker.reply = lambda _, submit: [
        Error(
            code="E_QUEUE_FULL",
            message="The line is full: 4 jobs wait, the limit is 4. Submit again after retry_after_ms.",
            retryable=True,
            id=submit.id,
            retry_after_ms=250,
        )
    ]
    said = mtplx("run", "--front", broker.endpoint, "Hi")
    assert (said.exit_code, "Submit again in 250 ms." in said.stderr) == (1, True)


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_job_that_somebody_else_cancelled_is_told(broker: FakeBroker, flags: tuple[str, ...]) -> None:
    broker.reply = lambda it, submit: [
        it.admit(submit),
        *chunks(submit.id)[:2],
        done(submit.id, WORDS[:2], outcome="cancelled"),
    ]
    said = mtplx("run", "--front", broker.endpoint, *flags, "Hi")
    assert (said.exit_code, said.stderr) == (1, "cancelled after 2 tokens\n")
    assert "The sky " in said.stdout


@pytest.mark.parametrize("command", ["run", "batch"])
def test_sigterm_says_goodbye_as_ctrl_c_does(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    def reply(it: FakeBroker, submit: Submit) -> list:
        if not it.admitted:
            os.kill(os.getpid(), signal.SIGTERM)
        return [it.admit(submit)]

    broker.reply = reply
    monkeypatch.setattr(run, "LAST_WORD_S", 0.1)
    (tmp_path / "jobs.jsonl").write_text('{"prompt": "x"}\n')
    rest = ("Hi",) if command == "run" else (str(tmp_path / "jobs.jsonl"), "-o", str(tmp_path / "results"))
    before = signal.getsignal(signal.SIGTERM)
    said = mtplx(command, "--front", broker.endpoint, *rest)
    assert said.exit_code == 130
    broker.wait_for(Bye)
    assert signal.getsignal(signal.SIGTERM) is before


def test_nohup_keeps_its_meaning() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        for guard in (ctrl_c_by_sigterm(), Signals()):
            with guard:
                assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
                assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_stdin_that_is_no_text_is_told(broker: FakeBroker) -> None:
    said = CliRunner().invoke(main, ["--front", broker.endpoint, "run", "-"], input=b"caf\xe9 au lait")
    assert (said.exit_code, "stdin is not UTF-8" in said.stderr) == (2, True)
    assert broker.of(Submit) == []


def test_help_shows_the_defaults() -> None:
    said = " ".join(mtplx("serve", "--help").stdout.split())
    assert "[default: hyper]" in said
    assert "[default: 25.0]" in said
    assert "[default: ~/" in said


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--scheduler-mode", "wide"], 2, "serial, hyper"),
        (["serve", "--decode-batch-max", "4"], 2, "--decode-batch-max 4 is refused in hyper mode"),
        (["--batching-preset", "agent"], 2, "batches several"),
        (["run", "--raw", "--system", "x", "Hi"], 2, "--system needs the chat template"),
        (["run"], 2, "`-` reads it from stdin"),
        (["run", ""], 2, "The prompt is empty."),
        (["run", "-"], 2, "The prompt is empty."),
        (["run", "--temperature", "-1", "Hi"], 1, "temperature must be"),
        (["cancel", "xyz"], 2, "is no job id"),
        (["cancel", "12"], 1, "No jobs begin with 12"),
        (["nonsense"], 2, "No such command"),
    ],
)
def test_wrong_use_is_told_without_a_traceback(
    broker: FakeBroker, arguments: list[str], code: int, sentence: str
) -> None:
    said = mtplx("--front", broker.endpoint, *arguments)
    assert said.exit_code == code
    assert sentence in said.stderr
    assert "Traceback" not in said.output


@pytest.mark.parametrize("endpoint", ["ipc", "tcp", "dead"])
def test_no_broker_is_exit_code_6_and_told_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    waited: list[float] = []
    patience = Link.answer_patience
    monkeypatch.setattr(
        Link, "answer_patience", lambda self, what, limit: waited.append(limit) or patience(self, what, 0.1)
    )
    front = f"ipc://{tmp_path}/front.sock"
    if endpoint == "tcp":
        with socket.create_server(("127.0.0.1", 0)) as free:
            front = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    elif endpoint == "dead":
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(tmp_path / "front.sock"))
    said = mtplx("health", "--front", front)
    assert said.exit_code == 6
    assert "mtplx serve" in said.stderr
    assert waited == [1.0]


def test_a_broker_that_is_slow_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broker: FakeBroker
) -> None:
    waited: list[float] = []
    patience = Link.answer_patience
    monkeypatch.setattr(
        Link, "answer_patience", lambda self, what, limit: waited.append(limit) or patience(self, what, limit)
    )
    assert mtplx("health", "--front", broker.endpoint).exit_code == 0
    assert waited == [10.0, 10.0]


def test_health_jobs_and_cancel_print_what_the_broker_says(broker: FakeBroker) -> None:
    broker.health = {"scheduler": {"mode": "hyper", "hyper": {"width": 1}}, "uptime_s": 1.5}
    broker.jobs[JOB] = {"id": JOB, "state": "running", "tokens": 3}
    front = ("--front", broker.endpoint)
    assert json.loads(mtplx("health", "--json", *front).stdout) == broker.health
    assert "width" in mtplx("health", *front).stdout
    assert json.loads(mtplx("jobs", "--json", *front).stdout) == {"jobs": [broker.jobs[JOB]]}
    assert JOB in mtplx("jobs", *front).stdout
    said = mtplx("cancel", "ABAB", *front)
    assert (said.exit_code, said.stdout) == (0, f"{JOB} running\n")
    assert broker.wait_for(Cancel).id == bytes.fromhex(JOB)


def test_texts_of_other_producers_do_not_move_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_map(
        {
            "job": {"prompt": "a\x1b]52;c;AAAA\x07b", "metadata": {"\x9b2J": "\u202ereversed"}},
            "text": "one\ntwo ü 🌈",
        }
    )
    shown = capsys.readouterr().out
    assert [one for one in shown if not one.isprintable() and one != "\n"] == []
    assert "a\\x1b]52" in shown
    assert "one\ntwo ü 🌈" in shown


def test_settings_without_a_command_mean_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Settings] = []
    monkeypatch.setattr(serve, "serve_until_told", lambda settings, say: served.append(settings) or 0)
    assert mtplx("--scheduler-mode", "serial").exit_code == 0
    assert mtplx("--scheduler-mode", "hyper", "serve", "--queue-jobs", "7").exit_code == 0
    assert [one.scheduler_mode for one in served[:2]] == [SchedulerMode.SERIAL, SchedulerMode.HYPER]
    assert served[1].queue_jobs == 7
    assert mtplx("serve", "--http", "off").exit_code == 0
    assert [one.http for one in served] == ["auto", "auto", "off"]
    assert "Usage" in mtplx().stdout
    assert len(served) == 3


def test_flags_after_the_command_win_over_those_before_it() -> None:
    settings = load_settings({"queue_jobs": "3", "model": None}, {"queue_jobs": "9", "model": "m"})
    assert (settings.queue_jobs, settings.model) == (3, "m")


def test_pull_without_the_workers_libraries_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull.importlib.util, "find_spec", lambda _: None)
    said = mtplx("pull", "smollm2-135m")
    assert said.exit_code == 2
    assert "mtplx-line[worker]" in said.stderr


def test_the_commands_work_on_a_real_broker() -> None:
    with service("--beat-s", "0.2") as running:
        running.worker()
        front = ("--front", running.front)
        told = json.loads(mtplx("run", "--json", "--raw", *front, "one two three").stdout)
        assert told["finish_reason"] == "stop"
        assert told["usage"]["completion_tokens"] == len(told["ids"])
        listed = json.loads(mtplx("jobs", "--json", *front).stdout)["jobs"]
        assert [job["id"] for job in listed] == [told["id"]]
        assert mtplx("cancel", told["id"][:4], *front).stdout.startswith(f"{told['id']} ended")
        assert mtplx("cancel", "0" * 32, *front).exit_code == 1
        assert json.loads(mtplx("health", "--json", *front).stdout)["worker"]["state"] == "ready"


def test_the_spans_of_a_trace_file_become_trees(tmp_path: Path) -> None:
    def span(name: str, own: str, parent: str, start: int) -> dict:
        return {
            "name": name,
            "traceId": "t",
            "spanId": own,
            "parentSpanId": parent,
            "startTimeUnixNano": str(start),
            "endTimeUnixNano": str(start + 5),
            "attributes": [{"key": "mtplx.admit_seq", "value": {"intValue": "4"}}],
        }

    lines = [
        {
            "resourceSpans": [
                {"scopeSpans": [{"spans": [span("chat m", "c", "p", 3), span("queue q", "q", "p", 1)]}]}
            ]
        },
        {"resourceSpans": [{"scopeSpans": [{"spans": [span("process q", "p", "elsewhere", 1)]}]}]},
    ]
    path = tmp_path / "spans.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (root,) = read_spans(path).roots
    assert root.name == "process q"
    assert root.attributes == {"mtplx.admit_seq": 4}
    assert sorted(child.name for child in root.children) == ["chat m", "queue q"]


def test_the_demo_names_what_is_missing() -> None:
    producers = [demo.Producer(name, job, Settings()) for name, job in demo.PRODUCERS.items()]
    found = demo.faults(producers, [])
    assert len([fault for fault in found if "no last word" in fault]) == 3
    assert len([fault for fault in found if "no process span" in fault]) == 3


def test_an_unknown_setting_of_the_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("colour = 1\n")
    with pytest.raises(SettingsError, match="Unknown setting colour"):
        load_settings({})
    assert mtplx("health").exit_code == 2
