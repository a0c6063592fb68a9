"""What a worker finds out about drafts before its first job: what rows cost, what cannot be, and why."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from speculating.oracle import EAGER, FREE, LINEAR, Priced
from tiny_models import Room, make_mamba, make_tiny

from mtplx.errors import ModelFilesError, SettingsError
from mtplx.settings import SchedulerMode, Settings
from worker import runtime
from worker.engine.files import check_draft_files
from worker.engine.geometry import ROWS, Extent, measure
from worker.engine.load import LoadedModel, load
from worker.engine.reference import ReferenceEngine
from worker.speculation.build import Width, may_fork, width
from worker.speculation.costs import Costs, Measured, too_dear
from worker.speculation.executor import ROUTE


class Start:
    """Starts of a worker on one model with one cache folder, where rows cost what *costs* says."""

    def __init__(self, loaded: LoadedModel, folder: Path, costs: Costs = FREE) -> None:
        self.loaded = loaded
        self.folder = folder
        self.room = Room(loaded)
        self.clock = Priced(self.room.engine, costs)

    def __call__(self, **settings: Any) -> Width:
        found = width(Settings(cache_dir=self.folder, **settings), self.loaded, self.room.engine, self.clock)
        self.room.built.check_idle()
        return found

    def files(self) -> list[Path]:
        return list((self.folder / "geometry").glob("*.json"))


@pytest.fixture
def start(tiny_model: Callable[[str], LoadedModel], tmp_path: Path) -> Start:
    return Start(tiny_model("llama"), tmp_path)


def test_where_rows_are_free_jobs_are_drafted_from_the_first_one_on(start: Start) -> None:
    found = start()
    assert (found.stage, found.info["most_rows"], found.info["width_why"]) == ("h2", 16, "")
    assert (found.info["draft"], found.info["width_executor"]) == ("ngram", True)
    start.room.gate.executor = found.executor
    body = {"token_ids": [5, 6, 7] * 9, "max_tokens": 20, "logit_bias": {"5": 99.0}}
    final = start.room.run(body)[1]
    assert (final.route, final.completion_tokens) == (ROUTE, 20)
    assert final.speculation["rows_committed"] > 5


def test_where_rows_cost_a_forward_there_are_no_drafts_and_health_says_why(tiny_model, tmp_path: Path) -> None:
    found = Start(tiny_model("llama"), tmp_path, LINEAR)()
    assert (found.stage, found.info["most_rows"]) == ("h0", 1)
    assert "cost too much" in found.info["width_why"]


@pytest.mark.parametrize(
    ("settings", "stage"),
    [
        ({"hyper_stage": "h0"}, "h0"),
        ({"draft": "none"}, "h0"),
        ({"scheduler_mode": SchedulerMode.SERIAL}, ""),
        ({"hyper_stage": "h1"}, "h1"),
        ({"hyper_stage": "h2", "draft": "ngram"}, "h2"),
    ],
)
def test_a_stage_that_is_asked_for_is_in_force(start: Start, settings: dict[str, Any], stage: str) -> None:
    found = start(**settings)
    assert found.stage == stage
    assert (found.executor is None) is (stage in ("", "h0"))
    assert may_fork(Settings(cache_dir=start.folder, **settings)) is (stage == "h2")
    if found.executor is None:
        assert start.files() == [], "what nobody asks for is not measured"
        assert found.info["width_why"]


def test_a_drafter_that_cannot_be_had_is_refused_at_the_start(start: Start) -> None:
    with pytest.raises(SettingsError, match=r"--draft mtp.*--draft auto"):
        start(draft="mtp")


def test_the_reference_lane_says_that_it_takes_no_drafts(start: Start) -> None:
    found = width(Settings(cache_dir=start.folder), start.loaded, ReferenceEngine(start.loaded), start.clock)
    assert (found.executor, found.info["most_rows"]) == (None, 1)
    assert "reference" in found.info["width_why"]


def test_a_model_whose_rows_cannot_be_taken_back_says_so_at_the_start_and_answers(start: Start) -> None:
    forward = start.room.engine.forward
    forward.width, forward.why_narrow = 1, "its state cannot be put back"
    found = start()
    assert (found.stage, found.executor, found.info["width_why"]) == ("h0", None, "its state cannot be put back")
    start.room.gate.executor = found.executor
    assert len(start.room.ids({"token_ids": [5, 6], "max_tokens": 4, "logit_bias": {"1": -1000}})) == 4


@pytest.mark.parametrize("name", ["gemma3", "granite_hybrid", "qwen3_5", "mamba"])
def test_models_without_trees_are_drafted_in_chains_and_health_says_why(tiny_model, tmp_path: Path, name) -> None:
    loaded = load(make_mamba(tmp_path)) if name == "mamba" else tiny_model(name)
    start = Start(loaded, tmp_path, EAGER)
    found = start()
    assert (found.stage, found.info["width_executor"]) == ("h1", True)
    assert "chain" in found.info["width_why"]
    body = {"token_ids": [5, 6, 7] * 9, "max_tokens": 20, "logit_bias": {"5": 99.0, "6": 98.0}}
    plain = start.room.ids(body)
    start.room.gate.executor = found.executor
    chunks, final = start.room.run(body)
    assert [token for chunk in chunks for token in chunk.ids] == plain
    assert final.row_invariant is False, "mlx-lm's module promises no equal rows"
    assert final.speculation["rows_committed"] > 5


def test_what_rows_cost_is_measured_once_for_a_model_on_a_device(start: Start, tiny_model) -> None:
    first = start().info["geometry"]
    assert first["ms"][0][0] == pytest.approx(FREE.forward(0, 1))
    assert first["moved"] == (0.0,) * len(first["rows"]), "no row moves on the CPU"
    (file,) = start.files()
    forwards = start.clock.now
    assert start().info["geometry"] == first
    assert start.clock.now == forwards, "the second start measures nothing"
    other = Start(tiny_model("qwen3"), start.folder)
    other()
    assert len(start.files()) == 2
    assert file in start.files()


@pytest.mark.parametrize("name", ["llama", "gemma3", "granite_hybrid", "qwen3_5", "phi3", "mamba"])
def test_every_kind_of_cache_can_be_measured_in_full(tiny_model, tmp_path: Path, name: str) -> None:
    """As on a GPU: windows turn over, and recurrent states do not go back."""
    loaded = load(make_mamba(tmp_path)) if name == "mamba" else tiny_model(name)
    room = Room(loaded)
    clock = Priced(room.engine, FREE)
    found = measure(room.engine.forward, room.engine.index.pages, Extent(contexts=(64, 1024), turns=1), clock)
    assert found.ms[0] == pytest.approx([FREE.forward(0, rows) for rows in ROWS])
    assert max(found.moved) < 1e-3
    room.built.check_idle()


def test_the_measurement_and_a_drafted_job_happen_on_the_calling_thread(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    for name in ("eval", "async_eval"):
        real = getattr(mx, name)
        monkeypatch.setattr(mx, name, lambda *a, _real=real: (seen.add(threading.get_ident()), _real(*a))[1])
    before = set(threading.enumerate())
    start.room.gate.executor = start().executor
    final = start.room.run({"token_ids": [5, 6, 7] * 9, "max_tokens": 20, "temperature": 0.7})[1]
    assert final.route == ROUTE
    assert seen == {threading.get_ident()}
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("name", ["llama", "granite_hybrid", "qwen3_5", "gemma3", "mamba"])
def test_a_worker_starts_with_every_kind_of_model_in_the_mode_that_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Nothing waits for the first job to fail: what drafts need is tried at the start."""
    model = make_mamba(tmp_path) if name == "mamba" else make_tiny(name, tmp_path)
    settings = Settings(model=str(model), cache_dir=tmp_path / "cache", run_dir=tmp_path / "run", kv_memory="4MB")
    monkeypatch.setattr(runtime, "Worker", lambda _settings, offer, *_, **__: offer)
    info = runtime.start(settings).info
    assert info["width_executor"] is True
    assert info["row_invariant"] is False, "without our kernels"
    assert info["most_rows"] == 1 or not info["width_why"] or "chain" in info["width_why"]


