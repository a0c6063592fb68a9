"""The conversation without sockets: what is said again, whom an error concerns, what is refused unsent."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from whole.fake_broker import LIMITS, chunks, done

from mtplx import BadJobError, BrokerUnreachableError, Job, MtplxError
from mtplx import messages as m
from mtplx.patience import Patience
from mtplx.request import SubmitArguments, SubmitOptions, request_of
from mtplx.session import Session
from mtplx.stream import StreamState
from mtplx.wire import encode

BOOT = b"b" * 16
OTHERS = b"\x05" * 16
GONE = BrokerUnreachableError("gone")


def hear(session: Session, *messages: m.Message, now: float = 0.0) -> None:
    for message in messages:
        session.receive(encode(message), now)


def said(session: Session) -> list[m.Message]:
    found = list(session.outbox)
    session.outbox.clear()
    return found


@pytest.fixture
def session() -> Session:
    found = Session("ipc:///x")
    found.hello()
    found.outbox.clear()
    hear(found, m.Welcome(version=1, boot_id=BOOT, beat_ms=100, limits=LIMITS, server="x"))
    return found


def admitted(state: StreamState) -> m.Admitted:
    return m.Admitted(id=state.id, admit_seq=0, position=0, boot_id=BOOT, seed=1)


def opened(session: Session, **options: Any) -> StreamState:
    state = session.submit(Job(prompt="x"), SubmitOptions(**options))
    session.outbox.clear()
    hear(session, admitted(state))
    return state


def error(code: str, job_id: bytes | None = None, field: str | None = None) -> m.Error:
    return m.Error(code=code, message="No.", retryable=False, id=job_id, field=field)


# --- what a new connection is told


def test_a_cancel_is_said_again_on_a_new_connection_whether_it_had_left_or_not(session: Session) -> None:
    unsent, sent = opened(session), opened(session)
    session.cancel(sent)
    session.outbox.clear()
    session.cancel(unsent)
    session.reconnected()
    hello, *resumes, first, second = said(session)
    assert isinstance(hello, m.Hello)
    assert [type(one) for one in resumes] == [m.Resume, m.Resume]
    assert {first, second} == {m.Cancel(sent.id), m.Cancel(unsent.id)}
    # Until the last word.
    hear(session, done(sent.id, (), outcome="cancelled"))
    session.reconnected()
    assert [one for one in said(session) if isinstance(one, m.Cancel)] == [m.Cancel(unsent.id)]


def test_a_cancel_of_anothers_job_is_said_again_before_its_question(session: Session) -> None:
    ticket = session.ask(m.Status(id=OTHERS), cancel=True)
    session.outbox.clear()
    session.reconnected()
    assert said(session)[1:] == [m.Cancel(OTHERS), m.Status(id=OTHERS)]
    hear(session, m.StatusReply(status={"id": OTHERS.hex(), "state": "ended"}))
    assert ticket.result()["state"] == "ended"


def test_a_cancel_nobody_waits_for_any_more_is_still_sent(session: Session) -> None:
    session.drop(session.ask(m.Status(id=OTHERS), cancel=True))
    session.reconnected()
    assert said(session)[1:] == [m.Cancel(OTHERS)]


def test_a_job_given_up_while_the_connection_is_down_is_cancelled_on_the_next(session: Session) -> None:
    state = opened(session, finish=True)
    session.give_up(state, GONE)
    session.outbox.clear()
    for _ in range(2):
        session.reconnected()
        assert said(session)[1:] == [m.Cancel(state.id)]
    hear(session, error("E_UNKNOWN_JOB", state.id))
    session.reconnected()
    assert said(session)[1:] == []


def test_what_a_job_given_up_still_says_is_not_counted_as_after_its_last_word(session: Session) -> None:
    state = opened(session)
    session.give_up(state, GONE)
    hear(session, *chunks(state.id), done(state.id))
    assert session.after_last_word == 0
    hear(session, done(state.id))
    assert session.after_last_word == 1


# --- whom an error concerns


def test_an_error_without_id_ends_no_open_job(session: Session) -> None:
    state = opened(session)
    hear(session, error("E_PROTOCOL", field="tokens"), error("E_INTERNAL"), error("E_UNKNOWN_KIND"))
    assert not state.ended
    assert session.failure is None
    assert session.stray_errors == 3
    hear(session, *chunks(state.id), done(state.id))
    assert state.result is not None


def test_an_error_without_id_answers_the_oldest_question_alone(session: Session) -> None:
    health, jobs = session.ask(m.Status()), session.ask(m.Status(jobs=True))
    session.outbox.clear()
    hear(session, error("E_INTERNAL"))
    assert health.error is not None
    assert not jobs.settled
    hear(session, m.StatusReply(status={"jobs": []}))
    assert jobs.answer == {"jobs": []}


def test_an_error_without_id_answers_the_oldest_job_that_is_not_admitted(session: Session) -> None:
    open_one = opened(session)
    first = session.submit(Job(prompt="x"), SubmitOptions())
    session.outbox.clear()
    second = session.submit(Job(prompt="x"), SubmitOptions())
    hear(session, error("E_TOO_LARGE"))
    assert isinstance(first.error, MtplxError)
    # Should it be admitted all the same, nobody reads it.
    assert m.Cancel(first.id) in session.outbox
    # What has not left cannot be meant.
    hear(session, error("E_TOO_LARGE"))
    assert not second.ended
    assert not open_one.ended


@pytest.mark.parametrize("code", ["E_INTERNAL", "E_VERSION"])
def test_before_welcome_an_error_without_id_ends_the_conversation(code: str) -> None:
    session = Session("ipc:///x")
    hear(session, error(code))
    assert session.failure is not None


@pytest.mark.parametrize("code", ["E_PROTOCOL", "E_TOO_LARGE", "E_CONFLICT"])
def test_an_answer_to_a_faulty_message_about_an_admitted_job_leaves_the_job(session: Session, code: str) -> None:
    state = opened(session)
    hear(session, error(code, state.id))
    assert not state.ended
    refused = session.submit(Job(prompt="x"), SubmitOptions())
    hear(session, error(code, refused.id))
    assert refused.ended


def test_a_question_about_an_own_job_that_is_unknown_is_answered_too(session: Session) -> None:
    state = opened(session)
    ticket = session.ask(m.Status(id=state.id))
    session.outbox.clear()
    hear(session, error("E_UNKNOWN_JOB", state.id))
    assert ticket.error is not None
    assert state.error is not None


# --- questions


def test_a_question_nobody_waits_for_any_more_leaves_nothing_behind(session: Session) -> None:
    for _ in range(10):
        session.drop(session.ask(m.Status()))
    assert said(session) == []
    for _ in range(10):
        session.drop(session.ask(m.Status()))
        session.outbox.clear()
    session.reconnected()
    assert said(session) == [m.Hello(versions=(1,))]
    assert not session._open


def test_a_late_answer_is_not_taken_for_that_of_a_later_question(session: Session) -> None:
    session.drop(session.ask(m.Status()))
    session.outbox.clear()
    session.drop(session.ask(m.Status()))
    ticket = session.ask(m.Status())
    session.outbox.clear()
    session.reconnected()
    hear(session, m.StatusReply(status={"n": 3}))
    assert ticket.answer == {"n": 3}
    late = session.ask(m.Status())
    session.outbox.clear()
    session.drop(late)
    ticket = session.ask(m.Status())
    hear(session, m.StatusReply(status={"n": 4}))
    assert not ticket.settled
    hear(session, m.StatusReply(status={"n": 5}))
    assert ticket.answer == {"n": 5}


# --- a broker that was started anew


def restarted(session: Session) -> None:
    """The broker that answers from here on is another process."""
    for boot_id in (BOOT, b"c" * 16):
        hear(session, m.Welcome(1, boot_id, 2000, LIMITS))
    session.outbox.clear()


def test_a_job_that_a_new_broker_does_not_know_is_submitted_again_if_nothing_of_it_came(session: Session) -> None:
    state = opened(session)
    restarted(session)
    hear(session, error("E_UNKNOWN_JOB", state.id), error("E_UNKNOWN_JOB", state.id))
    assert said(session) == [state.submit]
    assert state.error is None
    hear(session, admitted(state), *chunks(state.id, ("a",)))
    assert state.text == "a"


@pytest.mark.parametrize("why", ["it began", "it was cancelled", "the broker is the same"])
def test_one_that_it_cannot_run_again_unseen_ends_with_a_sentence(session: Session, why: str) -> None:
    state = opened(session)
    if why == "it began":
        hear(session, *chunks(state.id, ("a",)))
    if why == "it was cancelled":
        session.cancel(state)
    if why != "the broker is the same":
        restarted(session)
    session.outbox.clear()
    hear(session, error("E_UNKNOWN_JOB", state.id))
    assert said(session) == []
    assert getattr(state.error, "code", "") == "E_UNKNOWN_JOB"


def test_without_a_connection_a_stream_is_waited_for_longer_than_on_one(session: Session) -> None:
    session.up = True
    assert session.idle_limit() == 10.0
    session.up = False
    assert session.idle_limit() == 60.0


# --- what is refused before it is sent


@pytest.mark.parametrize("job_id", [b"", b"x", b"x" * 17, "x" * 16, 5])
def test_an_id_of_another_length_or_kind_is_refused(session: Session, job_id: Any) -> None:
    with pytest.raises(BadJobError) as caught:
        session.ask(m.Status(id=job_id), cancel=True)
    assert caught.value.field == "job_id"
    assert said(session) == []


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"credit": 0}, "credit"),
        ({"credit": -1}, "credit"),
        ({"credit": True}, "credit"),
        ({"credit": 2**64}, "credit"),
        ({"finish": 1}, "finish"),
        ({"deadline_s": "soon"}, "deadline_s"),
        ({"deadline_s": float("nan")}, "deadline_s"),
        ({"queue_ttl_s": 0}, "queue_ttl_s"),
        ({"headers": {"x-a": "\ud800"}}, "headers"),
        ({"headers": {"\ud800": "a"}}, "headers"),
        ({"headers": {"x-a": 5}}, "headers"),
        ({"headers": {"x-a": "a" * 70_000}}, "headers"),
    ],
)
def test_an_option_that_cannot_travel_is_refused_and_leaves_no_stream(
    session: Session, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(BadJobError) as caught:
        session.submit(*request_of("x", options))
    assert caught.value.field == field
    assert not session.streams
    assert said(session) == []


def test_the_arguments_of_submit_are_its_options_and_the_fields_of_a_job() -> None:
    options = [item.name for item in fields(SubmitOptions)]
    assert list(SubmitArguments.__annotations__) == [*options, *(item.name for item in fields(Job))]


# --- patience


def test_every_word_of_the_broker_counts_as_life(session: Session) -> None:
    state = opened(session)
    patience = Patience(
        session, 0.0, None, lambda: 0.4, RuntimeError, lambda idle: BrokerUnreachableError(f"{idle}")
    )
    for beat in range(8):
        at = 0.3 * (beat + 1)
        hear(session, m.Progress(id=state.id, phase="prefill", done=beat, total=8, worker="busy"), now=at)
        assert patience.left(at) == pytest.approx(0.4)
    assert state.progress is not None
    assert (state.progress.phase, state.progress.done) == ("prefill", 7)
    assert patience.left(2.7) == pytest.approx(0.1)
    with pytest.raises(BrokerUnreachableError, match=r"0\.4"):
        patience.left(2.81)
