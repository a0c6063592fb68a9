"""What a drafter proposes, and which of it is kept.

Row 0 of a verify forward is the newest id, which is real; rows 1 to n are the nodes of the draft. The target draws
a token after every row; a node is kept if and only if it is the token drawn after its parent, and its parent is
kept. So the drafter decides how fast the text comes, never what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Final, NamedTuple, Protocol, Self

MAX_NODES: Final = 15
"""A verify forward has at most 16 rows."""

# The parents of chains by their nodes.
_CHAINS: Final = tuple(tuple(range(nodes)) for nodes in range(MAX_NODES + 1))


@dataclass(frozen=True, slots=True)
class Draft:
    """Ids for the next positions, as a tree below row 0; without nodes: decode plainly.

    tokens: of node i, which is row i + 1. parents: the row that node i follows. Rows come depth first: a node
    follows the row before it or one on that row's path. The first child of each row makes the trunk.

    Raises:
        ValueError: Another order, two children of a row with one token, or more than `MAX_NODES` nodes.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    EMPTY: ClassVar[Draft]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"{len(self.tokens)} tokens and {len(self.parents)} parents")
        if len(self.tokens) > MAX_NODES:
            raise ValueError(f"{len(self.tokens)} nodes; a draft has at most {MAX_NODES}")
        if self.is_chain:
            return
        path = [0]
        for row, parent in enumerate(self.parents, start=1):
            if parent not in path:
                raise ValueError(f"row {row} follows row {parent}, which is not on the path of row {row - 1}")
            path = [*path[: path.index(parent) + 1], row]
        if len(set(zip(self.parents, self.tokens, strict=True))) < len(self.tokens):
            raise ValueError("two children of a row have the same token")

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> Self:
        """Each token behind the one before it."""
        count = len(tokens)
        return cls(tuple(tokens), _CHAINS[count] if count <= MAX_NODES else tuple(range(count)))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def width(self) -> int:
        """Rows of the forward that verifies it."""
        return 1 + len(self.tokens)

    @property
    def depths(self) -> tuple[int, ...]:
        """Of each node: how many positions it stands behind row 0."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths[1:])

    @property
    def is_chain(self) -> bool:
        """No row has two children."""
        return self.parents == _CHAINS[len(self.parents)]

    @property
    def trunk(self) -> int:
        """How deep the trunk is: rows 1 to `trunk` follow each other."""
        if self.is_chain:
            return len(self.parents)
        return next(node for node, parent in enumerate(self.parents) if parent != node)

    def path(self, row: int) -> tuple[int, ...]:
        """The rows from 0 down to *row*, both included."""
        if self.is_chain:
            return tuple(range(row + 1))
        path = [row]
        while path[-1]:
            path.append(self.parents[path[-1] - 1])
        return tuple(reversed(path))

    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Of each row, row 0 first: the rows from 0 down to it, both included."""
        paths: list[tuple[int, ...]] = [(0,)]
        for row, parent in enumerate(self.parents, start=1):
            paths.append((*paths[parent], row))
        return tuple(paths)


Draft.EMPTY = Draft()


def accepted(draft: Draft, drawn: Sequence[int]) -> tuple[int, ...]:
    """The path that is kept: row 0, then a child as long as one has the token drawn after its parent.

    drawn: the token drawn after each row; what stands behind the draft's own rows is padding.

    Raises:
        ValueError: Fewer tokens than rows.
    """
    if len(drawn) < draft.width:
        raise ValueError(f"{len(drawn)} tokens drawn after {draft.width} rows")
    path = [0]
    # Depth first: a node whose parent is not the newest of the path hangs on a row that was passed by.
    for row, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True), start=1):
        if parent == path[-1] and token == drawn[parent]:
            path.append(row)
    return tuple(path)


def left_trunk(draft: Draft, path: Sequence[int]) -> int:
    """The depth at which *path* goes another way than the trunk; 0 where it follows the trunk to its end."""
    trunk = draft.trunk
    turns = (depth for depth, row in enumerate(path) if row != depth or row > trunk)
    return next(turns, 0)


class Proposal(NamedTuple):
    """A draft, and how sure the drafter is of it.

    margins: for each depth that the trunk has, or would have were there no forks, as the drafter's `Traits` read
    them. turns: the depths of the forks that could be taken, the best first, one for each; where no forks were
    asked for it may be empty.
    """

    draft: Draft = Draft.EMPTY
    margins: tuple[float, ...] = ()
    turns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Traits:
    """What a planner believes of a drafter before it has seen it work.

    edges: ascending; margins between two edges are one kind, and acceptance is learnt for each kind. kept: the
    acceptance of each kind, one more than edges. branch: nodes that a fork takes at most. gained: tokens that a
    fork gains on average where the trunk misses at its depth; only what is believed to be worth a try is measured.
    free: whether proposals cost no time worth counting; else there is a plan before there is a draft, and drafts
    that nobody verifies are not made.
    """

    edges: tuple[float, ...]
    kept: tuple[float, ...]
    branch: int = 1
    gained: float = 1.0
    free: bool = True

    def __post_init__(self) -> None:
        assert len(self.kept) == len(self.edges) + 1, "one kind more than edges"
        assert all(low < high for low, high in pairwise(self.edges)), "edges ascend"


def _unheard() -> None:
    """Nobody looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a drafter may want to know of a job beside its text.

    budget: ids that may be drawn. keep: whether what is computed may serve later jobs of the same *owner*. look:
    to be called now and then where beginning takes long; it may raise, and the job is over.
    """

    budget: int
    keep: bool = False
    owner: bytes = b""
    look: Callable[[], None] = _unheard


class Drafter(Protocol):
    """Proposes ids; what becomes text it is told in order, and nothing else changes what it knows."""

    name: str
    traits: Traits

    def begin(self, ids: Sequence[int], sampling: Any, terms: Terms) -> None:
        """A job begins with the prompt *ids*, drawn by *sampling*; all of the job before is forgotten."""

    def extend(self, ids: Sequence[int]) -> None:
        """*ids* became text behind what there is."""

    def catch_up(self) -> None:
        """Bring what is kept beside the text up to it: a drafter that is not free, before a proposal is timed."""

    def propose(self, limit: int, forks: int) -> Proposal:
        """At most *limit* nodes and *forks* forks behind the text; none where nothing is worth a guess.

        Asked again for fewer before the text goes on, a drafter that is not free drafts nothing anew.
        """

    def end(self) -> None:
        """The job is over: give back what it held."""
