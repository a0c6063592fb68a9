"""Cases of the kernels that know no positions: matrix-vector products, residual add with RMSNorm, SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from sweep_base import EVERY, Judge, Numbers, Wide, groups, narrow, run, wide

from worker.kernels import add_norm, matvec, matvec_mma, swiglu
from worker.kernels.dialect import MAX_ROWS
from worker.kernels.matvec import Affine, Extras

EPS = 1e-5


@dataclass(frozen=True)
class Product:
    """A weight of *outputs* lines (twice as many with glu), *width* wide, and what is done in the same launch.

    packing: bits and group, None of a dense weight. extras: words among norm, glu, residual, bias.
    """

    matrix: bool
    kind: str
    packing: tuple[int, int] | None
    width: int
    outputs: int
    extras: str
    counts: tuple[int, ...]
    seed: int = 0

    @property
    def name(self) -> str:
        """Of its figures."""
        unit = "matrix units" if self.matrix else "FMA"
        packed = "" if self.packing is None else ", {} bits in groups of {}".format(*self.packing)
        return f"matvec, {unit}, {self.kind}{packed}"

    def check(self, judge: Judge) -> None:
        """As in `Case`."""
        numbers = Numbers(self.seed, self.width, self.outputs)
        x, wide_x = numbers.normal(MAX_ROWS, self.width, kind=self.kind)
        weight, values = self._weight(numbers)
        extras, parts = self._extras(numbers)
        launch = matvec_mma.launch if self.matrix else matvec.launch
        whole = run(launch(x, weight, extras))
        found = []
        for start, count in groups(self.counts):
            end, add = start + count, extras.add
            some = replace(extras, add=add[start:end] if add is not None and add.ndim == 2 else add)
            found.append((start, end, run(launch(x[start:end], weight, some))))
        mx.eval(whole, [out for *_, out in found])
        judge.error(self.name, self.kind, whole, lambda: self._want(wide_x, values(), parts))
        for start, end, out in found:
            judge.bits(self.name, out, whole[start:end])

    def _weight(self, numbers: Numbers) -> tuple[mx.array | Affine, Callable[[], Wide]]:
        """The weight, and its values; a packed one as mx.quantize would make it of normal numbers."""
        lines, size = self.outputs * (2 if "glu" in self.extras else 1), 2 * self.width**-0.5
        if self.packing is None:
            weight, held = numbers.normal(lines, self.width, kind=self.kind, scale=size)
            return weight, lambda: held
        bits, group = self.packing
        size_in = (lines, self.width * bits // 32)
        words = numbers.random.integers(0, 1 << 32, size_in, np.uint32)
        spread = numbers.random.uniform(4.0, 6.0, (lines, self.width // group)).astype(np.float32) * np.float32(
            size
        )
        scales, wide_scales = narrow(spread / np.float32(1 << bits), self.kind)
        biases, wide_biases = narrow(spread * np.float32(-0.5), self.kind)

        def values() -> Wide:
            shifts = np.arange(0, 32, bits, dtype=np.uint32)
            held = words[..., None] >> shifts & np.uint32((1 << bits) - 1)
            parts = held.reshape(lines, -1, group) * wide_scales[..., None] + wide_biases[..., None]
            return parts.reshape(lines, -1)

        return Affine(mx.array(words), scales, biases, group, bits), values

    def _extras(self, numbers: Numbers) -> tuple[Extras, dict[str, Wide]]:
        """The options on the device, and their values by name."""
        held: dict[str, tuple[mx.array, Wide]] = {}
        if "norm" in self.extras:
            held["norm"] = numbers.normal(self.width, kind=self.kind)
        if "residual" in self.extras:
            held["add"] = numbers.normal(MAX_ROWS, self.outputs, kind=self.kind)
        if "bias" in self.extras:
            held["add"] = numbers.normal(self.outputs, kind=self.kind)
        arrays = {word: array for word, (array, _) in held.items()}
        extras = Extras(norm=arrays.get("norm"), eps=EPS, glu="glu" in self.extras, add=arrays.get("add"))
        return extras, {word: values for word, (_, values) in held.items()}

    def _want(self, x: Wide, weight: Wide, parts: dict[str, Wide]) -> Wide:
        if "norm" in parts:
            x = normed(x, parts["norm"])
        y: Wide = x @ weight.T
        if "glu" in self.extras:
            gate, up = np.split(y, 2, -1)
            return gate / (1 + np.exp(-gate)) * up
        return y + parts.get("add", 0.0)


def normed(x: Wide, weight: Wide) -> Wide:
    """RMSNorm of the rows of *x*."""
    out: Wide = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight
    return out


@dataclass(frozen=True)
class Elementwise:
    """Residual add with RMSNorm of rows *width* wide, and SwiGLU of as many gates."""

    kind: str
    width: int
    seed: int = 0

    def check(self, judge: Judge) -> None:
        """As in `Case`."""
        numbers = Numbers(self.seed, self.width)
        (x, wide_x), (delta, wide_delta) = (numbers.normal(MAX_ROWS, self.width, kind=self.kind) for _ in range(2))
        weight, wide_weight = numbers.normal(self.width, kind=self.kind)
        gate_up, wide_gate_up = numbers.normal(MAX_ROWS, 2 * self.width, kind=self.kind, scale=4)

        def both(start: int, end: int) -> tuple[mx.array, mx.array]:
            summed = run(add_norm.launch(x[start:end], delta[start:end], weight, EPS))
            return summed, run(swiglu.launch(gate_up[start:end]))

        summed, product = both(0, MAX_ROWS)
        found = [(start, start + count, *both(start, start + count)) for start, count in groups(EVERY)]
        mx.eval(summed, product, found)
        gate, up = np.split(wide_gate_up, 2, -1)
        # The sum is rounded before it is normed.
        exact, _ = narrow((wide_x + wide_delta).astype(np.float32), self.kind)
        judge.bits(f"add_norm, {self.kind}, the sum", summed[0], exact)
        judge.error(f"add_norm, {self.kind}", self.kind, summed[1], lambda: normed(wide(exact), wide_weight))
        judge.error(f"swiglu, {self.kind}", self.kind, product, lambda: gate / (1 + np.exp(-gate)) * up)
        for start, end, some, part in found:
            judge.bits(f"add_norm, {self.kind}", some, summed[:, start:end])
            judge.bits(f"swiglu, {self.kind}", part, product[start:end])
