"""Whether a head pays on this device: what its guesses bring, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from worker.engine import geometry
from worker.engine.build import Options, build
from worker.engine.geometry import Extent
from worker.engine.load import LoadedModel, device_name
from worker.engine.trunk import Trunk
from worker.forge.accept import tokens_per_step
from worker.kernels import disk_cache
from worker.speculation.costs import Costs
from worker.speculation.mtp.head import Head, Reading

# The context at which costs are read.
_CONTEXT: Final = 256
_EXTENT: Final = Extent(rows=(1, 2, 3, 4, 6, 8), contexts=(64, 1024))
_SLOW: Final = Extent(rows=(1, 2), contexts=(64,), steps=2, turns=2)
# Drafts that are timed, each of so many tokens.
_TIMES: Final = 8
_DRAFTED: Final = 8


@dataclass(frozen=True, slots=True)
class Worth:
    """The best number of drafted tokens. tokens: of a step with them. cost: of the step, in plain steps."""

    drafted: int
    tokens: float
    cost: float
    draft_ms: float

    @property
    def gain(self) -> float:
        """How many times as fast as plain decoding."""
        return self.tokens / self.cost


def worth(shares: Sequence[float], costs: Costs) -> Worth:
    """What acceptance *shares* by depth are worth at *costs*."""
    plain = costs.forward(_CONTEXT, 1)

    def drafting(count: int) -> Worth:
        step = costs.forward(_CONTEXT, count + 1) + costs.overhead_ms + count * costs.draft_ms
        return Worth(count, tokens_per_step(shares, count), step / plain, costs.draft_ms)

    return max((drafting(count) for count in range(1, len(shares) + 1)), key=lambda one: one.gain)


def costs(loaded: LoadedModel, head: Head, cache_dir: Path, clock: Callable[[], float]) -> Costs:
    """What a step of several rows and a guess of *head* cost on this device. clock: seconds."""
    engine, _ = build(loaded, Options(kernel_folder=disk_cache.open_folder(cache_dir)))
    engine.warm_up()
    extent = _SLOW if device_name() == "cpu" else _EXTENT
    found = geometry.measure(engine.forward, engine.index.pages, extent, clock)
    return Costs(
        rows=found.rows,
        contexts=found.contexts,
        ms=found.ms,
        overhead_ms=found.overhead_ms,
        draft_ms=draft_ms(loaded, head, clock),
    )


def draft_ms(loaded: LoadedModel, head: Head, clock: Callable[[], float]) -> float:
    """Milliseconds of one guess, the fastest of some drafts. clock: seconds."""
    trunk = Trunk.of(loaded)
    width = head.norm.weight.size
    reading = Reading(head, trunk)
    hidden = mx.zeros((_CONTEXT, width), dtype=trunk.norm.weight.dtype)
    reading.read(mx.zeros(_CONTEXT, dtype=mx.uint32), hidden)
    mx.eval(reading.arrays)
    times = []
    for _ in range(_TIMES):
        begun = clock()
        mx.eval(reading.draft(_DRAFTED, lambda logits: logits.argmax(axis=-1)))
        times.append(clock() - begun)
        reading.read(mx.zeros(1, dtype=mx.uint32), hidden[:1])
        mx.eval(reading.arrays)
    return min(times) * 1000 / _DRAFTED


def speed(_loaded: LoadedModel, _head: Head) -> dict[str, Any] | None:
    """Tokens a second with the head and without, through the engine; None: the engine drafts with no head yet."""
    return None
