"""Where rows stand and what they see."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from worker.kernels import rows


def test_a_row_has_at_most_32_pieces_of_whole_tiles() -> None:
    for position in (0, 63, 64, 2047, 2048, 4095, 4096, 100_000, 10_000_000):
        size = rows.cut(position)
        assert position // size < rows.SPLITS
        assert size % 32 == 0
        assert position // size >= (rows.SPLITS // 2 if position >= 2048 else position // 64)


def test_a_tree_knows_depths_and_paths() -> None:
    tree = np.array(rows.tree_array([-1, 0, 0, 2, -1]))
    assert tree.shape == (2, 16)
    assert tree[0, :5].tolist() == [0, 1, 1, 2, 0]
    assert tree[1, :5].tolist() == [0b1, 0b11, 0b101, 0b1101, 0b10000]


@pytest.mark.parametrize("parents", [[0], [-1, 2, 0], [-1] * 17])
def test_a_tree_that_is_none_is_refused(parents: list[int]) -> None:
    with pytest.raises(ValueError, match=r"before its parent|at most 16"):
        rows.tree_array(parents)


def test_what_is_seen_is_the_sequence_and_the_path() -> None:
    meta = mx.array([30, 0, 1, 2, 3, 4, 5, 6], dtype=mx.int32)
    chain, tree = rows.seen(meta, 3, None), rows.seen(meta, 3, rows.tree_array([-1, -1, 0]))
    assert [np.flatnonzero(row).tolist()[30:] for row in np.array(chain)] == [[30], [30, 31], [30, 31, 32]]
    assert [np.flatnonzero(row).tolist()[30:] for row in np.array(tree)] == [[30], [31], [30, 32]]
    assert np.array(tree)[:, :30].all()


def test_slots_follow_the_table() -> None:
    meta = mx.array([0, 5, 3, 0, 0, 0, 0, 0], dtype=mx.int32)
    assert rows.slots(meta, mx.array([0, 31, 32, 40])).tolist() == [160, 191, 96, 104]
