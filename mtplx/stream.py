"""One job's answer as its producer sees it, without sockets, threads or clocks.

A `StreamState` checks every promise of the protocol as messages come in; `session.py` feeds it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from sys import byteorder
from typing import Any, Final

from mtplx.errors import (
    BadJobError,
    BusyError,
    JobError,
    MtplxError,
    ProtocolError,
    WireError,
)
from mtplx.fields import Logprobs
from mtplx.messages import (
    Admitted,
    Chunk,
    Done,
    Error,
    Message,
    Progress,
    Resume,
    Started,
    Submit,
)

# With the id of an admitted job these answer a faulty message about it, and leave the job as it is.
FAULTS: Final = ("E_PROTOCOL", "E_TOO_LARGE", "E_CONFLICT")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer as it arrived. `text` is empty while the tokens' characters are held back.

    first: index of the first token in the answer. logprobs: per token, (id, log-probability) pairs.
    """

    text: str
    ids: tuple[int, ...]
    logprobs: Logprobs | None
    first: int


@dataclass(frozen=True, slots=True)
class Result:
    """A whole answer, checked against its hash.

    finish_reason: `stop`, `length` or `cancelled`. usage: tokens. timings: seconds. run: how it ran
    (`model`, `route`, `attempt`, `max_tokens_used`, ...). sha256: of the ids as little-endian uint32.
    logprobs: one entry for each of `ids`, as in `Piece`, where the job asked for them. metadata: the job's own.
    """

    text: str
    ids: tuple[int, ...]
    finish_reason: str
    usage: dict[str, Any]
    timings: dict[str, Any]
    seed: int
    sha256: str
    run: dict[str, Any]
    id: bytes
    logprobs: Logprobs | None = None
    metadata: Mapping[str, str] | None = None

    def to_map(self) -> dict[str, Any]:
        """The result as JSON can hold it; `id` in hex. What the job did not ask for or have is left out."""
        told = {**asdict(self), "ids": list(self.ids), "id": self.id.hex()}
        return {name: value for name, value in told.items() if value is not None}


def error_of(error: Error) -> WireError:
    """The exception that an ERROR message stands for."""
    if error.code == "E_BAD_JOB":
        return BadJobError(error.message, field=error.field or "job", detail=error.detail)
    if error.code in ("E_VERSION", "E_PROTOCOL", "E_UNKNOWN_KIND"):
        return ProtocolError(error.message, field=error.field or "", code=error.code, detail=error.detail)
    kind = BusyError if error.code in ("E_QUEUE_FULL", "E_DRAINING", "E_JOURNAL") else JobError
    return kind(
        error.message,
        code=error.code,
        field=error.field,
        retry_after_ms=error.retry_after_ms,
        detail=error.detail,
        retryable=error.retryable,
    )


