"""`mtplx probe` in real processes, on the CPU: what applies is measured, and what does not is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny_models import Kind, make_llama, make_mamba
from whole.harness import environment

from mtplx.cli import probe
from mtplx.cli.main import main
from mtplx.errors import Exit

LIMIT_S = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("tiny"), Kind(context=512))


def mtplx(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "mtplx.cli.main", *arguments],
        env=environment(MTPLX_CONFIG="/dev/null", MTPLX_CACHE_DIR=str(folder)),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_the_table_says_what_does_not_apply(model: Path, tmp_path: Path) -> None:
    done = mtplx("probe", "--kernels", "--model", str(model), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    title, why = done.stdout.splitlines()
    assert title.endswith("(cpu), cache: tail")
    assert why == "MLX runs on the CPU here"
    assert done.stderr.splitlines() == ["loading the model", "checking the kernels"]


def test_the_report_is_one_file_with_every_figure(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = mtplx("probe", "--report", str(file), "--model", str(model), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr.endswith(f"written to {file}\n")
    report = json.loads(file.read_text())
    assert report["system"]["mlx"]
    assert report["device"]["kind"] == "cpu"
    assert report["model"]["weight_bytes"] > 0
    assert set(report["start_s"]) == {"load", "pack"}
    assert report["kernels"] == {}
    assert report["in_place"] == {"does_not_apply": "MLX runs on the CPU here"}
    assert set(report["cost_ms"]["waiting"]["64"]) == {"1", "4", "16"}
    assert report["row_invariance"]["promised"] is False
    assert report["step"]["nodes"] > 50
    assert report["memory"]["peak_bytes"] >= report["memory"]["active_bytes"] > 0
    assert report["page_bytes"] > 0


def test_a_model_that_kernels_do_not_serve_is_told_as_json(tmp_path: Path) -> None:
    other = make_mamba(tmp_path / "mamba")
    done = mtplx("probe", "--json", "--model", str(other), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["kernels"] == {}
    assert report["why"].startswith("kernels serve the dense family alone, and its parts are not")


def test_a_missing_model_is_refused_by_name(tmp_path: Path) -> None:
    done = mtplx("probe", folder=tmp_path)
    assert done.returncode == Exit.MODEL_FILES
    assert f"mtplx-probe: smollm2-135m is not in {tmp_path}; run: mtplx pull smollm2-135m" in done.stderr


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "missing" / "report.json"
    done = mtplx("probe", "--report", str(file), "--model", str(model), folder=tmp_path)
    assert done.returncode == Exit.SETTINGS
    assert done.stderr == f"mtplx-probe: {file} cannot be written: No such file or directory\n"


def test_without_the_workers_libraries_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("MTPLX_CONFIG", "/dev/null")
    said = CliRunner().invoke(main, ["probe"])
    assert said.exit_code == Exit.SETTINGS
    assert "pip install 'mtplx-line[worker]'" in said.output


def test_the_table_has_a_row_for_each_kernel(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    checks = {"ok": True, "error": 0.0012, "bound": 0.02, "alone_us": {"kernel": 3.0, "plain": 5.5}}
    probe.show(
        {
            "model": {"name": "some"},
            "device": {"kind": "cuda", "device_name": "a GPU"},
            "form": "in place",
            "kernels": {
                "matvec": {**checks, "state": "slower", "step_ms": {"on": 1.25, "off": 1.0}},
                "in place": {"state": "on"},
            },
        }
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "some on a GPU (cuda), cache: in place"
    row = next(line for line in lines if "matvec" in line)
    for part in ("yes", "0.0012", "0.02", "5.5", "1.25", "slower"):
        assert part in row
    assert any("in place" in line and " on " in line for line in lines[1:])


def test_what_rows_cost_is_printed_and_kept_for_the_worker(model: Path, tmp_path: Path) -> None:
    done = mtplx("probe", "--rows", "--model", str(model), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    head, *lines = done.stdout.splitlines()
    assert head.split() == ["rows", "1", "2", "3", "4", "6", "8", "12", "16"]
    assert any(line.startswith("  c(R)") and line.split()[1] == "1.00" for line in lines)
    assert any(line.startswith("moved") for line in lines)
    (kept,) = (tmp_path / "geometry").iterdir()
    assert json.loads(kept.read_text())["rows"] == [1, 2, 3, 4, 6, 8, 12, 16]
