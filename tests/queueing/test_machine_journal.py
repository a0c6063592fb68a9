"""What outlives the broker, the worker and a disk that takes nothing: the machine and a journal in memory."""

import pytest
from queueing.rig import OTHER_WORKER, WORKER, Rig, body, job_id, lose_worker, rig_of

from broker.moves import Phase
from mtplx import messages as m

OTHER_ID = b"X" * 16


# --- ADMITTED and the journal


def test_admitted_is_said_only_once_the_job_is_flushed():
    rig = rig_of()
    flushed_at_admitted = []
    said = rig.on_sent_to_client

    def watch(route, message):
        said(route, message)
        if isinstance(message, m.Admitted):
            flushed_at_admitted.append([one.kind for one in rig.journal.log[: rig.journal.flushed]])

    rig.on_sent_to_client = watch
    rig.submit(1)
    assert flushed_at_admitted == [["admitted"]]


def test_an_attempt_is_flushed_before_run_and_a_chunk_is_written_before_it_is_told():
    rig = rig_of()
    rig.submit(1)
    rig.ready()
    assert "attempt" in [one.kind for one in rig.journal.log[: rig.journal.flushed]]
    rig.chunk(5)
    assert rig.journal.log[-1].kind == "piece"
    assert rig.journal.flushed < len(rig.journal.log)
    assert rig.text(1) == "5 "


def test_one_commit_takes_all_that_happened_in_a_turn():
    rig = rig_of()
    for number in range(1, 6):
        rig.machine.on_client(b"a", m.Submit(job_id(number), body()), rig.now())
    before = rig.journal.commits
    rig.turn()
    assert rig.journal.commits == before + 1
    assert len([one for one in rig.heard[b"a"] if isinstance(one, m.Admitted)]) == 5


# --- a commit that fails


def test_jobs_of_a_turn_whose_commit_fails_were_never_taken_and_say_when_to_come_back():
    rig = rig_of()
    rig.ready()
    rig.journal.fails = True
    answer = rig.submit(1)
    assert (answer.code, answer.retryable, answer.retry_after_ms) == ("E_JOURNAL", True, 1000)
    assert "The disk is full." in answer.message
    assert rig.runs() == []
    assert (len(rig.jobs), rig.running, rig.journal.pending) == (0, None, False)
    rig.jobs.check()
    rig.journal.fails = False
    rig.wait(1.1)
    assert isinstance(rig.submit(1), m.Admitted)
    rig.chunk(1)
    rig.final()
    assert (rig.text(1), rig.heard[b"a"][-1].outcome) == ("1 ", "stop")


@pytest.mark.parametrize("also", ["dup", "cancel", "other", "conflict"])
def test_whatever_else_is_said_of_it_in_that_turn_each_producer_hears_one_refusal(also):
    rig = rig_of()
    rig.ready()
    rig.journal.fails = True
    submit = m.Submit(job_id(1), body())
    rig.machine.on_client(b"a", submit, rig.now())
    more = {
        "dup": (b"a", submit),
        "cancel": (b"a", m.Cancel(job_id(1))),
        "other": (b"b", submit),
        "conflict": (b"b", m.Submit(job_id(1), body(prompt="other"))),
    }[also]
    rig.machine.on_client(*more, rig.now())
    rig.turn()
    codes = [one.code for one in rig.heard[b"a"]]
    assert codes in (["E_JOURNAL"], []) if also == "other" else codes == ["E_JOURNAL"]
    if also == "other":
        assert [one.code for one in rig.heard[b"b"]] == ["E_JOURNAL"]
    if also == "conflict":
        assert [one.code for one in rig.heard[b"b"]] == ["E_CONFLICT"]
    assert len(rig.jobs) == 0
    rig.jobs.check()


def test_while_the_journal_fails_jobs_that_were_taken_go_on_and_new_ones_are_refused_at_once():
    rig = rig_of()
    rig.ready()
    rig.submit(1)
    rig.submit(2)
    rig.chunk(1)
    rig.journal.fails = True
    rig.chunk(2)
    assert rig.submit(3).code == "E_JOURNAL"
    assert rig.status()["journal"] == {
        "state": "failing",
        "path": "memory",
        "bytes": rig.journal.nbytes,
        "waiting_bytes": rig.journal.pending_bytes,
        "error": "The disk is full.",
    }
    rig.final()
    assert rig.last_word(1).outcome == "stop"
    rig.chunk(7)
    rig.final()
    assert (rig.text(2), rig.last_word(2).outcome) == ("7 ", "stop")
    rig.journal.fails = False
    rig.wait(1.1)
    assert rig.status()["journal"]["state"] == "well"
    assert all(one.stored.last_word is not None for one in rig.journal.kept.values())


