"""Which row of a forward follows which, as an operand of its draw: a new tree makes no new graph.

A tree is given by the parents of rows 1, 2, ...: each a row before it. Row 0 is the newest id, which all follow.
Rows beyond those pad a forward to a size that is compiled: they are drawn as children of row 0, never accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple, Self

import mlx.core as mx

# A drafter mostly makes a few shapes; one forgotten is made again in 0.1 ms.
_TREES_KEPT: Final = 256
_SINGLE_COLUMNS: Final = 4


class Tree(NamedTuple):
    """The parts of the operand of R rows, uint32; n is the lesser of R and the window of penalties, 0 where none.

    offsets: [R, 2], 0 and the depth: what is added to the position of row 0. parent: [R], of row 0 itself. rank:
    [R], depth + 1, but 0 of padding. on_path: [R, R], 1 where that row leads to this one, itself included. recent:
    [R, n], where the last n ids of the row's history stand in the state and the ids fed, laid end to end.
    """

    offsets: mx.array
    parent: mx.array
    rank: mx.array
    on_path: mx.array
    recent: mx.array

    @classmethod
    def of(cls, operand: mx.array) -> Self:
        """The parts of *operand*."""
        rows = operand.shape[0]
        parent, rank, rest = operand[:, 2], operand[:, 3], operand[:, _SINGLE_COLUMNS:]
        return cls(operand[:, :2], parent, rank, rest[:, :rows], rest[:, rows:])


def tree_operand(window: int | None, rows: int, parents: Sequence[int] | None) -> mx.array:
    """The operand of a tree for `Tree.of`: uint32 [R, 4 + R + n].

    Args:
        window: how many ids penalties look back at; 0 and None ask for no `recent`.
        rows: R, at least 2.
        parents: of rows 1, 2, ...; None: a chain of all rows.

    Raises:
        ValueError: More parents than rows, or a row before its parent.
    """
    return _operand(window or 0, rows, tuple(range(rows - 1)) if parents is None else tuple(parents))


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
        held = range(max(window - rows, 0) + len(path), window)
        recent = [*held, *(window + one for one in path)][-min(rows, window) :] if window else []
        lines.append([*single, *(int(one in path) for one in range(rows)), *recent])
    return mx.array(lines, dtype=mx.uint32)


def accepted(tree: Tree, tokens: mx.array, read: mx.array) -> mx.array:
    """The deepest row whose path holds nothing but what was drawn before it: uint32 [1].

    tokens: uint32 [R], the ids fed. read: uint32 [R], the token after each row, no id where the logits were no
    numbers: so no path leads through such a row.
    """
    wrong = tokens[1:] != read[tree.parent[1:]]
    refused = mx.max(tree.on_path[:, 1:] * wrong, axis=-1)
    return mx.argmax(tree.rank * (1 - refused), axis=-1, keepdims=True)
