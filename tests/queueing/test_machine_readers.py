"""The machine's promises to readers: credit, full pipes, and nothing lost for whoever is slow."""

from itertools import pairwise

from queueing.rig import Rig, body, job_id

from mtplx import messages as m


def test_without_credit_no_chunk_is_sent_and_with_it_everything_waiting_comes_as_one():
    rig = Rig()
    rig.ready()
    rig.submit(1, credit=1)
    for token in range(5):
        rig.chunk(token)
    assert len(rig.told(1, m.Chunk)) == 1
    rig.final()
    assert rig.last_word(1) is None
    rig.say(b"a", m.GiveCredit(job_id(1), 2))
    assert [chunk.n for chunk in rig.told(1, m.Chunk)] == [1, 4]
    assert rig.last_word(1).text == rig.text(1)


def test_credit_is_never_taken_back():
    rig = Rig()
    rig.ready()
    rig.submit(1, credit=3)
    rig.say(b"a", m.GiveCredit(job_id(1), 1))
    for token in range(3):
        rig.chunk(token)
    assert len(rig.told(1, m.Chunk)) == 3


def test_a_reader_whose_pipe_is_full_gets_all_of_it_in_order_once_it_reads_again():
    rig = Rig()
    rig.ready()
    rig.deaf.add(b"a")
    rig.submit(1)
    for token in range(50):
        rig.chunk(token)
    rig.final()
    rig.submit(2, b"b")
    rig.final()
    assert rig.last_word(2, b"b").outcome == "stop"
    rig.deaf.clear()
    rig.wait(1)
    kinds = [type(one) for one in rig.heard[b"a"]]
    assert kinds == [m.Admitted, m.Started, m.Chunk, m.Done]
    assert rig.text(1) == rig.last_word(1).text


def test_a_reader_that_stays_deaf_is_tried_ever_less_often_but_once_a_second():
    rig = Rig()
    rig.ready()
    rig.deaf.add(b"a")
    rig.submit(1)
    rig.chunk(*range(1000))
    tries = []
    while rig.clock.seconds < 1020.0:
        retry = rig.jobs.outboxes.next_retry()
        rig.clock.advance(max(0.0, retry - rig.clock.seconds))
        rig.turn()
        tries.append(rig.clock.seconds)
    assert len(tries) < 40
    assert max(after - before for before, after in pairwise(tries)) <= 1.0
    rig.deaf.clear()
    rig.wait(1.0)
    assert rig.told(1, m.Chunk)[0].n == 1000


def test_a_late_message_of_a_connection_that_is_gone_takes_no_stream_away():
    """A producer that connected anew may be read before what it said on its old connections."""
    rig = Rig(orphan_s=3.0)
    rig.ready()
    rig.submit(1, b"new")
    rig.submit(2, b"new")
    rig.chunk(5, 6)
    for late in (b"old", b"older"):
        rig.gone.add(late)
        rig.say(late, m.Resume(job_id(1), 0, 0))
        rig.say(late, m.Submit(job_id(2), body()))
    rig.wait(10.0)
    for number in (1, 2):
        rig.chunk(7)
        rig.final()
        assert rig.last_word(number, b"new").outcome == "stop"
        assert rig.text(number, b"new") == rig.last_word(number, b"new").text
    assert "orphans_cancelled" not in rig.machine.jobs.counters


def test_a_job_whose_readers_are_all_gone_is_an_orphan():
    rig = Rig(orphan_s=3.0)
    rig.ready()
    rig.submit(1, b"a")
    rig.submit(2, b"a")
    rig.say(b"b", m.Resume(job_id(2), 0, 0))
    rig.gone |= {b"a", b"b"}
    rig.wait(10.0)
    assert rig.machine.jobs.counters["orphans_cancelled"] == 2


def test_a_slow_reader_hears_of_a_second_attempt_before_the_last_word():
    rig = Rig()
    rig.ready()
    rig.deaf.add(b"a")
    rig.submit(1)
    rig.chunk(5)
    rig.back.lose("exited", rig.now())
    rig.ready(b"w-next", b"N" * 16)
    rig.deaf.clear()
    rig.wait(2.0)
    assert [one.attempt for one in rig.told(1, m.Started)] == [1, 2]
    rig.chunk(6, route=b"w-next")
    rig.final(route=b"w-next")
    assert rig.last_word(1).text == rig.text(1)


def test_what_a_slow_reader_hears_of_a_second_attempt_is_not_behind_the_last_word():
    rig = Rig()
    rig.ready()
    rig.deaf.add(b"a")
    rig.submit(1)
    rig.chunk(5)
    rig.back.lose("exited", rig.now())
    rig.ready(b"w-next", b"N" * 16)
    rig.chunk(6, route=b"w-next")
    rig.final(route=b"w-next")
    rig.deaf.clear()
    rig.wait(2.0)
    assert [one.attempt for one in rig.told(1, m.Started)] == [1, 2]
    assert rig.last_word(1).text == rig.text(1)
