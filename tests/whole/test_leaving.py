"""Cancelling and leaving with real processes: whoever is gone costs nothing, and nothing leaks."""

import random
import time

import pytest
from whole.harness import check_stream, check_worker, service

from mtplx import messages as m

# A client that goes away is found out at the next beat, and its jobs are cancelled orphan_s later.
FAST = ("--beat-s", "0.2", "--dead-s", "5", "--orphan-s", "0.2")


def test_a_client_that_goes_away_mid_stream_stops_its_job_within_a_moment():
    with service(*FAST) as broker:
        worker = broker.worker()
        leaver, stayer = broker.producer(), broker.producer()
        job = leaver.submit(script={"tokens": 2000, "token_s": 0.02})
        for _ in range(3):
            leaver.expect(m.Chunk, job)
        leaver.socket.close()
        cancel = worker.wait_for("cancel")[0]
        final = worker.wait_for("final")[0]
        # From the cancel's arrival on, at most one more token; the whole answer takes 40 s.
        assert final.at - cancel.at < 2.0
        assert final.tokens < 1000
        assert stayer.last_word(stayer.submit(script={"tokens": 2})).outcome == "stop"
        assert stayer.health()["counters"]["orphans_cancelled"] == 1


def test_waiting_jobs_of_clients_that_are_gone_never_reach_the_worker():
    with service(*FAST) as broker:
        worker = broker.worker()
        runner, leavers, stayer = broker.producer(), [broker.producer() for _ in range(2)], broker.producer()
        long = runner.submit(script={"tokens": 100_000, "token_s": 0.01})
        worker.wait_for("run")
        for leaver in leavers:
            leaver.submit(script={"tokens": 1})
            leaver.expect(m.Admitted)
        kept = stayer.submit(script={"tokens": 1})
        stayer.expect(m.Admitted)
        for leaver in leavers:
            leaver.socket.close()
        stayer.until(lambda one: isinstance(one, m.Progress) and one.position == 1)
        runner.say(m.Cancel(long))
        assert stayer.last_word(kept).outcome == "stop"
        assert worker.ran(2) == [long.hex(), kept.hex()]
        assert stayer.health()["scheduler"]["hyper"]["abandoned_before_start_total"] == 2


@pytest.mark.parametrize("seed", [1])
def test_three_hundred_cancels_at_random_moments_leave_nothing_behind(seed):
    dice = random.Random(seed)
    with service() as broker:
        worker = broker.worker()
        producer = broker.producer()
        reference = producer.last_word(producer.submit(script={"tokens": 8}, prompt="probe"))
        reading = 0
        for _ in range(30):
            jobs = []
            for _ in range(10):
                tokens = dice.choice([1, 3, 20])
                moment = dice.randrange(5)
                script = {
                    "tokens": tokens,
                    "token_s": dice.choice([0.0, 0.001]),
                    "prefill_steps": dice.choice([0, 2]),
                }
                if moment == 4:
                    # Far longer than it takes to cancel, so that the cancel finds it reading its prompt.
                    script |= {"prefill_steps": 10_000, "prefill_step_s": 0.01}
                job = producer.submit(script=script)
                jobs.append(job)
                if moment in (1, 4):
                    producer.expect(m.Started, job)
                elif moment == 2:
                    producer.until(lambda one, job=job: isinstance(one, m.Chunk | m.Done) and one.id == job)
                elif moment == 3:
                    # The moment of the last token.
                    producer.until(
                        lambda one, job=job, last=tokens - 1: (
                            isinstance(one, m.Done)
                            or (isinstance(one, m.Chunk) and one.id == job and one.first + one.n > last)
                        )
                    )
                producer.say(m.Cancel(job))
            for job in jobs:
                word = producer.last_word(job)
                assert check_stream(producer, job).outcome in ("cancelled", "stop")
                started = any(isinstance(one, m.Started) for one in producer.about(job))
                reading += started and word.outcome == "cancelled" and not word.usage["completion_tokens"]
            probe = producer.last_word(producer.submit(script={"tokens": 8}, prompt="probe"))
            assert (probe.text, probe.sha256) == (reference.text, reference.sha256)
            hyper = producer.health()["scheduler"]["hyper"]
            assert (hyper["active"], hyper["queue_depth"]) == (0, 0)
        check_worker(worker.log)
        assert reading >= 30
        assert hyper["admitted_total"] == 331
        ended = hyper["completed_total"] + hyper["failed_total"] + hyper["abandoned_before_start_total"]
        assert ended == 331


def test_a_thousand_pings_while_a_job_streams_do_not_touch_it():
    with service() as broker:
        broker.worker()
        streamer, flooder = broker.producer(), broker.producer()
        job = streamer.submit(script={"tokens": 300, "token_s": 0.002})
        streamer.expect(m.Started, job)
        began = time.monotonic()
        for number in range(1000):
            flooder.say(m.Ping(number))
            flooder.expect(m.Pong)
        assert time.monotonic() - began < 60
        streamer.last_word(job)
        assert check_stream(streamer, job).outcome == "stop"
