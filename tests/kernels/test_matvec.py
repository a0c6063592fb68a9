"""Matrix-vector products over the stand-in."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from kernels import standin
from kernels.oracle import TYPES, close, draw, same, wide

from worker.kernels import matvec
from worker.kernels.matvec import Affine, Extras

PACKINGS = [(bits, group) for bits in (4, 8) for group in (32, 64, 128)]


@dataclass(frozen=True)
class Shape:
    rows: int
    width: int
    outputs: int
    dtype: str
    packing: tuple[int, int] | None = None


def make(random: np.random.Generator, shape: Shape, lines: int) -> tuple[mx.array | Affine, np.ndarray]:
    """A weight of *lines* rows, and its values."""
    dense = draw(random, (lines, shape.width), TYPES[shape.dtype])
    if shape.packing is None:
        return dense, wide(dense)
    bits, group = shape.packing
    words, scales, biases = mx.quantize(dense, group_size=group, bits=bits)
    numbers = np.array(words)[..., None] >> np.arange(0, 32, bits, dtype=np.uint32) & ((1 << bits) - 1)
    scale, bias = (np.repeat(wide(part), group, -1) for part in (scales, biases))
    return Affine(words, scales, biases, group, bits), numbers.reshape(lines, -1) * scale + bias


def extras_of(random: np.random.Generator, shape: Shape, kind: str) -> Extras:
    dtype = TYPES[shape.dtype]
    norm = draw(random, (shape.width,), dtype) if "norm" in kind else None
    add = {"residual": (shape.rows, shape.outputs), "bias": (shape.outputs,)}
    wanted = next((add[name] for name in add if name in kind), None)
    return Extras(
        norm=norm, eps=1e-5, glu="glu" in kind, add=None if wanted is None else draw(random, wanted, dtype)
    )


def truth(x: np.ndarray, weight: np.ndarray, extras: Extras) -> np.ndarray:
    if extras.norm is not None:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + extras.eps) * wide(extras.norm)
    y = x @ weight.T
    if extras.glu:
        gate, up = np.split(y, 2, -1)
        return gate / (1 + np.exp(-gate)) * up
    return y if extras.add is None else y + wide(extras.add)


def check(shape: Shape, kind: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    extras = extras_of(random, shape, kind)
    weight, values = make(random, shape, shape.outputs * (2 if extras.glu else 1))
    x = draw(random, (shape.rows, shape.width), TYPES[shape.dtype])
    out, _ = standin.run(matvec.launch(x, weight, extras))
    close(out, truth(wide(x), values, extras))
    # MLX's quantised product on the CPU adds up in the type itself: it says nothing in 16 bits.
    if shape.packing is None or shape.dtype == "float32":
        close(matvec.matvec(x, weight, extras, use_kernel=False), truth(wide(x), values, extras), slack=2)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        (Shape(1, 576, 65, "bfloat16"), "norm"),
        (Shape(3, 256, 33, "float32"), "residual"),
        (Shape(16, 96, 24, "float16"), "bias"),
        (Shape(2, 288, 40, "bfloat16"), "norm glu"),
        (Shape(4, 64, 2101, "float32"), "norm bias"),
        (Shape(1, 128, 48, "float32", (4, 32)), "norm"),
        (Shape(5, 576, 31, "bfloat16", (4, 64)), "residual"),
        (Shape(2, 1024, 24, "float16", (4, 128)), "norm glu"),
        (Shape(16, 128, 17, "float32", (8, 64)), "plain"),
        (Shape(3, 1152, 16, "bfloat16", (8, 32)), "norm bias"),
    ],
)
def test_products_agree_with_float64(shape: Shape, kind: str) -> None:
    check(shape, kind, seed=shape.rows)


def invariance(shape: Shape, kind: str, counts: tuple[int, ...]) -> None:
    """Sixteen rows one by one, then in groups of each size at every place that is wholly inside."""
    random = np.random.default_rng(9)
    extras = extras_of(random, Shape(16, *list(vars(shape).values())[1:]), kind)
    weight, _ = make(random, shape, shape.outputs * (2 if extras.glu else 1))
    x = draw(random, (16, shape.width), TYPES[shape.dtype])

    def rows(start: int, count: int) -> mx.array:
        add = extras.add if extras.add is None or extras.add.ndim == 1 else extras.add[start : start + count]
        some = Extras(norm=extras.norm, eps=extras.eps, glu=extras.glu, add=add)
        return standin.run(matvec.launch(x[start : start + count], weight, some))[0]

    alone = mx.concatenate([rows(row, 1) for row in range(16)])
    for count in counts:
        for start in range(0, 17 - count, count):
            same(rows(start, count), alone[start : start + count])


@pytest.mark.parametrize("packing", [None, (4, 64)])
def test_bits_do_not_depend_on_the_other_rows(packing: tuple[int, int] | None) -> None:
    invariance(Shape(1, 576, 40, "bfloat16", packing), "norm residual", (2, 5, 16))


def test_bits_do_not_depend_on_the_outputs_of_a_simdgroup() -> None:
    random = np.random.default_rng(4)
    x, weight = draw(random, (2, 64), mx.float32), draw(random, (4203, 64), mx.float32)
    launches = [matvec.launch(x, weight[:lines]) for lines in (40, 2101, 4203)]
    assert len({dict(one.template)["OUTPUTS"] for one in launches}) == 3
    outs = [standin.run(one)[0] for one in launches]
    same(outs[1][:, :40], outs[0])
    same(outs[2][:, :40], outs[0])


KINDS = (("plain", 128, 33), ("norm residual", 640, 24), ("norm glu", 1024, 24), ("norm bias", 1536, 2051))


# The long forms go through the types in turn: each instance has to be compiled.
@pytest.mark.prove
@pytest.mark.parametrize("packing", [None, *PACKINGS])
def test_the_whole_sweep_agrees_with_float64(packing: tuple[int, int] | None) -> None:
    for rows in range(1, 17):
        for turn in range(2):
            kind, width, outputs = KINDS[(rows + 2 * turn + rows // 4) % 4]
            check(Shape(rows, width, outputs, list(TYPES)[(rows + turn) % 3], packing), kind, rows)


@pytest.mark.prove
@pytest.mark.parametrize(("packing", "dtype"), list(zip([None, None, None, *PACKINGS], [*TYPES] * 3, strict=True)))
def test_bits_hold_for_every_row_count(packing: tuple[int, int] | None, dtype: str) -> None:
    kind = "norm glu" if packing in (None, (4, 64), (8, 32)) else "norm residual"
    invariance(Shape(1, 640, 40, dtype, packing), kind, tuple(range(2, 17)))
