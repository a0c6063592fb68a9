"""The worker dies, hangs, breaks off or comes twice: its job hears of it once, and the line goes on."""

import signal
import time

import pytest
import zmq
from whole.harness import Worker, check_stream, check_worker, service

from mtplx import messages as m
from mtplx import wire

SLOW = {"tokens": 100_000, "token_s": 0.01}


def test_a_worker_killed_mid_job_costs_its_producer_nothing_and_the_next_worker_goes_on():
    with service() as broker:
        worker, producer, watcher = broker.worker(), broker.producer(), broker.producer()
        killed = producer.submit(script={"tokens": 60, "token_s": 0.01})
        queued = producer.submit(script={"tokens": 3})
        producer.expect(m.Chunk, killed)
        worker.send(signal.SIGKILL)
        # By the broken connection: by silence it would take dead_s, 10 seconds.
        limit = time.monotonic() + 5.0
        while watcher.health()["worker"]["state"] != "absent":
            assert time.monotonic() < limit
        health = watcher.health()
        assert health["worker"]["last_loss"] == "exited"
        assert health["worker"]["lost_pid"] == worker.pid
        assert health["line"]["depth"] == 2
        successor = broker.worker()
        assert producer.last_word(killed).outcome == "stop"
        word = check_stream(producer, killed)
        assert word.text == "".join(f"{token} " for token in range(60))
        assert (word.run["attempt"], word.run["resume_exact"]) == (2, True)
        assert producer.last_word(queued).outcome == "stop"
        assert successor.ran(2) == [killed.hex(), queued.hex()]


@pytest.mark.parametrize(
    ("flags", "loss"),
    [(("--beat-s", "0.2", "--dead-s", "1"), "silent"), (("--beat-s", "0.2", "--stall-s", "1"), "stalled")],
)
def test_a_frozen_or_hanging_worker_is_given_up_and_cannot_come_back_into_the_job(flags, loss):
    with service(*flags) as broker:
        # On the broker's own machine it would be killed.
        worker, producer = broker.worker("--host", "another machine"), broker.producer()
        script = SLOW if loss == "silent" else {**SLOW, "fault": "hang", "fault_after": 3}
        frozen, queued = producer.submit(script=script), producer.submit(script={"tokens": 3})
        producer.expect(m.Chunk, frozen)
        if loss == "silent":
            worker.send(signal.SIGSTOP)
        limit = time.monotonic() + 5.0
        while producer.health()["worker"].get("last_loss") != loss:
            assert time.monotonic() < limit
        if loss == "stalled":
            worker.close()
        successor = broker.worker()
        producer.expect(m.Started, frozen)
        producer.say(m.Cancel(frozen))
        assert producer.last_word(frozen).run["attempt"] == 2
        assert producer.last_word(queued).outcome == "stop"
        if loss == "silent":
            busy = producer.submit(script=SLOW)
            successor.wait_for("run", 3)
            worker.send(signal.SIGCONT)
            assert worker.ended() == 5, "the old worker is refused, for another one is live"
            producer.expect(m.Chunk, busy)
            producer.say(m.Cancel(busy))
            producer.last_word(busy)
        for job in (frozen, queued):
            check_stream(producer, job)
        check_worker(successor.log)


@pytest.mark.parametrize("fault", ["abort", "exit", "gap"])
def test_a_job_that_ends_every_worker_before_its_first_token_is_buried_after_two_and_the_next_one_runs(fault):
    with service() as broker:
        producer = broker.producer()
        killer = producer.submit(script={"tokens": 50, "fault": fault, "fault_after": 0})
        queued = producer.submit(script={"tokens": 3})
        for attempt in (1, 2):
            worker = broker.worker()
            worker.wait_for("fault")
            assert producer.expect(m.Started, killer).attempt == attempt
            worker.close()
        word = producer.last_word(killer)
        check_stream(producer, killer)
        assert (word.code, word.detail["attempts"], word.detail["tokens"]) == ("E_POISON", 2, 0)
        successor = broker.worker()
        assert producer.last_word(queued).outcome == "stop"
        assert successor.ran(1) == [queued.hex()]


def test_a_worker_that_fails_every_job_is_asked_again_and_each_job_hears_it_once():
    with service() as broker:
        broker.worker("--fault", "fail", "--fail-code", "E_NUMERIC")
        producer = broker.producer()
        jobs = [producer.submit() for _ in range(20)]
        for job in jobs:
            assert producer.last_word(job).code == "E_NUMERIC"
            check_stream(producer, job)


def test_a_chunk_of_an_old_lease_reaches_nobody():
    with service() as broker:
        broker.worker()
        producer = broker.producer()
        producer.last_word(producer.submit(script={"tokens": 2}))
        job = producer.submit(script={"tokens": 5, "fault": "stale", "fault_after": 2})
        producer.last_word(job)
        assert check_stream(producer, job).text == "0 1 2 3 4 "
        assert producer.health()["counters"]["stale_worker_messages"] == 1


def test_a_second_worker_and_one_of_another_mode_are_refused_with_a_reason():
    with service() as broker:
        first = broker.worker()
        second = broker.worker(accepted=False)
        assert second.ended() == 5
        assert str(first.pid) in second.said()
        other = broker.worker("--mode", "serial", accepted=False)
        assert other.ended() == 5
        assert "hyper mode and this worker in serial mode" in other.said()
        producer = broker.producer()
        assert producer.last_word(producer.submit(script={"tokens": 2})).outcome == "stop"


