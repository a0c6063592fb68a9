"""How long an answer waits: for a living reader as long as memory allows, for others `retain_s`."""

import pytest
from queueing.rig import Rig, body, job_id

from mtplx import messages as m


def unknown(rig: Rig, number: int) -> bool:
    return rig.jobs.find(job_id(number)) is None


def test_an_answer_is_kept_retain_s_from_when_its_last_word_was_sent_and_then_unknown():
    rig = Rig(retain_s=60.0)
    rig.ready()
    rig.submit(1)
    rig.final()
    rig.wait(59)
    assert not unknown(rig, 1)
    rig.wait(2)
    assert rig.say(b"b", m.Resume(job_id(1), 0, 0))[-1].code == "E_UNKNOWN_JOB"


def test_each_reading_to_the_end_starts_the_time_anew():
    rig = Rig(retain_s=60.0)
    rig.ready()
    rig.submit(1)
    rig.final()
    rig.wait(59)
    assert rig.submit(1, b"b").dup
    rig.wait(59)
    assert not unknown(rig, 1)
    rig.wait(2)
    assert unknown(rig, 1)


@pytest.mark.parametrize("retain_s", [0.0, 5.0])
@pytest.mark.parametrize("how", ["deaf", "no credit"])
def test_an_unread_answer_waits_for_its_living_reader_however_long(retain_s, how):
    rig = Rig(retain_s=retain_s)
    rig.ready()
    rig.submit(1, credit=0 if how == "no credit" else None)
    if how == "deaf":
        rig.deaf.add(b"a")
    rig.chunk(1)
    rig.final()
    rig.wait(100)
    rig.deaf.clear()
    rig.say(b"a", m.GiveCredit(job_id(1), 5))
    rig.wait(2)
    assert rig.last_word(1).text == rig.text(1) == "1 "
    rig.wait(retain_s + 0.1)
    assert unknown(rig, 1)


@pytest.mark.parametrize("retain_s", [0.0, 5.0])
def test_whoever_reads_at_once_gets_every_word_whatever_is_retained(retain_s):
    rig = Rig(retain_s=retain_s, retain_bytes=0)
    rig.ready()
    for number in range(1, 20):
        rig.submit(number)
        rig.chunk(*range(500))
        rig.final()
        assert rig.last_word(number).outcome == "stop"
    rig.wait(6)
    assert not rig.jobs


@pytest.mark.parametrize("leaves", ["before the end", "after the end"])
def test_an_unread_answer_whose_reader_is_gone_is_kept_retain_s(leaves):
    rig = Rig(retain_s=60.0, orphan_s=1.0)
    rig.ready()
    rig.submit(1, credit=0, finish=True)
    rig.chunk(1)
    if leaves == "before the end":
        rig.say(b"a", m.Bye())
    rig.final()
    rig.wait(30)
    if leaves == "after the end":
        rig.say(b"a", m.Bye())
    rig.wait(29)
    assert not unknown(rig, 1)
    rig.wait(32)
    assert unknown(rig, 1)


def slow_answers(rig: Rig, count: int) -> None:
    for number in range(1, count + 1):
        rig.submit(number, b"slow", credit=1)
        rig.chunk(1)
        rig.chunk(*range(300))
        rig.final()


def test_unread_answers_are_bounded_by_bytes_and_the_reader_of_one_that_goes_is_told():
    rig = Rig(retain_bytes=100_000)
    rig.ready()
    slow_answers(rig, 20)
    rig.wait(5)
    unread = [record for record in rig.jobs if record.unread]
    assert 0 < sum(record.kept_bytes for record in unread) <= 100_000
    gone = [number for number in range(1, 21) if unknown(rig, number)]
    assert gone == list(range(1, 21 - len(unread)))
    for number in gone:
        word = rig.last_word(number, b"slow")
        assert (word.code, word.retryable, word.detail) == (
            "E_SLOW_READER",
            False,
            {"tokens": 301, "limit": 100_000},
        )
    assert rig.status()["counters"]["slow_readers"] == len(gone)
    for number in range(1, 21):
        if number not in gone:
            rig.say(b"slow", m.GiveCredit(job_id(number), 10))
            assert rig.last_word(number, b"slow").text == rig.text(number, b"slow")


def test_slow_readers_cost_the_others_neither_their_answers_nor_their_turn():
    rig = Rig(retain_bytes=100_000)
    rig.ready()
    slow_answers(rig, 20)
    rig.submit(100, b"quick")
    rig.chunk(7)
    rig.final()
    assert rig.last_word(100, b"quick").text == "7 "
    rig.wait(5)
    rig.say(b"later", m.Resume(job_id(100), 0, 0))
    assert rig.last_word(100, b"later").text == "7 "


def test_a_reader_has_a_beat_to_read_even_an_answer_larger_than_all_that_is_kept():
    rig = Rig(retain_bytes=1000, beat_s=2.0)
    rig.ready()
    rig.deaf.add(b"a")
    rig.submit(1)
    rig.chunk(*range(900))
    rig.final()
    rig.wait(0.5)
    rig.deaf.clear()
    rig.wait(1.0)
    assert rig.last_word(1).text == rig.text(1)


def test_a_reader_that_reads_nothing_at_all_is_told_once_it_reads():
    rig = Rig(retain_bytes=1000)
    rig.ready()
    rig.deaf.add(b"a")
    for number in (1, 2):
        rig.submit(number)
        rig.chunk(*range(900))
        rig.final()
    rig.wait(10)
    assert not rig.jobs
    rig.deaf.clear()
    rig.wait(2)
    for number in (1, 2):
        assert rig.last_word(number).code == "E_SLOW_READER"


def test_a_job_that_was_dropped_unread_runs_again_when_it_is_submitted_again():
    rig = Rig(retain_bytes=1000)
    rig.ready()
    slow_answers(rig, 1)
    rig.wait(5)
    assert rig.say(b"b", m.Resume(job_id(1), 0, 0))[0].code == "E_UNKNOWN_JOB"
    assert rig.submit(1, b"c", job=body()).dup is False
    rig.final()
    assert rig.last_word(1, b"c").outcome == "stop"


# --- the order of words at a second reader


@pytest.mark.parametrize("stage", ["waiting", "running", "ended", "ended unrun"])
def test_a_second_reader_hears_admitted_started_chunks_and_the_last_word_in_this_order(stage):
    rig = Rig()
    if stage != "ended unrun":
        rig.ready()
    if stage == "waiting":
        rig.submit(9)
    rig.submit(1)
    if stage in ("running", "ended"):
        rig.chunk(1)
    if stage == "ended":
        rig.final()
    if stage == "ended unrun":
        rig.say(b"a", m.Cancel(job_id(1)))
    before = rig.told(1, m.Started)
    rig.clock.advance(3.0)
    rig.submit(1, b"b")
    if stage == "waiting":
        rig.final()
        rig.chunk(1)
    if stage in ("running", "waiting"):
        rig.final()
    kinds = [type(one) for one in rig.heard[b"b"]]
    assert kinds == ([m.Admitted, m.Done] if stage == "ended unrun" else [m.Admitted, m.Started, m.Chunk, m.Done])
    if before:
        assert rig.told(1, m.Started, b"b") == before
