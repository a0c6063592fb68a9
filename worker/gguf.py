"""A llama GGUF file becomes an MLX model directory: weights, config and tokenizer, with nothing downloaded.

MLX reads the tensors, quantized ones included. What differs from an mlx-lm checkpoint is put right here: names,
the row order of q and k, and the tokenizer, which GGUF carries as metadata.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mtplx.errors import ModelFilesError
from worker.engine.files import write_tensors

_TOP: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_SPECIAL_TYPE: Final = 3
# MLX reads Q4_0, Q4_1 and Q8_0 blocks, all of them 32 values to a scale.
_GROUP: Final = 32


def convert(source: Path, target: Path) -> None:
    """Write the model of the GGUF file *source* into the existing empty folder *target*.

    Raises:
        ModelFilesError: when the file cannot be read, or is not a llama model with a byte-level BPE tokenizer.
    """
    try:
        loaded: Any = mx.load(str(source), format="gguf", return_metadata=True)
        arrays, metadata = loaded
        config, weights = _config(arrays, metadata), _weights(arrays, metadata)
        tokenizer, tokenizer_config = _tokenizer(metadata), _tokenizer_config(metadata)
    except (RuntimeError, ValueError) as error:
        raise ModelFilesError(f"{source.name} cannot be read as GGUF: {error}") from error
    except KeyError as error:
        raise ModelFilesError(f"{source.name} lacks {error.args[0]}; it is not a llama GGUF file.") from error
    write_tensors(target / "model.safetensors", weights, {"format": "mlx"})
    index = {
        "metadata": {"total_size": sum(array.nbytes for array in weights.values())},
        "weight_map": dict.fromkeys(sorted(weights), "model.safetensors"),
    }
    ends = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    tokenizer.save(str(target / "tokenizer.json"))
    for name, content in (
        ("model.safetensors.index.json", index),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", ends),
        ("config.json", config),
    ):
        (target / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _weights(arrays: dict[str, mx.array], metadata: dict[str, Any]) -> dict[str, mx.array]:
    heads = {
        "attn_q": _number(metadata, "llama.attention.head_count"),
        "attn_k": _number(metadata, "llama.attention.head_count_kv"),
    }
    weights = {}
    for name, array in arrays.items():
        stem, kind = name.rsplit(".", 1)
        part = stem.rsplit(".", 1)[-1]
        rows = split_halves(array, heads[part]) if part in heads else array
        # Scales come as float16, norms as float32: one type throughout keeps activations at that type.
        weights[f"{_module(stem)}.{kind}"] = rows if rows.dtype == mx.uint32 else rows.astype(mx.float16)
    return weights


def split_halves(rows: mx.array, heads: int) -> mx.array:
    """Put interleaved rope rows back into halves.

    llama.cpp pairs row 2i with row 2i+1 of a head [rows, columns]; mlx-lm pairs row i with row i + half. The same
    move holds for packed weights, scales and biases, which all keep one line per row.
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _module(stem: str) -> str:
    if stem in _TOP:
        return _TOP[stem]
    block, layer, part = stem.split(".")
    if block != "blk" or part not in _LAYER:
        raise ValueError(f"it has a tensor {stem}, which no llama model has")
    return f"model.layers.{layer}.{_LAYER[part]}"


def _config(arrays: dict[str, mx.array], metadata: dict[str, Any]) -> dict[str, Any]:
    if metadata["general.architecture"] != "llama":
        raise ValueError(f"its architecture is {metadata['general.architecture']}, not llama")
    heads = _number(metadata, "llama.attention.head_count")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _number(metadata, "llama.embedding_length"),
        "num_hidden_layers": _number(metadata, "llama.block_count"),
        "intermediate_size": _number(metadata, "llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": _number(metadata, "llama.attention.head_count_kv"),
        "head_dim": _number(metadata, "llama.rope.dimension_count"),
        # Float32 in the file: six digits say it, 1e-5 and not 9.99999974e-06.
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon'].item():.6g}"),
        "rope_theta": metadata["llama.rope.freq_base"].item(),
        "max_position_embeddings": _number(metadata, "llama.context_length"),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": "output.weight" not in arrays,
        "bos_token_id": _number(metadata, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _number(metadata, "tokenizer.ggml.eos_token_id"),
    }
    layers = {
        _module(name.removesuffix(".scales")): {"group_size": _GROUP, "bits": _bits(arrays, name)}
        for name in sorted(arrays)
        if name.endswith(".scales")
    }
    if layers:
        config["quantization"] = {"group_size": _GROUP, "bits": 4, **layers}
    return config


def _bits(arrays: dict[str, mx.array], scales: str) -> int:
    packed = arrays[scales.removesuffix("scales") + "weight"]
    return packed.shape[-1] * 32 // (arrays[scales].shape[-1] * _GROUP)


def _tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    if metadata["tokenizer.ggml.model"] != "gpt2" or metadata["tokenizer.ggml.pre"] != "smollm":
        kind = f"{metadata['tokenizer.ggml.model']}/{metadata['tokenizer.ggml.pre']}"
        raise ValueError(f"its tokenizer is {kind}; only gpt2/smollm is converted")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"].tolist()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _SPECIAL_TYPE]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    names = {
        f"{role}_token": tokens[_number(metadata, f"tokenizer.ggml.{word}_token_id")]
        for role, word in roles.items()
        if f"tokenizer.ggml.{word}_token_id" in metadata
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": metadata["tokenizer.chat_template"],
        "model_max_length": _number(metadata, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
        **names,
    }


def _number(metadata: dict[str, Any], name: str) -> int:
    return int(metadata[name].item())
