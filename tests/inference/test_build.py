"""From a loaded model to an engine: what is checked, and what is taken as given."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import make_mamba

from worker.engine import build as build_module
from worker.engine import module_lane, self_check
from worker.engine.build import IN_PLACE, TAIL_FORM, Options, build
from worker.engine.load import LoadedModel, load


@pytest.mark.parametrize("form", [IN_PLACE, TAIL_FORM])
def test_a_form_that_is_given_is_taken_without_the_check_at_start(
    form: str, tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "choose", lambda *_, **__: pytest.fail("the kernels were checked"))
    _, info = build(tiny, Options(form=form, kv_bytes=10**6))
    assert (info["lane"], info["form"], info["why"], info["kernels"]) == ("packed", form, "", {})


def test_health_tells_a_pool_only_where_there_is_one(tiny: LoadedModel, tmp_path: Path) -> None:
    _, info = build(tiny, Options(kv_bytes=10**6))
    assert info["pool"]["pages"] > 1
    assert 10**6 * 0.9 < info["pool"]["bytes"] <= 10**6
    engine, info = build(load(make_mamba(tmp_path)), Options())
    assert (info["lane"], info["form"]) == ("module", "mlx-lm")
    assert "pool" not in info
    assert engine.capacity > 10**6
    assert "ArraysCache" in info["why"]


def test_without_a_form_the_check_decides_and_says_why(tiny: LoadedModel) -> None:
    _, info = build(tiny, Options(kv_bytes=10**6))
    assert (info["form"], info["why"]) == (TAIL_FORM, "MLX runs on the CPU here")


def test_others_are_done_before_the_free_memory_is_asked_for(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def noted(*_: object, **__: object) -> int:
        told.append("memory")
        return 64

    for module in (build_module, module_lane):
        monkeypatch.setattr(module, "pages_for_model", noted)
    for loaded in (tiny, load(make_mamba(tmp_path))):
        told.clear()
        build(loaded, Options(before_memory=lambda: told.append("waited")))
        assert told[0] == "waited"
