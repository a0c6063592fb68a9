"""Pages, index and a pretended device memory: what every row holds is known, so wrong sharing shows as wrong rows."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from worker.kv.pages import PAGE, Copy, Pages, PoolTooSmallError
from worker.kv.prefix import Cache, Match, Opened, PrefixIndex

PAGE_BYTES = 1000


def chain_of(ids: list[int] | tuple[int, ...]) -> list[int]:
    """One number per position that depends on all ids up to there, as keys and values do."""
    chain, last = [], 0
    for one in ids:
        last = hash((last, one))
        chain.append(last)
    return chain


@dataclass(frozen=True)
class Row:
    """What a slot of the device holds; clean: written by prefill on top of clean rows alone."""

    link: int
    owner: bytes
    clean: bool


@dataclass(eq=False)
class Run:
    """A sequence at work. ids: prompt and kept answer; the first *verified* have rows."""

    opened: Opened
    ids: list[int]
    verified: int
    chain: list[int] = field(default_factory=list)

    @property
    def sequence(self):
        return self.opened.sequence

    @property
    def unread(self) -> int:
        return max(len(self.opened.ids) - self.verified, 0)


class Rig:
    def __init__(self, count: int, limit_pages: int, align: int = 1) -> None:
        self.pages = Pages(count)
        self.align = align
        self.index = PrefixIndex(
            self.pages, page_bytes=PAGE_BYTES, limit_bytes=limit_pages * PAGE_BYTES + PAGE_BYTES - 1, align=align
        )
        self.memory: dict[int, Row | None] = {}
        self.runs: list[Run] = []
        # The model of the index: what was stored, and how many leading rows of it are exact.
        self.stored: dict[tuple[bytes, tuple[int, ...]], int] = {}
        self.cleared = False

    def room(self) -> int:
        """Tokens, prompt and budget together, up to which `open` would not refuse now."""
        return (self.pages.free + self.index._evictable(())) * PAGE

    @property
    def bytes_held(self) -> int:
        return self.index.pages_held * PAGE_BYTES

    # --- the moves of a job

    def open(self, ids, budget: int = 0, owner: bytes = b"", cache: Cache = True) -> Run | None:
        """A run, or None where the pool refused."""
        before = self.books()
        expected = self.index.lookup(ids, owner=owner, cache=cache)
        self.expect(expected, ids, owner, cache)
        room = self.room()
        assert self.books() == before, "looking changes nothing"
        try:
            opened = self.index.open(ids, len(ids) + budget, owner=owner, cache=cache)
        except PoolTooSmallError as error:
            self.check_refusal(error, before, fits=len(ids) + budget <= room)
            return None
        assert opened.cached in (expected.length, len(expected.pages) * PAGE)
        assert self.align == 1 or not opened.copies, "whole pages are shared, never copied"
        run = Run(opened, list(ids), opened.cached, chain_of(ids))
        self.copy(opened.copies)
        self.runs.append(run)
        self.check_rows(run)
        return run

    def read(self, run: Run, chunk: int) -> None:
        """Prefill the next *chunk* ids of the prompt."""
        chunk = min(chunk, run.unread, run.sequence.capacity - run.verified)
        self.write(run, run.chain[run.verified : run.verified + chunk], prompt=True)
        run.verified += chunk

    def draw(self, run: Run, drafts: list[int], kept: int) -> None:
        """One forward over *drafts*, of which the first *kept* turn out to be right."""
        self.drop_unverified(run)
        drafts = drafts[: run.sequence.capacity - run.verified]
        kept = min(kept, len(drafts))
        self.write(run, chain_of_more(run.chain[: run.verified], drafts), prompt=False)
        self.copy(run.sequence.truncate(run.verified + kept))
        run.ids = run.ids[: run.verified] + drafts[:kept]
        run.chain = chain_of(run.ids)
        run.verified += kept

    def start_step(self, run: Run, rows: int = 1) -> None:
        """Rows of a forward that is in flight, or that failed: they hold nothing of worth."""
        rows = min(rows, run.sequence.capacity - run.sequence.length)
        self.write(run, [0] * rows, prompt=run.unread > 0)

    def drop_unverified(self, run: Run) -> None:
        self.copy(run.sequence.truncate(run.verified))

    def store(self, run: Run) -> int:
        rows = self.index.store(run.opened, run.ids, run.verified)
        assert rows % self.align == 0 or self.index.pages_held == self.index._limit_pages
        if rows:
            key = (run.opened.owner, tuple(run.ids[:rows]))
            self.stored[key] = max(self.stored.get(key, 0), min(run.sequence.exact, rows))
        return rows

    def end(self, run: Run, *, store: bool = True) -> None:
        if store:
            self.store(run)
        self.runs.remove(run)
        run.sequence.release()

    def fork(self, run: Run, tokens: int) -> Run | None:
        self.drop_unverified(run)
        try:
            twin, copies = run.sequence.fork(tokens)
        except PoolTooSmallError:
            return None
        o = run.opened
        self.copy(copies)
        opened = Opened(twin, o.ids, o.owner, o.cache, (), run.verified, twin.exact == twin.length)
        self.runs.append(Run(opened, list(run.ids), run.verified, list(run.chain)))
        return self.runs[-1]

    def cut(self, run: Run, length: int) -> bool:
        """Take rows back, those included that others rely on; False where the pool had no page for it."""
        try:
            self.copy(run.sequence.truncate(length))
        except PoolTooSmallError:
            return False
        run.verified = min(run.verified, length)
        keep = max(run.verified, len(run.opened.ids))
        run.ids, run.chain = run.ids[:keep], run.chain[:keep]
        return True

    def clear(self) -> None:
        self.index.clear()
        self.cleared = True

    def answer(self, prompt, *, owner: bytes = b"", cache: Cache = True, draws=(), chunk: int = 32) -> Opened:
        """A whole job that succeeds; how it was opened."""
        run = self.open(prompt, len(draws), owner, cache)
        assert run is not None
        while run.unread:
            self.read(run, chunk)
            self.check()
        for one in draws:
            self.draw(run, [one], 1)
        self.end(run)
        self.check()
        return run.opened

    # --- the device

    def write(self, run: Run, links: list[int], *, prompt: bool) -> None:
        first = run.sequence.length
        clean = prompt and all(self.row(run, position).clean for position in range(first))
        run.sequence.append(len(links), prompt=prompt)
        for position, link in enumerate(links, first):
            self.memory[run.sequence.slot(position)] = Row(link, run.opened.owner, clean)

    def copy(self, copies: tuple[Copy, ...]) -> None:
        for one in copies:
            assert one.source != one.target
            assert 0 < one.rows < PAGE
            for row in range(PAGE):
                copied = row < one.rows
                self.memory[one.target * PAGE + row] = self.memory[one.source * PAGE + row] if copied else None

    def row(self, run: Run, position: int) -> Row:
        row = self.memory[run.sequence.slot(position)]
        assert row is not None
        return row

    # --- what must hold

    def books(self):
        tables = [(tuple(run.sequence.table), run.sequence.length, run.sequence.exact) for run in self.runs]
        return self.pages.free, tables, list(self.index._nodes), [node.page for node in self.index._nodes.values()]

    def check_refusal(self, error: PoolTooSmallError, before, *, fits: bool) -> None:
        assert self.books() == before, "a refusal changes nothing"
        assert error.needed > error.free
        assert not fits, "there was room"

    def expect(self, match: Match, ids, owner: bytes, cache: Cache) -> None:
        """The brute-force answer: exact while nothing was evicted, an upper bound afterwards."""
        prompt_rows = self.best(ids, owner, answers=False)
        best = {True: prompt_rows, False: 0, "answers": self.best(ids, owner, answers=True)}[cache]
        best = best // self.align * self.align
        assert match.length <= best
        assert match.length % self.align == 0
        assert match.length < max(len(ids), 1)
        if not self.cleared and not self.index.figures.evicted_pages:
            assert match.length == best
            assert match.exact == (best == min(prompt_rows, best))
        assert cache == "answers" or match.exact

    def best(self, ids, owner: bytes, *, answers: bool) -> int:
        found = 0
        for (whose, known), exact in self.stored.items():
            if whose == owner:
                rows = shared(known, ids[:-1])
                found = max(found, rows if answers else min(rows, exact))
        return found

    def check(self) -> None:
        self.index.check()
        assert self.bytes_held <= self.index._limit_pages * PAGE_BYTES
        for run in self.runs:
            self.check_rows(run)
        for owner, root in self.index._roots.items():
            self.check_stored(root, owner, 0, clean=True)

    def check_rows(self, run: Run) -> None:
        rows = [self.row(run, position) for position in range(run.verified)]
        assert [row.link for row in rows] == run.chain[: run.verified], "rows of another text"
        assert all(row.owner == run.opened.owner for row in rows), "rows of another owner"
        clean = next((place for place, row in enumerate(rows) if not row.clean), len(rows))
        assert min(run.sequence.exact, run.verified) == clean

    def check_stored(self, node, owner: bytes, link: int, *, clean: bool) -> None:
        for child in node.children.values():
            last, still = link, clean
            for place, one in enumerate(child.ids):
                last = hash((last, one))
                row = self.memory[child.page * PAGE + place]
                assert row is not None
                assert (row.link, row.owner) == (last, owner)
                assert row.clean or place >= child.exact
                still = still and row.clean
            self.check_stored(child, owner, last, clean=still)


def chain_of_more(chain: list[int], ids: list[int]) -> list[int]:
    last = chain[-1] if chain else 0
    more = []
    for one in ids:
        last = hash((last, one))
        more.append(last)
    return more


def shared(one, other) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def text(seed: int, length: int) -> list[int]:
    """A prompt of its own: texts of different seeds part at the first id."""
    draw = random.Random(seed)
    return [1000 + seed, *(draw.randrange(1000) for _ in range(length - 1))][:length]
