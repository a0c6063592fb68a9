"""The rows of the journal's tables: how they are packed, and the checksum that each carries.

SQLite checks none of the bytes of a row in its main file: a CRC-32 over table, key and columns stands in each row.
All columns but keys and checksums are msgpack, or the bytes of a job as they came.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, NamedTuple
from zlib import crc32

import msgpack

from broker.journal import Stored
from broker.record import Answer, Piece, Record
from mtplx import wire
from mtplx.errors import ProtocolError
from mtplx.messages import MAGIC, TO_CLIENT, Done, Error

APPLICATION_ID: Final = int.from_bytes(b"MTXJ", "big")
# The layout of the tables below. A file of another one is refused.
VERSION: Final = 1
TABLES: Final = {
    "job": "CREATE TABLE job (admit_seq INTEGER PRIMARY KEY, head BLOB, body BLOB, sum INTEGER)",
    "state": "CREATE TABLE state (admit_seq INTEGER PRIMARY KEY, data BLOB, sum INTEGER)",
    "piece": "CREATE TABLE piece (admit_seq INTEGER, first INTEGER, data BLOB, sum INTEGER, "
    "PRIMARY KEY (admit_seq, first)) WITHOUT ROWID",
    "meta": "CREATE TABLE meta (one INTEGER PRIMARY KEY, data BLOB, sum INTEGER)",
}
READ_JOBS: Final = "SELECT admit_seq, head, body, sum FROM job ORDER BY admit_seq"
READ_STATES: Final = "SELECT admit_seq, data, sum FROM state ORDER BY admit_seq"
READ_PIECES: Final = "SELECT admit_seq, first, data, sum FROM piece ORDER BY admit_seq, first"

# What a row of each table is, besides its bytes: one row read as another's has a wrong checksum.
_JOB, _STATE, _PIECE, _META = (crc32(name) for name in (b"job", b"state", b"piece", b"meta"))
_KEY: Final = struct.Struct("<q").pack
_KEYS: Final = struct.Struct("<qq").pack
_PACK: Final = msgpack.Packer().pack
# Wall time this far away never comes; deadlines can be asked for beyond what 64 bits hold.
_NEVER: Final = 2**63 - 1
# What a row costs in memory beside its bytes, about.
ROW_BYTES: Final = 300

JobRow = tuple[int, bytes, bytes, int]
StateRow = tuple[int, bytes, int]
PieceRow = tuple[int, int, bytes, int]


class DamagedError(ValueError):
    """A row is not what was written; the text says which."""


class State(NamedTuple):
    """What changes of a job; as in `Stored`. tokens: of the answer when this was written."""

    attempts: int
    barren: int
    model: str
    model_hash: str
    build_hash: str
    exact: bool
    tokens: int
    last_word: Done | Error | None
    ended_ns: int | None


FRESH: Final = State(0, 0, "", "", "", exact=True, tokens=0, last_word=None, ended_ns=None)


@dataclass(frozen=True, slots=True)
class Meta:
    """The one row about the whole journal.

    name: drawn when the file was made. commits: those that wrote this row. jobs: rows of that table.
    admit_seq: the next. limits: vocabulary and context of the last READY. program: which made the file.
    """

    name: bytes
    program: str
    commits: int = 0
    jobs: int = 0
    admit_seq: int = 0
    limits: tuple[int, int] | None = None


def job_row(record: Record, body: bytes) -> JobRow:
    """What does not change of a job, and its *body*, which goes when it has ended."""
    seq = record.admit_seq
    ttl, deadline = record.ttl_ns, record.deadline_ns
    head = _PACK(
        (
            record.id,
            record.owner,
            record.digest,
            record.headers,
            record.seed,
            record.finish,
            record.admitted.wall_ns,
            None if ttl is None else min(ttl, _NEVER),
            None if deadline is None else min(deadline, _NEVER),
        )
    )
    return seq, head, body, crc32(body, crc32(head, crc32(_KEY(seq), _JOB)))


def state_row(seq: int, state: State) -> StateRow:
    """What changes of a job."""
    word = None if state.last_word is None else [state.last_word.KIND, *wire.encode(state.last_word)[2:]]
    data = _PACK((*state[:7], word, state.ended_ns))
    return seq, data, crc32(data, crc32(_KEY(seq), _STATE))


def state_of(record: Record) -> State:
    """The state of *record* now."""
    return State(
        record.attempts,
        record.barren,
        record.model,
        record.model_hash,
        record.build_hash,
        record.exact,
        record.tokens,
        record.last_word,
        None if record.ended is None else record.ended.wall_ns,
    )


def piece_row(seq: int, piece: Piece) -> PieceRow:
    """One piece of an answer."""
    data = _PACK(piece[1:])
    return seq, piece.first, data, crc32(data, crc32(_KEYS(seq, piece.first), _PIECE))


def meta_row(meta: Meta) -> tuple[int, bytes, int]:
    """The row about the whole journal."""
    data = _PACK((meta.name, meta.program, meta.commits, meta.jobs, meta.admit_seq, meta.limits))
    return 1, data, crc32(data, crc32(_KEY(1), _META))


def read_meta(row: tuple[int, bytes, int]) -> Meta:
    """The reverse of `meta_row`; raises DamagedError."""
    _, data, checksum = row
    if type(data) is not bytes or crc32(data, crc32(_KEY(1), _META)) != checksum:
        raise DamagedError("the row about the journal")
    return Meta(*_unpack(data))


def read_piece(row: PieceRow) -> Piece:
    """The reverse of `piece_row`; raises DamagedError."""
    seq, first, data, checksum = row
    if type(data) is not bytes or crc32(data, crc32(_KEYS(seq, first), _PIECE)) != checksum:
        raise DamagedError(f"token {first} of job {seq}")
    return Piece(first, *_unpack(data))


def read_state(row: StateRow) -> State:
    """The reverse of `state_row`; raises DamagedError."""
    seq, data, checksum = row
    if type(data) is not bytes or crc32(data, crc32(_KEY(seq), _STATE)) != checksum:
        raise DamagedError(f"the state of job {seq}")
    *plain, word, ended_ns = _unpack(data)
    return State._make((*plain, None if word is None else _word(seq, word), ended_ns))


def check_job(row: JobRow) -> tuple[Any, ...]:
    """The head of a job's row; raises DamagedError."""
    seq, head, body, checksum = row
    if type(head) is not bytes or type(body) is not bytes:
        raise DamagedError(f"job {seq}")
    if crc32(body, crc32(head, crc32(_KEY(seq), _JOB))) != checksum:
        raise DamagedError(f"job {seq}")
    return _unpack(head)


