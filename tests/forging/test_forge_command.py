"""`mtplx forge` from a random model to a head's files: what it writes, what it refuses, and how it goes on."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from click.testing import CliRunner
from forging.periodic import make_periodic, write_prompts
from whole.harness import environment

from mtplx.errors import Exit, ModelFilesError, SettingsError
from worker.engine.load import load
from worker.engine.trunk import Trunk
from worker.forge import forge as forging
from worker.forge.__main__ import main as program
from worker.forge.forge import Tools, Wish, forge
from worker.forge.train import CHECKPOINT
from worker.speculation.mtp import forged

LIMIT_S = 400.0
SMALL = {
    "tokens": 3000, "temperatures": "0,0.3", "length": 40, "batch": 64, "step_tokens": 512, "steps": 48, "rate": 5e-3,
    "every": 0.0, "checkpoint_minutes": 1e9,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_periodic(tmp_path_factory.mktemp("periodic"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.txt")


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "mtplx.cli.main", "forge", *arguments],
        env=environment(MTPLX_CONFIG="/dev/null", MTPLX_CACHE_DIR=str(folder)),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


class Lines(list[str]):
    """What a run says; `stop_at` interrupts it there, as Ctrl-C would."""

    stop_at = ""

    def __call__(self, line: str) -> None:
        self.append(line)
        if self.stop_at and self.stop_at in line:
            raise KeyboardInterrupt


def tools(folder: Path, lines: Lines) -> Tools:
    now = iter(range(10**9))
    return Tools(say=lines, clock=lambda: float(next(now)), cache_dir=folder)


def judge(gain: float):
    def judged(*_arguments: object) -> tuple[dict, float]:
        return {"tokens_per_second": {"plain": 10.0, "head": 10.0 * gain, "why": ""}, "gain": gain}, gain

    return judged


def test_a_head_of_a_random_model_learns_its_text(model: Path, prompts: Path, tmp_path: Path) -> None:
    """The whole command in real processes: loss falls, 9 of 10 guesses are right, and the files are a head."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in {**SMALL, "every": 0.2}.items()]
    out = tmp_path / "head"
    done = run(str(model), f"--out={out}", f"--prompts={prompts}", *options, "--force", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(one) for one in re.findall(r"loss ([0-9.]+)", done.stderr)]
    assert losses[-1] < losses[0] - 1
    report = json.loads((out / "forge.json").read_text())
    assert report["acceptance"][0] > 0.9
    assert report["acceptance_before_quantization"][0] > 0.9
    assert report["steps"] == SMALL["steps"]
    assert report["answer_tokens"] >= SMALL["tokens"]
    assert report["wish"]["seed"] == 0
    assert report["worth"]["gain"] <= 1, "on a CPU every row costs a forward"
    assert report["worth"]["tokens_per_second"]["plain"] > 0
    loaded = load(model)
    head = forged.load(out, loaded, Trunk.of(loaded))
    assert head.eh_proj.bits == 8


def test_a_head_that_does_not_pay_is_not_written(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forging, "judged", judge(0.8))
    wish = Wish(model=str(model), out=tmp_path / "head", prompts=prompts, **{**SMALL, "steps": 2, "tokens": 300})
    with pytest.raises(SettingsError, match=r"does not pay on this device \(0.80 x"):
        forge(wish, tools(tmp_path, Lines()))
    files = {path.name for path in wish.out.iterdir()}
    assert files == {"checkpoint"}
    # Nothing is trained again: the head as it is.
    lines = Lines()
    forge(replace(wish, resume=True, force=True), tools(tmp_path, lines))
    assert "going on from step 2" in lines
    assert {"config.json", "model.safetensors", "forge.json"} <= {path.name for path in wish.out.iterdir()}


def test_a_head_that_pays_is_written(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forging, "judged", judge(1.3))
    options = {**SMALL, "steps": 2, "tokens": 300, "bits": 4, "group": 32}
    wish = Wish(model=str(model), out=tmp_path / "head", prompts=prompts, **options)
    lines = Lines()
    forge(wish, tools(tmp_path, lines))
    assert lines[-1] == f"written to {wish.out}"
    assert "13 tokens a second with it, 10 without; 1.30 x plain decoding" in lines[-2]
    assert json.loads((wish.out / "config.json").read_text())["quantization"] == {"group_size": 32, "bits": 4}


