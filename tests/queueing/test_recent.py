"""What health tells of what went on lately: waits, faults, speed, speculation; bounded, and without a word of a job."""

import json

import pytest
from queueing.rig import Rig, body

from broker.recent import BUCKET_S, BUCKETS, MAX_DEPTH, MAX_FAULTS, Recent
from broker.record import Now
from mtplx import messages as m
from mtplx.overview import overview
from mtplx.settings import SchedulerMode

SECRET = "sesame opens the cave"


def started() -> Rig:
    rig = Rig()
    rig.ready()
    return rig


def test_the_waits_of_jobs_stand_in_buckets_of_time_with_mean_and_longest():
    rig = started()
    rig.submit(1)
    rig.submit(2)
    rig.wait(4.0)
    rig.chunk(1)
    rig.final()
    waits = rig.status()["recent"]["waits"]
    assert waits["bucket_s"] == BUCKET_S
    (bucket,) = waits["buckets"]
    assert bucket[1:] == [2, pytest.approx(2.0, abs=0.1), pytest.approx(4.0, abs=0.1)]
    rig.wait(3 * BUCKET_S)
    assert rig.status()["recent"]["waits"]["buckets"][0][0] == bucket[0] + 3


def test_old_waits_are_forgotten_and_new_ones_kept_within_bounds():
    recent = Recent()
    for second in range(0, 3 * BUCKETS * BUCKET_S, 7):
        recent.began(1.0, Now(float(second), second * 10**9))
    buckets = recent.report(Now(3.0 * BUCKETS * BUCKET_S, 0))["waits"]["buckets"]
    assert BUCKETS - 2 <= len(buckets) <= BUCKETS
    assert max(age for age, *_ in buckets) < BUCKETS


def test_the_running_job_is_told_with_its_phase_and_the_speed_of_its_last_beats():
    rig = started()
    assert rig.status()["running"] is None
    rig.submit(1)
    rig.beat(lease=1, phase="prefill", done=3, total=9)
    found = rig.status()["running"]
    assert (found["phase"], found["done"], found["total"], found["tokens_per_s"]) == ("prefill", 3, 9, None)
    rig.chunk(1)
    for _ in range(10):
        rig.wait(1.0)
        rig.chunk(*range(5))
    found = rig.status()["running"]
    assert (found["phase"], found["tokens"]) == ("decode", 51)
    assert found["tokens_per_s"] == pytest.approx(5.0, rel=0.3)
    rig.wait(8.0)
    assert rig.status()["running"]["tokens_per_s"] == 0.0


def test_equal_faults_are_counted_and_only_the_last_different_ones_are_kept():
    recent = Recent()
    for number in range(3 * MAX_FAULTS):
        recent.fault("refusal", f"E_{number}", "Something.", Now(1.0, number))
        recent.fault("worker", "exited", "The worker ended.", Now(1.0, number))
    faults = recent.report(Now(1.0, 0))["faults"]
    assert len(faults) == MAX_FAULTS
    assert (faults[0]["code"], faults[0]["count"]) == ("exited", 3 * MAX_FAULTS)


def test_a_refusal_a_failed_job_and_a_lost_worker_are_told_without_a_word_of_the_job():
    rig = started()
    rig.submit(1, job=body(prompt=SECRET, **{SECRET: 1}))
    rig.submit(2, job=body(prompt=SECRET))
    run = rig.runs()[-1]
    rig.worker_says(m.Fail(run.id, run.attempt, run.lease, "E_NUMERIC", SECRET, field=SECRET))
    rig.machine.back.lose("exited", rig.now())
    found = rig.status()
    assert [one["code"] for one in found["recent"]["faults"]] == ["exited", "E_NUMERIC", "E_BAD_JOB"]
    assert found["recent"]["faults"][1]["admit_seq"] == 0
    assert SECRET not in json.dumps(found)
    assert SECRET not in json.dumps(overview(found))


def test_widths_and_acceptance_add_up_over_jobs_and_strange_figures_count_as_none():
    rig = started()
    for speculation in (
        {"widths": {"1": 4, "4": 10}, "accepted_by_depth": [8, 4]},
        {
            "widths": {"4": 10, "x": 9, "\u00b2": 3, "8": -1, "2": 1.5, "99999": 1},
            "accepted_by_depth": [2, "3", True, 1],
        },
        {"widths": "wide", "accepted_by_depth": {"0": 1}},
        {"widths": {}, "accepted_by_depth": [1] * 500},
    ):
        rig.submit(len(rig.runs()) + 1)
        rig.chunk(1)
        rig.final(speculation=speculation)
    recent = rig.status()["recent"]
    assert recent["forwards_by_width"] == {"1": 4, "4": 20}
    assert recent["accepted_by_depth"][:4] == [11, 5, 1, 2]
    assert len(recent["accepted_by_depth"]) == MAX_DEPTH


def test_the_first_of_the_line_are_told_by_number_and_never_by_id_or_owner():
    rig = started()
    for number in range(1, 40):
        rig.submit(number)
    line = rig.status()["line"]
    assert [one["admit_seq"] for one in line["first"]] == list(range(1, 21))
    assert set(line["first"][0]) == {"admit_seq", "waited_s", "bytes", "attempts", "tokens"}


def test_health_says_whether_a_job_could_run_and_if_not_why():
    rig = Rig()
    assert rig.status()["service"] == {"able": False, "why": "No worker is connected."}
    rig.ready()
    assert rig.status()["service"] == {"able": True, "why": ""}
    rig.machine.back.lose("stalled", rig.now())
    assert rig.status()["service"]["why"] == "No worker is connected: the worker made no progress."
    rig.ready()
    rig.machine.drain(rig.now(), 5.0)
    assert rig.status()["service"] == {"able": False, "why": "The broker is stopping."}


@pytest.mark.parametrize("mode", list(SchedulerMode))
def test_the_overview_of_every_state_is_plain_and_says_what_goes_on(mode):
    rig = Rig(scheduler_mode=mode)
    assert overview(rig.status())["headline"] == "No worker"
    rig.ready(mode=str(mode))
    assert overview(rig.status())["tone"] == "idle"
    for number in range(1, 13):
        rig.submit(number)
    shown = overview(rig.status())
    assert (shown["headline"], shown["sentence"]) == ("Running job 0", "11 jobs behind it.")
    assert (len(shown["line"]), shown["line_more"]) == (8, 3)
    assert json.loads(json.dumps(shown)) == shown


def without_one(found):
    """*found* without one of its keys, or of theirs, each in turn."""
    for key, value in found.items():
        yield {name: other for name, other in found.items() if name != key}
        if isinstance(value, dict):
            yield from ({**found, key: less} for less in without_one(value))
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield from ({**found, key: [less, *value[1:]]} for less in without_one(value[0]))


def test_the_overview_of_an_older_or_newer_brokers_health_is_still_one():
    rig = started()
    rig.submit(9)
    rig.chunk(1, 2)
    rig.final(speculation={"widths": {"4": 2}, "accepted_by_depth": [1]})
    rig.submit(10)
    rig.fail("E_NUMERIC")
    for number in range(1, 4):
        rig.submit(number)
    tried = [overview(less) for less in without_one(rig.status())]
    assert len(tried) > 100
    assert all(one["headline"] and one["figures"] for one in tried)
    assert overview({})["tone"] == "wrong"
