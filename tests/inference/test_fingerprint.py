"""What changes the hash of a model, what that of a build, and what changes neither."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from tiny_models import Kind, make_llama

from worker.engine import fingerprint
from worker.engine.fingerprint import build_hash, model_hash
from worker.engine.load import LoadedModel

INFO = {
    "lane": "packed",
    "form": "in place",
    "row_invariant": True,
    "prefill_rows": 64,
    "kernels": {"attention": "on", "mma": "on; does not serve lm_head"},
}


@pytest.fixture
def folder(tiny_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_dir, tmp_path / "copy")


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return change


def nudge(tensor: int, value: int) -> Callable[[Path], None]:
    """Another number at *value* of a tensor; counted from the end where negative."""

    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        weights, metadata = mx.load(str(file), return_metadata=True)
        name = sorted(weights)[tensor]
        flat = mx.flatten(weights[name])
        flat[value] = flat[value] + 1
        weights[name] = flat.reshape(weights[name].shape)
        mx.eval(weights)
        mx.save_safetensors(str(file), weights, metadata=metadata)

    return change


def add(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return change


def other_weights(folder: Path) -> None:
    other = make_llama(folder.parent / "other", Kind(seed=2))
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")


CHANGES = {
    "a tokenizer file": edit("tokenizer.json", '"</s>"', '"</S>"'),
    "the chat template": edit("chat_template.jinja", "<|user|>", "<|User|>"),
    "a word of the tokenizer": edit("tokenizer_config.json", "</s>", "<s>"),
    "one template of many": add("additional_chat_templates/tools.jinja", "{{ messages }}"),
    "the end of an answer": add("generation_config.json", '{"eos_token_id": 2}'),
    "the config": edit("config.json", '"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-06'),
    "all weights": other_weights,
    "the first number of a tensor": nudge(0, 0),
    "the last number of a tensor": nudge(-1, -1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_the_model_consists_of_gives_another_hash_when_it_changes(folder, change):
    before = model_hash(folder)
    change(folder)
    assert model_hash(folder) != before


def test_the_middle_of_a_large_tensor_counts(folder):
    before = model_hash(folder)
    weights = mx.load(str(folder / "model.safetensors"))
    large = max(sorted(weights), key=lambda name: weights[name].nbytes)
    assert weights[large].nbytes > 2 * fingerprint._PIECE
    nudge(sorted(weights).index(large), weights[large].size // 2)(folder)
    assert model_hash(folder) != before


def test_a_text_that_moves_from_one_file_to_another_gives_another_hash(folder):
    add("a.txt", "xy")(folder)
    add("b.txt", "")(folder)
    before = model_hash(folder)
    add("a.txt", "x")(folder)
    add("b.txt", "y")(folder)
    assert model_hash(folder) != before


def test_place_age_and_what_is_no_part_of_the_model_change_nothing(tiny_dir, folder):
    for name in ("README.md", "mtplx-manifest.json", ".cache/notes.json"):
        add(name, '{"files": {}}')(folder)
    assert model_hash(folder) == model_hash(tiny_dir)
    moved = folder.rename(folder.parent / "moved")
    assert model_hash(moved) == model_hash(tiny_dir)


def test_shards_count_like_one_file_each(folder):
    weights = mx.load(str(folder / "model.safetensors"))
    mx.eval(weights)
    names = sorted(weights)
    halves = {"model-00001-of-00002": names[::2], "model-00002-of-00002": names[1::2]}
    (folder / "model.safetensors").unlink()
    for name, some in halves.items():
        mx.save_safetensors(str(folder / f"{name}.safetensors"), {key: weights[key] for key in some})
    index = {"weight_map": {key: f"{name}.safetensors" for name, some in halves.items() for key in some}}
    add("model.safetensors.index.json", json.dumps(index))(folder)
    before = model_hash(folder)
    second = folder / "model-00002-of-00002.safetensors"
    whole = second.read_bytes()
    second.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert model_hash(folder) != before


@pytest.mark.parametrize(
    "change",
    [
        {"lane": "module"},
        {"form": "tail"},
        {"row_invariant": False},
        {"prefill_rows": 128},
        {"kernels": {"attention": "wrong: off by 0.2", "mma": "on; does not serve lm_head"}},
    ],
    ids=str,
)
def test_another_lane_gives_another_build(tiny: LoadedModel, change):
    assert build_hash(tiny, {**INFO, **change}) != build_hash(tiny, INFO)


def test_another_number_type_or_library_gives_another_build(tiny: LoadedModel, monkeypatch):
    before = build_hash(tiny, INFO)
    assert build_hash(replace(tiny, dtype="bfloat16"), INFO) != before
    real = fingerprint.version
    for library in fingerprint.LIBRARIES:
        with monkeypatch.context() as patch:
            patch.setattr(fingerprint, "version", lambda name, other=library: real(name) + "1" * (name == other))
            assert build_hash(tiny, INFO) != before, library


def test_times_and_sizes_of_memory_give_no_other_build(tiny: LoadedModel):
    slow = {**INFO, "kernels": {**INFO["kernels"], "mma": "slower: 1.2 ms against 1.1"}}
    slower = {**INFO, "kernels": {**INFO["kernels"], "mma": "slower: 1.3 ms against 1.1"}, "pool": {"pages": 3}}
    assert build_hash(tiny, slow) == build_hash(tiny, slower) != build_hash(tiny, INFO)
