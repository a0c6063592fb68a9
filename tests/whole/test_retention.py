"""What a broker keeps for readers that are slow, that come back, or that ask for the impossible."""

import pytest
from whole.harness import check_stream, service

from mtplx import messages as m


def test_a_resume_beyond_all_numbers_is_refused_and_the_broker_lives():
    with service() as broker:
        broker.worker()
        first, second = broker.producer(), broker.producer()
        job = first.submit(script={"tokens": 3})
        first.last_word(job)
        second.say(m.Resume(job, 2**64 - 1, 0))
        assert second.expect(m.Error).field == "next_seq"
        second.say(m.Resume(job, 2**53, 0))
        assert second.last_word(job).seq > 2**53
        assert "internal_errors" not in first.health()["counters"]


@pytest.mark.parametrize("flags", [("--retain-s", "0"), ("--retain-bytes", "0")])
def test_a_broker_that_retains_nothing_still_gives_everybody_the_last_word(flags):
    with service(*flags) as broker:
        broker.worker()
        producer = broker.producer()
        jobs = [producer.submit(script={"tokens": 100}) for _ in range(20)]
        for job in jobs:
            assert producer.last_word(job).outcome == "stop"
            check_stream(producer, job)


def test_a_reader_slower_than_memory_allows_is_told_so_and_the_others_are_not_touched():
    with service("--retain-bytes", "400000", "--beat-s", "0.2", "--dead-s", "20") as broker:
        broker.worker()
        slow, quick = broker.producer(), broker.producer()
        # One chunk each, and then no more credit: about 250 kB wait for each of them.
        jobs = [slow.submit(script={"tokens": 1000}, credit=1) for _ in range(5)]
        assert slow.until(lambda one: isinstance(one, m.Error)).code == "E_SLOW_READER"
        for _ in range(10):
            job = quick.submit(script={"tokens": 20})
            assert quick.last_word(job).outcome == "stop"
            check_stream(quick, job)
        for job in jobs[:4]:
            assert slow.last_word(job).code == "E_SLOW_READER"
        slow.say(m.GiveCredit(jobs[4], 10_000))
        assert slow.last_word(jobs[4]).outcome == "stop"
        for job in jobs:
            check_stream(slow, job)
        assert quick.health()["counters"]["slow_readers"] == 4
