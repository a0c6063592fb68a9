"""From the settings to a drafter over a head: which head, how it runs beside the lane, what a draft costs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten

from mtplx.errors import ModelFilesError, SettingsError
from mtplx.paths import expanded
from mtplx.settings import Settings
from worker.engine.dense_in_place import DenseInPlace
from worker.engine.engine import EngineRequest, unheard
from worker.engine.load import LoadedModel, device_name, resolve_model
from worker.engine.module_lane import ModuleForward
from worker.engine.packed import NotDenseError
from worker.engine.sample import Sampling
from worker.engine.serial import SerialEngine
from worker.engine.trunk import Trunk
from worker.speculation.draft import Terms
from worker.speculation.mtp import forged
from worker.speculation.mtp.drafter import Mtp
from worker.speculation.mtp.following import HeadRun
from worker.speculation.mtp.head import Head
from worker.speculation.mtp.module import ModuleHead
from worker.speculation.mtp.packed import PackedHead
from worker.speculation.mtp.survey import Checkpoint, survey
from worker.speculation.mtp.weights import load_head

_log = logging.getLogger(__name__)

SHIPPED: Final = Path(__file__).parent / "shipped"
"""Heads that come with the package, one in each folder."""

# Ids of a draft that is timed beside one of a single id, and how often; prompt ids before it.
_TIMED: Final = 5
_PROMPT: Final = 32


@dataclass(frozen=True, slots=True)
class HeadDrafter:
    """A drafter over a head. draft_ms: of a drafted id. info: for health."""

    drafter: Mtp
    draft_ms: float
    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Means:
    """clock: seconds. turns: how often a draft is timed. kernels: where compiled ones are kept; None, nowhere."""

    clock: Callable[[], float]
    turns: int
    kernels: Path | None = None


def head_drafter(
    settings: Settings, loaded: LoadedModel, engine: SerialEngine, means: Means
) -> HeadDrafter | None:
    """The drafter over the head that *settings* name, or that is known for *loaded*; None where there is none.

    Raises:
        SettingsError, ModelFilesError: the head that is asked for cannot be had.
    """
    named = expanded(settings.mtp) if settings.mtp else None
    try:
        found = _head(settings, loaded, named)
    except (ModelFilesError, SettingsError) as error:
        if named is not None or settings.draft == "mtp":
            raise
        _log.warning("%s Nothing drafts in its place.", error)
        return None
    if found is None:
        return None
    trunk, head, name = found
    run, how = run_of(head, trunk, engine)
    if isinstance(run, PackedHead) and means.kernels is not None and device_name() == "cuda":
        run.prepare(means.kernels)
    drafter = Mtp(run, engine.forward, loaded.width, loaded.vocabulary)
    bytes_ = sum(weight.nbytes for _, weight in tree_flatten(head.parameters()))
    told = {"head": name, "bytes": bytes_, "form": how}
    if isinstance(run, PackedHead):
        told["pool_bytes"] = run.pool.nbytes
    draft_ms = _draft_ms(drafter, run, engine, means)
    return HeadDrafter(drafter, draft_ms, {"mtp": {**told, "draft_ms": round(draft_ms, 4)}})


def _head(settings: Settings, loaded: LoadedModel, named: Path | None) -> tuple[Trunk, Head, str] | None:
    """The head in *named*, else the model's own, else a shipped one; with what it is called."""
    try:
        model = resolve_model(settings.model, settings.cache_dir)
    except ModelFilesError:
        # It was loaded from somewhere else.
        model = Path(settings.model)
    found = survey(Checkpoint.at(model))
    own = named is None and bool(found.modules)
    try:
        trunk = Trunk.of(loaded)
    except ModelFilesError:
        if named is not None or own:
            raise
        return None
    folder = None if own else named or shipped_for(trunk)
    if folder is None and not own:
        if found.shape is None:
            return None
        if settings.draft != "mtp":
            _log.info("%s has no head to draft with: %s", loaded.name, found.why)
            return None
        # It says why there is none.
    return trunk, load_head(model, loaded, trunk, folder), "its own" if folder is None else folder.name


def shipped_for(trunk: Trunk) -> Path | None:
    """The folder of the shipped head that was made for this model."""
    print_ = trunk.fingerprint()
    folders = sorted(path.parent for path in SHIPPED.glob(f"*/{forged.CONFIG}"))
    return next((folder for folder in folders if forged.read_config(folder).trunk == print_), None)


def run_of(head: Head, trunk: Trunk, engine: SerialEngine) -> tuple[HeadRun, str]:
    """How *head* runs beside the lane of *engine*, and its name."""
    lane = engine.forward
    if isinstance(lane, DenseInPlace) and head.is_plain:
        try:
            return PackedHead(head, lane.packed, lane.pages, lane.switches), "packed"
        except NotDenseError:
            return ModuleHead(head, trunk), "module"
    if isinstance(lane, ModuleForward):
        lane.tap = trunk.tap()
    return ModuleHead(head, trunk), "module"


def _draft_ms(drafter: Mtp, run: HeadRun, engine: SerialEngine, means: Means) -> float:
    """Milliseconds of one more drafted id, behind a text of nothing in particular; all sizes are warm then."""
    clock = means.clock
    sampling = Sampling(seed=0)
    request = EngineRequest(prompt=(0,) * _PROMPT, sampling=sampling, max_tokens=_PROMPT, cache=False)
    drafter.follow()
    engine.start(request, unheard)
    drafter.begin(request.prompt, sampling, Terms(budget=request.max_tokens))
    drafter.extend((0,))
    if isinstance(run, PackedHead):
        run.warm_up()
    times: dict[int, list[float]] = {1: [], _TIMED: []}
    for _ in range(means.turns + 1):
        for count, taken in times.items():
            mx.eval(drafter.draft(count))
            began = clock()
            mx.eval(drafter.draft(count))
            taken.append((clock() - began) * 1e3)
    drafter.end()
    engine.stop()
    one, many = (median(taken[1:]) for taken in times.values())
    return max((many - one) / (_TIMED - 1), 0.0)
