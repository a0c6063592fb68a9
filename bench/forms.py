"""One form of the model with all that answers in it: our engine, its executors, forced choices, mlx-lm's loops."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import models
import pack_model
from conversations import Conversation
from decode import Report
from mlx_lm.utils import load_model
from speculating.rig import DEVICES, follow
from ways import (
    CHAINS,
    DRAFT_LAYERS,
    TREES,
    Prompt,
    Way,
    first_layers,
    forced,
    peer,
    peer_speculation,
    plain,
    planned,
)

from mtplx.settings import SchedulerMode, Settings
from worker.engine.build import IN_PLACE, Options, build
from worker.engine.geometry import Extent, Geometry, measure
from worker.engine.load import LoadedModel, load, resolve_model
from worker.engine.packed import pack
from worker.engine.self_check import Sizes, prepare
from worker.engine.serial import SerialEngine
from worker.engine.verify_bank import SIZES, Switches
from worker.kernels.dialect import target
from worker.speculation.build import width
from worker.speculation.costs import Costs
from worker.speculation.ngram import NGRAM
from worker.speculation.planner import Planner
from worker.width import WidthExecutor

PLAIN, TREE, CHAIN, PEER = "plain", "planned", "planned, chains alone", "mlx-lm"
KV_BYTES = 2**30
DRAFTS = (2, 4)
# Ids of mlx-lm's loops before they are timed.
PEER_WARM = 6


@dataclass
class Form:
    """A loaded form. answers: the plain ones at temperature 0 by kind, with their prompts."""

    title: str
    loaded: LoadedModel
    serial: SerialEngine
    geometry: Geometry
    executors: dict[str, WidthExecutor | None]
    model: Any
    drafts: dict[str, Any]
    answers: dict[str, list[tuple[list[int], list[int]]]] = field(default_factory=dict)

    @property
    def costs(self) -> Costs:
        """As the planner has them."""
        found = self.geometry
        sizes = SIZES if target() is not None else ()
        return Costs(found.rows, found.contexts, found.ms, found.overhead_ms, sizes=sizes)

    def ids(self, conversation: Conversation) -> list[int]:
        """The prompt."""
        if self.loaded.tokenizer is None:
            return conversation.raw
        return conversation.ids(self.loaded.tokenizer)

    def ours(self) -> dict[str, Way]:
        """Our ways, the plain one first."""
        ways = {PLAIN: plain(self.serial)}
        ways |= {name: planned(self.serial, executor) for name, executor in self.executors.items()}
        return ways | {one.title: forced(self.serial, self.costs, one) for one in (*CHAINS, *TREES)}

    def peers(self) -> dict[str, Way]:
        """mlx-lm's ways, the plain one first."""
        ways: dict[str, Way] = {PEER: partial(peer, self.model)}
        for words, draft in self.drafts.items():
            # A draft as large as the model has nothing to win by more.
            for count in DRAFTS if words.endswith("layers") else DRAFTS[:1]:
                ways[f"{PEER}, {count} drafted by {words}"] = partial(peer_speculation, self.model, draft, count)
        return ways

    def by_products(self) -> tuple[SerialEngine, dict[int, float]]:
        """An engine by MLX's own products, on whose rows nothing is promised; by rows how far the first one moves.

        Without a GPU the engine that there is.
        """
        switches = Switches(matvec=False)
        form = IN_PLACE if target() is not None else None
        options = Options(kv_bytes=KV_BYTES, form=form, switches=switches, trees=True)
        serial, _ = build(self.loaded, options)
        serial.warm_up()
        extent = Extent(rows=SIZES, contexts=(64,), steps=2, turns=1)
        found = measure(serial.forward, serial.index.pages, extent, time.perf_counter)
        return serial, dict(zip(found.rows, found.moved, strict=True))

    def warm(self, prompt: Prompt) -> None:
        """Run every way twice, so that what is compiled at first use is no part of a round."""
        for temperature in (0.0, prompt.temperature):
            for way in self.ours().values():
                way(replace(prompt, temperature=temperature))
            for way in self.peers().values():
                way(replace(prompt, temperature=temperature, tokens=PEER_WARM))


def real(name: str, folder: Path | None, kernels: Path | None) -> Form:
    """SmolLM2 in the form *name*; *folder* None: made of the pulled model. *kernels*: where compiled ones are."""
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="mtplx-"))
        pack_model.expand(resolve_model("smollm2-135m", Settings.load({}).cache_dir), folder)
    loaded = load(folder / name)
    if target() is not None:
        rows = Options().rows(loaded)
        # Of a pack that is dropped again: build makes its own.
        prepare(pack(loaded.model), rows, kernels, Sizes(trees=True))
        mx.clear_cache()
    own, _ = load_model(folder / name, lazy=True)
    drafts = {f"its first {DRAFT_LAYERS} layers": first_layers(own, DRAFT_LAYERS)}
    if name == "bf16":
        drafts["its 4-bit form"] = load_model(folder / "4bit", lazy=True)[0]
    if target() is None:
        for one in (own, *drafts.values()):
            one.set_dtype(mx.float32)
    mx.eval([one.parameters() for one in (own, *drafts.values())])
    return made(f"SmolLM2-135M {name}", loaded, own, drafts)


def tiny(name: str) -> Form:
    """A tiny model of random weights instead."""
    shape = models.SHAPES[f"smol-{name}"].tiny
    ours, own = models.make(shape), models.make(shape)
    if target() is None:
        for one in (ours, own):
            one.set_dtype(mx.float32)
    loaded = replace(models.loaded(shape, ours), dtype="float32" if target() is None else "bfloat16")
    return made(f"tiny {name}", loaded, own, {"its first layers": first_layers(own, 1)})


def made(title: str, loaded: LoadedModel, own: Any, drafts: dict[str, Any]) -> Form:
    """The engine over *loaded* on the fast path, nothing left to the check at start; rows are measured."""
    form = IN_PLACE if target() is not None else None
    serial, info = build(loaded, Options(kv_bytes=KV_BYTES, form=form, trees=True))
    assert form is None or info["form"] == IN_PLACE, f"not on the fast path: {info['why']}"
    serial.warm_up()
    executors: dict[str, WidthExecutor | None] = {}
    with tempfile.TemporaryDirectory() as cache:
        for words, stage in ((TREE, "auto"), (CHAIN, "h1")):
            asked = {"scheduler_mode": SchedulerMode.HYPER, "draft": "ngram", "hyper_stage": stage}
            wide = width(Settings.load({**asked, "cache_dir": Path(cache)}), loaded, serial, time.perf_counter)
            executors[words] = wide.executor
    geometry = Geometry(**wide.info["geometry"])
    return Form(title, loaded, serial, geometry, executors, own, drafts)


def published(report: Report, form: Form) -> None:
    """The answers at temperature 0 replayed by the planner on published costs, with and without forks."""
    for device, costs in DEVICES.items():
        for kind, answers in form.answers.items():
            chain, tree = (_replayed(costs, answers, forks) for forks in (0, 3))
            title = f"{form.title}, {kind}, on the costs of {device}"
            report.add(f"{title}: planned chains / plain", chain, "x", None, "higher")
            report.add(f"{title}: planned trees / planned chains", tree / chain, "x", None, "higher")


def _replayed(costs: Costs, answers: list[tuple[list[int], list[int]]], forks: int) -> float:
    spent = [
        follow(Planner(costs, 15, forks > 0, NGRAM), prompt, answer, costs, forks)[0] for prompt, answer in answers
    ]
    return sum(one.plain_ms for one in spent) / sum(one.ms for one in spent)
