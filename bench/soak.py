"""Minutes in bad company: 40 producers that cancel, vanish, come back; garbage, a slow reader, a dead collector.

A quiet run of the same producers without any of it comes first. Dispatch is the time from the moment in which a
job was submitted and the worker free to the worker's start. Memory is the broker's, its slope a line through the
last three quarters of the run, when answers are forgotten as fast as they come; through the least of each minute,
for what a burst takes and gives back is no growth, and moves a line through all of it by hundreds of KiB a minute.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import click
import zmq
from report import ROOT, Figure, write

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from whole.collector import Collector  # noqa: E402 - the folders come first
from whole.fuzz import wounded  # noqa: E402
from whole.harness import Producer, Service, Worker, environment, rss_kib, service  # noqa: E402
from whole.history import History, Line, check  # noqa: E402
from whole.people import RawProducer, scripted  # noqa: E402
from whole.plan import Ask, Person  # noqa: E402
from whole.rounds import VOCABULARY, scripted_answer  # noqa: E402

from mtplx import messages as m  # noqa: E402
from mtplx import wire  # noqa: E402

PRODUCERS = 40
TURN_MS = 2
SAMPLE_S = 2.0
# Answers are kept up to so many bytes, reached within the first minute: by time, what is kept would follow the
# speed of the machine, and memory with it.
RETAIN_S, RETAIN_BYTES = 60, 6 * 1024**2
GARBAGE_S, OVERSIZE_S = 0.01, 3.0
LONG_TOKENS, SLOW_S, SLOW_FOR_S, SILENCE_S = 5000, 0.5, 20.0, 3.0
# Longer than any job of the line takes, with the slow reader's in between.
REST_S = 60.0


@dataclass
class Crowd:
    """Producers without end: one that is done is checked, and the next one takes its place."""

    running: Service
    draw: random.Random
    wild: bool
    faults: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    asked: dict[str, float] = field(default_factory=dict)
    people: list[tuple[RawProducer, list[Line]]] = field(default_factory=list)

    def fill(self) -> None:
        """Let newcomers in."""
        while len(self.people) < PRODUCERS:
            lines: list[Line] = []
            self.counts["producers"] += 1
            name, service_of = f"p{self.counts['producers']}", (self.running.context, self.running.front)
            self.people.append((RawProducer(name, self._person(), service_of, lines.append, scripted), lines))

    def turn(self) -> None:
        """Move everybody on."""
        for one, _ in self.people:
            one.turn()
        for one, lines in [pair for pair in self.people if pair[0].over]:
            self.people.remove((one, lines))
            one.close()
            self._settle(one, lines)

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Where something may come."""
        return [one.link.socket for one, _ in self.people if one.link is not None]

    def _person(self) -> Person:
        draw, wild = self.draw, self.wild
        asks = tuple(
            Ask(
                job=draw.randbytes(16),
                after_s=draw.uniform(0.0, 0.5),
                tokens=draw.randint(1, 40),
                token_s=0.001,
                seed=draw.getrandbits(64),
                cancel_after=draw.randint(0, 20) if wild and draw.random() < 0.2 else None,
                credit=draw.choice((None, None, 4)),
            )
            for _ in range(draw.randint(1, 3))
        )
        away = ((draw.randint(0, 30), draw.uniform(0.0, 1.5)),) if wild and draw.random() < 0.3 else ()
        leaves = draw.randint(0, 30) if wild and draw.random() < 0.1 else None
        return Person(asks=asks, away=away, leaves_after=leaves, manners=draw.random() < 0.5)

    def _settle(self, one: RawProducer, lines: list[Line]) -> None:
        answers = {ask.job.hex(): scripted_answer(ask) for ask in one.person.asks}
        verdict = check(History(lines, (), answers.get))
        for name, sentences in verdict.faults.items():
            self.faults[name] += len(sentences)
            click.echo(f"{name}: {sentences[:3]}", err=True)
        self.counts.update(verdict.counts)
        self.counts["chunks"] += sum(1 for line in lines if line.what == "came")
        self.counts["left"] += sum(1 for line in lines if line.what == "left")
        for line in lines:
            if line.what == "asked":
                self.asked.setdefault(line.job, line.at)


