"""What mlx-lm's models call for a layer of full attention, backed by the pages of one sequence."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from worker.kv.pages import Sequence
from worker.kv.pool import Place, Pool


class Table:
    """The block table of the running sequence, looked at once for all layers of a forward."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self._places: dict[tuple[int, int], Place] = {}

    def place(self, start: int, count: int) -> Place:
        """Where positions *start* to *start* + *count* - 1 lie; the sequence has pages for them."""
        key = (start, count)
        if key not in self._places:
            self._places[key] = Place(self.sequence.table, start, count)
        return self._places[key]

    def refresh(self) -> None:
        """Look again: to be called before each forward, since the table may have changed."""
        self._places = {}


class PagedCache:
    """One layer of a pool with the interface of mlx-lm's `KVCache`; batch size 1.

    An update is written in place only if the views that the forward before took are gone, that is, if that forward
    was evaluated.

    offset: rows that this layer holds; whoever runs the model counts those of the sequence.

    Args:
        pool: where the rows are.
        layer: which of its arrays.
        table: shared by the caches of one sequence.
    """

    def __init__(self, pool: Pool, layer: int, table: Table) -> None:
        self.offset = table.sequence.length
        self._pool = pool
        self._layer = layer
        self._table = table

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write T [1, Hkv, S, D] each behind the rows there are; all rows, T [1, Hkv, offset, D] each."""
        assert keys.shape == values.shape, "keys and values of one shape"
        assert keys.shape[0] == 1, "one sequence"
        rows = keys.shape[2]
        self._pool.put(self._layer, mx.concatenate([keys, values]), self._table.place(self.offset, rows))
        self.offset += rows
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """All rows, T [1, Hkv, offset, D] each: views where the pages lie in sequence, else gathered."""
        both = self._pool.view(self._layer, self._table.place(0, self.offset))
        return both[:1], both[1:]

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        """As mlx-lm's function, told how many rows there are."""
        return create_attention_mask(*args, offset=self.offset, **kwargs)

    def size(self) -> int:
        """Rows held."""
        return self.offset

    def empty(self) -> bool:
        """Whether there is no row yet."""
        return self.offset == 0

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None, int]:
        """Keys, values and their number, to be evaluated and dropped: they refer to the pool."""
        return (None, None, 0) if self.empty() else (*self.keys_and_values(), self.offset)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that the sequence holds in this layer."""
        return len(self._table.sequence.table) * self._pool.shape.page_bytes // self._pool.shape.layers

    def is_trimmable(self) -> bool:
        """Always: rows taken back are written again."""
        return True

    def trim(self, n: int) -> int:
        """Take back the last *n* rows, as far as there are; how many it were."""
        n = min(self.offset, n)
        self.offset -= n
        return n
