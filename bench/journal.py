"""What a promise that outlives the power costs: jobs taken a second, ours against beanstalkd and NATS JetStream.

All three are asked for the same: no ack before the job is flushed. beanstalkd runs with `-b -f0` on a unix socket,
pipelined puts; NATS with `sync_interval: always`, one work-queue stream in a file, `publish_async` of nats-py,
each PubAck awaited; ours with SUBMIT until ADMITTED. Same bytes, same file system, the same producers with the
same number of open submissions, in rounds that take turns; each load starts the program anew on an empty folder.
What was acked is counted again in the queue. JetStream's batches, one ack for many messages of one producer, are
another promise and not used. Without a flush (`os`, `none`, no log, sync every two minutes) tells how much of a
figure is program and driver.

Where strace is installed it is checked that each of the three flushes: with one submission open a flush must have
returned between each submission and its ack, else there is nothing to compare. It also stretches every flush, of
all three alike, by a millisecond: the disk of a virtual machine may answer from its host's memory, in a twentieth
of what a disk needs.

Dispatch: SUBMIT to the worker's start, against 2.5 bare echoes (as in `bench/broker.py`) and 1.2 flushes, a frame
of SQLite's log written and flushed. The three take turns, one by one: a disk that was flushed just now is quicker
than one at rest, as a broker's is.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import click
import zmq
from flushes import Flush, between, returned, strace, traced
from queue_nats import Nats
from queues import Beanstalkd, Load, Mtplx, Queue, served
from report import ROOT, Figure, write
from service import ECHO, Peer, Starts, latencies, programs

from mtplx.settings import Settings

SMALL, LARGE = 300, 4096
SLOWER_US = 1000
FULL = "mtplx full"


@dataclass
class Rates:
    """Of each queue and round: acks a second by size of the job, and seconds to the ack of a lone small job."""

    acks: dict[tuple[str, int], list[float]] = field(default_factory=partial(defaultdict, list))
    waits: dict[str, list[float]] = field(default_factory=partial(defaultdict, list))

    def rate(self, name: str, size: int) -> float:
        """The median of the rounds."""
        return statistics.median(self.acks[name, size])

    def ratio(self, peer: str, size: int) -> float:
        """The median of the rounds' own ratios of ours to *peer*."""
        both = zip(self.acks[FULL, size], self.acks[peer, size], strict=True)
        return statistics.median(ours / theirs for ours, theirs in both)


@contextmanager
def folder_on(place: Path) -> Iterator[Path]:
    """A folder in *place*, gone with the block."""
    with tempfile.TemporaryDirectory(prefix="mxj", dir=place, ignore_cleanup_errors=True) as path:
        yield Path(path)


def measure(queues: list[Queue], loads: list[Load], rounds: int, place: Path) -> Rates:
    """Put each of *loads* on each of *queues*, in turn, and in a turn of its own one producer with one job open.

    Its jobs are few: a queue that has just written much to the disk would wait for it longer.
    """
    lone = Load(1, 1, SMALL, loads[0].seconds / 2)
    rates = Rates()
    for _ in range(rounds):
        for load in loads:
            for queue in queues:
                with folder_on(place) as folder, served(queue, folder):
                    rates.acks[queue.name, load.size].append(queue.drive(folder, load).rate)
        for queue in queues:
            with folder_on(place) as folder, served(queue, folder):
                rates.waits[queue.name].append(statistics.median(queue.drive(folder, lone).waits))
    return rates


@dataclass(frozen=True, slots=True)
class Flushed:
    """What strace saw of one queue.

    alone: the share of acks behind a flush of their own, of a producer with one job open. group: acks for a flush
    under the whole load.
    """

    alone: float
    group: float


def flushed(queue: Queue, load: Load, program: str, place: Path) -> Flushed:
    """Watch the flushes of *queue*."""
    wall = time.time() - time.monotonic()
    with folder_on(place) as folder:
        trace = folder / "trace"
        with served(queue, folder, traced(program, trace)):
            lone = queue.drive(folder, Load(1, 1, SMALL, load.seconds / 2))
            full = queue.drive(folder, load)
            flushes = [at - wall for at in returned(trace)]
        own = [between(flushes, sent, read) > 0 for sent, read in lone.times]
        return Flushed(statistics.mean(own), len(full.times) / max(1, between(flushes, full.begins, full.until)))


def slowed(queues: list[Queue], load: Load, rounds: int, program: str, place: Path) -> Rates:
    """Acks a second where each flush takes SLOWER_US longer."""
    rates = Rates()
    for _ in range(rounds):
        for queue in queues:
            with folder_on(place) as folder:
                before = traced(program, folder / "trace", slower_us=SLOWER_US)
                with served(queue, folder, before):
                    rates.acks[queue.name, load.size].append(queue.drive(folder, load).rate)
    return rates


@dataclass
class Dispatch:
    """Medians in seconds: dispatch with the journal flushed, a bare echo, a flush."""

    full: float
    echo: float
    flush: float

    @property
    def ratio(self) -> float:
        """Dispatch against what it may take."""
        return self.full / (2.5 * self.echo + 1.2 * self.flush)