class SlowReader:
    """Asks for a long answer, reads a message of it now and then, in the end the rest, and begins again.

    Its pipe is small, so that the broker keeps the answer. A connection that reads too slowly for the beats of
    libzmq ends: it takes its stream up on the next one.
    """

    def __init__(self, running: Service, draw: random.Random) -> None:
        self._running, self._draw = running, draw
        self.faults: Counter[str] = Counter()
        self.answers = self.resumed = 0
        self._begin()

    def _begin(self) -> None:
        self._seq = self._tokens = self._connections = 0
        self._ask = Ask(
            job=self._draw.randbytes(16), after_s=0.0, tokens=LONG_TOKENS, token_s=0.0, seed=self.answers
        )
        self._lines: list[Line] = []
        self._connect()
        self._note("asked")
        job = {**scripted(self._ask), "max_tokens": LONG_TOKENS}
        self._producer.say(m.Submit(self._ask.job, wire.pack_body(job)))
        self._began = self._read_at = time.monotonic()

    def turn(self) -> None:
        """Read one message when it is time, all of them when there was enough slowness."""
        now = time.monotonic()
        while (now >= self._read_at or now > self._began + SLOW_FOR_S) and self._producer.socket.poll(0):
            self._read_at = self._heard_at = now
            self._read_at += SLOW_S
            if self._heard(self._producer.hear(0)):
                self._settle()
                return
        if now > self._heard_at + SILENCE_S:
            self.close()
            self._connect()
            self.resumed += 1
            self._note("resumed", seq=self._seq, first=self._tokens)
            self._producer.say(m.Resume(self._ask.job, self._seq, self._tokens))

    def close(self) -> None:
        """Let the connection go."""
        self._producer.socket.close()

    def _connect(self) -> None:
        self._producer = self._running.producer(RCVHWM=1, RCVBUF=4096)
        self._connections += 1
        self._heard_at = time.monotonic()

    def _note(self, what: str, **more: Any) -> None:
        by = str(self._connections)
        self._lines.append(Line(at=time.monotonic(), what=what, job=self._ask.job.hex(), by=by, **more))

    def _heard(self, message: m.Message) -> bool:
        match message:
            case m.Admitted():
                self._note("took", number=message.admit_seq)
            case m.Chunk():
                self._note("came", seq=message.seq, first=message.first, ids=message.ids, text=message.text)
                self._seq, self._tokens = message.seq + 1, message.first + message.n
            case m.Done():
                end = {"code": message.outcome, "seq": message.seq, "text": message.text, "sha": message.sha256}
                self._note("word", **end)
            case m.Error():
                self._note("word", code=message.code, text=message.message)
        return isinstance(message, m.Done | m.Error)

    def _settle(self) -> None:
        self.close()
        answer = scripted_answer(self._ask, LONG_TOKENS)
        for name, sentences in check(History(self._lines, (), lambda _: answer)).faults.items():
            self.faults[name] += len(sentences)
            click.echo(f"slow reader, {name}: {sentences[:3]}", err=True)
        self.answers += 1
        self._begin()


@dataclass
class Seen:
    """What one run has shown. memory: moments and KiB. journal: bytes in the end and at most."""

    crowd: Crowd
    dispatch: list[float]
    memory: list[tuple[float, int]]
    journal: tuple[int, int]
    counters: dict[str, int]
    slow: SlowReader | None


