"""What a draft that nobody verified would have been worth: plain steps tell it for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from worker.speculation.draft import Proposal


class Watched(NamedTuple):
    """A trunk that was compared with the text: the margins of its depths, and how many of its ids became text."""

    margins: tuple[float, ...]
    kept: int


class Shadow:
    """Compares one proposal with the text as it comes; the next one begins where it missed or ended.

    So it sees the rounds that speculation would have made. Only for drafters whose proposals cost nothing.
    """

    def __init__(self) -> None:
        self._ids: tuple[int, ...] = ()
        self._margins: tuple[float, ...] = ()
        self._kept = 0

    def take(self, proposal: Proposal) -> None:
        """*proposal* stands behind the text; it is watched if none is."""
        if self._ids or not proposal.margins:
            return
        trunk = proposal.draft.trunk
        self._ids, self._margins, self._kept = proposal.draft.tokens[:trunk], proposal.margins[:trunk], 0

    def extend(self, ids: Sequence[int]) -> Watched | None:
        """*ids* became text; the proposal that they end, if they end one. What follows them was not proposed."""
        for token in ids:
            if not self._ids:
                return None
            right = token == self._ids[self._kept]
            self._kept += right
            if not right or self._kept == len(self._ids):
                return self._end()
        return None

    def drop(self) -> None:
        """Forget the proposal: a forward verifies from here on, or the job is over."""
        self._ids = ()

    def _end(self) -> Watched:
        self._ids = ()
        return Watched(self._margins, self._kept)
