"""Attention and its second pass over the stand-in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest
from kernels import oracle, standin
from kernels.oracle import TYPES, History, bits, close, draw, paths, random_tree, same, wide

from worker.kernels import attention, attention_fma, attention_mma, rope_write, rows
from worker.kernels import attention_combine as second
from worker.kernels.dialect import Launch
from worker.kernels.rope_write import Heads

EDGES = (0, 1, 31, 32, 33, 63, 64, 65, 255, 256, 257, 1023, 1024)
LONG = (2040, 2047, 2048, 4090, 5000)


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    dtype: str
    mma: bool = False

    @property
    def first(self) -> Callable[..., Launch]:
        return attention_mma.launch if self.mma else attention_fma.launch

    @property
    def plain(self) -> Heads:
        return Heads(heads=self.heads, kv_heads=self.kv_heads, dim=self.dim, rotated=0)


def packed(q: mx.array, known: History, new: Sequence[int]) -> mx.array:
    """The projection whose queries are *q* and whose keys and values are those of the positions *new*."""
    rows = known.rows[:, :, mx.array(list(new))].transpose(2, 0, 1, 3)
    return mx.concatenate([q, rows.reshape(len(q), -1, known.dim)], axis=1).reshape(len(q), -1)


def run(
    shape: Shape, q: mx.array, known: History, length: int, new: Sequence[int], tree: mx.array | None = None
) -> mx.array:
    """Both passes: *length* positions are in the pool, those in *new* are written on the way."""
    pool, meta = known.pool(length, [])
    table = rope_write.constants(shape.plain, None, None, None)
    launch = shape.first(packed(q, known, new), table, pool, meta, shape.plain, tree)
    pieces, written = standin.run(launch, written="pool")
    assert written is not None
    written_rows_are_there(pool, written, known, length, new, meta)
    out, _ = standin.run(second.launch(pieces, meta, q.shape, q.dtype, tree))
    return out


def written_rows_are_there(pool, written, known, length, new, meta) -> None:
    at = np.array(rows.slots(meta, mx.arange(length, length + len(new), dtype=mx.int32)))
    assert (bits(written)[:, :, at] == bits(known.rows)[:, :, list(new)]).all(), "the new rows are in the pool"
    others = np.setdiff1d(np.arange(pool.shape[2]), at)
    assert (bits(written)[:, :, others] == bits(pool)[:, :, others]).all(), "other slots stay"


def check(shape: Shape, length: int, parents: list[int] | None, count: int, seed: int) -> None:
    """The kernels and the plain operations against float64; *parents* None is a chain of *count* rows."""
    random = np.random.default_rng(seed)
    known = History(random, length + 16, shape.kv_heads, shape.dim, TYPES[shape.dtype])
    q = draw(random, (count, shape.heads, shape.dim), TYPES[shape.dtype])
    tree = None if parents is None else rows.tree_array(parents)
    # The rows of a tree have keys of their own, also where two share a position.
    new = range(length, length + count)
    seen = paths(list(range(-1, count - 1)) if parents is None else parents)
    keys, values = (wide(part) for part in known.rows)
    want = np.stack([
        oracle.attention(
            wide(q[row]), keys[:, at], values[:, at], 1 / math.sqrt(shape.dim)
        )
        for row in range(count)
        for at in [[*range(length), *(length + one for one in seen[row])]]
    ])  # fmt: skip
    close(run(shape, q, known, length, new, tree), want)
    pool, meta = known.pool(length, [])
    table = rope_write.constants(shape.plain, None, None, None)
    plain, written = attention.attend(
        packed(q, known, new), table, pool, meta, shape.plain, tree, use_kernel=False
    )
    close(plain.reshape(q.shape), want)
    written_rows_are_there(pool, written, known, length, new, meta)


CASES = [
    (Shape(4, 2, 64, "float32"), 33, 1),
    (Shape(4, 2, 64, "float32"), 257, 5),
    (Shape(9, 3, 64, "bfloat16"), 1023, 1),
    (Shape(2, 2, 80, "float16"), 31, 3),
    (Shape(3, 1, 96, "bfloat16"), 255, 16),
    (Shape(4, 1, 128, "float32"), 0, 8),
    (Shape(8, 1, 128, "bfloat16"), 32, 16),
    (Shape(2, 1, 256, "float16"), 65, 9),
    (Shape(9, 3, 64, "bfloat16", mma=True), 1023, 1),
    (Shape(2, 2, 80, "float16", mma=True), 31, 3),
    (Shape(3, 1, 96, "bfloat16", mma=True), 255, 16),
    (Shape(8, 2, 128, "float16", mma=True), 0, 8),
    (Shape(8, 1, 128, "bfloat16", mma=True), 100, 16),
]


@pytest.mark.parametrize(("shape", "length", "count"), CASES)
def test_a_chain_agrees_with_float64(shape: Shape, length: int, count: int) -> None:
    check(shape, length, None, count, seed=length)


@pytest.mark.parametrize("length", EDGES)
def test_page_edges_agree_with_float64(length: int) -> None:
    check(Shape(4, 2, 64, "float32"), length, None, 5, seed=length)
    check(Shape(6, 2, 64, "float16", mma=True), length, None, 6, seed=length)


@pytest.mark.parametrize("length", LONG)
def test_cuts_that_change_within_a_forward_agree_with_float64(length: int) -> None:
    check(Shape(2, 1, 64, "float32"), length, None, 12, seed=length)
    check(Shape(2, 1, 64, "float16", mma=True), length, None, 12, seed=length)


@pytest.mark.parametrize("length", [0, 1, 20, 31, 32, 60, 256, 1020])
def test_trees_agree_with_float64(length: int) -> None:
    parents = random_tree(np.random.default_rng(length), 12)
    check(Shape(4, 2, 64, "float32"), length, parents, 12, seed=length)
    check(Shape(6, 2, 64, "float16", mma=True), length, parents, 12, seed=length)


def test_the_pieces_can_be_joined_by_plain_operations() -> None:
    random = np.random.default_rng(3)
    known = History(random, 400, 1, 64, mx.float32)
    pool, meta = known.pool(300, [])
    q = draw(random, (4, 2, 64), mx.float32)
    heads = Heads(heads=2, kv_heads=1, dim=64, rotated=0)
    table = rope_write.constants(heads, None, None, None)
    qkv = packed(q, known, range(300, 304))
    pieces, _ = standin.run(attention_fma.launch(qkv, table, pool, meta, heads), written="pool")
    close(
        second.attention_combine(pieces, meta, q.shape, q.dtype, use_kernel=False),
        wide(run(Shape(2, 1, 64, "float32"), q, known, 300, range(300, 304))),
    )


TURNED = [
    (Heads(heads=4, kv_heads=2, dim=128, rotated=128, norm_eps=1e-6), "bfloat16", 62, 5, None),
    (Heads(heads=6, kv_heads=2, dim=64, rotated=64), "float32", 30, 7, [-1, 0, 0, 1, 2, 4, 3]),
    (Heads(heads=2, kv_heads=2, dim=80, rotated=32, traditional=True, scale=0.2), "float16", 32, 1, None),
    (Heads(heads=2, kv_heads=1, dim=96, rotated=96, input_scale=1.19), "bfloat16", 255, 16, None),
    (Heads(heads=3, kv_heads=1, dim=256, rotated=128, norm_eps=1e-6), "float32", 60, 12, [-1, 0, 1, 2, 3, 4, 5, 5, 7, 0, 9, 9]),
]  # fmt: skip


@pytest.mark.parametrize(("heads", "dtype", "length", "count", "parents"), TURNED)
def test_rows_are_turned_and_written_as_rope_write_does_bit_for_bit(heads, dtype, length, count, parents) -> None:
    random = np.random.default_rng(count)
    known = History(random, length, heads.kv_heads, heads.dim, TYPES[dtype])
    table = rope_write.constants(
        heads,
        mx.array(1e3 ** -(np.arange(heads.rotated // 2) / heads.rotated * 2)),
        *draw(random, (2, heads.dim), TYPES[dtype]),
    )
    qkv = draw(random, (count, (heads.heads + 2 * heads.kv_heads) * heads.dim), TYPES[dtype])
    pool, meta = known.pool(length, [])
    tree = None if parents is None else rows.tree_array(parents)
    q, want = standin.run(rope_write.launch(qkv, table, pool, meta, heads, tree), written="pool")
    assert want is not None
    slots = rows.slots(meta, mx.arange(length, length + count, dtype=mx.int32))
    rest = want[:, :, slots].transpose(2, 0, 1, 3).reshape(count, -1, heads.dim)
    turned = mx.concatenate([q, rest], axis=1).reshape(count, -1)
    still = replace(heads, rotated=0, norm_eps=None, input_scale=1.0)
    for launch in (attention_fma.launch, attention_mma.launch):
        if launch is attention_mma.launch and not attention_mma.supported(qkv, heads):
            continue
        outs = []
        for operand, how in ((qkv, heads), (turned, still)):
            pieces, got = standin.run(launch(operand, table, pool, meta, how, tree), written="pool")
            assert got is not None
            same(got, want)
            shape = (count, heads.heads, heads.dim)
            outs.append(standin.run(second.launch(pieces, meta, shape, qkv.dtype, tree))[0])
        same(*outs)


def test_bits_do_not_depend_on_rows_start_or_tree() -> None:
    invariance(Shape(4, 2, 64, "bfloat16"), end=70, counts=(1, 2, 5), trees=3, seed=1)
    invariance(Shape(4, 2, 64, "float32"), end=2052, counts=(5,), trees=2, seed=2, many=8)


def test_bits_do_not_depend_on_rows_start_or_tree_on_matrix_units() -> None:
    invariance(Shape(4, 2, 64, "bfloat16", mma=True), end=70, counts=(2, 5, 16), trees=3, seed=1)
    # A tree this far out would take four seconds; the long form has some.
    invariance(Shape(2, 1, 80, "float16", mma=True), end=2052, counts=(7,), trees=0, seed=2, many=8)


@pytest.mark.parametrize("mma", [False, True])
@pytest.mark.parametrize("parents", [None, [-1, 0, 1, 2, 3, 2, 5]])
def test_a_row_that_is_no_number_leaves_the_others_alone(mma: bool, parents: list[int] | None) -> None:
    shape, length = Shape(4, 2, 64, "float16", mma=mma), 61
    random = np.random.default_rng(7)
    known = History(random, length + 7, 2, 64, mx.float16)
    q = draw(random, (7, 4, 64), mx.float16)
    tree = None if parents is None else rows.tree_array(parents)
    good = run(shape, q, known, length, range(length, length + 7), tree)
    spoilt = [4] if parents else [4, 5, 6]
    for row in spoilt:
        known.rows[:, :, length + row] = mx.array(np.inf)
        q[row] = mx.array(np.nan)
    bad = run(shape, q, known, length, range(length, length + 7), tree)
    for row in set(range(7)) - set(spoilt):
        same(bad[row], good[row])


def invariance(shape: Shape, end: int, counts: tuple[int, ...], trees: int, seed: int, many: int = 16) -> None:
    """The *many* rows that end at position *end*, from many starts, in chains and inside of trees."""
    random = np.random.default_rng(seed)
    known = History(random, end, shape.kv_heads, shape.dim, TYPES[shape.dtype])
    strangers = History(random, 16, shape.kv_heads, shape.dim, TYPES[shape.dtype])
    q = draw(random, (end, shape.heads, shape.dim), TYPES[shape.dtype])
    alone = {}
    for position in range(end - many, end):
        alone[position] = run(shape, q[position : position + 1], known, position, [position])[0]
    for count in counts:
        for start in range(end - many, end - count + 1, count):
            out = run(shape, q[start : start + count], known, start, range(start, start + count))
            for row in range(count):
                same(out[row], alone[start + row])
    for _ in range(trees):
        start = int(random.integers(end - many, end - 4))
        inside_tree(shape, random, known, strangers, q, alone, start)


def inside_tree(shape, random, known, strangers, q, alone, start) -> None:
    """A path of the true rows, with strangers around it, gives the bits of the rows alone."""
    length, count = min(known.positions - start, 8), 12
    places = sorted(random.choice(count, length, replace=False).tolist())
    parents, on_path = [], {}
    for row in range(count):
        if row in places:
            parents.append(places[places.index(row) - 1] if places.index(row) else -1)
            on_path[row] = start + places.index(row)
        else:
            parents.append(int(random.integers(-1, row)) if row else -1)
    both = History(random, known.positions + 16, known.kv_heads, known.dim, known.dtype)
    both.rows = mx.concatenate([known.rows, strangers.rows], axis=2)
    new = [on_path.get(row, known.positions + row) for row in range(count)]
    queries = mx.concatenate([q, draw(random, (16, *q.shape[1:]), q.dtype)])[mx.array(new)]
    out = run(shape, queries, both, start, new, rows.tree_array(parents))
    for row, position in on_path.items():
        same(out[row], alone[position])


@pytest.mark.parametrize(("target", "dtype", "dim"), [
    ("cuda", "bfloat16", 128), ("cuda", "float32", 128), ("cuda", "float16", 256), ("metal", "bfloat16", 128),
])  # fmt: skip
def test_the_first_pass_is_picked_by_device_type_and_dimension_never_by_rows(
    monkeypatch, target, dtype, dim
) -> None:
    launched: list[str] = []

    def noted(launch: Launch, _target: str) -> mx.array:
        launched.append(launch.kernel.name)
        return mx.zeros(launch.shape, dtype=launch.dtype)

    monkeypatch.setattr(attention, "chosen", lambda _use: target)
    monkeypatch.setattr(Launch, "run", noted)
    heads = Heads(heads=4, kv_heads=2, dim=dim, rotated=0)
    pool, meta = mx.zeros((2, 2, 256, dim), dtype=TYPES[dtype]), mx.zeros((9,), dtype=mx.int32)
    for count in range(1, 17):
        qkv = mx.zeros((count, 8 * dim), dtype=TYPES[dtype])
        out, same_pool = attention.attend(qkv, rope_write.constants(heads, None, None, None), pool, meta, heads)
        assert out.shape == (count, 4 * dim)
        assert same_pool is pool
    first = "attention_mma" if (target, dim) == ("cuda", 128) and dtype != "float32" else "attention_fma"
    assert launched == [first, "attention_combine"] * 16


# The long forms go through the types in turn: an instance takes a second or two to compile.
@pytest.mark.prove
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_the_whole_sweep_agrees_with_float64(dim: int) -> None:
    random = np.random.default_rng(dim)
    for count in range(1, 17):
        shape = Shape(*((4, 1), (6, 2))[count % 2], dim, list(TYPES)[count % 3])
        lengths = random.choice([*EDGES, *LONG], 6, replace=False)
        for length in lengths:
            check(shape, int(length), None, count, int(length) + count)
        for length in lengths[:3]:
            check(shape, int(length), random_tree(random, count), count, int(length) + count)
        if dim <= 128:
            shape = replace(shape, dtype=("float16", "bfloat16")[count // 2 % 2], mma=True)
            for length in lengths[:4]:
                check(shape, int(length), None, count, int(length) + count)
            for length in lengths[3:]:
                check(shape, int(length), random_tree(random, count), count, int(length) + count)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("dim", "dtype"), [(64, "bfloat16"), (80, "float16"), (96, "bfloat16"), (128, "float32"), (256, "bfloat16")]
)
def test_bits_hold_for_every_row_count_start_and_many_trees(dim: int, dtype: str) -> None:
    for end in (40, 70, 530, 2052):
        invariance(Shape(6, 2, dim, dtype), end, counts=tuple(range(1, 17)), trees=12, seed=end)


@pytest.mark.prove
@pytest.mark.parametrize(("dim", "dtype"), [(64, "bfloat16"), (80, "float16"), (96, "bfloat16"), (128, "float16")])
def test_bits_hold_on_matrix_units_for_every_row_count_start_and_many_trees(dim: int, dtype: str) -> None:
    for end in (40, 70, 530, 2052):
        invariance(Shape(6, 2, dim, dtype, mma=True), end, counts=tuple(range(1, 17)), trees=12, seed=end)
