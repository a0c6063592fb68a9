"""The trunk's states of the texts that are taught: computed once where memory holds them, else for each batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from worker.forge import text
from worker.forge.target import Target
from worker.forge.text import Batch, Shape, Text

Pairs = Callable[[Batch], tuple[mx.array, mx.array]]
"""(H[j], embedding of x[j+1]) of a batch, each T [B, n, K]."""


def pairs(target: Target, ids: mx.array) -> tuple[mx.array, mx.array]:
    """The same of rows of ids [B, n]; the last column has no next token."""
    return target.states(ids), _next(target, ids)


def source(target: Target, texts: Sequence[Text], shape: Shape, room: int) -> tuple[Pairs, int]:
    """(where the pairs of *texts* come from, the bytes of states that are kept for it). room: bytes there are.

    A state that is kept costs no forward of the trunk when its text is read again.
    """
    count = sum(min(len(one.ids), shape.length) for one in texts)
    bytes_ = count * target.width * target.dtype.size
    # While they are put together there are two of each.
    if 2 * bytes_ > room:
        return lambda batch: pairs(target, mx.array(batch.ids)), 0
    states, places = _kept(target, texts, shape)

    def of(batch: Batch) -> tuple[mx.array, mx.array]:
        rows = places[np.maximum(batch.rows, 0)]
        return states[mx.array(rows)], _next(target, mx.array(batch.ids))

    return of, states.nbytes


def _kept(target: Target, texts: Sequence[Text], shape: Shape) -> tuple[mx.array, text.Ids]:
    """(states T [N, K], where in them that of each id of all texts is)."""
    places = np.zeros(sum(len(one.ids) for one in texts), np.int32)
    pieces: list[mx.array] = []
    done = 0
    for batch in text.batches(texts, shape, None):
        flat = batch.rows.reshape(-1)
        live = np.flatnonzero(flat >= 0)
        hidden = target.states(mx.array(batch.ids))
        pieces.append(hidden.reshape(-1, hidden.shape[-1])[mx.array(live)])
        mx.eval(pieces[-1])
        places[flat[live]] = np.arange(done, done + live.size)
        done += live.size
    states = mx.concatenate(pieces) if pieces else mx.zeros((1, target.width), dtype=target.dtype)
    mx.eval(states)
    pieces.clear()
    mx.clear_cache()
    return states, places


def _next(target: Target, ids: mx.array) -> mx.array:
    return target.embed(mx.concatenate([ids[:, 1:], mx.zeros_like(ids[:, :1])], axis=1))
