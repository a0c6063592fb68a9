"""Where heads are found, and what is said where one is missing, damaged or another's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from speculating.mtp_checkpoints import FAMILIES, checkpoint, save
from speculating.test_mtp_heads import Made, run

from mtplx.errors import ModelFilesError
from worker.engine.load import load
from worker.engine.trunk import Trunk
from worker.speculation.mtp.survey import Checkpoint, survey
from worker.speculation.mtp.weights import load_head


@pytest.fixture
def made(tmp_path) -> Made:
    return Made(tmp_path, "qwen3_5")


def head_of(made: Made) -> dict[str, np.ndarray]:
    """The head's tensors, as published."""
    module = made.formula.modules[0]
    return {name: one.astype(np.float32) for name, one in made.raw.items() if name.startswith(module)}


def apart(made: Made, folder: Path, head: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    save(folder / "model.safetensors", head)
    return folder


def shifted(head: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: one + 1 if one.ndim == 1 else one for name, one in head.items()}


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].formula.shift])
@pytest.mark.parametrize("form", ["raw", "shifted"])
@pytest.mark.parametrize("prefix", ["as published", "none"])
def test_a_head_in_a_directory_of_its_own_is_read_with_either_norms(tmp_path, name, form, prefix) -> None:
    (tmp_path / "model").mkdir()
    made = Made(tmp_path / "model", name)
    head = {
        path: one.astype(np.float32) for path, one in made.raw.items() if path.startswith(made.formula.modules)
    }
    if form == "shifted":
        head = shifted(head)
    if prefix == "none":
        if made.formula.modules[0] != "mtp.":
            return
        head = {path.removeprefix("mtp."): one for path, one in head.items()}
    own = apart(made, tmp_path / "head", head)
    errors = run(made, load_head(made.folder, made.loaded, made.trunk, own))
    assert max(errors) < 1e-5


@pytest.mark.parametrize("form", ["raw", "shifted"])
def test_norms_are_told_once_where_those_before_the_projection_mislead(tmp_path, form) -> None:
    """Right weights of these two may lie far below 1, those less 1 above 0."""
    (tmp_path / "model").mkdir()
    made = Made(tmp_path / "model", "qwen3_5")
    for name, level in (("pre_fc_norm_embedding", -0.7), ("pre_fc_norm_hidden", -0.5), ("norm", 0.9)):
        made.raw[f"mtp.{name}.weight"] += level - made.raw[f"mtp.{name}.weight"].mean()
    head = head_of(made)
    own = apart(made, tmp_path / "head", shifted(head) if form == "shifted" else head)
    errors = run(made, load_head(made.folder, made.loaded, made.trunk, own))
    assert max(errors) < 1e-5


def test_a_quantised_head_keeps_the_bits_of_each_layer(tmp_path) -> None:
    (tmp_path / "model").mkdir()
    made = Made(tmp_path / "model", "qwen3_5_moe")
    dense = made.head()

    def bits(path: str, module: nn.Module) -> bool | dict[str, int]:
        # Rows of 24 have no groups of 32. Routers have more bits than the rest.
        if not hasattr(module, "to_quantized") or "down_proj" in path:
            return False
        return {"group_size": 32, "bits": 8 if path.endswith("mlp.gate") else 4}

    nn.quantize(dense, class_predicate=bits)
    names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "block": "layers.0"}
    packed = {}
    for path, one in tree_flatten(dense.parameters()):
        first, _, rest = path.partition(".")
        packed[f"language_model.mtp.{names.get(first, first)}.{rest}"] = one
    own = tmp_path / "head"
    own.mkdir()
    mx.save_safetensors(str(own / "model.safetensors"), packed)
    (own / "config.json").write_text(json.dumps({"model_type": "qwen3_5_mtp", "quantization": {"bits": 4}}))
    head = load_head(made.folder, made.loaded, made.trunk, own)
    assert head.eh_proj.bits == 4
    assert head.block.mlp.gate.bits == 8
    assert isinstance(head.block.mlp.switch_mlp.down_proj.weight, mx.array)
    same = dict(tree_flatten(head.parameters()))
    for path, one in tree_flatten(dense.parameters()):
        assert mx.array_equal(same[path], one), path


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversion_that_lost_its_head_is_told_what_to_do(tmp_path, name) -> None:
    checkpoint(tmp_path, name, with_head=False)
    loaded = load(tmp_path)
    with pytest.raises(ModelFilesError, match=r"declares a head .* files hold none.* --mtp PATH"):
        load_head(tmp_path, loaded, Trunk.of(loaded), None)


