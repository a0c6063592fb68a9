"""Which beginnings are still in the pool: found by exact ids, shared page by page, evicted oldest leaf first.

A page has as many ids as rows that may be read, never one more. A reader shares full pages and copies the page in
which its prompt parts from what is stored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Ids
from dataclasses import asdict, dataclass, field
from typing import Literal

from worker.kv import tree
from worker.kv.pages import PAGE, Copy, Pages, PoolTooSmallError, Sequence, pages_for
from worker.kv.tree import Node

# True: prompt-written rows only. "answers": answer-written rows as well. False: reuse and store nothing.
Cache = bool | Literal["answers"]


@dataclass(frozen=True, slots=True)
class Match:
    """What the pool holds of a prompt's beginning; nothing is held, so the next call to the books may end it.

    pages: full pages that can be shared.
    tail: the page whose first *tail_rows* rows go on from there, to be copied.
    exact_rows: leading rows written by prefill alone.
    path: the stored pages themselves; the index's own.
    """

    pages: tuple[int, ...] = ()
    tail: int | None = None
    tail_rows: int = 0
    exact_rows: int = 0
    path: tuple[Node, ...] = field(default=(), repr=False, compare=False)

    @property
    def length(self) -> int:
        """Rows that can be reused."""
        return len(self.pages) * PAGE + self.tail_rows

    @property
    def exact(self) -> bool:
        """Whether a cold run would write the same bits into all these rows."""
        return self.exact_rows == self.length

    def without_tail(self) -> Match:
        """The full pages alone, which cost no page more than a cold start."""
        return self.first(len(self.pages))

    def first(self, full: int) -> Match:
        """The first *full* pages alone."""
        return Match(self.pages[:full], exact_rows=min(self.exact_rows, full * PAGE), path=self.path[:full])


@dataclass(frozen=True, slots=True)
class Opened:
    """A sequence whose first *cached* rows are in the pool already; valid until `sequence.release()`.

    ids: the prompt. copies: to be carried out before anything else is done. exact: whether a cold run would have
    written the same bits into the cached rows.
    """

    sequence: Sequence
    ids: tuple[int, ...]
    owner: bytes
    cache: Cache
    copies: tuple[Copy, ...]
    cached: int
    exact: bool


@dataclass(slots=True)
class Figures:
    """Counts since the start. *opened* leaves out jobs that wanted no reuse; *reused_tokens* counts their rows."""

    opened: int = 0
    hits: int = 0
    reused_tokens: int = 0
    stored_pages: int = 0
    evicted_pages: int = 0


class PrefixIndex:
    """Keeps verified beginnings of ended or running sequences. One thread calls it and its `Pages`.

    Args:
        pages: the books of the pool.
        page_bytes: bytes of one page in all layers together.
        limit_bytes: what the stored pages may fill at most, those counted that running sequences share; less than
            one page switches the index off.
        align: rows are stored and reused by as many at once, so that a prefill goes on where a cold one would
            begin a forward: 1, or a multiple of `PAGE`, with which no row is ever copied.
    """

    def __init__(self, pages: Pages, *, page_bytes: int, limit_bytes: int, align: int = 1) -> None:
        if page_bytes < 1 or limit_bytes < 0:
            raise ValueError(f"{page_bytes} bytes a page under a limit of {limit_bytes} bytes")
        if align != 1 and (align < PAGE or align % PAGE):
            raise ValueError(f"rows are aligned to 1 or to a multiple of {PAGE}, not to {align}")
        self.figures = Figures()
        self.pages = pages
        self._limit_pages = limit_bytes // page_bytes
        self._align = align
        self._roots: dict[bytes, Node] = {}
        # Oldest use first. A page comes before the one it goes on from, so that leaves are met first.
        self._nodes: OrderedDict[bytes, Node] = OrderedDict()
        pages.keepers.append(self)

    @property
    def pages_held(self) -> int:
        """Pages stored, never more than the limit allows."""
        return len(self._nodes)

    def counts(self) -> dict[str, int]:
        """The figures, and the pages stored now, in health's words."""
        return {**asdict(self.figures), "held_pages": self.pages_held}

    def kept(self) -> Iterator[tuple[int, int]]:
        """As in `Keeper`."""
        return ((node.page, len(node.ids)) for node in self._nodes.values())

    def lookup(self, ids: Ids[int], *, owner: bytes, cache: Cache) -> Match:
        """Find the longest stored beginning of the prompt *ids* that leaves at least one id to be read.

        Changes nothing, the order of eviction included. Only what the same *owner* stored is found, cut down to a
        multiple of `align` rows.
        """
        match = self._longest(ids, owner=owner, cache=cache)
        return match if self._align == 1 else match.first(match.length // self._align * self._align // PAGE)

    def _longest(self, ids: Ids[int], *, owner: bytes, cache: Cache) -> Match:
        root = self._roots.get(owner)
        if cache is False or root is None:
            return Match()
        answers = cache == "answers"
        wanted = tuple(ids[:-1])
        path, node = [], root
        for start in range(0, len(wanted) - PAGE + 1, PAGE):
            found = self._child(node, wanted[start : start + PAGE])
            if found is None or not (answers or found.exact == PAGE):
                break
            path.append(found)
            node = found
        full = len(path)
        exact = next((place * PAGE + one.exact for place, one in enumerate(path) if one.exact < PAGE), full * PAGE)
        tail, rows = node.best_tail(wanted[full * PAGE :], answers=answers)
        if tail is None:
            return Match(tuple(one.page for one in path), exact_rows=exact, path=tuple(path))
        # A tail behind inexact pages has no exact row.
        exact += min(rows, tail.exact)
        return Match(tuple(one.page for one in path), tail.page, rows, exact, (*path, tail))

    def open(self, ids: Ids[int], tokens: int, *, owner: bytes, cache: Cache) -> Opened:
        """Begin a sequence with what is stored of its prompt, evicting what else is needed.

        Args:
            ids: the prompt. What an earlier attempt drew stays out: its rows are written in another way.
            tokens: positions that may be appended in all, *ids* counted.
            owner: whose rows may be reused, and who may reuse these.
            cache: as in the job.

        Raises:
            PoolTooSmallError: running sequences hold too much; nothing was changed.
        """
        assert tokens >= len(ids), "the prompt is part of what is reserved"
        match = self.lookup(ids, owner=owner, cache=cache)
        if not self._make_room(pages_for(tokens) - len(match.pages), match):
            # The page to be copied is one more that must not be evicted: better without it than refused.
            match = match.without_tail()
            needed = pages_for(tokens) - len(match.pages)
            if not self._make_room(needed, match):
                free = self.pages.free + self._evictable(match.path)
                raise PoolTooSmallError(needed=needed, free=free, count=self.pages.count)
        exact = match.without_tail().exact_rows
        sequence = self.pages.reserve(tokens, shared=match.pages, exact=exact)
        copies: tuple[Copy, ...] = ()
        if match.tail is not None:
            copies = (Copy(match.tail, sequence.table[len(match.pages)], match.tail_rows),)
            exact_rows = max(match.exact_rows - sequence.length, 0)
            sequence.append(exact_rows, prompt=True)
            sequence.append(match.tail_rows - exact_rows, prompt=False)
        self._touch(match.path)
        if cache is not False:
            self.figures.opened += 1
            self.figures.hits += match.length > 0
            self.figures.reused_tokens += match.length
        return Opened(sequence, tuple(ids), owner, cache, copies, match.length, match.exact)

    def store(self, opened: Opened, ids: Ids[int], verified: int) -> int:
        """Keep the first *verified* rows of a sequence for later prompts, as far as limit and `align` allow.

        May be called while the sequence runs, and again; its stored rows are then fixed. To be called before
        `release`. A job that opted out stores nothing.

        Args:
            opened: as `open` returned it.
            ids: prompt and answer; at least *verified*.
            verified: rows that were written by steps that succeeded, for ids that are part of the answer.

        Returns:
            How many rows of this beginning are stored now.
        """
        sequence, owner = opened.sequence, opened.owner
        assert 0 <= verified <= min(len(ids), sequence.length), "as many ids as rows"
        assert opened.ids == tuple(ids[: len(opened.ids)]), "the ids of another job"
        if opened.cache is False:
            return 0
        node = self._roots.get(owner) or tree.root_of(owner)
        verified = verified // self._align * self._align
        path: dict[Node, int] = {}
        victims = self._victims(path)
        for place, page in enumerate(sequence.table[: pages_for(verified)]):
            start = place * PAGE
            chunk = tuple(ids[start : min(start + PAGE, verified)])
            exact = min(max(sequence.exact - start, 0), len(chunk))
            new = Node(tree.page_key(node.key, owner, chunk), owner, node, chunk, page, exact)
            found = self._known(new) or self._add(new, victims)
            if found is None:
                break
            path[found] = len(chunk)
            node = found
        self._touch(path)
        rows = sum(path.values())
        sequence.fix(rows)
        return rows

    def clear(self) -> None:
        """Forget every beginning; pages that running sequences share stay theirs."""
        for node in list(self._nodes.values()):
            self._forget(node)

    def check(self) -> None:
        """Prove the index and the books of its pages.

        Raises:
            AssertionError: a key is not that of its ids and place, a page is stored twice, the limit is passed, a
                page would be evicted before those that go on from it, or an exact row stands on an inexact one.
        """
        assert len(self._nodes) <= self._limit_pages
        assert len({node.page for node in self._nodes.values()}) == len(self._nodes), "a page is stored once"
        order = {node: place for place, node in enumerate(self._nodes.values())}
        reached = 0
        for owner, root in self._roots.items():
            assert root.children, "an owner without pages is forgotten"
            assert root.owner == owner
            below = [root]
            while below:
                node = below.pop()
                below.extend(node.children.values())
                reached += len(node.children)
                for key, child in node.children.items():
                    node.check(child)
                    assert key == child.key
                    assert self._nodes.get(key) is child
                    assert node is root or order[child] < order[node], "leaves are older"
        assert reached == len(self._nodes), "every page hangs on an owner"
        self.pages.check()

    def _child(self, parent: Node, ids: tuple[int, ...]) -> Node | None:
        # A key is only a hint: owner and all ids before are compared with the parent, the page's own ids here.
        node = self._nodes.get(tree.page_key(parent.key, parent.owner, ids))
        return node if node is not None and node.parent is parent and node.ids == ids else None

    def _known(self, new: Node) -> Node | None:
        """The stored page that serves all that *new* would, rewritten by *new* if that one is more exact."""
        parent = new.parent
        assert parent is not None
        same = parent.children.get(new.key)
        if same is not None and same.ids == new.ids:
            if new.exact > same.exact:
                self._drop_covered(new)
                self.pages.hold(new.page)
                self.pages.drop(same.page)
                same.page, same.exact = new.page, new.exact
            return same
        if len(new.ids) == PAGE:
            return None
        return next((one for one in parent.children.values() if one.covers(new)), None)

    def _add(self, new: Node, victims: Iterator[Node]) -> Node | None:
        """Store *new* if the limit allows, evicting *victims*; None if not, or if another page has its key."""
        if new.key in self._nodes:
            return None
        self._drop_covered(new)
        if len(self._nodes) >= self._limit_pages:
            victim = next(victims, None)
            if victim is None:
                return None
            self._evict(victim)
        assert new.parent is not None
        self.pages.hold(new.page)
        self._nodes[new.key] = new.parent.children[new.key] = new
        if new.parent.parent is None:
            self._roots[new.owner] = new.parent
        self.figures.stored_pages += 1
        return new

    def _drop_covered(self, new: Node) -> None:
        """Forget the pages filled in part that *new* makes needless."""
        assert new.parent is not None
        for one in [one for one in new.parent.children.values() if one.ids != new.ids and new.covers(one)]:
            self._forget(one)

    def _touch(self, path: Iterable[Node]) -> None:
        for node in reversed(list(path)):
            self._nodes.move_to_end(node.key)

    def _make_room(self, needed: int, match: Match) -> bool:
        """Evict until *needed* pages are free, but nothing of *match*; if that cannot be, False and no change."""
        short = needed - self.pages.free
        if short <= 0:
            return True
        if short > self._evictable(match.path):
            return False
        victims = self._victims(frozenset(match.path))
        for _ in range(short):
            self._evict(next(victims))
        return True

    def _victims(self, keep: Collection[Node]) -> Iterator[Node]:
        """Leaves that no sequence holds and that are not in *keep*, oldest first, each to be evicted at once."""
        for node in list(self._nodes.values()):
            if not node.children and node not in keep and self._idle(node):
                yield node

    def _evictable(self, keep: Collection[Node]) -> int:
        """How many pages `_victims` would yield."""
        held: set[Node | None] = set(keep)
        for node in self._nodes.values():
            if node in held or not self._idle(node):
                held |= {node, node.parent}
        return sum(node not in held for node in self._nodes.values())

    def _idle(self, node: Node) -> bool:
        return self.pages.references(node.page) == 1

    def _evict(self, node: Node) -> None:
        self._forget(node)
        self.figures.evicted_pages += 1

    def _forget(self, node: Node) -> None:
        assert node.parent is not None
        del self._nodes[node.key], node.parent.children[node.key]
        self.pages.drop(node.page)
        if node.parent.parent is None and not node.parent.children:
            del self._roots[node.owner]
