"""A broker that is nothing but a ROUTER for workers, driven by a test line by line."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Self

import zmq

from mtplx import wire
from mtplx.job import Job
from mtplx.messages import (
    FROM_WORKER,
    Accepted,
    Drawn,
    Error,
    Fail,
    Final,
    Message,
    Ready,
    Run,
    WorkerBeat,
    WorkerChunk,
)

LIMIT_S = 20.0


class BareBroker:
    """Says and hears what the test wants; `peer` is the worker's connection for jobs."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind(endpoint)
        self.peer: bytes | None = None
        self.accepted: Ready | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hear(self, timeout_ms: int = 10_000) -> tuple[bytes, Message]:
        """The next message, and where it came from."""
        assert self.socket.poll(timeout_ms), "the worker said nothing"
        peer, *frames = self.socket.recv_multipart()
        message = wire.decode(frames, FROM_WORKER)
        if not isinstance(message, WorkerBeat):
            self.peer = peer
        return peer, message

    def _heard(self) -> Iterator[tuple[bytes, Message]]:
        # Beats may go on for ever.
        ends = time.monotonic() + LIMIT_S
        while time.monotonic() < ends:
            heard = self.hear()
            # On a busy machine a READY is repeated before it is answered.
            if heard[1] != self.accepted:
                yield heard
        raise AssertionError("what was waited for did not come")

    def expect(self, kind: type[Message]):
        """The next message, beats aside, which must be of *kind*."""
        message = next(one for _, one in self._heard() if isinstance(one, kind) or not isinstance(one, WorkerBeat))
        assert isinstance(message, kind), message
        return message

    def beat(self) -> tuple[bytes, WorkerBeat]:
        """The next beat, and the connection it came over."""
        return next((peer, message) for peer, message in self._heard() if isinstance(message, WorkerBeat))

    def say(self, message: Message, peer: bytes | None = None) -> None:
        self.socket.send_multipart([peer or self.peer, *wire.encode(message)])

    def welcome(self, beat_ms: int = 60_000) -> Ready:
        """Hear READY and accept it."""
        ready = self.expect(Ready)
        self.accept(ready, beat_ms)
        return ready

    def accept(self, ready: Ready, beat_ms: int = 60_000) -> None:
        self.accepted = ready
        self.say(Accepted(boot_id=bytes(16), beat_ms=beat_ms, epoch=ready.epoch))

    def disown(self, peer: bytes, epoch: int) -> None:
        """Answer a beat that was sent in *epoch*."""
        self.say(Error("E_UNKNOWN_WORKER", "who?", retryable=True, detail={"epoch": epoch}), peer)

    def run(
        self, job: Job, lease: int = 1, *, attempt: int = 1, drawn: tuple[int, ...] = (), seed: int = 7
    ) -> bytes:
        """Hand over an attempt, behind the ids that earlier ones drew."""
        job_id = uuid.uuid4().bytes
        if drawn:
            self.say(Drawn(lease, drawn))
        self.say(Run(id=job_id, attempt=attempt, lease=lease, seed=seed, job=wire.pack_body(job.to_map())))
        return job_id

    def answer(self) -> tuple[list[WorkerChunk], Final | Fail]:
        """All chunks up to the last word, and that."""
        chunks = []
        for _, message in self._heard():
            if isinstance(message, Final | Fail):
                break
            if isinstance(message, WorkerChunk):
                chunks.append(message)
        return chunks, message

    def close(self) -> None:
        self.socket.close()
        self.context.term()
