"""A tiny model of every kind that the engine tells apart: random weights from fixed seeds, in checkpoints.

The weights are drawn so wide that attention chooses, greedy text varies, and a wrong norm, bias or rope shows.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm import utils as mlx_lm_utils

from tiny_models.classic import PADDED_ROWS, Kind, make_tokenizer

CONTEXT = 1024
GAIN = 3.0

_BLOCK: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": CONTEXT,
}
_LLAMA = {**_BLOCK, "model_type": "llama", "tie_word_embeddings": True}
_QWEN3 = {
    **_BLOCK,
    "model_type": "qwen3",
    "head_dim": 32,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_HYBRID = {
    **_BLOCK,
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 3,
    "attention_bias": False,
    "embedding_multiplier": 4.0,
    "attention_multiplier": 0.25,
    "logits_scaling": 1.0,
    "residual_multiplier": 0.7,
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_proj_bias": False,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_conv_bias": True,
}
_DELTA = {
    "model_type": "qwen3_5",
    "text_config": {
        **_BLOCK,
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 3,
        "head_dim": 32,
        "full_attention_interval": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": True,
        "rope_parameters": {"type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
    },
}
_LATENT = {
    **_BLOCK,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "moe_intermediate_size": 48,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}
_GEMMA3 = {
    **_BLOCK,
    "model_type": "gemma3_text",
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 40,
    "sliding_window_pattern": 2,
}

# The families, each a name and its config; where the width is not told the head has padded rows.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    # The window stands in real configs of mistral and means nothing without layer types.
    "mistral": {
        **_LLAMA, "model_type": "mistral", "head_dim": 32, "sliding_window": 16, "tie_word_embeddings": False,
    },
    "qwen2": {**_LLAMA, "model_type": "qwen2", "rope_theta": 1e6},
    "qwen3": _QWEN3,
    "smollm3": {**_LLAMA, "model_type": "smollm3", "no_rope_layer_interval": 2},
    "gemma3": _GEMMA3,
    "qwen3_5": _DELTA,
    "granite_hybrid": _HYBRID,
}  # fmt: skip


def _heads(dim: int, heads: int = 2, kv_heads: int = 1) -> dict[str, Any]:
    return {**_LLAMA, "head_dim": dim, "num_attention_heads": heads, "num_key_value_heads": kv_heads}


def _rope(**scaling: Any) -> dict[str, Any]:
    return {**_LLAMA, "rope_scaling": scaling}


def _quantized(config: dict[str, Any], bits: int, group: int) -> dict[str, Any]:
    return {**config, "quantization": {"group_size": group, "bits": bits}}


VARIANTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": _LATENT,
    "phi3": {**_LLAMA, "model_type": "phi3", "tie_word_embeddings": False},
    "llama-untied": {**_LLAMA, "tie_word_embeddings": False},
    "llama-bias": {**_LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama-window": {**_LLAMA, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 40},
    "llama-one-to-one": _heads(16, 4, 4),
    "llama-four-to-one": _heads(16, 4, 1),
    "llama-64": _heads(64),
    "llama-80": _heads(80, 2, 2),
    "llama-96": _heads(96),
    "llama-128": _heads(128, 4, 1),
    "llama-256": _heads(256),
    "llama-traditional": {**_LLAMA, "rope_traditional": True},
    "llama-linear": _rope(type="linear", factor=4.0),
    "llama-llama3": _rope(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=128,
    ),
    "llama-yarn": _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=128, beta_fast=8),
    "llama-4bit-32": _quantized(_LLAMA, 4, 32),
    "llama-4bit-64": _quantized(_LLAMA, 4, 64),
    "llama-8bit": _quantized({**_LLAMA, "tie_word_embeddings": False}, 8, 64),
    "qwen3-4bit-32": _quantized(_QWEN3, 4, 32),
    "qwen3-4bit-64": _quantized(_QWEN3, 4, 64),
    "qwen3-8bit": _quantized(_QWEN3, 8, 32),
}  # fmt: skip

ZOO: dict[str, dict[str, Any]] = {**FAMILIES, **VARIANTS}


def make_tiny(name: str, folder: Path) -> Path:
    """Saves the model of that name in *folder*."""
    rows = make_tokenizer(folder, Kind()) + (0 if name == "qwen3" else PADDED_ROWS)
    config = {**ZOO[name], "vocab_size": rows, "eos_token_id": 1}
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], "vocab_size": rows}
    # As a copy: some models write into what they are given.
    (folder / "config.json").write_text(json.dumps(config))
    model_class, args_class = mlx_lm_utils._get_classes(config)
    model = model_class(args_class.from_dict(json.loads(json.dumps(config))))
    model.update(tree_map_with_path(_drawn, model.parameters()))
    if "quantization" in config:
        nn.quantize(model, **config["quantization"])
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def _drawn(path: str, weight: mx.array) -> mx.array:
    """What stands at *path*: by the path, so that a new weight changes no other one."""
    noise = mx.random.normal(weight.shape, key=mx.random.key(zlib.crc32(path.encode())))
    if path.endswith("A_log"):
        # The decay of a recurrent state; the module's own values forget at a useful pace.
        return mx.linspace(-1.0, 1.5, weight.size).reshape(weight.shape)
    if weight.ndim == 1:
        # Norms stay near their neutral value, biases leave 0.
        return weight + noise * 0.3
    return noise * GAIN / math.sqrt(math.prod(weight.shape[1:]) if "conv" in path else weight.shape[-1])
