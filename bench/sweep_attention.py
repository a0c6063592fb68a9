"""Cases of the kernels that know positions: attention in both of its first passes, rope with the write, moves.

Every launch gets a pool of its own, with NaN in each slot that its forward may not read, and all of that pool is
compared afterwards: rows are where they belong, and nothing else was touched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from sweep_base import TYPES, Judge, Numbers, Wide, groups, narrow, run, wide

from worker.kernels import attention_combine, attention_fma, attention_mma, move_rows, read_pages, rope_write, rows
from worker.kernels.dialect import MAX_ROWS, PAGE
from worker.kernels.rope_write import Heads

SPARE_PAGES = 2


class Known:
    """A sequence with room for sixteen more rows, in a pool with a shuffled table.

    full: the pool with all of them. rows: float64 [2, Hkv, length + 16, D]. new: the sixteen as the projection
    holds them, [16, 2 Hkv D].
    """

    def __init__(self, numbers: Numbers, heads: Heads, kind: str, length: int, longer: int = 0) -> None:
        self.length, self.kind = length, kind
        count = length + MAX_ROWS
        pages = max(7, -(-count // PAGE)) + longer
        table = numbers.random.permutation(pages + SPARE_PAGES)[:pages]
        at = np.arange(count)
        self.slots = table[at // PAGE] * PAGE + at % PAGE
        size = (pages + SPARE_PAGES) * PAGE
        values = numbers.random.standard_normal((2, heads.kv_heads, size, heads.dim), np.float32)
        self.full, held = narrow(values, kind)
        self.rows = held[:, :, self.slots]
        self.new = self.rows[:, :, length:].transpose(2, 0, 1, 3).reshape(MAX_ROWS, -1)
        self.metas = [mx.array(np.array([length + start, *table], np.int32)) for start in range(MAX_ROWS)]
        self._unseen = []
        for stored in range(MAX_ROWS + 1):
            unseen = np.ones(size, dtype=bool)
            unseen[self.slots[: length + stored]] = False
            self._unseen.append(mx.array(unseen.reshape(1, 1, size, 1)))

    def pool(self, stored: int, full: mx.array | None = None) -> mx.array:
        """A pool of its own that has *stored* of the sixteen rows, and NaN behind; *full*: of these values."""
        whole = self.full if full is None else full
        return mx.where(self._unseen[stored], mx.array(math.nan, dtype=whole.dtype), whole)


def seen_by(length: int, parents: Sequence[int]) -> np.ndarray:
    """Which indices of the sequence each row of a tree sees: bool [R, length + R]."""
    seen = np.zeros((len(parents), length + len(parents)), dtype=bool)
    for row, parent in enumerate(parents):
        seen[row, :length] = True
        if parent >= 0:
            seen[row] |= seen[parent]
        seen[row, length + row] = True
    return seen


def truth(q: Wide, known: Wide, seen: np.ndarray, scale: float) -> Wide:
    """Attention of q [R, H, D] over K and V of *known* [2, Hkv, n, D]: [R, H D]."""
    count, heads, dim = q.shape
    keys, values = known[:, :, : seen.shape[1]]
    grouped = q.reshape(count, len(keys), -1, dim).transpose(1, 2, 0, 3)
    scores = np.where(seen, grouped @ keys[:, None].swapaxes(-1, -2) * scale, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = weights / weights.sum(-1, keepdims=True) @ values[:, None]
    return out.transpose(2, 0, 1, 3).reshape(count, heads * dim)


def still(heads: Heads) -> Heads:
    """The same heads, which nothing turns or norms."""
    return replace(heads, rotated=0, norm_eps=None, input_scale=1.0, traditional=False)


@dataclass(frozen=True)
class Attention:
    """Heads that nothing turns, after *length* positions.

    matrix: on matrix units. counts: of rows, each at every start among sixteen. trees: rows of a tree. longer:
    pages of the table that nothing is in yet.
    """

    matrix: bool
    kind: str
    heads: Heads
    length: int
    counts: tuple[int, ...]
    trees: tuple[int, ...]
    longer: int = 0
    seed: int = 0

    @property
    def name(self) -> str:
        """Of its figures."""
        unit = "matrix units" if self.matrix else "FMA"
        return f"attention, {unit}, {self.kind}, heads of {self.heads.dim}"

    def check(self, judge: Judge) -> None:
        """As in `Case`."""
        numbers = Numbers(self.seed, self.length, self.heads.dim)
        known = Known(numbers, self.heads, self.kind, self.length, self.longer)
        q, wide_q = numbers.normal(MAX_ROWS, self.heads.heads * self.heads.dim, kind=self.kind)
        new, _ = narrow(np.ascontiguousarray(known.new, np.float32), self.kind)
        qkv = mx.concatenate([q, new], axis=1)
        turned = wide_q.reshape(MAX_ROWS, self.heads.heads, -1)
        chain = self._run(known, qkv, 0)
        found = [(start, count, self._run(known, qkv[start : start + count], start))
                 for start, count in groups(self.counts)]  # fmt: skip
        mx.eval(chain, [run for *_, run in found])
        mx.synchronize()
        judge.error(self.name, self.kind, chain[0], lambda: self._want(turned, known, range(-1, MAX_ROWS - 1)))
        judge.wrong(f"{self.name}: written pieces that no row has", lambda: self._pieces(chain[2]))
        judge.bits(self.name, chain[1], known.pool(MAX_ROWS))
        for start, count, (out, pool, _) in found:
            judge.bits(self.name, out, chain[0][start : start + count])
            judge.bits(self.name, pool, known.pool(start + count))
        for count in self.trees:
            self._tree(judge, known, qkv, turned, numbers.tree(count))

    def _run(
        self, known: Known, qkv: mx.array, start: int, parents: Sequence[int] | None = None
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Attention [R, H D], the pool that its first pass wrote, and the pieces."""
        heads, pool, meta = self.heads, known.pool(start), known.metas[start]
        tree = None if parents is None else rows.tree_array(parents)
        first = (attention_mma if self.matrix else attention_fma).launch
        pieces = run(first(qkv, table_of(heads), pool, meta, heads, tree))
        shape = (len(qkv), heads.heads, heads.dim)
        joined = attention_combine.launch(pieces, meta, shape, qkv.dtype, tree)
        return run(replace(joined, shape=(len(qkv), heads.heads * heads.dim))), pool, pieces

    def _want(self, q: Wide, known: Known, parents: Sequence[int]) -> Wide:
        seen = seen_by(self.length, parents)
        return truth(q[: len(parents)], known.rows, seen, self.heads.score_scale)

    def _pieces(self, pieces: mx.array) -> int:
        """Pieces of sixteen rows whose marks are no numbers where a row has them, or numbers where it has none."""
        marks = np.array(pieces[-rows.SPLITS * MAX_ROWS * self.heads.heads * 2 :])
        there = ~np.isnan(marks.reshape(rows.SPLITS, MAX_ROWS, -1)).any(-1)
        positions = self.length + np.arange(MAX_ROWS)
        cuts = np.array([rows.cut(int(position)) for position in positions])
        return int((there != (np.arange(rows.SPLITS)[:, None] * cuts <= positions)).sum())

    def _tree(self, judge: Judge, known: Known, qkv: mx.array, q: Wide, parents: list[int]) -> None:
        """A tree against float64, and each of its longest paths against the same rows as a chain."""
        out, pool, _ = self._run(known, qkv[: len(parents)], 0, parents)
        paths = [path for path in longest(parents, self.counts) if len(path) > 1][:3]
        rest = np.array(qkv.view({2: mx.uint16, 4: mx.uint32}[qkv.dtype.size]))
        chains = [self._run(known, mx.array(rest[path]).view(qkv.dtype), 0)[0] for path in paths]
        mx.eval(out, pool, chains)
        mx.synchronize()
        name = f"{self.name}, trees"
        judge.error(name, self.kind, out, lambda: self._want(q, known, parents))
        judge.bits(name, pool, known.pool(len(parents)))
        for path, chain in zip(paths, chains, strict=True):
            for place, row in enumerate(path):
                judge.bits(name, out[row : row + 1], chain[place : place + 1])


