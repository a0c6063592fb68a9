"""The synchronous client against a broker that a test holds by the hand."""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from whole.fake_broker import WORDS, FakeBroker, answer, chunks, done, unknown

from mtplx import (
    BadJobError,
    BrokerUnreachableError,
    BusyError,
    Client,
    Job,
    JobError,
    Piece,
    ProtocolError,
    Settings,
    SettingsError,
)
from mtplx.messages import Bye, Cancel, Chunk, Error, GiveCredit, Status, Submit
from mtplx.stream import error_of
from mtplx.wire import unpack_body

TEXT = "".join(WORDS)


def only_admit(broker: FakeBroker, submit: Submit) -> list:
    return [broker.admit(submit)]


def test_a_prompt_comes_back_as_pieces_and_as_a_result(client: Client) -> None:
    stream = client.submit("Why is the sky blue?", max_tokens=9)
    assert list(stream) == [Piece(word, (n,), None, n) for n, word in enumerate(WORDS)]
    result = stream.result()
    assert (result.text, result.ids, result.finish_reason) == (TEXT, (0, 1, 2, 3), "stop")
    assert (stream.seed, stream.admit_seq, result.seed, result.id) == (7, 1, 7, stream.id)
    assert result.to_map()["id"] == stream.id.hex()


def test_a_job_travels_with_its_options_and_headers(client: Client, broker: FakeBroker) -> None:
    client.run(
        Job(messages=({"role": "user", "content": "Hi"},)),
        deadline_s=2.5,
        queue_ttl_s=0.25,
        finish=True,
        headers={"traceparent": "00-1-2-01"},
        logit_bias={5: -1.0},
    )
    sent = broker.wait_for(Submit)
    assert unpack_body(sent.job, 4096) == {
        "messages": [{"role": "user", "content": "Hi"}],
        "logit_bias": {"5": -1.0},
    }
    assert (sent.deadline_ms, sent.queue_ttl_ms, sent.finish, sent.h) == (
        2500,
        250,
        True,
        {"traceparent": "00-1-2-01"},
    )


def test_a_wrong_field_is_refused_before_anything_is_sent(client: Client, broker: FakeBroker) -> None:
    with pytest.raises(BadJobError, match="Unknown job field temprature") as caught:
        client.submit("Hi", temprature=1)
    assert caught.value.field == "temprature"
    with pytest.raises(BadJobError, match="max_tokens"):
        client.submit(Job(prompt="Hi", max_tokens=0))
    with pytest.raises(BadJobError, match="deadline_s"):
        client.submit("Hi", deadline_s=-1)
    assert broker.of(Submit) == []


def test_a_job_above_the_limit_of_welcome_is_refused_with_both_sizes(client: Client, broker: FakeBroker) -> None:
    with pytest.raises(JobError) as caught:
        client.submit("x" * 5000)
    assert caught.value.code == "E_TOO_LARGE"
    assert caught.value.detail["limit"] == 4096
    assert broker.of(Submit) == []


def test_a_full_line_raises_busy_with_the_time_to_come_back(client: Client, broker: FakeBroker) -> None:
    broker.reply = lambda _, submit: [
        Error(code="E_QUEUE_FULL", message="Full.", retryable=True, id=submit.id, retry_after_ms=250)
    ]
    with pytest.raises(BusyError) as caught:
        client.submit("Hi")
    assert caught.value.retryable
    assert caught.value.retry_after_ms == 250


def test_a_job_refused_by_the_broker_names_its_field(client: Client, broker: FakeBroker) -> None:
    broker.reply = lambda _, submit: [
        Error(code="E_BAD_JOB", message="Id 9 is too high.", retryable=False, id=submit.id, field="token_ids")
    ]
    with pytest.raises(BadJobError, match="too high") as caught:
        client.submit(token_ids=[9])
    assert caught.value.field == "token_ids"


def test_a_failing_job_gives_its_pieces_and_then_its_error(client: Client, broker: FakeBroker) -> None:
    broker.reply = lambda it, submit: [
        it.admit(submit),
        *chunks(submit.id)[:2],
        Error(code="E_WORKER_LOST", message="The worker died.", retryable=True, id=submit.id),
    ]
    stream = client.submit("Hi")
    assert [next(stream).text, next(stream).text] == list(WORDS[:2])
    with pytest.raises(JobError, match="died") as caught:
        next(stream)
    assert caught.value.code == "E_WORKER_LOST"
    assert caught.value.retryable
    with pytest.raises(JobError, match="died"):
        stream.result()


