"""A machine with a hand-driven clock, producers that read what they are sent, and a worker moved by hand."""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
import struct
from itertools import count
from pathlib import Path

from queueing.memory_journal import MemoryJournal

from broker.back import Identity
from broker.jobs import MEMORY_BYTES
from broker.machine import Machine
from broker.record import Now, Record
from mtplx import messages as m
from mtplx import wire
from mtplx.settings import Settings
from mtplx.testing import ManualClock

WORKER, OTHER_WORKER, BEATS = b"w-main", b"w-other", b"w-beats"
WORKER_ID = b"W" * 16
BOOT_ID = b"B" * 16
SEED = 77


def settings(**given) -> Settings:
    """Settings that read neither the environment nor a file."""
    return Settings(**{"run_dir": Path("/tmp/unused"), "cache_dir": Path("/tmp/unused"), **given})


def sha256_of(ids) -> str:
    """The trajectory hash, worked out apart from the code under test."""
    return hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()


def job_id(number: int) -> bytes:
    """The id of the test's job *number*."""
    return number.to_bytes(16, "big")


def body(**fields) -> bytes:
    """The body of a SUBMIT."""
    return wire.pack_body(fields or {"prompt": "hello"})


class Rig:
    """The machine, and everybody around it."""

    def __init__(self, *, keep_moments: bool = False, journal: MemoryJournal | None = None, **given) -> None:
        self.clock = ManualClock(1000.0)
        self.journal, self._keep_moments, self._settings = journal, keep_moments, settings(**given)
        self._memory_bytes = MEMORY_BYTES
        self._start(BOOT_ID)
        self.heard: dict[bytes, list[m.Message]] = {}
        self.worker_heard: dict[bytes, list[m.Message]] = {}
        self.deaf: set[bytes] = set()
        self.gone: set[bytes] = set()
        # Messages that still fit into a reader's pipe; absent means any number.
        self.room: dict[bytes, int] = {}
        self._progress = count(1)

    def _start(self, boot_id: bytes) -> None:
        identity = Identity(boot_id, "1.2.3", 4242, self.now())
        self.machine = Machine(
            self._settings, identity, lambda: SEED, journal=self.journal, keep_moments=self._keep_moments
        )
        self.jobs, self.back, self.gate = self.machine.jobs, self.machine.back, self.machine.jobs.gate
        self.jobs.memory_bytes = self._memory_bytes

    def change(self, retain_bytes: int, memory_bytes: int) -> None:
        """Change what is kept, for this process of the broker and the next ones."""
        self._settings = dataclasses.replace(self._settings, retain_bytes=retain_bytes)
        self._memory_bytes = memory_bytes
        self.jobs.settings, self.jobs.memory_bytes = self._settings, memory_bytes

    def restart(self, *, power_loss: bool = False, away_s: float = 0.0) -> None:
        """Kill the broker and start another on what is left of its journal; all connections are new ones."""
        self.clock.advance(away_s)
        self.journal = self.journal.after(power_loss=power_loss)
        self._start(secrets.token_bytes(16))
        self.machine.restore(self.now())
        self.turn()

    def now(self) -> Now:
        return Now(self.clock.seconds, self.clock.wall_ns)

    # --- turns

    def turn(self) -> None:
        """What the loop does after the messages of a turn: tick, then send all that can be sent."""
        self.machine.tick(self.now())
        self.machine.commits.commit(self.now())
        while self.back.outgoing:
            route, message = self.back.outgoing.popleft()
            wire.encode(message)
            if route in self.gone:
                self.back.on_unreachable(route, message, self.now())
            else:
                self.on_sent_to_worker(route, message)
        self.machine.commits.commit(self.now())
        outboxes = self.jobs.outboxes
        for route in outboxes.due(self.clock.seconds):
            while (message := self.jobs.offer(route, self.now())) is not None:
                if route in self.gone:
                    self.machine.on_client_gone(route, self.now())
                    break
                if route in self.deaf or self.room.get(route, 1) == 0:
                    outboxes.blocked(route, self.clock.seconds)
                    break
                wire.encode(message)
                if route in self.room:
                    self.room[route] -= 1
                self.on_sent_to_client(route, message)
                self.jobs.sent(route, self.now())
        self.jobs.check()

    def on_sent_to_worker(self, route: bytes, message: m.Message) -> None:
        self.worker_heard.setdefault(route, []).append(message)

    def on_sent_to_client(self, route: bytes, message: m.Message) -> None:
        self.heard.setdefault(route, []).append(message)

    def wait(self, seconds: float, *, beats: bool = True) -> None:
        """Let time pass turn by turn as the loop does; the worker beats meanwhile unless told not to."""
        until = self.clock.seconds + seconds
        while self.clock.seconds < until:
            step = min(until - self.clock.seconds, 1.0)
            self.clock.advance(step)
            if beats and self.back.worker is not None:
                self.beat()
            self.turn()

    # --- producers

    def say(self, route: bytes, message: m.Message) -> list[m.Message]:
        """A producer says *message*; returns all it heard since, this turn's included."""
        before = len(self.heard.get(route, []))
        self.machine.on_client(route, message, self.now())
        self.turn()
        return self.heard.get(route, [])[before:]

    def submit(self, number: int, route: bytes = b"a", job: bytes | None = None, **options) -> m.Message:
        """Submit job *number* and return the first answer."""
        answers = self.say(route, m.Submit(job_id(number), body() if job is None else job, **options))
        return answers[0] if answers else None

    def told(self, number: int, kind: type[m.Message], route: bytes = b"a") -> list[m.Message]:
        """The messages of *kind* about job *number* that *route* heard."""
        return [one for one in self.heard.get(route, []) if type(one) is kind and one.id == job_id(number)]

    def last_word(self, number: int, route: bytes = b"a") -> m.Done | m.Error | None:
        """The one last word of job *number*; fails where there are two, or something about the job follows."""
        about = [one for one in self.heard.get(route, []) if getattr(one, "id", None) == job_id(number)]
        ends = [place for place, one in enumerate(about) if isinstance(one, m.Done | m.Error)]
        assert len(ends) <= 1, about
        assert not ends or ends[0] == len(about) - 1, about
        return about[ends[0]] if ends else None

    def text(self, number: int, route: bytes = b"a") -> str:
        """The text that *route* got in chunks, which must be numbered without gaps."""
        tokens, text = 0, ""
        for seq, chunk in enumerate(self.told(number, m.Chunk, route)):
            assert (chunk.seq, chunk.first, chunk.n) == (seq, tokens, len(chunk.ids))
            tokens += chunk.n
            text += chunk.text
        return text

    def status(self, route: bytes = b"ops") -> dict:
        """The health report as a producer gets it."""
        return self.say(route, m.Status())[-1].status

    # --- the worker

    def ready(self, route: bytes = WORKER, worker_id: bytes = WORKER_ID, **changes) -> None:
        """A worker says READY."""
        said = m.Ready(worker_id, 99, "hyper", "h0", "tiny", 1000, 512, {"device": "none"})
        self.worker_says(
            dataclasses.replace(said, **{"model_hash": "model", "build_hash": "build", **changes}), route
        )

    def worker_says(self, message: m.Message, route: bytes = WORKER) -> None:
        self.back.on_message(route, message, self.now())
        self.turn()

    def beat(self, *, progress: bool = True, worker_id: bytes = WORKER_ID, **fields) -> None:
        """A beat, which by default reports progress."""
        number = next(self._progress) if progress else self.back.worker.progress
        self.back.on_message(BEATS, m.WorkerBeat(worker_id, number, **fields), self.now())
        self.turn()

    @property
    def running(self) -> Record | None:
        return self.gate.slot

    def runs(self, route: bytes = WORKER) -> list[m.Run]:
        """The RUNs sent to a worker so far."""
        return [one for one in self.worker_heard.get(route, []) if isinstance(one, m.Run)]

    def chunk(self, *ids: int, run: m.Run | None = None, route: bytes = WORKER, **changes) -> None:
        """The worker draws *ids* (of the running job, or of an older *run*)."""
        run = run or self.runs(route)[-1]
        record = self.jobs.find(run.id)
        first = record.tokens if record else 0
        text = "".join(f"{token} " for token in ids)
        said = m.WorkerChunk(run.id, run.attempt, run.lease, first, len(ids), ids, text)
        self.worker_says(dataclasses.replace(said, **changes), route)

    def final(self, reason: str = "stop", run: m.Run | None = None, route: bytes = WORKER, **changes) -> None:
        """The worker ends its run."""
        run = run or self.runs(route)[-1]
        record = self.jobs.find(run.id)
        ids = record.answer.ids() if record and record.answer else ()
        said = m.Final(
            run.id, run.attempt, run.lease, reason, 3, 0, 16, 0.5, 1.5, sha256_of(ids), "serial_b1", True, {}
        )
        self.worker_says(dataclasses.replace(said, **changes), route)

    def fail(self, code: str = "E_INTERNAL", **more) -> None:
        run = self.runs()[-1]
        self.worker_says(m.Fail(run.id, run.attempt, run.lease, code, "It failed.", **more))

    def finish_all(self, limit: int = 1000) -> None:
        """Let the worker run whatever comes, one token each."""
        for _ in range(limit):
            if self.running is None:
                return
            self.chunk(1)
            self.final()
        raise AssertionError("the line does not end")


def rig_of(**given) -> Rig:
    """A rig that writes a journal."""
    return Rig(journal=MemoryJournal(), **given)


def lose_worker(rig: Rig, route: bytes = WORKER) -> None:
    """The worker's connection breaks."""
    rig.gone.add(route)
    rig.back.beat()
    rig.turn()
    rig.gone.discard(route)


def kill_in_attempt(rig: Rig, *ids: int) -> None:
    """A worker comes, draws *ids* of what it is given, and dies."""
    rig.ready()
    if ids:
        rig.chunk(*ids)
    lose_worker(rig)
