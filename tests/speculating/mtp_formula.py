"""What heads compute, from their formulas alone: float64, NumPy, tensors by the names of the published checkpoints.

Nothing is kept between rows: each forward runs over all pairs anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray
Raw = dict[str, Array]
Config = dict[str, Any]
Weight = Callable[[str], Array]


def rms(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def layer_norm(x: Array, weight: Array, bias: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-6) * weight + bias


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rope(x: Array, base: float, dims: int | None = None, *, paired: bool = False) -> Array:
    """x: [R, heads, D], the row is the position. paired: neighbours turn together, else the halves of *dims*."""
    dims = dims or x.shape[-1]
    angle = np.arange(x.shape[0])[:, None] * base ** (-np.arange(0, dims, 2) / dims)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    out = x.copy()
    first, second = (
        (x[..., 0:dims:2], x[..., 1:dims:2]) if paired else (x[..., : dims // 2], x[..., dims // 2 : dims])
    )
    turned = first * cos - second * sin, first * sin + second * cos
    if paired:
        out[..., 0:dims:2], out[..., 1:dims:2] = turned
    else:
        out[..., : dims // 2], out[..., dims // 2 : dims] = turned
    return out


def causal(rows: int, window: int | None = None) -> Array:
    back = np.arange(rows)[:, None] - np.arange(rows)[None]
    return (back >= 0) & (back < (window or rows + 1))


def attend(
    q: Array, k: Array, v: Array, seen: Array, scale: float | None = None, sinks: Array | None = None
) -> Array:
    """q: [R, heads, D]; k, v: [R, fewer heads, D]. sinks: a score for each head that no value stands behind."""
    out = []
    for head in range(q.shape[1]):
        of = head * k.shape[1] // q.shape[1]
        scores = q[:, head] @ k[:, of].T * (scale or q.shape[-1] ** -0.5)
        scores = np.where(seen, scores, -np.inf)
        if sinks is not None:
            scores = np.concatenate([scores, np.full((len(scores), 1), sinks[head])], -1)
        out.append(softmax(scores)[:, : len(seen)] @ v[:, of])
    return np.stack(out, 1)


def split(x: Array, heads: int) -> Array:
    return x.reshape(len(x), heads, -1)


def swiglu(w: Weight, name: str, x: Array) -> Array:
    up = silu(x @ w(f"{name}.gate_proj.weight").T) * (x @ w(f"{name}.up_proj.weight").T)
    return up @ w(f"{name}.down_proj.weight").T


def squared_relu(w: Weight, name: str, x: Array) -> Array:
    return np.maximum(x @ w(f"{name}.up_proj.weight").T, 0) ** 2 @ w(f"{name}.down_proj.weight").T


def by_experts(x: Array, shares: Array, expert: Callable[[int, Array], Array]) -> Array:
    """shares: [R, experts], 0 for those that a row does not ask."""
    return sum(shares[:, e : e + 1] * expert(e, x) for e in range(shares.shape[1]))


def shares_by_softmax(logits: Array, count: int) -> Array:
    p = softmax(logits)
    kept = np.where(p >= np.sort(p, -1)[:, -count][:, None], p, 0)
    return kept / kept.sum(-1, keepdims=True)


def shares_by_sigmoid(logits: Array, bias: Array, c: Config) -> Array:
    """The bias chooses, and is not in the shares; of the groups, those whose two best add up to most."""
    p, groups = sigmoid(logits), c.get("n_group", 1)
    chosen = p + bias
    if groups > 1:
        grouped = chosen.reshape(len(p), groups, -1)
        best = np.sort(grouped, -1)[..., -2:].sum(-1)
        kept = best >= np.sort(best, -1)[:, -c["topk_group"]][:, None]
        chosen = np.where(kept[..., None], grouped, -np.inf).reshape(p.shape)
    count = c.get("num_experts_per_tok") or c["moe_top_k"]
    kept = np.where(chosen >= np.sort(chosen, -1)[:, -count][:, None], p, 0)
    return kept / kept.sum(-1, keepdims=True) * c.get("routed_scaling_factor", 1.0)


# The blocks: w gives their tensors, x is [R, K].


def residual(
    w: Weight, c: Config, x: Array, attention: Callable, mlp: Callable, second: str, shift: float
) -> Array:
    eps = c.get("rms_norm_eps") or c["layernorm_epsilon"]
    x = x + attention(w, c, rms(x, w("input_layernorm.weight") + shift, eps))
    return x + mlp(w, c, rms(x, w(f"{second}.weight") + shift, eps))


def qwen_attention(shift: float) -> Callable:
    def attention(w: Weight, c: Config, x: Array) -> Array:
        c = c.get("text_config", c)
        heads, eps = c["num_attention_heads"], c["rms_norm_eps"]
        told = c.get("rope_parameters", c)
        q, gate = np.split(split(x @ w("self_attn.q_proj.weight").T, heads), 2, -1)
        k, v = (split(x @ w(f"self_attn.{one}_proj.weight").T, c["num_key_value_heads"]) for one in "kv")
        q, k = rms(q, w("self_attn.q_norm.weight") + shift, eps), rms(k, w("self_attn.k_norm.weight") + shift, eps)
        dims = int(q.shape[-1] * told["partial_rotary_factor"])
        q, k = (rope(one, told["rope_theta"], dims) for one in (q, k))
        out = attend(q, k, v, causal(len(x))) * sigmoid(gate)
        return out.reshape(len(x), -1) @ w("self_attn.o_proj.weight").T

    return attention


def qwen_moe(w: Weight, c: Config, x: Array) -> Array:
    c = c.get("text_config", c)
    shares = shares_by_softmax(x @ w("mlp.gate.weight").T, c["num_experts_per_tok"])

    def fused(e: int, x: Array) -> Array:
        gate, up = np.split(x @ w("mlp.experts.gate_up_proj")[e].T, 2, -1)
        return silu(gate) * up @ w("mlp.experts.down_proj")[e].T

    one = fused if w("?mlp.experts.gate_up_proj") else lambda e, x: swiglu(w, f"mlp.experts.{e}", x)
    shared = sigmoid(x @ w("mlp.shared_expert_gate.weight").T) * swiglu(w, "mlp.shared_expert", x)
    return by_experts(x, shares, one) + shared


def dense(w: Weight, c: Config, x: Array) -> Array:
    return swiglu(w, "mlp", x)


def qwen_block(w: Weight, c: Config, x: Array, shift: float) -> Array:
    mlp = qwen_moe if w("?mlp.gate.weight") else dense
    flat = c.get("text_config", c)
    return residual(w, flat, x, qwen_attention(shift), mlp, "post_attention_layernorm", shift)


def latent_attention(w: Weight, c: Config, x: Array) -> Array:
    heads, nope, lora = c["num_attention_heads"], c["qk_nope_head_dim"], c["kv_lora_rank"]
    eps = c["rms_norm_eps"]
    low = rms(x @ w("self_attn.q_a_proj.weight").T, w("self_attn.q_a_layernorm.weight"), eps)
    q = split(low @ w("self_attn.q_b_proj.weight").T, heads)
    both = x @ w("self_attn.kv_a_proj_with_mqa.weight").T
    latent = rms(both[:, :lora], w("self_attn.kv_a_layernorm.weight"), eps)
    kv = split(latent @ w("self_attn.kv_b_proj.weight").T, heads)
    turned = rope(both[:, None, lora:], c["rope_theta"], paired=True)
    q = np.concatenate([q[..., :nope], rope(q[..., nope:], c["rope_theta"], paired=True)], -1)
    k = np.concatenate([kv[..., :nope], np.repeat(turned, heads, 1)], -1)
    seen = causal(len(x))
    if "index_topk" in c:
        seen &= indexed(w, c, x, low)
    out = attend(q, k, kv[..., nope:], seen)
    return out.reshape(len(x), -1) @ w("self_attn.o_proj.weight").T


def indexed(w: Weight, c: Config, x: Array, low: Array) -> Array:
    """Which rows each row looks at: those that the indexer scores highest."""
    heads, dim, turned = c["index_n_heads"], c["index_head_dim"], c["qk_rope_head_dim"]
    q = rope(split(low @ w("self_attn.indexer.wq_b.weight").T, heads), c["rope_theta"], turned)
    k = layer_norm(
        x @ w("self_attn.indexer.wk.weight").T,
        w("self_attn.indexer.k_norm.weight"),
        w("self_attn.indexer.k_norm.bias"),
    )
    k = rope(k[:, None], c["rope_theta"], turned)[:, 0]
    weights = x @ w("self_attn.indexer.weights_proj.weight").T * (heads * dim) ** -0.5
    scores = np.einsum("rhs,rh->rs", np.maximum(np.einsum("rhd,sd->rhs", q, k), 0), weights)
    scores = np.where(causal(len(x)), scores, -np.inf)
    kept = np.sort(scores, -1)[:, max(len(x) - c["index_topk"], 0)]
    return scores >= kept[:, None]


def grouped_moe(w: Weight, c: Config, x: Array) -> Array:
    bias = w(
        "mlp.gate.e_score_correction_bias"
        if w("?mlp.gate.e_score_correction_bias")
        else "mlp.e_score_correction_bias"
    )
    shares = shares_by_sigmoid(x @ w("mlp.gate.weight").T, bias, c)
    return by_experts(x, shares, lambda e, x: swiglu(w, f"mlp.experts.{e}", x)) + swiglu(
        w, "mlp.shared_experts", x
    )


def latent_block(w: Weight, c: Config, x: Array, shift: float) -> Array:
    return residual(w, c, x, latent_attention, grouped_moe, "post_attention_layernorm", 0)


def glm_attention(w: Weight, c: Config, x: Array) -> Array:
    q, k, v = (x @ w(f"self_attn.{one}_proj.weight").T + w(f"self_attn.{one}_proj.bias") for one in "qkv")
    q = split(q, c["num_attention_heads"])
    k, v = (split(one, c["num_key_value_heads"]) for one in (k, v))
    q, k = (rms(one, w(f"self_attn.{name}_norm.weight"), c["rms_norm_eps"]) for one, name in ((q, "q"), (k, "k")))
    dims = int(q.shape[-1] * c["partial_rotary_factor"])
    out = attend(rope(q, c["rope_theta"], dims), rope(k, c["rope_theta"], dims), v, causal(len(x)))
    return out.reshape(len(x), -1) @ w("self_attn.o_proj.weight").T


def glm_block(w: Weight, c: Config, x: Array, shift: float) -> Array:
    return residual(w, c, x, glm_attention, grouped_moe, "post_attention_layernorm", 0)


def plain_attention(*, bias: bool = False, paired: bool = False) -> Callable:
    def attention(w: Weight, c: Config, x: Array) -> Array:
        q, k, v = (
            x @ w(f"self_attn.{one}_proj.weight").T + (w(f"self_attn.{one}_proj.bias") if bias else 0)
            for one in "qkv"
        )
        q = split(q, c["num_attention_heads"])
        k, v = (split(one, c["num_key_value_heads"]) for one in (k, v))
        q, k = (rope(one, c["rope_theta"], paired=paired) for one in (q, k))
        return attend(q, k, v, causal(len(x))).reshape(len(x), -1) @ w("self_attn.o_proj.weight").T

    return attention


def mimo_block(w: Weight, c: Config, x: Array, shift: float) -> Array:
    return residual(w, c, x, plain_attention(bias=True), dense, "post_attention_layernorm", 0)


def ernie_block(w: Weight, c: Config, x: Array, shift: float) -> Array:
    return residual(w, c, x, plain_attention(paired=True), dense, "post_attention_layernorm", 0)


def forged_block(w: Weight, c: Config, x: Array, shift: float) -> Array:
    return residual(w, c, x, plain_attention(), dense, "post_attention_layernorm", 0)


def sink_attention(w: Weight, c: Config, x: Array) -> Array:
    q = split(x @ w("self_attn.q_proj.weight").T, c["swa_num_attention_heads"])
    k, v = (split(x @ w(f"self_attn.{one}_proj.weight").T, c["swa_num_key_value_heads"]) for one in "kv")
    dims = int(c["swa_head_dim"] * c["partial_rotary_factor"])
    q, k = (rope(one, c["swa_rope_theta"], dims) for one in (q, k))
    seen = causal(len(x), c["sliding_window_size"])
    out = attend(q, k, v * c["attention_value_scale"], seen, sinks=w("self_attn.attention_sink_bias"))
    return out.reshape(len(x), -1) @ w("self_attn.o_proj.weight").T


def mimo_v2_block(w: Weight, c: Config, x: Array, shift: float) -> Array:
    return residual(w, c, x, sink_attention, dense, "pre_mlp_layernorm", 0)


def step_block(w: Weight, c: Config, x: Array, shift: float) -> Array:
    def attention(w: Weight, c: Config, x: Array) -> Array:
        other, eps = c["attention_other_setting"], c["rms_norm_eps"]
        q = split(x @ w("self_attn.q_proj.weight").T, other["num_attention_heads"])
        k, v = (split(x @ w(f"self_attn.{one}_proj.weight").T, other["num_attention_groups"]) for one in "kv")
        q, k = rms(q, w("self_attn.q_norm.weight") + shift, eps), rms(k, w("self_attn.k_norm.weight") + shift, eps)
        q, k = (rope(one, c["rope_theta"]) for one in (q, k))
        out = attend(q, k, v, causal(len(x), c["sliding_window"]))
        out = out * sigmoid(x @ w("self_attn.g_proj.weight").T)[..., None]
        return out.reshape(len(x), -1) @ w("self_attn.o_proj.weight").T

    return residual(w, c, x, attention, dense, "post_attention_layernorm", shift)


def exaone_block(w: Weight, c: Config, x: Array, shift: float) -> Array:
    def attention(w: Weight, c: Config, x: Array) -> Array:
        q = split(x @ w("self_attn.q_proj.weight").T, c["num_attention_heads"])
        k, v = (split(x @ w(f"self_attn.{one}_proj.weight").T, c["num_key_value_heads"]) for one in "kv")
        q, k = (
            rms(one, w(f"self_attn.{name}_norm.weight"), c["rms_norm_eps"]) for one, name in ((q, "q"), (k, "k"))
        )
        q, k = (rope(one, c["rope_theta"]) for one in (q, k))
        out = attend(q, k, v, causal(len(x), c["sliding_window"]))
        return out.reshape(len(x), -1) @ w("self_attn.o_proj.weight").T

    mlp = grouped_moe if w("?mlp.gate.weight") else dense
    return residual(w, c, x, attention, mlp, "post_attention_layernorm", 0)


def nemotron_block(w: Weight, c: Config, x: Array, shift: float) -> Array:
    eps = c["layer_norm_epsilon"]
    y = rms(x, w("0.norm.weight"), eps)
    q = split(y @ w("0.mixer.q_proj.weight").T, c["num_attention_heads"])
    k, v = (split(y @ w(f"0.mixer.{one}_proj.weight").T, c["num_key_value_heads"]) for one in "kv")
    x = x + attend(q, k, v, causal(len(x))).reshape(len(x), -1) @ w("0.mixer.o_proj.weight").T
    y = rms(x, w("1.norm.weight"), eps)
    shares = shares_by_sigmoid(y @ w("1.mixer.gate.weight").T, w("1.mixer.gate.e_score_correction_bias"), c)
    experts = by_experts(y, shares, lambda e, y: squared_relu(w, f"1.mixer.experts.{e}", y))
    return x + experts + squared_relu(w, "1.mixer.shared_experts", y)


@dataclass(frozen=True, kw_only=True)
class Formula:
    """A family. modules: what the names of each module's tensors begin with. names: of its outer parts.

    inner: what the names of the block's begin with, behind that. last: of the model's final norm, and so on.
    """

    block: Callable[[Weight, Config, Array, float], Array]
    modules: tuple[str, ...]
    names: dict[str, str]
    inner: str = ""
    last: str = "model.norm.weight"
    embed: str = "model.embed_tokens.weight"
    head: str = "lm_head.weight"
    hidden_first: bool = False
    takes_normed: bool = True
    passes_normed: bool = True
    zeroes: bool = False
    shift: float = 0.0
    epsilon: Callable[[Config], float] = field(default=lambda c: c["rms_norm_eps"])

    def logits(self, raw: Raw, c: Config, ids: list[int], states: Array, drafted: list[int]) -> list[Array]:
        """Of each depth: behind *ids* and the *states* before them, then behind each id of *drafted* too.

        states: [R, K], before the model's final norm. The shift is that of raw norms.
        """
        eps = self.epsilon(c)
        h = rms(states, raw[self.last] + self.shift, eps) if self.takes_normed else states
        found, n, passed = [], len(ids), h
        tokens, text = list(ids), [*ids, *drafted]
        for depth in range(len(drafted) + 1):
            module = self.modules[min(depth, len(self.modules) - 1)]
            if depth:
                if depth < len(self.modules):
                    h, tokens = passed, text[depth : depth + n]
                else:
                    h, tokens = np.concatenate([h, passed[-1:]]), [*tokens, drafted[depth - 1]]
            g = self._module(raw, c, module, tokens, h, eps)
            normed = rms(g, raw[module + self.names["norm"]] + self.shift, eps) if "norm" in self.names else g
            passed = normed if self.passes_normed else g
            own = module + self.names.get("head", "?")
            found.append(normed[-1] @ raw[own if own in raw else self.head].T)
        return found

    def _module(self, raw: Raw, c: Config, module: str, tokens: list[int], h: Array, eps: float) -> Array:
        own = module + self.names.get("embed", "?")
        e = raw[own if own in raw else self.embed][tokens]
        if self.zeroes:
            e[0] = 0
        e = rms(e, raw[module + self.names["e"]] + self.shift, eps)
        h = rms(h, raw[module + self.names["h"]] + self.shift, eps)
        x = np.concatenate([h, e] if self.hidden_first else [e, h], -1) @ raw[module + self.names["proj"]].T

        def weight(name: str) -> Any:
            if name.startswith("?"):
                return module + self.inner + name[1:] in raw
            return raw[module + self.inner + name]

        return self.block(weight, c, x, self.shift)
