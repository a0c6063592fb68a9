"""Real processes and sockets for tests: a broker, scripted workers, and producers that log all they hear.

Every wait has a limit, and waits for an event: a frame, a line of the worker's log, the end of a process.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

import zmq

from mtplx import messages as m
from mtplx import wire
from mtplx.testing import Event, trajectory_sha256

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 20.0
LAST_WORDS = (m.Done, m.Error)


class Heard(NamedTuple):
    """A message and when it came, on the clock of the worker's log."""

    at: float
    message: m.Message


def environment(**more: str) -> dict[str, str]:
    """The environment of the programs: this checkout's code, and no settings of whoever runs the tests."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MTPLX_", "OTEL_"))}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def rss_kib(pid: int) -> int:
    """Resident memory of a process."""
    return int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(pid)]))


class Program:
    """A process of ours, which the test ends by its id if it has not ended itself."""

    def __init__(self, module: str, *arguments: str, env: dict[str, str] | None = None, keep: int | None = None):
        command = [sys.executable, "-P", "-m", module, *arguments]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            command, env=env or environment(), stderr=self.errors, pass_fds=() if keep is None else (keep,)
        )
        self.pid = self.process.pid

    def send(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def ended(self, limit: float = LIMIT_S) -> int:
        """Wait for the end; returns the exit code."""
        return self.process.wait(limit)

    def said(self) -> str:
        """What it wrote to its standard error."""
        self.errors.seek(0)
        return self.errors.read()

    def close(self) -> None:
        """End it for good."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LIMIT_S)
        self.errors.close()


class Worker(Program):
    """A scripted worker; its log comes through a pipe, so that it can be waited for."""

    def __init__(self, back: str, *arguments: str) -> None:
        self.log: list[Event] = []
        self._grew = threading.Condition()
        reader, writer = os.pipe()
        super().__init__("mtplx.testing", "--back", back, "--log", f"/dev/fd/{writer}", *arguments, keep=writer)
        os.close(writer)
        self._thread = threading.Thread(target=self._read, args=(reader,), daemon=True)
        self._thread.start()

    def _read(self, reader: int) -> None:
        with os.fdopen(reader) as lines:
            for line in lines:
                with self._grew:
                    self.log.append(Event(**json.loads(line)))
                    self._grew.notify_all()

    def events(self, name: str) -> list[Event]:
        """The logged events of that name so far."""
        return [event for event in list(self.log) if event.event == name]

    def ran(self, count: int) -> list[str]:
        """The jobs it ran, checked as `check_worker` does, once there are *count*: the log's pipe may be behind."""
        self.wait_for("run", count)
        return check_worker(self.log)

    def wait_for(self, name: str, count: int = 1, limit: float = LIMIT_S) -> list[Event]:
        """Wait for *count* events of that name."""
        with self._grew:
            seen = self._grew.wait_for(lambda: len(self.events(name)) >= count, limit)
        assert seen, f"no {count} x {name}: {self.log[-20:]}"
        return self.events(name)

    def close(self) -> None:
        super().close()
        self._thread.join(LIMIT_S)


