"""The blocks of heads: mlx-lm's own decoder layers, built and named for each kind of model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Final

import mlx.core as mx
from mlx import nn
from mlx_lm.models import (
    deepseek_v3,
    deepseek_v32,
    ernie4_5_moe,
    exaone_moe,
    glm4_moe,
    glm4_moe_lite,
    mimo,
    mimo_v2_flash,
    nemotron_h,
    qwen3_5,
    qwen3_5_moe,
    qwen3_next,
    step3p5,
)
from mlx_lm.models.cache import CacheList, KVCache

from worker.speculation.mtp.shapes import Config, pattern, text_config

Weights = dict[str, mx.array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block with random weights.

    tidy: mlx-lm's `sanitize` over weights named as those of a model's first layer. prefix: of those names.
    The rest is as in `Wiring`.
    """

    module: Any
    eps: float
    tidy: Callable[[Weights], Weights]
    prefix: str = "model.layers.0."
    window: int | None = None
    array_mask: bool = False
    make_cache: Callable[[], Any] = KVCache


class Layers(nn.Module):  # type: ignore[misc]  # MLX ships no types
    """Nemotron-H's layers in a row, each attention or a feed-forward, as one block; one of them is attention."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.layers = layers

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        """As any block."""
        for layer in self.layers:
            x = layer(x, mask, cache if layer.block_type == "*" else None)
        return x


def block_of(config: Config, step: int, names: set[str]) -> Block:
    """The block of module *step* for a model with that config; *names* are those of its tensors.

    Raises:
        KeyError, TypeError, ValueError: mlx-lm cannot make it of that config.
    """
    return _BUILDERS[config["model_type"]](config, step, names)


def _tidy(model: Any, args: Any) -> Callable[[Weights], Weights]:
    """`sanitize` of mlx-lm's *model* class, which asks its model for nothing but *args*."""
    text = SimpleNamespace(args=args, sanitize=lambda weights: weights)
    asked = SimpleNamespace(args=args, language_model=text)
    return lambda weights: dict(model.sanitize(asked, weights))


def _qwen3_next(config: Config, step: int, names: set[str]) -> Block:  # noqa: ARG001 - one module, one form
    args = replace(
        qwen3_next.ModelArgs.from_dict(config), num_hidden_layers=1, full_attention_interval=1, mlp_only_layers=[]
    )
    module = qwen3_next.Qwen3NextDecoderLayer(args, 0)
    return Block(module=module, eps=args.rms_norm_eps, tidy=_tidy(qwen3_next.Model, args))


def _qwen3_5(config: Config, step: int, names: set[str]) -> Block:  # noqa: ARG001 - one module, one form
    # As a copy: the arguments are written into.
    text = {**text_config(config)}
    if isinstance(text.get("rope_parameters"), dict):
        text["rope_parameters"] = {**text["rope_parameters"]}
    args = replace(qwen3_5.TextModelArgs.from_dict(text), num_hidden_layers=1, full_attention_interval=1)
    tidy = _tidy(qwen3_5_moe.Model, args)
    module = qwen3_5.DecoderLayer(args, 0)
    return Block(module=module, eps=args.rms_norm_eps, tidy=tidy, prefix="language_model.model.layers.0.")


def _latent(models: Any, layer: str) -> Callable[[Config, int, set[str]], Block]:
    """The builder for a model of DeepSeek's build: the layer behind its last one."""

    def build(config: Config, step: int, names: set[str]) -> Block:  # noqa: ARG001 - one form
        args = models.ModelArgs.from_dict(config)
        tidy = _tidy(models.Model, replace(args, num_hidden_layers=1))
        module = getattr(models, layer)(args, args.num_hidden_layers + step)
        latent = models is not glm4_moe
        make_cache = _two_caches if models is deepseek_v32 else KVCache
        return Block(module=module, eps=args.rms_norm_eps, tidy=tidy, array_mask=latent, make_cache=make_cache)

    return build


def _two_caches() -> CacheList:
    """Of the keys and values, and of the keys by which the indexer chooses among them."""
    return CacheList(KVCache(), KVCache())


def _mimo(config: Config, step: int, names: set[str]) -> Block:  # noqa: ARG001 - one module, one form
    args = mimo.ModelArgs.from_dict(config)
    return Block(module=mimo.TransformerBlock(args), eps=args.rms_norm_eps, tidy=_tidy(mimo.Model, args))


