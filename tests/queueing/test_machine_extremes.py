"""Numbers and texts at the edge of what frames can hold: whatever a peer says, the answer can be sent."""

from pathlib import Path

import pytest
from queueing.rig import WORKER, Rig, body, job_id

from mtplx import messages as m
from mtplx import wire
from mtplx.errors import SettingsError
from mtplx.settings import Settings

MAX_UINT = 2**64 - 1
MAX_SEQ = 2**53


def ended(rig: Rig) -> None:
    rig.ready()
    rig.submit(1)
    rig.chunk(1)
    rig.final()


@pytest.mark.parametrize("next_seq", [MAX_SEQ + 1, MAX_UINT])
def test_resume_with_a_number_that_could_not_be_counted_on_is_refused_and_the_stream_stays(next_seq):
    rig = Rig()
    ended(rig)
    answer = rig.say(b"b", m.Resume(job_id(1), next_seq, 0))[0]
    assert (answer.code, answer.field, answer.id) == ("E_PROTOCOL", "next_seq", None)
    rig.say(b"b", m.Resume(job_id(1), MAX_SEQ, 0))
    assert rig.told(1, m.Chunk, b"b")[0].seq == MAX_SEQ
    assert rig.last_word(1, b"b").seq == MAX_SEQ + 1


def test_the_largest_credit_is_credit():
    rig = Rig()
    ended(rig)
    rig.say(b"b", m.Resume(job_id(1), MAX_SEQ, 0, credit=MAX_UINT))
    rig.say(b"b", m.GiveCredit(job_id(1), MAX_UINT))
    assert rig.last_word(1, b"b").outcome == "stop"


@pytest.mark.parametrize("number", ["9" * 20, "9" * 400])
def test_a_bias_id_beyond_64_bits_is_refused_in_an_answer_that_can_be_sent(number):
    rig = Rig()
    rig.ready()
    refusal = rig.submit(1, job=body(prompt="x", logit_bias={number: 1.0}))
    assert (refusal.code, refusal.field) == ("E_BAD_JOB", "logit_bias")


def test_headers_that_would_not_fit_into_run_beside_its_own_keys_are_refused_at_submit():
    rig = Rig()
    rig.ready()
    headers = {"x-a": "y" * 65_480}
    assert len(wire.encode(m.Submit(job_id(1), body(), h=headers))[2]) <= wire.MAX_HEADER_BYTES
    refusal = rig.submit(1, h=headers)
    assert (refusal.code, refusal.field, refusal.id) == ("E_TOO_LARGE", "h", job_id(1))
    assert not rig.jobs


def test_every_answer_to_a_job_with_the_largest_headers_taken_fits_its_frame():
    rig = Rig()
    rig.ready()
    assert isinstance(rig.submit(1, h={"x-a": "y" * 32_000}), m.Admitted)
    for message in rig.worker_heard[WORKER]:
        assert len(wire.encode(message)[2]) <= wire.MAX_HEADER_BYTES


@pytest.mark.parametrize(
    "speculation",
    [
        {"rows_launched": MAX_UINT, "fork_wins": MAX_UINT},
        {"rows_launched": -5},
        {"rows_launched": True},
        {"widths": {"9" * 5000: 1}},
        {"widths": {"²": 1}},
        {"widths": {str(MAX_UINT): 1}},
    ],
)
def test_figures_of_any_size_in_final_words_leave_health_readable(speculation):
    rig = Rig()
    rig.ready()
    for number in (1, 2):
        rig.submit(number)
        rig.chunk(1)
        rig.final(speculation=speculation)
        assert rig.last_word(number).outcome == "stop"
    stats = rig.status()["scheduler"]["hyper"]["width_stats"]
    assert set(stats["requests_by_width"]) == {"1"}
    assert stats["self_spec_rows_launched"] >= 0


def test_a_hello_with_thousands_of_versions_is_answered_within_a_header():
    rig = Rig()
    answer = rig.say(b"a", m.Hello(tuple(range(2, 60_000))))[0]
    assert answer.code == "E_VERSION"
    assert "2, 3, 4, 5, 6, 7, 8, 9 ..." in answer.message
    assert len(wire.encode(answer)[2]) < 1000


@pytest.mark.parametrize("name", ["retain_s", "orphan_s", "queue_bytes", "beat_s", "queue_jobs"])
def test_settings_that_no_frame_could_tell_are_refused(name):
    with pytest.raises(SettingsError, match="must be from"):
        Settings.load({name: 1e30 if name.endswith("_s") else 10**30, "dead_s": 2**53}, environ={})


def test_the_cache_folder_follows_the_environment_that_was_given(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/tmp/of-the-process")
    assert Settings.load(environ={"XDG_CACHE_HOME": "/tmp/given"}).cache_dir == Path("/tmp/given/mtplx")
    assert "/tmp/of-the-process" not in str(Settings.load(environ={}).cache_dir)
    asked = Settings.load(environ={"XDG_CACHE_HOME": "/tmp/given", "MTPLX_CACHE_DIR": "/tmp/asked"})
    assert asked.cache_dir == Path("/tmp/asked")
