"""A room to run jobs on one model: no sockets, no broker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engines import PLENTY, build

from mtplx.job import Job
from worker.attempt import Attempt, Chunk, Final
from worker.engine.load import LoadedModel
from worker.job import run_job
from worker.width import WidthGate


@dataclass
class Room:
    """A model, its engine behind a gate, and a clock that moves one second each time it is read."""

    loaded: LoadedModel
    prefill_chunk: int = 512
    pages: int = PLENTY
    heard: list[tuple[str, int, int]] = field(default_factory=list)
    cancelled: Callable[[], bool] = lambda: False
    now: float = 0.0

    def __post_init__(self) -> None:
        self.built = build(self.loaded, prefill_rows=self.prefill_chunk, pages=self.pages)
        self.engine = self.built.engine
        self.gate = WidthGate(self.engine)

    def tick(self) -> float:
        self.now += 1
        return self.now

    def run(self, body: dict[str, Any], seed: int = 5, drawn: tuple[int, ...] = ()) -> tuple[list[Chunk], Final]:
        attempt = Attempt(job=Job.parse(body), seed=seed, drawn=drawn)
        *chunks, final = run_job(
            attempt,
            self.gate,
            self.loaded,
            clock=self.tick,
            cancelled=self.cancelled,
            progress=lambda *heard: self.heard.append(heard),
        )
        return chunks, final

    def ids(self, body: dict[str, Any], **options: Any) -> list[int]:
        return [token for chunk in self.run(body, **options)[0] for token in chunk.ids]
