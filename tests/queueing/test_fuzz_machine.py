"""Wounded and strange frames through the decoder and the machine, from producers and from the worker's endpoint.

No sockets and no clock: a million frames take minutes. Whatever comes, nothing is raised and the books stay right.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter
from typing import Any

import pytest
from protocol import make_vectors
from queueing.rig import BEATS, OTHER_WORKER, WORKER, Rig, body, job_id
from whole.fuzz import VALID, Frames, wounded

from bench.report import Figure, write
from mtplx import messages as m
from mtplx import wire
from mtplx.errors import ProtocolError

OF_WORKERS = [
    make_vectors.frames_of(vector)
    for vector in [*make_vectors.valid_messages(), *make_vectors.unknown_keys()]
    if vector["socket"] == "from_worker"
]
PRODUCERS = (b"a", b"b", b"c")
# Bad frames on its own connection end a worker: most come from elsewhere, so that jobs run meanwhile.
WORKERS = (WORKER, *(OTHER_WORKER, BEATS) * 6)
# A seed corpus is kept in the repository, and must stay small.
CORPUS_BYTES = sum(len(frame) for frames in (*VALID, *OF_WORKERS) for frame in frames)
# What stays where every frame was answered, in messages: producers that read, and a short line.
SHORT = {"queue_jobs": 8, "queue_bytes": 20_000, "max_job_bytes": 4000, "retain_s": 20.0, "orphan_s": 3.0}


class Fuzz:
    """Draws frames and hands them to a machine, as the loop does."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.rig = Rig(**SHORT)
        self.counts: Counter[str] = Counter()

    def step(self) -> None:
        """One thing that happens."""
        lot = self.draw.random()
        if lot < 0.5:
            self._from_producer(wounded(self.draw))
        elif lot < 0.62:
            self._from_producer(wire.encode(self._sound()))
        elif lot < 0.82:
            self._from_worker(wounded(self.draw, OF_WORKERS))
        elif lot < 0.97:
            self._work()
        elif lot < 0.98:
            self.rig.machine.on_client_gone(self.draw.choice(PRODUCERS), self.rig.now())
        else:
            self.rig.clock.advance(self.draw.choice((0.01, 0.5, 3.0)))
        if self.draw.random() < 0.3:
            self.rig.turn()
            # What was said is of no use here, and would fill the memory.
            self.rig.heard.clear()
            for told in self.rig.worker_heard.values():
                del told[:-8]

    def _from_producer(self, frames: Frames) -> None:
        route = self.draw.choice(PRODUCERS)
        self.counts["frames"] += 1
        if not frames[0]:
            # A delimiter is the loop's business.
            return
        try:
            message = wire.decode(frames, m.FROM_CLIENT)
        except ProtocolError as error:
            self.counts["refused"] += 1
            if wire.speaks_mtx(frames):
                self.rig.machine.on_bad_frame(route, error)
            return
        self.counts["sound"] += 1
        self.rig.machine.on_client(route, message, self.rig.now())

    def _from_worker(self, frames: Frames) -> None:
        route = self.draw.choice(WORKERS)
        self.counts["frames"] += 1
        try:
            message = wire.decode(frames, m.FROM_WORKER)
        except ProtocolError as error:
            self.counts["refused"] += 1
            self.rig.back.on_bad_frame(route, error, self.rig.now())
            return
        self.counts["sound"] += 1
        self.rig.back.on_message(route, message, self.rig.now())

    def _sound(self) -> m.Message:
        """A message of a producer that means something here: about one of a few jobs."""
        job, number = job_id(self.draw.randrange(12)), self.draw.choice((0, 1, 2, 3, 2**53, 2**64 - 1))
        credit = self.draw.choice((None, None, 1, 5))
        kinds: list[m.Message] = [
            m.Submit(job, body(prompt="hello", max_tokens=self.draw.randint(1, 9)), credit),
            m.Submit(job, body(prompt="hello", max_tokens=5), credit, finish=self.draw.random() < 0.3),
            m.Cancel(job),
            m.Resume(job, number, self.draw.choice((0, 1, 2, number)), credit),
            m.GiveCredit(job, number),
            m.Ack(job),
            m.Status(job),
            m.Status(job, whole=True),
            m.Kick(job),
            m.Kick(job),
            m.Delete(job),
            m.Status(jobs=True),
            m.Hello((1,)),
            m.Bye(),
        ]
        return self.draw.choice(kinds)

    def _work(self) -> None:
        """What a worker says: about its run, with small faults, and anew where it was given up."""
        if self.rig.back.worker is None:
            ready = m.Ready(self.draw.randbytes(16), 99, "hyper", "h0", "tiny", 1000, 512, {})
            self._from_worker_as(wire.encode(ready), WORKER)
            return
        record = self.rig.running
        runs = self.rig.runs()
        if record is None or not runs:
            return
        run, first = runs[-1], record.tokens
        ids = tuple(self.draw.randrange(1000) for _ in range(self.draw.randint(1, 3)))
        said: list[Any] = [
            m.WorkerChunk(run.id, run.attempt, run.lease, first, len(ids), ids, "x" * len(ids)),
            m.WorkerChunk(run.id, run.attempt, run.lease, first, len(ids), ids, "x" * len(ids)),
            m.Final(run.id, run.attempt, run.lease, "stop", 3, 0, 9, 0.1, 0.1, "0" * 64, "serial_b1", True, {}),
            m.Fail(
                run.id,
                run.attempt,
                run.lease,
                self.draw.choice(("E_INTERNAL", "E_NUMERIC", "E_WORKER_LOST", "x")),
                "why",
            ),
        ]
        message = self.draw.choice(said)
        if self.draw.random() < 0.1:
            message = dataclasses.replace(
                message, lease=self.draw.choice((0, run.lease - 1 if run.lease else 0, 2**63))
            )
        self._from_worker_as(wire.encode(message), WORKER)

    def _from_worker_as(self, frames: Frames, route: bytes) -> None:
        self.counts["frames"] += 1
        self.counts["sound"] += 1
        self.rig.back.on_message(route, wire.decode(frames, m.FROM_WORKER), self.rig.now())

    def run(self, frames: int) -> None:
        """Hand over so many frames, then see that the machine still serves."""
        while self.counts["frames"] < frames:
            self.step()
        self._serves()

    def _serves(self) -> None:
        rig = self.rig
        for route in PRODUCERS:
            rig.say(route, m.Bye())
        rig.wait(100.0, beats=False)
        rig.back.lose("exited", rig.now())
        rig.heard.clear()
        rig.worker_heard.clear()
        rig.ready()
        rig.finish_all()
        rig.submit(4000, b"new")
        rig.chunk(1, 2)
        rig.final()
        assert isinstance(rig.last_word(4000, b"new"), m.Done)


