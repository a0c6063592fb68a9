"""What the head is taught: the trunk's own law of the token that it guesses, at every depth."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from worker.forge.columns import Columns


class Lesson(NamedTuple):
    """How the law is taught. hard: share of the trunk's likeliest token in it; chunk: positions at once."""

    hard: float = 0.3
    chunk: int = 4096


def taught(
    states: list[mx.array], truth: mx.array, weights: mx.array, columns: Columns, lesson: Lesson
) -> tuple[mx.array, mx.array]:
    """(a scalar whose gradient by *states* is the loss's, the loss by depth float32 [D]).

    states: of each depth T [M, K]. truth: T [M, K], the trunk's states that give the token guessed there. weights:
    float32 [D, M]; the loss of a depth is the sum of its positions' cross-entropies by them. columns: S of them.

    The gradient by the states is known in closed form, (q - p) LM_head^T, so it is computed beside the loss, and
    no logits are kept for a backward pass: of a chunk of positions at a time there are D + 1 arrays [chunk, S].
    """
    gradients: list[list[mx.array]] = [[] for _ in states]
    total = mx.zeros(len(states))
    for start in range(0, truth.shape[0], lesson.chunk):
        part = slice(start, start + lesson.chunk)
        # Chained, or all chunks' logits may be in memory at once.
        rows = mx.depends([truth[part]], [total])[0]
        wanted = _target(mx.stop_gradient(rows), columns, lesson.hard)
        losses = []
        for depth, state in enumerate(states):
            loss, gradient = _one(mx.stop_gradient(state[part]), wanted, weights[depth, part], columns)
            losses.append(loss)
            gradients[depth].append(gradient)
        total = total + mx.stack(losses)
    carrier = mx.array(0.0)
    for state, of_parts in zip(states, gradients, strict=True):
        gradient = mx.stop_gradient(mx.concatenate(of_parts))
        carrier = carrier + (state.astype(mx.float32) * gradient).sum()
    return carrier, total


def _logits(states: mx.array, columns: Columns) -> tuple[mx.array, mx.array]:
    """(logits, the same with their shift), float32 [m, S]."""
    logits = (states @ columns.head).astype(mx.float32)
    return logits, logits if columns.shift is None else logits + columns.shift


def _target(truth: mx.array, columns: Columns, hard: float) -> mx.array:
    """The law that is taught, float32 [m, S]."""
    logits, shifted = _logits(truth, columns)
    soft = mx.softmax(shifted, axis=-1)
    likeliest = logits.argmax(axis=-1, keepdims=True) == mx.arange(logits.shape[-1])
    return (1 - hard) * soft + hard * likeliest


def _one(state: mx.array, wanted: mx.array, weights: mx.array, columns: Columns) -> tuple[mx.array, mx.array]:
    """(loss, gradient by the state float32 [m, K]) of one depth."""
    logits, shifted = _logits(state, columns)
    lse = mx.logsumexp(shifted, axis=-1, keepdims=True)
    loss = (weights * (lse[:, 0] - (wanted * logits).sum(-1))).sum()
    difference = mx.exp(shifted - lse) - wanted
    gradient = (difference.astype(state.dtype) @ columns.head.T).astype(mx.float32)
    return loss, gradient * weights[:, None]
