"""The packed lane in the in-place form: kernels write the pools, the decode forward is compiled.

MLX does not see a write in place. Within a forward the reader takes the writer's output; between two forwards the
order comes from the data: tokens that the device has drawn come after the logits of the forward before, and a
length that the host sets anew, which all kernels of a forward take, is made to depend on them, or on the moves of
rows that were kept. Of rows whose path the host has read there is nothing to come after: they are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ids
from typing import cast

import mlx.core as mx

from worker.engine.forward import MAX_ROWS, Follower, Path, Started, branching, positions_within
from worker.engine.host_tables import HostTables, behind, further
from worker.engine.packed import Layer, Packed
from worker.engine.verify_bank import SIZES, TREE_SIZES, Switches, VerifyBank, size_for
from worker.kernels import rows as trees_of
from worker.kernels.move_rows import move_rows
from worker.kernels.read_pages import read_pages
from worker.kernels.rope_write import rope_write
from worker.kernels.swiglu import swiglu
from worker.kv.pages import Sequence
from worker.kv.pool import Pool
from worker.kv.prefix import Opened

Moved = Callable[..., list[mx.array]]


class DenseInPlace:
    """The `Forward` of the dense family over kernels that write the pools."""

    one_ahead = True
    prefix_reuse = True
    why = ""
    width = MAX_ROWS
    cuts = True
    pipelines = True
    follower: Follower | None = None

    def __init__(self, packed: Packed, pool: Pool, *, prefill_rows: int, switches: Switches) -> None:
        self.bank = VerifyBank(packed, switches)
        self.row_invariant = self.bank.row_invariant
        self.prefill_rows = prefill_rows
        self.capacity = positions_within(pool.pages, prefill_rows)
        self.packed = self._packed = packed
        self.switches = switches
        self._pool = pool
        self._kernels = switches.kernels
        # A kernel for each layer: built anew each time, they would take the host longer than the device.
        self._moved = cast("Moved", mx.compile(self._move_all)) if self.bank.in_place else self._move_all
        self.trees = switches.trees
        self.why_narrow = "" if switches.trees else "forwards over trees are switched off"
        self._tables = HostTables(pool.pages)
        self.pages = pool.pages
        self._sequence: Sequence | None = None
        self._meta: mx.array | None = None
        # Length of the sequence and version of its table for which meta was made.
        self._meta_of = (-1, -1)
        # What comes after all that was started; None where the host knows that it is computed.
        self._latest: mx.array | None = None
        # The latest rows that may still be taken back, and the meta that they were computed with; then rows that
        # were started behind these before a path of them was known.
        self._open: Started | None = None
        self._open_meta: mx.array | None = None
        self._ahead: Started | None = None

    def begin(self, opened: Opened) -> None:
        """As in `Forward`."""
        self.end()
        self._pool.copy(opened.copies)
        self._sequence = opened.sequence
        self._tables.take(opened.sequence)
        if self.follower is not None:
            self.follower.begin(opened)

    def size(self, rows: int) -> int:
        """As in `Forward`: a row count that is compiled."""
        return size_for(rows)

    def read(self, ids: Ids[int], last: bool) -> mx.array | None:
        """As in `Forward`: exactly `prefill_rows` rows are computed, those beyond *ids* for nothing.

        Where the prompt goes on, the forward is on its way on return, and the one before it is done.
        """
        sequence = self._started()
        start, count = sequence.length, self.prefill_rows
        meta, before = self._meta_at(start), self._latest
        # Of the type of the tokens that are drawn: for another one CUDA would have to compile another gather.
        x = self._packed.embed(mx.array([*ids, *[0] * (count - len(ids))], dtype=mx.uint32))
        layers = self._packed.layers
        for number, layer in enumerate(layers):
            q = self._write(x, layer, number, meta)
            if number + 1 == len(layers) and not last and self.follower is None:
                break
            x = self._block(x, q, layer, number, meta, start + count)
        sequence.append(len(ids), prompt=True)
        if self.follower is not None:
            self.follower.read(ids, x)
        if last:
            # Kept: dropped with these logits, as after a cancel, the writes of their graph would never happen.
            self._latest = self._packed.logits(x[len(ids) - 1 : len(ids)])
            return self._latest
        self._latest = q
        mx.async_eval(q, self._pool.arrays)  # type: ignore[no-untyped-call]
        # One forward runs while the next is built, and no more: a cancel waits for them.
        mx.eval([] if before is None else before)
        return None

    def rows(self, tokens: mx.array, parents: Path | None = None, last: mx.array | None = None) -> mx.array:
        """As in `Forward`."""
        sequence, given = self._started(), tokens.size
        assert self._open is None or self._open.parents is None, "of a tree a path is kept"
        assert self._ahead is None, "one forward ahead"
        count = given if parents is None else 1 + len(parents)
        size = size_for(given)
        assert count == given or size_for(count) == given, "rows have parents, but for padding"
        if size > given:
            tokens = mx.concatenate([tokens, mx.zeros((size - given,), dtype=tokens.dtype)])
        meta = self._meta
        if last is not None:
            meta = self._meta_behind(last)
            self._ahead = Started(sequence.length, count, branching(parents, count))
            assert self._ahead.parents is None, "chains go on behind chains"
        else:
            if meta is None or self._meta_of != (sequence.length, sequence.version):
                meta = self._meta_at(sequence.length)
            self._open = Started(sequence.length, count, branching(parents, count))
            sequence.append(count, prompt=False)
        self._open_meta = meta
        logits, after, self._pool.arrays, states = self.bank.run(
            tokens, meta, self._pool.arrays, self._tree(size), tells=self.follower is not None
        )
        self._meta, self._meta_of = after, (sequence.length + size - count, sequence.version)
        if last is not None:
            self._meta = None
        self._latest = logits
        if self.follower is not None and states is not None:
            self.follower.rows(states, count, behind=last is not None)
        return logits if size == given else logits[:given]

    def keep(self, path: Path) -> None:
        """As in `Forward`: in every layer a kernel moves the rows that have to."""
        sequence, done = self._started(), self._open
        assert done is not None, "rows come first"
        unmoved = done.unmoved(path)
        moved = path[unmoved:]
        # Pages that are parted from others here still hold these rows, and are not written.
        sources = [sequence.slot(done.start + row) for row in moved]
        copies = sequence.truncate(done.start + unmoved)
        if self.follower is not None:
            self.follower.keep(path)
        if self._ahead is not None:
            assert not moved, "a chain behind a chain moves nothing"
            assert not copies, "rows of the answer are nobody else's"
            self._open, self._ahead = Started(sequence.length, self._ahead.count, None), None
            sequence.append(self._open.count, prompt=False)
            return
        self._open = self._latest = None
        if copies:
            self.settle()
            self._pool.copy(copies)
            self._meta = None
        if moved:
            sequence.append(len(moved), prompt=False)
            at = sequence.length - len(moved)
            self._move(sources, [sequence.slot(at + place) for place in range(len(moved))])

    def settle(self) -> None:
        """As in `Forward`: the rows are in their pages once the latest forward has run."""
        mx.eval([] if self._latest is None else self._latest, self._pool.arrays)
        self._latest = None

    def end(self) -> None:
        """As in `Forward`."""
        self.settle()
        self._sequence = self._meta = self._open = self._open_meta = self._ahead = None

    def trace(self) -> None:
        """As in `Forward`."""
        for size in SIZES:
            self.rows(mx.zeros((size,), dtype=mx.uint32))
            self.settle()
            self.keep((0,))
        for size in TREE_SIZES if self.trees else ():
            self.rows(mx.zeros((size,), dtype=mx.uint32), (0,) * (size - 1))
            self.settle()
            self.keep((0, 2))
            self.settle()

    def _started(self) -> Sequence:
        assert self._sequence is not None, "begin comes first"
        return self._sequence

    def _meta_at(self, length: int) -> mx.array:
        """Meta of the sequence at *length*, after the latest forward."""
        meta = self._tables.meta(length)
        return meta if self._latest is None else behind(meta, self._latest)

    def _meta_behind(self, last: mx.array) -> mx.array:
        """Meta behind row *last* of the latest rows, wherever that is."""
        assert self._open is not None, "rows come first"
        assert self._open_meta is not None
        assert self._open.parents is None, "a chain goes on behind a chain"
        return further(self._open_meta, last)

    def _tree(self, size: int) -> mx.array | None:
        """The tree of the latest rows for a forward of *size*: rows beyond them stand alone."""
        if self._open is None or self._open.parents is None:
            return None
        assert self.trees, self.why_narrow
        return trees_of.tree_array([-1, *self._open.parents, *[-1] * (size - self._open.count)])

    def _move(self, sources: list[int], targets: list[int]) -> None:
        """Move computed rows from slots to slots; all that is started later comes after it."""
        # Always as many, so that there is one kernel.
        left_out = [-1] * (MAX_ROWS - len(sources))
        moves = mx.array([[*sources, *left_out], [*targets, *left_out]], dtype=mx.int32)
        self._latest, *moved = self._moved(moves, *self._pool.arrays)
        self._pool.arrays, self._meta = moved or self._pool.arrays, None

    def _move_all(self, moves: mx.array, *pools: mx.array) -> list[mx.array]:
        """The moves once they are done in all layers, and the pools where they were not written in place."""
        moved = []
        for pool in pools:
            moves, after = move_rows(pool, moves, use_kernel=self._kernels)
            moved.append(after)
        return [moves, *([] if self.bank.in_place else moved)]

    def _write(self, x: mx.array, layer: Layer, number: int, meta: mx.array) -> mx.array:
        """Queries T [B, H, D] of x T [B, K]; keys and values are written to the pool."""
        assert layer.table is not None, "a model whose rope is no table of constants has no such lane"
        qkv = layer.qkv(self._packed.normed(x, layer.input_norm))
        q, self._pool.arrays[number] = rope_write(
            qkv, layer.table, self._pool.arrays[number], meta, layer.heads, use_kernel=self._kernels
        )
        return q

    def _block(  # noqa: PLR0917 - what a layer of a chunk is computed from
        self, x: mx.array, q: mx.array, layer: Layer, number: int, meta: mx.array, end: int
    ) -> mx.array:
        """The block's output T [B, K] once its queries T [B, H, D] are there, over positions below *end*."""
        kv = read_pages(self._pool.arrays[number], meta, end, q, use_kernel=self._kernels)
        x = self._packed.attended(x, q.swapaxes(0, 1), kv, layer)
        joint = layer.gate_up(self._packed.normed(x, layer.post_norm))
        return x + layer.down(swiglu(joint, use_kernel=self._kernels))
