"""The line with real processes: many producers, one order, one job in flight, readers of every speed."""

import time

import pytest
import zmq
from whole.harness import LAST_WORDS, check_stream, rss_kib, service

from mtplx import Client, wire
from mtplx import messages as m


def test_fifty_producers_with_four_jobs_each_run_in_admission_order_and_lose_nothing():
    with service() as broker:
        worker = broker.worker()
        producers = [broker.producer() for _ in range(50)]
        jobs = {}
        for round_ in range(4):
            for producer in producers:
                script = {"tokens": 5 + round_, "token_s": 0.0}
                jobs[producer.submit(script=script, prompt="x")] = producer
        _read_all(producers, jobs)
        for job, producer in jobs.items():
            assert check_stream(producer, job).outcome == "stop"
        admitted = [one for producer in producers for _, one in producer.log if isinstance(one, m.Admitted)]
        order = [one.id.hex() for one in sorted(admitted, key=lambda one: one.admit_seq)]
        assert len(order) == 200
        assert worker.ran(len(order)) == order
        assert len(worker.wait_for("final", 200)) == 200
        hyper = producers[0].health()["scheduler"]["hyper"]
        assert (hyper["admitted_total"], hyper["completed_total"], hyper["active"]) == (200, 200, 0)


def _read_all(producers, jobs, limit=60.0):
    poller = zmq.Poller()
    by_socket = {producer.socket: producer for producer in producers}
    for socket in by_socket:
        poller.register(socket, zmq.POLLIN)
    left, end = set(jobs), time.monotonic() + limit
    while left:
        assert time.monotonic() < end, f"{len(left)} jobs without a last word"
        for socket, _ in poller.poll(1000):
            producer = by_socket[socket]
            while socket.poll(0):
                message = producer.hear()
                if isinstance(message, LAST_WORDS):
                    left.discard(message.id)


def test_the_limit_of_the_line_holds_while_a_job_runs():
    with service("--queue-jobs", "3") as broker:
        worker = broker.worker()
        producer = broker.producer()
        running = producer.submit(script={"tokens": 100_000, "token_s": 0.01})
        worker.wait_for("run")
        others = [producer.submit(script={"tokens": 1}) for _ in range(6)]
        answers = [producer.until(lambda one, job=job: getattr(one, "id", None) == job) for job in others]
        assert [type(one) for one in answers] == [m.Admitted] * 3 + [m.Error] * 3
        for refusal in answers[3:]:
            assert (refusal.code, refusal.retryable) == ("E_QUEUE_FULL", True)
            assert refusal.retry_after_ms > 0
        producer.say(m.Cancel(running))
        for job in others[:3]:
            assert producer.last_word(job).outcome == "stop"


def test_the_limit_of_the_line_holds_in_bytes_too():
    with service("--queue-bytes", "3000") as broker:
        producer = broker.producer()
        huge = producer.submit(prompt="x" * 5000)
        assert producer.last_word(huge).code == "E_TOO_LARGE"
        jobs = [producer.submit(prompt="x" * 500) for _ in range(20)]
        answers = [producer.until(lambda one, job=job: getattr(one, "id", None) == job) for job in jobs]
        admitted = sum(isinstance(one, m.Admitted) for one in answers)
        assert 3 <= admitted <= 5
        assert all(isinstance(one, m.Admitted) for one in answers[:admitted])
        assert {one.code for one in answers[admitted:]} == {"E_QUEUE_FULL"}
        line = producer.health()["line"]
        assert line["bytes"] <= 3000
        assert line["depth"] == admitted


def test_a_waiting_client_and_one_in_a_long_prefill_hear_from_the_broker_on_a_clock():
    with service("--beat-s", "0.2", "--dead-s", "5") as broker:
        worker = broker.worker()
        reading, waiting = broker.producer(), broker.producer()
        # One prefill step far longer than many beats: signs of life must not depend on progress.
        long = reading.submit(script={"tokens": 1, "prefill_steps": 2, "prefill_step_s": 1.0})
        worker.wait_for("run")
        after = waiting.submit(script={"tokens": 1})
        assert waiting.expect(m.Admitted).position == 1
        for _ in range(5):
            told = waiting.expect(m.Progress, after)
            assert (told.phase, told.position, told.worker) == ("waiting", 1, "busy")
        phases = [reading.expect(m.Progress, long) for _ in range(4)]
        assert {one.phase for one in phases} == {"prefill"}
        read = reading.until(lambda one: isinstance(one, m.Progress) and one.total == 3)
        assert read.phase == "prefill"
        assert reading.last_word(long).outcome == "stop"
        assert waiting.last_word(after).outcome == "stop"