def longest(parents: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """The paths to the leaves, longest first, each cut to one of *counts* rows."""
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), row])
    leaves = [paths[row] for row in range(len(parents)) if row not in parents]
    leaves.sort(key=len, reverse=True)
    return [path[: max((count for count in counts if count <= len(path)), default=0)] for path in leaves]


def table_of(heads: Heads, norms: tuple[mx.array, mx.array] | None = None) -> mx.array:
    """The constants, as `rope_write.constants` makes them of heads in use."""
    if norms is None and not heads.rotated:
        return mx.array(np.ones(2 * heads.dim, np.float32))
    both = np.concatenate([wide(norm) for norm in norms]) if norms else np.ones(2 * heads.dim)
    return mx.array(np.concatenate([both, frequencies(heads)]).astype(np.float32))


def frequencies(heads: Heads) -> np.ndarray:
    """Radians a position of each turned pair, float32."""
    half = heads.rotated // 2
    return (1e4 ** -(np.arange(half) / max(half, 1))).astype(np.float32)


def turn(x: Wide, positions: np.ndarray, heads: Heads) -> Wide:
    """Rope of x [R, n, D], of angles that are float32: far out their rounding is the larger part."""
    out, half = x.copy(), heads.rotated // 2
    pairs = np.arange(half)
    at = (pairs * 2, pairs * 2 + 1) if heads.traditional else (pairs, pairs + half)
    angles = (positions[:, None, None].astype(np.float32) * frequencies(heads)).astype(np.float64)
    a, b = (x[..., place] * heads.input_scale for place in at)
    out[..., at[0]] = a * np.cos(angles) - b * np.sin(angles)
    out[..., at[1]] = a * np.sin(angles) + b * np.cos(angles)
    return out


