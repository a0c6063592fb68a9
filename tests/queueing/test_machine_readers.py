"""The machine's promises to readers: credit, full pipes, and nothing lost for whoever is slow."""

from itertools import pairwise

from queueing.rig import Rig, job_id

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