def _mimo_v2(config: Config, step: int, names: set[str]) -> Block:  # noqa: ARG001 - the modules are alike
    args = mimo_v2_flash.ModelArgs.from_dict(config)
    return Block(
        module=mimo_v2_flash.DecoderLayer(args, is_moe=False, is_sliding_window=True),
        eps=args.layernorm_epsilon,
        tidy=_tidy(mimo_v2_flash.Model, replace(args, num_hidden_layers=1)),
        window=args.sliding_window_size,
    )


def _step3p5(config: Config, step: int, names: set[str]) -> Block:  # noqa: ARG001 - one form
    args = step3p5.ModelArgs.from_dict(config)
    layer = args.num_hidden_layers + step
    if args.layer_types and len(args.layer_types) <= layer:
        more = ["sliding_attention"] * (layer + 1 - len(args.layer_types))
        args = replace(args, layer_types=[*args.layer_types, *more])
    if isinstance(args.rope_theta, list) and len(args.rope_theta) <= layer:
        args = replace(args, rope_theta=[*args.rope_theta, *[args.rope_theta[0]] * (layer + 1)])
    module = step3p5.Step3p5DecoderLayer(args, layer)
    return Block(
        module=module,
        eps=args.rms_norm_eps,
        tidy=_tidy(step3p5.Model, replace(args, num_hidden_layers=1)),
        window=args.sliding_window if module.is_sliding else None,
    )


def _ernie(config: Config, step: int, names: set[str]) -> Block:  # noqa: ARG001 - one module, one form
    args = ernie4_5_moe.ModelArgs.from_dict(config)
    # Dense, whatever the layers of the model are; with their rope.
    dense = replace(args, num_hidden_layers=1, moe_layer_start_index=2, moe_layer_end_index=2)
    module = ernie4_5_moe.Ernie4_5_DecoderLayer(dense, 0)
    return Block(module=module, eps=args.rms_norm_eps, tidy=_tidy(ernie4_5_moe.Model, dense))


def _exaone(config: Config, step: int, names: set[str]) -> Block:  # noqa: ARG001 - one module
    args = exaone_moe.ModelArgs.from_dict(config)
    # The attention is that of the first layer; dense or not is told by the tensors.
    moe = any("experts" in name or "switch_mlp" in name for name in names)
    args = replace(args, num_hidden_layers=1, is_moe_layer=[moe])
    module = exaone_moe.DecoderLayer(args, 0)
    window = args.sliding_window if module.is_sliding_window else None
    return Block(module=module, eps=args.rms_norm_eps, tidy=_tidy(exaone_moe.Model, args), window=window)


def _nemotron(config: Config, step: int, names: set[str]) -> Block:  # noqa: ARG001 - one module, one form
    kinds = pattern(config)
    if kinds.count("*") != 1 or set(kinds) - set("*E-"):
        raise ValueError(f"its layers are {kinds!r}; one of attention (*) and others of MoE or MLP are known")
    args = replace(
        nemotron_h.ModelArgs.from_dict(config),
        hybrid_override_pattern=list(kinds),
        layers_block_type=None,
        layer_types=None,
    )
    module = Layers([nemotron_h.NemotronHBlock(args, kind) for kind in kinds])
    tidy = _tidy(nemotron_h.Model, args)
    return Block(module=module, eps=args.layer_norm_epsilon, tidy=tidy, prefix="backbone.")


_BUILDERS: Final[dict[str, Callable[[Config, int, set[str]], Block]]] = {
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5,
    "deepseek_v3": _latent(deepseek_v3, "DeepseekV3DecoderLayer"),
    "deepseek_v32": _latent(deepseek_v32, "DeepseekV32DecoderLayer"),
    "glm4_moe": _latent(glm4_moe, "DecoderLayer"),
    "glm4_moe_lite": _latent(glm4_moe_lite, "Glm4MoeLiteDecoderLayer"),
    "mimo": _mimo,
    "mimo_v2_flash": _mimo_v2,
    "step3p5": _step3p5,
    "ernie4_5_moe": _ernie,
    "exaone_moe": _exaone,
    "nemotron_h": _nemotron,
}
