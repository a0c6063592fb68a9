"""A broker, a worker double and a bare ROUTER as processes, and a producer that measures them."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import zmq
from report import ROOT

from mtplx import messages as m
from mtplx import wire
from mtplx.settings import Settings

LIMIT_MS = 60_000
ECHO = """
import sys, zmq
socket = zmq.Context().socket(zmq.ROUTER)
socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
socket.setsockopt(zmq.SNDHWM, 0)
socket.setsockopt(zmq.RCVHWM, 0)
socket.bind(sys.argv[1])
while True:
    socket.send_multipart(socket.recv_multipart())
"""


class Peer:
    """A DEALER of the measuring process."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(endpoint)

    def say(self, message: m.Message) -> None:
        """Send a message."""
        self.socket.send_multipart(wire.encode(message))

    def hear(self) -> list[bytes]:
        """The frames of the next message."""
        if not self.socket.poll(LIMIT_MS):
            sys.exit("The broker said nothing for a minute.")
        return self.socket.recv_multipart()

    def until(self, *kinds: type[m.Message]) -> list[bytes]:
        """Read until a message of one of *kinds*."""
        wanted = {bytes([kind.KIND]) for kind in kinds}
        while True:
            frames = self.hear()
            if frames[1] in wanted:
                return frames


class Starts:
    """The moments at which the scripted worker starts its jobs, read from its log."""

    def __init__(self, reader: int) -> None:
        self._at: dict[str, float] = {}
        self._grew = threading.Condition()
        self._lines = os.fdopen(reader)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._lines:
            event = json.loads(line)
            if event["event"] in ("run", "accepted"):
                with self._grew:
                    self._at[event["id"] or event["event"]] = event["at"]
                    self._grew.notify_all()

    def wait(self, key: str) -> float:
        """When *key* (a job, or `accepted`) was logged."""
        with self._grew:
            if not self._grew.wait_for(lambda: key in self._at, LIMIT_MS / 1000):
                sys.exit(f"The worker never logged {key}.")
            return self._at.pop(key)


@contextmanager
def programs(
    settings: Settings, *commands: list[str], keep: int | None = None
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of this checkout, ended with the block."""
    env = {**settings.environment(), "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen([sys.executable, "-P", *one], env=env, pass_fds=() if keep is None else (keep,))
        for one in commands
    ]
    try:
        yield started
    finally:
        for process in started:
            process.send_signal(signal.SIGKILL)
            process.wait()


def submit(max_tokens: int, script: dict[str, int] | None = None) -> m.Submit:
    """A small job."""
    job: dict[str, object] = {"prompt": "Why is the sky blue?", "max_tokens": max_tokens}
    if script:
        job["metadata"] = {"script": json.dumps(script)}
    return m.Submit(secrets.token_bytes(16), wire.pack_body(job))


def latencies(producer: Peer, echo: Peer, starts: Starts, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds from SUBMIT to the worker's start, and of the bare round trip, in turn."""
    dispatch, bare = [], []
    for number in range(rounds + rounds // 10):
        message = submit(1)
        frames = wire.encode(message)
        began = time.monotonic()
        echo.socket.send_multipart(frames)
        echo.hear()
        round_trip = time.monotonic() - began
        began = time.monotonic()
        producer.socket.send_multipart(frames)
        producer.until(m.Done, m.Error)
        start = starts.wait(message.id.hex())
        if number >= rounds // 10:  # the first tenth warms up
            bare.append(round_trip)
            dispatch.append(start - began)
    return dispatch, bare


def percentile(values: list[float], percent: int) -> float:
    """Nearest rank."""
    return sorted(values)[-(-len(values) * percent // 100) - 1]
