"""Logs: one event a line whatever is in it, with its job, quiet by default, never a prompt, of bounded size."""

import json
import logging
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whole.harness import service

from mtplx import logs
from mtplx import messages as m
from mtplx.errors import BadJobError, LockedError, SettingsError
from mtplx.settings import Settings

SECRET = "the prompt that nobody may read"
FORGED = "x\n2026-01-01T00:00:00.000+00:00 error mtplx.broker forged\r\x1b[31m\u2028\u202e\x85\0"


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    root, found = logging.getLogger(), logging.getLogger("mtplx.test")
    before = (root.handlers[:], root.level, logging.raiseExceptions)
    root.handlers, hook = [], threading.excepthook
    yield found
    for handler in root.handlers:
        handler.close()
    root.handlers, logging.raiseExceptions = before[0], before[2]
    root.setLevel(before[1])
    for name in ("mtplx", "worker"):
        logging.getLogger(name).setLevel(logging.NOTSET)
    logging.captureWarnings(capture=False)
    threading.excepthook = hook


def lines_of(folder: Path, form: str, log: logging.Logger, say) -> list[str]:
    logs.set_up(Settings(log_dir=folder, log_format=form, log_level="info"), "mtplx-test")
    say(log)
    return (folder / "mtplx-test.log").read_text().split("\n")[:-1]


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("where", ["message", "argument", "error", "logger"])
def test_nothing_that_comes_from_outside_makes_a_line_or_speaks_to_the_terminal(tmp_path, log, form, where):
    def say(log):
        match where:
            case "message":
                log.warning(FORGED)
            case "argument":
                log.warning("a key named %s", FORGED)
            case "error":
                try:
                    raise OSError(FORGED)
                except OSError:
                    log.exception("failed")
            case "logger":
                log.getChild(FORGED).warning("x")

    (line,) = lines_of(tmp_path / "logs", form, log, say)
    assert line.isprintable()
    assert "forged" in line
    if form == "json":
        assert "forged" in json.dumps(json.loads(line))


@given(st.text())
def test_printable_text_stays_and_all_else_is_one_printable_line(text):
    shown = logs.printable(text)
    assert shown.isprintable()
    assert shown == text or not text.isprintable()
    assert shown.encode("utf-8").decode() == shown


def test_a_line_has_an_end(tmp_path, log):
    for form in ("text", "json"):
        (line,) = lines_of(tmp_path / form, form, log, lambda log: log.warning("x" * 10**6))
        assert len(line) < 3 * logs.LINE_CHARACTERS


@pytest.mark.parametrize("form", ["text", "json"])
def test_errors_tell_type_and_place_and_quote_no_text_that_was_worked_on(tmp_path, log, form):
    def say(log):
        for kind in (ValueError, KeyError, lambda text: BadJobError(text, field="prompt")):
            try:
                try:
                    raise kind(SECRET)
                except Exception as error:
                    raise RuntimeError("the device is gone") from error
            except RuntimeError:
                log.exception("failed", extra=logs.of_job(b"\x3f" * 16))

    lines = lines_of(tmp_path / "logs", form, log, say)
    assert len(lines) == 3
    assert SECRET not in "".join(lines)
    for line, kind in zip(lines, ("ValueError", "KeyError", "BadJobError"), strict=True):
        assert all(
            word in line for word in (kind, "RuntimeError (the device is gone)", "test_logs.py:", "3f" * 16)
        )


def test_a_thread_that_fails_is_one_line_too(tmp_path, log):
    def say(_log):
        thread = threading.Thread(target={}.pop, args=(SECRET,), name=FORGED)
        thread.start()
        thread.join()

    (line,) = lines_of(tmp_path / "logs", "text", log, say)
    assert line.isprintable()
    assert "KeyError" in line
    assert SECRET not in line


def test_libraries_below_are_heard_only_when_something_is_wrong(tmp_path, log):
    def say(log):
        logging.getLogger("tokenizers").debug(SECRET)
        logging.getLogger("tokenizers").info(SECRET)
        logging.getLogger("tokenizers").warning("old file")
        log.info("ours")

    lines = lines_of(tmp_path / "logs", "text", log, say)
    assert [line.split(" ", 1)[1] for line in lines] == ["warning tokenizers old file", "info mtplx.test ours"]