def test_no_job_is_handed_out_while_more_waits_to_be_written_than_is_kept():
    rig = rig_of(retain_bytes=4000)
    rig.ready()
    rig.submit(1)
    rig.submit(2)
    rig.journal.fails = True
    for token in range(6):
        rig.chunk(token)
    rig.final()
    assert rig.last_word(1).outcome == "stop"
    assert rig.running is None
    rig.journal.fails = False
    rig.wait(1.1)
    rig.turn()
    assert rig.running.id == job_id(2)


# --- the broker is started anew


@pytest.mark.parametrize("power_loss", [False, True])
def test_a_job_that_was_admitted_is_there_after_a_restart_in_its_place(power_loss):
    rig = rig_of()
    for number in (1, 2, 3):
        rig.submit(number)
    rig.restart(power_loss=power_loss)
    assert [one.id for one in rig.gate.line.values()] == [job_id(1), job_id(2), job_id(3)]
    assert rig.submit(2, b"b").dup
    assert rig.submit(4, b"b").admit_seq == 3
    assert rig.submit(2, b"b", body(prompt="other")).code == "E_CONFLICT"


def test_the_stream_of_a_running_job_goes_on_after_a_restart_without_gap_or_repeat():
    rig = rig_of()
    rig.ready()
    rig.submit(1)
    rig.submit(2)
    rig.chunk(4)
    rig.chunk(5)
    rig.restart()
    rig.say(b"b", m.Resume(job_id(1), next_seq=2, tokens=2))
    rig.ready()
    drawn, run = rig.worker_heard[WORKER][-2:]
    assert (drawn.ids, run.id, run.attempt) == ((4, 5), job_id(1), 2)
    rig.chunk(6)
    rig.final()
    chunks = rig.told(1, m.Chunk, b"b")
    assert [(one.seq, one.first, one.text) for one in chunks] == [(2, 2, "6 ")]
    assert (rig.last_word(1, b"b").text, rig.last_word(1, b"b").seq) == ("4 5 6 ", 3)
    assert rig.running.id == job_id(2)


def test_after_a_power_loss_nothing_is_told_twice_and_what_was_lost_is_drawn_again():
    rig = rig_of()
    rig.ready()
    rig.submit(1)
    for token in (4, 5, 6):
        rig.chunk(token)
    rig.restart(power_loss=True)
    assert rig.gate.first().tokens == 0
    rig.say(b"b", m.Resume(job_id(1), next_seq=3, tokens=3))
    rig.ready()
    for token in (4, 5, 6):
        rig.chunk(token)
    assert rig.told(1, m.Chunk, b"b") == []
    rig.chunk(7)
    rig.final()
    assert [(one.seq, one.first, one.ids) for one in rig.told(1, m.Chunk, b"b")] == [(3, 3, (7,))]
    assert rig.last_word(1, b"b").text == "4 5 6 7 "


@pytest.mark.parametrize("way", ["ends before", "other pieces"])
def test_a_reader_whose_place_never_comes_again_hears_so(way):
    rig = rig_of()
    rig.ready()
    rig.submit(1)
    for token in (4, 5, 6):
        rig.chunk(token)
    rig.restart(power_loss=True)
    rig.say(b"b", m.Resume(job_id(1), next_seq=3, tokens=3))
    rig.ready()
    if way == "ends before":
        rig.chunk(4)
        rig.final()
    else:
        rig.chunk(4, 5, 6, 7)
    word = rig.last_word(1, b"b")
    assert (word.code, word.retryable, word.detail["received"]) == ("E_ANSWER_LOST", False, 3)
    if way == "other pieces":
        rig.final()
        assert rig.last_word(1, b"b") is word


def test_an_ended_job_is_told_again_after_a_restart_from_the_journal():
    rig = rig_of()
    rig.ready()
    rig.submit(1)
    rig.chunk(4)
    rig.chunk(5)
    rig.final()
    rig.restart()
    assert rig.jobs.find(job_id(1)).answer.spilled
    rig.say(b"b", m.Resume(job_id(1), next_seq=1, tokens=1))
    assert [one.ids for one in rig.told(1, m.Chunk, b"b")] == [(5,)]
    assert rig.last_word(1, b"b").text == "4 5 "
    assert rig.submit(1, b"c").dup
    assert rig.text(1, b"c") == "4 5 "


def test_limits_are_wall_times_and_go_on_while_the_broker_is_away():
    rig = rig_of()
    rig.submit(1, deadline_ms=60_000, finish=True)
    rig.submit(2, queue_ttl_ms=30_000, finish=True)
    rig.submit(3, deadline_ms=600_000, finish=True)
    rig.restart(away_s=61.0)
    assert [one.id for one in rig.gate.line.values()] == [job_id(3)]
    rig.submit(1, b"b")
    assert rig.last_word(1, b"b").code == "E_EXPIRED"


