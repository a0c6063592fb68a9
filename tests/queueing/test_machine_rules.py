"""The machine's promises to producers, one by one, on a clock moved by hand."""

import pytest
from queueing.rig import BOOT_ID, SEED, Rig, body, job_id, sha256_of

from mtplx import messages as m
from mtplx.errors import ProtocolError


def test_a_job_runs_from_submit_to_done_and_its_reader_sees_each_step_in_order():
    rig = Rig()
    rig.ready()
    rig.say(b"a", m.Submit(job_id(1), body(prompt="x", max_tokens=9)))
    rig.clock.advance(2.0)
    rig.chunk(5, 6)
    rig.chunk(7)
    rig.final("stop", prompt_tokens=4)
    kinds = [type(one) for one in rig.heard[b"a"]]
    assert kinds == [m.Admitted, m.Started, m.Chunk, m.Chunk, m.Done]
    done = rig.last_word(1)
    assert (done.seq, done.outcome, done.text, done.seed) == (2, "stop", "5 6 7 ", SEED)
    assert done.usage == {"prompt_tokens": 4, "cached_tokens": 0, "completion_tokens": 3}
    assert done.timings["time_to_first_token_s"] == pytest.approx(2.0)
    assert done.sha256 == sha256_of([5, 6, 7])
    assert rig.text(1) == done.text


@pytest.mark.parametrize("said", [{}, {"prefix_exact": True}, {"prefix_exact": False}])
def test_done_tells_whether_reused_rows_were_exact_and_a_worker_that_says_nothing_reused_none(said):
    rig = Rig()
    rig.ready()
    rig.submit(1)
    rig.final(cached_tokens=2, **said)
    assert rig.last_word(1).usage["cached_tokens"] == 2
    assert rig.last_word(1).run["prefix_exact"] is said.get("prefix_exact", True)


def test_jobs_of_several_producers_run_in_the_order_of_their_admission():
    rig = Rig()
    for number, route in enumerate([b"c", b"a", b"b", b"a", b"c"], start=1):
        assert rig.submit(number, route).admit_seq == number - 1
    rig.ready()
    rig.finish_all()
    assert [run.id for run in rig.runs()] == [job_id(number) for number in range(1, 6)]


def test_the_next_job_is_handed_out_only_after_the_last_word_of_the_one_before():
    rig = Rig()
    rig.ready()
    rig.submit(1)
    rig.submit(2)
    rig.chunk(1)
    assert len(rig.runs()) == 1
    rig.final()
    assert len(rig.runs()) == 2
    assert rig.runs()[1].lease > rig.runs()[0].lease


def test_position_counts_the_jobs_before_it_the_running_one_included():
    rig = Rig()
    assert rig.submit(1).position == 0
    assert rig.submit(2).position == 1
    rig.ready()
    assert rig.submit(3).position == 2


def test_a_missing_seed_is_drawn_at_admission_and_a_given_one_is_kept():
    rig = Rig()
    rig.ready()
    assert rig.submit(1).seed == SEED
    assert rig.submit(2, job=body(prompt="x", seed=2**64 - 1)).seed == 2**64 - 1
    rig.finish_all()
    assert [run.seed for run in rig.runs()] == [SEED, 2**64 - 1]


# --- cancel


def test_a_waiting_job_is_cancelled_at_once_and_never_reaches_the_worker():
    rig = Rig()
    rig.ready()
    rig.submit(1)
    rig.submit(2)
    rig.say(b"a", m.Cancel(job_id(2)))
    assert rig.last_word(2).outcome == "cancelled"
    assert rig.last_word(2).usage["completion_tokens"] == 0
    rig.finish_all()
    assert [run.id for run in rig.runs()] == [job_id(1)]
    assert rig.gate.abandoned_before_start_total == 1


@pytest.mark.parametrize("drawn", [(), (4, 5)], ids=["in prefill", "in decode"])
def test_a_running_job_is_cancelled_by_the_workers_final_and_keeps_what_it_drew(drawn):
    rig = Rig()
    rig.ready()
    rig.submit(1)
    if drawn:
        rig.chunk(*drawn)
    rig.say(b"a", m.Cancel(job_id(1)))
    assert rig.worker_heard[b"w-main"][-1] == m.CancelRun(rig.runs()[0].lease)
    assert rig.last_word(1) is None
    rig.chunk(6)
    rig.final("cancelled")
    assert rig.last_word(1).outcome == "cancelled"
    assert rig.last_word(1).text == rig.text(1) == "".join(f"{token} " for token in (*drawn, 6))


