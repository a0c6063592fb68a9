"""The journal in a file: SQLite in WAL mode, one commit a turn, flushed where an entry has to be.

Entries are packed when they are made and written by `commit`. `docs/journal.md` tells the format and the promises.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from broker import journal_open, lock
from broker import journal_rows as rows
from broker.journal import Journal, Known, NoJournal, Stored
from broker.record import Piece, Record
from mtplx.errors import JournalError
from mtplx.messages import Done, Error
from mtplx.paths import private_folder

# Frames of the log (a page each) after which they are moved into the file, and bytes it may keep beyond them.
CHECKPOINT_FRAMES: Final = 4000
LOG_BYTES: Final = 16 * 1024**2
# Frames that the log has room for from the start; when it is moved is an estimate.
ROOM_FRAMES: Final = CHECKPOINT_FRAMES * 5 // 4
_PAGE_CACHE_KIB: Final = 8192
# For an estimate of the frames: a turn that writes a token touches the page of pieces, one with jobs some more.
_FRAMES_A_COMMIT: Final = 2


def open_journal(folder: Path, durability: str) -> Journal:
    """The journal in *folder*, made if there is none; with *durability* `none` one that keeps nothing.

    Raises:
        JournalError: it is damaged, of another version, or cannot be read or written.
        LockedError: another broker holds it.
        SettingsError: the folder is not private.
    """
    if durability == "none":
        return NoJournal()
    private_folder(folder, "--state-dir")
    held = hold(folder)
    try:
        return JournalFile(folder / journal_open.NAME, held, flushes=durability == "full")
    except BaseException:
        os.close(held)
        raise


def hold(folder: Path) -> int:
    """The lock on the journal in *folder*; raises LockedError and SettingsError."""
    busy = (
        f"Another process ({{holder}}) holds the journal in {folder}; stop it, or choose another --run-dir "
        "(or --state-dir, where that is set)."
    )
    return lock.take(folder / "journal.lock", busy)


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells the file at *path* from any other; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


class JournalFile:
    """A `Journal` in the file at *path*, whose lock is *held*."""

    keeps = True

    def __init__(self, path: Path, held: int, *, flushes: bool) -> None:
        self._path, self._lock, self._flushes = path, held, flushes
        found = journal_open.check(path)
        self._live, self._buried = found.live, found.buried
        with ExitStack() as undo:
            try:
                if not path.exists():
                    journal_open.create(path)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                self._mark = os.open(journal_open.mark_of(path), flags, 0o600)
                undo.callback(os.close, self._mark)
                self._db = undo.enter_context(closing(journal_open.connect(path)))
                (mode,) = self._db.execute("PRAGMA journal_mode=WAL").fetchone()
                if mode != b"wal":
                    raise self._broken(f"its file system takes no log: {mode.decode()}")
                self._db.execute(f"PRAGMA journal_size_limit={LOG_BYTES}").close()
                self._db.execute(f"PRAGMA cache_size=-{_PAGE_CACHE_KIB}").close()
                journal_open.grow_log(self._db, ROOM_FRAMES)
                self._meta = journal_open.read_meta(self._db)
                self._files = {one: _identity(one) for one in (path, journal_open.log_of(path))}
            except (OSError, sqlite3.Error) as error:
                raise self._broken(error) from error
            undo.pop_all()
        self._next, self._limits = self._meta.admit_seq, self._meta.limits
        # About how many frames the log has, and whether they might not be on the disk although they were flushed.
        self._frames, self._doubtful = CHECKPOINT_FRAMES, False
        self._clear()

    def _clear(self) -> None:
        self._jobs: dict[int, rows.JobRow] = {}
        self._states: dict[int, rows.StateRow] = {}
        self._pieces: list[rows.PieceRow] = []
        self._kicked: dict[int, tuple[int, bool]] = {}
        self._forgotten: set[int] = set()
        self._urgent: set[int] = set()
        self._bytes = 0

    @property
    def path(self) -> str:
        """As in `Journal`."""
        return str(self._path)

    @property
    def nbytes(self) -> int:
        """As in `Journal`."""
        found = 0
        for end in ("", "-wal"):
            with suppress(OSError):
                found += Path(self.path + end).stat().st_size
        return found

    # --- entries

    def admitted(self, record: Record) -> None:
        """As in `Journal`."""
        self._job(record, record.body)
        self._urgent.add(record.admit_seq)

    def _job(self, record: Record, body: bytes) -> None:
        seq = record.admit_seq
        self._drop_job(seq)
        self._jobs[seq] = row = rows.job_row(record, body)
        self._bytes += rows.size_of(row[1], row[2])
        if seq >= self._next:
            self._next = seq + 1

    def attempt(self, record: Record) -> None:
        """As in `Journal`."""
        self._state(record.admit_seq, rows.state_of(record))
        self._urgent.add(record.admit_seq)

    def _state(self, seq: int, state: rows.State) -> None:
        self._drop_state(seq)
        self._states[seq] = row = rows.state_row(seq, state)
        self._bytes += rows.size_of(row[1])

    def piece(self, record: Record, piece: Piece) -> None:
        """As in `Journal`."""
        row = rows.piece_row(record.admit_seq, piece)
        self._pieces.append(row)
        self._bytes += rows.size_of(row[2])

    def ended(self, record: Record) -> None:
        """As in `Journal`."""
        seq, word = record.admit_seq, record.last_word
        self._state(seq, rows.state_of(record))
        if journal_open.is_poison(word):
            self._buried[record.owner, record.id] = seq
        else:
            self._job(record, b"")

    def kicked(self, record: Record) -> None:
        """As in `Journal`."""
        seq = record.admit_seq
        before = self._buried.pop((record.owner, record.id), seq)
        self._job(record, record.body)
        self._state(seq, rows.state_of(record))
        self._urgent.add(seq)
        self._forgotten.discard(seq)
        self._kicked[seq] = before, record.tokens > 0

    def forgotten(self, record: Record) -> None:
        """As in `Journal`."""
        seq = record.admit_seq
        self._drop(seq)
        self._buried.pop((record.owner, record.id), None)
        before, _ = self._kicked.pop(seq, (seq, False))
        self._forgotten |= {seq, before}

    def limits(self, vocabulary: int, context: int) -> None:
        """As in `Journal`."""
        self._limits = vocabulary, context

    def withdraw(self, record: Record) -> None:
        """As in `Journal`."""
        seq = record.admit_seq
        while True:
            self._drop(seq)
            self._forgotten.discard(seq)
            self._urgent.discard(seq)
            before, _ = self._kicked.pop(seq, (None, False))
            if before is None:
                self._buried.pop((record.owner, record.id), None)
                return
            if before == seq or before in self._live:
                self._buried[record.owner, record.id] = before
                return
            # It was taken, buried and kicked since the last commit: all of that goes.
            seq = before

    def _drop(self, seq: int) -> None:
        """Drop the rows of job *seq* that are not written."""
        self._drop_job(seq)
        self._drop_state(seq)
        if any(row[0] == seq for row in self._pieces):
            self._bytes -= sum(rows.size_of(row[2]) for row in self._pieces if row[0] == seq)
            self._pieces = [row for row in self._pieces if row[0] != seq]

    def _drop_job(self, seq: int) -> None:
        if seq in self._jobs:
            row = self._jobs.pop(seq)
            self._bytes -= rows.size_of(row[1], row[2])

    def _drop_state(self, seq: int) -> None:
        if seq in self._states:
            self._bytes -= rows.size_of(self._states.pop(seq)[1])

    @property
    def pending(self) -> bool:
        """As in `Journal`."""
        return bool(
            self._jobs or self._states or self._pieces or self._forgotten or self._limits != self._meta.limits
        )

    @property
    def pending_bytes(self) -> int:
        """As in `Journal`."""
        return self._bytes

    # --- commit

    def commit(self) -> None:
        """As in `Journal`."""
        if not self.pending:
            return
        # SQLite would write on into files that have lost their names, and are gone with the process.
        if any(_identity(one) != identity for one, identity in self._files.items()):
            raise JournalError(
                f"The journal {self._path} was moved away or replaced while the broker ran; put it back, or start "
                "the broker anew."
            )
        # What is moved into the file must be within what the mark vouches for, so a flushed commit comes first.
        full = self._frames >= CHECKPOINT_FRAMES
        flush = full or (self._flushes and bool(self._urgent))
        try:
            if self._doubtful:
                self._checkpoint()
            self._transaction(flush)
        except sqlite3.Error as error:
            raise self._failed(error) from error
        self._frames += _FRAMES_A_COMMIT + self._bytes // journal_open.PAGE_BYTES
        self._clear()
        if flush:
            self._vouch()
        if full:
            self._move_log()

    def _transaction(self, flush: bool) -> None:
        """Write the entries and, where rows of the table of jobs come or go or *flush* is asked, the meta row."""
        run, many = self._db.execute, self._db.executemany
        # One by one: set operations may walk through all jobs there are, and this is done for each token.
        new = {seq for seq in self._jobs if seq not in self._live}
        dead = self._forgotten.union(before for seq, (before, _) in self._kicked.items() if before != seq)
        gone = {seq for seq in dead if seq in self._live or seq in new}
        meta = self._meta
        if flush or new or gone or self._limits != meta.limits:
            meta = replace(
                meta,
                commits=meta.commits + 1,
                jobs=len(self._live) + len(new) - len(gone),
                admit_seq=self._next,
                limits=self._limits,
            )
        run("PRAGMA synchronous=FULL" if flush else "PRAGMA synchronous=NORMAL")
        run("BEGIN IMMEDIATE")
        if self._jobs:
            many("INSERT OR REPLACE INTO job VALUES (?, ?, ?, ?)", self._jobs.values())
        if self._states:
            many("INSERT OR REPLACE INTO state VALUES (?, ?, ?)", self._states.values())
        if self._pieces:
            many("INSERT OR REPLACE INTO piece VALUES (?, ?, ?, ?)", self._pieces)
        for seq, (before, keeps_answer) in self._kicked.items():
            self._take_over(seq, before, keeps_answer=keeps_answer)
        if dead:
            for table in ("job", "state", "piece"):
                many(f"DELETE FROM {table} WHERE admit_seq = ?", ((seq,) for seq in dead))  # noqa: S608 - three names
        if meta is not self._meta:
            run("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", rows.meta_row(meta))
        run("COMMIT")
        self._live |= new
        self._live -= gone
        self._meta = meta

    def _take_over(self, seq: int, before: int, *, keeps_answer: bool) -> None:
        """The answer of job *before* is now that of job *seq*, or nobody's."""
        if before == seq and keeps_answer:
            return
        if keeps_answer:
            moved = [rows.piece_row(seq, piece) for piece in self._read_pieces(before, 0)]
            self._db.executemany("INSERT INTO piece VALUES (?, ?, ?, ?)", moved)
        self._db.execute("DELETE FROM piece WHERE admit_seq = ?", (before,))

    def _failed(self, error: sqlite3.Error) -> JournalError:
        """Undo the transaction; what was flushed before may be lost by the disk, so the log is moved first."""
        if self._db.in_transaction:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
        self._doubt(error)
        return self._broken(error)

    def _doubt(self, error: sqlite3.Error) -> None:
        # After a flush that failed the system may forget what it could not write, and say that the next went well.
        self._doubtful = self._doubtful or getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_IOERR

    def _broken(self, error: object) -> JournalError:
        return JournalError(f"The journal {self._path} cannot be written ({error}); make room or mend its disk.")

    def _vouch(self) -> None:
        """Note in the mark that all commits so far are flushed; without it damage is only found later."""
        with suppress(OSError):
            os.pwrite(
                self._mark, journal_open.mark_bytes(journal_open.Mark(self._meta.name, self._meta.commits)), 0
            )

    def _move_log(self) -> None:
        """Move the log into the file, so that it is written from its beginning again; if not now, then later."""
        try:
            self._checkpoint()
        except sqlite3.Error as error:
            self._doubt(error)

    def _checkpoint(self) -> None:
        _, log, moved = self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        self._frames = 0
        # A reader keeps the end of the log where it is.
        self._doubtful = self._doubtful and log != moved

    # --- what is there

    def known(self) -> Known:
        """As in `Journal`."""
        return Known(limits=self._meta.limits, admit_seq=self._meta.admit_seq)

    def jobs(self) -> Iterator[Stored]:
        """As in `Journal`; raises JournalError."""
        try:
            yield from journal_open.read_jobs(self._db)
        except journal_open.READING as error:
            raise journal_open.damage(self._path, error) from error

    def pieces(self, record: Record, first: int, most: int) -> list[Piece]:
        """As in `Journal`; empty where no piece begins at *first*. Raises JournalError."""
        found: list[Piece] = []
        try:
            for piece in self._read_pieces(record.admit_seq, first):
                if not found and piece.first != first:
                    break
                found.append(piece)
                most -= len(piece.ids)
                if most <= 0:
                    break
        except journal_open.READING as error:
            raise journal_open.damage(self._path, error) from error
        return found

    def _read_pieces(self, seq: int, first: int) -> Iterator[Piece]:
        wanted = "SELECT admit_seq, first, data, sum FROM piece WHERE admit_seq = ? AND first >= ? ORDER BY first"
        return map(rows.read_piece, self._db.execute(wanted, (seq, first)))

    def last_word(self, record: Record) -> Done | Error:
        """As in `Journal`; raises JournalError."""
        seq = record.admit_seq
        wanted = "SELECT admit_seq, data, sum FROM state WHERE admit_seq = ?"
        try:
            found = self._db.execute(wanted, (seq,)).fetchone()
            word = None if found is None else rows.read_state(found).last_word
        except journal_open.READING as error:
            raise journal_open.damage(self._path, error) from error
        if word is None:
            raise journal_open.damage(self._path, f"the last word of job {seq} is missing")
        return word

    def close(self) -> None:
        """As in `Journal`; a second time changes nothing."""
        if self._lock < 0:
            return
        self._clear()
        with suppress(sqlite3.Error):
            # SQLite moves the log when it closes, and again the mark must vouch for what is moved.
            self._transaction(flush=True)
            self._vouch()
        self._db.close()
        os.close(self._mark)
        os.close(self._lock)
        self._lock = -1
