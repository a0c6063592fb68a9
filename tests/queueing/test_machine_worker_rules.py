"""The machine's promises about the one worker: who is taken, who is lost, and what a lost one can still do."""

import pytest
from queueing.rig import OTHER_WORKER, WORKER, WORKER_ID, Rig, body, job_id

from broker.moves import Phase
from mtplx import messages as m
from mtplx import wire
from mtplx.errors import ProtocolError

OTHER_ID = b"X" * 16


def test_a_worker_is_accepted_with_the_beat_it_must_keep():
    rig = Rig(beat_s=1.5)
    rig.ready()
    assert rig.worker_heard[WORKER] == [m.Accepted(b"B" * 16, 1500)]
    assert rig.status()["worker"]["state"] == "ready"


def test_a_second_worker_is_refused_and_the_first_keeps_its_job():
    rig = Rig()
    rig.ready()
    rig.submit(1)
    rig.ready(OTHER_WORKER, OTHER_ID, pid=100)
    refusal = rig.worker_heard[OTHER_WORKER][0]
    assert (refusal.code, refusal.detail) == ("E_WORKER_EXISTS", {"pid": 99})
    rig.final()
    assert rig.last_word(1).outcome == "stop"


def test_a_worker_of_another_mode_is_refused_with_both_modes_named():
    rig = Rig()
    rig.ready(mode="serial", stage="")
    refusal = rig.worker_heard[WORKER][0]
    assert refusal.code == "E_WORKER_MODE"
    assert refusal.detail == {"broker": "hyper", "worker": "serial"}
    assert "hyper" in refusal.message
    assert "serial" in refusal.message
    assert rig.status()["worker"]["state"] == "absent"


@pytest.mark.parametrize("reason", ["exited", "silent", "stalled", "replaced", "broken"])
def test_a_job_whose_worker_is_lost_goes_on_at_once_on_the_next_one_behind_what_was_drawn(reason):
    rig = Rig(dead_s=10.0, stall_s=30.0)
    rig.ready()
    rig.submit(1)
    rig.submit(2)
    rig.chunk(4, 5)
    _lose(rig, reason)
    assert rig.last_word(1) is None
    assert rig.status()["worker"]["last_loss"] == reason
    route = WORKER if reason == "replaced" else OTHER_WORKER
    if reason != "replaced":
        assert rig.status()["worker"]["state"] == "absent"
        assert rig.running is None
        rig.ready(OTHER_WORKER, OTHER_ID)
    drawn, run = rig.worker_heard[route][-2:]
    assert drawn == m.Drawn(run.lease, (4, 5))
    assert (run.id, run.attempt, run.lease) == (job_id(1), 2, 2)
    rig.chunk(6, route=route)
    rig.final(route=route)
    assert rig.text(1) == "4 5 6 "
    assert [one.attempt for one in rig.told(1, m.Started)] == [1, 2]
    word = rig.last_word(1)
    assert (word.outcome, word.run["attempt"], word.run["resume_exact"]) == ("stop", 2, True)
    assert rig.running.id == job_id(2)
    rig.final(route=route)
    assert "resume_exact" not in rig.last_word(2).run


def _lose(rig: Rig, reason: str) -> None:
    if reason == "exited":
        rig.gone.add(WORKER)
        rig.back.beat()
        rig.turn()
    elif reason == "silent":
        rig.wait(10.5, beats=False)
    elif reason == "stalled":
        for _ in range(31):
            rig.wait(1.0, beats=False)
            if rig.back.worker is not None:
                rig.beat(progress=False, lease=rig.runs()[0].lease)
    elif reason == "replaced":
        rig.ready(epoch=2)
    elif reason == "broken":
        rig.back.on_bad_frame(WORKER, ProtocolError("Nonsense.", field="magic"), rig.now())
        rig.turn()


def test_a_beating_worker_without_progress_is_stalled_only_while_a_job_runs():
    rig = Rig(stall_s=5.0)
    rig.ready()
    for _ in range(20):
        rig.wait(1.0, beats=False)
        rig.beat(progress=False)
    assert rig.status()["worker"]["state"] == "ready"
    rig.submit(1)
    for _ in range(4):
        rig.wait(1.0, beats=False)
        rig.beat(progress=False)
    assert rig.running is not None


