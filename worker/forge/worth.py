"""Whether a head pays on this device: what its guesses bring and cost, and how fast a worker answers with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from mtplx.settings import Settings
from worker.engine.build import build
from worker.engine.engine import Engine, EngineRequest, unheard
from worker.engine.load import LoadedModel
from worker.engine.sample import Sampling
from worker.engine.serial import SerialEngine
from worker.forge.accept import tokens_per_step
from worker.forge.text import Text
from worker.kernels import disk_cache
from worker.speculation.build import Width, options, width
from worker.speculation.costs import Costs
from worker.width import Meta, WidthExecutor

# The context at which costs are read.
_CONTEXT: Final = 256
# Ids of a timed answer: at least so many are there to be drafted, and no more are drawn.
_LEAST: Final = 16
_MOST: Final = 128


@dataclass(frozen=True, slots=True)
class Worth:
    """The best number of drafted tokens. tokens: of a step with them. cost: of the step, in plain steps."""

    drafted: int
    tokens: float
    cost: float

    @property
    def gain(self) -> float:
        """How many times as fast as plain decoding."""
        return self.tokens / self.cost


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second of greedy answers, the medians of all. head: none where the worker would not draft."""

    plain: float
    head: float | None
    why: str = ""


def worth(shares: Sequence[float], costs: Costs) -> Worth:
    """What acceptance *shares* by depth are worth at *costs*."""
    plain = costs.forward(_CONTEXT, 1)

    def drafting(count: int) -> Worth:
        step = costs.forward(_CONTEXT, count + 1) + count * costs.draft_ms
        return Worth(count, tokens_per_step(shares, count), step / plain)

    return max((drafting(count) for count in range(1, len(shares) + 1)), key=lambda one: one.gain)


class Served:
    """A worker's engine with a head.

    Args:
        loaded: the trunk.
        folder: of the head.
        cache_dir: of kernels and of what rows cost.
        clock: seconds.
    """

    def __init__(self, loaded: LoadedModel, folder: Path, cache_dir: Path, clock: Callable[[], float]) -> None:
        asked = {"mtp": folder, "draft": "mtp", "scheduler_mode": "hyper", "cache_dir": cache_dir}
        settings = Settings.load({name: str(value) for name, value in asked.items()})
        kernels = disk_cache.open_folder(cache_dir)
        engine, _ = build(loaded, options(settings, kernels))
        engine.warm_up()
        self._engine, self._clock = engine, clock
        self._width: Width = width(settings, loaded, engine, clock, kernels)

    @property
    def costs(self) -> Costs | None:
        """What rows and guesses cost here; None where the lane takes one row."""
        info: dict[str, Any] = self._width.info
        if "geometry" not in info or "mtp" not in info:
            return None
        found = info["geometry"]
        return Costs(
            rows=tuple(found["rows"]),
            contexts=tuple(found["contexts"]),
            ms=tuple(found["ms"]),
            overhead_ms=found["overhead_ms"],
            draft_ms=info["mtp"]["draft_ms"],
        )

    def speed(self, texts: Sequence[Text]) -> Speed:
        """Of the answers to the prompts of *texts*, each with the head right after the plain one."""
        executor = self._width.executor
        asked = [one for one in texts if len(one.ids) - one.prompt >= _LEAST]
        wide = executor is not None and self._engine_of(executor, asked[0]) is not self._engine if asked else False
        plain: list[float] = []
        head: list[float] = []
        for one in asked:
            plain.append(self._rate(self._engine, one))
            if wide and executor is not None:
                head.append(self._rate(self._engine_of(executor, one), one))
        why = "" if wide else str(self._width.info.get("width_why", ""))
        return Speed(median(plain) if plain else 0.0, median(head) if head else None, why)

    def _engine_of(self, executor: WidthExecutor, one: Text) -> Engine:
        """What runs an answer as long as that of *one*, as a worker would."""
        assert isinstance(self._engine, SerialEngine), "an executor stands on one"
        plan = executor.plan(Meta(speculation="auto", prompt=one.prompt, budget=len(one.ids) - one.prompt))
        return executor.run(plan, self._engine) if plan.width > 1 else self._engine

    def _rate(self, engine: Engine, one: Text) -> float:
        """Tokens a second behind the first one."""
        count = min(len(one.ids) - one.prompt, _MOST)
        prompt = tuple(int(token) for token in one.ids[: one.prompt])
        engine.start(
            EngineRequest(prompt=prompt, sampling=Sampling(seed=0), max_tokens=count, cache=False), unheard
        )
        engine.step()
        began = self._clock()
        for _ in range(count - 1):
            engine.step()
        took = self._clock() - began
        engine.stop()
        return (count - 1) / took


def told(shares: Sequence[float], served: Served, texts: Sequence[Text]) -> tuple[dict[str, Any], float]:
    """(what `forge.json` says of the head's worth, how many times as fast as plain decoding it makes a worker)."""
    costs = served.costs
    by_probe = None if costs is None else worth(shares, costs)
    speed = served.speed(texts)
    if speed.head is not None:
        gain = speed.head / speed.plain
    else:
        gain = 0.0 if by_probe is None else min(by_probe.gain, 1.0)
    found = {
        "by_probe": None if by_probe is None else {**asdict(by_probe), "gain": by_probe.gain},
        "tokens_per_second": asdict(speed),
        "gain": gain,
    }
    return found, gain
