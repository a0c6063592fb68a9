"""A head over whole texts at every depth at once, as it is served: what training and acceptance look at.

Rows are counted by their pair's position j: the pair (H[j], x[j+1]), from which x[j+2] is guessed. At depth d the
head has drafted d tokens behind a true pair at t = j - d + 1. Its row at j takes what depth d-1 made at j-1, and
sees what it sees when it is served: the true pairs' keys up to t, then those of its own draft, of depth k at
t + k - 1, k from 2 to d. That is a causal product whose mask is d-1 places back, and one score for each deeper key
("training-time test" of EAGLE-3, 2503.01840).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from worker.speculation.mtp.forged import ForgedConfig
from worker.speculation.mtp.head import Head

Weights = dict[str, Any]


def back(x: mx.array, places: int, axis: int) -> mx.array:
    """*x* with what stood *places* before each place along *axis*; zeros where nothing stood."""
    if not places:
        return x
    kept = mx.take(x, mx.arange(x.shape[axis] - places), axis=axis)
    pads = [(0, 0)] * x.ndim
    pads[axis] = (places, 0)
    return mx.pad(kept, pads)


class Unrolled:
    """The computation of a head that `mtplx forge` makes; the weights are handed in.

    Args:
        config: the shape.
        head: whose rope and norms' epsilons are used.
    """

    def __init__(self, config: ForgedConfig, head: Head) -> None:
        self._config = config
        self._rope = head.block.self_attn.rope
        self._scale = head.block.self_attn.scale

    def __call__(self, weights: Weights, embedded: mx.array, hidden: mx.array, depths: int) -> list[mx.array]:
        """The normed states T [B, n, K] of depths 1 to *depths*; depth d means nothing at j < d - 1.

        weights: of the head, not quantised. embedded: T [B, n, K], of x[j+1]. hidden: T [B, n, K], H[j].
        """
        width = self._config.hidden_size
        joint = weights["eh_proj"]["weight"]
        of_token = self._normed(embedded, weights["enorm"]) @ joint[:, :width].T
        keys: list[mx.array] = []
        values: list[mx.array] = []
        found: list[mx.array] = []
        state = hidden
        for depth in range(1, depths + 1):
            before = state if depth == 1 else back(state, 1, axis=1)
            x = of_token + self._normed(before, weights["hnorm"]) @ joint[:, width:].T
            x = self._block(weights["block"], x, keys, values)
            state = self._normed(x, weights["norm"])
            found.append(state)
        return found

    def _normed(self, x: mx.array, norm: Weights) -> mx.array:
        weight: mx.array = norm["weight"]
        return mx.fast.rms_norm(x, weight, self._config.rms_norm_eps)

    def _block(self, weights: Weights, x: mx.array, keys: list[mx.array], values: list[mx.array]) -> mx.array:
        """One depth of the block; its keys and values are added to those of the depths above."""
        attention, mlp, config = weights["self_attn"], weights["mlp"], self._config
        normed = self._normed(x, weights["input_layernorm"])
        q, k, v = (
            (normed @ attention[name]["weight"].T).reshape(*x.shape[:2], -1, config.head_dim).swapaxes(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        keys.append(self._rope(k))
        values.append(v)
        heads = self._attention(self._rope(q), keys, values)
        x = x + heads.swapaxes(1, 2).reshape(*x.shape[:2], -1) @ attention["o_proj"]["weight"].T
        normed = self._normed(x, weights["post_attention_layernorm"])
        gate, up = normed @ mlp["gate_proj"]["weight"].T, normed @ mlp["up_proj"]["weight"].T
        made: mx.array = x + (gate * mx.sigmoid(gate) * up) @ mlp["down_proj"]["weight"].T
        return made

    def _attention(self, q: mx.array, keys: list[mx.array], values: list[mx.array]) -> mx.array:
        """Of queries T [B, H, n, D] of the deepest depth: T [B, H, n, D]."""
        depth = len(keys)
        rows, heads, length, dim = q.shape
        kv_heads = keys[0].shape[1]
        grouped = (q * self._scale).reshape(rows, kv_heads, heads // kv_heads, length, dim)
        flat = grouped.reshape(rows, kv_heads, -1, dim)
        scores = (flat @ keys[0].swapaxes(-1, -2)).reshape(*grouped.shape[:-1], length).astype(mx.float32)
        place = mx.arange(length)
        seen = place[None, :] <= place[:, None] - (depth - 1)
        # Finite, for the first rows of a deeper depth see no true pair.
        scores = mx.where(seen, scores, -1e9)
        shifted = [(back(keys[k], depth - 1 - k, 2), back(values[k], depth - 1 - k, 2)) for k in range(1, depth)]
        own = [(grouped * key[:, :, None]).astype(mx.float32).sum(-1, keepdims=True) for key, _ in shifted]
        shares = mx.softmax(mx.concatenate([scores, *own], axis=-1), axis=-1).astype(q.dtype)
        true = shares[..., :length].reshape(rows, kv_heads, -1, length) @ values[0]
        out = true.reshape(grouped.shape)
        for place_of, (_, value) in enumerate(shifted):
            share = shares[..., length + place_of : length + place_of + 1]
            out = out + share * value[:, :, None]
        return out.reshape(q.shape)
