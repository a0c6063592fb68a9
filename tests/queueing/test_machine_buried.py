"""Jobs that end worker after worker: when they are buried, and what people may do with them then."""

import pytest
from queueing.rig import WORKER, WORKER_ID, body, job_id, kill_in_attempt, rig_of

from broker.moves import Phase
from mtplx import messages as m


@pytest.mark.parametrize("restarts", [False, True])
def test_two_attempts_without_a_new_token_bury_a_job_and_the_next_one_runs(restarts):
    rig = rig_of(orphan_s=100.0)
    rig.submit(1)
    rig.submit(2)
    kill_in_attempt(rig)
    if restarts:
        rig.restart()
    kill_in_attempt(rig)
    if restarts:
        rig.submit(1, b"b")
    word = rig.last_word(1, b"b" if restarts else b"a")
    assert (word.code, word.retryable, word.detail["attempts"], word.detail["tokens"]) == ("E_POISON", False, 2, 0)
    assert word.detail["reason"] == "the worker ended or crashed"
    assert rig.jobs.find(job_id(1)).phase is Phase.BURIED
    rig.ready()
    assert rig.running.id == job_id(2)
    rig.restart()
    assert rig.jobs.find(job_id(1)).phase is Phase.BURIED


def test_a_job_that_takes_the_broker_with_it_is_buried_too():
    rig = rig_of()
    rig.submit(1)
    for _ in range(2):
        rig.ready()
        rig.restart()
    assert rig.jobs.find(job_id(1)).phase is Phase.BURIED


def test_new_tokens_make_an_attempt_count_for_less_and_eight_are_enough():
    rig = rig_of()
    rig.submit(1)
    for attempt in range(1, 9):
        assert rig.jobs.find(job_id(1)).phase is Phase.WAITING, attempt
        kill_in_attempt(rig, attempt)
    word = rig.last_word(1)
    assert (word.code, word.detail["attempts"], word.detail["tokens"]) == ("E_POISON", 8, 8)
    assert rig.text(1) == "1 2 3 4 5 6 7 8 "


def test_an_attempt_that_was_handed_back_or_never_sent_is_none():
    rig = rig_of()
    rig.submit(1)
    for _ in range(5):
        rig.ready()
        rig.worker_says(m.WorkerBye(WORKER_ID))
        rig.fail("E_WORKER_LOST")
    for _ in range(5):
        rig.gone.add(WORKER)
        rig.ready()
        rig.gone.discard(WORKER)
    record = rig.jobs.find(job_id(1))
    assert (record.phase, record.attempts, record.barren) == (Phase.WAITING, 0, 0)
    rig.restart()
    record = rig.jobs.find(job_id(1))
    assert (record.phase, record.attempts, record.barren) == (Phase.WAITING, 0, 0)


def test_a_buried_job_is_listed_shown_kicked_to_the_end_of_the_line_and_runs_from_where_it_was():
    rig = rig_of()
    rig.submit(1, job=body(prompt="a secret"))
    kill_in_attempt(rig, 4)
    kill_in_attempt(rig)
    kill_in_attempt(rig)
    rig.submit(2)
    listed = rig.say(b"o", m.Status(jobs=True, state="buried"))[0].status["jobs"]
    assert [(one["id"], one["state"], one["outcome"]) for one in listed] == [(job_id(1).hex(), "buried", "poison")]
    whole = rig.say(b"o", m.Status(id=job_id(1), whole=True))[0].status
    assert (whole["job"], whole["text"], whole["error"]["code"]) == ({"prompt": "a secret"}, "4 ", "E_POISON")
    kicked = rig.say(b"o", m.Kick(job_id(1)))[0].status
    assert (kicked["state"], kicked["position"], kicked["admit_seq"], kicked["attempts"]) == ("waiting", 1, 2, 0)
    rig.restart()
    rig.say(b"b", m.Resume(job_id(1), 1, 1))
    rig.ready()
    rig.final()
    assert (rig.running.id, rig.running.attempts) == (job_id(1), 1)
    rig.chunk(5)
    rig.final()
    assert rig.last_word(1, b"b").text == "4 5 "


def test_a_kicked_job_runs_whatever_its_time_limits_were_and_whether_its_producer_is_there():
    rig = rig_of(orphan_s=10.0)
    rig.submit(1, queue_ttl_ms=60_000, deadline_ms=90_000)
    kill_in_attempt(rig)
    kill_in_attempt(rig)
    assert rig.last_word(1).code == "E_POISON"
    rig.say(b"o", m.Kick(job_id(1)))
    rig.wait(100.0)
    rig.restart()
    rig.wait(30.0)
    rig.ready()
    assert rig.running is not None, "it was ended"
    rig.chunk(5)
    rig.final()
    assert rig.submit(1, b"b").dup
    assert rig.last_word(1, b"b").outcome == "stop"


def test_who_heard_that_a_job_is_buried_hears_nothing_more_of_it_once_it_is_kicked():
    rig = rig_of()
    rig.submit(1)
    kill_in_attempt(rig, 4)
    kill_in_attempt(rig)
    kill_in_attempt(rig)
    rig.say(b"o", m.Kick(job_id(1)))
    rig.ready()
    rig.chunk(5)
    rig.final()
    assert rig.last_word(1).code == "E_POISON"
    assert rig.submit(1, b"b").dup
    assert rig.last_word(1, b"b").text == "4 5 "


def test_only_a_buried_job_is_kicked_and_only_an_ended_one_deleted():
    rig = rig_of()
    rig.submit(1)
    for message in (m.Kick(job_id(1)), m.Delete(job_id(1))):
        answer = rig.say(b"o", message)[0]
        assert (answer.code, answer.detail) == ("E_CONFLICT", {"state": "waiting"})
    assert rig.say(b"o", m.Kick(job_id(9)))[0].code == "E_UNKNOWN_JOB"
    assert rig.last_word(1) is None


def test_a_buried_job_outlives_an_ack_and_its_retention_but_not_a_delete():
    rig = rig_of(retain_s=5.0)
    rig.submit(1)
    kill_in_attempt(rig)
    kill_in_attempt(rig)
    rig.say(b"a", m.Ack(job_id(1)))
    rig.wait(10)
    assert rig.jobs.find(job_id(1)) is not None
    rig.say(b"a", m.Delete(job_id(1)))
    assert rig.jobs.find(job_id(1)) is None