def test_an_interrupted_run_goes_on_to_the_same_head(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between two checkpoints, across an epoch's end: the weights are those of a run in one piece."""
    monkeypatch.setattr(forging, "judged", judge(1.3))
    options = {**SMALL, "steps": 7, "tokens": 900, "checkpoint_minutes": 0.0}
    whole = Wish(model=str(model), out=tmp_path / "whole", prompts=prompts, **options)
    forge(whole, tools(tmp_path, Lines()))
    broken = replace(whole, out=tmp_path / "broken")
    lines = Lines()
    lines.stop_at = "step 4 "
    with pytest.raises(KeyboardInterrupt):
        forge(broken, tools(tmp_path, lines))
    again = Lines()
    forge(replace(broken, resume=True), tools(tmp_path, again))
    assert "going on from step 3" in again
    one, other = (mx.load(str(wish.checkpoint / CHECKPOINT)) for wish in (whole, broken))
    assert all(bool(mx.array_equal(one[name], other[name])) for name in one)
    with pytest.raises(ModelFilesError, match="with other options"):
        forge(replace(broken, resume=True, rate=1e-4), tools(tmp_path, Lines()))


def test_wrong_options_are_told_in_a_sentence(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").write_text("only one\n")
    (tmp_path / "wrong").write_text('{"text": "no prompt"}\n')
    given = [str(model), "--out", str(tmp_path / "out")]
    for option, value, words in (
        ("--temperatures", "warm", "give numbers from 0 to 10"),
        ("--prompts", str(tmp_path / "empty"), "two are the least"),
        ("--prompts", str(tmp_path / "wrong"), "line 1 of"),
    ):
        done = CliRunner().invoke(program, [*given, option, value])
        assert done.exit_code == Exit.SETTINGS
        told = capfd.readouterr().err + done.stderr
        assert words in told
        assert told.startswith("mtplx-forge: ")
    # Through `mtplx forge`, which starts the same program.
    done = run(*given, "--resume", folder=tmp_path)
    assert done.returncode == Exit.SETTINGS
    assert done.stderr.startswith("mtplx-forge: There is nothing to resume in ")
    assert "Traceback" not in done.stderr


def test_an_out_that_holds_a_model_or_cannot_be_written_is_refused_before_anything_is_made(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    (tmp_path / "file").write_text("")
    for out, code, words in (
        (model, Exit.SETTINGS, "choose a folder of the head's own"),
        (tmp_path / "file" / "below", Exit.FAILED, "choose another --out"),
    ):
        done = CliRunner().invoke(program, [str(model), "--out", str(out)])
        assert done.exit_code == code, done.exception
        assert words in capfd.readouterr().err + done.stderr
    assert {file.name: file.read_bytes() for file in model.iterdir()} == before


def test_a_checkpoint_of_another_model_is_refused(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forging, "judged", judge(1.3))
    wish = Wish(model=str(model), out=tmp_path / "head", prompts=prompts, **{**SMALL, "steps": 2, "tokens": 300})
    forge(wish, tools(tmp_path, Lines()))
    other = tmp_path / "other"
    shutil.copytree(model, other)
    weights = mx.load(str(other / "model.safetensors"))
    weights["model.norm.weight"] = weights["model.norm.weight"] * 2
    mx.save_safetensors(str(other / "model.safetensors"), weights, metadata={"format": "mlx"})
    with pytest.raises(ModelFilesError, match=r"with other options \(trunk\)"):
        forge(replace(wish, model=str(other), resume=True), tools(tmp_path, Lines()))


def test_a_disk_that_is_full_is_told_and_leaves_no_head(model: Path, prompts: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for it: writing fails in the same way, half-way."""
    small = [f"--{name.replace('_', '-')}={value}" for name, value in {**SMALL, "steps": 1, "tokens": 300}.items()]
    command = [sys.executable, "-P", "-m", "worker.forge", str(model), f"--out={tmp_path / 'head'}", *small]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 60 && exec "$@"', "-", *command, f"--prompts={prompts}", "--force"],
        env=environment(MTPLX_CONFIG="/dev/null", MTPLX_CACHE_DIR=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == Exit.FAILED, done.stderr
    assert "choose another --out" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "head" / "model.safetensors").exists()