def run(seconds: float, seed: int, *, wild: bool) -> Seen:
    """One run: quiet, or in bad company."""
    draw = random.Random(seed)
    flags = ["--retain-s", str(RETAIN_S), "--retain-bytes", str(RETAIN_BYTES)]
    flags += ["--orphan-s", "3", "--beat-s", "0.5", "--dead-s", "5"]
    with (
        Collector("hang") as collector,
        service(*flags, *(["--otlp-endpoint", collector.url] if wild else [])) as up,
    ):
        worker = up.worker("--vocabulary", str(VOCABULARY))
        crowd = Crowd(up, draw, wild)
        slow = SlowReader(up, draw) if wild else None
        attacker = _attacker(up.front, seconds, seed) if wild else None
        memory, journal = _serve(up, crowd, slow, time.monotonic() + seconds)
        if attacker is not None:
            out, _ = attacker.communicate(timeout=REST_S)
            crowd.counts["garbage"], crowd.counts["oversize"] = map(int, out.split())
        if slow is not None:
            slow.close()
        with up.producer() as asker:
            counters = asker.health()["counters"]
        return Seen(crowd, dispatches(worker, crowd.asked), memory, journal, counters, slow)


def _serve(
    up: Service, crowd: Crowd, slow: SlowReader | None, ends: float
) -> tuple[list[tuple[float, int]], tuple[int, int]]:
    memory: list[tuple[float, int]] = []
    sample_at, most = 0.0, 0
    while crowd.people or time.monotonic() < ends:
        now = time.monotonic()
        if now < ends:
            crowd.fill()
            if now >= sample_at:
                sample_at = now + SAMPLE_S
                memory.append((now, rss_kib(up.broker.pid)))
                most = max(most, _journal_bytes(up))
        elif now > ends + REST_S:
            crowd.faults["lost"] += len(crowd.people)
            click.echo(f"{len(crowd.people)} producers still wait a minute after the end", err=True)
            break
        poller = zmq.Poller()
        for socket in crowd.sockets():
            poller.register(socket, zmq.POLLIN)
        poller.poll(TURN_MS)
        crowd.turn()
        if slow is not None:
            slow.turn()
    return memory, (_journal_bytes(up), most)


def _journal_bytes(up: Service) -> int:
    return sum(path.stat().st_size for path in (up.run / "state").glob("journal*"))


def dispatches(worker: Worker, asked: dict[str, float]) -> list[float]:
    """Seconds from when a job was there and the worker free to its start."""
    found, free = [], 0.0
    for event in worker.log:
        if event.event == "run" and event.id in asked:
            found.append(event.at - max(free, asked[event.id]))
        elif event.event in ("final", "fail", "drop"):
            free = event.at
    return found


