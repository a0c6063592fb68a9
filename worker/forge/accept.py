"""How many guesses of a head are right, depth by depth, on greedy text that it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from worker.forge.states import pairs
from worker.forge.target import Target
from worker.forge.text import Batch
from worker.forge.unrolled import Unrolled, Weights

# Positions whose logits are in memory at once.
_CHUNK = 4096


class Acceptance:
    """Measures heads of one shape over the same batches.

    Args:
        target: the trunk.
        unrolled: the computation of the heads.
        depths: D.
        batches: of greedy text.
    """

    def __init__(self, target: Target, unrolled: Unrolled, depths: int, batches: Sequence[Batch]) -> None:
        self._target, self._unrolled, self._depths, self._batches = target, unrolled, depths, batches

    def of(self, weights: Weights) -> list[float]:
        """For each depth the share of right guesses, of those with a right draft above; nan: there were none."""
        right, tried = np.zeros(self._depths), np.zeros(self._depths)
        for batch in self._batches:
            guesses = np.array(self._guesses(weights, mx.array(batch.ids), mx.array(batch.places)))
            for depth, (hits, lives) in enumerate(self._counted(batch, guesses)):
                right[depth] += hits
                tried[depth] += lives
        return [float(hits / lives) if lives else float("nan") for hits, lives in zip(right, tried, strict=True)]

    def _guesses(self, weights: Weights, ids: mx.array, index: mx.array) -> mx.array:
        """The likeliest token of each depth at each position of *index*, [D, M]."""
        hidden, embedded = pairs(self._target, ids)
        found = []
        for state in self._unrolled(weights, embedded, hidden, self._depths):
            rows = state.reshape(-1, state.shape[-1])[index]
            chunks = [rows[start : start + _CHUNK] for start in range(0, rows.shape[0], _CHUNK)]
            found.append(mx.concatenate([self._target.logits(chunk).argmax(axis=-1) for chunk in chunks]))
        return mx.stack(found)

    def _counted(self, batch: Batch, guesses: npt.NDArray[Any]) -> list[tuple[int, int]]:
        """(right guesses, guesses whose draft was right above them) of each depth."""
        flat = batch.ids.reshape(-1)
        wanted = flat[np.minimum(batch.places + 2, flat.size - 1)]
        right_above = np.ones(flat.size, np.bool_)
        found = []
        for depth in range(self._depths):
            here = batch.weights[depth] > 0
            live = here & right_above[batch.places]
            right = live & (guesses[depth] == wanted)
            found.append((int(right.sum()), int(live.sum())))
            # The draft goes on one position further.
            right_above = np.zeros(flat.size, np.bool_)
            right_above[batch.places[right] + 1] = True
        return found


def tokens_per_step(shares: Sequence[float], drafted: int) -> float:
    """Tokens of a step that verifies *drafted* tokens, the model's own among them."""
    kept, expected = 1.0, 1.0
    for share in shares[:drafted]:
        kept *= 0.0 if np.isnan(share) else share
        expected += kept
    return expected
