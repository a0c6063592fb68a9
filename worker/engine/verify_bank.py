"""The decode forward of the dense family over the kernels, compiled once for each row count, chain and tree.

Every shape is static: length and block table are one array, so a traced function serves the whole life of the
process. The pools are operands, not captured, and come back as results where they were not written in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, cast

import mlx.core as mx

from worker.engine.packed import Layer, Linear, Packed
from worker.kernels import matvec
from worker.kernels.attention import attend
from worker.kernels.dialect import chosen
from worker.kernels.matvec import Extras
from worker.kernels.swiglu import swiglu

SIZES: Final = (1, 2, 4, 8, 16)
"""Row counts that are compiled; a forward between two of them runs the larger one."""

TREE_SIZES: Final = SIZES[2:]
"""Those of trees: fewer than three rows do not branch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """Which kernels the forward uses; decided at load for every row count.

    matvec: our matrix-vector products, with norm, SwiGLU and residual in the same launch; else MLX's products.
    kernels: None, kernels where there is a GPU; False, plain operations everywhere.
    trees: forwards over trees are compiled, too.
    """

    matvec: bool = True
    trees: bool = False
    kernels: bool | None = None


def size_for(rows: int) -> int:
    """The compiled row count that serves *rows*.

    Raises:
        ValueError: More rows than a forward has.
    """
    for size in SIZES:
        if rows <= size:
            return size
    raise ValueError(f"a forward has at most {SIZES[-1]} rows, not {rows}")


class Products:
    """The products of a forward by the kernels that *switches* allow. eps: of the norms before them."""

    def __init__(self, eps: float, switches: Switches) -> None:
        self._eps = eps
        self._switches = switches

    def mlp(self, x: mx.array, layer: Layer) -> mx.array:
        """A block's second half: x T [R, K] and its MLP."""
        if self._switches.matvec and layer.gate_up.bias is None:
            extras = Extras(norm=layer.post_norm, eps=self._eps, glu=True)
            activated = matvec.matvec(x, layer.gate_up.weight, extras, use_kernel=self._switches.kernels)
        else:
            activated = swiglu(self.normed(x, layer.post_norm, layer.gate_up), use_kernel=self._switches.kernels)
        return self.added(activated, layer.down, x)

    def normed(self, x: mx.array, norm: mx.array, linear: Linear) -> mx.array:
        """The product of RMSNorm(x)."""
        if not self._switches.matvec:
            return linear(mx.fast.rms_norm(x, norm, self._eps))
        extras = Extras(norm=norm, eps=self._eps, add=linear.bias)
        return matvec.matvec(x, linear.weight, extras, use_kernel=self._switches.kernels)

    def plain(self, x: mx.array, linear: Linear) -> mx.array:
        """The product of x."""
        if not self._switches.matvec:
            return linear(x)
        extras = Extras(add=linear.bias)
        return matvec.matvec(x, linear.weight, extras, use_kernel=self._switches.kernels)

    def added(self, x: mx.array, linear: Linear, residual: mx.array) -> mx.array:
        """The product of x, added to the residual."""
        if not self._switches.matvec:
            return residual + linear(x)
        y = matvec.matvec(x, linear.weight, Extras(add=residual), use_kernel=self._switches.kernels)
        return y if linear.bias is None else y + linear.bias


class Ran(NamedTuple):
    """What a forward gives, lazily.

    logits: T [R, V]. meta: with R rows more. pools: with the new rows. states: T [R, K], which the final norm
    takes, where they were asked for.
    """

    logits: mx.array
    meta: mx.array
    pools: list[mx.array]
    states: mx.array | None = None


class VerifyBank:
    """The forward of R rows for each R of `SIZES`, and over trees for each R of `TREE_SIZES`."""

    def __init__(self, packed: Packed, switches: Switches) -> None:
        self._packed = packed
        self._switches = switches
        self.in_place = chosen(switches.kernels) is not None
        """Whether kernels write the pools."""
        self._compiled: dict[tuple[int, bool, bool], Callable[..., list[mx.array]]] = {}
        self.products = Products(packed.eps, switches)
        self._steps: dict[tuple[int, int], mx.array] = {}

    @property
    def row_invariant(self) -> bool:
        """Whether a row's bits are the same whatever R is."""
        return self.in_place and self._switches.matvec and all(map(matvec.serves, self._packed.weights))

    def run(
        self,
        tokens: mx.array,
        meta: mx.array,
        pools: list[mx.array],
        tree: mx.array | None = None,
        *,
        tells: bool = False,
    ) -> Ran:
        """One forward, lazily.

        Args:
            tokens: uint32 [R], R of `SIZES`.
            meta: int32 [1 + pages] as in `kernels.rows`.
            pools: per layer T [2, Hkv, slots, D].
            tree: as in `kernels.rows`; None for a chain.
            tells: whether the states before the final norm are wanted.
        """
        key = (tokens.size, tree is not None, tells)
        if key not in self._compiled:
            forward = partial(self._forward if tree is None else self._over_tree, tells)
            # mx.compile types its result as a plain callable.
            self._compiled[key] = cast("Callable[..., list[mx.array]]", mx.compile(forward))
        logits, after, *more = self._compiled[key](tokens, meta, *([] if tree is None else [tree]), *pools)
        states = more.pop(0) if tells else None
        return Ran(logits, after, more or pools, states)

    def _over_tree(
        self, tells: bool, tokens: mx.array, meta: mx.array, tree: mx.array, *pools: mx.array
    ) -> list[mx.array]:
        return self._forward(tells, tokens, meta, *pools, tree=tree)

    def _forward(
        self, tells: bool, tokens: mx.array, meta: mx.array, *pools: mx.array, tree: mx.array | None = None
    ) -> list[mx.array]:
        packed, products, kernels = self._packed, self.products, self._switches.kernels
        x = packed.embed(tokens)
        written = []
        for layer, pool in zip(packed.layers, pools, strict=True):
            qkv = products.normed(x, layer.input_norm, layer.qkv)
            assert layer.table is not None, "a model whose rope is no table of constants has no bank"
            heads, after = attend(qkv, layer.table, pool, meta, layer.heads, tree, use_kernel=kernels)
            written.append(after)
            x = products.added(heads, layer.out, x)
            x = products.mlp(x, layer)
        logits = products.normed(x, packed.norm, packed.head)
        after = meta + self._step(tokens.size, meta.size)
        return [logits, after, *([x] if tells else []), *([] if self.in_place else written)]

    def _step(self, rows: int, width: int) -> mx.array:
        """What is added to meta: a constant of the compiled function."""
        key = (rows, width)
        if key not in self._steps:
            self._steps[key] = mx.array([rows, *[0] * (width - 1)], dtype=mx.int32)
        return self._steps[key]


def unserved(packed: Packed) -> str:
    """Why the kernels cannot serve this model, in words; empty where they can."""
    heads: Any = packed.heads
    if any(layer.table is None for layer in packed.layers):
        return "its rope is no table of constants"
    if heads.dim % 16 or heads.dim > 256:
        return f"its head dimension {heads.dim} is not a multiple of 16 up to 256"
    if packed.norm.size % 32:
        return f"its width {packed.norm.size} is not a multiple of 32"
    return ""
