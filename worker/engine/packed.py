"""The dense family in packed form: what mlx-lm's module holds, with fewer and larger products.

A block of this family is `x += attention(norm(x)); x += down(silu(gate(norm(x))) * up(norm(x)))`, with rope, and
perhaps biases or a norm of q and k. Query, key and value weights become one matrix, gate and up another. The
module's own weights become views of them, so that each weight is in memory once and the module goes on working.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from worker.kernels import rope_write
from worker.kernels.matvec import Affine
from worker.kernels.rope_table import rope_of
from worker.kernels.rope_write import Heads

_PRODUCTS: Final = {"q_proj", "k_proj", "v_proj", "o_proj"}
_NORMS: Final = {"q_norm", "k_norm"}


class NotDenseError(Exception):
    """The model has no packed form; the message says why, in words for health."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A product: weight T [N, K] or affine quantised, bias T [N] or None.

    turned: a dense weight as its product takes it, T [K, N], a view; made in a graph it would be one more node.
    """

    weight: mx.array | Affine
    bias: mx.array | None = None
    turned: mx.array | None = None

    def __call__(self, x: mx.array) -> mx.array:
        """X T [..., K] to T [..., N] by MLX's own operations."""
        weight = self.weight
        if isinstance(weight, Affine):
            y = weight.product(x)
            return y if self.bias is None else y + self.bias
        turned = weight.T if self.turned is None else self.turned
        return x @ turned if self.bias is None else mx.addmm(self.bias, x, turned)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One block. Norms T [K]; q_norm and k_norm T [D] or None; rope: mlx-lm's module, None where nothing turns.

    table: the constants of `rope_write`; None where the rope is no table of constants.
    """

    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    input_norm: mx.array
    post_norm: mx.array
    q_norm: mx.array | None
    k_norm: mx.array | None
    heads: Heads
    rope: Any
    table: mx.array | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A dense model. embed: ids to T [..., K]; head: T [..., K] to logits; eps: of all norms but q's and k's."""

    embed: Any
    layers: tuple[Layer, ...]
    norm: mx.array
    head: Linear
    eps: float
    scale: float
    dtype: mx.Dtype

    @property
    def heads(self) -> Heads:
        """Shape of the attention, the same in every layer but for what is turned."""
        return self.layers[0].heads

    @property
    def weights(self) -> list[mx.array | Affine]:
        """Of every product of a forward."""
        products = [one for layer in self.layers for one in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return [one.weight for one in (*products, self.head)]

    def attended(self, x: mx.array, q: mx.array, kv: mx.array, layer: Layer) -> mx.array:
        """A block's first half T [R, K]: x plus the attention of its queries.

        x: T [R, K]. q, kv: as in `attention`.
        """
        return self.joined(x, self.attention(q, kv), layer)

    def attention(self, q: mx.array, kv: mx.array) -> mx.array:
        """Heads T [1, H, R, D] of queries T [H, R, D] at the last R of n positions.

        kv: T [2, Hkv, n, D], keys before values.
        """
        mask = "causal" if q.shape[1] > 1 else None
        heads: mx.array = mx.fast.scaled_dot_product_attention(
            q[None], kv[:1], kv[1:], scale=self.scale, mask=mask
        )
        return heads

    def joined(self, x: mx.array, heads: mx.array, layer: Layer) -> mx.array:
        """X T [R, K] plus the product of heads T [1, H, R, D]."""
        return x + layer.out(heads[0].swapaxes(0, 1).reshape(x.shape[0], -1))

    def normed(self, x: mx.array, weight: mx.array) -> mx.array:
        """RMSNorm of x T [..., K] with *weight* T [K]."""
        return mx.fast.rms_norm(x, weight, self.eps)

    def logits(self, x: mx.array) -> mx.array:
        """Of hidden rows T [R, K]: T [R, V]."""
        return self.head(self.normed(x, self.norm))


def pack(model: Any) -> Packed:
    """Pack mlx-lm's *model* in place.

    Raises:
        NotDenseError: its structure is another; then nothing was changed.
    """
    text = getattr(model, "language_model", model)
    _check(text)
    inner, tied = text.model, "lm_head" not in text
    head = inner.embed_tokens if tied else text.lm_head
    first = inner.layers[0]
    packed = Packed(
        embed=inner.embed_tokens,
        layers=tuple(pack_block(block) for block in inner.layers),
        norm=inner.norm.weight,
        head=pack_linear(head),
        eps=inner.norm.eps,
        scale=float(first.self_attn.scale),
        dtype=inner.norm.weight.dtype,
    )
    mx.eval([layer.table for layer in packed.layers if layer.table is not None])
    return packed


def _check(text: Any) -> None:
    inner = text.get("model") if isinstance(text, nn.Module) else None
    if not isinstance(inner, nn.Module) or _parts(inner) != {"embed_tokens", "layers", "norm"}:
        raise NotDenseError("its parts are not those of the dense family")
    if any(not _is_norm(norm) for norm in (inner.norm,)) or not inner.layers:
        raise NotDenseError("its norms are of another kind")
    if any(type(cache) is not KVCache for cache in make_prompt_cache(text)):
        # A window beyond the ids of a check at load would not show in its logits.
        raise NotDenseError("some of its layers keep another cache than all keys and values")
    shapes = {_block_shape(block) for block in inner.layers}
    if len(shapes) > 1:
        raise NotDenseError("its layers differ in shape")
    eps = {block.input_layernorm.eps for block in inner.layers} | {
        block.post_attention_layernorm.eps for block in inner.layers
    }
    if eps != {inner.norm.eps}:
        raise NotDenseError("its norms differ in epsilon")
    head = text.get("lm_head", inner.embed_tokens)
    if _packing(head) is None or "bias" in head:
        raise NotDenseError("its head is packed in a way of its own")


def _block_shape(block: Any) -> tuple[int, int, int, float]:
    """(heads, kv heads, dimension, scale) of a block of the family."""
    if _parts(block) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        raise NotDenseError("a block has other parts than attention, MLP and two norms")
    attention, mlp = block.self_attn, block.mlp
    parts = _parts(attention) - {"rope"}
    if parts not in (_PRODUCTS, _PRODUCTS | _NORMS):
        raise NotDenseError("its attention has other parts than the dense family's")
    if _parts(mlp) != {"gate_proj", "up_proj", "down_proj"}:
        raise NotDenseError("its MLP is not gate, up and down")
    norms = [block.input_layernorm, block.post_attention_layernorm]
    norms += [attention.q_norm, attention.k_norm] if "q_norm" in parts else []
    if not all(_is_norm(norm) for norm in norms):
        raise NotDenseError("its norms are of another kind")
    for group in (("q_proj", "k_proj", "v_proj"), ("o_proj",)):
        _one_packing([attention[name] for name in group])
    _one_packing([mlp.gate_proj, mlp.up_proj])
    _one_packing([mlp.down_proj])
    counts = [getattr(attention, name, None) for name in ("n_heads", "n_kv_heads", "scale")]
    heads, kv_heads, scale = counts
    if heads is None or kv_heads is None or scale is None:
        raise NotDenseError("its attention does not tell its heads")
    dim = attention.q_proj.weight.shape[0] // heads
    if attention.k_proj.weight.shape[0] != kv_heads * dim or attention.v_proj.weight.shape[0] != kv_heads * dim:
        raise NotDenseError("its keys and values have sizes of their own")
    if "q_norm" in parts and {attention.q_norm.weight.size, attention.k_norm.weight.size} != {dim}:
        raise NotDenseError("its q and k norms span more than a head")
    return int(heads), int(kv_heads), int(dim), float(scale)


def _parts(module: nn.Module) -> set[str]:
    """Names of the modules, and lists of modules, that *module* is made of."""
    return {
        name
        for name, part in module.items()
        if isinstance(part, nn.Module) or (isinstance(part, list) and part and isinstance(part[0], nn.Module))
    }


def _is_norm(module: Any) -> bool:
    return type(module) is nn.RMSNorm


def _packing(module: Any) -> tuple[int, int] | None:
    """(bits, group), (0, 0) for dense weights, None for what cannot be packed."""
    if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
        return (module.bits, module.group_size) if module.mode == "affine" else None
    return (0, 0) if isinstance(module, nn.Linear | nn.Embedding) else None


def _one_packing(modules: list[Any]) -> None:
    packings = {_packing(module) for module in modules}
    if len(packings) > 1 or None in packings:
        raise NotDenseError("its weights are quantised in different ways")
    if len({"bias" in module for module in modules}) > 1:
        raise NotDenseError("some of its joint products have a bias, some not")


def pack_linear(module: Any) -> Linear:
    """A product of one module."""
    bias = module.get("bias")
    if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
        weight = Affine(module.weight, module.scales, module.biases, module.group_size, module.bits)
        return Linear(weight, bias)
    return _dense(module.weight, bias)


def _dense(weight: mx.array, bias: mx.array | None) -> Linear:
    turned = weight.T
    mx.eval(turned)
    return Linear(weight, bias, turned)


def _joined(modules: list[Any]) -> Linear:
    """One product for several; their own weights become views of its rows."""
    whole = {name: _join(modules, name) for name in ("weight", "scales", "biases", "bias") if name in modules[0]}
    if "scales" in whole:
        first = modules[0]
        weight = Affine(whole["weight"], whole["scales"], whole["biases"], first.group_size, first.bits)
        return Linear(weight, whole.get("bias"))
    return _dense(whole["weight"], whole.get("bias"))


def _join(modules: list[Any], name: str) -> mx.array:
    whole = mx.concatenate([module[name] for module in modules], axis=0)
    ends = [0, *accumulate(module[name].shape[0] for module in modules)]
    # A slice of whole rows is a view once it is evaluated, and the array it replaces is freed.
    mx.eval(whole)
    for module, (start, end) in zip(modules, pairwise(ends), strict=True):
        module[name] = whole[start:end]
    mx.eval([module[name] for module in modules])
    return whole


def pack_block(block: Any) -> Layer:
    """One block of the family, packed in place.

    Raises:
        NotDenseError: its structure is another.
    """
    attention, mlp = block.self_attn, block.mlp
    heads, kv_heads, dim, _ = _block_shape(block)
    q_norm = attention.q_norm.weight if "q_norm" in attention else None
    k_norm = attention.k_norm.weight if "k_norm" in attention else None
    rope = getattr(attention, "rope", None)
    turned = rope_of(rope)
    # smollm3 marks a layer without rope by a module that does nothing.
    none = rope is None or type(rope).__name__ == "NoPE"
    shape = Heads(
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        rotated=0 if none or turned is None else turned.dims,
        traditional=turned is not None and turned.traditional,
        input_scale=1.0 if turned is None else turned.input_scale,
        norm_eps=None if q_norm is None else attention.q_norm.eps,
        scale=float(attention.scale),
    )
    frequencies = None if turned is None else turned.frequencies
    known = none or turned is not None
    return Layer(
        qkv=_joined([attention.q_proj, attention.k_proj, attention.v_proj]),
        out=pack_linear(attention.o_proj),
        gate_up=_joined([mlp.gate_proj, mlp.up_proj]),
        down=pack_linear(mlp.down_proj),
        input_norm=block.input_layernorm.weight,
        post_norm=block.post_attention_layernorm.weight,
        q_norm=q_norm,
        k_norm=k_norm,
        heads=shape,
        rope=None if none else rope,
        table=rope_write.constants(shape, frequencies, q_norm, k_norm) if known else None,
    )
