"""The draws of one answer, without a read by the host: a token feeds the next step before the host knows it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import mlx.core as mx

from worker.engine.law import NOT_A_NUMBER, Kind, Law, after, law, operands, state
from worker.engine.sample import Sampling

__all__ = ["COMMON", "NOT_A_NUMBER", "Drawn", "Draws", "place", "warm"]

# Every top_k and every window is a kind of its own, and a client may choose any; a graph forgotten is traced again
# in milliseconds.
_KINDS_KEPT: Final = 64

COMMON: Final = (
    Sampling(seed=0),
    Sampling(seed=0, temperature=1.0),
    Sampling(seed=0, temperature=1.0, top_p=0.5),
    Sampling(seed=0, repetition_penalty=1.1),
    Sampling(seed=0, temperature=1.0, repetition_penalty=1.1),
    Sampling(seed=0, temperature=1.0, top_p=0.5, repetition_penalty=1.1),
)
"""One sampling of each kind that jobs mostly are."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What comes of R rows of logits; parts of the graph, not yet evaluated.

    token: uint32 [R], for the next forward: an id, whatever the logits were. read: uint32 [R], for the host: the
    same, or `NOT_A_NUMBER` where the logits were not finite. top: the ids [n] of the likeliest raw logits and
    their log-probabilities [n], in no order; [R, n] of more than one row; None where none are wanted.
    """

    token: mx.array
    read: mx.array
    top: tuple[mx.array, mx.array] | None


class Draws:
    """Draws one answer by the law of `sample.py`.

    history: ids of prompt and answer so far, at least one; the last is the newest, which the next forward is fed.
    width: rows of the head. vocabulary: ids are below it. reach: how many ids prompt and answer can have together;
    a penalty window shorter than that takes 4 bytes for each of its ids. compiled: None for what the device gains
    by: on the CPU a compiled graph is no faster, and each new one costs seconds of the C++ compiler.
    """

    def __init__(
        self,
        sampling: Sampling,
        history: Sequence[int],
        *,
        width: int,
        vocabulary: int,
        reach: int | None = None,
        compiled: bool | None = None,
    ) -> None:
        if compiled is None:
            compiled = mx.default_device().type == mx.DeviceType.gpu
        self._kind = Kind.of(sampling, width, vocabulary, reach)
        self._law = _law(self._kind, compiled)
        self._operands = operands(sampling, self._kind)
        self._state = state(self._kind, history)
        self._newest = mx.array([history[-1]], dtype=mx.uint32)
        mx.eval(self._state)
        self._chain: tuple[mx.array, mx.array] | None = None

    def __call__(self, logits: mx.array, position: mx.array) -> Drawn:
        """The token after the newest id, which becomes the newest.

        logits: T [1, V]. position: `place` of the drawn id.
        """
        token, read, *rest = self._law(logits, position, self._newest, self._state, *self._operands)
        if self._kind.window is not None:
            self._state = rest.pop()
        self._newest = token
        return Drawn(token, read, (rest[0], rest[1]) if rest else None)

    def rows(self, logits: mx.array, tokens: mx.array, position: mx.array) -> Drawn:
        """The token after each row of a chain, as single draws would give them. Nothing of it is history yet.

        logits: T [R, V]. tokens: uint32 [R], the ids that the rows were fed, the newest id first. position:
        `place` of the id drawn after the first row.
        """
        token, read, *rest = self._law(logits, position, tokens, self._state, *self._operands)
        self._chain = (tokens, token)
        return Drawn(token, read, (rest[0], rest[1]) if self._kind.logprobs else None)

    def accept(self, rows: int | mx.array) -> None:
        """Go on after the first *rows* rows of the latest chain, a number or int32 [1], at least 1.

        Their ids are history then, and the token drawn after the last of them is the newest id.
        """
        if self._chain is None:
            raise RuntimeError("accept() without rows()")
        tokens, drawn = self._chain
        self._state = after(self._kind, self._state, tokens, rows)
        self._newest = drawn[rows - 1 : rows] if isinstance(rows, int) else mx.take(drawn, rows - 1)
        self._chain = None


@lru_cache(maxsize=_KINDS_KEPT)
def _law(kind: Kind, compiled: bool) -> Law:
    draw = law(kind)
    return mx.compile(draw) if compiled else draw


def place(position: int) -> mx.array:
    """A position, how many ids come before an id, as its noise key takes it: uint32 [2], 0 and that number."""
    return mx.array([0, position], dtype=mx.uint32)


def warm(width: int, vocabulary: int, dtype: mx.Dtype, rows: Iterable[int] = (1,)) -> None:
    """Make the graphs and kernels of the common kinds for logits of *dtype*, for each number of rows in *rows*."""
    position = place(1)
    for sampling in COMMON:
        draws = Draws(sampling, [0], width=width, vocabulary=vocabulary)
        for count in rows:
            logits, tokens = mx.zeros((count, width), dtype=dtype), mx.zeros(count, dtype=mx.uint32)
            drawn = draws(logits, position) if count == 1 else draws.rows(logits, tokens, position)
            mx.eval(drawn.token, drawn.read)
