"""Is the worker alive? Judged by what it says and by what it gets done, never by its process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mtplx.messages import Ready


@dataclass(slots=True)
class LiveWorker:
    """The one worker. Times are monotonic seconds.

    generation counts accepted READYs, so that a job is checked once against each worker's limits.
    progress is the worker's own counter, which grows with every prefill chunk and token.
    leaving: it said BYE and gets no further job.
    width: rows of the running job's latest forward, as it told.
    prefix: what it counts of the reuse of prompts, for health; None where it reuses nothing.
    """

    route: bytes
    ready: Ready
    generation: int
    heard_at: float
    progress_at: float
    progress: int = 0
    phase: str = "idle"
    done: int = 0
    total: int = 0
    leaving: bool = False
    prefix: dict[str, Any] | None = None
    width: int = 1

    def heard(self, now: float, *, progressed: bool) -> None:
        """Note a message from the worker."""
        self.heard_at = now
        if progressed:
            self.progress_at = now


def verdict(worker: LiveWorker, now: float, *, busy: bool, dead_s: float, stall_s: float) -> str | None:
    """Why the worker must be given up: `silent` or `stalled`; None while it is well.

    An idle worker has nothing to progress with and can only fall silent.
    """
    if now - worker.heard_at > dead_s:
        return "silent"
    if busy and now - worker.progress_at > stall_s:
        return "stalled"
    return None


def next_check(worker: LiveWorker, *, busy: bool, dead_s: float, stall_s: float) -> float:
    """The earliest moment at which the verdict can change without a message."""
    silent = worker.heard_at + dead_s
    return min(silent, worker.progress_at + stall_s) if busy else silent