def test_beats_during_a_long_prefill_keep_the_job_as_long_as_they_progress():
    rig = Rig(stall_s=5.0)
    rig.ready()
    rig.submit(1)
    rig.wait(100)
    assert rig.running.phase is Phase.RUNNING


def test_a_cancel_that_the_dying_worker_never_answers_still_ends_as_cancelled():
    rig = Rig()
    rig.ready()
    rig.submit(1)
    rig.chunk(3)
    rig.say(b"a", m.Cancel(job_id(1)))
    _lose(rig, "exited")
    assert (rig.last_word(1).outcome, rig.last_word(1).text) == ("cancelled", "3 ")


def test_a_cancel_stands_where_the_worker_was_gone_before_it_got_the_job():
    rig = Rig()
    rig.ready()
    rig.machine.on_client(b"a", m.Submit(job_id(1), body()), rig.now())
    rig.machine.tick(rig.now())
    rig.machine.on_client(b"a", m.Cancel(job_id(1)), rig.now())
    rig.gone.add(WORKER)
    rig.turn()
    assert rig.last_word(1).outcome == "cancelled"


def test_a_worker_that_says_bye_ends_its_job_and_gets_no_other():
    rig = Rig()
    rig.ready()
    rig.submit(1)
    rig.submit(2)
    rig.chunk(4)
    rig.worker_says(m.WorkerBye(WORKER_ID))
    assert rig.worker_heard[WORKER][-1] == m.Quiet()
    assert rig.status()["worker"]["state"] == "busy"
    rig.final()
    assert rig.last_word(1).outcome == "stop"
    assert (rig.status()["worker"]["state"], rig.status()["worker"]["last_loss"]) == ("absent", "left")
    assert len(rig.runs()) == 1
    rig.ready(OTHER_WORKER, OTHER_ID)
    rig.final(route=OTHER_WORKER)
    assert rig.last_word(2).outcome == "stop"


def test_a_worker_that_says_bye_and_fails_its_job_gets_no_other():
    rig = Rig()
    rig.ready()
    rig.submit(1)
    rig.submit(2)
    rig.worker_says(m.WorkerBye(WORKER_ID))
    rig.fail()
    assert rig.last_word(1) is None
    assert (len(rig.runs()), rig.status()["line"]["depth"]) == (1, 2)
    rig.ready(OTHER_WORKER, OTHER_ID)
    assert (rig.running.id, rig.running.attempts) == (job_id(1), 2)


def test_a_bye_of_an_idle_worker_frees_its_place_at_once_and_a_strangers_changes_nothing():
    rig = Rig()
    rig.ready()
    rig.worker_says(m.WorkerBye(OTHER_ID), OTHER_WORKER)
    assert rig.worker_heard[OTHER_WORKER] == [m.Quiet()]
    assert rig.status()["worker"]["state"] == "ready"
    rig.worker_says(m.WorkerBye(WORKER_ID))
    assert rig.worker_heard[WORKER][-1] == m.Quiet()
    assert rig.status()["worker"]["state"] == "absent"
    rig.ready(OTHER_WORKER, OTHER_ID)
    assert rig.status()["worker"]["state"] == "ready"


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_job_that_a_leaving_worker_hands_back_goes_on_as_if_not_tried_unless_it_was_cancelled_anyway(cancelled):
    rig = Rig()
    rig.ready()
    rig.submit(1)
    rig.worker_says(m.WorkerBye(WORKER_ID))
    if cancelled:
        rig.say(b"a", m.Cancel(job_id(1)))
    rig.fail("E_WORKER_LOST")
    if cancelled:
        assert rig.last_word(1).outcome == "cancelled"
        return
    rig.ready(OTHER_WORKER, OTHER_ID)
    assert (rig.running.id, rig.running.attempts, rig.running.barren) == (job_id(1), 1, 1)


