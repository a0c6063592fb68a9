"""What the broker knows of one job, and the answer it keeps for readers slow and returning."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final, NamedTuple

from broker.moves import Move, Phase, advance
from mtplx.fields import Logprobs
from mtplx.messages import Chunk, Done, Error

# Keeps a coalesced chunk far below the frame limit, even with 20 log-probabilities a token.
MAX_CHUNK_TOKENS: Final = 4096
# What a kept answer costs in CPython, measured; text counts twice, for DONE has it again.
PIECE_BYTES: Final = 220
TOKEN_BYTES: Final = 36
LOGPROB_BYTES: Final = 124


class Now(NamedTuple):
    """The time of an event: seconds that never jump, and wall time for spans."""

    mono: float
    wall_ns: int


class Piece(NamedTuple):
    """What one worker chunk added to the answer."""

    first: int
    ids: tuple[int, ...]
    text: str
    logprobs: Logprobs | None


@dataclass(slots=True)
class Answer:
    """The tokens and text of one job, stored once; delivery is a cursor into it."""

    pieces: list[Piece] = field(default_factory=list)
    tokens: int = 0
    nbytes: int = 0

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

    def index_of(self, tokens: int) -> int | None:
        """The piece that begins at *tokens*; None where no piece does."""
        if tokens == self.tokens:
            return len(self.pieces)
        low, high = 0, len(self.pieces)
        while low < high:
            middle = (low + high) // 2
            if self.pieces[middle].first < tokens:
                low = middle + 1
            else:
                high = middle
        return low if low < len(self.pieces) and self.pieces[low].first == tokens else None


@dataclass(slots=True)
class Reading:
    """How far the job's reader has got. `route` None means that nobody reads."""

    route: bytes | None
    credit: int | None
    piece: int = 0
    next_seq: int = 0
    queued: bool = False
    last_word_sent: bool = False

    def stalled(self) -> bool:
        """True where the reader's credit is used up."""
        return self.credit is not None and self.next_seq >= self.credit


@dataclass(slots=True)
class Run:
    """One attempt on the worker."""

    lease: int
    attempt: int
    started: Now
    model: str
    first_token: Now | None = None


@dataclass(slots=True, kw_only=True)
class Record:
    """One admitted job.

    body: the job as submitted, dropped when the job has ended. size: bytes it is charged with in the line.
    checked: the generation of worker whose limits it was checked against, 0 for none.
    filed: when, having ended, it was last read to its end, taken up by a reader, or left by one.
    orphan_until: when its producer, gone now, must be back.
    cancel_reason: the last word of a running job that is being ended by the broker, not by its producer.
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
    checked: int = 0
    filed: float = 0.0
    orphan_until: float = 0.0
    phase: Phase = Phase.WAITING
    run: Run | None = None
    answer: Answer | None = None
    ended: Now | None = None
    last_word: Done | Error | None = None
    cancel_reason: Error | None = None

    def move(self, move: Move) -> None:
        """Take *move* if the table allows it."""
        self.phase = advance(self.phase, move)

    @property
    def tokens(self) -> int:
        """Tokens of the answer so far."""
        return self.answer.tokens if self.answer else 0

    @property
    def unread(self) -> bool:
        """True while somebody is still to be told the last word."""
        return self.reading.route is not None and not self.reading.last_word_sent

    @property
    def kept_bytes(self) -> int:
        """Bytes an ended record holds for a reader that comes back."""
        return 1024 + (self.answer.nbytes if self.answer else 0)

    def next_chunk(self) -> tuple[Chunk, int] | None:
        """Undelivered pieces as one chunk, and the cursor after it; None where there are none."""
        if self.answer is None or self.run is None or self.reading.piece >= len(self.answer.pieces):
            return None
        pieces = self._undelivered()
        first, ids, text, logprobs = pieces[0]
        if len(pieces) > 1:
            ids = tuple(token for piece in pieces for token in piece.ids)
            text = "".join(piece.text for piece in pieces)
            if logprobs is not None:
                logprobs = tuple(one for piece in pieces for one in piece.logprobs or ())
        chunk = Chunk(self.id, self.run.attempt, self.reading.next_seq, first, len(ids), ids, text, logprobs)
        return chunk, self.reading.piece + len(pieces)

    def _undelivered(self) -> list[Piece]:
        assert self.answer is not None
        taken, tokens = [], 0
        for piece in islice(self.answer.pieces, self.reading.piece, None):
            taken.append(piece)
            tokens += len(piece.ids)
            if tokens >= MAX_CHUNK_TOKENS:
                break
        return taken

    def final_word(self) -> Done | Error:
        """The last word, telling this reader how many chunks it was sent."""
        assert self.last_word is not None
        if isinstance(self.last_word, Done):
            return replace(self.last_word, seq=self.reading.next_seq)
        return self.last_word


def digest_of(body: bytes) -> bytes:
    """What makes two jobs of one id the same job: SHA-256 of the body frame as received."""
    return hashlib.sha256(body).digest()
