"""The model whose head is made, over many rows at once: what it thinks of a text, and texts that it writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import mlx.core as mx

from mtplx.errors import ModelFilesError
from worker.engine.load import LoadedModel, device_name
from worker.engine.packed import Layer, Linear, NotDenseError, pack
from worker.kernels.operands import Affine

# Rows and keys come in multiples of this, so that few shapes are compiled.
STEP: Final = 64
_Attend = Callable[[int, mx.array, mx.array, mx.array], mx.array]


class Kept(NamedTuple):
    """Keys and values of each layer T [B, Hkv, n, D]: of columns that are complete, and of the latest STEP.

    A step writes into the short ones alone: while the device still reads a buffer MLX copies it to write into it.
    """

    keys: list[mx.array]
    values: list[mx.array]
    new_keys: list[mx.array]
    new_values: list[mx.array]


class Begun(NamedTuple):
    """Texts that are being written.

    column: of the next token. starts: int32 [B], the first column of each. logits: T [B, V], of the next token.
    """

    column: int
    starts: mx.array
    kept: Kept
    logits: mx.array


def up_to(count: int, step: int = STEP) -> int:
    """*count*, or the next multiple of *step* above it."""
    return -(-count // step) * step


def compiled(call: Any) -> Any:
    """*call* compiled, but on the CPU, where MLX runs a C++ compiler for each kernel."""
    return call if device_name() == "cpu" else mx.compile(call)


class Target:
    """A dense model over batches. Positions are columns: a shift of a whole row changes no attention.

    Args:
        loaded: its module is packed in place. Quantised weights are taken apart once: large products are bound by
            arithmetic, not by memory.

    Raises:
        ModelFilesError: the model is not of the dense family.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        try:
            packed = pack(loaded.model)
        except NotDenseError as error:
            raise ModelFilesError(
                f"No head can be made for {loaded.name}: {error}. Heads are made for dense models only: llama,"
                " mistral, qwen2, qwen3 and what shares their block."
            ) from error
        self._packed = packed
        self._layers = [
            [_dense(one, packed.dtype) for one in (layer.qkv, layer.out, layer.gate_up, layer.down)]
            for layer in packed.layers
        ]
        head = _dense(packed.head, packed.dtype)
        assert isinstance(head.weight, mx.array), "nothing is quantised here"
        self.lm_head: mx.array = head.weight.T
        self._compiled = compiled(self._step)
        mx.eval(self.lm_head, [one.weight for products in self._layers for one in products])

    @property
    def width(self) -> int:
        """K."""
        return int(self._packed.norm.size)

    @property
    def dtype(self) -> mx.Dtype:
        """Of all states."""
        return self._packed.dtype

    def embed(self, ids: mx.array) -> mx.array:
        """Of ids [...]: T [..., K]."""
        rows: mx.array = self._packed.embed(ids)
        return rows

    def states(self, ids: mx.array) -> mx.array:
        """The states behind the final norm T [B, n, K], of ids [B, n] that all begin in column 0."""
        return self._run(ids, 0, self._causal)

    def last_input(self, ids: mx.array) -> mx.array:
        """What the last layer is given T [B, n, K], of such ids."""
        return self._layers_of(ids, 0, self._causal, len(self._layers) - 1)

    def _causal(self, _place: int, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=self._packed.scale, mask="causal")

    def logits(self, states: mx.array) -> mx.array:
        """Of states T [..., K]: T [..., V]."""
        return states @ self.lm_head

    def begin(self, prompts: Sequence[Sequence[int]]) -> Begun:
        """Read *prompts*, which all end in one column."""
        width = up_to(max(len(prompt) for prompt in prompts))
        ids = mx.array([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        starts = mx.array([width - len(prompt) for prompt in prompts])
        column = mx.arange(width)
        # A column in front of its text sees itself, so that no row of the softmax is empty.
        own = column[None, :] == column[:, None]
        visible = (column[None, None, :] >= starts[:, None, None]) & (column[None, :] <= column[:, None])[None]
        mask = (visible | own[None])[:, None]
        keys: list[mx.array] = []
        values: list[mx.array] = []

        def attend(_place: int, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
            keys.append(k)
            values.append(v)
            return mx.fast.scaled_dot_product_attention(q, k, v, scale=self._packed.scale, mask=mask)

        logits = self.logits(self._run(ids, 0, attend)[:, -1])
        empty = [mx.zeros((*k.shape[:2], STEP, k.shape[-1]), dtype=k.dtype) for k in keys]
        kept = Kept(keys, values, empty, list(empty))
        mx.eval(logits, kept)
        return Begun(width, starts, kept, logits)

    def step(self, begun: Begun, ids: mx.array) -> Begun:
        """The texts, one token further by ids [B]."""
        kept, column = begun.kept, begun.column
        if column == kept.keys[0].shape[2] + STEP:
            joined = [
                [mx.concatenate(list(pair), axis=2) for pair in zip(old, new, strict=True)]
                for old, new in ((kept.keys, kept.new_keys), (kept.values, kept.new_values))
            ]
            kept = Kept(joined[0], joined[1], kept.new_keys, kept.new_values)
        logits, new_keys, new_values = self._compiled(ids, mx.array([column]), begun.starts, kept)
        return Begun(column + 1, begun.starts, Kept(kept.keys, kept.values, new_keys, new_values), logits)

    def _step(
        self, ids: mx.array, column: mx.array, starts: mx.array, kept: Kept
    ) -> tuple[mx.array, list[mx.array], list[mx.array]]:
        keys, values, new_keys, new_values = kept
        before = keys[0].shape[2]
        places = mx.arange(before + STEP)
        visible = (places[None] >= starts[:, None]) & (places <= column)[None]
        mask = mx.where(visible, 0.0, -mx.inf)[:, None, None]
        written: tuple[list[mx.array], list[mx.array]] = ([], [])

        def attend(place: int, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
            for fresh, old, one in zip(written, (new_keys, new_values), (k, v), strict=True):
                fresh.append(mx.slice_update(old[place], one, column - before, axes=[2]))
            latest, latest_values = (fresh[place] for fresh in written)
            rows, heads, _, dim = q.shape
            grouped = q.reshape(rows, k.shape[1], heads // k.shape[1], dim) * self._packed.scale
            scores = [grouped @ one.swapaxes(-1, -2) for one in (keys[place], latest)]
            shares = mx.softmax(mx.concatenate(scores, axis=-1).astype(mx.float32) + mask, axis=-1)
            shares = shares.astype(v.dtype)
            out = shares[..., :before] @ values[place] + shares[..., before:] @ latest_values
            return out.reshape(rows, heads, 1, dim)

        normed = self._run(ids[:, None], column, attend)[:, 0]
        return self.logits(normed), *written

    def _run(self, ids: mx.array, offset: int | mx.array, attend: _Attend) -> mx.array:
        """The final states T [B, n, K] of ids [B, n]; *attend* is told the layer's place and its roped heads."""
        return self._packed.normed(self._layers_of(ids, offset, attend, len(self._layers)), self._packed.norm)

    def _layers_of(self, ids: mx.array, offset: int | mx.array, attend: _Attend, count: int) -> mx.array:
        """The same behind *count* layers, without a norm."""
        packed = self._packed
        x: mx.array = packed.embed(ids)
        for place in range(count):
            layer, products = packed.layers[place], self._layers[place]
            qkv, out, gate_up, down = products
            q, k, v = _heads(layer, qkv(packed.normed(x, layer.input_norm)), offset)
            heads = attend(place, q, k, v)
            x = x + out(heads.swapaxes(1, 2).reshape(*x.shape[:2], -1))
            gate, up = mx.split(gate_up(packed.normed(x, layer.post_norm)), 2, axis=-1)
            x = x + down(gate * mx.sigmoid(gate) * up)
        return x


def _heads(layer: Layer, qkv: mx.array, offset: int | mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Queries T [B, H, n, D], keys and values T [B, Hkv, n, D], of their product T [B, n, N]."""
    shape = layer.heads
    ends = [shape.heads, shape.heads + shape.kv_heads]
    q, k, v = mx.split(qkv.reshape(*qkv.shape[:2], -1, shape.dim).swapaxes(1, 2), ends, axis=1)
    if layer.q_norm is not None:
        eps = shape.norm_eps or 0.0
        q = mx.fast.rms_norm(q, layer.q_norm, eps)
        k = mx.fast.rms_norm(k, layer.k_norm, eps)
    if layer.rope is not None:
        q, k = layer.rope(q, offset=offset), layer.rope(k, offset=offset)
    return q, k, v


def _dense(product: Linear, dtype: mx.Dtype) -> Linear:
    """The same product without quantised weights."""
    weight = product.weight
    if isinstance(weight, Affine):
        weight = mx.dequantize(weight.words, weight.scales, weight.biases, weight.group, weight.bits)
        weight = weight.astype(dtype)
        return Linear(weight, product.bias, weight.T)
    return product
