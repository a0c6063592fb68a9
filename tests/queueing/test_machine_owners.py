"""Owners in the machine: what two owners' jobs of one id could do to each other."""

from __future__ import annotations

from queueing.memory_journal import MemoryJournal
from queueing.rig import Rig, body, job_id
from queueing.test_spans import Traced

from broker.access import Peer
from mtplx import messages as m

ANN, BOB, CHIEF = Peer("ann"), Peer("bob"), Peer("chief", operator=True)


def say(rig: Rig, route: bytes, message: m.Message, peer: Peer) -> list[m.Message]:
    """A producer who is *peer* says *message*; returns what it heard since."""
    before = len(rig.heard.get(route, []))
    rig.machine.on_client(route, message, rig.now(), peer)
    rig.turn()
    return rig.heard.get(route, [])[before:]


def kinds(heard: list[m.Message]) -> list[type[m.Message]]:
    return [type(message) for message in heard]


def test_a_submit_taken_back_takes_nothing_from_another_owners_job_of_that_id() -> None:
    rig = Rig(journal=MemoryJournal())
    rig.ready()
    rig.deaf.add(b"b")
    say(rig, b"b", m.Submit(job_id(1), body()), BOB)
    rig.journal.fails = True
    refused = say(rig, b"a", m.Submit(job_id(1), body()), ANN)
    assert [one.code for one in refused] == ["E_JOURNAL"]
    rig.deaf.clear()
    rig.journal.fails = False
    rig.wait(2.0)
    assert kinds(rig.heard[b"b"])[:2] == [m.Admitted, m.Started]


def test_spans_of_two_owners_jobs_of_one_id_all_end() -> None:
    rig = Traced()
    rig.ready()
    for route, peer in ((b"a", ANN), (b"b", BOB)):
        say(rig, route, m.Submit(job_id(1), body()), peer)
    # By hand: the rig looks records up without an owner.
    for _ in range(2):
        run = rig.runs()[-1]
        rig.worker_says(m.WorkerChunk(run.id, run.attempt, run.lease, 0, 1, (1,), "1 "))
        rig.final()
    outcomes = [span.attributes["mtplx.outcome"] for span in rig.spans()["process"]]
    assert outcomes == ["stop", "stop"]


def test_progress_tells_each_owner_of_its_own_place() -> None:
    rig = Rig()
    for number, (route, peer) in enumerate(((b"c", CHIEF), (b"a", ANN), (b"b", BOB))):
        say(rig, route, m.Submit(job_id(0 if number == 0 else 1), body()), peer)
    rig.wait(5.0)
    places = {
        route: [one.position for one in rig.heard[route] if isinstance(one, m.Progress)] for route in (b"a", b"b")
    }
    assert set(places[b"a"]) == {1}
    assert set(places[b"b"]) == {2}


def test_of_two_jobs_of_one_id_an_operator_means_the_one_that_is_open() -> None:
    rig = Rig()
    say(rig, b"a", m.Submit(job_id(1), body()), ANN)
    say(rig, b"b", m.Submit(job_id(1), body()), BOB)
    for reader, other in ((b"a", b"b"), (b"b", b"a")):
        before = len(rig.heard[other])
        say(rig, b"c", m.Cancel(job_id(1)), CHIEF)
        assert m.Done in kinds(rig.heard[reader])
        assert m.Done not in kinds(rig.heard[other][before:])


def test_an_operators_own_job_is_meant_before_anothers_of_that_id() -> None:
    rig = Rig()
    say(rig, b"a", m.Submit(job_id(1), body()), ANN)
    say(rig, b"c", m.Submit(job_id(1), body()), CHIEF)
    say(rig, b"c", m.Cancel(job_id(1)), CHIEF)
    assert m.Done in kinds(rig.heard[b"c"])
    assert m.Done not in kinds(rig.heard[b"a"])


def test_owners_outlive_a_restart() -> None:
    rig = Rig(journal=MemoryJournal())
    say(rig, b"a", m.Submit(job_id(1), body(), finish=True), ANN)
    say(rig, b"b", m.Submit(job_id(1), body(), finish=True), BOB)
    rig.restart(power_loss=True)
    assert {record.owner for record in rig.jobs} == {"ann", "bob"}
    assert kinds(say(rig, b"x", m.Status(job_id(1)), Peer("eve"))) == [m.Error]
    assert kinds(say(rig, b"y", m.Resume(job_id(1), 0, 0), ANN)) != [m.Error]
