"""Producers of a round: they follow a plan, come back after every silence, and note all they say and hear.

A `RawProducer` speaks the protocol by itself, as docs/protocol.md tells it, so that our client cannot hide a fault
of the broker. A `LibraryProducer` uses `mtplx.Client` in a thread.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import zmq
from whole.harness import Producer
from whole.history import Line
from whole.plan import BEAT_S, Ask, Person

from mtplx import Client, wire
from mtplx import messages as m
from mtplx.errors import MtplxError, WireError
from mtplx.stream import Piece, Result

# A producer with open jobs hears the broker at each beat; after this many without a word it connects anew.
SILENT_BEATS: Final = 6
AGAIN_S: Final = 0.15
# Refusals after which the same job is submitted again.
COME_BACK: Final = ("E_DRAINING", "E_QUEUE_FULL", "E_JOURNAL")
# How long the library's client waits through a broker that is away.
LIBRARY_S: Final = 30.0

Note = Callable[[Line], None]
Fields = Callable[[Ask], dict[str, Any]]


def scripted(ask: Ask) -> dict[str, Any]:
    """The job for a scripted worker, whose tokens depend on seed and index alone."""
    script = {"tokens": ask.tokens, "token_s": ask.token_s, "seeded": True}
    return {"prompt": "p", "max_tokens": 1000, "seed": ask.seed, "metadata": {"script": json.dumps(script)}}


@dataclass(slots=True, eq=False)
class Job:
    """What a producer knows of its job."""

    ask: Ask
    submit_at: float
    admitted: bool = False
    seq: int = 0
    tokens: int = 0
    granted: int = 0
    asked: bool = False
    ended: bool = False
    cancelled: bool = False


class RawProducer:
    """One producer on DEALER sockets, moved on by `turn`; every connection has a name of its own in the history."""

    def __init__(self, name: str, person: Person, service: tuple[zmq.Context, str], note: Note, fields: Fields):
        self.name, self.person = name, person
        self._context, self._endpoint = service
        self._note, self._fields = note, fields
        began = time.monotonic()
        self.jobs = {ask.job: Job(ask, began + ask.after_s) for ask in person.asks}
        self._away = sorted(person.away)
        self._chunks = self._connections = 0
        self._back_at: float | None = began
        self._heard_at = began
        self._left = False
        self._beat_s = BEAT_S
        self.link: Producer | None = None

    @property
    def over(self) -> bool:
        """True once nothing more is to be expected."""
        return self._left or all(job.ended for job in self.jobs.values())

    @property
    def by(self) -> str:
        """The name of the connection."""
        return f"{self.name}.{self._connections}"

    def close(self) -> None:
        """Let the connection go; what was said last still goes out."""
        if self.link is not None:
            self.link.socket.close(linger=200)
            self.link = None

    def turn(self) -> None:
        """Say what is due, and take what is there."""
        now = time.monotonic()
        if self._left:
            return
        if self.link is None:
            if self._back_at is not None and now >= self._back_at:
                self._connect(now)
            return
        while self.link is not None and self.link.socket.poll(0):
            self._heard_at = now
            self._take(wire.decode(self.link.socket.recv_multipart(), m.TO_CLIENT))
        if self.link is None:
            return
        for job in self.jobs.values():
            if not job.admitted and not job.ended and now >= job.submit_at and not job.asked:
                self._submit(job)
        if now - self._heard_at > SILENT_BEATS * self._beat_s and not self.over:
            self.close()
            self._back_at = now

    def _line(self, what: str, job: bytes = b"", **more: Any) -> None:
        self._note(Line(at=time.monotonic(), what=what, job=job.hex(), by=self.by, **more))

    def _connect(self, now: float) -> None:
        self._connections += 1
        self.link = Producer(self._context, self._endpoint, RECONNECT_IVL=20)
        self._heard_at, self._back_at = now, None
        self._say(m.Hello((1,), self.name))
        for job in self.jobs.values():
            if job.ended or now < job.submit_at:
                continue
            if not job.admitted:
                self._submit(job)
                continue
            credit = None if job.ask.credit is None else max(1, job.granted - job.seq)
            self._line("resumed", job.ask.job, seq=job.seq, first=job.tokens)
            self._say(m.Resume(job.ask.job, job.seq, job.tokens, credit))
            if job.cancelled:
                self._say(m.Cancel(job.ask.job))

    def _say(self, message: m.Message) -> None:
        assert self.link is not None
        self.link.say(message)

    def _submit(self, job: Job) -> None:
        job.asked, job.granted = True, job.ask.credit or 0
        body = wire.pack_body(self._fields(job.ask))
        for _ in range(2 if job.ask.twice else 1):
            self._line("asked", job.ask.job)
            self._say(m.Submit(job.ask.job, body, credit=job.ask.credit, finish=job.ask.finish))

    def _take(self, message: m.Message) -> None:
        job = self.jobs.get(getattr(message, "id", None) or b"")
        match message:
            case m.Welcome():
                self._beat_s = message.beat_ms / 1000
            case m.Admitted() if job:
                job.admitted = True
                self._line("took", message.id, number=message.admit_seq, again=message.dup)
                self._cancel_if_due(job)
            case m.Started() if job:
                self._line("started", message.id, number=message.attempt)
            case m.Chunk() if job:
                told = {"seq": message.seq, "first": message.first, "ids": message.ids, "text": message.text}
                self._line("came", message.id, number=message.attempt, **told)
                job.seq, job.tokens = message.seq + 1, message.first + message.n
                self._read(job)
            case m.Done() if job:
                job.ended = True
                end = {"code": message.outcome, "seq": message.seq, "text": message.text, "sha": message.sha256}
                self._line("word", message.id, **end)
            case m.Error():
                self._error(message, job)
            case m.Admitted() | m.Started() | m.Chunk() | m.Done():
                self._line("complaint", code=type(message).__name__, text=f"about {message.id.hex()}")

    def _error(self, message: m.Error, job: Job | None) -> None:
        told = {"code": message.code, "text": message.message}
        if job is None:
            self._line("complaint", **told)
        elif message.code == "E_UNKNOWN_JOB":
            if not job.ended and job.admitted:
                self._line("unknown", job.ask.job, **told)
                job.ended = True
        elif not job.admitted and message.code in COME_BACK:
            self._line("refused", job.ask.job, **told)
            job.asked, job.submit_at = False, time.monotonic() + AGAIN_S
        else:
            job.ended = True
            self._line("word", job.ask.job, **told)

    def _read(self, job: Job) -> None:
        self._chunks += 1
        if job.ask.credit is not None and job.seq + 1 >= job.granted:
            job.granted = job.seq + job.ask.credit
            self._say(m.GiveCredit(job.ask.job, job.granted))
        self._cancel_if_due(job)
        if self.person.leaves_after is not None and self._chunks > self.person.leaves_after:
            self._leave()
        elif self._away and self._chunks > self._away[0][0]:
            self.close()
            self._back_at = time.monotonic() + self._away.pop(0)[1]

    def _cancel_if_due(self, job: Job) -> None:
        if job.ask.cancel_after is not None and not job.cancelled and job.seq >= job.ask.cancel_after:
            job.cancelled = True
            self._line("cancelled", job.ask.job)
            self._say(m.Cancel(job.ask.job))

    def _leave(self) -> None:
        for job in self.jobs.values():
            if job.asked and not job.ended:
                self._line("parted" if job.ask.finish and not job.cancelled else "left", job.ask.job)
        if self.person.manners:
            self._say(m.Bye())
        self._left = True
        self.close()


class LibraryProducer:
    """One producer on `mtplx.Client`, in a thread: it waits through whatever happens to the broker."""

    def __init__(self, name: str, person: Person, endpoint: str, note: Note, fields: Fields) -> None:
        self.name, self.person = name, person
        self._endpoint, self._note, self._fields = endpoint, note, fields
        # The library draws the ids of its jobs.
        self.asks: dict[str, Ask] = {}
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """True once all jobs have ended, however."""
        return not self._thread.is_alive()

    def turn(self) -> None:
        """As in `RawProducer`; the thread moves on by itself."""

    def close(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join(LIBRARY_S)

    def _line(self, what: str, job: bytes = b"", **more: Any) -> None:
        self._note(Line(at=time.monotonic(), what=what, job=job.hex(), by=self.name, **more))

    def _run(self) -> None:
        began = time.monotonic()
        try:
            with Client(self._endpoint, timeout=LIBRARY_S, idle_timeout=LIBRARY_S) as client:
                for ask in sorted(self.person.asks, key=lambda one: one.after_s):
                    time.sleep(max(0.0, began + ask.after_s - time.monotonic()))
                    self._one(client, ask)
        except MtplxError as error:
            self._line("complaint", code=type(error).__name__, text=str(error))

    def _one(self, client: Client, ask: Ask) -> None:
        """Submit and read one job, which can be named in the history once it is admitted."""
        asked = time.monotonic()
        while True:
            try:
                stream = client.submit(self._fields(ask))
            except WireError as error:
                if error.code not in COME_BACK:
                    raise
                time.sleep(AGAIN_S)
                continue
            break
        self.asks[stream.id.hex()] = ask
        self._note(Line(at=asked, what="asked", job=stream.id.hex(), by=self.name))
        self._line("took", stream.id, number=stream.admit_seq)
        try:
            for piece in stream:
                self._came(stream.id, piece)
            self._word(stream.result())
        except WireError as error:
            self._line("word", stream.id, code=error.code, text=str(error))

    def _came(self, job: bytes, piece: Piece) -> None:
        self._line("came", job, first=piece.first, ids=piece.ids, text=piece.text)

    def _word(self, result: Result) -> None:
        self._line("word", result.id, code=result.finish_reason, text=result.text, sha=result.sha256)
