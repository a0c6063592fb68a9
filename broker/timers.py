"""Time limits of jobs, the nearest first."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Final

from broker.record import Now, Record

# Below this many there is nothing to sweep.
FEW: Final = 64
# The wall clock jumped where it moved so much against the monotonic one: the machine slept, or the clock was set.
JUMP_S: Final = 1.0
# Two clocks never agree to the last digit; what is due within this is due.
NEAR_NS: Final = 10**6


class Timers:
    """A heap of (time, kind, record). Timers of ended jobs are swept out: their deadlines may be years away."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str, Record]] = []
        self._numbers = count()
        self._sweep_at = FEW
        self._wall_ahead_s: float | None = None

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, at: float, kind: str, record: Record) -> None:
        """Ring at monotonic time *at*."""
        if len(self._heap) >= self._sweep_at:
            self._heap = [timer for timer in self._heap if not timer[3].over]
            heapq.heapify(self._heap)
            self._sweep_at = max(FEW, 2 * len(self._heap))
        heapq.heappush(self._heap, (at, next(self._numbers), kind, record))

    def set_limits(self, record: Record, now: Now) -> None:
        """Ring at the job's own limits, which are wall times."""
        for kind, at_ns in _limits(record).items():
            if at_ns is not None:
                self.set(now.mono_of(at_ns), kind, record)

    def heed_clock(self, records: Iterable[Record], now: Now) -> None:
        """Set the limits of all *records* anew where the wall clock jumped since the last call."""
        ahead_s = now.wall_ns / 1e9 - now.mono
        if self._wall_ahead_s is not None and abs(ahead_s - self._wall_ahead_s) < JUMP_S:
            return
        jumped, self._wall_ahead_s = self._wall_ahead_s is not None, ahead_s
        for record in records if jumped else ():
            if not record.over:
                self.set_limits(record, now)

    def await_return(self, record: Record, now: Now, after_s: float) -> None:
        """Ring where the producer of *record* is not back after *after_s*."""
        record.orphan_until = now.mono + after_s
        self.set(record.orphan_until, "orphan", record)

    def next(self) -> float:
        """When the nearest one rings."""
        return self._heap[0][0] if self._heap else math.inf

    def due(self, now: Now) -> Iterator[tuple[str, Record]]:
        """Take out those whose time has come, except those of ended jobs and of limits that no longer count."""
        while self._heap and self._heap[0][0] <= now.mono:
            _, _, kind, record = heapq.heappop(self._heap)
            at_ns = _limits(record).get(kind, now.wall_ns)
            if record.over or at_ns is None:
                continue
            if at_ns - now.wall_ns > NEAR_NS:
                # The clock was set back.
                self.set(now.mono_of(at_ns), kind, record)
                continue
            yield kind, record


def _limits(record: Record) -> dict[str, int | None]:
    return {"ttl": record.ttl_ns, "deadline": record.deadline_ns}
