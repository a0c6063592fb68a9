"""The real worker with drafts behind the real broker: kills, cancels and wishes show in no answer and in no later job."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tiny_models import Kind, make_llama
from whole.harness import ROOT, Producer, Program, Service, check_stream, environment, service
from whole.test_real_worker import LOAD_S, wait_for_worker

from mtplx import messages as m
from mtplx import wire
from mtplx.settings import Settings
from worker.speculation.build import probe_rows

QUICK = ("--beat-s", "0.1", "--dead-s", "5")
MEMORY = "8MB"
# Much of the answer stands in the text before, and much does not.
COPIES: dict[str, Any] = {
    "token_ids": [20, 21, 22] * 6,
    "logit_bias": {"20": 60.0, "21": 60.0, "22": 60.0, "1": -1000.0},
    "temperature": 1.0,
    "repetition_penalty": 1.1,
    "logprobs": 2,
    "seed": 3,
    "max_tokens": 1500,
}
PROBE = {**COPIES, "max_tokens": 60, "cache": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a smaller one, a worker that believes a table in which rows are free."""
    folder = tmp_path_factory.mktemp("drafts")
    for name, kind in (("model", Kind(context=2048)), ("small", Kind(context=2048, layers=1))):
        (folder / name).mkdir()
        make_llama(folder / name, kind)
    (folder / "timed_worker.py").write_text(
        "from worker.speculation.planner import Planner\n"
        "from worker.__main__ import main\n"
        "told = Planner.told\n"
        "Planner.told = lambda self, plan, accepted, ms, *more: told(self, plan, accepted, 0.0, *more)\n"
        "main()\n"
    )
    seconds = count(0, 10)
    found = probe_rows(
        Settings(model=str(folder / "model"), cache_dir=folder / "cache", kv_memory=MEMORY),
        lambda: float(next(seconds)),
    )
    assert len(set(found.ms[0])) == 1
    return folder


def start(running: Service, folder: Path, draft: str) -> Program:
    flags = ("--model", str(folder / "model"), "--cache-dir", str(folder / "cache"), "--kv-memory", MEMORY, *QUICK)
    program = Program(
        "timed_worker", "--run-dir", str(running.run), *flags, "--draft", draft.replace("FOLDER", str(folder)),
        env=environment(PYTHONPATH=f"{ROOT}:{folder}"),
    )  # fmt: skip
    running.programs.append(program)
    wait_for_worker(running, program)
    return program


ids = (b"%016x" % number for number in count())


def submitted(producer: Producer, fields: dict[str, Any]) -> bytes:
    job = next(ids)
    producer.say(m.Submit(job, wire.pack_body(fields)))
    return job


def answered(producer: Producer, fields: dict[str, Any]) -> m.Done:
    job = submitted(producer, fields)
    producer.last_word(job, LOAD_S)
    word = check_stream(producer, job)
    assert isinstance(word, m.Done), word
    return word


def same(one: m.Done, other: m.Done) -> bool:
    words = [(word.text, word.sha256, word.outcome, word.usage["completion_tokens"]) for word in (one, other)]
    return words[0] == words[1]


def logprobs(producer: Producer, job: bytes) -> list[Any]:
    return [pairs for one in producer.about(job) if isinstance(one, m.Chunk) for pairs in one.logprobs or ()]


def killed(folder: Path, draft: str, kills: int, tokens: int) -> None:
    fields = {**COPIES, "max_tokens": tokens}
    with service(*QUICK) as running:
        worker = start(running, folder, draft)
        producer = running.producer()
        plain = submitted(producer, {**fields, "speculation": "off"})
        wanted = producer.last_word(plain, LOAD_S)
        assert isinstance(wanted, m.Done), wanted
        assert wanted.run["route"] == "serial_b1"
        job = submitted(producer, fields)
        for _ in range(kills):
            producer.expect(m.Chunk, job, LOAD_S)
            wait_for_rows(running)
            worker.send(signal.SIGKILL)
            worker.ended()
            worker = start(running, folder, draft)
        producer.last_word(job, LOAD_S)
        done = check_stream(producer, job)
        assert isinstance(done, m.Done), done
        assert same(done, wanted)
        assert logprobs(producer, job) == logprobs(producer, plain)
        assert (done.run["attempt"], done.run["route"]) == (1 + kills, "hyper_width")
        assert done.run["speculation"]["rows_committed"] > 0


def wait_for_rows(running: Service) -> None:
    """Until a forward of the job that runs had more rows than one."""
    asker, ends = running.producer(), time.monotonic() + LOAD_S
    while asker.health()["scheduler"]["hyper"]["width"] < 2:
        assert time.monotonic() < ends, "no forward had more rows than one"
    asker.socket.close()


def test_a_worker_killed_in_a_job_with_drafts_does_not_show_in_the_answer(folder: Path) -> None:
    killed(folder, "ngram", 1, 500)


@pytest.mark.prove
@pytest.mark.parametrize("draft", ["ngram", "model:FOLDER/small", "model:FOLDER/model"])
def test_workers_killed_one_after_the_other_in_a_job_with_drafts_do_not_show(folder: Path, draft: str) -> None:
    killed(folder, draft, 4, 1500)


@pytest.fixture(scope="module")
def line(folder: Path) -> Iterator[Service]:
    with service(*QUICK) as running:
        start(running, folder, "ngram")
        yield running


def cancelled_jobs(line: Service, cancels: int) -> None:
    luck, producer = random.Random(cancels), line.producer()
    wanted = answered(producer, {**PROBE, "speculation": "off"})
    first = answered(producer, PROBE)
    assert same(first, wanted)
    assert first.run["speculation"]["rows_committed"] > 10
    rows = producer.health()["scheduler"]["hyper"]["width_stats"]["self_spec_rows_committed"]
    for number in range(cancels):
        job = submitted(producer, {**COPIES, "speculation": luck.choice(("auto", "auto", "off"))})
        for _ in range(luck.choice((0, 0, 1, 2, 5, 40))):
            producer.expect(m.Chunk, job, LOAD_S)
        producer.say(m.Cancel(job))
        word = producer.last_word(job, LOAD_S)
        assert word.outcome == "cancelled", word
        rows += word.run["speculation"].get("rows_committed", 0)
        if number % 5 == 4:
            probe = answered(producer, PROBE)
            assert same(probe, wanted)
            assert probe.run["speculation"] == first.run["speculation"], "nothing of other jobs is in it"
            rows += probe.run["speculation"]["rows_committed"]
    hyper = producer.health()["scheduler"]["hyper"]
    assert (hyper["active"], hyper["queue_depth"]) == (0, 0)
    assert hyper["width_stats"]["self_spec_rows_committed"] == rows
    producer.socket.close()


def test_jobs_with_drafts_that_are_cancelled_anywhere_leave_the_next_ones_as_they_were(line: Service) -> None:
    cancelled_jobs(line, 20)


@pytest.mark.prove
def test_three_hundred_cancels_leave_the_drafts_of_the_next_job_as_they_were(line: Service) -> None:
    cancelled_jobs(line, 300)
