"""What is kept of the geometry probe is read where it is whole and plausible, and measured anew where it is not."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_mamba, make_tiny

from worker.engine import build, geometry
from worker.engine.geometry import Extent, Geometry
from worker.engine.load import LoadedModel, load
from worker.speculation.costs import Costs

FOUND = Geometry(
    rows=(1, 2, 4),
    contexts=(64, 1024),
    ms=((1.0, 1.1, 1.3), (2, 2.0, 2.5)),
    overhead_ms=0.0,
    moved=(0.0, 0.0, 1e-3),
)
NAN, INFINITE = float("nan"), float("inf")
DAMAGES: dict[str, Any] = {
    "rows as text": {"rows": "124"},
    "rows of text": {"rows": ["1", "2", "4"]},
    "rows of fractions": {"rows": [1.0, 2.0, 4.0]},
    "rows without the plain step": {"rows": [2, 4, 8]},
    "rows in disorder": {"rows": [1, 4, 2]},
    "no rows": {"rows": [], "ms": [[], []], "moved": []},
    "contexts of text": {"contexts": ["a", "b"]},
    "contexts in disorder": {"contexts": [1024, 64]},
    "a negative context": {"contexts": [-1, 64]},
    "no contexts": {"contexts": [], "ms": []},
    "a short line": {"ms": [[1, 2, 3], [1, 2]]},
    "a line too few": {"ms": [[1, 2, 3]]},
    "a line too many": {"ms": [[1, 2, 3]] * 3},
    "times without lines": {"ms": [1, 2]},
    "times of text": {"ms": [["a", "b", "c"]] * 2},
    "times of null": {"ms": [[None] * 3] * 2},
    "times of true": {"ms": [[True] * 3] * 2},
    "no numbers": {"ms": [[NAN] * 3] * 2},
    "endless times": {"ms": [[INFINITE] * 3] * 2},
    "times of zero": {"ms": [[0, 0, 0]] * 2},
    "negative times": {"ms": [[-1, -2, -3]] * 2},
    "times beyond floats": {"ms": [[10**400] * 3] * 2},
    "a wait of text": {"overhead_ms": "1"},
    "a wait of null": {"overhead_ms": None},
    "a negative wait": {"overhead_ms": -1.0},
    "a wait that is no number": {"overhead_ms": NAN},
    "moved as text": {"moved": "abc"},
    "moved of null": {"moved": [None] * 3},
    "moved too short": {"moved": [0.0]},
}


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "geometry" / "one.json"
    geometry.keep(FOUND, path)
    assert geometry.kept(path) == FOUND
    assert [one.name for one in path.parent.iterdir()] == ["one.json"], "nothing lies beside it"
    found = geometry.kept(path)
    assert found is not None
    Costs(rows=found.rows, contexts=found.contexts, ms=found.ms, overhead_ms=found.overhead_ms)


def test_rows_that_are_no_numbers_are_a_finding_of_a_model_and_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps({**asdict(FOUND), "moved": [NAN] * 3}))
    assert geometry.kept(path) is not None


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_no_probe_would_have_found_is_not_read(damage: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps({**asdict(FOUND), **damage}))
    assert geometry.kept(path) is None


@pytest.mark.parametrize(
    "text", [b"", b'{"rows": [1,', b"[]", b"null", b"1", b"\xff\xfe\x00", b"{}", b"[" * 100_000]
)
def test_what_is_no_geometry_is_not_read(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_bytes(text)
    assert geometry.kept(path) is None


def test_a_folder_that_cannot_be_written_costs_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "geometry"
    blocked.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        geometry.keep(FOUND, blocked / "one.json")
    assert str(blocked) in caplog.text
    assert geometry.kept(blocked / "one.json") is None


def test_a_write_that_breaks_off_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "one.json"
    geometry.keep(FOUND, path)

    def full(self: Path, text: str) -> int:
        with self.open("w") as file:
            file.write(text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    geometry.keep(FOUND, path)
    assert geometry.kept(path) == FOUND
    assert [one.name for one in tmp_path.iterdir()] == ["one.json"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(make_tiny("llama", tmp_path_factory.mktemp("llama")))


@pytest.mark.parametrize("extent", [Extent(), Extent(rows=(1, 2), contexts=(64,), steps=2, turns=1)])
@pytest.mark.parametrize("pages", [3, 4, 5, 7])
def test_the_smallest_pool_is_measured_too_and_is_free_again(
    loaded: LoadedModel, pages: int, extent: Extent, tmp_path: Path
) -> None:
    engine, _ = build.build(loaded, build.Options(kv_bytes=pages * 16384, form=build.TAIL_FORM))
    assert engine.index.pages.count == pages
    clock = iter(range(1_000_000))
    found = geometry.measure(engine.forward, engine.index.pages, extent, lambda: float(next(clock)))
    assert engine.index.pages.free == pages
    geometry.keep(found, tmp_path / "one.json")
    assert geometry.kept(tmp_path / "one.json") == found


@pytest.mark.parametrize("name", ["mamba", "qwen3_5", "granite_hybrid", "gemma3"])
def test_models_with_states_that_cannot_go_back_are_measured(name: str, tmp_path: Path) -> None:
    folder = make_mamba(tmp_path) if name == "mamba" else make_tiny(name, tmp_path)
    engine, _ = build.build(load(folder), build.Options())
    clock = iter(range(1_000_000))
    extent = Extent(rows=(1, 2, 4), steps=2, turns=1)
    found = geometry.measure(engine.forward, engine.index.pages, extent, lambda: float(next(clock)))
    assert len(found.ms[0]) == len(found.rows)
    assert engine.index.pages.free == engine.index.pages.count
