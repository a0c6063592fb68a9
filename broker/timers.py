"""Time limits of jobs, the nearest first."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import count
from typing import Final

from broker.moves import Phase
from broker.record import Record

# Below this many there is nothing to sweep.
FEW: Final = 64


class Timers:
    """A heap of (time, kind, record). Timers of ended jobs are swept out: their deadlines may be years away."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str, Record]] = []
        self._numbers = count()
        self._sweep_at = FEW

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, at: float, kind: str, record: Record) -> None:
        """Ring at monotonic time *at*."""
        if len(self._heap) >= self._sweep_at:
            self._heap = [timer for timer in self._heap if timer[3].phase is not Phase.ENDED]
            heapq.heapify(self._heap)
            self._sweep_at = max(FEW, 2 * len(self._heap))
        heapq.heappush(self._heap, (at, next(self._numbers), kind, record))

    def next(self) -> float:
        """When the nearest one rings."""
        return self._heap[0][0] if self._heap else math.inf

    def due(self, now: float) -> Iterator[tuple[str, Record]]:
        """Take out those whose time has come, except those of ended jobs."""
        while self._heap and self._heap[0][0] <= now:
            _, _, kind, record = heapq.heappop(self._heap)
            if record.phase is not Phase.ENDED:
                yield kind, record