def test_a_cancel_that_nobody_asked_for_is_no_outcome_of_a_job():
    rig = Rig()
    rig.ready()
    rig.submit(1)
    rig.chunk(1)
    rig.final("cancelled")
    assert rig.last_word(1) is None
    assert (rig.running.id, rig.running.attempts) == (job_id(1), 2)
    assert rig.status()["worker"]["state"] == "busy"


def test_a_repeated_ready_is_answered_and_takes_nothing_from_the_worker():
    """The worker repeats it where the answer is late; the job behind the answer must not be lost."""
    rig = Rig()
    rig.submit(1)
    rig.ready(epoch=4)
    rig.ready(epoch=4)
    accepted = [one.epoch for one in rig.worker_heard[WORKER] if isinstance(one, m.Accepted)]
    assert (accepted, len(rig.runs())) == ([4, 4], 1)
    rig.final()
    assert rig.last_word(1).outcome == "stop"
    assert rig.status()["counters"]["workers_accepted"] == 1
    rig.ready(epoch=5)
    assert rig.status()["worker"]["last_loss"] == "replaced"


def test_nothing_a_worker_says_under_an_old_lease_changes_anything():
    rig = Rig()
    rig.ready()
    rig.submit(1)
    rig.submit(2)
    old = rig.runs()[0]
    rig.chunk(1)
    rig.final()
    rig.chunk(9, run=old, first=0)
    rig.chunk(9, run=rig.runs()[1], route=OTHER_WORKER)
    rig.chunk(9, attempt=2)
    rig.final(run=old)
    rig.worker_says(m.Fail(old.id, old.attempt, old.lease, "E_INTERNAL", "late"))
    assert rig.running.id == job_id(2)
    assert rig.running.tokens == 0
    assert rig.status()["counters"]["stale_worker_messages"] == 5
    rig.final()
    assert rig.last_word(2).text == ""


def test_a_worker_given_up_and_back_is_told_to_start_over_and_cannot_touch_its_old_job():
    rig = Rig(dead_s=10.0)
    rig.ready()
    rig.submit(1)
    rig.submit(2)
    old = rig.runs()[0]
    rig.wait(11, beats=False)
    rig.chunk(7, run=old, first=0)
    rig.back.on_message(b"w-beats", m.WorkerBeat(WORKER_ID, 1, epoch=7), rig.now())
    rig.turn()
    answer = rig.worker_heard[b"w-beats"][-1]
    assert (answer.code, answer.detail) == ("E_UNKNOWN_WORKER", {"epoch": 7})
    assert rig.told(1, m.Chunk) == []
    rig.ready()
    assert (rig.running.id, rig.running.attempts) == (job_id(1), 2)
    rig.chunk(7, run=old, first=0)
    assert rig.told(1, m.Chunk) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"first": 3},
        {"first": 0},
        {"n": 5},
        {"ids": (2**32,)},
        {"ids": (1000,)},
        {"ids": (), "n": 0, "text": "x"},
        {"logprobs": ()},
    ],
    ids=["gap", "repeat", "count", "no uint32", "outside the vocabulary", "no token", "too few log-probabilities"],
)
def test_a_chunk_that_does_not_follow_is_never_passed_on_and_costs_the_worker_its_place(wrong):
    rig = Rig()
    rig.ready()
    rig.submit(1)
    rig.chunk(1)
    rig.chunk(2, **wrong)
    assert (rig.last_word(1), rig.gate.first().id) == (None, job_id(1))
    assert rig.text(1) == "1 "
    assert rig.status()["worker"]["last_loss"] == "broken"


@pytest.mark.parametrize(
    "speculation",
    [{"widths": {"wide": 1}}, {"widths": 5}, {"rows_launched": "many"}, {"widths": {"1": 2}, "fork_wins": None}],
)
def test_strange_figures_in_a_final_word_do_not_cost_the_job_its_end(speculation):
    rig = Rig()
    rig.ready()
    rig.submit(1)
    rig.chunk(1)
    rig.final(speculation=speculation)
    assert rig.last_word(1).outcome == "stop"
    assert rig.gate.completed_total == 1


