"""What becomes of a job whose producer was interrupted, or dropped its stream."""

from __future__ import annotations

from typing import Any

import pytest
from whole.fake_broker import FakeBroker, chunks

from mtplx import Client
from mtplx.messages import Cancel, Submit


def only_admit(broker: FakeBroker, submit: Submit) -> list:
    return [broker.admit(submit)]


@pytest.mark.parametrize("verb", ["submit", "run"])
def test_a_submit_that_is_interrupted_just_after_admission_withdraws_the_job(
    client: Client, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    broker.reply = only_admit
    wait = client._wait

    def interrupted(ready: Any, patience: Any) -> None:
        wait(ready, patience)
        monkeypatch.setattr(client, "_wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(client, verb)("Hi")
    assert broker.wait_for(Cancel).id == broker.wait_for(Submit).id
    assert client._session.streams == {}


@pytest.mark.parametrize("finish", [False, True])
def test_a_run_that_is_interrupted_cancels_its_job_unless_that_is_to_finish(
    client: Client, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, finish: bool
) -> None:
    broker.reply = only_admit

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "_next", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.run("Hi", finish=finish)
    client.health()
    assert len(broker.of(Cancel)) == (not finish)


def test_a_stream_with_credit_that_is_dropped_half_read_is_cancelled(client: Client, broker: FakeBroker) -> None:
    broker.reply = lambda it, submit: [it.admit(submit), *chunks(submit.id)[:2]]
    with pytest.warns(ResourceWarning, match="dropped before its end"):
        next(client.submit("Hi", credit=2))
    client.health()
    broker.wait_for(Cancel)
    assert client._session.streams == {}
