"""Where the rows of a forward stand, and which keys they see. Shared by the kernels that know positions.

meta: int32 [1 + pages], at least 8 numbers: [len, block table...], len = rows of the sequence already in the pool.
Row j of the forward is stored at the sequence's index len + j; the index i is slot table[i // 32] * 32 + i % 32.

tree: None for a chain, where row j stands at position len + j and sees all rows before it. Otherwise int32 [2,
16], depths first: row j stands at position len + depth[j] and sees, of the new rows, those of its mask (bit i:
row i is on the path of row j, itself included). Parents come before children; depths along a path are 0, 1, 2,
...

Attention cuts the keys of a row at fixed absolute positions: pieces of `cut(position)` keys, a function of the
row's own position alone, at most `SPLITS` of them: 16 to 32 from position 2048 on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import mlx.core as mx

from worker.kernels.dialect import MAX_ROWS, PAGE

SPLITS: Final = 32
FIRST_CUT: Final = 64

CHAIN: Final = (("DEPTH(w)", "(w)"), ("TREE", "false"), ("MASK(w)", "((2u << (w)) - 1u)"))
TREE: Final = (("DEPTH(w)", "tree[w]"), ("TREE", "true"), ("MASK(w)", "((unsigned)tree[16 + (w)])"))

# A piece's keys, for a row at `position`.
CUT: Final = "const int cut = FIRST_CUT * (position / (FIRST_CUT * SPLITS) + 1);"


def words(tree: mx.array | None) -> tuple[tuple[str, str], ...]:
    """The defines of a kernel that knows positions."""
    return (
        ("PAGE", str(PAGE)),
        ("SPLITS", str(SPLITS)),
        ("FIRST_CUT", str(FIRST_CUT)),
        *(CHAIN if tree is None else TREE),
        ("CUT", CUT),
    )


def cut(position: int) -> int:
    """How many keys a piece has for a row at *position*."""
    return FIRST_CUT * (position // (FIRST_CUT * SPLITS) + 1)


def tree_array(parents: Sequence[int]) -> mx.array:
    """The tree operand of rows whose parents are given by row, -1 for a root (a row right after the stored ones).

    Raises:
        ValueError: More than 16 rows, or a child before its parent.
    """
    if len(parents) > MAX_ROWS:
        raise ValueError(f"a forward has at most {MAX_ROWS} rows")
    depths, masks = [0] * MAX_ROWS, [0] * MAX_ROWS
    for row, parent in enumerate(parents):
        if parent >= row:
            raise ValueError(f"row {row} comes before its parent")
        depths[row] = 0 if parent < 0 else depths[parent] + 1
        masks[row] = (0 if parent < 0 else masks[parent]) | 1 << row
    return mx.array([depths, masks], dtype=mx.int32)


def depths(rows: int, tree: mx.array | None) -> mx.array:
    """Positions of the rows after len: int32 [R]."""
    return mx.arange(rows, dtype=mx.int32) if tree is None else tree[0, :rows]


# Plain operations take from an array by uint32 alone, as the embedding is read, and read no number of meta by its
# place: each type of number and of index is a gather of its own, which MLX on CUDA compiles for seconds.


def slots(meta: mx.array, indices: mx.array) -> mx.array:
    """Slots of the pool for *indices* of the sequence, int32: uint32 of the same shape."""
    pages = mx.arange(meta.size - 1, dtype=mx.int32)
    page = mx.where(pages == (indices // PAGE)[..., None], meta[1:], 0).sum(axis=-1)
    return (page * PAGE + indices % PAGE).astype(mx.uint32)


def all_slots(meta: mx.array) -> mx.array:
    """Slots of the pool for all indices of the block table, in order: uint32 [pages * 32]."""
    return (meta[1:, None] * PAGE + mx.arange(PAGE, dtype=mx.int32)).reshape(-1).astype(mx.uint32)


def seen(meta: mx.array, rows: int, tree: mx.array | None) -> mx.array:
    """Which of the sequence's indices each row sees: bool [R, pages * 32]."""
    at = mx.arange((meta.size - 1) * PAGE, dtype=mx.int32)[None] - meta[:1]
    row = mx.arange(rows, dtype=mx.int32)[:, None]
    if tree is None:
        return at <= row
    masks = tree[1, :rows, None]
    new = (at >= 0) & (at < rows)
    return (at < 0) | (new & ((masks >> mx.where(new, at, 0)) & 1).astype(mx.bool_))


def check_meta(meta: mx.array) -> None:
    """Kernels read meta from device memory, which MLX passes so from 8 numbers on.

    Raises:
        ValueError: It is shorter.
    """
    if meta.size < 8:
        raise ValueError("meta holds at least 8 numbers: pad the block table")
