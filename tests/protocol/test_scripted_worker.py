"""The worker double against a bare ROUTER: it says what a worker must, and breaks what it is told to."""

import hashlib
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from protocol.bare_broker import BareBroker

from mtplx.job import Job
from mtplx.messages import (
    CancelRun,
    Drawn,
    Error,
    Ready,
    WorkerBeat,
    WorkerBye,
    WorkerChunk,
)
from mtplx.testing import Fault, ManualClock, Persona, Script, ScriptedWorker, answer_of


@pytest.fixture
def endpoint(tmp_path):
    return f"ipc://{tmp_path}/b"


@pytest.fixture
def broker(endpoint):
    broker = BareBroker(endpoint)
    yield broker
    broker.close()


def sha(ids):
    return hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()


def test_an_answer_is_gap_free_and_its_hash_is_that_of_its_ids(broker, endpoint):
    with ScriptedWorker(endpoint, Script(tokens=20, per_chunk=3, prefill_steps=2)) as worker:
        ready = broker.welcome()
        assert (ready.mode, ready.stage, ready.pid) == ("hyper", "h0", os.getpid())
        broker.run(Job(prompt="one two", max_tokens=30))
        chunks, last = broker.answer()
        worker.wait_for("final")
    ids = [token for chunk in chunks for token in chunk.ids]
    assert [chunk.first for chunk in chunks] == list(range(0, 20, 3))
    assert [chunk.n for chunk in chunks] == [3] * 6 + [2]
    assert ids == list(range(20))
    assert last.sha256 == sha(ids)
    assert (last.finish_reason, last.prompt_tokens, last.max_tokens_used) == ("stop", 2, 30)
    assert [event.event for event in worker.log] == ["ready", "accepted", "run", "first", "final", "bye"]
    assert isinstance(broker.expect(WorkerBye), WorkerBye)


def test_without_a_count_the_words_of_the_prompt_come_back(broker, endpoint):
    with ScriptedWorker(endpoint):
        broker.welcome()
        broker.run(Job(messages=({"role": "user", "content": "the sky is blue"},), max_tokens=3, logprobs=2))
        chunks, last = broker.answer()
    assert "".join(chunk.text for chunk in chunks) == "the sky is"
    assert last.finish_reason == "length"
    assert all(len(chunk.logprobs) == 1 and len(chunk.logprobs[0]) == 2 for chunk in chunks)
    ids, _ = answer_of(Job(prompt="the sky is"), Script(), 1000)
    assert tuple(chunk.ids[0] for chunk in chunks) == ids


def test_a_cancel_is_answered_between_two_tokens_with_what_was_drawn(broker, endpoint):
    with ScriptedWorker(endpoint, Script(tokens=100_000, token_s=0.01)):
        broker.welcome()
        broker.run(Job(prompt="x", max_tokens=100_000), lease=9)
        broker.expect(WorkerChunk)
        broker.say(CancelRun(lease=8))
        broker.expect(WorkerChunk)
        broker.say(CancelRun(lease=9))
        chunks, last = broker.answer()
    assert last.finish_reason == "cancelled"
    assert last.sha256 == sha(list(range(2 + len(chunks))))


def test_a_cancel_during_prefill_ends_it(broker, endpoint):
    with ScriptedWorker(endpoint, Script(tokens=5, prefill_steps=1000, prefill_step_s=0.05)):
        broker.welcome(beat_ms=20)
        broker.run(Job(prompt="a b c d"))
        beat = broker.expect(WorkerBeat)
        while beat.phase != "prefill":
            beat = broker.expect(WorkerBeat)
        assert (beat.total, beat.lease) == (4, 1)
        broker.say(CancelRun(lease=1))
        chunks, last = broker.answer()
    assert (chunks, last.finish_reason) == ([], "cancelled")


def test_beats_come_over_a_connection_of_their_own_and_an_unknown_worker_says_ready_again(broker, endpoint):
    with ScriptedWorker(endpoint, Script(tokens=10_000, token_s=0.01)) as worker:
        ready = broker.welcome(beat_ms=20)
        broker.run(Job(prompt="x", max_tokens=10_000))
        peer, message = broker.hear()
        while not isinstance(message, WorkerBeat):
            peer, message = broker.hear()
        assert peer != broker.peer
        broker.disown(peer, ready.epoch + 1)
        assert isinstance(broker.hear()[1], WorkerChunk | WorkerBeat), "an answer to no beat of this worker"
        broker.disown(peer, ready.epoch)
        while not isinstance(message, Ready):
            message = broker.hear()[1]
        assert (message.worker_id, message.epoch) == (ready.worker_id, ready.epoch + 1)
        assert worker.events("drop")


def test_a_refused_worker_stops(broker, endpoint):
    with ScriptedWorker(endpoint, persona=Persona(mode="serial", stage="")) as worker:
        broker.expect(Ready)
        broker.say(Error(code="E_WORKER_MODE", message="hyper, not serial", retryable=False))
        worker.wait_for("refused")
    assert worker.refused.code == "E_WORKER_MODE"


