"""The block table of the one sequence, as the kernels take it: made on the host, moved on by the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import mlx.core as mx
import numpy as np

from worker.kv.pages import Sequence


def never(array: mx.array) -> mx.array:
    """[1]: False whatever logits or moves *array* holds, but computed after it."""
    one = array.reshape(-1)[:1]
    return one < -1 if array.dtype == mx.int32 else mx.isnan(one) & mx.isfinite(one)


class HostTables:
    """Makes `meta` of `kernels.rows` for one sequence after the other. pages: of the pool."""

    def __init__(self, pages: int) -> None:
        # Room for the longest table, and never so short that MLX passes it by value.
        self._host = np.zeros(max(8, 1 + pages), dtype=np.int32)
        self._sequence: Sequence | None = None
        self._version = -1

    def take(self, sequence: Sequence) -> None:
        """From now on *sequence*."""
        self._sequence, self._version = sequence, -1

    def meta(self, length: int) -> mx.array:
        """Meta at *length*, int32 [1 + pages]. Unused places name the sequence's own last page."""
        sequence = self._sequence
        assert sequence is not None, "take() comes first"
        if self._version != sequence.version:
            pages = len(sequence.table)
            self._host[1 : 1 + pages], self._host[1 + pages :] = sequence.table, sequence.table[-1]
            self._version = sequence.version
        self._host[0] = length
        return mx.array(self._host)


def further(meta: mx.array, last: mx.array) -> mx.array:
    """*meta* behind row *last*, uint32 [1], of the rows that were computed with it."""
    return _further(meta, last, _first(meta.size))


def further_place(position: mx.array, last: mx.array) -> mx.array:
    """`draw.place` behind row *last*, uint32 [1], where that behind row 0 is *position*, uint32 [2]."""
    return _further_place(position, last)


def _fused(call: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """*call* as one kernel where that is cheap: for the CPU each takes a C++ compiler seconds."""
    fused: Callable[..., mx.array] = mx.compile(call)

    def run(*arrays: mx.array) -> mx.array:
        return (call if mx.default_device().type == mx.DeviceType.cpu else fused)(*arrays)

    return run


@_fused
def _further_place(position: mx.array, last: mx.array) -> mx.array:
    return position + (last + 1) * mx.array([0, 1], dtype=mx.uint32)


@_fused
def behind(meta: mx.array, latest: mx.array) -> mx.array:
    """*meta*, computed after *latest*."""
    return meta + never(latest)


@_fused
def _further(meta: mx.array, last: mx.array, first: mx.array) -> mx.array:
    return meta + first * (last.astype(mx.int32) + 1)


@cache
def _first(size: int) -> mx.array:
    """1, and 0 behind it: int32 [size]."""
    return mx.array([1, *[0] * (size - 1)], dtype=mx.int32)
