"""The law of a draw, read eagerly, one token at a time: mlx-lm's processors and the keyed sampler of `sample.py`."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from worker.engine.sample import KeyedSampler, RawLogits, Sampling, penalties


def by_the_law(logits: mx.array, history: Sequence[int], sampling: Sampling, vocabulary: int) -> int:
    """The token after *history*; logits [1, V]."""
    tokens = mx.array(list(history), dtype=mx.uint32)
    rows = RawLogits(vocabulary, logits.shape[-1], 0)(tokens, logits)
    for processor in penalties(sampling):
        rows = processor(tokens, rows)
    rows = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
    return KeyedSampler(sampling, len(history))(rows).item()