@pytest.mark.parametrize(
    ("steps", "step_s", "idle_s"),
    [(1, 3.0, 1.0), pytest.param(3, 20.0, 10.0, marks=pytest.mark.prove)],
    ids=["one chunk of 3 s", "a minute in chunks of 20 s"],
)
def test_a_client_that_gives_up_on_silence_sits_through_a_long_prefill_and_the_wait_before_it(
    steps, step_s, idle_s
):
    with service("--beat-s", "0.2", "--dead-s", "5") as broker:
        broker.worker("--prefill-steps", str(steps), "--prefill-step-s", str(step_s))
        with Client(broker.front, idle_timeout=idle_s) as client:
            streams = [client.submit("one two", max_tokens=2) for _ in range(2)]
            assert [stream.result().text for stream in reversed(streams)] == ["one two"] * 2


def test_a_slow_reader_gets_everything_and_slows_nobody():
    with service() as broker:
        broker.worker()
        # Small buffers, so that the broker has to wait for this reader.
        slow, quick = broker.producer(RCVHWM=1, RCVBUF=4096), broker.producer()
        job = slow.submit(script={"tokens": 20_000}, credit=1)
        slow.expect(m.Started, job)
        others = [quick.submit(script={"tokens": 20}) for _ in range(50)]
        for other in others:
            assert quick.last_word(other).outcome == "stop"
        # By now the whole answer waits in the broker; it comes in as many pieces as the reader allows.
        chunks = 0
        while True:
            message = slow.hear()
            if isinstance(message, m.Chunk):
                chunks += 1
                slow.say(m.GiveCredit(job, chunks + 1))
            if isinstance(message, m.Done):
                break
        assert check_stream(slow, job).usage["completion_tokens"] == 20_000
        assert chunks < 50


def test_a_client_that_never_reads_costs_neither_the_loop_nor_memory():
    with service() as broker:
        broker.worker()
        quick = broker.producer()
        first = quick.submit(script={"tokens": 20_000})
        assert quick.last_word(first).outcome == "stop"
        before = rss_kib(broker.broker.pid)
        silent = [broker.producer(RCVHWM=1, RCVBUF=4096) for _ in range(3)]
        jobs = [producer.submit(script={"tokens": 20_000}) for producer in silent]
        probe = quick.submit(script={"tokens": 5})
        assert quick.last_word(probe, limit=60).outcome == "stop"
        waits = []
        for number in range(100):
            began = time.monotonic()
            quick.say(m.Ping(number))
            quick.expect(m.Pong)
            waits.append(time.monotonic() - began)
        # A loop held up by three silent readers would need seconds.
        assert sorted(waits)[50] < 1.0
        # 60,000 tokens of answers are kept for their readers, and no second copy of them.
        assert rss_kib(broker.broker.pid) - before < 60 * 1024
        for producer, job in zip(silent, jobs, strict=True):
            assert producer.last_word(job).outcome == "stop"
            check_stream(producer, job)


def test_a_full_pipe_holds_up_only_its_own_reader_and_loses_nothing():
    with service() as broker:
        worker = broker.worker()
        # 400 jobs are more messages than all buffers on the way hold, so the broker finds this pipe full.
        silent, quick = broker.producer(RCVHWM=1, RCVBUF=4096), broker.producer()
        jobs = [silent.submit(script={"tokens": 3}) for _ in range(400)]
        worker.wait_for("final", 400, limit=30)
        probe = quick.submit(script={"tokens": 20})
        assert quick.last_word(probe).outcome == "stop"
        check_stream(quick, probe)
        for job in jobs:
            assert silent.last_word(job).outcome == "stop"
        for job in jobs:
            check_stream(silent, job)
        assert "flooders_dropped" not in quick.health()["counters"]


def test_a_flood_of_jobs_that_are_dear_to_check_does_not_hold_up_the_stream():
    """A turn has a time budget: forty megabytes of bad jobs in one turn once stopped a stream for half a minute."""
    bad = wire.pack_body({"token_ids": [7] * 300_000, "stop": [5]})
    with service() as broker:
        broker.worker("--token-s", "0.01")
        producer = broker.producer()
        job = producer.submit(script={"tokens": 200})
        producer.expect(m.Chunk, job)
        with broker.producer() as flooder, broker.producer() as other:
            other.ask(m.Ping(0), m.Pong)
            for number in range(40):
                flooder.say(m.Submit(number.to_bytes(16, "big"), bad))
            flooder.expect(m.Error)
            began = time.monotonic()
            other.ask(m.Ping(1), m.Pong)
            waited = time.monotonic() - began
            for _ in range(39):
                flooder.expect(m.Error)
        producer.last_word(job)
        assert waited < 3
        assert isinstance(check_stream(producer, job), m.Done)
        assert broker.answers().health()["worker"]["state"] == "ready"