def test_faults_come_on_demand_from_the_metadata_of_the_job(broker, endpoint):
    def job(text):
        return Job(prompt="a b c", metadata={"script": text})

    with ScriptedWorker(endpoint):
        broker.welcome()
        broker.run(job('{"fault": "fail", "fault_after": 2, "fail_code": "E_NUMERIC"}'))
        chunks, last = broker.answer()
        assert (len(chunks), last.code) == (2, "E_NUMERIC")
        broker.run(job('{"fault": "stale", "fault_after": 1}'), lease=5)
        assert [(chunk.lease, chunk.first) for chunk in broker.answer()[0]] == [(5, 0), (4, 1), (5, 1), (5, 2)]
        broker.run(job('{"fault": "gap", "fault_after": 1}'), lease=6)
        assert [chunk.first for chunk in broker.answer()[0]] == [0, 2, 1, 2]
        broker.run(job('{"fault": "fail", "fault_after": -1}'))
        assert broker.answer()[0] == []


@pytest.mark.parametrize(("fault", "beats"), [(Fault.HANG, True), (Fault.SILENT, False)])
def test_a_hung_worker_beats_without_progress_or_not_at_all(broker, endpoint, fault, beats):
    with ScriptedWorker(endpoint, Script(fault=fault, fault_after=1)) as worker:
        broker.welcome(beat_ms=10)
        broker.run(Job(prompt="a b c"))
        worker.wait_for("fault")
        broker.expect(WorkerChunk)
        heard = [broker.hear(1000)[1] for _ in range(5)] if beats else []
        if beats:
            assert {beat.progress for beat in heard[2:]} == {1}
        else:
            while broker.socket.poll(100):
                broker.socket.recv_multipart()
        broker.say(CancelRun(lease=1))
    assert not worker.events("final")


@pytest.mark.parametrize(("fault", "code"), [("abort", -6), ("exit", 1)])
def test_a_worker_process_dies_as_told_and_its_log_survives(broker, endpoint, tmp_path, fault, code):
    log = tmp_path / "log"
    command = [
        sys.executable,
        "-P",
        "-m",
        "mtplx.testing",
        "--back",
        endpoint,
        "--log",
        str(log),
        "--fault",
        fault,
        "--fault-after",
        "2",
    ]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(Path.cwd())})
    try:
        broker.welcome()
        broker.run(Job(prompt="a b c"))
        assert process.wait(20) == code
    finally:
        process.kill()
    assert [line.split('"')[3] for line in log.read_text().splitlines()] == [
        "ready",
        "accepted",
        "run",
        "first",
        "fault",
    ]


@pytest.mark.parametrize("per_chunk", [1, 3])
def test_an_attempt_goes_on_behind_the_ids_that_earlier_ones_drew(broker, endpoint, per_chunk):
    job = Job(prompt="x", max_tokens=10, logprobs=1)
    with ScriptedWorker(endpoint, Script(tokens=20, per_chunk=per_chunk, seeded=True)) as worker:
        broker.welcome()
        broker.run(job)
        whole, final = broker.answer()
        ids = [token for chunk in whole for token in chunk.ids]
        text = "".join(chunk.text for chunk in whole)
        for count in range(1, 11):
            broker.run(job, lease=1 + count, attempt=2, drawn=tuple(ids[:count]))
            rest, last = broker.answer()
            assert [token for chunk in rest for token in chunk.ids] == ids[count:]
            assert text.endswith("".join(chunk.text for chunk in rest))
            assert [chunk.first for chunk in rest] == list(range(count, 10, per_chunk))
            assert (last.finish_reason, last.sha256) == ("length", final.sha256)
        broker.run(job, lease=20, seed=8)
        assert [token for chunk in broker.answer()[0] for token in chunk.ids] != ids
        assert [event.tokens for event in worker.events("run")] == [*range(11), 0]
    assert not worker.events("astray")


def test_ids_of_another_lease_and_ids_of_another_answer_are_noticed(broker, endpoint):
    with ScriptedWorker(endpoint, Script(tokens=4)) as worker:
        broker.welcome()
        broker.say(Drawn(1, (0, 1)))
        broker.run(Job(prompt="x"), lease=2)
        assert broker.answer()[0][0].first == 0
        broker.run(Job(prompt="x"), lease=3, drawn=(0, 5))
        broker.answer()
        assert [event.lease for event in worker.events("astray")] == [3]


def test_a_fault_may_come_in_the_first_attempts_alone(broker, endpoint):
    with ScriptedWorker(endpoint, Script(tokens=4, fault=Fault.FAIL, fault_after=2, fault_attempts=1)):
        broker.welcome()
        broker.run(Job(prompt="x"))
        chunks, last = broker.answer()
        assert (len(chunks), last.code) == (2, "E_INTERNAL")
        broker.run(Job(prompt="x"), lease=2, attempt=2, drawn=(0, 1))
        assert broker.answer()[1].finish_reason == "stop"


def test_a_clock_moves_only_by_hand_and_never_back():
    clock = ManualClock()
    assert clock.monotonic() == clock.monotonic() == 0.0
    before = clock.time_ns()
    assert clock.advance(1.5) == 1.5
    assert clock.time_ns() - before == 1_500_000_000
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1)