def _attacker(front: str, seconds: float, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--attack", front, "--minutes", str(seconds / 60), "--seed", str(seed)]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)


def attack(front: str, seconds: float, seed: int) -> None:
    """Send wounded frames, and now and then one that is too large; print how many of each."""
    draw, context = random.Random(seed), zmq.Context()
    sent = large = 0
    ends, large_at = time.monotonic() + seconds, 0.0
    with Producer(context, front) as garbage:
        while time.monotonic() < ends:
            garbage.socket.send_multipart(wounded(draw))
            sent += 1
            while garbage.socket.poll(0):
                garbage.socket.recv_multipart()
            if time.monotonic() >= large_at:
                large_at, large = time.monotonic() + OVERSIZE_S, large + 1
                with Producer(context, front) as oversize:
                    oversize.socket.send_multipart([*wire.encode(m.Bye())[:2], bytes(wire.MAX_FRAME_BYTES + 1)])
                    oversize.socket.poll(100)
            time.sleep(GARBAGE_S)
    context.destroy(linger=0)
    click.echo(f"{sent} {large}")


def percentile(values: list[float], percent: int) -> float:
    """Nearest rank."""
    return sorted(values)[-(-len(values) * percent // 100) - 1]


def in_quarters(memory: list[tuple[float, int]]) -> list[list[tuple[float, int]]]:
    """The samples of each quarter."""
    cuts = [len(memory) * number // 4 for number in range(5)]
    return [memory[begin:end] for begin, end in pairwise(cuts)]


def least_a_minute(memory: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """The smallest sample of each minute."""
    begun = memory[0][0]
    minutes = groupby(memory, lambda sample: (sample[0] - begun) // 60)
    return [min(samples, key=lambda sample: sample[1]) for _, samples in minutes]


def slope(memory: list[tuple[float, int]]) -> float:
    """KiB a minute, over the last three quarters."""
    late = memory[len(memory) // 4 :]
    return 60 * statistics.linear_regression([at for at, _ in late], [size for _, size in late]).slope


def slopes(memory: list[tuple[float, int]]) -> list[Figure]:
    """Of all samples, and of the least of each minute where there are minutes for a line."""
    found, least = [slope(memory)], least_a_minute(memory)
    if len(least) > 3:
        found.append(slope(least))
    names = ("slope of the broker's memory, all samples", "slope of the broker's memory, least of each minute")
    return [
        Figure(name, value, "KiB/min", goal, "lower")
        for name, value, goal in zip(names, found, (None, 100), strict=False)
    ]


def figures_of(quiet: Seen, wild: Seen) -> list[Figure]:
    """The figures of both runs."""
    faults = wild.crowd.faults + quiet.crowd.faults + (wild.slow.faults if wild.slow else Counter())
    counts = wild.crowd.counts
    quarters = [statistics.median(size / 1024 for _, size in part) for part in in_quarters(wild.memory)]
    ratio = percentile(wild.dispatch, 99) / percentile(quiet.dispatch, 99)
    streams = ("gaps", "wrong")
    told = ("producers", "jobs", "chunks", "cancelled", "resumed", "left", "garbage", "oversize")
    return [
        Figure("chunks lost, repeated or wrong", sum(faults[name] for name in streams), "", 0, "lower"),
        Figure("jobs lost", faults["lost"], "", 0, "lower"),
        Figure(
            "other broken promises",
            faults.total() - faults["lost"] - sum(faults[n] for n in streams),
            "",
            0,
            "lower",
        ),
        Figure("dispatch p99 / quiet dispatch p99", ratio, "x", 3.0, "lower"),
        Figure("dispatch p50", 1e6 * percentile(wild.dispatch, 50), "us", None, "lower"),
        Figure("dispatch p99", 1e6 * percentile(wild.dispatch, 99), "us", None, "lower"),
        Figure("quiet dispatch p50", 1e6 * percentile(quiet.dispatch, 50), "us", None, "lower"),
        Figure("quiet dispatch p99", 1e6 * percentile(quiet.dispatch, 99), "us", None, "lower"),
        *slopes(wild.memory),
        *(
            Figure(f"broker's memory, quarter {number} of the run", size, "MiB", None, "lower")
            for number, size in enumerate(quarters, 1)
        ),
        Figure("journal in the end", wild.journal[0] / 1024, "KiB", None, "lower"),
        Figure("journal at most", wild.journal[1] / 1024, "KiB", None, "lower"),
        Figure("faults inside the broker", wild.counters.get("internal_errors", 0), "", 0, "lower"),
        Figure("answers of the slow reader, whole", wild.slow.answers if wild.slow else 0, "", 1, "higher"),
        *(Figure(name, counts[name], "", None, "higher") for name in told),
        Figure("bad frames answered", wild.counters.get("bad_frames", 0), "", None, "higher"),
    ]


@click.command()
@click.option("--minutes", default=10.0, show_default=True, help="Length of the run in bad company.")
@click.option("--quiet-minutes", default=1.0, show_default=True, help="Length of the quiet run.")
@click.option("--seed", default=7, show_default=True)
@click.option("--attack", "front", hidden=True, help="Be the attacker of this endpoint.")
def main(minutes: float, quiet_minutes: float, seed: int, front: str | None) -> None:
    """Measure, print, write `bench/results/soak.json`."""
    if front is not None:
        attack(front, 60 * minutes, seed)
        return
    figures = figures_of(run(60 * quiet_minutes, seed, wild=False), run(60 * minutes, seed, wild=True))
    write("soak", [Figure("length", minutes, "min", None, "higher"), *figures])
    sys.exit(1 if any(one.met == "no" for one in figures) else 0)


if __name__ == "__main__":
    main()
