"""The columns of the LM head that a training step looks at: all, or those of common ids and some of the others.

Those by lot stand for all that are not common: their logits are raised by log(others / lot), so that the softmax's
sum is right on average (sampled softmax: Jean et al. 2015, 1412.2007).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from worker.forge.text import Text


class Columns(NamedTuple):
    """head: T [K, S]. shift: float32 [S], added to the logits; None: nothing is."""

    head: mx.array
    shift: mx.array | None = None


class Share(NamedTuple):
    """common: ids that the texts have most. lot: others, drawn anew for each step. seed: of the lot."""

    common: int = 8192
    lot: int = 4096
    seed: int = 0


def columns_of(lm_head: mx.array, texts: Sequence[Text], share: Share) -> Callable[[int], Columns]:
    """The columns of a step, by its number. lm_head: T [K, V]; all of it where that is not twice as much."""
    width = lm_head.shape[1]
    if width < 2 * (share.common + share.lot):
        return lambda _step: Columns(lm_head)
    counts = np.zeros(width, np.int64)
    for one in texts:
        counts += np.bincount(one.ids, minlength=width)[:width]
    order = np.argsort(-counts, kind="stable")
    common, others = order[: share.common], order[share.common :]
    raised = math.log(others.size / share.lot)
    shift = mx.array([0.0] * share.common + [raised] * share.lot, dtype=mx.float32)
    rows = lm_head.T

    def of(step: int) -> Columns:
        lot = np.random.default_rng([share.seed, step]).choice(others, share.lot, replace=False)
        ids = mx.array(np.concatenate([common, lot]).astype(np.int32))
        return Columns(rows[ids].T, shift)

    return of