class StreamState:
    """One job as its producer sees it: chunks in order, then exactly one last word.

    `pieces` holds what nobody has read yet; `result` or `error` is set by the last word. `cancel_wanted`
    is its reader's wish, to be said again on a new connection.
    """

    def __init__(self, submit: Submit, metadata: Mapping[str, str] | None = None) -> None:
        self.submit = submit
        self.metadata = metadata
        self.id = submit.id
        self.pieces: deque[Piece] = deque()
        self.admitted: Admitted | None = None
        self.started: Started | None = None
        self.progress: Progress | None = None
        self.result: Result | None = None
        self.error: MtplxError | None = None
        self.cancel_wanted = False
        self.ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[tuple[tuple[int, float], ...]] = []
        self._seq = 0
        self._read = 0
        self._granted = submit.credit or 0
        self._hash = hashlib.sha256()

    @property
    def ended(self) -> bool:
        """True after the last word."""
        return self.result is not None or self.error is not None

    @property
    def readable(self) -> bool:
        """True where a reader need not wait: for a piece, or for the end."""
        return bool(self.pieces) or self.ended

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._texts)

    def take(self, message: Message) -> None:
        """Move on by one message of the broker about this job.

        Raises:
            ProtocolError: when it breaks a promise of the protocol; nothing has changed then.
        """
        if self.ended:
            raise _broken("kind", f"{type(message).__name__} came after the last word.")
        match message:
            case Admitted():
                self.admitted = message
            case Started():
                self.started = message
            case Progress():
                self.progress = message
            case Chunk():
                self._chunk(message)
            case Done():
                self._done(message)
            case Error():
                if self.admitted is None or message.code not in FAULTS:
                    self.error = error_of(message)

    def fail(self, error: MtplxError) -> None:
        """End the stream from this side."""
        if not self.ended:
            self.error = error

    def read(self) -> tuple[Piece, int | None]:
        """The oldest unread piece, and the number up to which the broker may now send, if that moved."""
        piece = self.pieces.popleft()
        self._read += 1
        credit = self.submit.credit
        # Half a window at a time: the broker never waits for a credit that is on its way.
        if credit is None or self.ended or self._read + credit - self._granted < (credit + 1) // 2:
            return piece, None
        self._granted = self._read + credit
        return piece, self._granted

    def resume(self) -> Message:
        """What takes this stream up again on a new connection."""
        if self.admitted is None:
            return self.submit
        left = None if self.submit.credit is None else max(self._granted - self._seq, 1)
        return Resume(id=self.id, next_seq=self._seq, tokens=len(self.ids), credit=left)

    def forget_admission(self) -> None:
        """The broker lost the job before it began: it is to be submitted again, as if for the first time."""
        self.admitted = self.started = None
        self._granted = self.submit.credit or 0

    def _chunk(self, chunk: Chunk) -> None:
        if chunk.seq != self._seq:
            raise _broken("seq", f"chunk {chunk.seq} came where {self._seq} was due.")
        if chunk.first != len(self.ids):
            raise _broken("first", f"a chunk starts at token {chunk.first}; {len(self.ids)} have come.")
        if chunk.n != len(chunk.ids):
            raise _broken("n", f"a chunk says {chunk.n} tokens and has {len(chunk.ids)}.")
        if chunk.logprobs is not None and len(chunk.logprobs) != chunk.n:
            raise _broken("logprobs", f"{len(chunk.logprobs)} entries for {chunk.n} tokens.")
        self._hash.update(_uint32(chunk.ids))
        self._seq += 1
        self.ids.extend(chunk.ids)
        self._texts.append(chunk.text)
        self._logprobs.extend(chunk.logprobs or ())
        self.pieces.append(Piece(chunk.text, chunk.ids, chunk.logprobs, chunk.first))

    def _done(self, done: Done) -> None:
        if done.seq != self._seq:
            raise _broken("seq", f"DONE counts {done.seq} chunks; {self._seq} have come.")
        if done.text != self.text:
            raise _broken("text", "the answer in DONE is not that of the chunks.")
        if done.sha256 != self._hash.hexdigest():
            raise _broken("sha256", "the token ids do not match the hash in DONE.")
        self.result = Result(
            text=done.text,
            ids=tuple(self.ids),
            finish_reason=done.outcome,
            usage=done.usage,
            timings=done.timings,
            seed=done.seed,
            sha256=done.sha256,
            run=done.run,
            id=self.id,
            # All or none: entries that stand for no certain token would mislead.
            logprobs=tuple(self._logprobs) if self._logprobs and len(self._logprobs) == len(self.ids) else None,
            metadata=self.metadata,
        )


def _broken(name: str, what: str) -> ProtocolError:
    return ProtocolError(f"The broker broke the protocol: {what}", field=name)


def _uint32(ids: Sequence[int]) -> bytes:
    try:
        packed = array("I", ids)
    except OverflowError:
        raise _broken("ids", "a token id does not fit 32 bits.") from None
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