def test_a_final_word_with_an_unknown_reason_is_a_broken_worker_and_no_outcome():
    rig = Rig()
    rig.ready()
    rig.submit(1)
    rig.final("eos")
    assert (rig.last_word(1), rig.gate.first().id) == (None, job_id(1))
    assert rig.status()["worker"]["last_loss"] == "broken"


def test_a_failed_attempt_ends_its_job_with_the_workers_words():
    rig = Rig()
    rig.ready()
    rig.submit(1)
    rig.fail("E_BAD_JOB", field="prompt", detail={"prompt_tokens": 600, "context": 512})
    word = rig.last_word(1)
    assert (word.code, word.field, word.retryable) == ("E_BAD_JOB", "prompt", False)
    assert rig.back.state == "ready"
    rig.submit(2)
    rig.fail("E_FROM_THE_FUTURE")
    assert rig.last_word(2).code == "E_INTERNAL"


def test_after_the_loop_was_away_the_workers_silence_proves_nothing():
    rig = Rig(beat_s=2.0, dead_s=10.0)
    rig.ready()
    rig.submit(1)
    rig.clock.advance(3600)
    rig.turn()
    assert rig.running is not None
    rig.wait(10.5, beats=False)
    assert (rig.running, rig.status()["worker"]["last_loss"]) == (None, "silent")


def test_an_idle_worker_that_falls_silent_is_lost_and_health_says_so():
    rig = Rig(dead_s=10.0)
    rig.ready()
    rig.wait(11, beats=False)
    worker = rig.status()["worker"]
    assert (worker["state"], worker["last_loss"], worker["lost_pid"]) == ("absent", "silent", 99)


def test_the_worker_hears_the_broker_on_a_clock():
    rig = Rig(beat_s=2.0)
    rig.ready()
    rig.wait(6)
    assert sum(isinstance(one, m.BrokerBeat) for one in rig.worker_heard[WORKER]) == 3


# --- health

HYPER_FIELDS = {
    "stage",
    "admission_cap",
    "width",
    "passthrough",
    "width_executor_installed",
    "active",
    "queue_depth",
    "admitted_total",
    "completed_total",
    "failed_total",
    "abandoned_before_start_total",
    "queue_wait_s",
    "run_s",
    "width_stats",
}
WIDTH_FIELDS = {
    "requests_by_width",
    "self_spec_rows_launched",
    "self_spec_rows_committed",
    "fork_attempts",
    "fork_wins",
}


def test_health_in_hyper_has_exactly_the_fields_of_the_contract():
    rig = Rig()
    rig.ready()
    for number in range(1, 5):
        rig.submit(number)
    rig.say(b"a", m.Cancel(job_id(4)))
    rig.wait(2)
    rig.final(speculation={"widths": {"1": 3}})
    rig.fail()
    scheduler = rig.status()["scheduler"]
    assert scheduler["mode"] == "hyper"
    hyper = scheduler["hyper"]
    assert set(hyper) == HYPER_FIELDS
    assert set(hyper["width_stats"]) == WIDTH_FIELDS
    assert (hyper["stage"], hyper["admission_cap"], hyper["width"]) == ("h0", 1, 1)
    assert (hyper["passthrough"], hyper["width_executor_installed"]) == ("serial_b1", False)
    assert (hyper["active"], hyper["queue_depth"], hyper["admitted_total"]) == (1, 0, 4)
    assert (hyper["completed_total"], hyper["failed_total"], hyper["abandoned_before_start_total"]) == (1, 1, 1)
    for name in ("queue_wait_s", "run_s"):
        assert set(hyper[name]) == {"count", "mean", "p50", "p95", "max"}
    assert (hyper["queue_wait_s"]["count"], hyper["queue_wait_s"]["max"]) == (3, 2.0)
    assert hyper["width_stats"]["requests_by_width"] == {"1": 1}


