"""The free pages of a pool as runs of consecutive ids, so that a sequence gets pages that lie side by side."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator


class FreePages:
    """Pages 0..*count* - 1, all free at first. Runs never touch each other: two neighbours are one run."""

    def __init__(self, count: int) -> None:
        self._starts = [0]
        self._sizes = {0: count}
        self._total = count

    def __len__(self) -> int:
        """Free pages."""
        return self._total

    def __iter__(self) -> Iterator[int]:
        """Free page ids, ascending."""
        for start in self._starts:
            yield from range(start, start + self._sizes[start])

    def take(self, count: int, after: int | None) -> list[int]:
        """Remove *count* pages, in as few runs as a greedy choice gives; there must be that many.

        The run right behind page *after* comes first, then the lowest one that holds all that is left, then the
        longest.
        """
        assert count <= self._total, "the caller has counted"
        taken: list[int] = []
        while len(taken) < count:
            start = self._choose(count - len(taken), after)
            size = min(self._sizes[start], count - len(taken))
            taken.extend(range(start, start + size))
            self._shorten(start, size)
        return taken

    def give(self, page: int) -> None:
        """Put *page* back, which must not be free."""
        place = bisect_right(self._starts, page)
        start, size = page, 1
        if place:
            before = self._starts[place - 1]
            end = before + self._sizes[before]
            assert end <= page, f"page {page} is free already"
            if end == page:
                place -= 1
                start, size = before, self._sizes[before] + 1
                del self._starts[place]
        if page + 1 in self._sizes:
            size += self._sizes.pop(page + 1)
            del self._starts[place]
        self._starts.insert(place, start)
        self._sizes[start] = size
        self._total += 1

    def check(self) -> None:
        """Prove the list: sorted runs that do not touch, and their sum."""
        assert sorted(self._sizes) == self._starts
        assert sum(self._sizes.values()) == self._total
        ends = [start + self._sizes[start] for start in self._starts]
        assert all(self._sizes[start] > 0 for start in self._starts)
        gaps = zip(ends, self._starts[1:], strict=False)
        assert all(end < start for end, start in gaps), "neighbours are merged"

    def _choose(self, count: int, after: int | None) -> int:
        if after is not None and after + 1 in self._sizes:
            return after + 1
        for start in self._starts:
            if self._sizes[start] >= count:
                return start
        return max(self._starts, key=self._sizes.__getitem__)

    def _shorten(self, start: int, size: int) -> None:
        place = bisect_right(self._starts, start) - 1
        left = self._sizes.pop(start) - size
        if left:
            self._starts[place] = start + size
            self._sizes[start + size] = left
        else:
            del self._starts[place]
        self._total -= size
