"""A head of the dense family over the kernels that write in place: compiled once for each row count.

Its keys and values lie beside those of the trunk, in a pool with the same pages: the row of a pair (H[t], x[t+1])
has the slot of position t. So a prefix that is shared, a branch that is moved and rows that are taken back are the
trunk's business. A pair that an earlier job did not read has a row that holds anything: only drafts suffer.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ids
from pathlib import Path
from typing import Final, NamedTuple, cast

import mlx.core as mx

from worker.engine.host_tables import HostTables, behind, further, further_place
from worker.engine.packed import Linear, Packed, pack_block, pack_linear
from worker.engine.verify_bank import SIZES, Products, Switches, size_for
from worker.kernels import disk_cache
from worker.kernels.attention import attend
from worker.kernels.dialect import chosen, recorded
from worker.kernels.rope_write import rope_write
from worker.kv.pool import Pool, Shape
from worker.kv.prefix import Opened
from worker.speculation.mtp.following import Ask
from worker.speculation.mtp.head import Head

Compiled = Callable[..., list[mx.array]]
ROW_0: Final = mx.array([0], dtype=mx.uint32)


class Guess(NamedTuple):
    """Of one pair, lazily. logits: T [1, V]. states: T [1, K], for a deeper guess. meta: behind the pair."""

    logits: mx.array
    states: mx.array
    meta: mx.array


class PackedHead:
    """The `HeadRun` over it.

    Args:
        head: the module, whose block is a dense layer.
        trunk: below it.
        pages: of the trunk's pool.
        switches: of the trunk's bank.

    Raises:
        NotDenseError: its block is another.
    """

    goes_behind = True

    def __init__(self, head: Head, trunk: Packed, pages: int, switches: Switches) -> None:
        self._trunk = trunk
        self._layer = pack_block(head.block)
        self._eh: Linear = pack_linear(head.eh_proj)
        self._enorm, self._hnorm, self._norm = head.enorm.weight, head.hnorm.weight, head.norm.weight
        self._takes_normed, self._passes_normed = head.takes_normed, head.passes_normed
        self._embedding_first = head.embedding_first
        self._products = Products(trunk.eps, switches)
        self._kernels = switches.kernels
        self._in_place = chosen(switches.kernels) is not None
        shape = self._layer.heads
        self.pool = Pool(Shape(1, shape.kv_heads, shape.dim, trunk.dtype), pages)
        self._tables = HostTables(pages)
        self._compiled: dict[tuple[int, bool], Compiled] = {}
        # What comes after all that was started, and what the latest pair said.
        self._latest: mx.array | None = None
        self._guess: Guess | None = None

    def prepare(self, folder: Path) -> int:
        """Compile what the head needs and *folder* lacks; how many kernels that was."""
        meta, width = mx.zeros((self.pool.pages + 8,), dtype=mx.int32), self._norm.size
        with recorded() as launches:
            for size in SIZES:
                states = mx.zeros((size, width), dtype=self._trunk.dtype)
                tokens = mx.zeros((size,), dtype=mx.uint32)
                self._forward(tokens, states, ROW_0, meta, self.pool.arrays[0])
        return disk_cache.fill(launches, folder)

    def warm_up(self) -> None:
        """Run every size once, on a begun sequence with room for 16 rows at its start."""
        for size in SIZES:
            states = mx.zeros((size, self._norm.size), dtype=self._trunk.dtype)
            self.read((0,) * size, states, 0)
            self.settle()

    def begin(self, opened: Opened) -> None:
        """As in `HeadRun`."""
        if self._latest is not None:
            mx.eval(self._latest)
        self.pool.copy(opened.copies)
        self._tables.take(opened.sequence)
        self._latest = self._guess = None

    def prime(self, ids: Ids[int], states: mx.array, start: int) -> None:
        """As in `HeadRun`: only keys and values are made. What stands behind the ids is written over later."""
        padded = (*ids, *[0] * (states.shape[0] - len(ids)))
        embedded = self._trunk.embed(mx.array(padded, dtype=mx.uint32))
        x = self._entered(embedded, self._taken(states))
        qkv = self._layer.qkv(mx.fast.rms_norm(x, self._layer.input_norm, self._trunk.eps))
        assert self._layer.table is not None, "checked at the start"
        q, self.pool.arrays[0] = rope_write(
            qkv,
            self._layer.table,
            self.pool.arrays[0],
            self._after(self._tables.meta(start)),
            self._layer.heads,
            use_kernel=self._kernels,
        )
        self._latest = q
        mx.async_eval(q, self.pool.arrays)  # type: ignore[no-untyped-call]

    def read(self, ids: Ids[int], states: mx.array, start: int) -> None:
        """As in `HeadRun`."""
        self._read(mx.array(list(ids), dtype=mx.uint32), states, None, self._after(self._tables.meta(start)))

    def draft(self, ask: Ask) -> mx.array:
        """As in `HeadRun`."""
        guess = self._guess
        assert guess is not None, "a pair comes first"
        tokens: list[mx.array] = []
        position = ask.position
        for place in range(ask.count):
            if place:
                guess = self._run(tokens[-1], guess.states, ROW_0, guess.meta, first=False)
                position = further_place(position, ROW_0)
            tokens.append(ask.draws(guess.logits, position).token)
        # Not evaluated by itself: the forward over it is launched at once, and each launch costs the host.
        return tokens[0] if len(tokens) == 1 else mx.concatenate(tokens)

    def draft_behind(
        self, tokens: mx.array, states: mx.array, last: mx.array, ask: Ask, start: int | None
    ) -> mx.array:
        """As in `HeadRun`."""
        if start is None:
            assert self._guess is not None, "a pair comes first"
            meta = self._after(self._guess.meta)
        else:
            meta = self._after(self._tables.meta(start))
        self._read(tokens, states, last, meta)
        return self.draft(ask)

    def _read(self, tokens: mx.array, states: mx.array, last: mx.array | None, meta: mx.array) -> None:
        count, size = tokens.size, size_for(tokens.size)
        if size > count:
            tokens = mx.concatenate([tokens, mx.zeros((size - count,), dtype=tokens.dtype)])
            states = mx.pad(states, [(0, size - count), (0, 0)])
        last = mx.array([count - 1], dtype=mx.uint32) if last is None else last
        self._guess = self._run(tokens, states, last, meta, first=True)

    def _after(self, meta: mx.array) -> mx.array:
        """*meta*, after all that was started."""
        return meta if self._latest is None else behind(meta, self._latest)

    def settle(self) -> None:
        """Wait for all that was started."""
        mx.eval([] if self._latest is None else self._latest, self.pool.arrays)
        self._latest = None

    def _run(self, tokens: mx.array, states: mx.array, last: mx.array, meta: mx.array, *, first: bool) -> Guess:
        key = (tokens.size, first)
        if key not in self._compiled:
            forward = self._first if first else self._deeper
            self._compiled[key] = cast("Compiled", mx.compile(forward))
        logits, passed, *written = self._compiled[key](tokens, states, last, meta, self.pool.arrays[0])
        self.pool.arrays = written or self.pool.arrays
        self._latest = logits
        return Guess(logits, passed, further(meta, last))

    def _first(
        self, tokens: mx.array, states: mx.array, last: mx.array, meta: mx.array, pool: mx.array
    ) -> list[mx.array]:
        return self._forward(tokens, self._taken(states), last, meta, pool)

    def _deeper(
        self, tokens: mx.array, states: mx.array, last: mx.array, meta: mx.array, pool: mx.array
    ) -> list[mx.array]:
        return self._forward(tokens, states, last, meta, pool)

    def _forward(
        self, tokens: mx.array, states: mx.array, last: mx.array, meta: mx.array, pool: mx.array
    ) -> list[mx.array]:
        layer, products = self._layer, self._products
        x = self._entered(self._trunk.embed(tokens), states)
        qkv = products.normed(x, layer.input_norm, layer.qkv)
        assert layer.table is not None, "checked at the start"
        heads, after = attend(qkv, layer.table, pool, meta, layer.heads, use_kernel=self._kernels)
        if tokens.size > 1:
            # Only behind the last pair is anything drafted.
            heads, x = mx.take(heads, last, axis=0), mx.take(x, last, axis=0)
        x = products.mlp(products.added(heads, layer.out, x), layer)
        normed = mx.fast.rms_norm(x, self._norm, self._trunk.eps)
        logits = products.plain(normed, self._trunk.head)
        passed = normed if self._passes_normed else x
        return [logits, passed, *([] if self._in_place else [after])]

    def _taken(self, states: mx.array) -> mx.array:
        """What the head takes of the trunk's states before the final norm."""
        return self._trunk.normed(states, self._trunk.norm) if self._takes_normed else states

    def _entered(self, embedded: mx.array, hidden: mx.array) -> mx.array:
        eps = self._trunk.eps
        e, h = mx.fast.rms_norm(embedded, self._enorm, eps), mx.fast.rms_norm(hidden, self._hnorm, eps)
        joined = mx.concatenate([e, h] if self._embedding_first else [h, e], axis=-1)
        return self._products.plain(joined, self._eh)
