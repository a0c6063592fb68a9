"""The machine's promises about limits, leaving clients, retention, drain and the books."""

import pytest
from queueing.rig import Rig, body, job_id

from broker import outbox
from broker.moves import MOVES, IllegalMoveError, Move, Phase, advance
from mtplx import messages as m

# --- the line


def test_a_full_line_refuses_at_once_with_a_retry_hint_and_keeps_what_it_has():
    rig = Rig(queue_jobs=3)
    rig.ready()
    for number in range(1, 5):
        assert isinstance(rig.submit(number), m.Admitted)
    for number in range(5, 8):
        refusal = rig.submit(number)
        assert (refusal.code, refusal.retryable) == ("E_QUEUE_FULL", True)
        assert refusal.retry_after_ms > 0
        assert (refusal.detail["depth"], refusal.detail["limit"]) == (3, 3)
    rig.finish_all()
    assert len(rig.runs()) == 4
    assert rig.status()["line"]["refused_total"] == 3


def test_the_line_is_also_full_by_bytes_and_has_room_again_when_a_job_leaves():
    rig = Rig(queue_bytes=300, max_job_bytes=200)
    job = body(prompt="x" * 100)
    assert isinstance(rig.submit(1, job=job), m.Admitted)
    assert isinstance(rig.submit(2, job=job), m.Admitted)
    refusal = rig.submit(3, job=job)
    assert refusal.code == "E_QUEUE_FULL"
    assert refusal.detail["bytes"] == 2 * len(job)
    assert isinstance(rig.submit(4, job=body(prompt="x")), m.Admitted)
    rig.say(b"a", m.Cancel(job_id(1)))
    assert isinstance(rig.submit(5, job=job), m.Admitted)


def test_the_retry_hint_is_the_mean_run_of_the_last_jobs():
    rig = Rig(queue_jobs=1)
    rig.ready()
    rig.submit(1)
    rig.wait(3.0)
    rig.final()
    for number in (2, 3):
        rig.submit(number)
    assert rig.submit(4).retry_after_ms == pytest.approx(3000)


def test_a_job_that_the_empty_line_could_not_hold_is_too_large_and_not_told_to_come_back():
    rig = Rig(queue_bytes=100, max_job_bytes=200)
    refusal = rig.submit(1, job=body(prompt="x" * 150))
    assert (refusal.code, refusal.retryable, refusal.detail["limit"]) == ("E_TOO_LARGE", False, 100)


def test_a_job_above_the_limit_is_refused_with_both_numbers_and_one_at_the_limit_is_taken():
    job = body(prompt="x" * 500)
    refusal = Rig(max_job_bytes=len(job) - 1).submit(1, job=job)
    assert (refusal.code, refusal.detail) == ("E_TOO_LARGE", {"bytes": len(job), "limit": len(job) - 1})
    assert isinstance(Rig(max_job_bytes=len(job)).submit(1, job=job), m.Admitted)


@pytest.mark.parametrize(
    ("job", "field"),
    [
        (body(prompt="x", max_tokens=0), "max_tokens"),
        (body(prompt=""), "prompt"),
        (body(prompt="x", colour="red"), "colour"),
        (b"\xc1", "body"),
        (body(token_ids=[5, 1000]), "token_ids"),
    ],
)
def test_a_bad_job_is_refused_naming_the_field_and_nothing_is_stored(job, field):
    rig = Rig()
    rig.ready()
    refusal = rig.submit(1, job=job)
    assert (refusal.field, refusal.retryable, refusal.id) == (field, False, job_id(1))
    assert not rig.jobs
    assert isinstance(rig.submit(1), m.Admitted)


def test_a_job_admitted_before_any_worker_is_checked_against_its_limits_at_dispatch():
    rig = Rig()
    rig.submit(1, job=body(token_ids=[5, 4000]))
    rig.submit(2)
    rig.ready()
    assert (rig.last_word(1).code, rig.last_word(1).field) == ("E_BAD_JOB", "token_ids")
    assert rig.running.id == job_id(2)
    assert rig.gate.abandoned_before_start_total == 1


def test_waiting_jobs_are_checked_again_when_a_worker_with_other_limits_comes():
    rig = Rig()
    rig.ready()
    rig.submit(1, job=body(token_ids=[900]))
    rig.submit(2, job=body(token_ids=[900]))
    rig.chunk(499)
    rig.ready(worker_id=b"X" * 16, vocabulary=500)
    assert rig.last_word(1).detail["vocabulary"] == 500
    assert rig.last_word(2).detail["vocabulary"] == 500


# --- clients that leave


def test_a_client_that_is_gone_has_orphan_s_to_come_back_before_its_jobs_are_cancelled():
    rig = Rig(orphan_s=10.0)
    rig.ready()
    rig.submit(1)
    rig.submit(2)
    rig.gone.add(b"a")
    rig.chunk(1)
    rig.wait(9)
    assert rig.running.phase is Phase.RUNNING
    rig.wait(2)
    assert rig.running.phase is Phase.CANCELLING
    assert rig.jobs.find(job_id(2)) not in rig.gate.line.values()
    rig.final("cancelled")
    assert len(rig.runs()) == 1
    assert rig.status()["counters"]["orphans_cancelled"] == 2