def test_a_cancel_that_races_the_final_word_changes_nothing_and_the_next_job_is_not_hit():
    rig = Rig()
    rig.ready()
    rig.submit(1)
    rig.submit(2)
    rig.chunk(1)
    rig.say(b"a", m.Cancel(job_id(1)))
    rig.final("stop")
    assert rig.last_word(1).outcome == "stop"
    assert rig.running.id == job_id(2)
    leases = [one.lease for one in rig.worker_heard[b"w-main"] if isinstance(one, m.CancelRun)]
    assert leases == [rig.runs()[0].lease]


def test_a_cancel_after_the_end_or_twice_is_no_second_last_word():
    rig = Rig()
    rig.ready()
    rig.submit(1)
    rig.say(b"a", m.Cancel(job_id(1)))
    rig.say(b"a", m.Cancel(job_id(1)))
    rig.final("cancelled")
    rig.say(b"a", m.Cancel(job_id(1)))
    assert rig.last_word(1).outcome == "cancelled"


def test_a_cancel_from_another_connection_is_answered_with_the_jobs_state():
    rig = Rig()
    rig.submit(1)
    answers = rig.say(b"b", m.Cancel(job_id(1)))
    assert answers[-1].status["state"] == "ended"
    assert rig.last_word(1).outcome == "cancelled"


def test_a_cancel_of_an_unknown_job_says_so():
    assert Rig().say(b"a", m.Cancel(job_id(9)))[0].code == "E_UNKNOWN_JOB"


# --- time limits


def test_a_job_that_waits_longer_than_its_ttl_expires_unrun():
    rig = Rig()
    rig.ready()
    rig.submit(1)
    rig.submit(2, queue_ttl_ms=3000)
    rig.wait(2.9)
    assert rig.last_word(2) is None
    rig.wait(0.2)
    assert (rig.last_word(2).code, rig.last_word(2).retryable) == ("E_EXPIRED", False)
    rig.finish_all()
    assert len(rig.runs()) == 1


def test_the_ttl_does_not_touch_a_job_that_runs():
    rig = Rig()
    rig.ready()
    rig.submit(1, queue_ttl_ms=1000)
    rig.wait(5)
    rig.final()
    assert rig.last_word(1).outcome == "stop"


def test_a_deadline_ends_a_waiting_job_and_a_running_one():
    rig = Rig()
    rig.ready()
    rig.submit(1, deadline_ms=4000)
    rig.submit(2, deadline_ms=3000)
    rig.chunk(1)
    rig.wait(3.5)
    assert rig.last_word(2).code == "E_EXPIRED"
    rig.wait(1)
    assert isinstance(rig.worker_heard[b"w-main"][-1], m.CancelRun | m.BrokerBeat)
    rig.final("cancelled")
    assert rig.last_word(1).code == "E_EXPIRED"
    assert rig.last_word(1).detail == {"tokens": 1}


def test_an_answer_that_is_done_before_the_worker_reads_the_deadlines_cancel_is_delivered():
    rig = Rig()
    rig.ready()
    rig.submit(1, deadline_ms=1000)
    rig.wait(2)
    rig.final("length")
    assert rig.last_word(1).outcome == "length"


def test_the_next_wake_is_never_later_than_the_next_time_limit():
    rig = Rig()
    rig.submit(1, deadline_ms=700)
    rig.submit(2, queue_ttl_ms=300)
    assert rig.machine.next_wake() == pytest.approx(rig.clock.seconds + 0.3)


def test_far_deadlines_of_ended_jobs_are_forgotten():
    rig = Rig(retain_s=0.0)
    rig.ready()
    for number in range(1, 500):
        rig.submit(number, deadline_ms=10**12)
        rig.final()
    rig.wait(1)
    assert len(rig.jobs) == 0
    assert len(rig.machine._timers) < 100


# --- duplicates, conflicts, resume


def test_a_job_submitted_twice_on_one_connection_runs_once_and_its_stream_goes_on():
    rig = Rig()
    rig.ready()
    rig.submit(1)
    rig.chunk(1)
    again = rig.submit(1)
    assert (again.dup, again.admit_seq) == (True, 0)
    rig.chunk(2)
    rig.final()
    assert rig.text(1) == rig.last_word(1).text == "1 2 "
    assert len(rig.runs()) == 1
    assert rig.gate.admitted_total == 1


@pytest.mark.parametrize("ended", [False, True])
def test_a_job_submitted_again_from_another_connection_is_streamed_there_from_the_start(ended):
    rig = Rig()
    rig.ready()
    rig.submit(1)
    rig.chunk(1)
    rig.chunk(2)
    if ended:
        rig.final()
    before = len(rig.heard[b"a"])
    assert rig.submit(1, b"b").dup
    if not ended:
        rig.final()
    assert rig.text(1, b"b") == rig.last_word(1, b"b").text == "1 2 "
    assert rig.last_word(1, b"b").seq == len(rig.told(1, m.Chunk, b"b"))
    assert len(rig.heard[b"a"]) == before
    assert len(rig.runs()) == 1


