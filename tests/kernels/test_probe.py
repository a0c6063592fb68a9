"""The report of a machine with kernels: the emulated one."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from kernels.emulated import Machine
from mlx import nn
from tiny_models import Kind, make_llama

from worker import probe as program
from worker.engine import probe, step_time
from worker.engine.probe import Extent, Wish
from worker.engine.self_check import Sizes
from worker.kernels.dialect import Launch

FEW = Extent(
    rows=(1, 4),
    contexts=(8, 40),
    repeats=1,
    prefill_rows=32,
    sizes=Sizes(rows=(1, 4), contexts=(31,), steps=8, layers=2),
)


@pytest.fixture
def wish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wish:
    # One turn of timed steps: on this machine they say nothing.
    monkeypatch.setattr(step_time, "compare", partial(step_time.compare, repeats=1))
    model = probe.named(str(make_llama(tmp_path / "model", Kind(layers=1))), tmp_path)
    return Wish(model=model, cache_dir=tmp_path, full=True, extent=FEW)


def unsaid(_line: str) -> None:
    pass


def test_every_figure_is_there(wish: Wish, monkeypatch: pytest.MonkeyPatch) -> None:
    with Machine().on(monkeypatch):
        report = probe.probe(wish, unsaid)
    assert json.loads(json.dumps(report)) == report
    assert report["form"] == "in place"
    states = {name: row["state"] for name, row in report["kernels"].items()}
    # Emulated products may lose.
    assert set(states) == {"attention", "rope_write", "read_pages", "matvec", "swiglu", "in place"}
    for name in ("attention", "matvec"):
        row = report["kernels"][name]
        assert row["ok"]
        assert row["alone_us"]["kernel"] > 0
        assert row["alone_us"]["plain"] > 0
    assert set(report["kernels"]["matvec"]["step_ms"]) == {"on", "off"}
    assert {name: one["ok"] for name, one in report["in_place"].items()} == {
        "one ahead": True,
        "waiting": True,
        "one layer": True,
    }
    for products in ("our products", "MLX's products"):
        assert set(report["cost_ms"][products]) == {"8", "40"}
        assert set(report["cost_ms"][products]["40"]) == {"1", "4"}
    assert report["row_invariance"]["differing"]["4"] == 0
    assert set(report["start_s"]) == {"load", "pack", "compile", "check", "trial", "time"}
    lines = program.lines(report)
    assert lines[0].endswith("on cpu: in place")
    assert any(line.startswith("attention ") and line.endswith(" on") for line in lines)


def test_a_machine_that_loses_writes_says_where(wish: Wish, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(late=3)
    with machine.on(monkeypatch):
        report = probe.probe(wish, unsaid)
    assert report["form"] == "tail"
    assert "wrong" in report["kernels"]["rope_write"]["state"]
    assert "does_not_apply" in report["in_place"]
    assert "waiting" in report["cost_ms"]


def test_a_kernel_that_is_refused_at_the_longest_context_alone_is_noted(
    wish: Wish, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(launch: Launch) -> bool:
        named = dict(zip(launch.kernel.inputs, launch.arrays, strict=True))
        return launch.kernel.name == "attention_fma" and named["meta"][0].item() == 40

    with Machine(refused=refused).on(monkeypatch):
        report = probe.probe(wish, unsaid)
    said = "Unable to build metal library from source: attention_fma"
    assert report["form"] == "in place"
    assert report["kernels"]["attention"]["state"] == "on"
    assert report["kernels"]["attention"]["alone_us"] == {"what": "rows: 1, positions before: 40", "refused": said}
    assert report["kernels"]["matvec"]["alone_us"]["kernel"] > 0
    for costs in report["cost_ms"].values():
        assert set(costs["8"]) == {"1", "4"}
        assert costs["40"] == {"refused": said}
    assert json.loads(json.dumps(report)) == report
    assert any(line.startswith("attention ") and line.endswith(" on") for line in program.lines(report))


def test_a_model_whose_weights_our_products_do_not_serve_is_measured_with_mlxs(
    wish: Wish, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = wish.model()
    nn.quantize(loaded.model, 32, 6)
    with Machine().on(monkeypatch):
        report = probe.probe(replace(wish, model=lambda: loaded), unsaid)
    assert report["form"] == "in place"
    assert report["kernels"]["matvec"] == {"state": "does not serve 6-bit weights"}
    assert set(report["cost_ms"]) == {"MLX's products"}
    assert not report["row_invariance"]["promised"]
