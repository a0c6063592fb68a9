"""A broker on encrypted tcp with keys of its own, for tests."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq
from whole.harness import Producer, Program, environment

from mtplx import Client, allowed
from mtplx import messages as m
from mtplx.allowed import Allowed
from mtplx.keys import BROKER, KeyPair, make
from mtplx.settings import Settings

LIMIT_S = 20.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Keyed:
    """A folder with keys, and a broker that serves both sides encrypted on loopback ports."""

    def __init__(self, *flags: str) -> None:
        self.run = Path(tempfile.mkdtemp(prefix="mx", dir="/tmp"))
        self.keys = self.run / "state" / "keys"
        self.server = make(self.keys, BROKER)
        self.front, self.back = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        self.flags = ("--curve", "--front", self.front, "--back", self.back, "--run-dir", str(self.run), *flags)
        self.context: zmq.Context = zmq.Context()
        self.programs: list[Program] = []

    def start(self, *more: str) -> Program:
        return self.program("broker", *self.flags, *more)

    def program(self, module: str, *arguments: str, **more: str) -> Program:
        self.programs.append(Program(module, *arguments, env=environment(**more)))
        return self.programs[-1]

    def key(self, name: str, role: str | None = "producer") -> KeyPair:
        """A new pair of that name, allowed as *role*."""
        pair = make(self.keys, name)
        if role is not None:
            self.allow(name, pair, role)
        return pair

    def allow(self, name: str, pair: KeyPair, role: str = "producer") -> None:
        allowed.change(self.keys, lambda listed: listed.update({pair.public: Allowed(role, name, pair.public)}))

    def revoke(self, pair: KeyPair) -> None:
        allowed.change(self.keys, lambda listed: [listed.pop(pair.public)])

    def dealer(self, pair: KeyPair, endpoint: str | None = None, **options: Any) -> Producer:
        """A connection with *pair*, which has not yet said anything."""
        curve = {
            "CURVE_SERVERKEY": self.server.public.encode(),
            "CURVE_PUBLICKEY": pair.public.encode(),
            "CURVE_SECRETKEY": pair.secret.encode(),
            **options,
        }
        return Producer(self.context, endpoint or self.front, **curve)

    def producer(self, pair: KeyPair, **options: Any) -> Producer:
        """A connection with *pair* that the broker has welcomed."""
        producer = self.dealer(pair, **options)
        producer.say(m.Hello((1,), "test"))
        producer.expect(m.Welcome)
        return producer

    def settings(self, key: str, **more: Any) -> Settings:
        given = {"front": self.front, "back": self.back, "run_dir": self.run, "server_key": self.server.public}
        return Settings(**{**given, "key": key, **more})

    def client(self, key: str, timeout: float = LIMIT_S, **more: Any) -> Client:
        return Client(settings=self.settings(key, **more), timeout=timeout)

    def worker(self, key: str = "gpu", *arguments: str) -> Program:
        """The real worker's loop over a runner that needs no model."""
        told = ("--back", self.back, "--run-dir", str(self.run), "--key", key, "--server-key", self.server.public)
        return self.program("whole.loop_worker", *told, *arguments, PYTHONPATH=paths())

    def close(self) -> None:
        self.context.destroy(linger=0)
        for program in self.programs:
            program.close()
        shutil.rmtree(self.run, ignore_errors=True)


def paths() -> str:
    tests = Path(__file__).resolve().parents[1]
    return f"{tests.parent}:{tests}"


@contextmanager
def keyed(*flags: str) -> Iterator[Keyed]:
    """A running one, ended with the block."""
    found = Keyed(*flags)
    try:
        found.start()
        yield found
    finally:
        found.close()


def until(holds: Callable[[], bool], producer: Producer) -> None:
    """Ask for health until *holds*; the producer's limit bounds it."""
    while not holds():
        producer.health()
