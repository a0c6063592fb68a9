"""A small stand-in for launchd: it reads an agent's plist, and keeps the promise of every key it knows, no other.

Sources: launchd.plist(5), launchctl(1). Seconds of the file pass `speed` times as fast as those of the clock. What it
starts has the environment of the file and no other, and no stdin at all (launchd's own is /dev/null: this is harder).
"""

from __future__ import annotations

import os
import plistlib
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

LIMIT_S = 30.0


def _absolute(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("/") and "/../" not in value


def _whole(low: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= low


def _strings(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str) for pair in value.items() for one in pair)


# Key: what its value must be. A key that is not here has no promise that is kept, and is refused.
KEYS: dict[str, Callable[[Any], bool]] = {
    "Label": lambda value: isinstance(value, str) and bool(value),
    "ProgramArguments": lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value) and _absolute(value[0]),
    "RunAtLoad": lambda value: value is True,
    "KeepAlive": lambda value: value == {"SuccessfulExit": False},
    "ThrottleInterval": _whole(1),
    "ExitTimeOut": _whole(1),
    "ProcessType": lambda value: value in ("Standard", "Background", "Adaptive", "Interactive"),
    "LimitLoadToSessionType": lambda value: set(value) <= {"Aqua", "Background", "LoginWindow", "StandardIO", "System"},
    # An octal number written as text, or as if it were decimal (77), is a mask that nobody meant.
    "Umask": lambda value: type(value) is int and value == 0o077,
    "SoftResourceLimits": lambda value: set(value) == {"NumberOfFiles"} and _whole(256)(value["NumberOfFiles"]),
    "WorkingDirectory": _absolute,
    "EnvironmentVariables": lambda value: _strings(value) and not any("~" in one for one in value.values()),
    "StandardOutPath": _absolute,
    "StandardErrorPath": _absolute,
}  # fmt: skip


def check(keys: dict[str, Any]) -> None:
    """Refuse keys without a promise here, and values that launchd would not take, or would take for something else."""
    for key, value in keys.items():
        if key not in KEYS:
            raise ValueError(f"unknown key {key}")
        if not KEYS[key](value):
            raise ValueError(f"{key} = {value!r}")


class Turn(NamedTuple):
    """One run of a program: when it began, its process id, and the exit code (as `subprocess`: a signal is below 0)."""

    began: float
    pid: int
    code: int


class Agent:
    """One loaded agent, looked after by a thread."""

    def __init__(self, keys: dict[str, Any], speed: float, clock: Callable[[], float]) -> None:
        check(keys)
        self.keys = keys
        self.turns: list[Turn] = []
        self.pid = 0
        self.killed = False
        self._speed, self._clock = speed, clock
        self._changed = threading.Condition()
        self._told = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._look_after, daemon=True)
        if keys.get("RunAtLoad"):
            self._thread.start()

    def wait_for(self, holds: Callable[[Agent], bool], limit: float = LIMIT_S) -> None:
        """Wait until *holds*, which may change when a program begins or ends."""
        with self._changed:
            assert self._changed.wait_for(lambda: holds(self), limit), (self.pid, self.turns)

    def bootout(self) -> None:
        """SIGTERM, after ExitTimeOut SIGKILL, and no restart; returns when it is gone."""
        self._told.set()
        process = self._process
        if process is not None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(self.keys["ExitTimeOut"] / self._speed)
            except subprocess.TimeoutExpired:
                self.killed = True
                process.kill()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    def _spawn(self) -> subprocess.Popen[bytes]:
        keys = self.keys
        # The shell closes stdin and sets the soft limit, then becomes the program: the process id stays.
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        files = min(keys.get("SoftResourceLimits", {}).get("NumberOfFiles", 256), hard % 2**63)
        shell = f'ulimit -Sn {files}; exec "$@" <&-'
        with open(keys["StandardOutPath"], "ab") as out, open(keys["StandardErrorPath"], "ab") as err:  # noqa: PTH123
            return subprocess.Popen(
                ["/bin/sh", "-c", shell, "sh", *keys["ProgramArguments"]],
                env=keys["EnvironmentVariables"],
                cwd=keys["WorkingDirectory"],
                umask=keys["Umask"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                process_group=0,
            )

    def _look_after(self) -> None:
        while not self._told.is_set():
            began = self._clock()
            process = self._process = self._spawn()
            self._note(process.pid)
            if self._told.is_set():
                process.send_signal(signal.SIGTERM)
            code = process.wait()
            # AbandonProcessGroup is not set: what it started ends with it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            self._note(0, Turn(began, process.pid, code))
            if code == 0:
                return
            due = began + self.keys["ThrottleInterval"] / self._speed
            self._told.wait(max(0.0, due - self._clock()))

    def _note(self, pid: int, turn: Turn | None = None) -> None:
        with self._changed:
            self.pid = pid
            self.turns += [turn] if turn else []
            self._changed.notify_all()


class Launchd:
    """The agents of one user; `with` ends them all."""

    def __init__(self, speed: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.agents: dict[str, Agent] = {}
        self._speed, self._clock = speed, clock

    def bootstrap(self, text: bytes | Path) -> Agent:
        """Load an agent, which starts it."""
        keys = plistlib.loads(text if isinstance(text, bytes) else text.read_bytes())
        assert keys["Label"] not in self.agents, "Bootstrap failed: 5: Input/output error"
        self.agents[keys["Label"]] = agent = Agent(keys, self._speed, self._clock)
        return agent

    def bootout(self, agent: Agent) -> None:
        """Unload an agent."""
        del self.agents[agent.keys["Label"]]
        agent.bootout()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in list(self.agents.values()):
            self.bootout(agent)
