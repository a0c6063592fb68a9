"""`mtplx batch`: order, resumption, retries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from whole.fake_broker import WORDS, FakeBroker, answer, chunks, done
from whole.harness import service

from mtplx.cli import batch
from mtplx.cli.batch import Batch, read_item
from mtplx.cli.main import main
from mtplx.client import Client
from mtplx.messages import Error, Message, Submit

TEXT = "".join(WORDS)


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("MTPLX_CONFIG", str(tmp_path / "config.toml"))


class Files:
    def __init__(self, folder: Path) -> None:
        self.jobs, self.results = folder / "jobs.jsonl", folder / "results.jsonl"

    def write(self, *jobs: object) -> None:
        self.jobs.write_text("".join(f"{job if isinstance(job, str) else json.dumps(job)}\n" for job in jobs))

    def run(self, front: str, *flags: str) -> Result:
        return CliRunner().invoke(
            main, ["batch", str(self.jobs), "-o", str(self.results), "--front", front, *flags]
        )

    def read(self) -> list[dict]:
        return [json.loads(line) for line in self.results.read_text().splitlines()]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_results_stand_in_the_order_of_the_jobs_and_carry_their_names(broker: FakeBroker, files: Files) -> None:
    files.write({"id": "a", "prompt": "one"}, "", *({"prompt": f"job {n}"} for n in range(80)))
    said = files.run(broker.endpoint)
    assert (said.exit_code, "81 jobs, 0 failed" in said.stderr) == (0, True)
    told = files.read()
    assert [one["line"] for one in told] == [1, *range(3, 83)]
    assert told[0]["id"] == "a"
    assert "id" not in told[1]
    assert {one["result"]["text"] for one in told} == {TEXT}


def test_a_bad_line_becomes_an_error_and_the_rest_goes_on(broker: FakeBroker, files: Files) -> None:
    deep = "[" * 100_000
    files.write("{", {"prompt": ""}, {"id": 5, "prompt": "x"}, {"prompt": "x" * 5000}, deep, {"prompt": "good"})
    said = files.run(broker.endpoint)
    assert (said.exit_code, "6 jobs, 5 failed" in said.stderr) == (1, True)
    told = files.read()
    assert [one.get("error", {}).get("field") for one in told] == ["line", "prompt", "id", "body", "line", None]
    assert told[3]["error"]["code"] == "E_TOO_LARGE"
    assert told[5]["result"]["text"] == TEXT


def test_a_second_run_goes_on_where_the_first_stopped(broker: FakeBroker, files: Files) -> None:
    files.write({"prompt": "one"}, {"prompt": "two"}, {"prompt": "three"})
    files.run(broker.endpoint)
    whole = files.results.read_bytes()
    lines = whole.splitlines(keepends=True)
    # Stopped in the middle of the second record.
    files.results.write_bytes(lines[0] + lines[1][:20])
    said = files.run(broker.endpoint)
    assert (said.exit_code, "1 were done before" in said.stderr) == (0, True)
    assert len(broker.of(Submit)) == 5
    assert [one["line"] for one in files.read()] == [1, 2, 3]
    assert "3 were done before" in files.run("ipc:///nowhere.sock").stderr


@pytest.mark.parametrize(
    ("jobs", "sentence"),
    [
        ([{"prompt": "one"}, {"prompt": "other"}], "Line 2"),
        ([{"prompt": "one"}], "2 results and"),
    ],
)
def test_a_changed_input_is_refused(broker: FakeBroker, files: Files, jobs: list, sentence: str) -> None:
    files.write({"prompt": "one"}, {"prompt": "two"})
    files.run(broker.endpoint)
    before = files.results.read_bytes()
    files.write(*jobs)
    said = files.run(broker.endpoint)
    assert said.exit_code == 2
    assert sentence in said.stderr
    assert files.results.read_bytes() == before


def test_a_file_that_holds_no_results_is_refused(broker: FakeBroker, files: Files) -> None:
    files.write({"prompt": "one"})
    files.results.write_text("my notes\n")
    said = files.run(broker.endpoint)
    assert said.exit_code == 2
    assert "no results file" in said.stderr
    assert str(files.results) in said.stderr
    assert files.results.read_text() == "my notes\n"


def failing(code: str, times: int):
    left = [times]

    def reply(broker: FakeBroker, submit: Submit) -> list[Message]:
        if not left[0]:
            return answer(broker, submit)
        left[0] -= 1
        refusal = code in ("E_QUEUE_FULL", "E_DRAINING")
        error = Error(code=code, message="Not now.", retryable=True, id=submit.id, retry_after_ms=20)
        return [error] if refusal else [broker.admit(submit), error]

    return reply


def test_a_lost_worker_is_tried_again_under_a_new_id(broker: FakeBroker, files: Files) -> None:
    broker.reply = failing("E_WORKER_LOST", 2)
    files.write({"prompt": "one"})
    assert files.run(broker.endpoint).exit_code == 0
    assert len({submit.id for submit in broker.of(Submit)}) == 3


def test_after_three_tries_the_error_stands(broker: FakeBroker, files: Files) -> None:
    broker.reply = failing("E_WORKER_LOST", 9)
    files.write({"prompt": "one"})
    assert files.run(broker.endpoint).exit_code == 1
    assert len(broker.of(Submit)) == 3
    assert files.read()[0]["error"] == {"code": "E_WORKER_LOST", "message": "Not now.", "retryable": True}


def test_a_full_line_is_waited_for_as_long_as_it_says(broker: FakeBroker) -> None:
    broker.reply = failing("E_QUEUE_FULL", 5)
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(round(seconds, 3))
        now[0] += seconds

    with Client(broker.endpoint) as client:
        items = (read_item(number, b'{"prompt": "x"}') for number in (1, 2))
        told = list(Batch(client, items, sleep=sleep, clock=lambda: now[0]).results())
    assert [one["line"] for one in told] == [1, 2]
    assert all("result" in one for one in told)
    assert [one for one in slept if one] == [0.02] * 5


def test_a_batch_larger_than_the_brokers_line_is_done_in_order(files: Files) -> None:
    with service("--queue-jobs", "4") as running:
        running.worker()
        files.write(*({"prompt": f"word{n} and more"} for n in range(60)))
        said = files.run(running.front)
    assert said.exit_code == 0, said.output
    assert [one["line"] for one in files.read()] == list(range(1, 61))


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('{"prompt": "x", "stop": [5]}', "stop[0]"),
        ('{"prompt": "x", "temperature": "x"}', "temperature"),
        ('{"prompt": "x", "temperature": Infinity}', "temperature"),
        ('{"prompt": "x", "top_p": NaN}', "top_p"),
        ('{"prompt": "x", "max_tokens": true}', "max_tokens"),
        ('{"prompt": "x", "logit_bias": null}', "logit_bias"),
        ('{"prompt": "x", "logit_bias": {"5": NaN}}', "logit_bias[5]"),
        ('{"prompt": "x", "json_schema": {}}', "json_schema"),
        ('{"prompt": "\\ud800"}', "prompt"),
        ('{"prompt": "x", "\\ud800": 1}', "\\ud800"),
        ('{"prompt": ' + 10_000 * "[" + 10_000 * "]" + "}", None),
        ('["prompt"]', "body"),
        ("5", "body"),
    ],
)
def test_a_line_that_is_no_job_is_one_refusal_with_its_field_and_sends_nothing(
    broker: FakeBroker, files: Files, line: str, field: str | None
) -> None:
    files.write(line, {"prompt": "good"})
    assert files.run(broker.endpoint).exit_code == 1
    bad, good = files.read()
    assert bad["error"]["code"] == "E_BAD_JOB"
    assert field is None or bad["error"]["field"] == field
    assert good["result"]["text"] == TEXT
    assert len(broker.of(Submit)) == 1
    assert "2 were done before" in files.run(broker.endpoint).stderr


def test_a_name_that_is_half_a_character_comes_back_as_it_was(broker: FakeBroker, files: Files) -> None:
    files.write('{"id": "\\ud800", "prompt": "one"}', {"id": "ß", "prompt": "two"})
    assert files.run(broker.endpoint).exit_code == 0
    assert [one["id"] for one in files.read()] == ["\ud800", "ß"]
    assert "ß".encode() in files.results.read_bytes()


def test_a_job_that_was_cancelled_from_outside_is_no_success(broker: FakeBroker, files: Files) -> None:
    broker.reply = lambda it, submit: [
        it.admit(submit),
        *chunks(submit.id)[:2],
        done(submit.id, WORDS[:2], outcome="cancelled"),
    ]
    files.write({"id": "a", "prompt": "one"})
    said = files.run(broker.endpoint)
    assert (said.exit_code, "1 failed" in said.stderr) == (1, True)
    (told,) = files.read()
    assert "result" not in told
    assert told["error"]["code"] == "cancelled"
    assert told["error"]["detail"] == {"tokens": 2, "text": "The sky "}
    assert len(broker.of(Submit)) == 1


def spoil(broker: FakeBroker, files: Files) -> None:
    """Six lines, the second, third and fifth failed, the sixth not yet run."""
    good = [{"prompt": f"job {n}"} for n in range(6)]
    files.write(*good)
    broker.reply = lambda it, submit: (
        failing("E_WORKER_LOST", 1)(it, submit)
        if any(name in submit.job for name in (b"job 1", b"job 2", b"job 4"))
        else answer(it, submit)
    )
    files.run(broker.endpoint)
    files.results.write_bytes(b"".join(files.results.read_bytes().splitlines(keepends=True)[:5]))
    assert ["error" in one for one in files.read()] == [False, True, True, False, True]
    broker.heard.clear()


def test_failed_jobs_stay_as_they_are_unless_they_are_to_be_tried_again(broker: FakeBroker, files: Files) -> None:
    spoil(broker, files)
    before = files.read()
    broker.reply = answer
    said = files.run(broker.endpoint)
    assert (said.exit_code, "--retry-failed" in said.stderr) == (1, True)
    assert files.read()[:5] == before
    assert len(broker.of(Submit)) == 1

    said = files.run(broker.endpoint, "--retry-failed")
    assert (said.exit_code, "6 jobs, 0 failed, 3 were done before" in said.stderr) == (0, True)
    after = files.read()
    assert [one["line"] for one in after] == [1, 2, 3, 4, 5, 6]
    assert all(one["result"]["text"] == TEXT for one in after)
    assert [after[0], after[3]] == [before[0], before[3]]
    assert len(broker.of(Submit)) == 4
    assert sorted(path.name for path in files.results.parent.glob("results*")) == ["results.jsonl"]
    assert "6 were done before" in files.run("ipc:///nowhere.sock", "--retry-failed").stderr


def test_a_retry_goes_on_with_what_was_never_run(broker: FakeBroker, files: Files) -> None:
    spoil(broker, files)
    broker.reply = answer
    assert files.run(broker.endpoint, "--retry-failed").exit_code == 0
    assert [one["line"] for one in files.read()] == [1, 2, 3, 4, 5, 6]
    assert len(broker.of(Submit)) == 4


def test_a_retry_that_is_stopped_keeps_every_result(
    broker: FakeBroker, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(broker, files)
    before = files.read()
    broker.reply = answer
    results = Batch.results

    def stopped(self: Batch) -> Iterator[dict]:
        yield next(results(self))
        raise KeyboardInterrupt

    monkeypatch.setattr(Batch, "results", stopped)
    assert files.run(broker.endpoint, "--retry-failed").exit_code == 130
    after = files.read()
    assert "result" in after[1]
    assert [after[0], *after[2:]] == [before[0], *before[2:]]
    monkeypatch.setattr(Batch, "results", results)
    assert files.run(broker.endpoint, "--retry-failed").exit_code == 0


@pytest.mark.parametrize("notes", ["my notes", "{", "a\nb\nlast", '{"line": 1}\nmore'])
def test_a_file_of_something_else_is_left_as_it_is(broker: FakeBroker, files: Files, notes: str) -> None:
    files.write({"prompt": "one"}, {"prompt": "two"})
    files.results.write_text(notes)
    said = files.run("ipc:///nowhere.sock" if notes == "{" else broker.endpoint)
    assert said.exit_code == (6 if notes == "{" else 2)
    assert files.results.read_text() == notes
    assert broker.heard == []


@pytest.mark.parametrize("name", ["jobs.jsonl", "linked.jsonl"])
def test_the_file_of_the_jobs_cannot_take_the_results(files: Files, name: str) -> None:
    files.jobs.write_text('{"prompt": "one"}\n{"prompt": "two"}')
    files.results = files.jobs.with_name(name)
    if name != "jobs.jsonl":
        files.results.hardlink_to(files.jobs)
    said = files.run("ipc:///nowhere.sock")
    assert (said.exit_code, "file of the jobs" in said.stderr) == (2, True)
    assert files.jobs.read_text() == '{"prompt": "one"}\n{"prompt": "two"}'


def test_a_torn_line_stays_where_the_other_lines_are_not_of_this_input(broker: FakeBroker, files: Files) -> None:
    files.write({"prompt": "one"}, {"prompt": "two"})
    files.run(broker.endpoint)
    torn = files.results.read_bytes()[:-20]
    files.results.write_bytes(torn)
    files.write({"prompt": "other"}, {"prompt": "two"})
    assert files.run(broker.endpoint).exit_code == 2
    assert files.results.read_bytes() == torn


def test_no_file_is_made_where_no_broker_answers(files: Files) -> None:
    files.write({"prompt": "one"})
    assert files.run("ipc:///nowhere.sock").exit_code == 6
    assert not files.results.exists()


def test_a_folder_that_is_not_there_is_one_sentence(broker: FakeBroker, files: Files) -> None:
    files.write({"prompt": "one"})
    files.results = files.results.parent / "nodir" / "x"
    said = files.run(broker.endpoint)
    assert (said.exit_code, "no folder" in said.stderr) == (2, True)
    assert "Traceback" not in said.output


def test_a_failed_line_may_be_repaired_and_is_run_again(broker: FakeBroker, files: Files) -> None:
    files.write({"prompt": "one"}, '{"promt": "two"}', {"prompt": ""}, {"prompt": "four"})
    assert files.run(broker.endpoint).exit_code == 1
    before = files.read()
    files.write({"prompt": "one"}, {"prompt": "two"}, {"prompt": ""}, {"prompt": "four"})
    said = files.run(broker.endpoint)
    assert (said.exit_code, "4 jobs, 1 failed, 3 were done before" in said.stderr) == (1, True)
    after = files.read()
    assert after[1]["result"]["text"] == TEXT
    assert after[1]["digest"] != before[1]["digest"]
    assert [after[0], *after[2:]] == [before[0], *before[2:]]


def test_a_file_of_the_users_beside_the_results_is_left_alone(broker: FakeBroker, files: Files) -> None:
    notes = files.results.with_name("results.jsonl.new")
    notes.write_text("mine")
    spoil(broker, files)
    broker.reply = answer
    assert files.run(broker.endpoint, "--retry-failed").exit_code == 0
    assert notes.read_text() == "mine"


def test_a_result_line_carries_logprobs_and_metadata(broker: FakeBroker, files: Files) -> None:
    broker.reply = lambda it, submit: [
        it.admit(submit),
        *(replace(chunk, logprobs=(((chunk.first, -0.5),),)) for chunk in chunks(submit.id)),
        done(submit.id),
    ]
    files.write({"prompt": "one", "logprobs": 1, "metadata": {"row": "7"}})
    assert files.run(broker.endpoint).exit_code == 0
    (told,) = files.read()
    assert told["result"]["logprobs"] == [[[n, -0.5]] for n in range(4)]
    assert told["result"]["metadata"] == {"row": "7"}


def test_a_log_is_told_how_far_it_is_now_and_then(
    broker: FakeBroker, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "REPORT_S", 0.0)
    files.write({"prompt": "one"}, {"prompt": ""})
    said = files.run(broker.endpoint)
    assert "1 of 2 jobs, 0 failed so far\n2 of 2 jobs, 1 failed so far\n" in said.stderr