@dataclass(frozen=True)
class Turned:
    """Rope, norms and the write: `rope_write` against float64, and attention's own against `rope_write`.

    passes: the first passes of attention that serve these heads, on matrix units or not.
    """

    kind: str
    heads: Heads
    length: int
    count: int
    tree: int
    passes: tuple[bool, ...]
    seed: int = 0

    @property
    def name(self) -> str:
        """Of its figures."""
        return f"rope and write, {self.kind}, heads of {self.heads.dim}"

    def check(self, judge: Judge) -> None:
        """As in `Case`."""
        heads, numbers = self.heads, Numbers(self.seed, self.length, self.heads.dim, 1)
        known = Known(numbers, heads, self.kind, self.length)
        qkv, held = numbers.normal(MAX_ROWS, (heads.heads + 2 * heads.kv_heads) * heads.dim, kind=self.kind)
        norms = [numbers.normal(heads.dim, kind=self.kind) for _ in range(2)]
        table = table_of(heads, (norms[0][0], norms[1][0]))
        for parents in (None, numbers.tree(self.tree)):
            count = MAX_ROWS if parents is None else len(parents)
            q, pool = self._write(known, table, qkv[:count], 0, parents)
            mx.eval(q, pool)
            mx.synchronize()
            weights = None if heads.norm_eps is None else [norm for _, norm in norms]
            self._errors(judge, known, q, pool, self._want(held[:count], weights, parents))
            if parents is None:
                self._groups(judge, known, table, qkv, (q, pool))
            for matrix in self.passes:
                few = self.count if parents is None else count
                self._attend(judge, matrix, known, table, qkv[:few], parents)

    def _write(
        self, known: Known, table: mx.array, qkv: mx.array, start: int, parents: Sequence[int] | None
    ) -> tuple[mx.array, mx.array]:
        pool, tree = known.pool(start), None if parents is None else rows.tree_array(parents)
        return run(rope_write.launch(qkv, table, pool, known.metas[start], self.heads, tree)), pool

    def _want(self, held: Wide, weights: list[Wide] | None, parents: Sequence[int] | None) -> Wide:
        """The rows [R, H + 2 Hkv, D] turned and normed."""
        heads = self.heads
        parts = held.reshape(len(held), -1, heads.dim).copy()
        depths = np.arange(len(held))
        if parents is not None:
            for row, parent in enumerate(parents):
                depths[row] = depths[parent] + 1 if parent >= 0 else 0
        ends = (0, heads.heads, heads.heads + heads.kv_heads)
        for place in range(2):
            some = parts[:, ends[place] : ends[place + 1]]
            if weights is not None:
                some = some / np.sqrt((some * some).mean(-1, keepdims=True) + heads.norm_eps) * weights[place]
            parts[:, ends[place] : ends[place + 1]] = turn(some, self.length + depths, heads)
        return parts

    def _errors(self, judge: Judge, known: Known, q: mx.array, pool: mx.array, want: Wide) -> None:
        heads, count = self.heads, len(want)
        judge.error(self.name, self.kind, q, lambda: want[:, : heads.heads])
        slots = known.slots[self.length : self.length + count]
        new = mx.concatenate([pool[:, :, slot : slot + 1] for slot in slots.tolist()], axis=2)
        stored = want[:, heads.heads :].reshape(count, 2, heads.kv_heads, heads.dim).transpose(1, 2, 0, 3)
        judge.error(self.name, self.kind, new, lambda: stored)

    def _groups(
        self, judge: Judge, known: Known, table: mx.array, qkv: mx.array, whole: tuple[mx.array, mx.array]
    ) -> None:
        """Every group of rows writes what sixteen write, and nothing else."""
        q, pool = whole
        # The rows that were stored before are those of the sequence.
        judge.bits(self.name, known.pool(0, pool), known.pool(0))
        found = []
        for start, count in groups(range(1, MAX_ROWS)):
            own = known.pool(start, pool)
            part = qkv[start : start + count]
            launch = rope_write.launch(part, table, own, known.metas[start], self.heads)
            found.append((start, count, run(launch), own))
        mx.eval([one for *_, one, _ in found])
        mx.synchronize()
        for start, count, some, own in found:
            judge.bits(self.name, some, q[start : start + count])
            judge.bits(self.name, own, known.pool(start + count, pool))

    def _attend(  # noqa: PLR0917 - as `_write`
        self, judge: Judge, matrix: bool, known: Known, table: mx.array, qkv: mx.array, parents: Any
    ) -> None:
        """Attention turns and writes as `rope_write` does, bit for bit."""
        q, pool = self._write(known, table, qkv, 0, parents)
        mx.eval(q, pool)
        mx.synchronize()
        slots = known.slots[self.length : self.length + len(qkv)].tolist()
        new = [pool[:, :, slot].reshape(1, -1) for slot in slots]
        turned = mx.concatenate([q.reshape(len(qkv), -1), mx.concatenate(new)], axis=1)
        tree = None if parents is None else rows.tree_array(parents)
        first = (attention_mma if matrix else attention_fma).launch
        found = []
        for operand, heads, constants in ((qkv, self.heads, table), (turned, still(self.heads), table)):
            own, meta = known.pool(0), known.metas[0]
            pieces = run(first(operand, constants, own, meta, heads, tree))
            shape = (len(qkv), heads.heads, heads.dim)
            found.append((run(attention_combine.launch(pieces, meta, shape, qkv.dtype, tree)), own))
        mx.eval([out for out, _ in found])
        mx.synchronize()
        name = f"attention turns as rope and write do, {'matrix units' if matrix else 'FMA'}, {self.kind}"
        judge.bits(name, found[0][0], found[1][0])
        for _, own in found:
            judge.bits(name, own, pool)


