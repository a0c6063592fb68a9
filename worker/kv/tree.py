"""Stored pages as nodes of a tree per owner, and the chained keys that find them.

The key of a page is BLAKE2b over the key of the page before it, the owner, and the exact ids of its rows.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from worker.kv.pages import PAGE

_KEY_BYTES: Final = 32


@dataclass(slots=True, eq=False)
class Node:
    """One stored page; or, without parent, ids and page, the root of an owner.

    ids: one for each row that may be read; fewer than `PAGE` only where nothing goes on from this page.
    exact: leading rows written by prefill alone; above 0 only where all pages before are exact in full.
    """

    key: bytes
    owner: bytes
    parent: Node | None = None
    ids: tuple[int, ...] = ()
    page: int = -1
    exact: int = 0
    children: dict[bytes, Node] = field(default_factory=dict)

    def covers(self, other: Node) -> bool:
        """Whether every reader that *other*, behind the same page, could serve is served by this one."""
        rows = len(other.ids)
        return self.ids[:rows] == other.ids and min(self.exact, rows) >= other.exact

    def best_tail(self, wanted: tuple[int, ...], *, answers: bool) -> tuple[Node | None, int]:
        """The child that goes on longest like *wanted*, and how many of its rows can be read.

        Without *answers* only rows written by prefill count; with it they decide between equals.
        """
        best: tuple[int, int, Node | None] = (0, 0, None)
        for child in self.children.values():
            # Many prompts part right behind a common beginning: most children end here.
            if child.ids[:1] != wanted[:1]:
                continue
            rows = _shared(child.ids, wanted)
            exact = min(rows, child.exact)
            rows = rows if answers else exact
            if (rows, exact) > best[:2]:
                best = (rows, exact, child)
        return best[2], best[0]

    def check(self, child: Node) -> None:
        """Prove that *child* is a page that may go on from this one."""
        assert child.parent is self
        assert child.owner == self.owner
        assert child.key == page_key(self.key, self.owner, child.ids)
        assert 0 < len(child.ids) <= PAGE
        assert len(child.ids) == PAGE or not child.children, "only full pages go on"
        assert 0 <= child.exact <= len(child.ids)
        assert self.parent is None or not child.exact or self.exact == PAGE, "exact rows stand on exact rows"


def root_of(owner: bytes) -> Node:
    """A root without pages."""
    return Node(page_key(b"", owner, ()), owner)


def page_key(before: bytes, owner: bytes, ids: tuple[int, ...]) -> bytes:
    """The key of the page of *ids* behind the page of key *before*; a root has no ids and nothing before it."""
    digest = blake2b(before, digest_size=_KEY_BYTES, person=b"mtplx prefix")
    digest.update(struct.pack("<Q", len(owner)) + owner)
    digest.update(struct.pack(f"<{len(ids)}I", *ids))
    return digest.digest()


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    rows = 0
    for mine, yours in zip(one, other, strict=False):
        if mine != yours:
            break
        rows += 1
    return rows