def test_a_directory_without_a_head_is_told_what_was_looked_for(made: Made, tmp_path) -> None:
    own = apart(made, tmp_path / "head", {"some.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(ModelFilesError, match=r"holds no tensors of a Qwen3.5 head, such as mtp.fc.weight"):
        load_head(made.folder, made.loaded, made.trunk, own)
    with pytest.raises(ModelFilesError, match="is not a directory"):
        load_head(made.folder, made.loaded, made.trunk, tmp_path / "nowhere")


def test_missing_superfluous_and_wrong_tensors_are_named(made: Made, tmp_path) -> None:
    head = head_of(made)
    gone = {name: one for name, one in head.items() if "k_proj" not in name}
    more = {**head, "mtp.layers.0.self_attn.sink": np.zeros(4, np.float32)}
    other = {name: one[:, :16] if name == "mtp.fc.weight" else one for name, one in head.items()}
    for number, (tensors, said) in enumerate(
        (
            (gone, r"it lacks block.self_attn.k_proj.weight"),
            (more, r"it has block.self_attn.sink, which its kind does not know"),
            (other, r"eh_proj.weight has the shape \(32, 16\), not \(32, 64\)"),
        )
    ):
        own = apart(made, tmp_path / f"head {number}", tensors)
        with pytest.raises(ModelFilesError, match=said):
            load_head(made.folder, made.loaded, made.trunk, own)


def test_an_embedding_or_lm_head_of_another_vocabulary_is_refused(tmp_path) -> None:
    _, raw = checkpoint(tmp_path, "glm4_moe")
    loaded = load(tmp_path)
    for part in ("embed_tokens", "shared_head.head"):
        own = tmp_path / part
        own.mkdir()
        head = {name: one.astype(np.float32) for name, one in raw.items() if ".layers.2." in name}
        (name,) = (name for name in head if name.endswith(f"{part}.weight"))
        save(own / "model.safetensors", {**head, name: head[name][:-1]})
        with pytest.raises(ModelFilesError, match=r"has \d+ ids, not \d+"):
            load_head(tmp_path, loaded, Trunk.of(loaded), own)


def test_damaged_files_are_named(made: Made, tmp_path) -> None:
    own = apart(made, tmp_path / "head", head_of(made))
    file = own / "model.safetensors"
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ModelFilesError, match=r"is not a whole safetensors file"):
        load_head(made.folder, made.loaded, made.trunk, own)


def test_heads_in_a_shard_of_their_own_are_found_and_copies_are_not_kept_twice(tmp_path) -> None:
    _, raw = checkpoint(tmp_path, "deepseek_v32")
    head = {name: one.astype(np.float32) for name, one in raw.items() if ".layers.2." in name}
    trunk = {name: one.astype(np.float32) for name, one in raw.items() if name not in head}
    (tmp_path / "model.safetensors").unlink()
    save(tmp_path / "model-00001-of-00002.safetensors", trunk)
    save(tmp_path / "model-00002-of-00002.safetensors", head)
    found = survey(Checkpoint.at(tmp_path))
    assert found.bytes == sum(one.nbytes for one in head.values())
    assert {found.tensors[name].file.name for name in found.modules[0].values()} == {
        "model-00002-of-00002.safetensors"
    }
    loaded = load(tmp_path)
    module = load_head(tmp_path, loaded, Trunk.of(loaded), None)
    assert not {"embedding", "head"} & module.keys()


def test_models_of_unknown_kinds_have_no_head(made: Made, tmp_path) -> None:
    other = tmp_path / "other"
    shutil.copytree(made.folder, other, ignore=lambda *_: ["head", "other"])
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    assert survey(Checkpoint.at(other)).why.startswith("no head is known for models of type llama")
