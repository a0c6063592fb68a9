"""Prompt lookup: what followed the last ids the last time that they stood in prompt or answer.

A match is a place in the text, and how many ids before it are the last ids of the text. The longest one, and of
equally long ones the latest, is gone on with: while the text goes on as it does, it stays the longest and the
latest, so following it costs one comparison. Only where it breaks is there a search: through the latest places
of the last 6 ids and through those of the last 2. A text that repeats 2 ids more often than that may hide a longer
match from it.

Cost of an id: two entries in hash tables and one comparison; of a proposal after a break, at most `tries` places
with `longest` comparisons each, whatever the length of the text. Memory: 12 bytes an id, and at most 300 for each
of the latest 2 * `span` of them, about 40 MB.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from worker.speculation.draft import MAX_NODES, Draft, Proposal, Terms, Traits

_NOTHING: Final = Proposal()

SHORT: Final = 2
LONG: Final = 6
_ID_BITS: Final = 21

# A margin is the length of the match, one more at each depth: so long it is if the draft is right up to there.
NGRAM: Final = Traits(
    edges=(3, 4, 6, 8, 16),
    kept=(0.4, 0.6, 0.75, 0.8, 0.9, 0.95),
    branch=3,
    gained=0.2,
)


@dataclass(slots=True)
class _Match:
    """The next id is expected to be that at `place`; `length` ids before it are the last of the text."""

    place: int
    length: int


@dataclass(slots=True)
class _Index:
    """Where each n-gram of *size* ids last ended, and for each place where its n-gram ended before; -1: nowhere.

    Two tables: when the young one has *span* entries it becomes the old one, and what the old one held is gone.
    """

    size: int
    span: int
    mask: int = field(init=False)
    key: int = 0
    young: dict[int, int] = field(default_factory=dict)
    old: dict[int, int] = field(default_factory=dict)
    before: array[int] = field(default_factory=lambda: array("i"))

    def __post_init__(self) -> None:
        # Ids of more bits would share keys: every match is compared with the text before it counts.
        self.mask = (1 << _ID_BITS * self.size) - 1

    def push(self, token: int, at: int) -> None:
        """The text goes on with *token* at the place *at*."""
        self.key = key = (self.key << _ID_BITS | token) & self.mask
        if at < self.size - 1:
            self.before.append(-1)
            return
        young = self.young
        latest = young.get(key, -1)
        if latest < 0:
            latest = self.old.get(key, -1)
            if len(young) >= self.span:
                self.old = young
                self.young = young = {}
        self.before.append(latest)
        young[key] = at


class Ngram:
    """A `Drafter` of what stands in the text already.

    Args:
        tries: Places that a search looks at.
        longest: Ids that a search compares at most.
        span: n-grams of a size that are surely remembered; up to twice as many are.
    """

    name = "ngram"
    traits = NGRAM

    def __init__(self, *, tries: int = 16, longest: int = 48, span: int = 2**16) -> None:
        self.tries, self.longest, self.span = tries, longest, span
        self.compared = 0
        """Comparisons of ids so far: what an id costs besides its entries in the tables."""
        self._clear()

    def _clear(self) -> None:
        self._text = array("q")
        self._long, self._short = _Index(LONG, self.span), _Index(SHORT, self.span)
        self._match: _Match | None = None
        self._searched = 0
        # What `_places` gives, the longest match first, and the length of the text for which that was found.
        self._known: tuple[tuple[int, int], ...] = ()
        self._known_of = 0

    def begin(self, ids: Sequence[int], sampling: Any = None, terms: Terms | None = None) -> None:
        """A job begins with the prompt *ids*; how it is drawn changes nothing."""
        del sampling, terms
        self._clear()
        self.extend(ids)

    def end(self) -> None:
        """Forget the text."""
        self._clear()

    def catch_up(self) -> None:
        """As in `Drafter`: nothing is ever behind."""

    def extend(self, ids: Sequence[int]) -> None:
        """*ids* became text: the match is followed or broken."""
        text, long, short = self._text, self._long.push, self._short.push
        for place, token in enumerate(ids, start=len(text)):
            if self._match is not None:
                self._follow(self._match, token)
            text.append(token)
            long(token, place)
            short(token, place)

    def propose(self, limit: int, forks: int = 0) -> Proposal:
        """The continuation of the match, as the trunk, and of other places, as forks, where they differ from it.

        The trunk is at most twice as long as the match, and one.
        """
        match = self._latest()
        limit = min(limit, MAX_NODES)
        if match is None or limit < 1:
            return _NOTHING
        place, length = match.place, match.length
        trunk = self._continuation(place, min(limit, 2 * length + 1))
        margins = tuple(map(float, range(length, length + len(trunk))))
        if forks < 1:
            return Proposal(Draft.chain(trunk), margins)
        others = list(islice(self._others(trunk), forks))
        taken = others[: min(forks, (limit - 1) // self.traits.branch)]
        # The trunk makes room for the forks, but none of them may turn off below its end.
        while taken and max(depth for depth, _ in taken) > limit - sum(len(branch) for _, branch in taken):
            taken.pop()
        trunk = trunk[: limit - sum(len(branch) for _, branch in taken)]
        return Proposal(_tree(trunk, taken), margins, tuple(depth for depth, _ in others))

    def _follow(self, match: _Match, token: int) -> None:
        """What the next id makes of the match."""
        self.compared += 1
        if self._text[match.place] == token:
            match.place += 1
            match.length += 1
        else:
            self._match = None

    def _latest(self) -> _Match | None:
        """The match that is followed, else what a search finds; there is one search for each end of the text."""
        if self._match is None:
            last = len(self._text) - 1
            if self._searched <= last:
                self._searched = last + 1
                # Where even the last few ids are new there is nothing to search for.
                if self._short.before[last] >= 0 or self._long.before[last] >= 0:
                    self._match = self._search()
        return self._match

    def _places(self) -> Iterator[tuple[int, int]]:
        """Places behind which the text's last ids stand, and how many of these, the latest places first."""
        last = len(self._text) - 1
        seen = set()
        for index in (self._long, self._short):
            place = index.before[last] if last >= 0 else -1
            for _ in range(self.tries):
                if place < 0:
                    break
                if place not in seen:
                    seen.add(place)
                    length = self._agreement(place, last)
                    if length >= index.size:
                        yield place + 1, length
                place = index.before[place]

    def _agreement(self, one: int, other: int) -> int:
        """How many ids up to those at *one* and, later, *other* are the same, `longest` at most."""
        text = self._text
        most = min(self.longest, one + 1)
        length = 0
        while length < most and text[one - length] == text[other - length]:
            length += 1
        self.compared += length + 1
        return length

    def _search(self) -> _Match | None:
        """The longest match, the latest of equally long ones."""
        best: _Match | None = None
        for place, length in self._places():
            if best is None or length > best.length:
                best = _Match(place, length)
                if length == self.longest:
                    break
        return best

    def _continuation(self, place: int, count: int) -> tuple[int, ...]:
        """*count* ids from *place* on; behind the end of the text the continuation goes on with itself."""
        text = self._text
        period = len(text) - place
        ids = text[place : place + count]
        return tuple(ids[depth % period] for depth in range(count)) if len(ids) < count else tuple(ids)

    def _others(self, trunk: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Other ways than the trunk, longest match first: the depth where each turns off, its ids from there."""
        if self._known_of != len(self._text):
            self._known = tuple(sorted(self._places(), key=lambda one: -one[1]))
            self._known_of = len(self._text)
        turned = set()
        for other, _ in self._known:
            way = self._continuation(other, len(trunk) + self.traits.branch)
            depth = next((at for at, pair in enumerate(zip(trunk, way, strict=False)) if pair[0] != pair[1]), None)
            if depth is not None and (depth, way[depth]) not in turned:
                turned.add((depth, way[depth]))
                yield depth + 1, way[depth : depth + self.traits.branch]


def _tree(trunk: tuple[int, ...], forks: list[tuple[int, tuple[int, ...]]]) -> Draft:
    """The trunk first, then the forks from its end upwards: rows depth first."""
    tokens, parents = list(trunk), list(range(len(trunk)))
    for depth, branch in sorted(forks, key=lambda one: -one[0]):
        parent = depth - 1
        for token in branch:
            tokens.append(token)
            parents.append(parent)
            parent = len(tokens)
    return Draft(tuple(tokens), tuple(parents))