def _unpack(data: bytes) -> tuple[Any, ...]:
    # The checksum held, so these are the bytes that were written.
    return msgpack.unpackb(data, use_list=False, strict_map_key=False)  # type: ignore[no-any-return]


def _word(seq: int, packed: tuple[Any, ...]) -> Done | Error:
    kind, *rest = packed
    try:
        word = wire.decode([MAGIC, bytes([kind]), *rest], TO_CLIENT)
    except ProtocolError as error:
        raise DamagedError(f"the last word of job {seq}: {error.message}") from error
    assert isinstance(word, Done | Error)
    return word


def read_jobs(jobs: Iterable[JobRow], states: Iterable[StateRow], pieces: Iterable[PieceRow]) -> Iterator[Stored]:
    """The jobs in the three tables, each sorted by its key; raises DamagedError at the first row that is wrong."""
    waiting = _Ahead(states)
    answers = _Ahead((seq, list(rows)) for seq, rows in groupby(pieces, lambda row: row[0]))
    for row in jobs:
        seq = row[0]
        state = waiting.at(seq)
        yield stored(row, read_state(state) if state else FRESH, answer_of(answers.at(seq)))
    for left in (waiting, answers):
        if left.next is not None:
            raise DamagedError(f"job {left.next[0]}, which is missing")


def answer_of(found: tuple[int, list[PieceRow]] | None) -> Answer:
    """Tokens and bytes of the answer whose rows these are, without the pieces; raises DamagedError."""
    answer = Answer()
    for row in found[1] if found else ():
        piece = read_piece(row)
        if piece.first != answer.tokens:
            raise DamagedError(f"token {answer.tokens} of job {row[0]}, which is missing")
        answer.add(piece)
        answer.pieces.clear()
    return answer


def stored(row: JobRow, state: State, answer: Answer) -> Stored:
    """One job out of its rows; raises DamagedError."""
    seq = row[0]
    job, owner, digest, headers, seed, finish, admitted_ns, ttl_ns, deadline_ns = check_job(row)
    ended = state.last_word is not None
    if answer.tokens < state.tokens or (ended and answer.tokens != state.tokens):
        raise DamagedError(f"the end of the answer of job {seq}")
    return Stored(
        admit_seq=seq,
        id=job,
        owner=owner,
        digest=digest,
        body=row[2],
        headers=headers,
        seed=seed,
        finish=finish,
        admitted_ns=admitted_ns,
        ttl_ns=ttl_ns,
        deadline_ns=deadline_ns,
        attempts=state.attempts,
        # Tokens came after the attempt was counted.
        barren=0 if answer.tokens > state.tokens else state.barren,
        model=state.model,
        model_hash=state.model_hash,
        build_hash=state.build_hash,
        exact=state.exact,
        tokens=answer.tokens,
        answer_bytes=answer.nbytes,
        last_word=state.last_word,
        ended_ns=state.ended_ns,
    )


class _Ahead:
    """Rows sorted by a key that comes first, asked for by growing keys."""

    def __init__(self, rows: Iterable[tuple[Any, ...]]) -> None:
        self._rows = iter(rows)
        self.next = next(self._rows, None)

    def at(self, key: int) -> Any:
        """The row of *key*, or None; raises DamagedError where one of a smaller key was not asked for."""
        row = self.next
        if row is None or row[0] > key:
            return None
        if row[0] < key:
            raise DamagedError(f"job {row[0]}, which is missing")
        self.next = next(self._rows, None)
        return row


def size_of(*columns: bytes) -> int:
    """About what a row of these takes in memory, in bytes."""
    return ROW_BYTES + sum(map(len, columns))
