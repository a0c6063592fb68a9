"""The draws of one answer, without a read by the host: a token feeds the next step before the host knows it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import mlx.core as mx

from worker.engine.draw_tree import tree_operand
from worker.engine.law import NOT_A_NUMBER, Kind, Law, after, law, operands, state
from worker.engine.sample import Sampling

__all__ = ["COMMON", "NOT_A_NUMBER", "WARM_ROWS", "Drawn", "Draws", "place", "warm"]

# Every top_k and every window is a kind of its own, and a client may choose any; a graph forgotten is traced again
# in milliseconds.
_KINDS_KEPT: Final = 64

# Ids that become history together.
_AT_ONCE: Final = 16

COMMON: Final = (
    Sampling(seed=0),
    Sampling(seed=0, temperature=1.0),
    Sampling(seed=0, temperature=1.0, top_p=0.5),
    Sampling(seed=0, repetition_penalty=1.1),
    Sampling(seed=0, temperature=1.0, repetition_penalty=1.1),
    Sampling(seed=0, temperature=1.0, top_p=0.5, repetition_penalty=1.1),
)
"""One sampling of each kind that jobs mostly are."""

WARM_ROWS: Final = (1,)
"""Row counts of the draws that the engine makes."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What comes of R rows of logits; parts of the graph, not yet evaluated.

    token: uint32 [R], for the next forward: an id, whatever the logits were. read: uint32 [R], for the host: the
    same, or `NOT_A_NUMBER` where the logits were not finite. top: the ids [n] of the likeliest raw logits and
    their log-probabilities [n], in no order; [R, n] of more than one row; None where none are wanted. path: uint32
    [1 + R], for the host: the last row that holds, then *read*: all that accepting needs, in one read; None of a
    single draw. second: the id that would have been drawn but for the drawn one, uint32 [R], and how far its
    score, noise included, is behind, float32 [R]; None where it is not wanted.
    """

    token: mx.array
    read: mx.array
    top: tuple[mx.array, mx.array] | None
    path: mx.array | None = None
    second: tuple[mx.array, mx.array] | None = None

    def only(self, row: int) -> Drawn:
        """What was drawn after one of several rows, as of a single draw."""
        top = None if self.top is None else (self.top[0][row], self.top[1][row])
        return Drawn(self.token[row : row + 1], self.read[row : row + 1], top)


@dataclass(frozen=True, slots=True)
class _Verified:
    """Rows that were drawn and of which nothing is history yet. parents: of rows 1, 2, ... without the padding."""

    tokens: mx.array
    drawn: mx.array
    parents: tuple[int, ...]


class Draws:
    """Draws one answer by the law of `sample.py`.

    history: ids of prompt and answer so far, at least one; the last is the newest, which the next forward is fed.
    width: rows of the head. vocabulary: ids are below it. reach: how many ids prompt and answer can have together;
    a penalty window shorter than that takes 4 bytes for each of its ids. compiled: None for what the device gains
    by: on the CPU a compiled graph is no faster, and each new one costs seconds of the C++ compiler. ranked:
    whether each draw tells its second best.
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
        ranked: bool = False,
    ) -> None:
        if compiled is None:
            compiled = mx.default_device().type == mx.DeviceType.gpu
        self._kind = replace(Kind.of(sampling, width, vocabulary, reach), ranked=ranked)
        self._law = _law(self._kind, compiled)
        self._operands = operands(sampling, self._kind)
        self._state = state(self._kind, history)
        self._newest = mx.array([history[-1]], dtype=mx.uint32)
        mx.eval(self._state)
        self._verified: deque[_Verified] = deque()

    def __call__(self, logits: mx.array, position: mx.array) -> Drawn:
        """The token after the newest id, which becomes the newest.

        logits: T [1, V]. position: `place` of the drawn id.
        """
        token, read, *rest = self._law(logits, position, self._newest, self._state, *self._operands)
        if self._kind.window is not None:
            self._state = rest.pop()
        self._newest = token
        return self._drawn(token, read, rest, None)

    def rows(
        self, logits: mx.array, tokens: mx.array, position: mx.array, parents: Sequence[int] | None = None
    ) -> Drawn:
        """The token after each row of a chain or tree, as single draws would give it. Nothing is history yet.

        Rows may be drawn behind rows that were not accepted, unless there are penalties.

        Args:
            logits: T [R, V].
            tokens: uint32 [R], the ids that the rows were fed, the newest id first; those of padding are ids too.
            position: `place` of the id drawn after row 0.
            parents: of rows 1, 2, ..., each a row before; None: each row follows the one before it. Children of a
                row have unequal ids. Rows beyond the parents are padding: drawn, and never accepted.

        Raises:
            ValueError: More parents than rows, or a row before its parent.
        """
        count = tokens.size
        parents = tuple(range(count - 1) if parents is None else parents)
        tree = (tree_operand(self._kind.window, count, parents),) if count > 1 or parents else ()
        token, read, *rest = self._law(logits, position, tokens, self._state, *self._operands, *tree)
        path = rest.pop() if tree else mx.concatenate([mx.zeros(1, dtype=mx.uint32), read])
        self._verified.append(_Verified(tokens, token, parents))
        return self._drawn(token, read, rest, path)

    def accept(self, path: Sequence[int]) -> None:
        """Go on after the last row of *path*, the rows from row 0 on, of the oldest `rows` not yet accepted.

        Their ids are history then, and the token drawn after the last of them is the newest id.

        Raises:
            ValueError: It is no path of that tree.
            RuntimeError: There are no such rows.
        """
        if not self._verified:
            raise RuntimeError("accept() without rows()")
        verified = self._verified[0]
        tokens, drawn, parents = verified.tokens, verified.drawn, (-1, *verified.parents)
        for row, before in zip(path, (-1, *path), strict=False):
            if not 0 <= row < len(parents) or parents[row] != before:
                raise ValueError(f"{list(path)} is no path of the tree")
        if not path:
            raise ValueError("row 0 is always accepted")
        last = path[-1]
        if self._kind.window is not None:
            if last >= len(path):
                # Of the same length as the rows, so that no length needs kernels of its own.
                tokens = tokens[mx.array([*path, *[0] * (tokens.size - len(path))], dtype=mx.uint32)]
            self._state = after(self._kind, self._state, tokens, len(path))
        self._newest = drawn[last : last + 1]
        self._verified.popleft()

    def fork(self) -> Draws:
        """Draws that go on from here by themselves; they leave these as they are."""
        twin = copy(self)
        twin._verified = deque()  # noqa: SLF001 - its own
        return twin

    def drop(self) -> None:
        """Of the latest `rows` none is kept, nor what was drawn after them."""
        self._verified.pop()

    @property
    def has_history(self) -> bool:
        """Whether a draw depends on the ids before it: there are penalties."""
        return self._kind.window is not None

    def extend(self, ids: Sequence[int]) -> None:
        """*ids* became text behind the newest id, whoever drew them; the last of them is the newest now."""
        for start in range(0, len(ids), _AT_ONCE):
            part = ids[start : start + _AT_ONCE]
            if self._kind.window is not None:
                # Always as many, so that no length needs kernels of its own.
                tokens = mx.array([*part[:-1], *[0] * (_AT_ONCE - len(part))], dtype=mx.uint32)
                self._state = after(self._kind, self._state, mx.concatenate([self._newest, tokens]), len(part))
            self._newest = mx.array([part[-1]], dtype=mx.uint32)

    def _drawn(self, token: mx.array, read: mx.array, rest: list[mx.array], path: mx.array | None) -> Drawn:
        at = 2 if self._kind.logprobs else 0
        top = (rest[0], rest[1]) if at else None
        return Drawn(token, read, top, path, (rest[at], rest[at + 1]) if self._kind.ranked else None)


