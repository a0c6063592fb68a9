"""From the settings to a width executor: which drafter, what rows cost, which stage; and health's words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from mtplx.errors import ModelFilesError, SettingsError
from mtplx.settings import SchedulerMode, Settings
from worker.engine import geometry
from worker.engine.build import Options, build
from worker.engine.dense_in_place import DenseInPlace
from worker.engine.draw import warm_rows
from worker.engine.engine import Engine
from worker.engine.files import check_model_files, resolve_model, weight_file_bytes
from worker.engine.forward import Forward
from worker.engine.geometry import Extent, Geometry
from worker.engine.load import LoadedModel, chip_name, device_name, load, weight_bytes
from worker.engine.memory import check_draft_fits
from worker.engine.same_tokenizer import difference
from worker.engine.serial import SerialEngine
from worker.engine.verify_bank import SIZES
from worker.kernels import disk_cache
from worker.speculation.costs import Costs, Measured
from worker.speculation.draft import Drafter
from worker.speculation.draft_model import DraftModel
from worker.speculation.executor import HyperWidthExecutor, Parts
from worker.speculation.mtp.build import Means, head_drafter
from worker.speculation.mtp.on_device import DeviceDrafts
from worker.speculation.ngram import Ngram

# What is measured before READY where nothing is kept yet: on the CPU a row takes tenths of a second.
_FAST: Final = Extent(contexts=(64, 1024))
_SLOW: Final = Extent(rows=(1, 2), contexts=(64,), steps=2, turns=2)
# What is measured where somebody asks and waits.
_WHOLE: Final = Extent()
_WHOLE_SLOW: Final = Extent(contexts=(64, 1024), steps=2, turns=1)
# Tokens of a draft that is timed, and how many are.
_TIMED, _TIMED_ON_CPU = (4, 8), (1, 1)


@dataclass(frozen=True, slots=True)
class Width:
    """What a worker runs widths with. stage: in force, empty in serial mode; executor: None where all is width 1.

    info: for READY and health.
    """

    stage: str
    executor: HyperWidthExecutor | None
    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Found:
    """A drafter, what a token of it costs, and what health tells of it.

    on_device: whether its drafts stay there. beside: a free drafter that is asked, too.
    """

    drafter: Drafter
    draft_ms: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)
    on_device: bool = False
    beside: Drafter | None = None

    @property
    def name(self) -> str:
        """For health."""
        return self.drafter.name if self.beside is None else f"{self.drafter.name}+{self.beside.name}"


def may_draft(settings: Settings) -> bool:
    """Whether jobs may verify drafts, so that draws of several rows are made ready."""
    hyper = settings.scheduler_mode is SchedulerMode.HYPER and settings.hyper_stage != "h0"
    return hyper and settings.draft != "none" and not settings.reference


def may_fork(settings: Settings) -> bool:
    """Whether jobs may verify trees, so that the lane gets ready for them."""
    return may_draft(settings) and settings.hyper_stage != "h1"


def options(settings: Settings, kernels: Path | None, before_memory: Callable[[], None] = lambda: None) -> Options:
    """How the engine of these settings is built, by a worker and by what measures for it."""
    return Options(
        kv_bytes=settings.kv_bytes,
        prefill_chunk=settings.prefill_chunk,
        kernel_folder=kernels,
        trees=may_fork(settings),
        before_memory=before_memory,
    )


def width(
    settings: Settings,
    loaded: LoadedModel,
    engine: Engine,
    clock: Callable[[], float],
    kernels: Path | None = None,
) -> Width:
    """The width executor that *settings* ask for, over the warm *engine*. clock: seconds. kernels: their folder.

    Raises:
        SettingsError: the drafter asked for cannot be had.
        ModelFilesError: the draft model is missing or incomplete.
    """
    if settings.scheduler_mode is not SchedulerMode.HYPER:
        return Width("", None, _off("serial mode"))
    if settings.hyper_stage == "h0" or settings.draft == "none":
        return Width("h0", None, _off("the settings ask for none"))
    if not isinstance(engine, SerialEngine):
        return Width("h0", None, _off("the reference lane draws one row at a time"))
    forward = engine.forward
    if forward.width == 1:
        return Width("h0", None, _off(forward.why_narrow))
    source = _drafter(settings, loaded, engine, clock, kernels)
    found = _geometry(settings.cache_dir / "geometry", loaded, engine, clock)
    costs = Costs(
        rows=found.rows,
        contexts=found.contexts,
        ms=found.ms,
        overhead_ms=found.overhead_ms,
        sizes=SIZES if isinstance(forward, DenseInPlace) else (),
    )
    executor = _executor(settings, source, costs, forward, clock)
    if executor.width == 1 and source.beside is not None:
        source = _Found(source.beside, info=source.info)
        executor = _executor(settings, source, costs, forward, clock)
    trees = executor.trees
    if executor.width > 1 and device_name() != "cpu":
        warm_rows(loaded.width, loaded.vocabulary, loaded.dtype, SIZES[1:])
    stage = "h0" if executor.width == 1 else "h2" if trees else "h1"
    info = {
        "width_executor": True,
        "draft": source.name,
        **source.info,
        "most_rows": executor.width,
        "width_why": executor.why or forward.why_narrow,
        "geometry": asdict(found),
    }
    return Width(stage, executor, info)


def probe_rows(settings: Settings, clock: Callable[[], float]) -> Geometry:
    """Measure what rows cost the settings' model here, in full, and keep it for the worker. clock: seconds.

    Raises:
        ModelFilesError, SettingsError: as at the start of a worker.
    """
    kernels = disk_cache.open_folder(settings.cache_dir)
    loaded = load(resolve_model(settings.model, settings.cache_dir))
    engine, _ = build(loaded, options(settings, kernels))
    engine.warm_up()
    extent = _WHOLE_SLOW if device_name() == "cpu" else _WHOLE
    found = geometry.measure(engine.forward, engine.index.pages, extent, clock)
    geometry.keep(found, _place(settings.cache_dir / "geometry", loaded, engine))
    return found


def _off(why: str) -> dict[str, Any]:
    return {"width_executor": False, "draft": "none", "most_rows": 1, "width_why": why}


def _drafter(
    settings: Settings,
    target: LoadedModel,
    engine: SerialEngine,
    clock: Callable[[], float],
    kernels: Path | None,
) -> _Found:
    if settings.draft.startswith("model:"):
        return draft_model(settings, target, engine.capacity, clock, kernels)
    turns = _TIMED_ON_CPU[1] if device_name() == "cpu" else _TIMED[1]
    means = Means(clock, turns, kernels)
    head = None if settings.draft == "ngram" else head_drafter(settings, target, engine, means)
    if head is not None:
        beside = Ngram() if settings.draft == "auto" else None
        return _Found(head.drafter, head.draft_ms, head.info, on_device=True, beside=beside)
    if settings.draft == "mtp":
        raise SettingsError(
            f"--draft mtp: {target.name} has no head that is known here. Name one with --mtp DIR, make one with "
            "`mtplx forge`, or use --draft auto."
        )
    return _Found(Ngram())


def _executor(
    settings: Settings, source: _Found, costs: Costs, forward: Forward, clock: Callable[[], float]
) -> HyperWidthExecutor:
    """What runs the jobs that *source* drafts for."""
    trees = forward.trees and may_fork(settings) and not source.on_device
    parts = Parts(drafter=source.drafter, measured=Measured(costs), trees=trees, clock=clock)
    if source.on_device:
        beside = None
        if source.beside is not None:
            beside = replace(parts, drafter=source.beside)
        # Nobody waits for a result where the next forward is launched before it is read.
        waits = 0.0 if forward.pipelines else costs.overhead_ms
        own = replace(costs, overhead_ms=waits, draft_ms=source.draft_ms)
        parts = replace(parts, measured=Measured(own), engine=DeviceDrafts, beside=beside)
    else:
        parts = replace(parts, measured=Measured(replace(costs, draft_ms=source.draft_ms)))
    return HyperWidthExecutor(parts, forward.width)


def draft_model(
    settings: Settings,
    target: LoadedModel,
    capacity: int,
    clock: Callable[[], float],
    kernels: Path | None = None,
) -> _Found:
    """The second model that drafts for *target*, warm and timed. capacity: positions of a job of the target.

    Raises:
        SettingsError: its ids are not the target's, it does not fit, or its rows cannot be taken back.
        ModelFilesError: it is missing or incomplete.
    """
    name = settings.draft.removeprefix("model:").strip()
    try:
        path = resolve_model(name, settings.cache_dir)
        check_model_files(path)
        check_draft_fits(f"--draft model:{name}", weight_file_bytes(path))
        loaded = load(path)
    except ModelFilesError as error:
        raise ModelFilesError(f"--draft model:{name}: {error}") from error
    unlike = difference(target, loaded)
    if unlike:
        raise SettingsError(
            f"--draft model:{name}: its tokenizer is not that of {target.name}: {unlike}. "
            "Take a smaller model of the same family, or --draft auto."
        )
    # Its pool is for the jobs that the target takes, and no longer ones.
    bounded = replace(loaded, context=min(loaded.context, capacity))
    engine, info = build(bounded, Options(prefill_chunk=settings.prefill_chunk, kernel_folder=kernels))
    if not engine.forward.cuts:
        raise SettingsError(
            f"--draft model:{name}: drafted rows cannot be taken back from it: {info['why']}. "
            "Take a model with full attention in all layers, or --draft auto."
        )
    engine.warm_up()
    drafter = DraftModel(bounded, engine, target.width)
    drafter.warm_up()
    draft_ms = drafter.draft_ms(clock, *(_TIMED_ON_CPU if device_name() == "cpu" else _TIMED))
    told: dict[str, Any] = {
        "model": loaded.name,
        "bytes": weight_bytes(loaded.model),
        "draft_ms": round(draft_ms, 4),
        **{part: info[part] for part in ("lane", "form", "pool", "row_invariant", "why") if part in info},
    }
    return _Found(drafter, draft_ms, {"draft_model": told})


def _geometry(folder: Path, loaded: LoadedModel, engine: SerialEngine, clock: Callable[[], float]) -> Geometry:
    """What is kept of this model on this device, or measured now and kept."""
    path = _place(folder, loaded, engine)
    found = geometry.kept(path)
    if found is None:
        extent = _SLOW if device_name() == "cpu" else _FAST
        found = geometry.measure(engine.forward, engine.index.pages, extent, clock)
        geometry.keep(found, path)
    return found


def _place(folder: Path, loaded: LoadedModel, engine: SerialEngine) -> Path:
    forward = engine.forward
    facts = {
        "model": loaded.name,
        "vocabulary": loaded.width,
        "dtype": loaded.dtype,
        "device": device_name(),
        "chip": chip_name(),
        "mlx": version("mlx"),
        "lane": type(forward).__name__,
        "row_invariant": forward.row_invariant,
        "capacity": forward.capacity,
    }
    return geometry.place(folder, facts)