def test_limits_go_on_while_the_machine_sleeps_and_follow_a_clock_that_is_set_back():
    rig = rig_of()
    rig.submit(1, deadline_ms=60_000, finish=True)
    rig.submit(2, deadline_ms=600_000, finish=True)
    rig.submit(3, queue_ttl_ms=30_000, finish=True)
    # Of sleep only the wall clock knows.
    rig.clock.wall_ns += 100 * 10**9
    rig.turn()
    assert [rig.last_word(number) and rig.last_word(number).code for number in (1, 2, 3)] == [
        "E_EXPIRED",
        None,
        "E_EXPIRED",
    ]
    rig.clock.wall_ns -= 300 * 10**9
    rig.wait(790.0)
    assert rig.last_word(2) is None
    rig.wait(11.0)
    assert rig.last_word(2).code == "E_EXPIRED"


def test_no_job_waited_less_than_no_time_where_the_wall_clock_was_set_back():
    rig = rig_of()
    rig.ready()
    for number in (1, 2):
        rig.submit(number, finish=True)
    rig.chunk(4)
    rig.final()
    rig.clock.wall_ns -= 3600 * 10**9
    rig.restart(away_s=1.0)
    rig.ready()
    rig.say(b"b", m.Resume(job_id(2), 0, 0))
    rig.chunk(5)
    rig.final()
    assert 0 <= rig.last_word(2, b"b").timings["queue_wait_s"] < 10
    assert all(record.ended.mono <= rig.clock.seconds for record in rig.jobs)


def test_after_a_restart_producers_have_their_time_to_come_back():
    rig = rig_of(orphan_s=10.0)
    rig.submit(1)
    rig.submit(2)
    rig.submit(3, finish=True)
    rig.restart(away_s=1000.0)
    rig.wait(9.0)
    rig.say(b"b", m.Resume(job_id(2), 0, 0))
    rig.wait(2.0)
    assert [one.id for one in rig.gate.line.values()] == [job_id(2), job_id(3)]


def test_jobs_are_checked_against_the_last_models_limits_before_a_worker_is_there():
    rig = rig_of()
    rig.ready(vocabulary=500)
    rig.restart()
    assert rig.submit(1, job=body(token_ids=[900])).code == "E_BAD_JOB"


def test_what_was_acknowledged_or_deleted_is_forgotten_for_good():
    rig = rig_of()
    rig.ready()
    for number in (1, 2):
        rig.submit(number)
        rig.final()
    rig.say(b"a", m.Ack(job_id(1)))
    assert rig.say(b"a", m.Delete(job_id(2)))[0].status["state"] == "deleted"
    rig.restart()
    assert len(rig.jobs) == 0
    assert rig.say(b"b", m.Resume(job_id(1), 0, 0))[0].code == "E_UNKNOWN_JOB"


# --- the model


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [
        ({"model_hash": "a"}, {"model_hash": "b"}, "E_MODEL_CHANGED"),
        ({"model_hash": "a"}, {"model_hash": ""}, False),
        ({"build_hash": "x"}, {"build_hash": ""}, False),
        ({"build_hash": ""}, {"build_hash": ""}, False),
        ({"model_hash": "a", "build_hash": "x"}, {"model_hash": "a", "build_hash": "y"}, False),
        ({"model_hash": "a", "build_hash": "x"}, {"model_hash": "a", "build_hash": "x"}, True),
        ({}, {"vocabulary": 5}, "E_MODEL_CHANGED"),
        ({}, {"info": {"row_invariant": False}}, False),
    ],
)
def test_an_answer_goes_on_with_its_own_model_alone_and_says_whether_the_build_is_the_same(before, after, outcome):
    rig = rig_of()
    rig.submit(1)
    rig.ready(**before)
    rig.chunk(7)
    rig.restart()
    rig.say(b"b", m.Resume(job_id(1), 1, 1))
    rig.ready(OTHER_WORKER, OTHER_ID, **after)
    if rig.running is not None:
        rig.final(route=OTHER_WORKER)
    word = rig.last_word(1, b"b")
    if outcome == "E_MODEL_CHANGED":
        assert (word.code, word.retryable, word.detail) == (outcome, False, {"tokens": 1})
    else:
        assert word.run["resume_exact"] is outcome


def test_another_model_may_run_a_job_that_has_no_token_yet():
    rig = rig_of()
    rig.submit(1)
    rig.ready(model_hash="a")
    lose_worker(rig)
    rig.ready(OTHER_WORKER, OTHER_ID, model_hash="b")
    rig.chunk(1, route=OTHER_WORKER)
    rig.final(route=OTHER_WORKER)
    assert rig.last_word(1).run["resume_exact"] is True


