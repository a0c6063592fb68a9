"""The kernels of a model on dummy rows: all that the verify bank and prefill of the in-place form launch.

Rows are of the model's own shapes and type, weights and constants its own. Pools hold NaN wherever no row is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, Protocol

import mlx.core as mx
import numpy as np

from worker.engine.packed import Layer, Linear, Packed
from worker.kernels import read_pages, rope_write, rows, swiglu
from worker.kernels.attention import attend
from worker.kernels.dialect import MAX_ROWS, PAGE
from worker.kernels.matvec import Affine, Extras, matvec, serves, unserved
from worker.kernels.matvec import reference as plain_matvec
from worker.kernels.move_rows import move_rows
from worker.kernels.operands import width_of
from worker.kv.pages import pages_for

Result = tuple[mx.array, mx.array | None]
"""An output, and the pool that was written, where one was."""


class Case(Protocol):
    """A kernel on some rows."""

    @property
    def kernel(self) -> str:
        """Its name in health."""

    @property
    def what(self) -> str:
        """Which rows, in words."""

    def got(self) -> Result:
        """What the kernel gives, not yet computed. The pool is written when the output is."""

    def want(self) -> Result:
        """The same by plain operations, and computed as exactly as these allow."""

    def plain(self) -> mx.array:
        """What would be computed in the kernel's stead, not yet computed."""


def cases(packed: Packed, prefill_rows: int, sizes: Sequence[int], contexts: Sequence[int]) -> Iterator[Case]:
    """Every kernel for every row count of *sizes*, the attention behind every one of *contexts*.

    What a kernel does not serve is computed by plain operations and is no case of it: `left_out` tells it.
    """
    # Layers are alike, but for whether they turn and how their weights are packed.
    kinds = {layer.heads: layer for layer in packed.layers}
    for count in sizes:
        for layer in kinds.values():
            for context in contexts:
                yield Attention(packed, layer, count, context)
    for layer in kinds.values():
        for start in (0, prefill_rows):
            yield Write(packed, layer, prefill_rows, start)
    yield Read(packed, prefill_rows)
    for name, linear, extras in _served(packed):
        rows_of = _Rows(packed, name, linear, extras)
        for count in sizes:
            yield Product(rows_of, count)
    if swiglu.serves(_gates(packed.layers[0])):
        for count in (*sizes, prefill_rows):
            yield Activation(packed, count)


def left_out(packed: Packed) -> dict[str, str]:
    """What of the model a kernel does not serve, in words, by the kernel's name in health."""
    weights = dict.fromkeys(filter(None, map(unserved, packed.weights)))
    width = _gates(packed.layers[0])
    found = {"matvec": ", ".join(weights), "swiglu": "" if swiglu.serves(width) else f"an MLP {width // 2} wide"}
    return {name: what for name, what in found.items() if what}


def tree_cases(packed: Packed, sizes: Sequence[int], contexts: Sequence[int]) -> Iterator[Case]:
    """The kernels that forwards over trees of *sizes* launch beside those of chains."""
    for layer in {layer.heads: layer for layer in packed.layers}.values():
        for count in sizes:
            for context in contexts:
                yield Tree(packed, layer, count, context)
    yield Move(packed, packed.layers[0])


def some(shape: Sequence[int], dtype: mx.Dtype, seed: int) -> mx.array:
    """Numbers of mean 0 and deviation 1, the same for the same seed.

    Made by the host: MLX on CUDA would have to compile its own generator first, which takes seconds.
    """
    return mx.array(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)).astype(dtype)


def _gates(layer: Layer) -> int:
    """How many rows the joint weight of gate and up has."""
    weight = layer.gate_up.weight
    return int((weight.words if isinstance(weight, Affine) else weight).shape[0])


def _served(packed: Packed) -> Iterator[tuple[str, Linear, Extras]]:
    """The products that the kernel serves, one of each name and packing: layers may differ in their bits."""
    known, residual = set(), some((MAX_ROWS, packed.norm.size), packed.dtype, 1)
    for layer in packed.layers:
        for name, linear, extras in _products(packed, layer, residual):
            weight = linear.weight
            kind = (name, (weight.bits, weight.group) if isinstance(weight, Affine) else None)
            if serves(weight) and kind not in known:
                known.add(kind)
                yield name, linear, extras