@pytest.mark.parametrize(
    "mode", [{"scheduler_mode": SchedulerMode.SERIAL}, {"hyper_stage": "h0"}, {}, {"reference": True}]
)
@pytest.mark.parametrize("option", ["draft", "mtp"])
def test_a_drafter_that_is_not_there_is_an_error_at_the_start_in_every_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any], option: str
) -> None:
    monkeypatch.setattr(runtime, "Worker", lambda _settings, offer, *_, **__: offer)
    missing = str(tmp_path / "nowhere")
    asked = {"draft": {"draft": f"model:{missing}"}, "mtp": {"mtp": missing}}[option]
    model = make_tiny("llama", tmp_path)
    settings = Settings(model=str(model), cache_dir=tmp_path / "cache", kv_memory="4MB", **asked, **mode)
    with pytest.raises(ModelFilesError, match=r"nowhere"):
        runtime.start(settings)


def test_a_draft_model_that_is_not_used_has_to_be_whole_and_a_hub_id_is_not_fetched_for_it(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path)
    check_draft_files(f"model:{model}", tmp_path)
    check_draft_files("model:mlx-community/nobody-has-this", tmp_path)
    check_draft_files("auto", tmp_path)
    (model / "config.json").unlink()
    with pytest.raises(ModelFilesError, match=r"--draft model:.*config.json"):
        check_draft_files(f"model:{model}", tmp_path)


@pytest.mark.parametrize(
    ("costs", "says"),
    [
        (LINEAR, "rows cost too much"),
        (replace(LINEAR, draft_ms=5.0), "rows cost too much"),
        (replace(FREE, draft_ms=2.0), "drafts cost too much here, 2 ms a token where a plain step takes 1 ms"),
        (replace(FREE, draft_ms=0.1), ""),
        (FREE, ""),
    ],
)
def test_what_costs_too_much_is_named(costs: Costs, says: str) -> None:
    why = too_dear(Measured(costs), 16)
    assert why.startswith(says)
    assert bool(why) is bool(says)
    assert too_dear(Measured(costs), 1) == "", "no row of a draft, no costs"
