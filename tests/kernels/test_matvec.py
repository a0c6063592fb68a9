"""Matrix-vector products over the stand-in: the plain kernel, and the one on matrix units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest
from kernels import standin
from kernels.oracle import TYPES, close, draw, same, wide

from worker.kernels import matvec, matvec_mma
from worker.kernels.dialect import Launch
from worker.kernels.matvec import Affine, Extras
from worker.kernels.matvec_tiles import Tile, for_rows, tile_of, unit_of

Launcher = Callable[..., Launch]
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


def check(shape: Shape, kind: str, seed: int, launch: Launcher = matvec.launch, **tile: Tile) -> None:
    random = np.random.default_rng(seed)
    extras = extras_of(random, shape, kind)
    weight, values = make(random, shape, shape.outputs * (2 if extras.glu else 1))
    x = draw(random, (shape.rows, shape.width), TYPES[shape.dtype])
    out, _ = standin.run(launch(x, weight, extras, **tile))
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


def invariance(
    shape: Shape, kind: str, counts: tuple[int, ...], launch: Launcher = matvec.launch, **tile: Tile
) -> None:
    """Sixteen rows one by one, then in groups of each size at every place that is wholly inside."""
    random = np.random.default_rng(9)
    extras = extras_of(random, Shape(16, *list(vars(shape).values())[1:]), kind)
    weight, _ = make(random, shape, shape.outputs * (2 if extras.glu else 1))
    x = draw(random, (16, shape.width), TYPES[shape.dtype])

    def rows(start: int, count: int) -> mx.array:
        add = extras.add if extras.add is None or extras.add.ndim == 1 else extras.add[start : start + count]
        some = Extras(norm=extras.norm, eps=extras.eps, glu=extras.glu, add=add)
        return standin.run(launch(x[start : start + count], weight, some, **tile))[0]

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


# Each way to cut a product up that the table has, at sizes the stand-in can bear; K and N that do not come out even.
HELD = Tile(tiles=2, split=4, step=2, slots=3, ahead=0, groups=2)
STREAMED = Tile(tiles=1, split=3, step=2, slots=3, ahead=2, groups=3)


@pytest.mark.parametrize(
    ("shape", "kind", "tile"),
    [
        (Shape(1, 32, 5, "bfloat16"), "plain", None),
        (Shape(16, 96, 24, "float16"), "bias", None),
        (Shape(3, 160, 33, "bfloat16"), "norm glu", None),
        (Shape(2, 576, 65, "float16"), "norm residual", None),
        (Shape(1, 1536, 17, "bfloat16"), "residual", None),
        (Shape(5, 512, 100, "bfloat16"), "norm", HELD),
        (Shape(11, 512, 40, "bfloat16"), "residual", HELD),
        (Shape(4, 352, 90, "bfloat16"), "norm glu", STREAMED),
        (Shape(1, 32, 24, "bfloat16", (4, 32)), "plain", None),
        (Shape(7, 160, 31, "bfloat16", (8, 32)), "norm bias", None),
        (Shape(9, 96, 20, "float16", (4, 32)), "norm glu", None),
        (Shape(2, 576, 40, "bfloat16", (4, 64)), "norm glu", None),
        (Shape(16, 1536, 16, "bfloat16", (8, 64)), "residual", None),
        (Shape(1, 1024, 24, "float16", (4, 128)), "norm residual", None),
        (Shape(6, 1024, 100, "bfloat16", (4, 64)), "norm glu", HELD),
        (Shape(13, 512, 50, "float16", (8, 32)), "residual", HELD),
        (Shape(2, 832, 90, "bfloat16", (4, 64)), "norm bias", STREAMED),
    ],
)
def test_matrix_units_agree_with_float64(shape: Shape, kind: str, tile: Tile | None) -> None:
    check(shape, kind, shape.rows, matvec_mma.launch, **({} if tile is None else {"tile": tile}))


@pytest.mark.parametrize("packing", [None, (4, 64), (8, 32)])
def test_bits_on_matrix_units_do_not_depend_on_the_other_rows(packing: tuple[int, int] | None) -> None:
    shape = Shape(1, 576, 40, "bfloat16", packing)
    invariance(shape, "norm residual", (5, 16), matvec_mma.launch)


def test_bits_on_matrix_units_do_not_depend_on_what_is_held_and_made_at_a_time() -> None:
    random = np.random.default_rng(6)
    weight, _ = make(random, Shape(3, 512, 100, "bfloat16", (4, 64)), 100)
    x = draw(random, (3, 512), mx.bfloat16)
    tiles = [
        Tile(1, 4, 2, 2),
        Tile(2, 4, 2, 2, ahead=2),
        Tile(1, 4, 2, 4, ahead=0, groups=3),
        Tile(4, 4, 2, 3, 0, 1),
    ]
    outs = [standin.run(matvec_mma.launch(x, weight, tile=tile))[0] for tile in tiles]
    for out in outs[1:]:
        same(out, outs[0])


@pytest.mark.parametrize("glu", [False, True])
@pytest.mark.parametrize("packing", [None, *PACKINGS])
def test_the_number_of_rows_never_changes_how_sums_are_cut(packing: tuple[int, int] | None, glu: bool) -> None:
    for width in (
        32,
        96,
        160,
        576,
        896,
        1024,
        1536,
        2048,
        2560,
        3072,
        3584,
        4096,
        5120,
        8192,
        11008,
        12288,
        14336,
    ):
        if packing is not None and width % packing[1]:
            continue
        dense = mx.zeros((1,))
        weight = dense if packing is None else Affine(dense, dense, dense, packing[1], packing[0])
        for outputs in (17, 576, 4096, 6144, 24576, 151936):
            tile = tile_of(outputs, width, weight, glu=glu)
            for rows in range(1, 17):
                one = for_rows(tile, rows, width, weight)
                assert (one.split, one.step) == (tile.split, tile.step)
                assert one.step in (1, 2, 4)
                assert 1 <= one.split <= 16
                assert one.ahead or width // unit_of(weight) % (one.split * one.step) == 0


def test_the_pick_is_the_same_for_every_row_count() -> None:
    weight, rows = mx.zeros((64, 64), dtype=mx.bfloat16), mx.zeros((16, 64), dtype=mx.bfloat16)
    for count in range(1, 17):
        assert matvec.pick("cuda", rows[:count], weight) is matvec_mma.launch
        assert matvec.pick("metal", rows[:count], weight) is matvec.launch
    wide = rows.astype(mx.float32)
    assert matvec.pick("cuda", wide, weight.astype(mx.float32)) is matvec.launch


def test_float16_is_normed_where_the_product_with_the_weight_would_overflow() -> None:
    random = np.random.default_rng(2)
    x = (draw(random, (2, 256), mx.float32) * 3000).astype(mx.float16)
    norm, weight = mx.full((256,), 100.0, dtype=mx.float16), draw(random, (16, 256), mx.float16) * 0.01
    extras = Extras(norm=norm, eps=1e-5)
    out, _ = standin.run(matvec_mma.launch(x, weight, extras))
    close(out, truth(wide(x), wide(weight), extras))


KINDS = (("plain", 128, 33), ("norm residual", 640, 24), ("norm glu", 1024, 24), ("norm bias", 1536, 2051))


# The long forms go through the types in turn: each instance has to be compiled.
@pytest.mark.prove
@pytest.mark.parametrize("launch", [matvec.launch, matvec_mma.launch])
@pytest.mark.parametrize("packing", [None, *PACKINGS])
def test_the_whole_sweep_agrees_with_float64(packing: tuple[int, int] | None, launch: Launcher) -> None:
    types = list(TYPES)[1:] if launch is matvec_mma.launch else list(TYPES)
    for rows in range(1, 17):
        for turn in range(2):
            kind, width, outputs = KINDS[(rows + 2 * turn + rows // 4) % 4]
            dtype = types[(rows + turn) % len(types)]
            check(Shape(rows, width, outputs, dtype, packing), kind, rows, launch)


@pytest.mark.prove
@pytest.mark.parametrize("packing", [None, *PACKINGS])
def test_every_cut_on_matrix_units_agrees_with_float64(packing: tuple[int, int] | None) -> None:
    for number, width in enumerate((512, 640, 1024, 1536)):
        for tile in (HELD, STREAMED, replace(HELD, tiles=1, step=1), replace(STREAMED, step=1, ahead=1, split=7)):
            rows, kind = (3, 8, 16, 11)[number], ("norm glu", "residual", "norm bias", "plain")[number]
            shape = Shape(rows, width, 50, ("bfloat16", "float16")[number % 2], packing)
            check(shape, kind, number, matvec_mma.launch, tile=tile)


@pytest.mark.prove
@pytest.mark.parametrize(("packing", "dtype"), list(zip([None, None, None, *PACKINGS], [*TYPES] * 3, strict=True)))
def test_bits_hold_for_every_row_count(packing: tuple[int, int] | None, dtype: str) -> None:
    kind = "norm glu" if packing in (None, (4, 64), (8, 32)) else "norm residual"
    invariance(Shape(1, 640, 40, dtype, packing), kind, tuple(range(2, 17)))


@pytest.mark.prove
@pytest.mark.parametrize(
    ("packing", "tile"), [(None, HELD), (None, STREAMED), ((4, 64), HELD), ((8, 32), STREAMED)]
)
def test_bits_on_matrix_units_hold_for_every_row_count(packing: tuple[int, int] | None, tile: Tile) -> None:
    shape = Shape(1, 512, 40, "bfloat16", packing)
    invariance(shape, "norm glu", tuple(range(2, 17)), matvec_mma.launch, tile=tile)