def _products(packed: Packed, layer: Layer, residual: mx.array) -> Iterator[tuple[str, Linear, Extras]]:
    """The products as `VerifyBank` asks for them; *residual*: what is added, [16, N]."""
    eps = packed.eps
    yield "qkv", layer.qkv, Extras(norm=layer.input_norm, eps=eps, add=layer.qkv.bias)
    yield "out", layer.out, Extras(add=residual)
    if layer.gate_up.bias is None:
        yield "gate_up", layer.gate_up, Extras(norm=layer.post_norm, eps=eps, glu=True)
    else:
        yield "gate_up", layer.gate_up, Extras(norm=layer.post_norm, eps=eps, add=layer.gate_up.bias)
    yield "down", layer.down, Extras(add=residual)
    yield "head", packed.head, Extras(norm=packed.norm, eps=eps)


class _Rows:
    """16 rows for a product, and what plain operations make of them, row by row.

    Several rows at once would be another product of MLX's, which may take it a minute to compile.
    """

    def __init__(self, packed: Packed, name: str, linear: Linear, extras: Extras) -> None:
        self.name = name
        self.weight = linear.weight
        self.extras = extras
        self.x = some((MAX_ROWS, width_of(linear.weight)), packed.dtype, 2)
        self.plain = cache(self._plain)

    def part(self, start: int, end: int) -> tuple[mx.array, Extras]:
        """Some of the rows, and the options for them."""
        add = self.extras.add
        if add is not None and add.ndim == 2:
            add = add[start:end]
        extras = Extras(norm=self.extras.norm, eps=self.extras.eps, glu=self.extras.glu, add=add)
        return self.x[start:end], extras

    def _plain(self) -> mx.array:
        each = [self.part(row, row + 1) for row in range(MAX_ROWS)]
        made = mx.concatenate([plain_matvec(x, self.weight, extras) for x, extras in each])
        mx.eval(made)
        return made


@dataclass(frozen=True, slots=True)
class Product:
    """The first *count* rows by a product of the model."""

    rows: _Rows
    count: int

    @property
    def kernel(self) -> str:
        """As in `Case`."""
        return "matvec"

    @property
    def what(self) -> str:
        """As in `Case`."""
        return f"{self.rows.name}, rows: {self.count}"

    def got(self) -> Result:
        """As in `Case`."""
        x, extras = self.rows.part(0, self.count)
        return matvec(x, self.rows.weight, extras), None

    def want(self) -> Result:
        """As in `Case`."""
        return self.rows.plain()[: self.count], None

    def plain(self) -> mx.array:
        """As in `Case`."""
        x, extras = self.rows.part(0, self.count)
        return matvec(x, self.rows.weight, extras, use_kernel=False)


class _Plain:
    """A case whose plain operations are those of the other path."""

    def want(self) -> Result:
        """As in `Case`."""
        raise NotImplementedError

    def plain(self) -> mx.array:
        """As in `Case`."""
        return self.want()[0]


class _Paged(_Plain):
    """A pool with *length* rows behind a shuffled table with room for *count* more."""

    kernel: str

    def __init__(self, packed: Packed, layer: Layer, count: int, length: int) -> None:
        assert layer.table is not None, "a model whose rope is no table of constants is not served"
        self.heads = layer.heads
        self.table: mx.array = layer.table
        self.count = count
        self.length = length
        self.what = f"rows: {count}, positions before: {length}"
        pages = max(7, pages_for(length + count))
        order = random.Random(length).sample(range(pages + 2), pages)  # noqa: S311 - any shuffle will do
        self.meta = mx.array([length, *order], dtype=mx.int32)
        joint = (self.heads.heads + 2 * self.heads.kv_heads) * self.heads.dim
        self.qkv = some((count, joint), packed.dtype, 3)

    def held(self) -> np.ndarray:
        """What the pool holds, float32, the same every time."""
        shape = (2, self.heads.kv_heads, (self.meta.size + 1) * PAGE, self.heads.dim)
        held = np.random.default_rng(4).standard_normal(shape, dtype=np.float32)
        length, *order = self.meta.tolist()  # type: ignore[misc]
        written = np.concatenate([page * PAGE + np.arange(PAGE) for page in order])[:length]
        unwritten = np.setdiff1d(np.arange(shape[2]), written)
        held[:, :, unwritten] = math.nan
        return held

    def pool(self) -> mx.array:
        """A new one, the same every time."""
        pool = mx.array(self.held()).astype(self.qkv.dtype)
        mx.eval(pool)
        return pool