# --- drain


@pytest.mark.parametrize("obeys", [True, False], ids=["the worker obeys", "the worker is deaf"])
def test_a_drain_leaves_the_line_in_the_journal_and_hands_the_running_job_back(obeys):
    rig = rig_of()
    rig.ready()
    rig.submit(1)
    rig.submit(2)
    rig.chunk(4)
    rig.machine.drain(rig.now(), 5.0)
    rig.turn()
    assert any(isinstance(one, m.Draining) for one in rig.heard[b"a"])
    assert rig.submit(3).code == "E_DRAINING"
    rig.wait(5.1)
    assert rig.running.phase is Phase.CANCELLING
    if obeys:
        rig.final("cancelled")
    else:
        rig.wait(2.1)
    assert rig.machine.drained
    assert (rig.last_word(1), rig.last_word(2)) == (None, None)
    rig.restart()
    assert [one.id for one in rig.gate.line.values()] == [job_id(1), job_id(2)]
    record = rig.gate.first()
    assert (record.tokens, record.attempts, record.barren) == (1, 0, 0)


def test_a_job_cancelled_while_it_is_handed_back_ends():
    rig = rig_of()
    rig.ready()
    rig.submit(1)
    rig.machine.drain(rig.now(), 1.0)
    rig.wait(1.1)
    rig.say(b"a", m.Cancel(job_id(1)))
    rig.final("cancelled")
    assert rig.last_word(1).outcome == "cancelled"


def test_without_a_journal_a_job_that_comes_back_from_a_lost_worker_in_a_drain_hears_that():
    rig = Rig()
    rig.ready()
    rig.submit(1)
    rig.machine.drain(rig.now(), 25.0)
    lose_worker(rig)
    rig.turn()
    assert rig.last_word(1).code == "E_DRAINING"
    assert rig.machine.drained


# --- memory


def test_answers_beyond_the_bound_of_memory_are_told_from_the_journal():
    rig = rig_of()
    rig.jobs.memory_bytes = 3000
    rig.ready()
    for number in range(1, 9):
        rig.submit(number, credit=0)
        for token in range(4):
            rig.chunk(token)
        rig.final()
    spilled = [record for record in rig.jobs if record.answer.spilled]
    assert len(spilled) >= 5
    for number in range(1, 9):
        rig.say(b"a", m.GiveCredit(job_id(number), 10))
        assert rig.text(number) == "0 1 2 3 "
        assert rig.last_word(number).text == "0 1 2 3 "


def test_an_answer_that_cannot_be_read_ends_with_that_and_hurts_nobody_else():
    rig = rig_of()
    rig.jobs.memory_bytes = 0
    rig.ready()
    rig.submit(1, credit=0)
    rig.chunk(1)
    rig.final()
    rig.submit(2)
    rig.journal.unreadable = True
    rig.say(b"a", m.GiveCredit(job_id(1), 10))
    assert rig.last_word(1).code == "E_JOURNAL"
    assert "The disk cannot be read." in rig.say(b"o", m.Status(id=job_id(1), whole=True))[0].status["unreadable"]
    rig.chunk(3)
    assert rig.text(2) == "3 "


# --- one connection


def test_one_connection_may_have_so_many_jobs_open_and_no_more():
    rig = rig_of(client_jobs=3)
    for number in (1, 2, 3):
        rig.submit(number)
    refusal = rig.submit(4)
    assert (refusal.code, refusal.detail["limit_client"]) == ("E_QUEUE_FULL", 3)
    assert isinstance(rig.submit(5, b"b"), m.Admitted)
    rig.say(b"a", m.Cancel(job_id(1)))
    assert isinstance(rig.submit(6), m.Admitted)


def test_after_the_loop_was_away_producers_have_their_time_again():
    rig = rig_of(orphan_s=10.0, beat_s=2.0)
    rig.submit(1)
    rig.gone.add(b"a")
    rig.jobs.tell(b"a", m.Pong(1))
    rig.turn()
    assert rig.jobs.find(job_id(1)).reading.route is None
    rig.clock.advance(3600)
    rig.turn()
    rig.say(b"b", m.Resume(job_id(1), 0, 0))
    rig.wait(20)
    assert rig.gate.first().id == job_id(1)


def test_a_loop_that_was_away_just_after_a_restart_takes_no_time_from_producers_on_their_way_back():
    rig = rig_of(orphan_s=0.5)
    rig.submit(1)
    rig.restart()
    rig.wait(1.0)
    rig.clock.advance(10.0)
    rig.turn()
    rig.wait(3.0)
    rig.say(b"b", m.Resume(job_id(1), 0, 0))
    assert [one.id for one in rig.gate.line.values()] == [job_id(1)]
