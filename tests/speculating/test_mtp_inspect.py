"""`mtplx inspect`: which sources of drafts a model has, and why one is refused."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
from click.testing import CliRunner
from speculating.heads import random_head
from speculating.mtp_checkpoints import FAMILIES, checkpoint
from speculating.test_mtp_heads import Made

from mtplx.cli import inspect as command
from mtplx.cli.main import main
from mtplx.errors import Exit, ModelFilesError
from worker import inspect
from worker.speculation.mtp.forged import ForgedConfig, save
from worker.speculation.mtp.survey import Checkpoint, tensors_in


def rows(path: Path, own: Path | None = None) -> dict[str, dict]:
    return {row["source"]: row for row in inspect.report(Checkpoint.at(path), own)["sources"]}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_inside_is_told_with_its_family_modules_bytes_and_state(tmp_path, name: str) -> None:
    checkpoint(tmp_path, name)
    found, formula = rows(tmp_path), FAMILIES[name].formula
    assert list(found) == ["prompt lookup", "head of its own", "draft model"]
    head = found["head of its own"]
    assert head["usable"]
    parts = head["what"].split(", ")
    assert parts[1] == ("1 module" if len(formula.modules) == 1 else "3 modules")
    assert parts[-1] == ("post-norm" if formula.takes_normed else "pre-norm")
    tensors = tensors_in(tmp_path)
    names = [one for one in tensors if one.startswith(formula.modules)]
    if formula.modules == ("model.",):
        names = [one for one in names if ".mtp_" in one]
    assert head["bytes"] == sum(tensors[one].bytes for one in names)


def test_why_a_head_is_refused_is_told(tmp_path) -> None:
    (tmp_path / "model").mkdir()
    checkpoint(tmp_path / "model", "mimo", with_head=False)
    (tmp_path / "empty").mkdir()
    found = rows(tmp_path / "model", tmp_path / "empty")
    assert not found["head of its own"]["usable"]
    assert "conversions drop it" in found["head of its own"]["why"]
    apart = found[f"head in {tmp_path / 'empty'}"]
    assert (apart["usable"], apart["bytes"]) == (False, None)
    assert "model.mtp_layers.0.input_proj.weight" in apart["why"]


def test_a_forged_head_is_told_by_the_model_that_it_fits(tmp_path) -> None:
    (tmp_path / "model").mkdir()
    made = Made(tmp_path / "model", "mimo")
    head = random_head(made.loaded)
    for width, fits in ((32, True), (64, False)):
        config = ForgedConfig(
            hidden_size=width,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            rms_norm_eps=1e-6,
            vocab_size=made.loaded.width,
            trunk=made.trunk.fingerprint(),
        )
        own = tmp_path / f"head {width}"
        save(own, config, head)
        assert rows(made.folder, own)[f"head in {own}"]["usable"] is fits
    row = rows(made.folder, tmp_path / "head 64")[f"head in {tmp_path / 'head 64'}"]
    assert row["why"] == "it was made for another model: its hidden_size differ"
    (tmp_path / "head 32" / "model.safetensors").unlink()
    row = rows(made.folder, tmp_path / "head 32")[f"head in {tmp_path / 'head 32'}"]
    assert "holds no weights" in row["why"]


def with_head(folder: Path, header: bytes) -> Path:
    folder.mkdir()
    (folder / "head.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return folder


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"[" * 200_000, "is not a whole safetensors file"),
        (b"[1]", "is not a whole safetensors file"),
        (b'{"a": {"shape": [1], "data_offsets": ["a", "b"]}}', "is not a whole safetensors file"),
        (b'{"a": {"shape": "abc", "data_offsets": [0, 4]}}', "is not a whole safetensors file"),
        (b'{"a": {"shape": [1], "data_offsets": [0, 4]}}', "where its header says"),
    ],
)
def test_headers_that_no_file_should_have_are_told_in_a_sentence(tmp_path, header: bytes, said: str) -> None:
    (tmp_path / "model").mkdir()
    checkpoint(tmp_path / "model", "mimo")
    with pytest.raises(ModelFilesError, match=said):
        inspect.report(Checkpoint.at(tmp_path / "model"), with_head(tmp_path / "head", header))


def test_links_in_circles_and_folders_in_the_place_of_files_are_told(tmp_path) -> None:
    (tmp_path / "model").mkdir()
    checkpoint(tmp_path / "model", "mimo")
    for number, kind in enumerate((lambda file: file.symlink_to(file), Path.mkdir, os.mkfifo)):
        own = tmp_path / f"head {number}"
        own.mkdir()
        kind(own / "model.safetensors")
        with pytest.raises(ModelFilesError, match="no file is there"):
            inspect.report(Checkpoint.at(tmp_path / "model"), own)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mimo", {"num_hidden_layers": "2"}),
        ("step3p5", {"num_hidden_layers": None}),
        ("nemotron_h", {"mtp_hybrid_override_pattern": [1]}),
        ("nemotron_h", {"mtp_hybrid_override_pattern": None, "mtp_layers_block_type": [["moe"]]}),
    ],
)
def test_a_config_that_makes_no_sense_is_told_in_a_sentence(tmp_path, name: str, change: dict) -> None:
    checkpoint(tmp_path, name)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ModelFilesError, match=r"config.json does not describe a .* head"):
        inspect.report(Checkpoint.at(tmp_path))


def test_the_command_draws_a_table_and_prints_json(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("MTPLX_CONFIG", "/dev/null")
    checkpoint(tmp_path, "step3p5")
    told = CliRunner().invoke(main, ["inspect", str(tmp_path), "--json"])
    assert told.exit_code == 0, told.output
    assert json.loads(told.output) == inspect.report(Checkpoint.at(tmp_path))


def test_the_table_has_a_row_for_each_source(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    row = {"source": "head of its own", "usable": True, "what": "MiMo, 1 module", "bytes": 2_500_000, "why": ""}
    refused = {"source": "head in some", "usable": False, "what": "", "bytes": None, "why": "it holds none"}
    command.show({"model": "a model", "sources": [row, refused]})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "a model"
    told = next(line for line in lines if "head of its own" in line)
    assert all(part in told for part in ("yes", "2.5", "MiMo, 1 module"))
    told = next(line for line in lines if "head in some" in line)
    assert all(part in told for part in (" no ", "it holds none"))


def test_without_a_model_or_the_workers_libraries_it_says_what_to_do(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setenv("MTPLX_CONFIG", "/dev/null")
    assert inspect.main([str(tmp_path)]) == Exit.MODEL_FILES
    assert "config.json is missing" in capsys.readouterr().err
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda _: None)
    said = CliRunner().invoke(main, ["inspect", "some"])
    assert said.exit_code == Exit.SETTINGS
    assert "pip install 'mtplx-line[worker]'" in said.output
