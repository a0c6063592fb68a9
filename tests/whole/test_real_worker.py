"""The real worker on a tiny model behind the real broker: processes, sockets, MLX."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_models import Kind, make_llama
from whole.harness import LIMIT_S, ROOT, Producer, Program, Service, environment, service

from mtplx import messages as m
from mtplx import wire
from mtplx.errors import Exit

LOAD_S = 60.0
CONTEXT = 512


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("tiny"), Kind(context=CONTEXT))


@pytest.fixture(scope="module")
def line(model: Path) -> Iterator[Service]:
    with service() as running:
        start_worker(running, model)
        yield running


def start_worker(running: Service, model: Path, *flags: str, module: str = "worker") -> Program:
    program = Program(module, "--run-dir", str(running.run), "--model", str(model), *flags)
    running.programs.append(program)
    wait_for_worker(running, program)
    return program


def wait_for_worker(running: Service, program: Program) -> None:
    asker = running.producer()
    ends = time.monotonic() + LOAD_S
    while asker.health()["worker"].get("pid") != program.pid:
        assert program.process.poll() is None, program.said()
        assert time.monotonic() < ends, "the worker was not accepted"
    asker.socket.close()


def ask(producer: Producer, **fields: object) -> m.Done | m.Error:
    job = b"%016x" % ask.count
    ask.count += 1
    producer.say(m.Submit(job, wire.pack_body(fields)))
    return producer.last_word(job, LOAD_S)


ask.count = 0


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("max_tokens", {"prompt": "fox", "max_tokens": 0}),
        ("max_tokens", {"prompt": "fox", "max_tokens": -5}),
        ("max_tokens", {"prompt": "fox", "max_tokens": None}),
        ("max_tokens", {"prompt": "fox", "max_tokens": True}),
        ("max_tokens", {"prompt": "fox", "max_tokens": 2**63}),
        ("prompt", {"prompt": ""}),
        ("token_ids", {"token_ids": []}),
        ("messages", {"messages": []}),
        ("stop[0]", {"prompt": "fox", "stop": [5]}),
        ("temperature", {"prompt": "fox", "temperature": "x"}),
        ("temperature", {"prompt": "fox", "temperature": float("inf")}),
        ("temperature", {"prompt": "fox", "temperature": float("nan")}),
        ("logit_bias", {"prompt": "fox", "logit_bias": None}),
        ("logit_bias[3]", {"prompt": "fox", "logit_bias": {"3": float("nan")}}),
        ("logit_bias", {"prompt": "fox", "logit_bias": {"999999": 1.0}}),
        ("token_ids", {"token_ids": [1, 100000]}),
        ("response_format", {"prompt": "fox", "response_format": {"type": "json"}}),
        ("messages", {"messages": [{"role": "oracle", "content": "speak"}]}),
        ("prompt", {"prompt": "fox " * 600}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_job_is_refused_by_field_and_the_worker_goes_on(line: Service, field: str, fields: dict) -> None:
    """Each of these ended or fooled a comparable server; here the next job works on the same worker."""
    producer = line.producer()
    pid = producer.health()["worker"]["pid"]

    refused = ask(producer, **fields)
    answer = ask(producer, prompt="the quick brown", max_tokens=3)

    assert (refused.code, refused.field) == ("E_BAD_JOB", field)
    assert isinstance(answer, m.Done)
    assert producer.health()["worker"]["pid"] == pid


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(line: Service) -> None:
    producer = line.producer()
    for length, fits in ((CONTEXT - 1, True), (CONTEXT, False), (CONTEXT + 1, False)):
        word = ask(producer, token_ids=[5] * length, max_tokens=4)
        assert isinstance(word, m.Done) is fits
        if fits:
            assert (word.usage["completion_tokens"], word.outcome) == (1, "length")
            assert word.run["max_tokens_used"] == 1
        else:
            assert word.detail == {"prompt_tokens": length, "context": CONTEXT}


def test_one_seed_gives_one_text_and_no_seed_gives_another_each_time(line: Service) -> None:
    producer = line.producer()
    fields = {"prompt": "the lazy dog", "max_tokens": 12, "temperature": 1.0}
    first = ask(producer, **fields, seed=11)
    between = ask(producer, **fields)
    again = ask(producer, **fields, seed=11)
    other = ask(producer, **fields)
    assert first.sha256 == again.sha256
    assert (first.seed, again.seed) == (11, 11)
    assert between.seed != other.seed
    assert ask(producer, **fields, seed=between.seed).sha256 == between.sha256


def test_health_counts_what_jobs_reuse_of_each_other(line: Service) -> None:
    producer = line.producer()
    before = producer.health()["worker"]["prefix"]
    words = [
        ask(producer, prompt="the quick brown fox " * 12, max_tokens=2, cache=cache)
        for cache in (True, True, False)
    ]
    reused = words[1].usage["cached_tokens"]
    assert reused > 0
    ends = time.monotonic() + LIMIT_S
    while (after := producer.health()["worker"]["prefix"])["opened"] < before["opened"] + 2:
        assert time.monotonic() < ends, "no beat told"
    assert after["hits"] >= before["hits"] + 1
    assert after["reused_tokens"] >= before["reused_tokens"] + reused
    assert after["held_pages"] >= before["held_pages"]


def test_serial_and_hyper_at_width_one_draw_the_same_trajectory(line: Service, model: Path) -> None:
    fields = {"prompt": "wise owls watch", "max_tokens": 24, "temperature": 0.7, "seed": 5}
    hyper = ask(line.producer(), **fields)
    with service("--scheduler-mode", "serial") as serial:
        start_worker(serial, model, "--scheduler-mode", "serial")
        producer = serial.producer()
        assert ask(producer, **fields).sha256 == hyper.sha256
        health = producer.health()
        assert health["scheduler"] == {"mode": "serial"}


def test_a_cancel_while_the_prompt_is_read_ends_the_job_at_the_next_chunk(tmp_path: Path) -> None:
    """The wait from cancel to last word is far below the time the whole prompt would take."""
    long_model = make_llama(tmp_path, Kind(context=32768))
    with service("--beat-s", "0.05", "--dead-s", "20") as running:
        start_worker(running, long_model, "--prefill-chunk", "64", "--beat-s", "0.05", "--dead-s", "20")
        producer = running.producer()
        job = b"p" * 16
        producer.say(m.Submit(job, wire.pack_body({"token_ids": [7] * 30_000, "max_tokens": 4})))
        producer.expect(m.Started, job)
        began = time.monotonic()
        seen = producer.until(lambda one: isinstance(one, m.Progress) and one.phase == "prefill" and one.done > 0)
        cancelled = time.monotonic()
        producer.say(m.Cancel(job))
        word = producer.last_word(job, LOAD_S)
        waited = time.monotonic() - cancelled
        # Reading the rest takes at least this long, for later chunks look back at more.
        rest = (cancelled - began) * (seen.total - seen.done) / seen.done
        assert waited < max(rest / 4, 0.2), (waited, rest, seen)
        done = [one.done for one in producer.about(job) if isinstance(one, m.Progress)]
        assert max(done) < seen.total == 30_000
        assert (word.outcome, word.usage["completion_tokens"]) == ("cancelled", 0)
        assert isinstance(ask(producer, prompt="fox", max_tokens=2), m.Done)
        assert producer.health()["scheduler"]["hyper"]["active"] == 0


def test_a_worker_killed_in_a_job_costs_nothing_but_time(model: Path) -> None:
    with service() as running:
        worker = start_worker(running, model)
        producer = running.producer()
        jobs = [producer.submit(prompt="the old oak tree", max_tokens=400) for _ in range(2)]
        producer.expect(m.Chunk, jobs[0], LOAD_S)
        worker.send(signal.SIGKILL)
        worker.close()
        start_worker(running, model)
        words = [producer.last_word(job, LOAD_S) for job in jobs]
        assert [word.run["attempt"] for word in words] == [2, 1]
        assert words[0].sha256 == words[1].sha256


def test_an_error_out_of_mlx_ends_the_process_and_the_next_one_goes_on_with_the_job(
    model: Path, tmp_path: Path
) -> None:
    """After an error in an evaluation MLX may be in any state: the worker says so and leaves with code 70."""
    (tmp_path / "broken_worker.py").write_text(
        "import sys\n"
        "from worker.engine.serial import SerialEngine\n"
        "from worker.__main__ import main\n"
        "whole = SerialEngine.step\n"
        "def step(self):\n"
        "    if len(self._run.answer) == 2:\n"
        "        raise RuntimeError('[metal] command buffer failed')\n"
        "    return whole(self)\n"
        "from worker import runtime\n"
        "start = runtime.start\n"
        "def spoiled(*args, **more):\n"
        "    found = start(*args, **more)\n"
        "    SerialEngine.step = step\n"
        "    return found\n"
        "runtime.start = spoiled\n"
        "main()\n"
    )
    with service() as running:
        program = Program(
            "broken_worker", "--run-dir", str(running.run), "--model", str(model),
            env=environment(PYTHONPATH=f"{ROOT}:{tmp_path}"),
        )  # fmt: skip
        running.programs.append(program)
        wait_for_worker(running, program)
        producer = running.producer()
        fatal = producer.submit(prompt="the quick brown", max_tokens=8)
        queued = producer.submit(prompt="fox", max_tokens=2)
        assert program.ended(LOAD_S) == Exit.INTERNAL
        assert "command buffer failed" in program.said()
        assert producer.health()["worker"]["state"] == "absent"
        start_worker(running, model)
        word = producer.last_word(fatal, LOAD_S)
        assert (word.outcome, word.run["attempt"], word.usage["completion_tokens"]) == ("length", 2, 8)
        assert isinstance(producer.last_word(queued, LOAD_S), m.Done)


def test_logits_that_are_no_numbers_end_the_job_and_not_the_worker(tmp_path: Path) -> None:
    spoiled = make_llama(tmp_path, Kind(spoiled=True))
    with service() as running:
        start_worker(running, spoiled)
        producer = running.producer()
        pid = producer.health()["worker"]["pid"]
        assert ask(producer, prompt="fox", max_tokens=4).code == "E_NUMERIC"
        assert ask(producer, prompt="fox", max_tokens=4, temperature=1.0).code == "E_NUMERIC"
        assert producer.health()["worker"]["pid"] == pid


def test_a_worker_waits_for_a_broker_and_finds_the_next_one(model: Path) -> None:
    """Either may be started first, and a broker that is started anew gets its worker back."""
    running = Service()
    try:
        running.answers()
        worker = start_worker(running, model)
        running.broker.send(signal.SIGKILL)
        running.broker.ended()
        running.start_broker()
        wait_for_worker(running, worker)
        assert isinstance(ask(running.answers(), prompt="fox", max_tokens=2), m.Done)
        worker.send(signal.SIGTERM)
        assert worker.ended() == 0
    finally:
        running.close()


def test_a_worker_told_to_stop_ends_its_job_first(model: Path) -> None:
    with service() as running:
        worker = start_worker(running, model)
        producer = running.producer()
        fields = {"prompt": "the lazy dog", "max_tokens": 300, "logit_bias": {"1": -1000}}
        job = b"r" * 16
        producer.say(m.Submit(job, wire.pack_body(fields)))
        queued = producer.submit(prompt="fox", max_tokens=2)
        producer.expect(m.Chunk, job, LOAD_S)
        worker.send(signal.SIGTERM)
        word = producer.last_word(job, LOAD_S)
        assert (word.outcome, word.usage["completion_tokens"]) == ("length", 300)
        assert worker.ended() == 0
        assert producer.health()["line"]["depth"] == 1
        start_worker(running, model)
        assert isinstance(producer.last_word(queued, LOAD_S), m.Done)


def test_a_stopped_worker_has_lost_its_job_and_is_killed_and_the_next_one_serves_the_line(model: Path) -> None:
    with service("--beat-s", "0.2", "--dead-s", "2") as running:
        worker = start_worker(running, model, "--beat-s", "0.2", "--dead-s", "2")
        producer = running.producer()
        jobs = [producer.submit(prompt="the old oak tree", max_tokens=400) for _ in range(3)]
        producer.expect(m.Chunk, jobs[0], LOAD_S)
        worker.send(signal.SIGSTOP)
        assert worker.ended() == -signal.SIGKILL
        start_worker(running, model, "--beat-s", "0.2", "--dead-s", "2")
        for job in jobs:
            assert isinstance(producer.last_word(job, LOAD_S), m.Done)
        assert producer.health()["counters"]["workers_accepted"] == 2


def test_modes_that_disagree_refuse_the_worker_with_both_names(model: Path) -> None:
    with service() as running:
        program = Program(
            "worker", "--run-dir", str(running.run), "--model", str(model), "--scheduler-mode", "serial"
        )
        running.programs.append(program)
        assert program.ended(LOAD_S) == Exit.WORKER_REFUSED
        assert "hyper" in program.said()
        assert "serial" in program.said()


def test_a_second_worker_is_refused_and_the_first_goes_on(line: Service, model: Path) -> None:
    second = Program("worker", "--run-dir", str(line.run), "--model", str(model))
    line.programs.append(second)
    assert second.ended(LOAD_S) == Exit.WORKER_REFUSED
    assert isinstance(ask(line.producer(), prompt="fox", max_tokens=2), m.Done)


def test_a_damaged_model_directory_ends_the_worker_with_its_own_code(tmp_path: Path) -> None:
    damaged = make_llama(tmp_path)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    program = Program("worker", "--run-dir", str(tmp_path / "run"), "--model", str(damaged))
    try:
        assert program.ended(LIMIT_S) == Exit.MODEL_FILES
        assert "model.safetensors" in program.said()
    finally:
        program.close()
