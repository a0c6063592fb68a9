"""Queues that take jobs, and what drives them: the same load, one process, one thread, several connections.

Each connection keeps a number of submissions open and sends the next one for each ack that it reads.
"""

from __future__ import annotations

import secrets
import selectors
import signal
import socket as sockets
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import zmq
from report import ROOT
from service import LIMIT_MS, Peer

from mtplx import messages as m
from mtplx import wire
from mtplx.settings import Settings

START_S = 20.0
# As in the broker's loop: plain numbers, and sockets without pyzmq's draft options, cost least.
NOW, MORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)
SEND, RECEIVE = zmq.backend.Socket.send, zmq.backend.Socket.recv
ADMITTED, ERROR = bytes([m.Admitted.KIND]), bytes([m.Error.KIND])


@dataclass(frozen=True, slots=True)
class Load:
    """Connections with so many submissions open each, of *size* bytes; counted for *seconds* after *warm_s*."""

    producers: int
    open: int
    size: int
    seconds: float
    warm_s: float = 0.3

    def body(self) -> bytes:
        """A job of *size* bytes, as SUBMIT carries it."""
        empty = len(wire.pack_body({"prompt": "x" * 256, "max_tokens": 16})) - 256
        body = wire.pack_body({"prompt": "x" * (self.size - empty), "max_tokens": 16})
        assert len(body) == self.size, "a prompt of 256 to 65,535 bytes has a head of three bytes"
        return body


@dataclass(slots=True)
class Acks:
    """The acks of one load: all of them, and (sent, read) in monotonic seconds of those in the window."""

    load: Load
    total: int = 0
    times: list[tuple[float, float]] = field(default_factory=list)
    begins: float = 0.0
    until: float = 0.0

    def __post_init__(self) -> None:
        self.begins = time.monotonic() + self.load.warm_s
        self.until = self.begins + self.load.seconds

    def note(self, sent: float) -> bool:
        """The submission of *sent* was acked now; True where another is to follow."""
        now = time.monotonic()
        self.total += 1
        if self.begins <= now < self.until:
            self.times.append((sent, now))
        return now < self.until

    @property
    def rate(self) -> float:
        """Acks a second; a window without one counts as if it had one."""
        return max(1, len(self.times)) / self.load.seconds

    @property
    def waits(self) -> list[float]:
        """Seconds from submission to ack."""
        return [read - sent for sent, read in self.times]


class Queue(Protocol):
    """One contestant: the command that serves from *folder*, and the load on it."""

    name: str

    def command(self, folder: Path) -> list[str]:
        """The program and its arguments; *folder* is its own, on the file system measured."""

    def environment(self, folder: Path) -> dict[str, str] | None:
        """The environment of the program; None: this one's."""

    def drive(self, folder: Path, load: Load) -> Acks:
        """Put *load* on the program and wait for every ack; ends this process where jobs are missing."""


