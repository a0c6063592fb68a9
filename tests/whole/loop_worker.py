"""The real worker's loop and pulse, as a program, with a runner that needs no model.

Each job's metadata may hold a `script`: `token_s`, `prefill_steps`, and `fault`, one of `boom` (the runner raises),
`hang` (native code that never returns), `hold` (the same, and no other thread runs either), `abort` (the process
ends in native code) and `leave` (an error that no guard of a job catches).
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import click
import zmq

from mtplx.cli.options import settings_options
from mtplx.cli.program import run_program
from mtplx.settings import Settings
from mtplx.trajectory import trajectory_sha256
from worker import loop, pulse, watchdog
from worker.attempt import Attempt, Chunk, Final, Progress


class OutsideError(BaseException):
    """Passes the guard of a job, as a fault in the loop itself does."""


def run(attempt: Attempt, *, cancelled: Callable[[], bool], progress: Progress) -> Iterator[Chunk | Final]:
    """Draws 0, 1, 2 ... until the budget ends, behind what earlier attempts drew."""
    job = attempt.job
    script = {"token_s": 0.01, "prefill_steps": 0, "fault": "", **json.loads(job.metadata.get("script", "{}"))}
    ids = list(attempt.drawn)
    reason = "length"
    for step in range(script["prefill_steps"] + job.max_tokens - len(ids)):
        if cancelled():
            reason = "cancelled"
            break
        time.sleep(script["token_s"])
        if step < script["prefill_steps"]:
            progress("prefill", step, script["prefill_steps"])
            continue
        if len(ids) == 3:
            fail(script["fault"])
        ids.append(len(ids) % 1000)
        progress("decode", len(ids), job.max_tokens)
        yield Chunk(len(ids) - 1, (ids[-1],), f"{ids[-1]} ")
    yield Final(
        finish_reason=reason,
        prompt_tokens=1,
        cached_tokens=0,
        completion_tokens=len(ids),
        max_tokens_used=job.max_tokens,
        prefill_s=0.0,
        first_token_s=0.0,
        decode_s=0.0,
        sha256=trajectory_sha256(ids),
        route="serial_b1",
        row_invariant=False,
    )


def fail(fault: str) -> None:
    if fault == "boom":
        raise RuntimeError("boom")
    if fault == "leave":
        raise OutsideError
    if fault == "abort":
        ctypes.CDLL(None).abort()
    if fault in ("hang", "hold"):
        # Locked twice by one thread: no signal ends this wait, and Python never runs again on this thread. A call by
        # PyDLL keeps all other threads waiting, too.
        libc, mutex = (ctypes.PyDLL if fault == "hold" else ctypes.CDLL)(None), ctypes.create_string_buffer(256)
        libc.pthread_mutex_init(mutex, None)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)


def spoil(fault: str) -> None:
    """Put a fault into the pulse."""
    beat, count = pulse.Pulse._beat, iter(range(1000))

    def spoiled(self: pulse.Pulse, socket: zmq.Socket[bytes]) -> None:
        if next(count) < 3:
            beat(self, socket)
        elif fault == "pulse":
            raise ValueError("the pulse has a fault")

    class Full:
        """A socket whose pipe fills up between the look and the send."""

        def __init__(self, socket: zmq.Socket[bytes]) -> None:
            self._socket = socket

        def __getattr__(self, name: str) -> Any:
            return getattr(self._socket, name)

        def send_multipart(self, frames: list[bytes], flags: int = 0) -> None:
            if next(count) % 2:
                raise zmq.Again
            self._socket.send_multipart(frames, flags)

    def full(self: pulse.Pulse, socket: zmq.Socket[bytes]) -> None:
        beat(self, Full(socket))

    pulse.Pulse._beat = full if fault == "again" else spoiled


def serve(settings: Settings, *, fault: str, grace_s: float, host: str) -> None:
    pulse.HANG_GRACE_S = watchdog.STALL_GRACE_S = grace_s
    if host:
        loop.host_id = lambda: host
    if fault:
        spoil(fault)
    offer = loop.Offer(
        mode=str(settings.scheduler_mode), stage="h0", model="loop", vocabulary=1000, context=32768, info={}
    )
    jobs = count()
    worker = loop.Worker(settings, offer, run, counts=lambda: {"opened": next(jobs)})
    try:
        worker.serve()
    finally:
        worker.close()


@click.command()
@click.option("--fault", default="")
@click.option("--grace-s", default=5.0)
@click.option("--host", default="", help="Where it says that it runs.")
@settings_options
def main(fault: str, grace_s: float, host: str, **flags: Any) -> None:
    run_program("loop-worker", partial(serve, fault=fault, grace_s=grace_s, host=host), flags)


if __name__ == "__main__":
    main()
