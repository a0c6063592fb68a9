"""What the broker knows of one job, and the answer it keeps for readers slow and returning."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Final, NamedTuple

from broker.moves import Move, Phase, advance
from mtplx.fields import Logprobs
from mtplx.messages import Done, Error

# What a kept answer costs in CPython, measured; text counts twice, for DONE has it again.
PIECE_BYTES: Final = 220
TOKEN_BYTES: Final = 36
LOGPROB_BYTES: Final = 124
# The latest moment a journal can hold, in nanoseconds.
LATEST_NS: Final = 2**63 - 1


class Now(NamedTuple):
    """The time of an event: seconds that never jump, and wall time for spans."""

    mono: float
    wall_ns: int

    def mono_of(self, wall_ns: int) -> float:
        """The monotonic time of a moment of wall time."""
        return self.mono + (wall_ns - self.wall_ns) / 1e9

    def at(self, wall_ns: int) -> Now:
        """A moment of wall time as both."""
        return Now(self.mono_of(wall_ns), wall_ns)


class Piece(NamedTuple):
    """What one worker chunk added to the answer."""

    first: int
    ids: tuple[int, ...]
    text: str
    logprobs: Logprobs | None


@dataclass(slots=True)
class Answer:
    """The tokens and text of one job, stored once; delivery is a cursor into it, counted in tokens.

    spilled: the pieces are in the journal alone, and only what they add up to is known here.
    """

    pieces: list[Piece] = field(default_factory=list)
    tokens: int = 0
    nbytes: int = 0
    spilled: bool = False

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Answer:
        """An answer in memory."""
        answer = cls()
        for piece in pieces:
            answer.add(piece)
        return answer

    def spill(self) -> None:
        """Forget the pieces; the journal has them."""
        self.pieces, self.spilled = [], True

    def add(self, piece: Piece) -> None:
        """Append *piece*, which begins where the answer ends."""
        self.pieces.append(piece)
        self.tokens += len(piece.ids)
        self.nbytes += PIECE_BYTES + TOKEN_BYTES * len(piece.ids) + 2 * len(piece.text)
        if piece.logprobs is not None:
            self.nbytes += LOGPROB_BYTES * sum(map(len, piece.logprobs))

    def text(self) -> str:
        """The whole text so far."""
        return "".join(piece.text for piece in self.pieces)

    def ids(self) -> tuple[int, ...]:
        """All token ids so far."""
        return tuple(token for piece in self.pieces for token in piece.ids)

    def window(self, first: int, most: int) -> list[Piece]:
        """Pieces from the one that begins at *first* on, until they have *most* tokens; [] where none does."""
        place = bisect_left(self.pieces, first, key=attrgetter("first"))
        if place == len(self.pieces) or self.pieces[place].first != first:
            return []
        taken, tokens = [], 0
        for piece in islice(self.pieces, place, None):
            taken.append(piece)
            tokens += len(piece.ids)
            if tokens >= most:
                break
        return taken


@dataclass(slots=True)
class Reading:
    """How far the job's reader has got: `tokens` of the answer. `route` None means that nobody reads.

    before: those whose stream it took up, the latest last. It may have been gone when it was read.
    """

    route: bytes | None
    credit: int | None
    tokens: int = 0
    next_seq: int = 0
    queued: bool = False
    last_word_sent: bool = False
    before: tuple[Reading, ...] = ()

    def stalled(self) -> bool:
        """True where the reader's credit is used up."""
        return self.credit is not None and self.next_seq >= self.credit


@dataclass(slots=True)
class Run:
    """One attempt on the worker. behind: tokens that earlier attempts drew. barren: `Record.barren` before it."""

    lease: int
    attempt: int
    started: Now
    model: str
    behind: int = 0
    barren: int = 0
    first_token: Now | None = None


@dataclass(slots=True, kw_only=True)
class Record:
    """One admitted job.

    body: the job as submitted, dropped when the job has ended unless it is buried. size: bytes it is charged with
    in the line.
    checked: the generation of worker whose limits it was checked against, 0 for none.
    owner: who submitted it. ttl_ns, deadline_ns: wall time at which its waiting, or it, ends; None: never.
    attempts: begun. barren: those of them, the latest ones, that brought no new token. model, model_hash,
    build_hash: of the worker that drew the tokens. exact: whether all attempts ran on one build.
    filed: when, having ended, it was last read to its end, taken up by a reader, or left by one.
    orphan_until: when its producer, gone now, must be back.
    first_run, first_token: when it was first handed to a worker and when its first token came; None where that
    was before the broker's start. restored: it was taken by an earlier process of the broker.
    cancel_reason: the last word of a running job that is being ended by the broker, not by its producer.
    handing_back: it is being taken off the worker, to go on later.
    """

    id: bytes
    body: bytes
    size: int
    digest: bytes
    seed: int
    admit_seq: int
    admitted: Now
    reading: Reading
    finish: bool
    headers: dict[str, str] | None
    owner: str = ""
    ttl_ns: int | None = None
    deadline_ns: int | None = None
    attempts: int = 0
    barren: int = 0
    model: str = ""
    model_hash: str = ""
    build_hash: str = ""
    exact: bool = True
    checked: int = 0
    filed: float = 0.0
    orphan_until: float = 0.0
    phase: Phase = Phase.WAITING
    run: Run | None = None
    answer: Answer | None = None
    ended: Now | None = None
    last_word: Done | Error | None = None
    first_run: Now | None = None
    first_token: Now | None = None
    restored: bool = False
    cancel_reason: Error | None = None
    handing_back: bool = False

    def move(self, move: Move) -> None:
        """Take *move* if the table allows it."""
        self.phase = advance(self.phase, move)

    @property
    def key(self) -> tuple[str, bytes]:
        """What no two records share."""
        return self.owner, self.id

    @property
    def over(self) -> bool:
        """True of a job that has its last word."""
        return self.phase in (Phase.ENDED, Phase.BURIED)

    @property
    def tokens(self) -> int:
        """Tokens of the answer so far."""
        return self.answer.tokens if self.answer else 0

    @property
    def begun(self) -> bool:
        """True of a job that was on a worker."""
        return self.attempts > 0 or self.tokens > 0

    @property
    def unread(self) -> bool:
        """True while somebody is still to be told the last word."""
        return self.reading.route is not None and not self.reading.last_word_sent

    @property
    def kept_bytes(self) -> int:
        """Bytes an ended record holds for a reader that comes back."""
        return 1024 + len(self.body) + (self.answer.nbytes if self.answer else 0)


def digest_of(body: bytes) -> bytes:
    """What makes two jobs of one id the same job: SHA-256 of the body frame as received."""
    return hashlib.sha256(body).digest()


def charge(body: bytes, headers: dict[str, str] | None) -> int:
    """Bytes a job is charged with in the line."""
    return len(body) + headers_bytes(headers)


def headers_bytes(headers: dict[str, str] | None) -> int:
    """Bytes of *headers*: strings of msgpack have up to 5 bytes of their own."""
    if not headers:
        return 0
    return sum(len(key.encode()) + len(value.encode()) + 10 for key, value in headers.items())


def moment(after_ms: int | None, now: Now) -> int | None:
    """The wall time, in nanoseconds, so long after *now*; None where there is no limit."""
    return None if after_ms is None else min(now.wall_ns + after_ms * 10**6, LATEST_NS)