def test_the_progress_heartbeat_finds_a_client_out_that_only_waits():
    rig = Rig(orphan_s=1.0)
    rig.submit(1)
    rig.gone.add(b"a")
    rig.wait(4)
    assert not rig.gate.line


def test_a_client_is_found_out_even_if_its_first_jobs_ended_unread():
    rig = Rig(orphan_s=1.0)
    rig.ready()
    for number in range(1, 20):
        rig.submit(number, credit=0)
        rig.chunk(1)
        rig.final()
    rig.submit(20, b"b")
    rig.submit(21, credit=0)
    rig.gone.add(b"a")
    rig.wait(4)
    assert job_id(21) not in rig.gate.line


def test_a_client_that_comes_back_in_time_keeps_its_job():
    rig = Rig(orphan_s=5.0)
    rig.ready()
    rig.submit(1)
    rig.gone.add(b"a")
    rig.chunk(1)
    rig.wait(4)
    rig.say(b"a2", m.Resume(job_id(1), 0, 0))
    rig.wait(10)
    rig.final()
    assert rig.text(1, b"a2") == rig.last_word(1, b"a2").text


def test_each_leaving_starts_the_orphan_time_anew():
    rig = Rig(orphan_s=5.0)
    rig.ready()
    rig.submit(1)
    rig.gone.add(b"a")
    rig.chunk(1)
    rig.wait(4)
    rig.say(b"a2", m.Resume(job_id(1), 0, 0))
    rig.gone.add(b"a2")
    rig.chunk(2)
    rig.wait(3)
    assert rig.running.phase is Phase.RUNNING
    rig.wait(3)
    assert rig.running.phase is Phase.CANCELLING


def test_a_job_submitted_with_finish_outlives_its_client():
    rig = Rig(orphan_s=1.0)
    rig.ready()
    rig.submit(1, finish=True)
    rig.gone.add(b"a")
    rig.chunk(1)
    rig.wait(30)
    rig.final()
    rig.say(b"b", m.Resume(job_id(1), 0, 0))
    assert rig.last_word(1, b"b").outcome == "stop"


def test_bye_cancels_at_once_but_not_what_asked_to_finish():
    rig = Rig()
    rig.ready()
    rig.submit(1, finish=True)
    rig.submit(2)
    rig.submit(3, finish=True)
    rig.say(b"a", m.Bye())
    assert rig.running.phase is Phase.RUNNING
    assert [one.id for one in rig.gate.line.values()] == [job_id(3)]


def test_a_client_that_floods_without_reading_is_dropped_and_the_others_are_not(monkeypatch):
    monkeypatch.setattr(outbox, "MAX_REPLIES", 50)
    rig = Rig(orphan_s=0.0)
    rig.ready()
    rig.submit(1, b"b")
    rig.deaf.add(b"a")
    rig.submit(2)
    for number in range(200):
        rig.machine.on_client(b"a", m.Ping(number), rig.now())
    rig.turn()
    assert rig.status()["counters"]["flooders_dropped"] == 1
    assert rig.jobs.find(job_id(2)) not in rig.gate.line.values()
    rig.final()
    assert rig.last_word(1, b"b").outcome == "stop"


# --- heartbeats to clients


def test_progress_tells_phase_and_position_off_a_clock():
    rig = Rig(beat_s=2.0)
    rig.submit(1)
    rig.submit(2, b"b")
    rig.wait(2)
    assert rig.told(1, m.Progress)[-1] == m.Progress(job_id(1), "waiting", 0, worker="absent")
    assert rig.told(2, m.Progress, b"b")[-1].position == 1
    rig.ready()
    rig.beat(lease=rig.runs()[0].lease, phase="prefill", done=256, total=1000)
    rig.wait(2, beats=False)
    assert rig.told(1, m.Progress)[-1] == m.Progress(job_id(1), "prefill", 0, 256, 1000, "busy")
    assert rig.told(2, m.Progress, b"b")[-1] == m.Progress(job_id(2), "waiting", 1, worker="busy")
    rig.chunk(1, 2, 3)
    rig.wait(2, beats=False)
    assert (rig.told(1, m.Progress)[-1].phase, rig.told(1, m.Progress)[-1].done) == ("decode", 3)


def test_the_position_is_right_behind_another_clients_long_row_of_jobs():
    rig = Rig()
    for number in range(1, 101):
        rig.submit(number)
    rig.submit(200, b"b")
    rig.wait(2)
    assert rig.told(200, m.Progress, b"b")[-1].position == 100


# --- retention


def test_ended_answers_are_bounded_by_bytes_log_probabilities_included():
    rig = Rig(retain_bytes=100_000)
    rig.ready()
    row = tuple((token, -1.0) for token in range(20))
    for number in range(1, 30):
        rig.submit(number)
        for _ in range(10):
            rig.chunk(1, logprobs=(row,))
        rig.final()
    assert len(rig.jobs) < 10
    assert rig.jobs.find(job_id(29)) is not None


