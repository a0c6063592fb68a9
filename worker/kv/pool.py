"""The arrays that hold keys and values: one for each layer, one owner, written without a copy.

MLX writes an array in place only if nothing else refers to its buffer, and copies all of it otherwise. So nobody
keeps an array of the pool, or a view of one, across an update; views within a graph are gone once it is evaluated.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass

import mlx.core as mx

from worker.kv.pages import PAGE, Copy, pages_for, runs


@dataclass(frozen=True, slots=True)
class Shape:
    """What one position takes: *layers* layers of *kv_heads* heads, each a key and a value of *dim* numbers."""

    layers: int
    kv_heads: int
    dim: int
    dtype: mx.Dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers."""
        return self.layers * 2 * self.kv_heads * PAGE * self.dim * int(self.dtype.size)


class Place:
    """Where positions *start* to *start* + *count* - 1 of a block table lie; at least one.

    spans: (first slot, rows) in order, one for each run of pages that lie side by side.
    """

    __slots__ = ("_indices", "_pages", "_skip", "count", "spans")

    def __init__(self, table: Ids[int], start: int, count: int) -> None:
        assert 0 <= start < start + count <= len(table) * PAGE, "the table has a page for every position"
        self.count = count
        self._pages = table[start // PAGE : pages_for(start + count)]
        self._skip = start % PAGE
        self.spans: list[tuple[int, int]] = []
        skip = self._skip
        for page, size in runs(self._pages):
            rows = min(size * PAGE - skip, count)
            self.spans.append((page * PAGE + skip, rows))
            count, skip = count - rows, 0
        self._indices: dict[tuple[int, int], mx.array] = {}

    def gathered(self, array: mx.array) -> mx.array:
        """The rows out of *array* T [2, Hkv, slots, D], copied together: T [2, Hkv, count, D]."""
        two, heads, slots, dim = array.shape
        index = self._index(two * heads, slots // PAGE)
        # As a table of whole pages the array needs no copy, and neither does what comes out.
        found = mx.take(array.reshape(-1, PAGE * dim), index, axis=0).reshape(two, heads, -1, dim)
        return found[:, :, self._skip : self._skip + self.count]

    def _index(self, lines: int, pages: int) -> mx.array:
        # The layers of one forward ask for the same.
        key = (lines, pages)
        if key not in self._indices:
            first = mx.arange(lines, dtype=mx.uint32)[:, None] * pages
            self._indices[key] = first + mx.array(list(self._pages), dtype=mx.uint32)
        return self._indices[key]


class Pool:
    """Rows of *shape* for *pages* pages; one thread uses it, and `Pages` keeps its books.

    arrays: for each layer T [2, Hkv, pages * PAGE, D], keys before values. While one is updated nobody else may
        refer to it or to a view of it.

    Args:
        shape: the layers.
        pages: how many.
        fill: what slots hold that were never written.
    """

    def __init__(self, shape: Shape, pages: int, *, fill: float = 0.0) -> None:
        self.shape = shape
        self.pages = pages
        size = (2, shape.kv_heads, pages * PAGE, shape.dim)
        self.arrays = [mx.full(size, fill, dtype=shape.dtype) for _ in range(shape.layers)]
        mx.eval(self.arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.shape.page_bytes * self.pages

    def copy(self, copies: Iterable[Copy]) -> None:
        """Carry out *copies* in all layers; nothing may be in flight. Evaluated on return."""
        for one in copies:
            source, target = one.source * PAGE, one.target * PAGE
            # Apart from the arrays before they are updated: a view would be a second reference.
            rows = [
                mx.take(array, mx.arange(source, source + one.rows, dtype=mx.uint32), axis=2)
                for array in self.arrays
            ]
            mx.eval(rows)
            for array, piece in zip(self.arrays, rows, strict=True):
                array[:, :, target : target + one.rows] = piece
            self.finish()

    def write(self, layer_rows: Ids[mx.array], table: Ids[int], start: int) -> None:
        """Put rows into positions *start* and on of a block table; nothing may be in flight. Evaluated on return.

        Args:
            layer_rows: for each layer T [2, Hkv, n, D], evaluated or not, but no view of this pool.
            table: page ids, with a page for every position.
            start: position of the first row.
        """
        assert len(layer_rows) == len(self.arrays), "rows for every layer"
        place = Place(table, start, layer_rows[0].shape[2])
        for layer, rows in enumerate(layer_rows):
            self.put(layer, rows, place)
        self.finish()

    def put(self, layer: int, rows: mx.array, place: Place) -> None:
        """As `write`, for one layer and not evaluated; whoever takes a view from now on sees the rows."""
        assert rows.dtype == self.shape.dtype, f"{rows.dtype} into a pool of {self.shape.dtype}"
        array, done = self.arrays[layer], 0
        for slot, count in place.spans:
            # Replaces what the list's own object stands for, so that the old array has no name left.
            array[:, :, slot : slot + count] = rows[:, :, done : done + count]
            done += count

    def view(self, layer: int, place: Place) -> mx.array:
        """Rows T [2, Hkv, count, D], not evaluated: a slice where they lie in sequence, else gathered.

        A slice refers to the array: it must be gone before the next update.
        """
        if len(place.spans) > 1:
            return place.gathered(self.arrays[layer])
        ((slot, count),) = place.spans
        return self.arrays[layer][:, :, slot : slot + count]

    def read(self, layer: int, table: Ids[int], count: int) -> mx.array:
        """The first *count* rows of a block table, as `view`."""
        return self.view(layer, Place(table, 0, count))

    def finish(self) -> None:
        """Evaluate what was put, and wait until the device refers to the arrays no more."""
        mx.eval(self.arrays)
        settle()


def settle() -> None:
    """Wait until the device has dropped every buffer it has worked on.

    On a GPU that is a little after the results can be read, and an update built in between would copy.
    """
    if mx.default_device().type != mx.DeviceType.cpu:
        mx.synchronize()
