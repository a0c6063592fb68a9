"""Attention and its second pass over the stand-in."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from kernels import standin
from kernels.oracle import TYPES, History, attention, close, draw, paths, random_tree, same, wide

from worker.kernels import attention as first
from worker.kernels import attention_combine as second
from worker.kernels import rows

EDGES = (0, 1, 31, 32, 33, 63, 64, 65, 255, 256, 257, 1023, 1024)
LONG = (2040, 2047, 2048, 4090, 5000)


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    dtype: str


def run(q: mx.array, pool: mx.array, meta: mx.array, tree: mx.array | None = None) -> mx.array:
    scale = 1 / math.sqrt(q.shape[-1])
    pieces, _ = standin.run(first.launch(q, pool, meta, scale, tree))
    out, _ = standin.run(second.launch(pieces, meta, q.shape, q.dtype, tree))
    return out


def check(shape: Shape, length: int, parents: list[int] | None, count: int, seed: int) -> None:
    """The kernels and the plain operations against float64; *parents* None is a chain of *count* rows."""
    random = np.random.default_rng(seed)
    known = History(random, length + 16, shape.kv_heads, shape.dim, TYPES[shape.dtype])
    q = draw(random, (count, shape.heads, shape.dim), TYPES[shape.dtype])
    tree = None if parents is None else rows.tree_array(parents)
    # The rows of a tree have keys of their own, also where two share a position.
    pool, meta = known.pool(length, range(length, length + count))
    seen = paths(list(range(-1, count - 1)) if parents is None else parents)
    keys, values = (wide(part) for part in known.rows)
    want = np.stack([
        attention(
            wide(q[row]), keys[:, at], values[:, at], 1 / math.sqrt(shape.dim)
        )
        for row in range(count)
        for at in [[*range(length), *(length + one for one in seen[row])]]
    ])  # fmt: skip
    close(run(q, pool, meta, tree), want)
    close(first.attention(q, pool, meta, 1 / math.sqrt(shape.dim), tree, use_kernel=False), want)


CASES = [
    (Shape(4, 2, 64, "float32"), 33, 1),
    (Shape(4, 2, 64, "float32"), 257, 5),
    (Shape(9, 3, 64, "bfloat16"), 1023, 1),
    (Shape(2, 2, 80, "float16"), 31, 3),
    (Shape(3, 1, 96, "bfloat16"), 255, 16),
    (Shape(4, 1, 128, "float32"), 0, 8),
    (Shape(8, 1, 128, "bfloat16"), 32, 16),
    (Shape(2, 1, 256, "float16"), 65, 9),
]


@pytest.mark.parametrize(("shape", "length", "count"), CASES)
def test_a_chain_agrees_with_float64(shape: Shape, length: int, count: int) -> None:
    check(shape, length, None, count, seed=length)


@pytest.mark.parametrize("length", EDGES)
def test_page_edges_agree_with_float64(length: int) -> None:
    check(Shape(4, 2, 64, "float32"), length, None, 5, seed=length)


@pytest.mark.parametrize("length", LONG)
def test_cuts_that_change_within_a_forward_agree_with_float64(length: int) -> None:
    check(Shape(2, 1, 64, "float32"), length, None, 12, seed=length)


@pytest.mark.parametrize("length", [0, 1, 20, 31, 32, 60, 256, 1020])
def test_trees_agree_with_float64(length: int) -> None:
    parents = random_tree(np.random.default_rng(length), 12)
    check(Shape(4, 2, 64, "float32"), length, parents, 12, seed=length)


def test_the_pieces_can_be_joined_by_plain_operations() -> None:
    random = np.random.default_rng(3)
    known = History(random, 400, 1, 64, mx.float32)
    pool, meta = known.pool(300, range(300, 304))
    q = draw(random, (4, 2, 64), mx.float32)
    pieces, _ = standin.run(first.launch(q, pool, meta, 0.125))
    close(second.attention_combine(pieces, meta, q.shape, q.dtype, use_kernel=False), wide(run(q, pool, meta)))


def test_bits_do_not_depend_on_rows_start_or_tree() -> None:
    invariance(Shape(4, 2, 64, "bfloat16"), end=70, counts=(1, 2, 5), trees=3, seed=1)
    invariance(Shape(4, 2, 64, "float32"), end=2052, counts=(1, 5), trees=2, seed=2)


def invariance(shape: Shape, end: int, counts: tuple[int, ...], trees: int, seed: int) -> None:
    """The rows that end at position *end*, computed from many starts, in chains and inside of trees."""
    random = np.random.default_rng(seed)
    known = History(random, end, shape.kv_heads, shape.dim, TYPES[shape.dtype])
    strangers = History(random, 16, shape.kv_heads, shape.dim, TYPES[shape.dtype])
    q = draw(random, (end, shape.heads, shape.dim), TYPES[shape.dtype])
    alone = {}
    for position in range(end - 16, end):
        pool, meta = known.pool(position, [position])
        alone[position] = run(q[position : position + 1], pool, meta)[0]
    for count in counts:
        for start in range(end - 16, end - count + 1, count):
            pool, meta = known.pool(start, range(start, start + count))
            out = run(q[start : start + count], pool, meta)
            for row in range(count):
                same(out[row], alone[start + row])
    for _ in range(trees):
        start = int(random.integers(end - 16, end - 4))
        inside_tree(random, known, strangers, q, alone, start)


def inside_tree(random, known, strangers, q, alone, start) -> None:
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
    pool, meta = both.pool(start, new)
    queries = mx.concatenate([q, draw(random, (16, *q.shape[1:]), q.dtype)])[mx.array(new)]
    out = run(queries, pool, meta, rows.tree_array(parents))
    for row, position in on_path.items():
        same(out[row], alone[position])


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


@pytest.mark.prove
@pytest.mark.parametrize(
    ("dim", "dtype"), [(64, "bfloat16"), (80, "float16"), (96, "bfloat16"), (128, "float32"), (256, "bfloat16")]
)
def test_bits_hold_for_every_row_count_start_and_many_trees(dim: int, dtype: str) -> None:
    for end in (40, 70, 530, 2052):
        invariance(Shape(6, 2, dim, dtype), end, counts=tuple(range(1, 17)), trees=12, seed=end)
