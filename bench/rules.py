"""The chance that a drafted token is kept, by the rule that decides it; laws are float64 [V] and sum to 1."""

from __future__ import annotations

from typing import Any

import numpy as np

Law = np.ndarray[Any, np.dtype[np.float64]]

RULES = ("ratio rule", "shared noise", "independent draws", "likeliest token")


def kept(p: Law, q: Law) -> tuple[float, float, float, float]:
    """The chance of each of `RULES` for a draft of law *q* where the target has law *p*.

    The ratio rule keeps a draft of q with 1 - TV(p, q); independent draws are equal with sum of p q; the drafter's
    likeliest token is drawn with p of it.
    """
    return float(np.minimum(p, q).sum()), shared(p, q), float(p @ q), float(p[q.argmax()])


def shared(p: Law, q: Law) -> float:
    """The chance that argmax(log p + G) is argmax(log q + G) for one Gumbel noise G.

    It is the sum over x of 1 / sum over y of max(p_y / p_x, q_y / q_x) (Daliri et al. 2408.07978). The first one
    is the larger where p_y / q_y is at least p_x / q_x: in the order of this ratio both sums are partial ones.
    """
    both = (p > 0) & (q > 0)
    ratio = np.log(p[both]) - np.log(q[both])
    order = ratio.argsort()
    # Where the other law has nothing a token stands at one end of the order: its own term is 0.
    left = np.cumsum(q[both][order]) - q[both][order] + q[p == 0].sum()
    right = np.cumsum(p[both][order][::-1])[::-1] + p[q == 0].sum()
    return float((1 / (right / p[both][order] + left / q[both][order])).sum())
