"""SIGTERM: within a limit, with a last word for everybody, and exit code 0."""

import signal
import time

import pytest
from whole.harness import check_stream, service, stop

from mtplx import messages as m

# No wait for a job, a dead producer or a whole drain of 25 s hides below this.
LIMIT_S = 12.0
SLOW = {"tokens": 100_000, "token_s": 0.01}
# What is told of jobs that nothing outlives; with a journal they wait in it.
FORGETS = ("--durability", "none")


def test_sigterm_with_one_running_five_queued_and_two_dead_clients_ends_in_time():
    with service("--drain-s", "2", *FORGETS) as broker:
        worker = broker.worker()
        runner, dead, alive = broker.producer(), [broker.producer() for _ in range(2)], broker.producer()
        long = runner.submit(script=SLOW)
        worker.wait_for("run")
        for producer in dead:
            producer.submit(script={"tokens": 1})
            producer.expect(m.Admitted)
        queued = [alive.submit(script={"tokens": 1}) for _ in range(3)]
        for job in queued:
            alive.expect(m.Admitted, job)
        for producer in dead:
            producer.socket.close()
        assert stop(broker.broker) < LIMIT_S
        assert runner.last_word(long).code == "E_DRAINING"
        check_stream(runner, long)
        for job in queued:
            assert alive.last_word(job).code == "E_DRAINING"
            check_stream(alive, job)
        assert any(isinstance(one, m.Draining) for _, one in alive.log)
        assert worker.wait_for("quiet")


def test_sigterm_leaves_running_and_waiting_jobs_to_the_next_broker():
    with service("--drain-s", "0.5") as broker:
        worker, producer = broker.worker(), broker.producer(RECONNECT_IVL=20)
        running = producer.submit(script={"tokens": 200, "token_s": 0.01}, finish=True)
        waiting = [producer.submit(script={"tokens": 3}, finish=True) for _ in range(3)]
        producer.expect(m.Chunk, running)
        assert stop(broker.broker) < LIMIT_S
        producer.drain()
        assert any(isinstance(one, m.Draining) for _, one in producer.log)
        assert not any(isinstance(one, m.Done | m.Error) for _, one in producer.log)
        worker.close()
        broker.start_broker()
        later = broker.answers()
        worker = broker.worker()
        for job in (running, *waiting):
            later.say(m.Resume(job, 0, 0))
        for job in (running, *waiting):
            assert later.last_word(job).outcome == "stop"
            check_stream(later, job)
        assert later.last_word(running).run["attempt"] == 1
        assert [event.id for event in worker.wait_for("run", 4)] == [job.hex() for job in (running, *waiting)]


def test_a_running_job_that_can_end_within_the_limit_does():
    with service("--drain-s", "20") as broker:
        broker.worker()
        producer = broker.producer()
        job = producer.submit(script={"tokens": 100, "token_s": 0.01})
        producer.expect(m.Chunk, job)
        began = time.monotonic()
        broker.broker.send(signal.SIGTERM)
        producer.expect(m.Draining)
        late = producer.submit(script={"tokens": 1})
        assert producer.last_word(late).code == "E_DRAINING"
        assert producer.last_word(job).outcome == "stop"
        assert broker.broker.ended() == 0
        assert time.monotonic() - began < LIMIT_S
        check_stream(producer, job)


def test_a_second_signal_does_not_wait_for_the_job():
    with service("--drain-s", "60", *FORGETS) as broker:
        worker = broker.worker()
        producer = broker.producer()
        job = producer.submit(script=SLOW)
        producer.expect(m.Chunk, job)
        broker.broker.send(signal.SIGINT)
        producer.expect(m.Draining)
        # The first signal lets the job go on.
        for _ in range(10):
            producer.expect(m.Chunk, job)
        assert worker.events("cancel") == []
        began = time.monotonic()
        broker.broker.send(signal.SIGINT)
        assert producer.last_word(job).code == "E_DRAINING"
        assert len(worker.wait_for("cancel")) == 1
        assert broker.broker.ended() == 0
        assert time.monotonic() - began < LIMIT_S
        check_stream(producer, job)


def test_an_idle_broker_stops_at_once():
    with service() as broker:
        assert stop(broker.broker) < LIMIT_S


def test_a_reader_that_never_reads_does_not_hold_the_exit_beyond_the_limit():
    with service("--drain-s", "1") as broker:
        broker.worker()
        silent, other = broker.producer(RCVHWM=1, RCVBUF=4096), broker.producer()
        silent.submit(script={"tokens": 20_000}, credit=5)
        assert other.last_word(other.submit(script={"tokens": 1})).outcome == "stop"
        assert stop(broker.broker) < LIMIT_S
        assert "1 producers have not read all" in broker.broker.said()


def test_last_words_have_their_time_even_where_the_running_job_took_all_of_its_own():
    with service("--drain-s", "0.5", *FORGETS) as broker:
        worker = broker.worker("--fault", "hang")
        deaf, slow = broker.producer(), broker.producer()
        # The worker ignores the cancel, so the job takes the grace as well; a reader's credit comes after that.
        hung = deaf.submit(script={"tokens": 3})
        worker.wait_for("run")
        ended = slow.submit(script={"tokens": 1})
        broker.broker.send(signal.SIGTERM)
        assert deaf.last_word(hung).code == "E_DRAINING"
        assert slow.last_word(ended).code == "E_DRAINING"
        assert broker.broker.ended() == 0


def test_a_broker_under_nohup_outlives_its_terminal():
    # An ignored signal stays ignored in a program that is started.
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with service() as broker:
            worker, producer = broker.worker(), broker.producer()
            broker.broker.send(signal.SIGHUP)
            # Whoever heeds it takes no more jobs.
            for _ in range(3):
                assert producer.last_word(producer.submit(script={"tokens": 1})).outcome == "stop"
            worker.close()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_orderly_stop_leaves_no_socket_files_behind():
    with service() as broker:
        assert (broker.run / "front.sock").is_socket()
        stop(broker.broker)
        assert sorted(path.name for path in broker.run.iterdir()) == ["back.sock.lock", "front.sock.lock", "state"]


@pytest.mark.usefixtures("hangups_count")
def test_the_end_of_the_terminal_drains_like_any_other_stop():
    with service() as broker:
        worker = broker.worker("--token-s", "0.01")
        producer = broker.producer()
        job = producer.submit(script={"tokens": 30})
        producer.expect(m.Chunk, job)
        broker.broker.send(signal.SIGHUP)
        assert producer.last_word(job).outcome == "stop"
        assert broker.broker.ended() == 0
        worker.close()
