"""Tiny checkpoints of the families that bring heads, random, with the tensor names of the published ones."""

from __future__ import annotations

import copy
import json
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils
from speculating.mtp_formula import (
    Formula,
    Raw,
    ernie_block,
    exaone_block,
    glm_block,
    latent_block,
    mimo_block,
    mimo_v2_block,
    nemotron_block,
    qwen_block,
    step_block,
)
from tiny_models.classic import Kind, make_tokenizer

K = 32
_BASE: dict[str, Any] = {
    "hidden_size": K, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 256, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
}  # fmt: skip
_DELTA = {
    "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
}  # fmt: skip
_SHARED_EXPERT = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
_GROUPS = {
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2,
    "topk_group": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "first_k_dense_replace": 1,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}  # fmt: skip
_QWEN35 = {
    **_BASE, **_DELTA, "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
}  # fmt: skip
_QWEN_NAMES = {
    "e": "pre_fc_norm_embedding.weight", "h": "pre_fc_norm_hidden.weight", "proj": "fc.weight", "norm": "norm.weight",
}  # fmt: skip
_DEEPSEEK_NAMES = {
    "e": "enorm.weight", "h": "hnorm.weight", "proj": "eh_proj.weight", "norm": "shared_head.norm.weight",
    "head": "shared_head.head.weight", "embed": "embed_tokens.weight",
}  # fmt: skip
_STEP_NAMES = {
    **_DEEPSEEK_NAMES, "norm": "transformer.shared_head.norm.weight", "head": "transformer.shared_head.output.weight",
}  # fmt: skip
_MIMO_NAMES = {
    "e": "token_layernorm.weight", "h": "hidden_layernorm.weight", "proj": "input_proj.weight",
    "norm": "final_layernorm.weight",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Family:
    """config: of the model. like: the layer of mlx-lm's module that the head's block is built as, in a model whose
    config is changed by *block*. own: which outer parts the head has of its own. raw: from mlx-lm's names to theirs.
    """

    config: dict[str, Any]
    formula: Formula
    like: str
    raw: Callable[[Raw], Raw]
    block: dict[str, Any] = field(default_factory=dict)
    own: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    rename: tuple[str, str] = ("", "")


def one_by_one(weights: Raw, stacked: str = "switch_mlp", names: dict[str, str] | None = None) -> Raw:
    """Experts as published: each with tensors of its own."""
    found = {}
    for name, weight in weights.items():
        head, mark, rest = name.partition(f".{stacked}.")
        if not mark:
            found[name] = weight
            continue
        part, kind = rest.split(".")
        part = (names or {}).get(part, part)
        found |= {f"{head}.experts.{e}.{part}.{kind}": one for e, one in enumerate(weight)}
    return found


def fused(weights: Raw) -> Raw:
    """Experts as published: all in two tensors."""
    found = {name: weight for name, weight in weights.items() if "switch_mlp" not in name}
    for name in weights:
        if name.endswith("switch_mlp.gate_proj.weight"):
            layer = name.removesuffix("switch_mlp.gate_proj.weight")
            both = [weights[f"{layer}switch_mlp.{part}_proj.weight"] for part in ("gate", "up")]
            found[f"{layer}experts.gate_up_proj"] = np.concatenate(both, 1)
            found[f"{layer}experts.down_proj"] = weights[f"{layer}switch_mlp.down_proj.weight"]
    return found


def centred(weights: Raw) -> Raw:
    """Norms less 1, convolutions unturned; but for the gated norm of the recurrent layers."""
    found = {}
    for name, weight in weights.items():
        if "conv1d" in name:
            found[name] = np.moveaxis(weight, 2, 1)
        else:
            found[name] = weight - 1 if "norm" in name and "linear_attn" not in name else weight
    return found


def latent(weights: Raw) -> Raw:
    """Keys and values come from the latent by one projection."""
    found = {
        name: weight for name, weight in weights.items() if ".embed_q." not in name and ".unembed_out." not in name
    }
    for name in weights:
        if name.endswith("embed_q.weight"):
            layer = name.removesuffix("embed_q.weight")
            both = np.concatenate([weights[name].swapaxes(1, 2), weights[f"{layer}unembed_out.weight"]], 1)
            found[f"{layer}kv_b_proj.weight"] = both.reshape(-1, both.shape[-1])
    return one_by_one(found)


def step(weights: Raw) -> Raw:
    """Step-3.5: experts stay stacked, under other names."""
    renames = (
        (".mlp.switch_mlp.", ".moe."), (".mlp.gate.gate.", ".moe.gate."), (".mlp.gate.router_bias", ".moe.router_bias"),
        (".mlp.share_expert.", ".share_expert."),
    )  # fmt: skip
    for ours, theirs in renames:
        weights = {name.replace(ours, theirs): weight for name, weight in weights.items()}
    return centred(weights)


def exaone(weights: Raw) -> Raw:
    """The bias stands beside the gate."""
    found = {name.replace("gate.e_score_correction", "e_score_correction"): one for name, one in weights.items()}
    return one_by_one(found)


def qwen35(prefix: str, experts: Callable[[Raw], Raw]) -> Callable[[Raw], Raw]:
    def raw(weights: Raw) -> Raw:
        named = {name.replace("language_model.", prefix, 1): one for name, one in weights.items()}
        named = {name.replace(f"{prefix}model.", "model.language_model.", 1): one for name, one in named.items()}
        return centred(experts(named))

    return raw


def _qwen(last: str = "model.") -> Formula:
    return Formula(
        block=qwen_block, modules=("mtp.",), names=_QWEN_NAMES, inner="layers.0.", shift=1.0, last=f"{last}norm.weight",
        embed=f"{last}embed_tokens.weight", epsilon=lambda c: c.get("text_config", c)["rms_norm_eps"],
    )  # fmt: skip


_VL = "model.language_model."
_V3 = Formula(block=latent_block, modules=("model.layers.2.",), names=_DEEPSEEK_NAMES, zeroes=True)
_SLIDING = ["full_attention", "sliding_attention"]
_GLM = {
    "head_dim": 16,
    "use_qk_norm": True,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
}
_EXAONE = {
    **_BASE, "model_type": "exaone_moe", "head_dim": 16, "num_experts": 8, "num_shared_experts": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1, "sliding_window": 5,
    "layer_types": _SLIDING[::-1], "is_moe_layer": [False, True], "routed_scaling_factor": 2.5,
}  # fmt: skip
_EXAONE_HEAD = Formula(block=exaone_block, modules=("mtp.",), names=_QWEN_NAMES, inner="layers.0.")

FAMILIES: dict[str, Family] = {
    "qwen3_next": Family(
        config={
            **_BASE, **_DELTA, **_SHARED_EXPERT, "model_type": "qwen3_next", "partial_rotary_factor": 0.5,
        },
        formula=_qwen(), like="model.layers.1.", raw=lambda w: centred(one_by_one(w)),
    ),
    "qwen3_5": Family(
        config={"model_type": "qwen3_5", "text_config": _QWEN35},
        formula=_qwen(_VL), like="language_model.model.layers.1.", raw=qwen35("", one_by_one),
    ),
    "qwen3_5_moe fused": Family(
        config={"model_type": "qwen3_5_moe", "text_config": {**_QWEN35, **_SHARED_EXPERT}},
        formula=_qwen(_VL), like="language_model.model.layers.1.", raw=qwen35("", fused),
    ),
    "deepseek_v3": Family(
        # mlx-lm drops the tensors of layer 61 alone; dense below, for they are many.
        config={
            **_BASE, **_GROUPS, **_LATENT, "model_type": "deepseek_v3", "num_hidden_layers": 61,
            "first_k_dense_replace": 61,
        },
        formula=replace(_V3, modules=("model.layers.61.",)), like="model.layers.1.", raw=latent,
        block={"first_k_dense_replace": 1, "num_hidden_layers": 2}, copies=("head", "embed"),
    ),
    "deepseek_v32": Family(
        config={
            **_BASE, **_GROUPS, **_LATENT, "model_type": "deepseek_v32", "index_topk": 5, "index_n_heads": 12,
            "index_head_dim": 16,
        },
        formula=_V3, like="model.layers.1.", raw=latent, copies=("head", "embed"),
    ),
    "glm4_moe": Family(
        config={**_BASE, **_GROUPS, **_GLM, "model_type": "glm4_moe"},
        formula=Formula(block=glm_block, modules=("model.layers.2.",), names=_DEEPSEEK_NAMES, zeroes=True),
        like="model.layers.1.", raw=one_by_one, copies=("embed",), own=("head",),
    ),
    "glm4_moe_lite": Family(
        config={**_BASE, **_GROUPS, **_LATENT, "model_type": "glm4_moe_lite"},
        formula=_V3, like="model.layers.1.", raw=latent, own=("head", "embed"),
    ),
    "mimo": Family(
        config={**_BASE, "model_type": "mimo"},
        formula=Formula(
            block=mimo_block, modules=("model.mtp_layers.0.",), names=_MIMO_NAMES, hidden_first=True, zeroes=True
        ),
        like="model.layers.1.", raw=one_by_one,
    ),
    "mimo_v2_flash": Family(
        config={
            **_BASE, **_GROUPS, "model_type": "mimo_v2_flash", "hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1],
            "n_shared_experts": None, "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
            "sliding_window_size": 5, "layernorm_epsilon": 1e-6, "swa_rope_theta": 5000.0, "head_dim": 16,
            "v_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
            "swa_v_head_dim": 8, "partial_rotary_factor": 0.5, "attention_value_scale": 0.7,
        },
        formula=Formula(
            block=mimo_v2_block, modules=tuple(f"model.mtp.layers.{i}." for i in range(3)),
            names={**_DEEPSEEK_NAMES, "norm": "final_layernorm.weight"},
        ),
        like="model.layers.1.", raw=one_by_one, block={"moe_layer_freq": [0, 0]},
        rename=("post_attention_layernorm", "pre_mlp_layernorm"),
    ),
    "step3p5": Family(
        config={
            **_BASE, "model_type": "step3p5", "num_attention_groups": 2, "head_dim": 16, "sliding_window": 5,
            "layer_types": _SLIDING, "moe_num_experts": 4, "moe_top_k": 2,
            "moe_intermediate_size": 24, "share_expert_dim": 24,
            "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2},
        },
        formula=Formula(
            block=step_block, modules=tuple(f"model.layers.{2 + i}." for i in range(3)), names=_STEP_NAMES,
            takes_normed=False, passes_normed=False, shift=1.0,
        ),
        like="model.layers.1.", raw=step, block={"moe_layers_enum": "0"}, own=("head",),
    ),
    "ernie4_5_moe": Family(
        config={
            **_BASE, "model_type": "ernie4_5_moe", "use_bias": False, "moe_num_experts": 4, "moe_k": 2,
            "moe_intermediate_size": 24, "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
        },
        formula=Formula(
            block=ernie_block, modules=("model.",), zeroes=True, inner="mtp_block.0.",
            names={
                "e": "mtp_emb_norm.0.weight", "h": "mtp_hidden_norm.0.weight", "proj": "mtp_linear_proj.0.weight",
            },
        ),
        like="model.layers.0.", raw=one_by_one,
    ),
    "exaone_moe dense": Family(
        config=_EXAONE, formula=_EXAONE_HEAD, like="model.layers.0.", raw=exaone,
    ),
    "exaone_moe experts": Family(
        config=_EXAONE, formula=_EXAONE_HEAD, like="model.layers.0.", raw=exaone, block={"is_moe_layer": [True, True]},
    ),
    "nemotron_h": Family(
        config={
            **_BASE, **_GROUPS, "model_type": "nemotron_h", "hybrid_override_pattern": ["M", "*", "E"], "head_dim": 16,
            "attention_bias": False, "mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_proj_bias": False,
            "ssm_state_size": 8, "conv_kernel": 4, "n_groups": 1, "mlp_bias": False, "layer_norm_epsilon": 1e-6,
            "use_bias": False, "use_conv_bias": True, "moe_shared_expert_intermediate_size": 24,
            "mtp_hybrid_override_pattern": "*E", "num_hidden_layers": 3,
        },
        formula=Formula(
            block=nemotron_block, modules=("mtp.",), inner="layers.", last="backbone.norm_f.weight",
            embed="backbone.embeddings.weight",
            names={
                "e": "layers.0.enorm.weight", "h": "layers.0.hnorm.weight", "proj": "layers.0.eh_proj.weight",
                "norm": "layers.1.final_layernorm.weight",
            },
        ),
        like="backbone.layers.", raw=lambda w: one_by_one(w, names={"fc1": "up_proj", "fc2": "down_proj"}),
    ),
}  # fmt: skip
# The same head where its experts stand one by one, beside a model whose experts are fused.
FAMILIES["qwen3_5_moe"] = FAMILIES["qwen3_5_moe fused"]


def drawn(shapes: dict[str, tuple[int, ...]], salt: str) -> Raw:
    """Random weights, each by its name; norms about 1."""
    found = {}
    for name, shape in shapes.items():
        luck = np.random.default_rng(zlib.crc32((salt + name).encode()))
        noise = luck.standard_normal(shape)
        if name.endswith("A_log"):
            found[name] = np.linspace(-1.0, 1.5, noise.size).reshape(shape)
        elif len(shape) == 1:
            found[name] = noise * 0.3 + ("norm" in name and "bias" not in name)
        else:
            found[name] = noise * 1.5 / math.sqrt(math.prod(shape[1:]) if "conv" in name else shape[-1])
    return {name: one.astype(np.float32) for name, one in found.items()}


def module_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    config = copy.deepcopy(config)
    model, args = mlx_lm_utils._get_classes(config)
    return {name: one.shape for name, one in tree_flatten(model(args.from_dict(config)).parameters())}


def head_weights(family: Family, config: dict[str, Any], trunk: Raw, name: str) -> Raw:
    """The head's tensors, as published."""
    flat = config.get("text_config", config)
    changed = {**flat, **family.block}
    built = {**config, "text_config": changed} if "text_config" in config else changed
    if family.formula.inner == "layers.":
        built["hybrid_override_pattern"] = ["*", "E", "M"]
    found: Raw = {}
    formula = family.formula
    raw = qwen35("", one_by_one) if name == "qwen3_5_moe" else family.raw
    for module in formula.modules:
        block = {path: shape for path, shape in module_shapes(built).items() if path.startswith(family.like)}
        if formula.inner == "layers.":
            block = {path: shape for path, shape in block.items() if not path.startswith("backbone.layers.2")}
        weights = drawn(block, module)
        for path, one in raw(weights).items():
            start = family.like.replace("language_model.model.", _VL)
            found[module + formula.inner + path.removeprefix(start).replace(*family.rename)] = one
        outer = {"e": (K,), "h": (K,), "proj": (K, 2 * K), "norm": (K,)}
        outer = {part: shape for part, shape in outer.items() if part in formula.names}
        outer |= dict.fromkeys(family.own, (flat["vocab_size"], K))
        named = drawn({module + formula.names[part]: shape for part, shape in outer.items()}, "outer norm")
        found |= {path: one - formula.shift if one.ndim == 1 else one for path, one in named.items()}
        shared = {"head": formula.head, "embed": formula.embed}
        found |= {module + formula.names[part]: trunk[shared[part]] for part in family.copies}
    return found


def checkpoint(folder: Path, name: str, *, with_head: bool = True) -> tuple[dict[str, Any], Raw]:
    """Write the family's checkpoint to *folder*; its config, and all tensors, the head's too."""
    family = FAMILIES[name]
    rows = make_tokenizer(folder, Kind()) + 20
    config = copy.deepcopy(family.config)
    config["eos_token_id"] = 1
    config.get("text_config", config)["vocab_size"] = rows
    trunk = family.raw(drawn(module_shapes(config), "trunk"))
    head = head_weights(family, config, trunk, name)
    (folder / "config.json").write_text(json.dumps(config))
    save(folder / "model.safetensors", {**trunk, **(head if with_head else {})})
    return config, {path: one.astype(np.float64) for path, one in {**trunk, **head}.items()}


def save(file: Path, weights: Raw) -> None:
    mx.save_safetensors(
        str(file), {path: mx.array(one) for path, one in weights.items()}, metadata={"format": "pt"}
    )
