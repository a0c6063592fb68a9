"""Whose jobs are whose: to all but its owner and operators a job's id is one that never was."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import replace

import pytest
from whole.harness import Producer, check_stream, service
from whole.keyed import Keyed, keyed

from mtplx import messages as m
from mtplx import wire
from mtplx.keys import KeyPair

SLOW = {"token_s": 0.02}


class People:
    """Two producers and an operator, each with a key."""

    def __init__(self, place: Keyed) -> None:
        self.place = place
        self.pairs: dict[str, KeyPair] = {}
        for name, role in (("ann", "producer"), ("bob", "producer"), ("op", "operator"), ("gpu", "worker")):
            self.pairs[name] = place.key(name, role)
        place.worker()
        self.ann, self.bob, self.op = (place.producer(self.pairs[name]) for name in ("ann", "bob", "op"))


@pytest.fixture(scope="module")
def people() -> Iterator[People]:
    with keyed() as place:
        yield People(place)


def running(producer: Producer, **options: object) -> bytes:
    job = producer.submit(script=SLOW, **options)
    producer.expect(m.Chunk, job)
    return job


def ended(producer: Producer, job: bytes) -> m.Done:
    producer.say(m.Cancel(job))
    word = producer.last_word(job)
    assert isinstance(word, m.Done)
    return word


ABOUT_A_JOB = {
    "cancel": m.Cancel,
    "resume": lambda job: m.Resume(job, 0, 0),
    "status": m.Status,
    "whole status": lambda job: m.Status(job, whole=True),
    "credit": lambda job: m.GiveCredit(job, 10),
    "kick": m.Kick,
    "delete": m.Delete,
}


@pytest.mark.parametrize("what", ABOUT_A_JOB)
@pytest.mark.parametrize("state", ["running", "ended"])
def test_another_owners_id_is_answered_like_one_that_never_was(people: People, what: str, state: str) -> None:
    job = running(people.ann)
    if state == "ended":
        ended(people.ann, job)
    theirs, none = (people.bob.ask(ABOUT_A_JOB[what](one), m.Error) for one in (job, secrets.token_bytes(16)))
    assert theirs.code == "E_UNKNOWN_JOB"
    assert theirs.id == job
    assert replace(theirs, id=none.id) == none
    assert ended(people.ann, job).outcome == "cancelled"
    check_stream(people.ann, job)


def test_an_ack_of_another_owner_forgets_nothing(people: People) -> None:
    job = running(people.ann)
    ended(people.ann, job)
    people.bob.say(m.Ack(job))
    people.bob.health()
    assert people.ann.ask(m.Status(job), m.StatusReply).status["state"] == "ended"


def test_bytes_that_are_no_message_tell_nothing_of_another_owners_job(people: People) -> None:
    job = running(people.ann)
    answers = []
    for one in (job, secrets.token_bytes(16)):
        magic, kind, header = wire.encode(m.Cancel(one))
        people.bob.socket.send_multipart([magic, kind, header, b"\x80"])
        answers.append(replace(people.bob.expect(m.Error), id=None if one is None else b""))
    assert answers[0] == answers[1]
    ended(people.ann, job)


def test_two_owners_may_use_one_id_and_each_has_its_own_job(people: People) -> None:
    job = running(people.ann, max_tokens=60)
    people.bob.submit(job, max_tokens=3, token_ids=[1])
    assert people.bob.expect(m.Admitted, job).dup is False
    people.ann.say(m.Cancel(job))
    assert isinstance(people.ann.last_word(job), m.Done)
    assert people.bob.last_word(job).outcome == "length"
    assert check_stream(people.ann, job).outcome == "cancelled"
    assert check_stream(people.bob, job).usage["completion_tokens"] == 3
    people.bob.say(m.Ack(job))
    assert people.ann.ask(m.Status(job), m.StatusReply).status["outcome"] == "cancelled"


def test_lists_show_ones_own_jobs_and_to_an_operator_those_of_all(people: People) -> None:
    own, other = running(people.ann), people.bob.submit()
    people.bob.expect(m.Admitted, other)

    def listed(producer: Producer) -> dict[str, dict[str, object]]:
        found = producer.ask(m.Status(jobs=True), m.StatusReply).status
        assert found["total"] == len(found["jobs"])
        return {one["id"]: one for one in found["jobs"]}

    ann, bob, all_of_them = listed(people.ann), listed(people.bob), listed(people.op)
    assert own.hex() in ann
    assert other.hex() in bob
    assert not set(ann) & {other.hex()}
    assert not set(bob) & {own.hex()}
    assert all_of_them[own.hex()]["owner"] == people.pairs["ann"].public
    assert all_of_them[other.hex()]["owner"] == people.pairs["bob"].public
    assert all_of_them[other.hex()]["position"] == bob[other.hex()]["position"] == 1
    ended(people.bob, other)
    ended(people.ann, own)


def test_an_operator_sees_and_cancels_any_job_but_does_not_read_its_answer_away(people: People) -> None:
    job = running(people.ann)
    assert people.op.ask(m.Resume(job, 0, 0), m.Error).code == "E_UNKNOWN_JOB"
    assert people.op.ask(m.Status(job), m.StatusReply).status["state"] == "running"
    people.op.say(m.Cancel(job))
    assert people.op.expect(m.StatusReply).status["id"] == job.hex()
    assert people.ann.last_word(job).outcome == "cancelled"
    check_stream(people.ann, job)


def test_a_second_connection_of_the_same_key_is_the_same_owner(people: People) -> None:
    job = running(people.ann, finish=True)
    with people.place.producer(people.pairs["ann"]) as second:
        second.say(m.Resume(job, 0, 0))
        second.expect(m.Chunk, job)
        second.say(m.Cancel(job))
        second.last_word(job)
        check_stream(second, job)


def test_a_role_taken_back_counts_for_open_connections(people: People) -> None:
    pair = people.place.key("chief", "operator")
    chief = people.place.producer(pair)
    job = running(people.ann)
    chief.ask(m.Status(job), m.StatusReply)
    people.place.allow("chief", pair, "producer")
    chief.say(m.Status(job))
    while not isinstance(answer := chief.hear(), m.Error):
        chief.say(m.Status(job))
    assert answer.code == "E_UNKNOWN_JOB"
    chief.socket.close()
    ended(people.ann, job)


def test_after_a_restart_jobs_still_have_their_owners() -> None:
    with keyed("--orphan-s", "60") as place:
        ann, bob = place.key("ann"), place.key("bob")
        first = place.producer(ann)
        job = first.submit(max_tokens=5)
        first.expect(m.Admitted, job)
        place.programs[0].close()
        place.start()
        other = place.producer(bob)
        assert other.ask(m.Resume(job, 0, 0), m.Error).code == "E_UNKNOWN_JOB"
        with place.producer(ann) as again:
            again.say(m.Resume(job, 0, 0))
            place.key("gpu", "worker")
            place.worker()
            assert again.last_word(job).outcome == "length"
            check_stream(again, job)


def test_on_ipc_the_owner_is_the_os_user_who_is_an_operator() -> None:
    with service() as broker:
        producer = broker.producer()
        job = producer.submit()
        producer.expect(m.Admitted, job)
        other = broker.producer()
        found = other.ask(m.Status(jobs=True), m.StatusReply).status["jobs"]
        assert [(one["id"], one["owner"]) for one in found] == [(job.hex(), f"uid:{os.getuid()}")]
        other.say(m.Cancel(job))
        assert producer.last_word(job).outcome == "cancelled"
