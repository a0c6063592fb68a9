"""Model directories that are not whole are refused at load, by the name of the file, with their own exit code."""

from __future__ import annotations

import json
import shutil
from functools import partial

import mlx.core as mx
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from mlx_lm import utils as mlx_lm_utils
from tiny_models import make_llama, make_mamba, make_tiny

from mtplx.errors import Exit, ModelFilesError
from worker.engine.files import model_name
from worker.engine.load import check_model_files, load, model_dir, resolve_model


@pytest.fixture
def model(tiny_dir, tmp_path):
    return shutil.copytree(tiny_dir, tmp_path / "model")


@pytest.fixture
def sharded(model):
    weights = mx.load(str(model / "model.safetensors"))
    (model / "model.safetensors").unlink()
    names, weight_map = sorted(weights), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        mx.save_safetensors(str(model / file), {name: weights[name] for name in part}, metadata={"format": "mlx"})
        weight_map |= dict.fromkeys(part, file)
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return model


def refused(path, match):
    with pytest.raises(ModelFilesError, match=match) as caught:
        load(path)
    assert caught.value.exit_code == Exit.MODEL_FILES == 3


def test_a_whole_model_passes_sharded_or_not(model, tiny):
    check_model_files(model)
    assert tiny.limits.vocabulary < tiny.width
    assert (tiny.context, tiny.eos_ids, tiny.dtype) == (512, {1}, "float32")


def test_a_whole_sharded_model_passes(sharded):
    load(sharded)


@pytest.mark.parametrize("make", [make_llama, make_mamba, partial(make_tiny, "qwen3_5")])
def test_a_tiny_model_is_the_same_one_each_time_it_is_made(make, tmp_path):
    """What is random before must not reach it: answers of tests would change from run to run."""
    made = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        made.append(mx.load(str(make(tmp_path / name) / "model.safetensors")))
        mx.random.normal((3,))
    assert all(mx.array_equal(array, made[1][name]) for name, array in made[0].items())


def test_a_deleted_shard_is_named(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    refused(sharded, "model-00002-of-00002.safetensors is missing")


def test_a_deleted_shard_is_named_without_an_index_too(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    (sharded / "model-00001-of-00002.safetensors").unlink()
    refused(sharded, "model-00001-of-00002.safetensors is missing")


def test_an_index_that_names_a_missing_file_is_refused(sharded):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    index["weight_map"]["more"] = "model-00003-of-00003.safetensors"
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(sharded, "model-00003-of-00003.safetensors is missing")


@pytest.mark.parametrize("kept", [0, 4, 8, 200, -1])
def test_a_truncated_shard_is_named(sharded, kept):
    shard = sharded / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:kept])
    refused(sharded, "model-00002-of-00002.safetensors")


def test_a_shard_with_bytes_too_many_is_named(model):
    with (model / "model.safetensors").open("ab") as file:
        file.write(b"x")
    refused(model, "model.safetensors has")


def test_weights_replaced_by_zeroes_are_refused(model):
    (model / "model.safetensors").write_bytes(bytes(5000))
    refused(model, "not a whole safetensors file")


@pytest.mark.parametrize("place", ["model.safetensors.incomplete", ".cache/huggingface/download/x.incomplete"])
def test_an_unfinished_download_is_named(model, place):
    (model / place).parent.mkdir(parents=True, exist_ok=True)
    (model / place).touch()
    refused(model, "unfinished download")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", '{"a": ', "[]", "\x00"])
def test_json_that_cannot_be_read_is_named(model, name, content):
    (model / name).write_text(content)
    refused(model, name)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(model, name):
    (model / name).unlink()
    refused(model, name.replace("model.safetensors", "safetensors"))


def test_a_checkpoint_that_brings_code_is_refused_and_the_code_not_run(model):
    (model / "own.py").write_text("raise SystemExit('ran')")
    config = json.loads((model / "config.json").read_text()) | {"model_file": "own.py"}
    (model / "config.json").write_text(json.dumps(config))
    refused(model, "own.py")


@pytest.mark.parametrize(
    "change",
    [{"model_type": "no_such_model"}, {"num_hidden_layers": 3}, {"hidden_size": 128}, {"hidden_size": None}],
)
def test_a_config_that_does_not_fit_its_weights_is_refused(model, change):
    config = json.loads((model / "config.json").read_text()) | change
    (model / "config.json").write_text(json.dumps(config))
    refused(model, "cannot load")


def test_a_known_name_that_is_absent_says_what_to_run(tmp_path):
    with pytest.raises(ModelFilesError, match="run: mtplx pull smollm2-135m"):
        resolve_model("smollm2-135m", tmp_path)


def test_names_directories_and_hub_ids_resolve(tiny_dir, tmp_path, monkeypatch):
    assert resolve_model(str(tiny_dir), tmp_path) == tiny_dir
    shutil.copytree(tiny_dir, model_dir("smollm2-135m", tmp_path))
    assert resolve_model("smollm2-135m", tmp_path) == model_dir("smollm2-135m", tmp_path)
    monkeypatch.setattr(mlx_lm_utils, "_download", lambda name: tiny_dir if name == "owner/model" else None)
    assert resolve_model("owner/model", tmp_path) == tiny_dir


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("offline"), OSError("no route"), ValueError("odd")])
def test_a_hub_that_cannot_be_reached_says_what_to_do(tmp_path, monkeypatch, error):
    def fail(_name):
        raise error

    monkeypatch.setattr(mlx_lm_utils, "_download", fail)
    with pytest.raises(ModelFilesError, match=r"owner/model cannot be fetched.*network"):
        resolve_model("owner/model", tmp_path)


@pytest.mark.parametrize("name", ["nowhere", "/no/such/dir", "../up", "a/b/c", ""])
def test_a_name_that_is_nothing_lists_what_is_taken(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mlx_lm_utils, "_download", lambda _: pytest.fail("asked the hub"))
    with pytest.raises(ModelFilesError):
        resolve_model(name, tmp_path)


def test_a_single_file_is_refused_in_favour_of_its_directory(tiny_dir, tmp_path):
    with pytest.raises(ModelFilesError, match="is a file"):
        resolve_model(str(tiny_dir / "config.json"), tmp_path)


def test_a_hub_snapshot_is_called_by_its_id(tmp_path):
    assert model_name(tmp_path / "models--owner--some--name" / "snapshots" / "0a1b") == "owner/some--name"
    assert model_name(tmp_path / "mine") == "mine"


def test_a_model_made_for_sixteen_bits_runs_in_float32_on_a_cpu(tmp_path):
    path = make_llama(tmp_path)
    weights = {name: array.astype(mx.bfloat16) for name, array in mx.load(str(path / "model.safetensors")).items()}
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    loaded = load(path)
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    assert loaded.dtype == ("float32" if on_cpu else "bfloat16")
