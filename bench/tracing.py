"""What tracing costs a job's dispatch, and what a collector that is away costs the exit.

One broker with its worker for each state of the collector, and one without tracing; all live at once. Each round
asks each of them once, in a drawn order: what disturbs the machine disturbs all alike. Several sets of brokers
take turns: a process may have luck with its core for all its life. Of their exits, from SIGTERM to the end, the
longest counts. Dispatch: from SUBMIT to the worker's start. The collectors are processes of their own. Also
measured: bursts, in which the next job comes at once after the last word of the one before.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
import zmq
from report import ROOT, Figure, write
from service import Peer, Starts, percentile, programs, submit

from mtplx import messages as m
from mtplx import wire
from mtplx.settings import Settings

OFF, HEALTHY = "off", "healthy"
STATES = {HEALTHY: "take", "dead": "dead", "hanging": "hang", "slow": "slow", "503": "503", "reset": "reset"}
# Between two jobs of one broker there is what the others take; a producer that reads an answer takes longer.
SEED = 20


@dataclass(slots=True)
class Line:
    """A broker with its worker and its producer."""

    producer: Peer
    starts: Starts
    broker: subprocess.Popen[bytes]
    times: list[float] = field(default_factory=list)
    bursts: list[float] = field(default_factory=list)

    def dispatch(self) -> float:
        """Seconds from SUBMIT to the worker's start, once the job has ended."""
        message = submit(1)
        frames = wire.encode(message)
        began = time.monotonic()
        self.producer.socket.send_multipart(frames)
        self.producer.until(m.Done, m.Error)
        return self.starts.wait(message.id.hex()) - began

    def stop(self) -> float:
        """Seconds from SIGTERM to the end."""
        began = time.monotonic()
        self.broker.send_signal(signal.SIGTERM)
        if self.broker.wait(60) != 0:
            sys.exit("A broker did not end in order.")
        return time.monotonic() - began


@contextmanager
def collector(mode: str) -> Iterator[str]:
    """The address of a collector process."""
    command = [sys.executable, str(ROOT / "tests" / "whole" / "collector.py"), "--mode", mode]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


@contextmanager
def line(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> Iterator[Line]:
    """A line whose broker sends its spans to *endpoint*; none where that is empty."""
    run = Path(tempfile.mkdtemp(prefix="mxt", dir="/tmp"))
    reader, writer = os.pipe()
    worker = ["-m", "mtplx.testing", "--back", f"ipc://{run}/back.sock", "--log", f"/dev/fd/{writer}"]
    settings = Settings(run_dir=run, durability="none", otlp_endpoint=endpoint)
    try:
        with programs(settings, ["-m", "broker"], worker, keep=writer) as (broker, _):
            os.close(writer)
            starts = Starts(reader)
            starts.wait("accepted")
            yield Line(Peer(context, f"ipc://{run}/front.sock"), starts, broker)
    finally:
        shutil.rmtree(run, ignore_errors=True)


@click.command()
@click.option("--rounds", default=4000, help="Dispatches measured of each broker.")
@click.option("--burst", default=20, help="Jobs one after the other without a pause, in the second measurement.")
@click.option("--sets", default=5, help="Sets of fresh brokers that share the rounds: one process may be lucky.")
def main(rounds: int, burst: int, sets: int) -> None:
    """Measure, print, write `bench/results/tracing.json`."""
    order = random.Random(SEED)
    times: dict[str, list[float]] = {name: [] for name in (OFF, *STATES)}
    bursts: dict[str, list[float]] = {name: [] for name in times}
    exits: dict[str, list[float]] = {name: [] for name in times}
    for _ in range(sets):
        for name, (one, ended) in measured(rounds // sets, burst, order).items():
            times[name] += one.times
            bursts[name] += one.bursts
            exits[name].append(ended)
    found = figures(times, {name: max(some) for name, some in exits.items()})
    middles = {name: percentile(some, 50) for name, some in bursts.items()}
    found += [
        Figure(f"in bursts, collector {name} / off", middles[name] / middles[OFF], "x", None, "lower")
        for name in STATES
    ]
    write("tracing", found)


def measured(rounds: int, burst: int, order: random.Random) -> dict[str, tuple[Line, float]]:
    """One set of brokers, measured, and the seconds that the exit of each took."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with ExitStack() as stack:
        lines = {OFF: stack.enter_context(line(context, ""))}
        for name, mode in STATES.items():
            lines[name] = stack.enter_context(line(context, stack.enter_context(collector(mode))))
        for number in range(rounds + rounds // 10):
            for name in order.sample(list(lines), len(lines)):
                took = lines[name].dispatch()
                if number >= rounds // 10:  # the first tenth warms up
                    lines[name].times.append(took)
        for _ in range(rounds // burst):
            for name in order.sample(list(lines), len(lines)):
                lines[name].bursts += [lines[name].dispatch() for _ in range(burst)]
        stack.callback(context.destroy, linger=0)
        return {name: (one, one.stop()) for name, one in lines.items()}


def figures(times: dict[str, list[float]], exits: dict[str, float]) -> list[Figure]:
    """The table."""
    middles = {name: percentile(some, 50) for name, some in times.items()}
    found = [Figure("dispatch p50, tracing off", 1e6 * middles[OFF], "us", None, "lower")]
    for name in STATES:
        found += [
            Figure(f"dispatch p50, collector {name}", 1e6 * middles[name], "us", None, "lower"),
            Figure(f"dispatch p99, collector {name}", 1e6 * percentile(times[name], 99), "us", None, "lower"),
            Figure(f"dispatch p50, collector {name} / off", middles[name] / middles[OFF], "x", 1.1, "lower"),
            Figure(f"exit, collector {name}", exits[name], "s", exits[OFF] + 2.0, "lower"),
        ]
    traced = [middles[name] for name in STATES]
    found += [
        Figure("dispatch p50, slowest / quickest state", max(traced) / min(traced), "x", 1.05, "lower"),
        Figure("dispatch p50, states, spread", 1e6 * statistics.pstdev(traced), "us", None, "lower"),
        Figure("dispatch p99, tracing off", 1e6 * percentile(times[OFF], 99), "us", None, "lower"),
        Figure("exit, tracing off", exits[OFF], "s", None, "lower"),
    ]
    return found


if __name__ == "__main__":
    main()