def dispatches(turns: int, place: Path) -> Dispatch:
    """One dispatch, one bare echo and one flush in turn."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    reader, writer = os.pipe()
    times: tuple[list[float], list[float], list[float]] = ([], [], [])
    with folder_on(place) as run:
        worker = ["-m", "mtplx.testing", "--back", f"ipc://{run}/back.sock", "--log", f"/dev/fd/{writer}"]
        echo_at = f"ipc://{run}/echo.sock"
        flush = Flush(run)
        settings = Settings(run_dir=run, state_dir=run / "state", durability="full")
        try:
            with programs(settings, ["-m", "broker"], worker, ["-c", ECHO, echo_at], keep=writer):
                os.close(writer)
                starts = Starts(reader)
                starts.wait("accepted")
                producer, echo = Peer(context, f"ipc://{run}/front.sock"), Peer(context, echo_at)
                for _ in range(turns):
                    dispatch, bare = latencies(producer, echo, starts, 1)
                    times[0].extend(dispatch)
                    times[1].extend(bare)
                    times[2].append(flush())
        finally:
            context.destroy(linger=0)
            flush.close()
    return Dispatch(*(statistics.median(one) for one in times))


def rate_figures(rates: Rates, queues: list[Queue]) -> list[Figure]:
    """The goals, and what they are made of."""
    peers = [queue.name for queue in queues if queue.name.endswith(("-f0", "always"))]
    figures = [
        Figure(f"{FULL} / {peer}, {size} B", rates.ratio(peer, size), "x", 1.0, "higher")
        for peer in peers
        for size in (SMALL, LARGE)
    ]
    for size in (SMALL, LARGE):
        figures += [
            Figure(f"{queue.name}, {size} B", rates.rate(queue.name, size), "1/s", None, "higher")
            for queue in queues
        ]
    for name, waits in rates.waits.items():
        lone = 1e6 * statistics.median(waits)
        figures.append(Figure(f"{name}, ack of a lone job, p50", lone, "us", None, "lower"))
    return figures


def strace_figures(queues: list[Queue], load: Load, rounds: int, place: Path) -> list[Figure]:
    """Whether all flush, and their rates with a slower flush; nothing where there is no strace."""
    program = strace()
    if program is None:
        print("strace is not installed: that the peers flush is not checked, nor measured with a slower flush.")
        return []
    figures = []
    for queue in queues:
        seen = flushed(queue, load, program, place)
        if seen.alone < 1:
            sys.exit(
                f"{queue.name} sent {1 - seen.alone:.2%} of its acks without a flush: nothing can be compared."
            )
        figures += [
            Figure(f"{queue.name}, acks of a lone job behind a flush", 100 * seen.alone, "%", 100, "higher"),
            Figure(f"{queue.name}, acks a flush under load", seen.group, "", None, "higher"),
        ]
    slow = slowed(queues, load, rounds, program, place)
    what = f"each flush {SLOWER_US / 1000:g} ms longer"
    for queue in queues:
        rate = slow.rate(queue.name, load.size)
        figures.append(Figure(f"{queue.name}, {load.size} B, {what}", rate, "1/s", None, "higher"))
        if queue.name != FULL:
            ratio = slow.ratio(queue.name, load.size)
            figures.append(Figure(f"{FULL} / {queue.name}, {load.size} B, {what}", ratio, "x", 1.0, "higher"))
    return figures


def found(program: str, way: str) -> str:
    """The path of *program*; ends this process with *way*, which is how to get it, where it is not installed."""
    beside = Path(sys.executable).with_name(program)
    path = str(beside) if beside.exists() else shutil.which(program)
    if path is None:
        sys.exit(f"{program} is not installed: {way}.")
    return path


@click.command()
@click.option("--rounds", default=5, help="Rounds in which the queues take turns.")
@click.option("--seconds", default=2.0, help="Length of one load.")
@click.option("--producers", default=8, help="Connections.")
@click.option("--open", "open_jobs", default=32, help="Submissions that each keeps open.")
@click.option("--turns", default=1000, help="Turns of one dispatch, one echo and one flush.")
@click.option(
    "--place",
    default=ROOT,
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    help="A folder on the file system to be measured.",
)
def main(*, rounds: int, seconds: float, producers: int, open_jobs: int, turns: int, place: Path) -> None:
    """Measure, print, write `bench/results/journal.json`."""
    beanstalkd = found("beanstalkd", "run scripts/peers")
    nats = found("nats-server", "pip install -e '.[bench]'")
    small, large = (Load(producers, open_jobs, size, seconds) for size in (SMALL, LARGE))
    flushing: list[Queue] = [Mtplx("full"), Beanstalkd(beanstalkd), Nats(nats)]
    others: list[Queue] = [
        Mtplx("os"), Mtplx("none"), Beanstalkd(beanstalkd, flushed=False), Nats(nats, flushed=False),
    ]  # fmt: skip
    rates = measure([*flushing, *others], [small, large], rounds, place)
    dispatch = dispatches(turns, place)
    figures = [
        *rate_figures(rates, [*flushing, *others]),
        Figure("dispatch p50 / (2.5 echoes + 1.2 flushes)", dispatch.ratio, "x", 1.0, "lower"),
        Figure("dispatch p50", 1e6 * dispatch.full, "us", None, "lower"),
        Figure("bare echo p50", 1e6 * dispatch.echo, "us", None, "lower"),
        Figure("a frame written and flushed, p50", 1e6 * dispatch.flush, "us", None, "lower"),
        *strace_figures(flushing, small, min(3, rounds), place),
    ]
    write("journal", figures)


if __name__ == "__main__":
    main()
