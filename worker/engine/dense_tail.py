"""The packed lane in the tail form: official operations only, nothing is written in place while it may be read.

The pool holds the rows below `folded`; the rows from there on lie in a small tail per layer, which slice_update
may copy whenever it likes. Attention reads both, joined: one copy of the context a step, as mlx-lm's own loop
makes it when it updates its cache ahead of the device, and MLX's fused attention over it. A tree is computed
branch by branch, each as the chain that it would be, so that its sums are the chain's.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import Final

import mlx.core as mx
from mlx_lm.models.activations import swiglu

from worker.engine.forward import MAX_ROWS, Follower, Path, Started, branching, positions_within
from worker.engine.packed import Layer, Packed
from worker.kv.pages import Sequence
from worker.kv.pool import Pool
from worker.kv.prefix import Opened

# Rows of a tail. It is folded when full, so twice a page keeps the copies small and the folds rare.
TAIL: Final = 64


@dataclass(frozen=True, slots=True)
class Branches:
    """A tree of rows, cut into chains.

    depths: int32 [R]. paths: for each chain the rows, uint32, from row 0 to its leaf, and how many of the last no
    chain before it had. order: uint32 [R], places of the rows in the chains' new rows, one chain after the other.
    """

    depths: mx.array
    paths: tuple[tuple[mx.array, int], ...]
    order: mx.array


def branches(parents: Path) -> Branches:
    """The chains of rows whose parents, from row 1 on, are given."""
    lines: list[Path] = [(0,)]
    for row, parent in enumerate(parents, 1):
        lines.append((*lines[parent], row))
    paths: list[tuple[mx.array, int]] = []
    new: list[int] = []
    for row, line in enumerate(lines):
        if row not in parents:
            fresh = [one for one in line if one not in new]
            paths.append((mx.array(line, dtype=mx.uint32), len(fresh)))
            new += fresh
    order = [new.index(row) for row in range(len(lines))]
    depths = mx.array([len(line) - 1 for line in lines], dtype=mx.int32)
    return Branches(depths, tuple(paths), mx.array(order, dtype=mx.uint32))


class DenseTail:
    """The `Forward` of the dense family without kernels that write in place."""

    row_invariant = False
    one_ahead = True
    prefix_reuse = True
    why = ""
    width = MAX_ROWS
    trees = True
    why_narrow = ""
    cuts = True
    pipelines = False
    follower: Follower | None = None

    def __init__(self, packed: Packed, pool: Pool, *, prefill_rows: int = 1) -> None:
        self.prefill_rows = prefill_rows
        self.capacity = positions_within(pool.pages, prefill_rows)
        self._packed = packed
        self._pool = pool
        self._sequence: Sequence | None = None
        self._tails: list[mx.array] = []
        self._folded = 0
        # The latest rows that may still be taken back, and where in a tail they begin.
        self._open: Started | None = None
        self._at = 0

    def begin(self, opened: Opened) -> None:
        """As in `Forward`."""
        self.end()
        self._pool.copy(opened.copies)
        self._sequence = opened.sequence
        self._folded = opened.cached
        heads = self._packed.heads
        shape = (2, heads.kv_heads, TAIL, heads.dim)
        self._tails = [mx.zeros(shape, dtype=self._packed.dtype) for _ in self._packed.layers]
        if self.follower is not None:
            self.follower.begin(opened)

    def read(self, ids: Ids[int], last: bool) -> mx.array | None:
        """As in `Forward`; the rows go straight to the pool."""
        sequence = self._started()
        start = sequence.length
        written, logits, states = self._chunk(ids, start, last)
        told = [states] if self.follower is not None else []
        mx.eval(written, told, *([] if logits is None else [logits]))
        self._pool.write(written, sequence.table, start)
        sequence.append(len(ids), prompt=True)
        self._folded = sequence.length
        if self.follower is not None:
            self.follower.read(ids, states)
        return logits

    def size(self, rows: int) -> int:
        """As in `Forward`: any count runs as it is."""
        return rows

    def rows(self, tokens: mx.array, parents: Path | None = None, last: mx.array | None = None) -> mx.array:
        """As in `Forward`."""
        assert last is None, "this lane does not pipeline"
        sequence, count = self._started(), tokens.size
        assert self._open is None or self._open.parents is None, "of a tree a path is kept"
        # Rows that were folded and then taken back are written anew.
        self._folded = min(self._folded, sequence.length)
        if sequence.length + count > self._folded + TAIL:
            self._fold()
        start = sequence.length
        self._open, self._at = Started(start, count, branching(parents, count)), start - self._folded
        tree = None if self._open.parents is None else branches(self._open.parents)
        x = self._packed.embed(tokens)
        for number, layer in enumerate(self._packed.layers):
            q, new = self._project(x, layer, start if tree is None else start + tree.depths)
            at = self._at
            tail = self._tails[number]
            tail[:, :, at : at + count] = new
            held = self._pool.read(number, sequence.table, self._folded)
            if tree is None:
                x = self._block(x, q, mx.concatenate([held, tail[:, :, : at + count]], axis=2), layer)
            else:
                x = self._over_tree(x, q, (mx.concatenate([held, tail[:, :, :at]], axis=2), new), layer, tree)
        sequence.append(count, prompt=False)
        if self.follower is not None:
            self.follower.rows(x, count, behind=False)
        return self._packed.logits(x)

    def keep(self, path: Path) -> None:
        """As in `Forward`: rows of the tail take other places, whether they were folded meanwhile or not."""
        sequence, done = self._started(), self._open
        assert done is not None, "rows come first"
        unmoved = done.unmoved(path)
        copies = sequence.truncate(done.start + unmoved)
        self._open = None
        if self.follower is not None:
            self.follower.keep(path)
        if copies:
            mx.eval(self._tails)
            self._pool.copy(copies)
        self._folded = min(self._folded, sequence.length)
        moved = path[unmoved:]
        if moved:
            source = mx.array(moved, dtype=mx.uint32) + self._at
            at = sequence.length - self._folded
            for tail in self._tails:
                tail[:, :, at : at + len(moved)] = mx.take(tail, source, axis=2)
            sequence.append(len(moved), prompt=False)

    def trace(self) -> None:
        """As in `Forward`: nothing here is compiled ahead."""

    def settle(self) -> None:
        """As in `Forward`."""
        self._fold()

    def end(self) -> None:
        """As in `Forward`."""
        self._sequence, self._open, self._tails = None, None, []

    def _started(self) -> Sequence:
        assert self._sequence is not None, "begin comes first"
        return self._sequence

    def _fold(self) -> None:
        """Move all rows of the sequence into the pool; waits for those in flight."""
        sequence = self._started()
        count = sequence.length - self._folded
        if count > 0:
            rows = [mx.contiguous(tail[:, :, :count]) for tail in self._tails]
            mx.eval(self._tails, rows)
            self._pool.write(rows, sequence.table, self._folded)
        self._folded = sequence.length

    def _chunk(self, ids: Ids[int], start: int, last: bool) -> tuple[list[mx.array], mx.array | None, mx.array]:
        """The rows of a part of the prompt, per layer T [2, Hkv, n, D]; logits of its last id, if it is the last.

        Third: the states T [n, K] before the final norm.

        A function of its own: what it leaves uncomputed reads the pool, and must be gone when that is written.
        """
        table = self._started().table
        # The last chunk is padded where rows depend on how many there are.
        count = -(-len(ids) // self.prefill_rows) * self.prefill_rows
        x = self._packed.embed(mx.array([*ids, *[0] * (count - len(ids))]))
        written = []
        for number, layer in enumerate(self._packed.layers):
            q, new = self._project(x, layer, start)
            kv = new if not start else mx.concatenate([self._pool.read(number, table, start), new], axis=2)
            x = self._block(x, q, kv, layer)
            written.append(mx.contiguous(new[:, :, : len(ids)]))
        logits = self._packed.logits(x[len(ids) - 1 : len(ids)]) if last else None
        return written, logits, x

    def _project(self, x: mx.array, layer: Layer, start: int | mx.array) -> tuple[mx.array, mx.array]:
        """Queries T [H, R, D] and the new rows T [2, Hkv, R, D] of x T [R, K].

        start: position of the first row, the others follow; or int32 [R], of each.
        """
        shape = layer.heads
        qkv = layer.qkv(self._packed.normed(x, layer.input_norm))
        heads = qkv.reshape(x.shape[0], -1, shape.dim).swapaxes(0, 1)
        # Queries and keys are turned together: one operation fewer for the device to take up.
        qk, v = mx.split(heads, [shape.heads + shape.kv_heads], axis=0)
        if layer.q_norm is not None and shape.norm_eps is not None:
            q, k = mx.split(qk, [shape.heads], axis=0)
            q = mx.fast.rms_norm(q, layer.q_norm, shape.norm_eps)
            qk = mx.concatenate([q, mx.fast.rms_norm(k, layer.k_norm, shape.norm_eps)])
        if layer.rope is not None and isinstance(start, int):
            qk = layer.rope(qk[None], offset=start)[0]
        elif layer.rope is not None:
            # Rows as a batch of sequences, which may stand at different positions.
            qk = layer.rope(qk.swapaxes(0, 1)[:, :, None], offset=start)[:, :, 0].swapaxes(0, 1)
        q, k = mx.split(qk, [shape.heads], axis=0)
        return q, mx.stack([k, v])

    def _block(self, x: mx.array, q: mx.array, kv: mx.array, layer: Layer) -> mx.array:
        """The block's output T [R, K] for its input x, queries T [H, R, D], and all rows T [2, Hkv, n, D]."""
        return self._mlp(self._packed.attended(x, q, kv, layer), layer)

    def _over_tree(
        self, x: mx.array, q: mx.array, kv: tuple[mx.array, mx.array], layer: Layer, tree: Branches
    ) -> mx.array:
        """As `_block`; kv: the rows of the sequence, and the new ones T [2, Hkv, R, D]."""
        before, new = kv
        heads = []
        for path, fresh in tree.paths:
            along = mx.concatenate([before, mx.take(new, path, axis=2)], axis=2)
            heads.append(self._packed.attention(mx.take(q, path[-fresh:], axis=1), along))
        joined = mx.take(mx.concatenate(heads, axis=2), tree.order, axis=2)
        return self._mlp(self._packed.joined(x, joined, layer), layer)

    def _mlp(self, x: mx.array, layer: Layer) -> mx.array:
        """The block's second half."""
        gate, up = mx.split(layer.gate_up(self._packed.normed(x, layer.post_norm)), 2, axis=-1)
        return x + layer.down(swiglu(gate, up))