@contextmanager
def served(queue: Queue, folder: Path, before: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """The program of *queue*, started behind the words *before*, and killed with the block."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*before, *queue.command(folder)], env=queue.environment(folder), stdout=log, stderr=log
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def wait_for(path: Path) -> None:
    """Wait until *path* is there."""
    until = time.monotonic() + START_S
    while not path.exists():
        if time.monotonic() > until:
            sys.exit(f"{path} did not appear in {START_S:.0f} s; {path.parent / 'log'} says why.")
        time.sleep(0.01)


def check_held(name: str, held: int, acked: int) -> None:
    """End this process where *name* holds fewer jobs than it acked."""
    if held < acked:
        sys.exit(f"{name} holds {held} jobs, and acked {acked}.")


class Mtplx:
    """Our broker, no worker; the jobs wait."""

    def __init__(self, durability: str) -> None:
        self.name = f"mtplx {durability}"
        self._durability = durability

    def command(self, folder: Path) -> list[str]:
        """As in `Queue`."""
        del folder
        return [sys.executable, "-P", "-m", "broker"]

    def environment(self, folder: Path) -> dict[str, str]:
        """As in `Queue`."""
        limits: dict[str, Any] = {"queue_jobs": 10_000_000, "client_jobs": 10_000_000, "queue_bytes": 2**40}
        settings = Settings(run_dir=folder, state_dir=folder / "state", durability=self._durability, **limits)
        return {**settings.environment(), "PYTHONPATH": str(ROOT)}

    def drive(self, folder: Path, load: Load) -> Acks:
        """As in `Queue`."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            peers = [Peer(context, f"ipc://{folder}/front.sock") for _ in range(load.producers)]
            for peer in peers:
                peer.say(m.Hello((1,)))
                peer.until(m.Welcome)
            acks = _Producers([peer.socket for peer in peers], load).run()
            peers[0].say(m.Status())
            status = wire.decode(peers[0].until(m.StatusReply), m.TO_CLIENT)
            assert isinstance(status, m.StatusReply)
            check_held(self.name, status.status["line"]["depth"], acks.total)
            return acks
        finally:
            context.destroy(linger=0)


class _Producers:
    """DEALER sockets that keep `load.open` SUBMITs open each."""

    def __init__(self, dealers: list[zmq.Socket[bytes]], load: Load) -> None:
        self._load = load
        self._sent: dict[zmq.Socket[bytes], deque[float]] = {dealer: deque() for dealer in dealers}
        mark = secrets.token_bytes(16)
        self._start, self._kind, header, self._body = wire.encode(m.Submit(mark, load.body()))
        self._head, _, self._tail = header.partition(mark)

    def run(self) -> Acks:
        """Submit until the window ends, and read every ADMITTED."""
        poller = zmq.Poller()
        for dealer in self._sent:
            poller.register(dealer, zmq.POLLIN)
        acks = Acks(self._load)
        for dealer in self._sent:
            for _ in range(self._load.open):
                self._submit(dealer)
        while any(self._sent.values()):
            ready = poller.poll(LIMIT_MS)
            if not ready:
                sys.exit("The broker said nothing for a minute.")
            for dealer, _ in ready:
                self._read(dealer, acks)
        return acks

    def _submit(self, dealer: zmq.Socket[bytes]) -> None:
        header = self._head + secrets.token_bytes(16) + self._tail
        self._sent[dealer].append(time.monotonic())
        SEND(dealer, self._start, MORE)
        SEND(dealer, self._kind, MORE)
        SEND(dealer, header, MORE)
        SEND(dealer, self._body)

    def _read(self, dealer: zmq.Socket[bytes], acks: Acks) -> None:
        for _ in range(self._load.open):
            try:
                RECEIVE(dealer, NOW)
            except zmq.Again:
                return
            kind = RECEIVE(dealer)
            header = RECEIVE(dealer)
            if kind == ADMITTED:
                if acks.note(self._sent[dealer].popleft()):
                    self._submit(dealer)
            elif kind == ERROR:
                sys.exit(f"A job was refused: {header!r}")


class Beanstalkd:
    """beanstalkd on a unix socket, with its write-ahead log flushed before each INSERTED, or not at all."""

    def __init__(self, program: str, *, flushed: bool = True) -> None:
        self.name = "beanstalkd -f0" if flushed else "beanstalkd without a log"
        self._program = program
        self._flushed = flushed

    def command(self, folder: Path) -> list[str]:
        """As in `Queue`."""
        log = ["-b", str(folder), "-f0"] if self._flushed else []
        return [self._program, "-l", f"unix:{folder}/sock", *log]

    def environment(self, folder: Path) -> None:
        """As in `Queue`."""

    def drive(self, folder: Path, load: Load) -> Acks:
        """As in `Queue`: puts are sent without waiting for the ones before them."""
        wait_for(folder / "sock")
        body = load.body()
        put = b"put 0 0 60 %d\r\n%s\r\n" % (len(body), body)
        with selectors.DefaultSelector() as selector:
            lines = [_Lines(folder / "sock", put) for _ in range(load.producers)]
            for one in lines:
                selector.register(one.socket, selectors.EVENT_READ, one)
            acks = Acks(load)
            for one in lines:
                one.submit(load.open)
            while any(one.sent for one in lines):
                ready = selector.select(LIMIT_MS / 1000)
                if not ready:
                    sys.exit("beanstalkd said nothing for a minute.")
                for key, _ in ready:
                    key.data.read(acks)
        check_held(self.name, lines[0].held(), acks.total)
        for one in lines:
            one.socket.close()
        return acks


class _Lines:
    """One connection to beanstalkd."""

    def __init__(self, path: Path, put: bytes) -> None:
        self.socket = sockets.socket(sockets.AF_UNIX)
        self.socket.settimeout(LIMIT_MS / 1000)
        self.socket.connect(str(path))
        self.sent: deque[float] = deque()
        self._put = put
        self._rest = b""

    def submit(self, count: int) -> None:
        """Send *count* puts at once."""
        now = time.monotonic()
        self.sent.extend(now for _ in range(count))
        self.socket.sendall(self._put * count)

    def read(self, acks: Acks) -> None:
        """Take what answers are there, and follow them up."""
        *answers, self._rest = (self._rest + self.socket.recv(65536)).split(b"\r\n")
        if not all(answer.startswith(b"INSERTED ") for answer in answers):
            sys.exit(f"beanstalkd refused a job: {answers}")
        follow = sum([acks.note(self.sent.popleft()) for _ in answers])
        if follow:
            self.submit(follow)

    def held(self) -> int:
        """The jobs that wait."""
        self.socket.sendall(b"stats\r\n")
        answer = b""
        while not answer.endswith(b"\r\n") or b"current-jobs-ready" not in answer:
            answer += self.socket.recv(65536)
        return int(answer.partition(b"current-jobs-ready: ")[2].split()[0])