class Attention(_Paged):
    """New rows into the pool, and the attention over it."""

    kernel = "attention"

    def got(self) -> Result:
        """As in `Case`."""
        return attend(self.qkv, self.table, self.pool(), self.meta, self.heads)

    def want(self) -> Result:
        """As in `Case`."""
        return attend(self.qkv, self.table, self.pool(), self.meta, self.heads, use_kernel=False)


class Tree(_Paged):
    """As `Attention`, of rows that branch twice."""

    kernel = "attention over a tree"

    @property
    def _tree(self) -> mx.array:
        return rows.tree_array([-1, 0, 0, *(row - 2 for row in range(3, self.count))])

    def got(self) -> Result:
        """As in `Case`."""
        return attend(self.qkv, self.table, self.pool(), self.meta, self.heads, self._tree)

    def want(self) -> Result:
        """As in `Case`."""
        pool = self.pool()
        return attend(self.qkv, self.table, pool, self.meta, self.heads, self._tree, use_kernel=False)


class Move(_Paged):
    """Rows of a sequence over the rows before them, as many as a tree may move."""

    kernel = "move_rows"

    def __init__(self, packed: Packed, layer: Layer) -> None:
        super().__init__(packed, layer, MAX_ROWS, 2 * PAGE)
        order = np.array(self.meta)[1:, None]
        slots = (order * PAGE + np.arange(PAGE, dtype=np.int32)).reshape(-1)
        # From the second page over the end of the first and on; the last move is left out.
        self._moves = np.stack([slots[place : place + MAX_ROWS] for place in (40, 24)])
        self._moves[:, -1] = -1

    def got(self) -> Result:
        """As in `Case`."""
        again, pool = move_rows(self.pool(), mx.array(self._moves))
        return again.astype(mx.float32), pool

    def want(self) -> Result:
        """As in `Case`: by the host, for whose scatter MLX on CUDA would have to compile its own."""
        held = self.held()
        sources, targets = self._moves[:, :-1]
        held[:, :, targets] = held[:, :, sources]
        return mx.array(self._moves.astype(np.float32)), mx.array(held).astype(self.qkv.dtype)


class Write(_Paged):
    """The rows of a prefill forward into the pool."""

    kernel = "rope_write"

    def got(self) -> Result:
        """As in `Case`."""
        return rope_write.rope_write(self.qkv, self.table, self.pool(), self.meta, self.heads)

    def want(self) -> Result:
        """As in `Case`."""
        return rope_write.rope_write(self.qkv, self.table, self.pool(), self.meta, self.heads, use_kernel=False)


class Read(_Paged):
    """The rows of a sequence together."""

    kernel = "read_pages"

    def __init__(self, packed: Packed, count: int) -> None:
        super().__init__(packed, packed.layers[0], count, count + PAGE // 2)

    def got(self) -> Result:
        """As in `Case`."""
        return read_pages.read_pages(self.pool(), self.meta, self.length, self.qkv), None

    def want(self) -> Result:
        """As in `Case`."""
        return read_pages.reference(self.pool(), self.meta, self.length), None


class Activation(_Plain):
    """SwiGLU of *count* rows."""

    kernel: Final = "swiglu"

    def __init__(self, packed: Packed, count: int) -> None:
        self.what = f"rows: {count}"
        self._joint = some((count, _gates(packed.layers[0])), packed.dtype, 5)

    def got(self) -> Result:
        """As in `Case`."""
        return swiglu.swiglu(self._joint), None

    def want(self) -> Result:
        """As in `Case`."""
        return swiglu.swiglu(self._joint, use_kernel=False), None
