"""A journal in memory that can be cut off as a kill or a power loss would, and that can be told to fail."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from broker.journal import Known, Stored
from broker.record import Answer, Piece, Record
from mtplx.errors import JournalError
from mtplx.messages import Done, Error

FLUSHED = ("admitted", "attempt", "kicked")


@dataclass
class Entry:
    """What one call said, with copies of all that the record may change later."""

    kind: str
    key: tuple[str, bytes]
    admit_seq: int
    what: Any = None


@dataclass
class Kept:
    """One job: its fields as `Stored` has them, what the last attempt began behind, and the pieces."""

    stored: Stored
    behind: int = 0
    answer: Answer = field(default_factory=Answer)


class MemoryJournal:
    """Applies each commit to `kept`, and remembers how far the log was flushed."""

    keeps = True
    path = "memory"

    def __init__(self, log: list[Entry] | None = None, *, durability: str = "full") -> None:
        self.log: list[Entry] = []
        self.flushed = 0
        self.durability = durability
        self.fails = self.unreadable = False
        self.commits = 0
        self.kept: dict[tuple[str, bytes], Kept] = {}
        self._known = Known()
        self._pending: list[Entry] = []
        for entry in log or []:
            self._apply(entry)
        self.flushed = len(self.log)

    def after(self, *, power_loss: bool) -> MemoryJournal:
        """The journal as the next process finds it."""
        return MemoryJournal(self.log[: self.flushed] if power_loss else self.log, durability=self.durability)

    # --- entries

    def _add(self, kind: str, record: Record | None, what: Any = None) -> None:
        key, seq = (record.key, record.admit_seq) if record else (("", b""), -1)
        self._pending.append(Entry(kind, key, seq, what))

    def admitted(self, record: Record) -> None:
        self._add("admitted", record, _stored(record))

    def attempt(self, record: Record) -> None:
        self._add("attempt", record, (_counts(record), record.tokens))

    def piece(self, record: Record, piece: Piece) -> None:
        self._add("piece", record, piece)

    def ended(self, record: Record) -> None:
        buried = isinstance(record.last_word, Error) and record.last_word.code == "E_POISON"
        word = copy.deepcopy(record.last_word)
        self._add("ended", record, (word, record.ended.wall_ns, buried, _counts(record)))

    def kicked(self, record: Record) -> None:
        limits = {name: getattr(record, name) for name in ("finish", "ttl_ns", "deadline_ns")}
        self._add("kicked", record, {**_counts(record), **limits})

    def forgotten(self, record: Record) -> None:
        self._add("forgotten", record)

    def limits(self, vocabulary: int, context: int) -> None:
        self._add("limits", None, (vocabulary, context))

    def withdraw(self, record: Record) -> None:
        self._pending = [one for one in self._pending if one.admit_seq != record.admit_seq]

    @property
    def pending(self) -> bool:
        return bool(self._pending)

    @property
    def pending_bytes(self) -> int:
        return 1000 * len(self._pending)

    @property
    def nbytes(self) -> int:
        return 100 * len(self.log)

    def commit(self) -> None:
        if self.fails:
            raise JournalError("The disk is full.")
        self.commits += 1
        taken, self._pending = self._pending, []
        for entry in taken:
            self._apply(entry)
        if self.durability == "full" and any(entry.kind in FLUSHED for entry in taken):
            self.flushed = len(self.log)

    def _apply(self, entry: Entry) -> None:
        self.log.append(entry)
        if entry.kind == "limits":
            self._known = replace(self._known, limits=entry.what)
        elif entry.kind == "admitted":
            self.kept[entry.key] = Kept(entry.what)
        elif entry.kind == "forgotten":
            del self.kept[entry.key]
        else:
            self._change(self.kept[entry.key], entry)
        self._known = replace(self._known, admit_seq=max(self._known.admit_seq, entry.admit_seq + 1))

    def _change(self, kept: Kept, entry: Entry) -> None:
        if entry.kind == "piece":
            assert entry.what.first == kept.answer.tokens, "the pieces have a gap"
            kept.answer.add(entry.what)
        elif entry.kind == "attempt":
            counts, kept.behind = entry.what
            kept.stored = replace(kept.stored, **counts)
        elif entry.kind == "ended":
            word, ended_ns, buried, counts = entry.what
            assert kept.stored.last_word is None, "two last words"
            body = kept.stored.body if buried else b""
            kept.stored = replace(kept.stored, last_word=word, ended_ns=ended_ns, body=body, **counts)
        elif entry.kind == "kicked":
            kept.behind = kept.answer.tokens
            kept.stored = replace(
                kept.stored, last_word=None, ended_ns=None, admit_seq=entry.admit_seq, **entry.what
            )

    # --- reading

    def known(self) -> Known:
        return self._known

    def jobs(self) -> Iterator[Stored]:
        for kept in sorted(self.kept.values(), key=lambda one: one.stored.admit_seq):
            barren = 0 if kept.answer.tokens > kept.behind else kept.stored.barren
            yield replace(kept.stored, tokens=kept.answer.tokens, answer_bytes=kept.answer.nbytes, barren=barren)

    def pieces(self, record: Record, first: int, most: int) -> list[Piece]:
        if self.unreadable:
            raise JournalError("The disk cannot be read.")
        return self.kept[record.key].answer.window(first, most)

    def last_word(self, record: Record) -> Done | Error:
        if self.unreadable:
            raise JournalError("The disk cannot be read.")
        word = self.kept[record.key].stored.last_word
        assert word is not None
        return word

    def close(self) -> None:
        self._pending.clear()


def _counts(record: Record) -> dict[str, Any]:
    names = ("attempts", "barren", "model", "model_hash", "build_hash", "exact")
    return {name: getattr(record, name) for name in names}


def _stored(record: Record) -> Stored:
    same = ("admit_seq", "id", "owner", "digest", "body", "headers", "seed", "finish", "ttl_ns", "deadline_ns")
    return Stored(
        **{name: getattr(record, name) for name in same},
        **_counts(record),
        admitted_ns=record.admitted.wall_ns,
        tokens=0,
        answer_bytes=0,
        last_word=None,
        ended_ns=None,
    )