def test_a_worker_that_outlives_its_broker_serves_the_next_one():
    with service("--beat-s", "0.2", "--dead-s", "2") as broker:
        worker = broker.worker()
        broker.broker.send(signal.SIGKILL)
        broker.broker.ended()
        broker.start_broker()
        producer = broker.answers()
        worker.wait_for("accepted", 2)
        assert producer.last_word(producer.submit(script={"tokens": 2})).outcome == "stop"


def test_a_worker_told_to_stop_gives_its_job_up_at_its_limit_and_the_line_waits():
    with service() as broker:
        worker, producer = broker.worker("--drain-s", "0.2"), broker.producer()
        long, queued = producer.submit(script=SLOW), producer.submit(script={"tokens": 3})
        producer.expect(m.Chunk, long)
        worker.send(signal.SIGTERM)
        assert worker.ended() == 0
        assert worker.ran(1) == [long.hex()]
        successor = broker.worker()
        # Handed back, which is no attempt; and before all others.
        successor.wait_for("run")
        assert successor.ran(1) == [long.hex()]
        producer.say(m.Cancel(long))
        assert producer.last_word(long).run["attempt"] == 1
        check_stream(producer, long)
        assert producer.last_word(queued).outcome == "stop"


def test_a_worker_told_to_stop_ends_its_job_within_its_limit():
    with service() as broker:
        worker, producer = broker.worker("--drain-s", "20"), broker.producer()
        job = producer.submit(script={"tokens": 50, "token_s": 0.01})
        queued = producer.submit(script={"tokens": 3})
        producer.expect(m.Chunk, job)
        worker.send(signal.SIGTERM)
        assert producer.last_word(job).outcome == "stop"
        assert worker.ended() == 0
        health = producer.health()
        assert (health["worker"]["last_loss"], health["line"]["depth"]) == ("left", 1)
        broker.worker()
        assert producer.last_word(queued).outcome == "stop"


@pytest.mark.parametrize("side", ["worker", "producer"])
def test_of_two_peers_with_one_routing_id_the_second_is_mute_and_the_first_loses_nothing(side):
    with service() as broker:
        if side == "producer":
            broker.worker()
        table = m.TO_WORKER if side == "worker" else m.TO_CLIENT
        opening = (
            m.Ready(b"1" * 16, 1, "hyper", "h0", "twin", 1000, 512, {}, 1) if side == "worker" else m.Hello((1,))
        )

        def peer():
            socket = broker.context.socket(zmq.DEALER)
            socket.setsockopt(zmq.ROUTING_ID, b"twin")
            socket.linger = 0
            socket.connect(broker.back if side == "worker" else broker.front)
            socket.send_multipart(wire.encode(opening))
            return socket

        def heard(socket, limit_ms=10_000):
            return wire.decode(socket.recv_multipart(), table) if socket.poll(limit_ms) else None

        first = peer()
        assert isinstance(heard(first), m.Accepted | m.Welcome)
        second = peer()
        assert heard(second, 500) is None
        if side == "worker":
            # Kept: a socket that is dropped takes what it has not sent yet with it.
            producer = broker.producer()
            job = producer.submit(script={"tokens": 3})
            while not isinstance(run := heard(first), m.Run):
                assert isinstance(run, m.BrokerBeat)
            assert run.id == job
        else:
            first.send_multipart(wire.encode(m.Submit(b"j" * 16, wire.pack_body({"prompt": "a b"}))))
            while not isinstance(heard(first), m.Done):
                pass
        assert heard(second, 0) is None
        first.close()
        # A peer that comes anew is heard as soon as the broker has seen the first one go.
        for _ in range(100):
            third = peer()
            answer = heard(third, 200)
            third.close()
            if answer is not None:
                break
        assert isinstance(answer, m.Accepted | m.Welcome)


def test_a_peer_that_floods_the_workers_endpoint_without_reading_does_not_cut_off_the_worker():
    with service() as broker:
        broker.worker()
        producer = broker.producer()
        flooder = broker.context.socket(zmq.DEALER)
        flooder.setsockopt(zmq.RCVHWM, 1)
        flooder.setsockopt(zmq.RCVBUF, 4096)
        flooder.setsockopt(zmq.SNDTIMEO, 2000)
        flooder.linger = 0
        flooder.connect(broker.back)
        for _ in range(20_000):
            flooder.send_multipart([b"MTX\x01", b"\x00", b"x"])
        job = producer.submit(script={"tokens": 3})
        assert producer.last_word(job, limit=10).outcome == "stop"
        assert producer.health()["counters"]["bad_worker_frames"] > 1000


def test_a_producer_cannot_speak_as_a_worker():
    with service() as broker:
        producer = broker.producer()
        frames = wire.encode(m.WorkerBye(b"W" * 16))
        producer.socket.send_multipart(frames)
        assert producer.expect(m.Error).code == "E_UNKNOWN_KIND"


def test_the_worker_is_taken_before_its_first_job_and_waits_without_a_broker(tmp_path):
    with service() as broker:
        worker = Worker(broker.back)
        broker.programs.append(worker)
        worker.wait_for("accepted")
        assert not worker.events("run")
