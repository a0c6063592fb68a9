"""Puts a worker together: model, engine, what it says of itself."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

from mtplx import __version__
from mtplx.job import MAX_INT
from mtplx.paths import expanded
from mtplx.settings import Settings
from worker.engine.build import build
from worker.engine.draw import WARM_ROWS
from worker.engine.draw_kernels import Wanted, compiling
from worker.engine.engine import Engine
from worker.engine.files import check_draft_files
from worker.engine.fingerprint import build_hash, model_hash
from worker.engine.load import LoadedModel, device_name, load, resolve_model
from worker.engine.reference import ReferenceEngine
from worker.engine.verify_bank import SIZES
from worker.job import run_job
from worker.kernels import disk_cache
from worker.loop import Offer, Worker
from worker.speculation.build import may_draft, options, width
from worker.speculation.mtp.forged import read_config
from worker.width import WidthGate


def start(settings: Settings, *, watch_stdin: bool = False) -> Worker:
    """A worker with a warm model, not yet talking to the broker.

    Raises:
        ModelFilesError: the model, or the one named to draft, is missing or incomplete.
        SettingsError: the memory asked for cannot be had.
    """
    kernels = disk_cache.open_folder(settings.cache_dir)
    path = resolve_model(settings.model, settings.cache_dir)
    # Before minutes of loading, and in modes that do not draft too.
    check_draft_files(settings.draft, settings.cache_dir)
    if settings.mtp:
        read_config(expanded(settings.mtp))
    loaded = load(path)
    rows = SIZES if may_draft(settings) else WARM_ROWS
    with compiling(Wanted.of(loaded, rows), None if settings.reference else kernels) as compiled:
        engine, info = engine_of(settings, loaded, kernels, compiled)
        compiled()
        engine.warm_up()
    wide = width(settings, loaded, engine, perf_counter, kernels)
    gate = WidthGate(engine, wide.executor)
    run = partial(run_job, gate=gate, loaded=loaded, clock=perf_counter)
    ready = offer(settings, loaded, engine.capacity, info | wide.info, wide.stage)
    ready = replace(ready, model_hash=model_hash(path), build_hash=build_hash(loaded, info))
    return Worker(settings, ready, run, counts=engine.counts, width=lambda: gate.width, watch_stdin=watch_stdin)


def engine_of(
    settings: Settings, loaded: LoadedModel, kernels: Path | None, before_memory: Callable[[], None]
) -> tuple[Engine, dict[str, Any]]:
    """The engine that *settings* ask for, and what health tells of it; *kernels*: where compiled ones are kept."""
    if settings.reference:
        return ReferenceEngine(loaded, settings.prefill_chunk), {"lane": "reference", "row_invariant": False}
    return build(loaded, options(settings, kernels, before_memory))


def offer(settings: Settings, loaded: LoadedModel, capacity: int, info: dict[str, Any], stage: str) -> Offer:
    """What READY tells of this worker; *capacity*: as in `Engine`; *info*: what engine and width add."""
    return Offer(
        mode=str(settings.scheduler_mode),
        stage=stage,
        model=loaded.name,
        vocabulary=loaded.vocabulary,
        context=min(loaded.context, capacity),
        info={
            "device": device_name(),
            "dtype": loaded.dtype,
            **info,
            "context_why": _why(loaded.context, capacity, pool="pool" in info),
            "versions": {
                "mtplx": __version__,
                "python": platform.python_version(),
                "mlx": version("mlx"),
                "mlx_lm": version("mlx-lm"),
            },
        },
    )


def _why(context: int, capacity: int, *, pool: bool) -> str:
    """What sets the most positions of a job, in words; *pool*: whether they lie in a pool of our own."""
    limit, how = "the worker has memory for no more", "; --kv-memory sets it"
    if not pool:
        limit, how = "the worker takes no more", ""
    if context == MAX_INT:
        return "the model names no context" + (f"; {limit}{how}" if capacity < context else "")
    if capacity < context:
        return f"{limit} of the model's {context}{how}"
    return "the model's context"
