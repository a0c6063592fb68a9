"""Which row of a forward follows which, as an operand of its draw: a new tree makes no new graph.

A tree is given by the parents of rows 1, 2, ...: each a row before it. Row 0 is the newest id, which all follow.
Rows beyond those pad a forward to a size that is compiled: they are drawn as children of row 0, never accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple, Self

import mlx.core as mx

# A drafter mostly makes a few shapes; one forgotten is made again in less than a millisecond.
_TREES_KEPT: Final = 256


class Tree(NamedTuple):
    """The parts of the operand of R rows, uint32; n is the lesser of R and the window of penalties, at least 1.

    offsets: [R, 2], 0 and the depth: what is added to the position of row 0. parent: [R, 1], of row 0 itself.
    rank: [R, 1], depth + 1, but 0 of padding. on_path: [R, R], where that row leads to this one, itself included:
    1 for row 0, which all follow, 2 for others, else 0. recent: [R, n], where the last n ids of the row's history
    stand in the state and the ids fed, laid end to end; means nothing where penalties have no window.
    """

    offsets: mx.array
    parent: mx.array
    rank: mx.array
    on_path: mx.array
    recent: mx.array

    @classmethod
    def of(cls, operand: mx.array) -> Self:
        """The parts of *operand*, all views by one node."""
        return cls(*mx.split(operand, [2, 3, 4, 4 + operand.shape[0]], axis=1))


def tree_operand(window: int | None, rows: int, parents: Sequence[int]) -> mx.array:
    """The operand of a tree for `Tree.of`: uint32 [R, 4 + R + n].

    Args:
        window: how many ids penalties look back at; 0 for all, None for no penalties.
        rows: R, at least 2.
        parents: of rows 1, 2, ...

    Raises:
        ValueError: More parents than rows, or a row before its parent.
    """
    return _operand(window or 0, rows, tuple(parents))


@lru_cache(maxsize=_TREES_KEPT)
def _operand(window: int, rows: int, parents: tuple[int, ...]) -> mx.array:
    if len(parents) >= rows:
        raise ValueError(f"{len(parents)} parents are more than {rows} rows have")
    paths: list[tuple[int, ...]] = [(0,)]
    for row, parent in enumerate(parents, start=1):
        if not 0 <= parent < row:
            raise ValueError(f"row {row} comes before its parent {parent}")
        paths.append((*paths[parent], row))
    real = len(paths)
    paths += [(0, row) for row in range(real, rows)]
    lines = []
    for row, path in enumerate(paths):
        single = [0, len(path) - 1, path[max(len(path) - 2, 0)], len(path) if row < real else 0]
        on_path = [min(one + 1, 2) if one in path else 0 for one in range(rows)]
        held = range(max(window - rows, 0) + len(path), window)
        recent = [*held, *(window + one for one in path)][-min(rows, window) :] if window else [0]
        lines.append([*single, *on_path, *recent])
    return mx.array(lines, dtype=mx.uint32)


def accepted(tree: Tree, tokens: mx.array, read: mx.array) -> mx.array:
    """The deepest row whose path holds nothing but what was drawn before it: uint32 [1].

    tokens: uint32 [R], the ids fed. read: uint32 [R], the token after each row, no id where the logits were no
    numbers: so no path leads through such a row.
    """
    wrong = tokens != mx.take_along_axis(read, tree.parent.squeeze(1), axis=0)
    ranks = mx.where(tree.on_path * wrong > 1, 0, tree.rank)
    return mx.argmax(mx.min(ranks, axis=1), axis=0, keepdims=True)
