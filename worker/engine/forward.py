"""What a lane is to the serial engine: how one model computes rows, and where it keeps keys and values."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import Final, Protocol

import mlx.core as mx

from worker.kv.pages import PAGE
from worker.kv.prefix import Opened

# The widest forward of the answer; a narrower one may write rows beyond its own, which need a place.
MAX_ROWS: Final = 16

Path = tuple[int, ...]
"""Rows of a forward, by number."""


class Follower(Protocol):
    """Is told the hidden states of rows, before the final norm, in the order in which a lane computes them.

    States are parts of the graph, not yet computed.
    """

    def begin(self, opened: Opened) -> None:
        """A sequence was taken up: as in `Forward.begin`, which calls it."""

    def read(self, ids: Ids[int], states: mx.array) -> None:
        """Of prompt rows, T [n, K], the first of them those of *ids*; what stands behind these is padding."""

    def rows(self, states: mx.array, count: int, *, behind: bool) -> None:
        """Of the latest `Forward.rows`, T [R, K], *count* and padding. behind: rows of which no path was kept."""

    def keep(self, path: Path) -> None:
        """As in `Forward.keep`, of the oldest rows that no path was kept of."""


class Forward(Protocol):
    """Computes the rows of one sequence after the other. One thread calls it.

    Order of calls: `begin`, `read` until the prompt is read, then `rows` and now and then `settle`, at last `end`.
    `keep` may follow `rows`, and must where these were a tree.

    The lane counts the rows it starts: `sequence.length` is the index of the next row, and `sequence.append` is
    called by `read` (prompt rows), `rows` and `keep`, never by the engine. `sequence.truncate` is called by
    `keep`, and by the engine between two calls, never below what the last `read` wrote.

    row_invariant: whether a row's bits are the same in a forward of any width.
    prefill_rows: B. 1: the rows of a prompt are the same bits however it is cut. Else `read` gets exactly B ids,
        starting at multiples of B, and fewer only at the end of the prompt.
    capacity: positions that one job may have, prompt, drawn ids and budget together.
    one_ahead: whether `rows` may be called with tokens that are not computed yet, and while rows are.
    prefix_reuse: whether a sequence may begin with rows of an earlier one.
    why: if not, the reason in words, else empty.
    width: how many rows may be drafted and taken back in one `rows`, the first one included; 1: none.
    trees: whether they may branch.
    why_narrow: what keeps *width* from `MAX_ROWS`, or rows from branching, in words; else empty.
    cuts: whether rows of several calls can be taken back together, by `sequence.truncate`.
    pipelines: whether `rows` may go on behind rows of which no path was kept.
    follower: who wants hidden states; None, nobody, and they cost nothing.
    """

    row_invariant: bool
    prefill_rows: int
    capacity: int
    one_ahead: bool
    prefix_reuse: bool
    why: str
    width: int
    trees: bool
    why_narrow: str
    cuts: bool
    pipelines: bool
    follower: Follower | None

    def begin(self, opened: Opened) -> None:
        """Take up a sequence whose first `opened.cached` rows lie in the pool, and carry out `opened.copies`.

        Without `prefix_reuse` there must be no cached rows. Evaluated on return.
        """

    def read(self, ids: Ids[int], last: bool) -> mx.array | None:
        """Compute and write the prompt rows of *ids*, the next ones of the prompt.

        Args:
            ids: at least one; `prefill_rows` says how many.
            last: whether the prompt ends here.

        Returns:
            If *last*, the logits [1, V] of the last id, in the model's type and not yet computed; else None, and
            the rows are written, or will be before anything that is computed later reads them.
        """

    def size(self, rows: int) -> int:
        """How many rows run where *rows* are wanted: more where only some counts are compiled."""

    def rows(self, tokens: mx.array, parents: Path | None = None, last: mx.array | None = None) -> mx.array:
        """Compute and write the next rows, one for each of *tokens*: uint32 [R], R from 1 to `MAX_ROWS`.

        Args:
            tokens: may be part of a graph if `one_ahead`; else the logits of the call before, or what was drawn
                from them, must have been evaluated. Those behind the last row with a parent are padding, up to
                `size`: computed for nothing, and no rows of the sequence.
            parents: of the rows from row 1 on, each a row before it; None, the row before. A row sees the sequence
                and the rows of its path, and stands behind these. Other than a chain only if `trees`.
            last: uint32 [1], only if `pipelines`: the rows stand behind this row of the latest ones, a chain of
                which no path was kept. Then `keep` is called for those first; its path must end there. Both are
                chains.

        Returns:
            Logits [R, V] in the model's type, not yet computed. Where rows of a chain have the bits of single
            rows, so have rows of a tree: those of a chain along their path.
        """

    def keep(self, path: Path) -> None:
        """Of the latest `rows` only those of *path* were, one after the other; the others leave no trace.

        Once for each `rows`, before anything else is called, but for `settle` and the rows that go on behind
        these, and not before these are computed: the path was read from what was drawn after them. Does not
        wait, unless rows that others rely on are taken back, or the lane computes the rows of the path again.

        Args:
            path: rows, from row 0 on, each the parent of the next.

        Raises:
            PoolTooSmallError: no page is free for rows that others rely on; nothing was changed.
        """

    def trace(self) -> None:
        """Compile the widths that `rows` runs, if any, on a begun sequence with room for 31 rows."""

    def settle(self) -> None:
        """Bring all rows below `sequence.length` into the pages and wait for it.

        After it the pages may be stored in the index, shared and copied. Nothing may be in flight that the engine
        would still drop: it truncates first.
        """

    def end(self) -> None:
        """Forget the sequence, whatever its state, and free what was held for it; may be called again.

        Does not release `opened.sequence`, which is the engine's.
        """


@dataclass(frozen=True, slots=True)
class Started:
    """The latest `rows`. start: index of its row 0. count: its rows. parents: as there, None for a chain."""

    start: int
    count: int
    parents: Path | None

    def unmoved(self, path: Path) -> int:
        """How many leading rows of *path* stand where they are to be kept.

        Raises:
            AssertionError: *path* is none.
        """
        assert path[:1] == (0,), "a path begins with row 0"
        assert path[-1] < self.count, "a path has rows of this forward"
        for row, parent in zip(path[1:], path[:-1], strict=True):
            above = row - 1 if self.parents is None else self.parents[row - 1]
            assert row > 0, "a path begins with row 0 alone"
            assert above == parent, "a row of a path is the parent of the next"
        return next((place for place, row in enumerate(path) if row != place), len(path))


def branching(parents: Path | None, count: int) -> Path | None:
    """*parents* of a forward of *count* rows where it is no chain, else None.

    Raises:
        AssertionError: they are not of these rows, or a row comes before its parent.
    """
    if parents is None or parents == tuple(range(count - 1)):
        return None
    assert len(parents) == count - 1, "every row but the first has a parent"
    assert all(0 <= parent <= place for place, parent in enumerate(parents)), "a parent comes before its rows"
    return parents


def rows_needed(positions: int, prefill_rows: int) -> int:
    """Rows of the pool that a job of *positions* reserves: those of padded forwards are counted."""
    return max(positions + MAX_ROWS, -(-positions // prefill_rows) * prefill_rows)


def positions_within(pages: int, prefill_rows: int) -> int:
    """The most positions one job may have in a pool of *pages*; 0 where it holds none."""
    rows = pages * PAGE
    return max(min(rows - MAX_ROWS, rows // prefill_rows * prefill_rows), 0)
