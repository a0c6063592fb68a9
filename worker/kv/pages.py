"""Who holds which page of the pool: reference counts, block tables, forks and rollback, in plain integers.

Position p of a sequence lies in slot `table[p // PAGE] * PAGE + p % PAGE`. A row is the keys and values of one
position in all layers. No array is touched here: what must be copied is reported, and the pool's owner copies it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from worker.kv.free import FreePages

# Positions per page: one tile of keys, one lane each.
PAGE: Final = 32


class PoolTooSmallError(Exception):
    """Raised when more pages are asked for than can be had; nothing was changed.

    needed: pages asked for. free: pages that could be had. count: pages of the whole pool.
    """

    def __init__(self, *, needed: int, free: int, count: int) -> None:
        super().__init__(
            f"needs {needed} more pages of {PAGE} tokens, {free} of the pool's {count} can be had; "
            "shorten prompt or budget, or give the pool more memory"
        )
        self.needed = needed
        self.free = free
        self.count = count


@dataclass(frozen=True, slots=True)
class Copy:
    """Rows 0..*rows* - 1 of page *source* belong into page *target* too, in every layer.

    To be carried out before *target* is read or written and before the next call to the books: *source* may be
    given away then.
    """

    source: int
    target: int
    rows: int


class Keeper(Protocol):
    """Holds pages beside the sequences, by `Pages.hold` and `Pages.drop`."""

    def kept(self) -> Iterable[tuple[int, int]]:
        """(page, rows of it that must never be written again), once for every hold."""


def pages_for(tokens: int) -> int:
    """Pages that *tokens* positions fill, the last one perhaps in part."""
    return -(-tokens // PAGE)


def runs(table: Iterable[int]) -> list[tuple[int, int]]:
    """The pages of *table* in order as (first page, pages), consecutive ids together: one slice for each."""
    found: list[tuple[int, int]] = []
    for page in table:
        first, size = found[-1] if found else (page, 0)
        if first + size == page:
            found[-1:] = [(first, size + 1)]
        else:
            found.append((page, 1))
    return found


class Pages:
    """The books of a pool of *count* pages. One thread calls them."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"a pool needs at least one page, not {count}")
        self.count = count
        self.sequences: set[Sequence] = set()
        self.keepers: list[Keeper] = []
        self._free = FreePages(count)
        self._references = [0] * count

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def references(self, page: int) -> int:
        """How many tables and keepers hold *page*; 0 = free."""
        return self._references[page]

    def reserve(self, tokens: int, *, shared: tuple[int, ...] = (), exact: int = 0) -> Sequence:
        """Begin a sequence with room for *tokens* positions, prompt and budget together.

        Args:
            tokens: positions that may be appended in all, the shared ones counted.
            shared: full pages that others hold and that become the beginning; they are never written again.
            exact: as in `Sequence`, within the shared rows.

        Raises:
            PoolTooSmallError: not enough free pages; nothing was changed.
        """
        needed = pages_for(tokens) - len(shared)
        assert needed >= 0, "the shared beginning is longer than the sequence"
        assert all(self._references[page] for page in shared), "a shared page is in use"
        fresh = self.take(needed, after=shared[-1] if shared else None)
        for page in shared:
            self.hold(page)
        sequence = Sequence(self, [*shared, *fresh], len(shared) * PAGE)
        sequence.exact = exact
        self.sequences.add(sequence)
        return sequence

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Hold *count* free pages, those right behind page *after* and lying side by side where there are such.

        Raises:
            PoolTooSmallError: not enough free pages; nothing was changed.
        """
        if count > self.free:
            raise PoolTooSmallError(needed=count, free=self.free, count=self.count)
        taken = self._free.take(count, after)
        for page in taken:
            self._references[page] = 1
        return taken

    def hold(self, page: int) -> None:
        """Count one more holder of *page*, which is in use."""
        assert self._references[page] > 0, f"page {page} is free"
        self._references[page] += 1

    def drop(self, page: int) -> None:
        """Count one holder of *page* less; the last one frees it."""
        assert self._references[page] > 0, f"page {page} is free"
        self._references[page] -= 1
        if not self._references[page]:
            self._free.give(page)

    def check(self) -> None:
        """Prove the books.

        Raises:
            AssertionError: a count is not the number of holders, a page is free and held, a table holds a page
                twice, or a row that somebody else relies on may still be written.
        """
        self._free.check()
        assert list(self._free) == [page for page, held in enumerate(self._references) if not held]
        tables = Counter(page for sequence in self.sequences for page in sequence.table)
        keepers: Counter[int] = Counter()
        claimed: dict[int, int] = {}
        for keeper in self.keepers:
            for page, rows in keeper.kept():
                keepers[page] += 1
                claimed[page] = max(claimed.get(page, 0), rows)
        for page, held in enumerate(self._references):
            assert held == tables[page] + keepers[page], f"page {page}: {held} counted"
        for sequence in self.sequences:
            for page, fixed in sequence.check():
                assert fixed >= (PAGE if tables[page] > 1 else claimed.get(page, 0)), f"page {page} may be written"
        assert self._same_places(), "a page holds the same positions for all"

    def _same_places(self) -> bool:
        places = {(page, place) for one in self.sequences for place, page in enumerate(one.table)}
        return len(places) == len({page for page, _ in places})


class Sequence:
    """A block table and how far it is filled; made by `Pages.reserve` and `fork`.

    table: page ids; those beyond the filled ones are reserved. Changes with `reserve` and `truncate`.
    version: counts the changes of the table, which may come at the same length.
    length: rows written, or about to be by the forward that was just started.
    exact: leading rows that were written by prefill alone, on top of nothing but such rows.
    fixed: leading rows that others rely on; they are never written in place again.
    """

    __slots__ = ("_pages", "exact", "fixed", "length", "table", "version")

    def __init__(self, pages: Pages, table: list[int], fixed: int) -> None:
        self._pages = pages
        self.table = table
        self.length = self.fixed = fixed
        self.exact = self.version = 0

    @property
    def capacity(self) -> int:
        """Positions that the reserved pages hold."""
        return len(self.table) * PAGE

    def slot(self, position: int) -> int:
        """The row of the pool that holds *position*, until the next `truncate` below it."""
        return self.table[position // PAGE] * PAGE + position % PAGE

    def reserve(self, tokens: int) -> None:
        """Make room for *tokens* positions in all; pages already reserved stay.

        Raises:
            PoolTooSmallError: not enough free pages; nothing was changed.
        """
        assert self in self._pages.sequences, "the sequence was released"
        missing = pages_for(tokens) - len(self.table)
        if missing > 0:
            self.table += self._pages.take(missing, after=self.table[-1] if self.table else None)
            self.version += 1

    def append(self, rows: int, *, prompt: bool) -> None:
        """Count *rows* new positions; there must be room.

        Args:
            rows: how many.
            prompt: written by a prefill forward; else by the forward that draws the answer.
        """
        assert self in self._pages.sequences, "the sequence was released"
        assert 0 <= rows <= self.capacity - self.length, "the budget was reserved before"
        if prompt and self.exact == self.length:
            self.exact += rows
        self.length += rows

    def truncate(self, length: int) -> tuple[Copy, ...]:
        """Take back all rows from *length* on, as after rejected drafts; reserved pages stay reserved.

        Returns the copies to carry out: none, unless rows are taken back that others rely on. Those others keep
        theirs, and this sequence gets pages of its own.

        Raises:
            PoolTooSmallError: no free page for such a copy; nothing was changed.
        """
        assert self in self._pages.sequences, "the sequence was released"
        assert 0 <= length <= self.length
        copies = self._part_from_others(length) if length < self.fixed else ()
        self.length = length
        self.exact = min(self.exact, length)
        return copies

    def fork(self, tokens: int) -> tuple[Sequence, tuple[Copy, ...]]:
        """Begin a second sequence with the same rows and room for *tokens* positions in all.

        Full pages are shared, a page filled in part is copied: the copies to carry out come second.

        Raises:
            PoolTooSmallError: not enough free pages; nothing was changed.
        """
        assert self in self._pages.sequences, "the sequence was released"
        full, rest = divmod(self.length, PAGE)
        exact = min(self.exact, full * PAGE)
        twin = self._pages.reserve(max(tokens, self.length), shared=tuple(self.table[:full]), exact=exact)
        twin.length, twin.exact = self.length, self.exact
        self.fix(full * PAGE)
        return twin, (Copy(self.table[full], twin.table[full], rest),) if rest else ()

    def fix(self, rows: int) -> None:
        """Promise others that the first *rows* rows stay as they are."""
        assert rows <= self.length
        self.fixed = max(self.fixed, rows)

    def release(self) -> None:
        """Give all pages back, once; the sequence must not be used afterwards."""
        assert self in self._pages.sequences, "the sequence was released"
        self._pages.sequences.remove(self)
        for page in self.table:
            self._pages.drop(page)
        self.table = []
        self.version += 1
        self.length = self.exact = self.fixed = 0

    def check(self) -> list[tuple[int, int]]:
        """Prove the table by itself; (page, rows of it that are fixed) for each page."""
        assert len(set(self.table)) == len(self.table), "a page lies twice in a table"
        assert 0 <= self.exact <= self.length <= self.capacity
        assert 0 <= self.fixed <= self.length
        return [(page, min(max(self.fixed - place * PAGE, 0), PAGE)) for place, page in enumerate(self.table)]

    def _part_from_others(self, length: int) -> tuple[Copy, ...]:
        first, rest = divmod(length, PAGE)
        places = [
            place for place in range(first, pages_for(self.fixed)) if self._pages.references(self.table[place]) > 1
        ]
        fresh = self._pages.take(len(places), after=self.table[first - 1] if first else None)
        copies: tuple[Copy, ...] = ()
        if rest and places and places[0] == first:
            copies = (Copy(self.table[first], fresh[0], rest),)
        for place, page in zip(places, fresh, strict=True):
            self._pages.drop(self.table[place])
            self.table[place] = page
        self.fixed = first * PAGE
        self.version += len(places)
        return copies