def test_an_id_taken_by_another_job_is_a_conflict_and_the_first_goes_on():
    rig = Rig()
    rig.ready()
    rig.submit(1)
    answer = rig.submit(1, b"b", job=body(prompt="something else"))
    assert (answer.code, answer.retryable) == ("E_CONFLICT", False)
    rig.final()
    assert rig.last_word(1).outcome == "stop"


def test_resume_goes_on_after_the_tokens_received_with_the_callers_numbering():
    rig = Rig()
    rig.ready()
    rig.submit(1)
    for token in range(6):
        rig.chunk(token)
    rig.say(b"b", m.Resume(job_id(1), next_seq=4, tokens=4))
    first = rig.told(1, m.Chunk, b"b")[0]
    assert (first.seq, first.first, first.ids) == (4, 4, (4, 5))
    rig.chunk(6)
    rig.final()
    assert rig.told(1, m.Chunk, b"b")[1].seq == 5
    assert rig.last_word(1, b"b").seq == 6
    assert rig.last_word(1, b"a") is None


def test_the_credit_of_resume_counts_from_where_it_resumes():
    rig = Rig()
    rig.ready()
    rig.submit(1)
    for token in range(6):
        rig.chunk(token)
    rig.say(b"b", m.Resume(job_id(1), next_seq=5, tokens=5, credit=2))
    assert [chunk.seq for chunk in rig.told(1, m.Chunk, b"b")] == [5]
    rig.chunk(6)
    rig.chunk(7)
    assert [chunk.seq for chunk in rig.told(1, m.Chunk, b"b")] == [5, 6]
    rig.say(b"b", m.GiveCredit(job_id(1), upto_seq=8))
    assert [chunk.seq for chunk in rig.told(1, m.Chunk, b"b")] == [5, 6, 7]


def test_resume_in_the_middle_of_a_piece_or_beyond_the_answer_is_refused_without_ending_the_job():
    rig = Rig()
    rig.ready()
    rig.submit(1)
    rig.chunk(1, 2, 3)
    for tokens in (1, 4):
        answer = rig.say(b"a", m.Resume(job_id(1), 0, tokens))[0]
        assert (answer.code, answer.field, answer.id) == ("E_PROTOCOL", "tokens", None)
    rig.final()
    assert rig.last_word(1).outcome == "stop"


def test_resume_of_an_ended_job_brings_the_rest_and_the_last_word():
    rig = Rig()
    rig.ready()
    rig.submit(1)
    rig.chunk(1)
    rig.chunk(2)
    rig.final()
    rig.say(b"b", m.Resume(job_id(1), 1, 1))
    assert [chunk.ids for chunk in rig.told(1, m.Chunk, b"b")] == [(2,)]
    assert rig.last_word(1, b"b").seq == 2
    assert rig.say(b"b", m.Resume(job_id(7), 0, 0))[0].code == "E_UNKNOWN_JOB"


# --- answers to messages that are wrong


def test_an_error_about_a_malformed_message_never_reads_as_the_last_word_of_an_open_job():
    rig = Rig()
    rig.ready()
    rig.submit(1)
    fault = ProtocolError("The key upto_seq must be uint.", field="upto_seq")
    fault.job_id = job_id(1)
    rig.machine.on_bad_frame(b"a", fault)
    rig.turn()
    assert rig.heard[b"a"][-1].field == "upto_seq"
    rig.final()
    assert rig.last_word(1).outcome == "stop"


def test_a_malformed_submit_is_answered_under_its_id():
    rig = Rig()
    fault = ProtocolError("The key credit must be uint.", field="credit")
    fault.job_id = job_id(1)
    rig.machine.on_bad_frame(b"a", fault)
    rig.turn()
    assert rig.last_word(1).code == "E_PROTOCOL"


def test_hello_tells_the_limits_and_refuses_versions_it_does_not_speak():
    rig = Rig(queue_jobs=7, orphan_s=3.0)
    welcome = rig.say(b"a", m.Hello((1, 2)))[0]
    assert (welcome.version, welcome.boot_id, welcome.beat_ms) == (1, BOOT_ID, 2000)
    assert welcome.limits == {
        "max_job_bytes": 1024**2,
        "queue_jobs": 7,
        "queue_bytes": 256 * 1024**2,
        "client_jobs": 1000,
        "retain_s": 600,
        "orphan_s": 3,
    }
    assert rig.say(b"a", m.Hello((2,)))[0].code == "E_VERSION"
    assert rig.say(b"a", m.Ping(5))[0] == m.Pong(5)