def test_a_cancelled_job_ends_its_iteration_and_keeps_its_text(client: Client, broker: FakeBroker) -> None:
    broker.reply = lambda it, submit: [it.admit(submit), *chunks(submit.id)[:1]]
    stream = client.submit("Hi")
    assert next(stream).text == WORDS[0]
    stream.cancel()
    broker.wait_for(Cancel)
    broker.say(done(stream.id, WORDS[:1], outcome="cancelled"))
    assert list(stream) == []
    assert stream.result().finish_reason == "cancelled"
    assert stream.result().text == WORDS[0]


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (lambda i: [*chunks(i)[:1], *chunks(i, start=2)], "seq"),
        (lambda i: [*chunks(i)[:1], *chunks(i)[:1]], "seq"),
        (lambda i: [Chunk(id=i, attempt=1, seq=0, first=1, n=1, ids=(0,), text="a")], "first"),
        (lambda i: [Chunk(id=i, attempt=1, seq=0, first=0, n=2, ids=(0,), text="a")], "n"),
        (lambda i: [Chunk(id=i, attempt=1, seq=0, first=0, n=1, ids=(0,), text="a", logprobs=())], "logprobs"),
        (lambda i: [Chunk(id=i, attempt=1, seq=0, first=0, n=1, ids=(2**32,), text="a")], "ids"),
        (lambda i: [*chunks(i)[:3], done(i)], "seq"),
        (lambda i: [*chunks(i), done(i, text="Other.")], "text"),
        (lambda i: [*chunks(i), done(i, sha256="00")], "sha256"),
    ],
)
def test_a_broken_promise_ends_the_stream_with_the_field_and_cancels_the_job(
    client: Client, broker: FakeBroker, spoil, field: str
) -> None:
    broker.reply = lambda it, submit: [it.admit(submit), *spoil(submit.id)]
    with pytest.raises(ProtocolError) as caught:
        client.run("Hi")
    assert caught.value.field == field
    broker.wait_for(Cancel)
    broker.reply = answer
    assert client.run("The connection lives on.").text == TEXT


def test_what_comes_after_the_last_word_is_counted_and_changes_nothing(client: Client, broker: FakeBroker) -> None:
    broker.reply = lambda it, submit: [
        it.admit(submit),
        *chunks(submit.id),
        done(submit.id),
        done(submit.id, text="x"),
    ]
    assert client.run("Hi").text == TEXT
    client.health()
    assert client._session.after_last_word == 1


def test_credit_is_given_back_as_the_reader_reads(client: Client, broker: FakeBroker) -> None:
    broker.reply = lambda it, submit: [it.admit(submit), *chunks(submit.id)[:2]]
    stream = client.submit("Hi", credit=2)
    assert broker.wait_for(Submit).credit == 2
    next(stream)
    assert broker.wait_for(GiveCredit).upto_seq == 3
    next(stream)
    assert broker.wait_for(GiveCredit, 2).upto_seq == 4


def test_streams_of_one_client_are_read_in_any_order(client: Client, broker: FakeBroker) -> None:
    broker.reply = only_admit
    first, second = client.submit("one"), client.submit("two")
    broker.say(*chunks(first.id), done(first.id), *chunks(second.id), done(second.id))
    assert second.result().text == TEXT
    assert [piece.text for piece in first] == list(WORDS)


