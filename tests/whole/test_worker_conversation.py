"""The real worker's loop and the broker, in the moments when one of them leaves, freezes or is behind."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from protocol.bare_broker import BareBroker
from whole.harness import LIMIT_S, ROOT, Producer, Program, Service, check_stream, environment, service

from mtplx import messages as m
from mtplx.errors import Exit
from mtplx.job import Job

QUICK = ("--beat-s", "0.2", "--dead-s", "2")
ENDLESS = {"token_s": 0.01}


def start(run_dir: object, *flags: str) -> Program:
    env = environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    return Program("whole.loop_worker", "--run-dir", str(run_dir), *QUICK, *flags, env=env)


def worker_of(broker: Service, *flags: str) -> Program:
    """The loop behind a real broker, once it is taken."""
    program = start(broker.run, *flags)
    broker.programs.append(program)
    wait_until_taken(broker, program)
    return program


def wait_until_taken(broker: Service, program: Program) -> None:
    with broker.answers() as asker:
        ends = time.monotonic() + LIMIT_S
        while asker.health()["worker"].get("pid") != program.pid:
            assert program.process.poll() is None, program.said()
            assert time.monotonic() < ends, program.said()


@contextmanager
def bare(tmp_path, *flags: str) -> Iterator[tuple[BareBroker, Program]]:
    """The loop before a broker that the test speaks for."""
    tmp_path.chmod(0o700)
    with BareBroker(f"ipc://{tmp_path}/back.sock") as broker:
        program = start(tmp_path, *flags)
        try:
            yield broker, program
        finally:
            program.close()


def ask(producer: Producer, max_tokens: int = 5, **script: object) -> bytes:
    return producer.submit(script=script, max_tokens=max_tokens)


def all_run(producer: Producer, *jobs: bytes) -> None:
    for job in jobs:
        assert check_stream_of(producer, job).outcome == "length"


def test_a_worker_under_nohup_outlives_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with service(*QUICK) as broker:
            worker, producer = worker_of(broker), broker.producer()
            worker.send(signal.SIGHUP)
            all_run(producer, *(ask(producer) for _ in range(3)))
            assert worker.process.poll() is None, worker.said()
    finally:
        signal.signal(signal.SIGHUP, before)


def check_stream_of(producer: Producer, job: bytes) -> m.Done | m.Error:
    producer.last_word(job)
    return check_stream(producer, job)


def counters(producer: Producer) -> dict[str, int]:
    return producer.health()["counters"]


# --- a broker that is started anew


def test_after_cancels_and_a_new_broker_the_worker_runs_jobs_to_their_end():
    with service(*QUICK) as broker:
        worker = worker_of(broker)
        with broker.producer() as producer:
            for _ in range(3):
                job = ask(producer, 1000)
                producer.expect(m.Chunk, job)
                producer.say(m.Cancel(job))
                assert producer.last_word(job).outcome == "cancelled"
        broker.broker.send(signal.SIGKILL)
        broker.broker.ended()
        broker.start_broker()
        wait_until_taken(broker, worker)
        producer = broker.producer()
        all_run(producer, *[ask(producer) for _ in range(4)])


@pytest.mark.parametrize("away", ["a moment", "longer than a send may take"])
def test_a_broker_that_is_away_in_the_middle_of_a_job_gets_its_worker_back(away):
    with service(*QUICK) as broker:
        worker = worker_of(broker)
        with broker.producer() as producer:
            producer.expect(m.Chunk, ask(producer, 100_000))
        broker.broker.send(signal.SIGKILL)
        broker.broker.ended()
        ends = time.monotonic() + LIMIT_S
        while away != "a moment" and "lost during a job" not in worker.said():
            assert time.monotonic() < ends
            time.sleep(0.05)
        broker.start_broker()
        wait_until_taken(broker, worker)
        producer = broker.producer()
        all_run(producer, ask(producer), ask(producer))
        assert worker.process.poll() is None


# --- a worker that leaves


@pytest.mark.usefixtures("hangups_count")
@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_worker_told_to_stop_ends_its_job_and_the_line_waits_for_the_next_worker(told):
    with service(*QUICK) as broker:
        worker, producer = worker_of(broker), broker.producer()
        running, *queued = [ask(producer, 50)] + [ask(producer) for _ in range(2)]
        producer.expect(m.Chunk, running)
        worker.send(told)
        assert worker.ended() == 0, worker.said()
        all_run(producer, running)
        assert producer.health()["line"]["depth"] == 2
        worker_of(broker)
        all_run(producer, *queued)
        found = counters(producer)
        assert (found["worker_left"], found.get("worker_exited")) == (1, None)


def test_a_job_that_crosses_the_workers_goodbye_is_still_run(tmp_path):
    with bare(tmp_path) as (broker, worker):
        broker.welcome()
        worker.send(signal.SIGTERM)
        broker.expect(m.WorkerBye)
        broker.run(Job(prompt="x", max_tokens=4))
        broker.say(m.Quiet())
        chunks, last = broker.answer()
        assert (len(chunks), last.finish_reason) == (4, "length")
        assert worker.ended() == 0, worker.said()


def test_a_worker_told_to_stop_before_it_was_accepted_still_says_goodbye(tmp_path):
    with bare(tmp_path) as (broker, worker):
        ready = broker.expect(m.Ready)
        worker.send(signal.SIGTERM)
        while not isinstance(message := broker.hear()[1], m.WorkerBye):
            assert message == ready
        broker.accept(ready)
        broker.run(Job(prompt="x", max_tokens=2))
        broker.say(m.Quiet())
        assert broker.answer()[1].finish_reason == "length"
        assert worker.ended() == 0, worker.said()


def test_a_worker_does_not_wait_for_a_broker_that_does_not_answer_its_goodbye(tmp_path):
    with bare(tmp_path) as (broker, worker):
        broker.welcome()
        worker.send(signal.SIGTERM)
        broker.expect(m.WorkerBye)
        assert worker.ended(10) == 0, worker.said()


@pytest.mark.parametrize("fault", ["boom", "leave"])
def test_a_fault_that_ends_the_worker_is_an_attempt_of_its_job_alone(fault):
    with service(*QUICK) as broker:
        worker, producer = worker_of(broker), broker.producer()
        fatal, *queued = [ask(producer, 50, fault=fault)] + [ask(producer) for _ in range(2)]
        assert worker.ended() == (Exit.INTERNAL if fault == "boom" else 1), worker.said()
        while producer.health()["worker"]["state"] != "absent":
            pass
        status = producer.ask(m.Status(id=fatal), m.StatusReply).status
        assert (status["state"], status["attempts"]) == ("waiting", 1)
        producer.say(m.Cancel(fatal))
        assert check_stream_of(producer, fatal).outcome == "cancelled"
        worker_of(broker)
        all_run(producer, *queued)


@pytest.mark.parametrize("how", ["limit", "second signal"])
def test_a_job_that_the_leaving_worker_cannot_end_is_handed_back_and_goes_on_behind_its_tokens(how):
    with service(*QUICK) as broker:
        worker = worker_of(broker, "--drain-s", "0.3" if how == "limit" else "60")
        producer = broker.producer()
        long, queued = ask(producer, 100_000), ask(producer)
        producer.expect(m.Chunk, long)
        worker.send(signal.SIGTERM)
        if how == "second signal":
            while counters(producer).get("workers_leaving") != 1:
                producer.expect(m.Chunk, long)
            worker.send(signal.SIGTERM)
        assert worker.ended() == 0, worker.said()
        status = producer.ask(m.Status(id=long), m.StatusReply).status
        assert (status["state"], status["attempts"]) == ("waiting", 0)
        worker_of(broker)
        producer.until(lambda one: isinstance(one, m.Chunk) and one.first >= status["tokens"])
        producer.say(m.Cancel(long))
        assert check_stream_of(producer, long).outcome == "cancelled"
        all_run(producer, queued)


def test_a_cancel_of_the_leaving_workers_job_is_still_a_cancel():
    with service(*QUICK) as broker:
        worker, producer = worker_of(broker, "--drain-s", "60"), broker.producer()
        long = ask(producer, 100_000)
        producer.expect(m.Chunk, long)
        worker.send(signal.SIGTERM)
        producer.say(m.Cancel(long))
        assert check_stream_of(producer, long).outcome == "cancelled"
        assert worker.ended() == 0, worker.said()


def test_a_worker_stuck_in_native_code_ends_after_the_drain_limit_by_itself():
    with service("--beat-s", "0.2", "--dead-s", "20") as broker:
        worker = worker_of(broker, "--drain-s", "0.3", "--grace-s", "0.3")
        producer = broker.producer()
        stuck = ask(producer, 50, fault="hang")
        for _ in range(3):
            producer.expect(m.Chunk, stuck)
        worker.send(signal.SIGTERM)
        assert worker.ended(10) == Exit.INTERNAL
        while producer.health()["worker"]["state"] != "absent":
            pass
        status = producer.ask(m.Status(id=stuck), m.StatusReply).status
        assert (status["state"], status["tokens"]) == ("waiting", 3)


# --- READY and what is late


def test_one_ready_is_answered_once_whatever_else_waits_in_the_pipe(tmp_path):
    with bare(tmp_path) as (broker, _):
        ready = broker.expect(m.Ready)
        for _ in range(20):
            broker.say(m.BrokerBeat())
        broker.run(Job(prompt="of an older lease"), lease=3)
        broker.say(m.CancelRun(4))
        until, repeats = time.monotonic() + 2.5, []
        while (left := until - time.monotonic()) > 0:
            if broker.socket.poll(left * 1000):
                repeats.append(broker.hear()[1])
        assert 1 <= len(repeats) <= 3, "once a second, whatever comes"
        assert all(one == ready for one in repeats)
        broker.accept(ready)
        broker.run(Job(prompt="x", max_tokens=3), lease=4)
        chunks, last = broker.answer()
        assert ([one.lease for one in chunks], last.finish_reason) == ([4, 4, 4], "length")


def test_an_answer_to_an_old_beat_does_not_cost_the_worker_its_new_job(tmp_path):
    with bare(tmp_path) as (broker, _):
        ready = broker.welcome(beat_ms=50)
        beats, beat = broker.beat()
        assert beat.epoch == ready.epoch
        broker.disown(beats, beat.epoch)
        again = broker.expect(m.Ready)
        assert (again.worker_id, again.epoch) == (ready.worker_id, ready.epoch + 1)
        broker.accept(ready, beat_ms=50)
        broker.accept(again, beat_ms=50)
        broker.run(Job(prompt="x", max_tokens=300))
        for _ in range(5):
            broker.disown(beats, ready.epoch)
            broker.beat()
        chunks, last = broker.answer()
        assert last.finish_reason == "length"
        assert chunks


def test_an_attempt_goes_on_behind_the_ids_drawn_for_its_own_lease_alone(tmp_path):
    with bare(tmp_path) as (broker, _):
        ready = broker.welcome(beat_ms=50)
        job = Job(prompt="x", max_tokens=6)
        broker.run(job, lease=1, attempt=2, drawn=(0, 1, 2, 3))
        chunks, last = broker.answer()
        assert ([one.first for one in chunks], last.finish_reason) == ([4, 5], "length")
        broker.say(m.Drawn(2, (0, 1)))
        broker.run(job, lease=3)
        assert [one.first for one in broker.answer()[0]] == list(range(6))
        broker.run(job, lease=4)
        assert [one.first for one in broker.answer()[0]] == list(range(6)), "told once, for one RUN"
        # A new broker counts its leases from 1 again.
        broker.say(m.Drawn(5, (0, 1)))
        broker.disown(broker.beat()[0], ready.epoch)
        again = broker.expect(m.Ready)
        broker.accept(again, beat_ms=50)
        broker.run(job, lease=5)
        assert [one.first for one in broker.answer()[0]] == list(range(6))


def test_beats_tell_what_the_engine_counts_anew_after_each_job(tmp_path):
    with bare(tmp_path) as (broker, _):
        broker.welcome(beat_ms=50)
        assert broker.beat()[1].prefix == {"opened": 0}
        for lease in (1, 2):
            broker.run(Job(prompt="x", max_tokens=2), lease=lease)
            broker.answer()
            while (beat := broker.beat()[1]).lease is not None or beat.prefix != {"opened": lease}:
                assert beat.prefix == {"opened": lease - 1}


def test_a_worker_that_the_broker_forgot_drops_its_job_and_offers_itself_again(tmp_path):
    with bare(tmp_path) as (broker, _):
        ready = broker.welcome(beat_ms=50)
        broker.run(Job(prompt="x", max_tokens=100_000))
        for _ in range(50_000):
            peer, message = broker.hear()
            if isinstance(message, m.WorkerBeat):
                # Every one is answered, as a broker does: the worker takes no notice of what crosses its new job.
                broker.disown(peer, message.epoch)
            elif isinstance(message, m.Ready) and message != ready:
                break
            assert not isinstance(message, m.Final | m.Fail)
        assert message.epoch == ready.epoch + 1


def test_a_refusal_that_would_be_the_same_again_ends_the_worker(tmp_path):
    with bare(tmp_path) as (broker, worker):
        broker.expect(m.Ready)
        broker.say(m.Error("E_VERSION", "This broker speaks MTX version 9.", retryable=False))
        assert worker.ended() == Exit.WORKER_REFUSED
        assert "version 9" in worker.said()


def test_a_worker_that_wakes_from_a_stop_has_lost_its_job_and_goes_on_with_it_as_with_the_rest():
    with service(*QUICK) as broker:
        # On the broker's own machine it would be killed.
        worker, producer = worker_of(broker, "--host", "another machine"), broker.producer()
        for lost in (1, 2):
            running, *queued = [ask(producer, 300)] + [ask(producer) for _ in range(4)]
            producer.expect(m.Chunk, running)
            worker.send(signal.SIGSTOP)
            while counters(producer).get("worker_silent") != lost:
                pass
            worker.send(signal.SIGCONT)
            all_run(producer, running, *queued)
        found = counters(producer)
        assert (found["workers_accepted"], found["worker_silent"]) == (3, 2)
        assert found.get("worker_replaced") is None


def test_a_worker_stopped_for_less_than_the_limit_loses_nothing():
    with service("--beat-s", "0.1", "--dead-s", "20") as broker:
        worker, producer = worker_of(broker), broker.producer()
        running, queued = ask(producer, 60), ask(producer)
        producer.expect(m.Chunk, running)
        worker.send(signal.SIGSTOP)
        # A dozen BROKER_BEATs come to lie in its pipe.
        for _ in range(12):
            producer.expect(m.Progress, running)
        worker.send(signal.SIGCONT)
        all_run(producer, running, queued)
        assert counters(producer)["workers_accepted"] == 1


# --- the pulse


def test_a_pulse_that_fails_ends_the_worker_and_the_line_goes_on():
    with service(*QUICK) as broker:
        worker, producer = worker_of(broker, "--fault", "pulse"), broker.producer()
        running, queued = ask(producer, 600), ask(producer)
        assert worker.ended() == Exit.INTERNAL
        said = worker.said()
        assert "the pulse failed" in said
        assert "ValueError" in said
        worker_of(broker)
        all_run(producer, running, queued)


def test_a_pipe_that_fills_up_between_look_and_send_does_not_stop_the_pulse():
    with service(*QUICK) as broker:
        worker, producer = worker_of(broker, "--fault", "again"), broker.producer()
        all_run(producer, ask(producer, 300), ask(producer))
        assert worker.process.poll() is None
        assert counters(producer)["workers_accepted"] == 1
