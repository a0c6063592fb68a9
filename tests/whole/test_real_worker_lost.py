"""A stream of the real worker lives through the death of workers and of the broker: the trajectory of an undisturbed run."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_llama
from whole.harness import Producer, check_stream, service
from whole.test_real_worker import LOAD_S, start_worker

from mtplx import messages as m
from mtplx import wire

QUICK = ("--beat-s", "0.2", "--dead-s", "2")
FIELDS = {"prompt": "the old oak tree", "max_tokens": 300, "logit_bias": {"1": -1000}, "seed": 5}
JOBS: dict[str, dict[str, Any]] = {
    "greedy": FIELDS,
    "sampled": {
        **FIELDS,
        "temperature": 0.9,
        "repetition_penalty": 1.2,
        "penalty_window": 0,
        "stop": ["never so"],
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("tiny"))


def submitted(producer: Producer, fields: dict[str, Any], job: bytes) -> bytes:
    producer.say(m.Submit(job, wire.pack_body(fields)))
    return job


def undisturbed(model: Path, fields: dict[str, Any]) -> m.Done:
    with service() as running:
        start_worker(running, model)
        producer = running.producer()
        word = producer.last_word(submitted(producer, fields, b"u" * 16), LOAD_S)
        assert isinstance(word, m.Done), word
        return word


def several(producer: Producer, job: bytes, tokens: int) -> None:
    """Read until that many more tokens came."""
    until = sum(one.n for one in producer.about(job) if isinstance(one, m.Chunk)) + tokens
    while sum(one.n for one in producer.about(job) if isinstance(one, m.Chunk)) < until:
        producer.expect(m.Chunk, job, LOAD_S)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param("greedy", signal.SIGKILL, id="greedy-killed"),
        pytest.param("sampled", signal.SIGSTOP, id="sampled-stopped"),
        pytest.param("greedy", signal.SIGSTOP, id="greedy-stopped", marks=pytest.mark.prove),
        pytest.param("sampled", signal.SIGKILL, id="sampled-killed", marks=pytest.mark.prove),
    ],
)
def test_the_stream_goes_on_with_the_next_worker_as_if_nothing_had_happened(
    model: Path, name: str, how: signal.Signals
) -> None:
    wanted = undisturbed(model, JOBS[name])
    with service(*QUICK) as running:
        producer = running.producer()
        worker = start_worker(running, model, *QUICK)
        job = submitted(producer, JOBS[name], b"d" * 16)
        for tokens in (7, 40):
            several(producer, job, tokens)
            worker.send(how)
            assert worker.ended() == -signal.SIGKILL
            worker = start_worker(running, model, *QUICK)
        assert producer.last_word(job, LOAD_S).sha256 == wanted.sha256
        done = check_stream(producer, job)
        assert (done.text, done.outcome, done.usage) == (wanted.text, wanted.outcome, wanted.usage)
        assert done.run["attempt"] == 3


@pytest.mark.parametrize("name", ["sampled", pytest.param("greedy", marks=pytest.mark.prove)])
def test_the_stream_goes_on_after_a_restart_of_the_broker_on_the_same_worker(model: Path, name: str) -> None:
    wanted = undisturbed(model, JOBS[name])
    with service(*QUICK) as running:
        producer = running.producer()
        worker = start_worker(running, model, *QUICK)
        job = submitted(producer, JOBS[name], b"b" * 16)
        for tokens in (7, 40):
            several(producer, job, tokens)
            running.broker.send(signal.SIGKILL)
            running.broker.ended()
            producer.drain()
            running.broker = running.start_broker()
            successor = running.answers()
            successor.log[:0] = producer.log
            producer = successor
            heard = [one for one in producer.about(job) if isinstance(one, m.Chunk)]
            producer.say(m.Resume(job, len(heard), sum(one.n for one in heard)))
        assert producer.last_word(job, LOAD_S).sha256 == wanted.sha256
        done = check_stream(producer, job)
        assert (done.text, done.outcome) == (wanted.text, wanted.outcome)
        assert done.usage["completion_tokens"] == wanted.usage["completion_tokens"] == 300
        assert worker.process.poll() is None