def test_ended_jobs_are_bounded_by_count(monkeypatch):
    monkeypatch.setattr("broker.jobs.MAX_KEPT", 5)
    rig = Rig()
    rig.ready()
    for number in range(1, 20):
        rig.submit(number)
        rig.final()
    rig.wait(2)
    assert sorted(record.id for record in rig.jobs) == [job_id(number) for number in range(15, 20)]


def test_an_answer_still_being_read_is_kept_and_does_not_keep_the_others(monkeypatch):
    monkeypatch.setattr("broker.jobs.MAX_KEPT", 5)
    rig = Rig()
    rig.ready()
    rig.submit(1, b"slow", credit=0)
    rig.chunk(1)
    rig.final()
    for number in range(2, 30):
        rig.submit(number)
        rig.final()
    rig.wait(3)
    assert len(rig.jobs) <= 6
    rig.say(b"slow", m.GiveCredit(job_id(1), 1))
    assert rig.last_word(1, b"slow").outcome == "stop"


def test_ack_forgets_an_ended_job_but_no_open_or_unread_one():
    rig = Rig()
    rig.ready()
    rig.submit(1, credit=0)
    rig.say(b"a", m.Ack(job_id(1)))
    rig.chunk(1)
    rig.final()
    rig.say(b"b", m.Ack(job_id(1)))
    rig.say(b"a", m.GiveCredit(job_id(1), 1))
    assert rig.last_word(1).outcome == "stop"
    rig.say(b"a", m.Ack(job_id(1)))
    assert not rig.jobs


# --- drain


def test_a_drain_lets_the_running_job_end_and_tells_the_waiting_ones_at_once():
    rig = Rig()
    rig.ready()
    for number in range(1, 4):
        rig.submit(number)
    rig.machine.drain(rig.now(), 25.0)
    rig.turn()
    assert any(isinstance(one, m.Draining) for one in rig.heard[b"a"])
    assert [rig.last_word(number).code for number in (2, 3)] == ["E_DRAINING"] * 2
    assert isinstance(rig.worker_heard[b"w-main"][-1], m.Quiet)
    refusal = rig.submit(4)
    assert (refusal.code, refusal.retryable) == ("E_DRAINING", True)
    assert not rig.machine.drained
    rig.final()
    assert rig.last_word(1).outcome == "stop"
    assert rig.machine.drained


@pytest.mark.parametrize("obeys", [True, False], ids=["the worker obeys", "the worker is deaf"])
def test_a_job_that_outlasts_the_drain_limit_is_ended(obeys):
    rig = Rig()
    rig.ready()
    rig.submit(1)
    rig.chunk(1)
    rig.machine.drain(rig.now(), 5.0)
    rig.wait(5.1)
    assert rig.running.phase is Phase.CANCELLING
    if obeys:
        rig.final("cancelled")
    else:
        rig.wait(2.1)
    assert rig.last_word(1).code == "E_DRAINING"
    assert rig.machine.drained


def test_a_drain_waits_a_moment_for_a_reader_whose_credit_is_on_its_way():
    rig = Rig()
    rig.ready()
    rig.submit(1, credit=1)
    for token in range(3):
        rig.chunk(token)
    rig.machine.drain(rig.now(), 5.0)
    rig.final()
    assert not rig.machine.drained
    rig.say(b"a", m.GiveCredit(job_id(1), 10))
    assert rig.last_word(1).text == rig.text(1)
    assert rig.machine.drained


# --- the table of moves


def test_the_moves_that_are_not_in_the_table_raise():
    for phase in Phase:
        for move in Move:
            if move in MOVES[phase]:
                assert advance(phase, move) is MOVES[phase][move]
            else:
                with pytest.raises(IllegalMoveError):
                    advance(phase, move)
    assert MOVES[Phase.ENDED] == {}


def test_unread_health_reports_count_by_their_size():
    """Thousands of unread job lists once took gigabytes: a flooder is told by what it makes the broker hold."""
    rig = Rig(queue_jobs=300)
    for number in range(300):
        rig.submit(number)
    rig.deaf.add(b"s")
    for _ in range(200):
        rig.say(b"s", m.Status(jobs=True))
    rig.turn()
    assert rig.status()["counters"]["flooders_dropped"] >= 1
    held = sum(len(client.queue) for client in rig.jobs.outboxes.clients.values())
    assert held < 150


def test_unread_whole_jobs_count_by_their_size():
    rig = Rig(max_job_bytes=2 * 1024**2)
    rig.submit(1, job=body(prompt="p" * 1024**2))
    rig.deaf.add(b"s")
    for _ in range(100):
        rig.say(b"s", m.Status(id=job_id(1), whole=True))
    assert rig.status()["counters"]["flooders_dropped"] >= 1
    held = sum(len(client.queue) for client in rig.jobs.outboxes.clients.values())
    assert held <= 20
