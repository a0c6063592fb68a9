"""A broker of a few lines for tests of the clients: a ROUTER in a thread that plays what a test tells it."""

from __future__ import annotations

import hashlib
import queue
import struct
import threading
from collections.abc import Callable
from typing import Any, Self

import zmq

from mtplx import wire
from mtplx.messages import (
    FROM_CLIENT,
    Admitted,
    Bye,
    Cancel,
    Chunk,
    Done,
    Error,
    Hello,
    Message,
    Ping,
    Pong,
    Resume,
    Started,
    Status,
    StatusReply,
    Submit,
    Welcome,
)

LIMITS = {"max_job_bytes": 4096, "queue_jobs": 4, "queue_bytes": 1 << 20, "retain_s": 60, "orphan_s": 10}
WORDS = ("The ", "sky ", "is ", "blue.")
Reply = Callable[["FakeBroker", Submit], list[Message]]


def sha256(ids: tuple[int, ...]) -> str:
    return hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()


def chunks(job_id: bytes, words: tuple[str, ...] = WORDS, *, start: int = 0) -> list[Message]:
    """One chunk a word; the id of a word is its index."""
    return [
        Chunk(id=job_id, attempt=1, seq=n, first=n, n=1, ids=(n,), text=words[n]) for n in range(start, len(words))
    ]


def done(job_id: bytes, words: tuple[str, ...] = WORDS, *, outcome: str = "stop", **changed: Any) -> Done:
    values: dict[str, Any] = {
        "id": job_id,
        "seq": len(words),
        "outcome": outcome,
        "text": "".join(words),
        "usage": {"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": len(words)},
        "timings": {"queue_wait_s": 0.0, "prefill_s": 0.1, "time_to_first_token_s": 0.1, "decode_s": 0.3},
        "seed": 7,
        "sha256": sha256(tuple(range(len(words)))),
        "run": {"model": "fake", "route": "serial_b1", "attempt": 1},
    }
    return Done(**{**values, **changed})


def answer(broker: FakeBroker, submit: Submit) -> list[Message]:
    """The ordinary course of a job."""
    started = Started(id=submit.id, attempt=1, model="fake", queue_wait_s=0.0)
    return [broker.admit(submit), started, *chunks(submit.id), done(submit.id)]


class FakeBroker:
    """Answers like a broker; `reply` decides what a SUBMIT gets. `heard` holds every message, oldest first."""

    def __init__(self, endpoint: str, reply: Reply = answer, *, boot: int = 1) -> None:
        self.endpoint = endpoint
        self.reply = reply
        self.boot_id = bytes([boot]) * 16
        self.heard: list[Message] = []
        self.health: dict[str, Any] = {"worker": {"state": "ready"}}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.on_resume: Callable[[Resume], list[Message]] | None = None
        self.admitted = 0
        self._peers: dict[bytes, bytes] = {}
        self._said: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._connections = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.bind(endpoint)
        self._orders = self._context.socket(zmq.PULL)
        self._orders.bind(f"inproc://orders-{id(self)}")
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._order(b"stop")
        self._thread.join(10)
        self._socket.disable_monitor()
        self._connections.close(linger=0)
        self._socket.close()
        self._orders.close()
        self._context.term()

    def say(self, *messages: Any) -> None:
        """Send, in order, to whoever submitted the job of each."""
        for message in messages:
            self._said.put([message.id, *wire.encode(message)])
        self._order(b"say")

    def wait_for(self, kind: type[Message], number: int = 1) -> Message:
        """The *number*-th message of that kind, once it came."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.of(kind)) >= number, 10), f"no {kind.__name__} came"
            return self.of(kind)[number - 1]

    def wait_until_connected(self) -> None:
        """Until some client has a connection, of which nothing need have been heard."""
        assert self._connections.poll(10_000), "nobody connects"

    def of(self, kind: type[Message]) -> list[Any]:
        return [message for message in self.heard if type(message) is kind]

    def admit(self, submit: Submit) -> Admitted:
        self.admitted += 1
        return Admitted(id=submit.id, admit_seq=self.admitted, position=0, boot_id=self.boot_id, seed=7)

    def _order(self, word: bytes) -> None:
        push = self._context.socket(zmq.PUSH)
        push.connect(f"inproc://orders-{id(self)}")
        push.send(word)
        push.close()

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._orders, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._socket in ready:
                peer, *frames = self._socket.recv_multipart()
                self._serve(peer, wire.decode(frames, FROM_CLIENT))
            elif self._orders in ready:
                if self._orders.recv() == b"stop":
                    return
                while not self._said.empty():
                    job_id, *frames = self._said.get()
                    self._socket.send_multipart([self._peers[job_id], *frames])

    def _serve(self, peer: bytes, message: Message) -> None:
        if isinstance(message, Submit | Resume):
            self._peers[message.id] = peer
        # Noted before it is answered: whoever has the answer must find the question in `heard`.
        with self._changed:
            self.heard.append(message)
            self._changed.notify_all()
        for reply in self._replies(message):
            self._socket.send_multipart([peer, *wire.encode(reply)])

    def _replies(self, message: Message) -> list[Message]:
        match message:
            case Hello():
                return [Welcome(version=1, boot_id=self.boot_id, beat_ms=100, limits=LIMITS, server="fake")]
            case Submit():
                return self.reply(self, message)
            case Resume():
                return self.on_resume(message) if self.on_resume else [unknown(message.id)]
            case Status():
                return [self._status(message)]
            case Ping():
                return [Pong(n=message.n)]
            case Cancel() | Bye():
                return []
        return []

    def _status(self, message: Status) -> Message:
        if message.jobs:
            return StatusReply(status={"jobs": list(self.jobs.values())})
        if message.id is None:
            return StatusReply(status=self.health)
        state = self.jobs.get(message.id.hex())
        return StatusReply(status=state) if state else unknown(message.id)


def unknown(job_id: bytes) -> Error:
    return Error(code="E_UNKNOWN_JOB", message="No such job.", retryable=False, id=job_id)