def test_twenty_thousand_wounded_frames_raise_nothing():
    fuzz = Fuzz(seed=1)
    fuzz.run(20_000)
    # The machine must be reached, not the decoder alone.
    assert fuzz.counts["sound"] > 4_000
    assert fuzz.counts["refused"] > 6_000
    counters = fuzz.rig.machine.jobs.counters
    assert counters["worker_broken"] > 10
    assert counters["jobs_buried"] > 2
    assert fuzz.rig.gate.returned_total > 0, "no KICK found a buried job"
    assert CORPUS_BYTES < 1_000_000


@pytest.mark.prove
def test_a_million_wounded_frames_raise_nothing():
    began = time.monotonic()
    fuzz = Fuzz(seed=2)
    fuzz.run(1_000_000)
    counts = fuzz.counts
    figures = [
        Figure("frames through decoder and machine", counts["frames"], "frames", 1_000_000, "higher"),
        Figure("refused by the decoder", counts["refused"], "frames", None, "higher"),
        Figure("sound, and handed to the machine", counts["sound"], "frames", None, "higher"),
        Figure("seed corpus", CORPUS_BYTES, "bytes", 1_000_000, "lower"),
        Figure("rate", round(counts["frames"] / (time.monotonic() - began)), "frames/s", None, "higher"),
    ]
    write("fuzz_machine", figures, "python -m pytest -m prove tests/queueing/test_fuzz_machine.py")
