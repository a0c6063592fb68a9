"""Test doubles: a clock moved by hand, and a worker that speaks MTX/1 and follows a script.

    with ScriptedWorker("ipc:///tmp/x/back.sock", Script(tokens=200, token_s=0.02)) as worker:
        ...
        worker.wait_for("final")

or as a process of its own, which writes its log as JSON lines:

    python -m mtplx.testing --back ipc:///tmp/x/back.sock --tokens 200 --token-s 0.02 --log worker.jsonl

A job may carry a script of its own in `metadata["script"]`, a JSON object with fields of `Script`
(`{"tokens": 5, "fault": "abort", "fault_after": 3}`), so that one worker serves good and bad jobs.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

from mtplx.errors import Exit
from mtplx.process import host_id, look
from mtplx.script import Fault, Persona, Script, answer_of
from mtplx.scripted_worker import Event, ScriptedWorker
from mtplx.trajectory import trajectory_sha256

__all__ = [
    "Event",
    "Fault",
    "ManualClock",
    "Persona",
    "Script",
    "ScriptedWorker",
    "answer_of",
    "trajectory_sha256",
]


class ManualClock:
    """Monotonic seconds and wall nanoseconds that move only when told.

    `clock.monotonic` and `clock.time_ns` stand in for the functions of `time` with these names.
    """

    def __init__(self, seconds: float = 0.0, wall_ns: int = 1_700_000_000_000_000_000) -> None:
        self.seconds = seconds
        self.wall_ns = wall_ns

    def monotonic(self) -> float:
        """Seconds since an arbitrary start."""
        return self.seconds

    def time_ns(self) -> int:
        """Nanoseconds since the epoch."""
        return self.wall_ns

    def advance(self, seconds: float) -> float:
        """Move both clocks on and return the monotonic one; a clock never goes back."""
        if seconds < 0:
            raise ValueError(f"A clock does not go back ({seconds} s).")
        self.seconds += seconds
        self.wall_ns += round(seconds * 1e9)
        return self.seconds


@click.command()
@click.option("--back", required=True, help="The broker's endpoint for workers.")
@click.option("--tokens", type=int, help="Tokens per answer; without it the prompt's words come back.")
@click.option("--token-s", type=float, default=0.0, help="Seconds per token.")
@click.option("--per-chunk", type=int, default=1, help="Tokens per chunk.")
@click.option("--prefill-steps", type=int, default=0)
@click.option("--prefill-step-s", type=float, default=0.0, help="Seconds per prefill step.")
@click.option("--finish-reason")
@click.option("--fault", type=click.Choice([one.value for one in Fault]), default="none")
@click.option("--fault-after", type=int, default=0, help="Tokens before the fault; -1 is before prefill.")
@click.option("--fault-attempts", type=int, help="Attempts of a job with the fault; without it, each.")
@click.option("--seeded", is_flag=True, help="Tokens depend on the job's seed.")
@click.option("--fail-code", default="E_INTERNAL")
@click.option("--drain-s", type=float, default=0.0, help="Seconds a job may go on after SIGTERM.")
@click.option("--mode", default="hyper")
@click.option("--stage", default="h0")
@click.option("--model", default="scripted")
@click.option("--vocabulary", type=int, default=1000)
@click.option("--context", type=int, default=32768)
@click.option("--model-hash", default="scripted")
@click.option("--build-hash", default="scripted")
@click.option("--host", default=host_id, help="Where it says that it runs; here, without it.")
@click.option("--log", type=click.Path(path_type=Path), help="Append each event to this file as a JSON line.")
def main(back: str, log: Path | None, drain_s: float, **given: Any) -> None:
    """Run a ScriptedWorker until SIGTERM, SIGINT or a refusal (exit code 5)."""
    about = {item.name for item in dataclasses.fields(Persona)}
    me = look(os.getpid())
    persona = Persona(born=me.born if me else 0.0, **{key: value for key, value in given.items() if key in about})
    given["fault"] = Fault(given["fault"])
    script = Script(**{key: value for key, value in given.items() if key not in about})
    worker = ScriptedWorker(back, script, persona=persona, log_file=log, own_process=True, drain_s=drain_s)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.stop())
    worker.serve()
    if worker.refused is not None:
        click.echo(f"{worker.refused.code}: {worker.refused.message}", err=True)
        sys.exit(Exit.WORKER_REFUSED)


if __name__ == "__main__":
    main()
