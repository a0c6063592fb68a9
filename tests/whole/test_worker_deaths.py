"""Each way in which a worker can die or hang: what the broker calls it, and what becomes of the process."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from whole.harness import LIMIT_S, Producer, Program, service
from whole.test_worker_conversation import all_run, ask, bare, wait_until_taken, worker_of

from mtplx import messages as m
from mtplx.errors import Exit
from mtplx.job import Job

# Beats are never late by two seconds, and a job of these tests needs less than one for a step.
LIMITS = ("--beat-s", "0.2", "--dead-s", "2", "--stall-s", "2")
ELSEWHERE = ("--host", "another machine")


def lost(producer: Producer) -> dict[str, Any]:
    """Health of the worker once it was given up."""
    ends = time.monotonic() + LIMIT_S
    while (found := producer.health()["worker"])["state"] != "absent":
        assert time.monotonic() < ends, found
        time.sleep(0.02)
    return found


def sent(number: int) -> Callable[[Program], None]:
    return lambda program: program.send(number)


# How it goes; the broker's word for it; how the process ends; what the broker did about it.
DEATHS: dict[str, tuple[str, Callable[[Program], None] | None, str, int, str]] = {
    "killed": ("", sent(signal.SIGKILL), "exited", -signal.SIGKILL, ""),
    "aborted in native code": ("abort", None, "exited", -signal.SIGABRT, ""),
    "failed in Python": ("boom", None, "left", Exit.INTERNAL, ""),
    "failed outside of a job": ("leave", None, "exited", Exit.FAILED, ""),
    "stopped": ("", sent(signal.SIGSTOP), "silent", -signal.SIGKILL, "killed"),
    "hung with beats": ("hang", None, "stalled", -signal.SIGKILL, "killed"),
    "hung without beats": ("hold", None, "silent", -signal.SIGKILL, "killed"),
}


@pytest.mark.parametrize("how", DEATHS)
def test_each_way_to_die_has_its_name_and_leaves_no_process_behind(how: str) -> None:
    fault, act, name, code, done = DEATHS[how]
    with service(*LIMITS) as broker:
        worker, producer = worker_of(broker, *LIMITS), broker.producer()
        fatal = ask(producer, 100_000, **({"fault": fault} if fault else {}))
        producer.expect(m.Chunk, fatal)
        if act is not None:
            act(worker)
        found = lost(producer)
        assert (found["last_loss"], found["lost_pid"]) == (name, worker.pid), worker.said()
        assert worker.ended() == code, worker.said()
        assert found.get("lost_process", "") == done
        # Cancelled or lost, it is over for good; the line goes on with the next worker.
        producer.say(m.Cancel(fatal))
        producer.last_word(fatal)
        queued = ask(producer)
        worker_of(broker, *LIMITS)
        all_run(producer, queued)
        assert "lost_process" not in producer.health()["worker"] or done


def test_a_worker_that_hangs_on_another_machine_ends_itself_and_health_says_where_to_look() -> None:
    with service(*LIMITS) as broker:
        worker, producer = worker_of(broker, *LIMITS, *ELSEWHERE, "--grace-s", "1"), broker.producer()
        producer.expect(m.Chunk, ask(producer, 100_000, fault="hang"))
        found = lost(producer)
        assert found["last_loss"] == "stalled"
        assert "another machine" in found["lost_process"]
        assert worker.ended() in (Exit.STALLED, Exit.LEASE_LOST), worker.said()
        assert "exit code" in worker.said()


def test_a_worker_stopped_on_another_machine_wakes_up_and_changes_nothing() -> None:
    with service(*LIMITS) as broker:
        worker, producer = worker_of(broker, *LIMITS, *ELSEWHERE), broker.producer()
        running = ask(producer, 100_000)
        producer.expect(m.Chunk, running)
        worker.send(signal.SIGSTOP)
        found = lost(producer)
        assert found["last_loss"] == "silent"
        assert "another machine" in found["lost_process"]
        producer.say(m.Cancel(running))
        producer.last_word(running)
        next_worker, queued = worker_of(broker, *LIMITS), ask(producer, 300)
        producer.expect(m.Chunk, queued)
        worker.send(signal.SIGCONT)
        all_run(producer, queued)
        # It offers itself again and is refused, for there is one.
        assert worker.ended() == Exit.WORKER_REFUSED, worker.said()
        assert next_worker.process.poll() is None
        assert producer.health()["worker"]["pid"] == next_worker.pid


def test_a_worker_that_does_not_heed_the_loss_of_its_lease_ends_itself(tmp_path) -> None:
    with bare(tmp_path, "--stall-s", "2") as (broker, worker):
        broker.welcome(beat_ms=50)
        broker.run(Job(prompt="x", max_tokens=50, metadata={"script": '{"fault": "hang"}'}))
        for _ in range(3):
            broker.expect(m.WorkerChunk)
        began = time.monotonic()
        while worker.process.poll() is None:
            assert time.monotonic() < began + LIMIT_S
            if broker.socket.poll(100):
                peer, message = broker.hear()
                if isinstance(message, m.WorkerBeat):
                    broker.disown(peer, message.epoch)
        assert worker.ended() == Exit.LEASE_LOST, worker.said()


def test_a_broker_that_says_nothing_for_long_takes_no_lease_away(tmp_path) -> None:
    with bare(tmp_path, "--stall-s", "2") as (broker, worker):
        broker.welcome(beat_ms=50)
        broker.run(Job(prompt="x", max_tokens=500))
        chunks, last = broker.answer()
        assert (len(chunks), last.finish_reason) == (500, "length")
        assert worker.process.poll() is None


def test_a_worker_stopped_for_a_while_does_not_take_the_time_for_a_stall(tmp_path) -> None:
    """No broker judges here: what ends the worker would be its own watchdog."""
    with bare(tmp_path, "--stall-s", "1", "--grace-s", "0.5") as (broker, worker):
        broker.welcome(beat_ms=50)
        broker.run(Job(prompt="x", max_tokens=200))
        broker.expect(m.WorkerChunk)
        worker.send(signal.SIGSTOP)
        time.sleep(4)
        worker.send(signal.SIGCONT)
        assert broker.answer()[1].finish_reason == "length"


def test_the_next_worker_is_not_taken_for_the_one_that_hung() -> None:
    with service(*LIMITS) as broker:
        worker, producer = worker_of(broker, *LIMITS), broker.producer()
        hung = ask(producer, 50, fault="hold")
        lost(producer)
        assert worker.ended() == -signal.SIGKILL
        producer.say(m.Cancel(hung))
        successor = worker_of(broker, *LIMITS)
        all_run(producer, ask(producer, 50))
        wait_until_taken(broker, successor)
        assert successor.process.poll() is None
