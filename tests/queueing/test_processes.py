"""Whose process it is, and that only a worker of ours on this machine is ever killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from queueing.rig import BOOT_ID, WORKER, Rig, settings

from broker import processes
from broker.back import Identity
from broker.loop import Loop, now
from broker.machine import Machine
from mtplx.messages import Ready
from mtplx.process import Process, from_ps, host_id, look

WAIT = "import time; time.sleep(600)"


@pytest.fixture
def other(tmp_path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that counts as a worker by its name."""
    (tmp_path / "some_worker.py").write_text(WAIT)
    command = [sys.executable, "-P", "-m", "some_worker", "--flag", "a b"]
    with subprocess.Popen(command, env={"PYTHONPATH": str(tmp_path)}) as process:
        # Between fork and exec it is still a copy of this one.
        while (found := look(process.pid)) is None or "some_worker" not in found.command:
            time.sleep(0.01)
        yield process
        process.kill()


def ready(pid: int) -> Ready:
    found = look(pid)
    assert found is not None
    return Ready(
        bytes(16),
        pid,
        "hyper",
        "h0",
        "m",
        9,
        9,
        {},
        1,
        model_hash="",
        build_hash="",
        host=host_id(),
        born=found.born,
    )


def test_a_process_is_known_by_its_start_its_user_and_its_command(other):
    found = look(other.pid)
    assert (found.user, found.program) == (os.getuid(), "some_worker")
    assert found.command[1:] == ("-P", "-m", "some_worker", "--flag", "a b")
    assert found == look(other.pid)
    assert found.born >= look(os.getpid()).born > 0


def test_ps_tells_the_same_where_there_is_no_proc(other):
    found, told = look(other.pid), from_ps(other.pid)
    assert (told.user, told.program) == (found.user, "some_worker")
    assert abs(told.born - time.time()) < 60


@pytest.mark.parametrize("asked", [look, from_ps])
def test_no_process_is_no_process_and_neither_is_one_that_nobody_waited_for(asked, other):
    assert asked(2**22 + 5) is None
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert asked(other.pid) is None


@pytest.mark.parametrize(
    ("command", "program"),
    [
        (("/v/bin/python", "-P", "-m", "worker", "--model", "x"), "worker"),
        (("/v/bin/python3.11", "/v/bin/mtplx-worker", "--beat-s", "2"), "mtplx-worker"),
        (("/v/bin/python", "-c", "1"), "1"),
        (("/bin/worker",), "worker"),
        (("python", "-m"), ""),
        ((), ""),
    ],
)
def test_the_program_is_the_module_or_the_script(command, program):
    assert Process(0.0, 0, command).program == program


def test_a_worker_that_hangs_on_this_machine_is_killed(other):
    os.kill(other.pid, 19)
    assert processes.end(ready(other.pid)) == processes.KILLED
    assert other.wait(10) == -9
    assert processes.end(replace(ready(os.getpid()), pid=other.pid)) == processes.GONE


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"host": ""}, "does not say"),
        ({"born": 0.0}, "does not say"),
        ({"host": "0000 pid:[1]"}, "another machine"),
        ({"born": 1.5}, processes.GONE),
        ({"pid": 2**40}, processes.GONE),
    ],
)
def test_what_is_not_certainly_that_worker_is_left_alone(other, change, found):
    assert found in processes.end(replace(ready(other.pid), **change))
    assert other.poll() is None


def test_another_users_process_is_left_alone(other, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert "belongs to user" in processes.end(ready(other.pid))
    assert other.poll() is None


def test_what_is_no_worker_is_left_alone():
    with subprocess.Popen([sys.executable, "-c", WAIT]) as process:
        try:
            while len(look(process.pid).command) != 3:
                time.sleep(0.01)
            assert "no worker" in processes.end(ready(process.pid))
            assert process.poll() is None
        finally:
            process.kill()


def test_an_id_that_another_process_got_in_the_meantime_is_not_killed(other, monkeypatch):
    real, asked = look(other.pid), []

    def now_another(_pid):
        asked.append(1)
        return real if len(asked) == 1 else real._replace(born=real.born + 1)

    said = ready(other.pid)
    monkeypatch.setattr(processes, "look", now_another)
    assert processes.end(said) == processes.GONE
    assert other.poll() is None


def test_without_handles_of_processes_the_id_is_killed(other, monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    assert processes.end(ready(other.pid)) == processes.KILLED
    assert other.wait(10) == -9


def test_where_a_sandbox_refuses_handles_the_id_is_killed(other, monkeypatch):
    def refused(_pid):
        raise PermissionError(1, "no handles here")

    monkeypatch.setattr(os, "pidfd_open", refused, raising=False)
    assert processes.end(ready(other.pid)) == processes.KILLED
    assert other.wait(10) == -9


@pytest.mark.parametrize("reason", ["exited", "silent", "stalled", "replaced", "broken", "left"])
def test_only_a_worker_that_may_hang_is_handed_over_to_be_ended(reason):
    rig = Rig()
    rig.ready()
    rig.submit(1)
    said = rig.back.worker.ready
    rig.back.lose(reason, rig.now())
    assert list(rig.back.condemned) == ([said] if reason in ("silent", "stalled") else [])


@pytest.fixture
def loop() -> Iterator[Loop]:
    given = settings()
    made = Loop(given, Machine(given, Identity(BOOT_ID, "1", 1, now()), lambda: 1), None)
    yield made
    made.close()


def lose(loop: Loop, reason: str) -> None:
    loop._machine.back.on_message(WORKER, Ready(bytes(16), 9, "hyper", "h0", "m", 9, 9, {}, 1), now())
    loop._machine.back.lose(reason, now())
    loop._turn({})


def test_what_came_of_a_process_is_told_in_health_until_the_next_one_is_lost(loop, monkeypatch):
    asked = []
    monkeypatch.setattr(processes, "end", lambda ready: asked.append(ready.pid) or processes.KILLED)
    lose(loop, "stalled")
    loop._turn({})
    assert asked == [9], "once"
    assert loop._machine.report(now())["worker"]["lost_process"] == "killed"
    lose(loop, "exited")
    assert "lost_process" not in loop._machine.report(now())["worker"]


def test_a_fault_while_a_process_is_looked_at_does_not_end_the_broker(loop, monkeypatch):
    monkeypatch.setattr(processes, "_end", lambda _ready: 1 / 0)
    lose(loop, "silent")
    assert "log says more" in loop._machine.report(now())["worker"]["lost_process"]