class Producer:
    """One DEALER connection with a log of all it heard. Reads only when asked to."""

    def __init__(self, context: zmq.Context, endpoint: str, **options: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.maxmsgsize = wire.MAX_FRAME_BYTES
        for name, value in options.items():
            self.socket.set(getattr(zmq, name), value)
        self.socket.connect(endpoint)
        self.log: list[Heard] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def say(self, message: m.Message) -> None:
        """Send a message."""
        self.socket.send_multipart(wire.encode(message), zmq.NOBLOCK)

    def submit(self, job: bytes | None = None, script: dict[str, Any] | None = None, **options: Any) -> bytes:
        """Submit a job whose worker follows *script*; returns its id."""
        fields = {name: options.pop(name) for name in ("prompt", "max_tokens", "token_ids") if name in options}
        fields = {"max_tokens": 100_000, **fields}
        if "token_ids" not in fields:
            fields.setdefault("prompt", "one two three")
        if script is not None:
            fields["metadata"] = {"script": json.dumps(script)}
        job = job or secrets.token_bytes(16)
        self.say(m.Submit(job, wire.pack_body(fields), **options))
        return job

    def hear(self, limit: float = LIMIT_S) -> m.Message:
        """The next message."""
        assert self.socket.poll(int(limit * 1000)), f"nothing heard; before: {self.log[-5:]}"
        message = wire.decode(self.socket.recv_multipart(), m.TO_CLIENT)
        self.log.append(Heard(time.monotonic(), message))
        return message

    def drain(self) -> None:
        """Read what is there."""
        while self.socket.poll(0):
            self.hear()

    def until(self, holds: Callable[[m.Message], bool], limit: float = LIMIT_S) -> m.Message:
        """Read until a message for which *holds* is true."""
        end = time.monotonic() + limit
        while True:
            message = self.hear(max(0.0, end - time.monotonic()))
            if holds(message):
                return message

    def expect(self, kind: type[m.Message], job: bytes | None = None, limit: float = LIMIT_S) -> Any:
        """Read until a message of *kind* (about *job*)."""
        return self.until(lambda one: isinstance(one, kind) and (job is None or one.id == job), limit)

    def ask(self, message: m.Message, kind: type[m.Message]) -> Any:
        """Send *message* and read until an answer of that kind."""
        self.say(message)
        return self.expect(kind)

    def last_word(self, job: bytes, limit: float = LIMIT_S) -> m.Done | m.Error:
        """Read until the job's last word, unless it came already."""
        ends = [one for _, one in self.log if isinstance(one, LAST_WORDS) and one.id == job]
        return ends[0] if ends else self.until(lambda one: isinstance(one, LAST_WORDS) and one.id == job, limit)

    def health(self) -> dict[str, Any]:
        """The broker's health."""
        self.say(m.Status())
        return self.expect(m.StatusReply).status

    def about(self, job: bytes) -> list[m.Message]:
        """What was heard about a job."""
        return [one for _, one in self.log if getattr(one, "id", None) == job]


class Service:
    """A broker process in a folder of its own, and whoever speaks to it."""

    def __init__(self, *flags: str, env: dict[str, str] | None = None, run: Path | None = None) -> None:
        self.run = run or Path(tempfile.mkdtemp(prefix="mx", dir="/tmp"))
        self.flags, self.env = flags, env
        self.front, self.back = f"ipc://{self.run}/front.sock", f"ipc://{self.run}/back.sock"
        self.context: zmq.Context = zmq.Context()
        self.programs: list[Program] = []
        self.broker = self.start_broker()

    def start_broker(self, *more: str) -> Program:
        """Start (another) broker on this folder; returns at once."""
        program = Program("broker", "--run-dir", str(self.run), *self.flags, *more, env=self.env)
        self.programs.append(program)
        return program

    def answers(self) -> Producer:
        """Wait until the broker answers; returns the connection that asked."""
        producer = self.producer(IMMEDIATE=1, SNDTIMEO=int(LIMIT_S * 1000), RECONNECT_IVL=20)
        producer.socket.send_multipart(wire.encode(m.Hello((1,), "test")))
        producer.expect(m.Welcome)
        return producer

    def producer(self, **options: int) -> Producer:
        """A new connection."""
        return Producer(self.context, self.front, **options)

    def worker(self, *arguments: str, accepted: bool = True) -> Worker:
        """Start a scripted worker, by default until the broker has taken it."""
        worker = Worker(self.back, *arguments)
        self.programs.append(worker)
        if accepted:
            worker.wait_for("accepted")
        return worker

    def close(self) -> None:
        """End everything."""
        self.context.destroy(linger=0)
        for program in self.programs:
            program.close()
        shutil.rmtree(self.run, ignore_errors=True)


@contextmanager
def service(*flags: str, **options: Any) -> Iterator[Service]:
    """A broker that answers, ended with the block."""
    found = Service(*flags, **options)
    try:
        found.answers().socket.close()
        yield found
    finally:
        found.close()


def check_stream(producer: Producer, job: bytes) -> m.Done | m.Error:
    """Prove one job's stream: chunks without gap or repeat, one last word after them, text and hash equal."""
    about = producer.about(job)
    ends = [place for place, one in enumerate(about) if isinstance(one, LAST_WORDS)]
    assert ends == [len(about) - 1], [type(one).__name__ for one in about]
    ids: list[int] = []
    text = ""
    for seq, chunk in enumerate(one for one in about if isinstance(one, m.Chunk)):
        assert (chunk.seq, chunk.first, chunk.n) == (seq, len(ids), len(chunk.ids))
        ids += chunk.ids
        text += chunk.text
    word = about[-1]
    if isinstance(word, m.Done):
        assert (word.text, word.sha256) == (text, trajectory_sha256(tuple(ids)))
    return word


def check_worker(log: list[Event]) -> list[str]:
    """Prove that the worker never had two jobs at once; returns the ids in the order in which they ran."""
    assert not [event for event in log if event.event == "overlap"]
    turns = [event for event in log if event.event in ("run", "final", "fail", "drop")]
    for before, after in pairwise(turns):
        assert (before.event == "run") != (after.event == "run"), (before, after)
    leases = [event.lease for event in turns if event.event == "run"]
    assert leases == sorted(set(leases))
    return [event.id for event in turns if event.event == "run"]


def stop(program: Program) -> float:
    """SIGTERM; returns the seconds until the end, which must be with code 0."""
    began = time.monotonic()
    program.send(signal.SIGTERM)
    assert program.ended() == 0, program.said()
    return time.monotonic() - began