def test_a_library_with_a_handler_of_its_own_speaks_through_our_log(tmp_path, log, capsys):
    library = logging.getLogger("a.library")
    library.addHandler(logging.StreamHandler())
    library.propagate = False
    logs.take_over("a.library")
    (line,) = lines_of(tmp_path / "logs", "text", log, lambda _: library.warning("old\nfile"))
    assert line.endswith("warning a.library old\\nfile")
    assert capsys.readouterr().err == ""


def test_files_are_bounded_private_and_written_on_after_each_turn(tmp_path, log, monkeypatch):
    monkeypatch.setattr(logs, "FILE_BYTES", 2000)
    before = os.umask(0)
    try:
        lines = lines_of(tmp_path / "logs", "text", log, lambda log: [log.warning("%05d", n) for n in range(500)])
    finally:
        os.umask(before)
    assert lines[-1].endswith("00499")
    made = sorted((tmp_path / "logs").iterdir())
    assert len(made) == logs.OLD_FILES + 1
    assert all(file.stat().st_size <= 2000 and stat.S_IMODE(file.stat().st_mode) == 0o600 for file in made)


def test_a_log_that_cannot_be_written_costs_lines_and_nothing_else(tmp_path, log, capfd):
    lines_of(tmp_path / "logs", "text", log, lambda log: log.warning("x"))
    (handler,) = logging.getLogger().handlers
    handler.stream.close()
    handler.stream = open("/dev/full", "w")  # noqa: PTH123, SIM115
    log.warning("y")
    assert capfd.readouterr().err == ""
    handler.stream = None


def test_a_log_folder_that_is_open_to_others_or_no_folder_is_refused(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "file").touch()
    for place in ("open", "file"):
        with pytest.raises(SettingsError, match="--log-dir"):
            logs.set_up(Settings(log_dir=tmp_path / place), "mtplx-test")


def test_stderr_that_launchd_appends_to_is_emptied_when_it_has_grown(tmp_path, monkeypatch):
    grown = tmp_path / "err"
    for size, left in ((logs.STDERR_BYTES, logs.STDERR_BYTES), (logs.STDERR_BYTES + 1, 0)):
        grown.write_bytes(b"x" * size)
        with grown.open("a") as file:
            monkeypatch.setattr(logs.sys, "__stderr__", file)
            logs.bound_stderr()
            assert grown.stat().st_size == left
            file.write("more")
        assert grown.stat().st_size == left + 4, "the writer goes on at the end"


def run_jobs(*flags: str) -> tuple[list[str], bytes]:
    """What a broker logs of a job that ends, one that is refused, and one whose worker dies."""
    with service(*flags) as running:
        running.worker()
        producer = running.producer()
        good = producer.submit(prompt=SECRET)
        assert isinstance(producer.last_word(good), m.Done)
        producer.submit(prompt=SECRET, h={"x-note": FORGED})
        bad = producer.submit(prompt=SECRET, max_tokens=-1)
        assert isinstance(producer.last_word(bad), m.Error)
        lost = producer.submit(prompt=SECRET, script={"tokens": 9, "fault": "exit"})
        running.programs[-1].ended()
        running.worker()
        running.programs[-1].ended()
        producer.last_word(lost)
        return running.broker.said().splitlines(), good


def test_a_job_is_followed_by_its_id_and_its_prompt_stands_nowhere():
    lines, good = run_jobs("--log-level", "debug", "--log-format", "json")
    events = [json.loads(line) for line in lines]
    assert SECRET not in "".join(lines)
    assert "forged" not in "".join(lines)
    of_good = [one["message"].split()[0] for one in events if one.get("job") == good.hex()]
    assert of_good == ["waiting", "dispatched", "first_token", "ended"]
    assert any(one["message"].startswith("refused code=E_BAD_JOB") for one in events)
    assert any("outcome=poison" in one["message"] for one in events)


def test_by_default_only_what_is_wrong_is_told():
    lines, _ = run_jobs()
    assert [line.split(" ", 1)[1] for line in lines] == ["warning mtplx.broker the worker ended or crashed"] * 2


def test_an_expected_error_is_one_line_on_stderr():
    with service() as running:
        second = running.start_broker()
        second.ended()
        (line,) = second.said().splitlines()
    assert line.startswith("mtplx-broker: ")
    assert LockedError.__name__ not in line