def test_health_tells_the_width_of_the_running_job_and_one_when_none_runs():
    rig = Rig()
    rig.ready()
    rig.submit(1)
    rig.beat(width=8, lease=rig.running.run.lease, phase="decode")
    assert rig.status()["scheduler"]["hyper"]["width"] == 8
    rig.beat(width=3, lease=rig.running.run.lease + 1, phase="decode")
    assert rig.status()["scheduler"]["hyper"]["width"] == 8, "what an older lease tells is no news"
    rig.final()
    assert rig.status()["scheduler"]["hyper"]["width"] == 1


def test_health_in_serial_names_the_mode_and_has_no_hyper_block():
    rig = Rig(scheduler_mode="serial")
    assert rig.status()["scheduler"] == {"mode": "serial"}


def test_health_before_any_job_or_worker_has_no_waits_and_an_absent_worker():
    rig = Rig()
    report = rig.status()
    assert report["worker"] == {"state": "absent"}
    assert report["scheduler"]["hyper"]["run_s"] == {
        "count": 0,
        "mean": None,
        "p50": None,
        "p95": None,
        "max": None,
    }
    assert (report["line"]["depth"], report["line"]["limit_jobs"]) == (0, 1000)
    assert report["broker"]["draining"] is False


def test_status_of_one_job_and_of_all_tells_states_and_never_the_text():
    rig = Rig()
    rig.ready()
    for number in range(1, 5):
        rig.submit(number)
    rig.chunk(1)
    rig.final()
    listed = rig.say(b"ops", m.Status(jobs=True))[-1].status["jobs"]
    assert [(one["id"], one["state"]) for one in listed] == [
        (job_id(2).hex(), "running"),
        (job_id(3).hex(), "waiting"),
        (job_id(4).hex(), "waiting"),
        (job_id(1).hex(), "ended"),
    ]
    assert (listed[2]["position"], listed[3]["outcome"], listed[3]["tokens"]) == (2, "stop", 1)
    assert rig.say(b"ops", m.Status(id=job_id(3)))[-1].status["position"] == 1
    assert rig.say(b"ops", m.Status(id=job_id(9)))[-1].code == "E_UNKNOWN_JOB"


@pytest.mark.parametrize("code", ["E_PROTOCOL", "E_TOO_LARGE", "E_CONFLICT"])
def test_a_failed_attempt_never_ends_with_a_code_that_ends_no_job(code):
    rig = Rig()
    rig.ready()
    rig.submit(1)
    rig.fail(code)
    assert rig.last_word(1).code == "E_INTERNAL"


@pytest.mark.parametrize("wrong", [{"vocabulary": 2**64 - 1}, {"context": 2**40}])
def test_a_worker_whose_model_cannot_be_is_refused_before_any_job_meets_it(wrong):
    rig = Rig()
    rig.ready(**wrong)
    assert rig.worker_heard[WORKER][-1].code == "E_PROTOCOL"
    assert rig.status()["worker"]["state"] == "absent"


@pytest.mark.parametrize(
    "speculation",
    [{"widths": {"9" * 5000: 1}}, {"rows_launched": 2**64 - 1, "rows_committed": 2**64 - 1}],
)
def test_figures_too_large_for_a_frame_neither_end_the_broker_nor_the_jobs_last_word(speculation):
    rig = Rig()
    rig.ready()
    for number in (1, 2, 3):
        rig.submit(number)
        rig.final(speculation=speculation)
        assert rig.last_word(number).outcome == "stop"
    wire.encode(m.StatusReply(rig.status()))


def test_health_tells_what_the_worker_counts_of_reuse_and_forgets_it_with_the_worker():
    rig = Rig()
    rig.ready()
    assert "prefix" not in rig.status()["worker"]
    for counts in ({"hits": 1, "reused_tokens": 64}, {"hits": 2, "reused_tokens": 99}):
        rig.beat(prefix=counts)
        assert rig.status()["worker"]["prefix"] == counts
    rig.wait(11, beats=False)
    assert "prefix" not in rig.status()["worker"]
    rig.ready(worker_id=bytes(16))
    assert "prefix" not in rig.status()["worker"]