def test_many_threads_share_one_client(client: Client) -> None:
    texts: list[str] = []

    def work() -> None:
        texts.extend(client.run("Hi").text for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert texts == [TEXT] * 160


def test_a_waiting_thread_does_not_hold_up_another(client: Client, broker: FakeBroker) -> None:
    broker.reply = only_admit
    slow = client.submit("slow")
    got: list[str] = []
    waiter = threading.Thread(target=lambda: got.append(slow.result().text))
    waiter.start()
    for _ in range(50):
        assert client.health() == {"worker": {"state": "ready"}}
    broker.say(*chunks(slow.id), done(slow.id))
    waiter.join(10)
    assert got == [TEXT]


def test_a_result_that_takes_too_long_times_out_and_can_be_waited_for_again(
    client: Client, broker: FakeBroker
) -> None:
    broker.reply = only_admit
    stream = client.submit("Hi")
    with pytest.raises(TimeoutError, match="it goes on"):
        stream.result(timeout=0.05)
    broker.say(*chunks(stream.id), done(stream.id))
    assert stream.result(timeout=10).text == TEXT


def test_status_cancel_and_health_answer(client: Client, broker: FakeBroker) -> None:
    job = b"\x05" * 16
    broker.jobs[job.hex()] = {"id": job.hex(), "state": "running"}
    assert client.status(job) == {"id": job.hex(), "state": "running"}
    assert client.status(jobs=True) == {"jobs": [{"id": job.hex(), "state": "running"}]}
    assert client.cancel(job)["state"] == "running"
    assert broker.wait_for(Cancel).id == job
    with pytest.raises(JobError) as caught:
        client.status(b"\x06" * 16)
    assert caught.value.code == "E_UNKNOWN_JOB"
    assert client.health() == broker.health


def test_close_says_goodbye_and_ends_what_waits(broker: FakeBroker) -> None:
    broker.reply = only_admit
    client = Client(broker.endpoint)
    stream = client.submit("Hi")
    errors: list[Exception] = []

    def wait() -> None:
        try:
            stream.result()
        except BrokerUnreachableError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    client.close()
    waiter.join(10)
    assert "closed" in str(errors[0])
    broker.wait_for(Bye)
    with pytest.raises(BrokerUnreachableError, match="closed"):
        client.submit("Hi")
    client.close()


def test_a_dropped_client_warns(broker: FakeBroker) -> None:
    clients = [Client(broker.endpoint)]
    with pytest.warns(ResourceWarning, match="dropped unclosed"):
        clients.clear()


def test_a_job_nobody_admits_is_withdrawn(endpoint: str) -> None:
    with FakeBroker(endpoint, lambda *_: []) as broker, Client(endpoint, timeout=0.3) as client:
        with pytest.raises(BrokerUnreachableError, match="does not admit"):
            client.submit("Hi")
        assert broker.wait_for(Cancel).id == broker.wait_for(Submit).id


def test_an_unknown_id_in_a_late_error_is_ignored(client: Client, broker: FakeBroker) -> None:
    broker.reply = lambda it, submit: [
        it.admit(submit),
        unknown(b"\x09" * 16),
        *chunks(submit.id),
        done(submit.id),
    ]
    assert client.run("Hi").text == TEXT


def test_the_endpoint_comes_from_the_settings_and_is_checked(tmp_path: Path) -> None:
    settings = Settings(run_dir=tmp_path)
    with FakeBroker(settings.endpoint("front")), Client(settings=settings) as client:
        assert client.endpoint == f"ipc://{tmp_path}/front.sock"
    with pytest.raises(SettingsError, match="leaves this machine"):
        Client("tcp://192.0.2.1:5555")


def test_a_job_admitted_after_it_was_given_up_is_cancelled(client: Client, broker: FakeBroker) -> None:
    broker.reply = lambda *_: []
    client.timeout = 0.1
    with pytest.raises(BrokerUnreachableError):
        client.submit("Hi")
    broker.say(broker.admit(broker.wait_for(Submit)))
    client.timeout = 10
    while len(broker.of(Cancel)) < 2:
        client.health()


def test_a_code_of_a_newer_broker_keeps_that_brokers_word_on_retrying() -> None:
    """A program that branches on `retryable` must not depend on the codes its own version knows."""
    told = error_of(Error(code="E_TOMORROW", message="Come back.", retryable=True))

    assert (told.code, told.retryable) == ("E_TOMORROW", True)


@pytest.mark.parametrize("beats", [1, 4])
def test_an_interrupt_at_any_line_of_a_wait_leaves_the_connection_to_others(
    client: Client, broker: FakeBroker, beats: int
) -> None:
    broker.reply = only_admit
    lines, first = inspect.getsourcelines(Client._wait)
    last = first + next(n for n, line in enumerate(lines) if line.strip() == "finally:")
    # Not at a `with`: there the interpreter itself leaves the lock taken, and real interrupts do not come there.
    targets = [n for n, line in enumerate(lines, first) if first + 3 <= n < last and "with " not in line]
    for target in targets:
        stream = client.submit("Hi")
        seen = [0]

        def trace(frame: FrameType, event: str, _: object, target: int = target, seen: list[int] = seen) -> Any:
            if frame.f_code is not Client._wait.__code__:
                return None
            if event == "line" and frame.f_lineno == target:
                seen[0] += 1
                if seen[0] == beats:
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        with contextlib.suppress(KeyboardInterrupt, TimeoutError):
            stream.result(timeout=0.05)
        sys.settrace(None)
        broker.say(*chunks(stream.id), done(stream.id))
        with ThreadPoolExecutor(1) as other:
            assert other.submit(stream.result, 10).result(10).text == TEXT


def test_a_timed_out_question_leaves_nothing_behind(client: Client, broker: FakeBroker) -> None:
    replies = broker._replies
    broker._replies = lambda _: []  # type: ignore[method-assign]
    client.timeout = 0.02
    for _ in range(3):
        with pytest.raises(BrokerUnreachableError, match="does not answer STATUS"):
            client.health()
    assert not client._session._open
    broker.wait_for(Status, 3)
    broker._replies = replies  # type: ignore[method-assign]


def test_a_cancel_while_the_broker_is_away_is_heard_when_it_is_back(endpoint: str) -> None:
    with FakeBroker(endpoint, only_admit):
        client = Client(endpoint)
        stream = client.submit("Hi")
    stream.cancel()
    with FakeBroker(endpoint) as broker, client:
        broker.on_resume = lambda it: []
        with pytest.raises(TimeoutError):
            # The waiting moves the connection on.
            stream.result(timeout=1.0)
        assert broker.wait_for(Cancel).id == stream.id


def test_a_result_carries_the_logprobs_asked_for_and_the_jobs_metadata(client: Client, broker: FakeBroker) -> None:
    def told(it: FakeBroker, submit: Submit) -> list:
        return [
            it.admit(submit),
            *(replace(chunk, logprobs=(((chunk.first, -0.5),),)) for chunk in chunks(submit.id)),
            done(submit.id),
        ]

    broker.reply = told
    result = client.run("Hi", logprobs=1, metadata={"row": "7"})
    assert result.logprobs == tuple(((n, -0.5),) for n in range(4))
    assert result.metadata == {"row": "7"}
    assert json.loads(json.dumps(result.to_map()))["logprobs"][3] == [[3, -0.5]]
    broker.reply = answer
    plain = client.run("Hi")
    assert (plain.logprobs, plain.metadata) == (None, None)
    assert not {"logprobs", "metadata"} & plain.to_map().keys()