@dataclass(frozen=True)
class Moves:
    """Rows moved in place, and read in order."""

    kind: str
    dim: int
    count: int
    seed: int = 0

    def check(self, judge: Judge) -> None:
        """As in `Case`."""
        numbers, name = Numbers(self.seed, self.dim, self.count), f"moved and read rows, {self.kind}"
        heads = Heads(heads=2, kv_heads=2, dim=self.dim, rotated=0)
        known = Known(numbers, heads, self.kind, 300)
        size, order = known.full.shape[2], numbers.random.permutation(known.full.shape[2])
        moves = np.stack([order[: self.count], numbers.random.permutation(order)[: self.count]])
        # A negative number leaves its pair out.
        moves[numbers.random.integers(0, 2), numbers.random.integers(0, self.count)] = -1
        if self.count == 1:
            moves = np.array([[3], [70]])
        pool = mx.where(mx.zeros((1, 1, size, 1), dtype=mx.bool_), mx.array(0, dtype=TYPES[self.kind]), known.full)
        again = run(move_rows.launch(pool, mx.array(moves.astype(np.int32))))
        mx.eval(again, pool)
        mx.synchronize()
        judge.wrong(name, lambda: int((np.array(again) != moves).sum()))
        want = wide(known.full)
        held = want.copy()
        for source, place in moves.T.tolist():
            if min(source, place) >= 0:
                want[:, :, place] = held[:, :, source]
        judge.wrong(name, lambda: int((wide(pool) != want).sum()))
        for count in (1, 31, 32, 33, 300):
            got = run(read_pages.launch(known.pool(0), known.metas[0], count, again))
            mx.eval(got)
            judge.wrong(name, lambda got=got, count=count: int((wide(got) != known.rows[:, :, :count]).sum()))