@lru_cache(maxsize=_KINDS_KEPT)
def _law(kind: Kind, compiled: bool) -> Law:
    draw = law(kind)
    return mx.compile(draw) if compiled else draw


def place(position: int) -> mx.array:
    """A position, how many ids come before an id, as its noise key takes it: uint32 [2], 0 and that number."""
    return mx.array([0, position], dtype=mx.uint32)


def warm(
    width: int,
    vocabulary: int,
    dtype: mx.Dtype,
    rows: Iterable[int] = WARM_ROWS,
    kinds: Iterable[Sampling] = COMMON,
) -> None:
    """Make the graphs and kernels of *kinds* for logits of *dtype*, for each number of rows in *rows*."""
    position = place(1)
    for sampling in kinds:
        draws = Draws(sampling, [0], width=width, vocabulary=vocabulary)
        for count in rows:
            logits, tokens = mx.zeros((count, width), dtype=dtype), mx.zeros(count, dtype=mx.uint32)
            if count == 1:
                drawn = draws(logits, position)
                mx.eval(drawn.token, drawn.read)
                continue
            # All are children of row 0, and the last is accepted: a path that is no prefix of the rows moves ids.
            # The draw after it needs the state.
            drawn = draws.rows(logits, tokens, position, (0,) * (count - 1))
            draws.accept((0, count - 1))
            mx.eval(drawn.token, drawn.path, draws(logits[:1], position).token)


def warm_rows(width: int, vocabulary: int, dtype: str, rows: Iterable[int]) -> None:
    """As `warm`, of logits whose type is named *dtype*."""
    warm(width, vocabulary, getattr(mx, dtype), rows)
