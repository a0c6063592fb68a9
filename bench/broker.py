"""What the broker costs, against a bare ROUTER that sends the same frames back.

Dispatch: from a producer's SUBMIT to the worker's start, two hops through the broker. Bare: the same SUBMIT to the
ROUTER and back, also two hops. Both alternate in one run. Chunks: one job as fast as worker and broker can; bare:
the same chunks through the ROUTER and back. Memory: the broker's growth by 100,000 small waiting jobs. All of it
without a journal; `bench/journal.py` measures what that costs.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import zmq
from report import Figure, write
from service import ECHO, Peer, Starts, latencies, percentile, programs, submit

from mtplx import messages as m
from mtplx import wire
from mtplx.settings import Settings


def relay(producer: Peer, starts: Starts, tokens: int) -> tuple[float, int]:
    """Worker chunks a second through the broker, and how many chunks the producer got for them."""
    message = submit(tokens, {"tokens": tokens})
    producer.say(message)
    heard = []
    while True:
        frames = producer.hear()
        heard.append(frames)
        if frames[1] in (b"\x85", b"\x86"):
            break
    ended = time.monotonic()
    chunks = [wire.decode(one, m.TO_CLIENT) for one in heard if one[1] == b"\x84"]
    if sum(chunk.n for chunk in chunks if isinstance(chunk, m.Chunk)) != tokens:
        sys.exit("Chunks were lost.")
    return tokens / (ended - starts.wait(message.id.hex())), len(chunks)


def bare_relay(echo: Peer, count: int) -> float:
    """Chunks a second through the bare ROUTER, with a window of 500 under way."""
    frames = wire.encode(m.Chunk(b"j" * 16, 1, 1000, 1000, 1, (1000,), "1000 "))
    began = time.monotonic()
    sent = 0
    for got in range(count):
        while sent < count and sent - got < 500:
            echo.socket.send_multipart(frames)
            sent += 1
        echo.hear()
    return count / (time.monotonic() - began)


def rss_kib(pid: int) -> int:
    """Resident memory."""
    return int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(pid)]))


def cpu_s(pid: int) -> float:
    """Processor seconds a process has used; 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def waiting_memory(context: zmq.Context[zmq.Socket[bytes]], run: Path, jobs: int) -> tuple[float, float]:
    """KiB a small waiting job costs the broker, and admissions a second."""
    settings = Settings(run_dir=run, durability="none", queue_jobs=jobs, client_jobs=jobs, queue_bytes=2**40)
    with programs(settings, ["-m", "broker"]) as (broker,):
        peers = [Peer(context, f"ipc://{run}/front.sock") for _ in range(10)]
        for peer in peers:
            peer.say(m.Hello((1,)))
            peer.until(m.Welcome)
        before, began = rss_kib(broker.pid), time.monotonic()
        for _ in range(jobs // 1000):
            for peer in peers:
                for _ in range(100):
                    peer.say(submit(16))
            for peer in peers:
                for _ in range(100):
                    peer.until(m.Admitted)
        return (rss_kib(broker.pid) - before) / jobs, jobs / (time.monotonic() - began)


@click.command()
@click.option("--rounds", default=2000, help="Dispatches measured.")
@click.option("--tokens", default=50_000, help="Chunks relayed in one job.")
@click.option("--jobs", default=100_000, help="Jobs that wait.")
def main(rounds: int, tokens: int, jobs: int) -> None:
    """Measure, print, write `bench/results/broker.json`."""
    run = Path(tempfile.mkdtemp(prefix="mxb", dir="/tmp"))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    reader, writer = os.pipe()
    worker = ["-m", "mtplx.testing", "--back", f"ipc://{run}/back.sock", "--log", f"/dev/fd/{writer}"]
    echo_at = f"ipc://{run}/echo.sock"
    try:
        settings = Settings(run_dir=run, durability="none")
        with programs(settings, ["-m", "broker"], worker, ["-c", ECHO, echo_at], keep=writer) as (
            broker,
            *_,
        ):
            os.close(writer)
            starts = Starts(reader)
            starts.wait("accepted")
            producer, echo = Peer(context, f"ipc://{run}/front.sock"), Peer(context, echo_at)
            dispatch, bare = latencies(producer, echo, starts, rounds)
            rates, bare_rates, costs, delivered = [], [], [], 0
            for _ in range(5):
                before = cpu_s(broker.pid)
                rate, delivered = relay(producer, starts, tokens)
                costs.append((cpu_s(broker.pid) - before) / tokens)
                rates.append(rate)
                bare_rates.append(bare_relay(echo, tokens))
        size, admissions = waiting_memory(context, run, jobs)
    finally:
        context.destroy(linger=0)
        shutil.rmtree(run, ignore_errors=True)
    ratio = percentile(dispatch, 50) / percentile(bare, 50)
    figures = [
        Figure("dispatch p50 / bare echo p50", ratio, "x", 2.5, "lower"),
        Figure("dispatch p50", 1e6 * percentile(dispatch, 50), "us", None, "lower"),
        Figure("dispatch p99", 1e6 * percentile(dispatch, 99), "us", None, "lower"),
        Figure("bare echo p50", 1e6 * percentile(bare, 50), "us", None, "lower"),
        Figure("bare echo p99", 1e6 * percentile(bare, 99), "us", None, "lower"),
        Figure("worker chunks relayed", statistics.median(rates), "1/s", 20_000, "higher"),
        Figure("bare echo of chunks", statistics.median(bare_rates), "1/s", None, "higher"),
        Figure("worker chunks in a delivered one", tokens / delivered, "", None, "lower"),
        Figure("broker CPU for a chunk", 1e6 * statistics.median(costs), "us", None, "lower"),
        Figure("memory of a waiting job", size, "KiB", 2.0, "lower"),
        Figure("admissions", admissions, "1/s", None, "higher"),
    ]
    write("broker", figures)


if __name__ == "__main__":
    main()
