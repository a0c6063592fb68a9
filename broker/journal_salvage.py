"""A new journal out of what is whole in a damaged one.

All that is read is a copy; rows are believed by their checksums. The damaged files are moved aside under one name.
"""

from __future__ import annotations

import shutil
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from broker import journal_open
from broker import journal_rows as rows
from broker.record import Answer
from mtplx.errors import JournalError
from mtplx.messages import Done

_WORK: Final = "journal.salvage"
# Numbers between two readable parts of a table that are asked for one by one.
_MOST_ASKED: Final = 1_000_000
# A log has a header with a salt, and frames with one too: page number, salt, and the page after it.
_LOG_HEADER_BYTES: Final = 32
_FRAME_HEADER: Final = struct.Struct(">I4x8s8x")
# Of journals that earlier versions made.
_FORMER_PAGE_BYTES: Final = 4096


@dataclass(slots=True)
class Report:
    """What became of the jobs.

    waiting, ended, buried: kept. shortened: of these, answers that lost their ends. begun_anew: those that lost
    attempts and answer. lost: at least so many, or just so many where *counted*. moved_to: the name the damaged
    file has now.
    """

    waiting: int = 0
    ended: int = 0
    buried: int = 0
    shortened: int = 0
    begun_anew: int = 0
    lost: int = 0
    counted: bool = False
    moved_to: str = ""

    @property
    def kept(self) -> int:
        """All jobs that the new journal has."""
        return self.waiting + self.ended + self.buried


def salvage(folder: Path) -> Report | None:
    """Put a new journal in the place of the damaged one in *folder*, whose lock the caller holds.

    Returns None where it is whole and nothing was done.

    Raises:
        JournalError: there is none, another version made it, or the disk has no room for the new one.
    """
    path = folder / journal_open.NAME
    report, work, done = Report(), folder / _WORK, path.with_name(path.name + journal_open.SALVAGED)
    try:
        journal_open.check_plain(path)
        if not done.exists():
            if not path.exists() and not journal_open.log_of(path).exists():
                raise JournalError(f"There is no journal in {folder}; name its folder by --state-dir.")
            if _is_whole(path):
                return None
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(mode=0o700)
            report = _rebuild(path, work)
            (work / "new.db").replace(done)
            journal_open.sync_folder(folder)
        report.moved_to = _take_place(path, done)
        shutil.rmtree(work, ignore_errors=True)
    except (OSError, sqlite3.Error) as error:
        raise JournalError(
            f"The journal {path} cannot be salvaged ({error}); make room, or mend its disk."
        ) from error
    return report


def _is_whole(path: Path) -> bool:
    if not path.exists() or path.stat().st_size < journal_open.HEADER_BYTES:
        return False
    with suppress(*journal_open.READING), closing(journal_open.connect(path, read_only=True)) as connection:
        journal_open.check_layout(connection, path, salvaging=True)
    with suppress(JournalError):
        journal_open.check(path)
        return True
    return False


def _take_place(path: Path, done: Path) -> str:
    """Move the damaged files aside and the new one in; the name they have now. Goes on where it was cut short."""
    parts = ("", journal_open.LOG, journal_open.INDEX)
    number = 1
    while any(path.with_name(f"{path.name}.damaged-{number}{part}").exists() for part in ("", journal_open.LOG)):
        number += 1
    aside = path.with_name(f"{path.name}.damaged-{number}")
    for part in parts:
        with suppress(FileNotFoundError):
            path.with_name(path.name + part).replace(aside.with_name(aside.name + part))
    journal_open.mark_of(path).unlink(missing_ok=True)
    done.replace(path)
    journal_open.sync_folder(path.parent)
    return aside.name


# --- the view: a copy that SQLite can read


def _rebuild(path: Path, work: Path) -> Report:
    """Write all rows that are whole, as far as they make jobs, into `new.db` in *work*."""
    view, new, page = work / "view.db", work / "new.db", _page_bytes(path)
    _copy(path, view)
    meta = _recovered(view)
    mark = journal_open.read_mark(path)
    if not _vouched(meta, mark):
        # SQLite ends its log at the first frame that is wrong; those after it hold jobs that were promised.
        _copy(path, view)
        _apply_log(view, page)
    _mend_header(view, work, page)
    journal_open.begin(new)
    with closing(journal_open.connect(view, read_only=True)) as old, closing(journal_open.connect(new)) as target:
        known = _meta(old)
        report = _write(old, target, known)
        # Of what was lost with the end of the log nobody knows how many jobs it had.
        report.counted = _vouched(known, mark)
        target.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
    journal_open.check(new)
    return report


def _vouched(meta: rows.Meta | None, mark: journal_open.Mark | None) -> bool:
    """Whether what *meta* is of ends no earlier than the mark says."""
    return meta is not None and (mark is None or mark.name != meta.name or mark.flushed <= meta.commits)


def _copy(path: Path, view: Path) -> None:
    for part in ("", journal_open.LOG, journal_open.INDEX):
        view.with_name(view.name + part).unlink(missing_ok=True)
    view.touch(mode=0o600)
    for part in ("", journal_open.LOG):
        with suppress(FileNotFoundError):
            shutil.copyfile(path.with_name(path.name + part), view.with_name(view.name + part))


def _recovered(view: Path) -> rows.Meta | None:
    """Let SQLite recover *view*; the row about the journal then, None where it cannot be had."""
    try:
        with closing(journal_open.connect(view)) as connection:
            meta = journal_open.read_meta(connection)
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
            return meta
    except journal_open.READING:
        return None


def _page_bytes(path: Path) -> int:
    """Bytes of a page, as the file or its log says; as in a new journal where neither can be right."""
    for one, number in ((path, struct.Struct(">16xH")), (journal_open.log_of(path), struct.Struct(">8xI"))):
        if one.exists() and one.stat().st_size >= number.size:
            with one.open("rb") as file:
                (told,) = number.unpack(file.read(number.size))
            if told in (journal_open.PAGE_BYTES, _FORMER_PAGE_BYTES):
                return int(told)
    return journal_open.PAGE_BYTES


def _apply_log(view: Path, page_bytes: int) -> None:
    """Write the pages of the log into *view* by the salt of their frames alone: rows have their own checksums."""
    log = journal_open.log_of(view)
    if not log.exists():
        return
    with log.open("rb") as frames, view.open("r+b") as file:
        salt = frames.read(_LOG_HEADER_BYTES)[16:24]
        read = list(_frames(frames.read(), page_bytes))
        salts = [found for _, found, _ in read]
        if salt not in salts[:2]:
            salt = salts[0] if salts else b""
        most = view.stat().st_size // page_bytes + len(read)
        for number, found, page in read:
            if found == salt and 1 <= number <= most:
                file.seek((number - 1) * page_bytes)
                file.write(page)
    log.unlink()


def _frames(data: bytes, page_bytes: int) -> Iterator[tuple[int, bytes, memoryview]]:
    step = _FRAME_HEADER.size + page_bytes
    whole = memoryview(data)
    for at in range(0, len(data) - step + 1, step):
        number, salt = _FRAME_HEADER.unpack_from(data, at)
        yield number, salt, whole[at + _FRAME_HEADER.size : at + step]


def _mend_header(view: Path, work: Path, page_bytes: int) -> None:
    """Give *view* the first page of an empty journal, which has the tables where every journal has them."""
    empty = work / "empty.db"
    journal_open.begin(empty, page_bytes)
    with empty.open("rb") as file:
        first = bytearray(file.read(page_bytes))
    pages = -(-max(view.stat().st_size, empty.stat().st_size) // page_bytes)
    # No log (18), as many pages as there are (28), none of them free (32, 36).
    first[18:20] = b"\x01\x01"
    first[28:40] = struct.pack(">III", pages, 0, 0)
    for part in (journal_open.LOG, journal_open.INDEX):
        view.with_name(view.name + part).unlink(missing_ok=True)
    with view.open("r+b") as file:
        file.write(first)
        file.truncate(pages * page_bytes)


# --- rows


def _write(old: sqlite3.Connection, target: sqlite3.Connection, known: rows.Meta | None) -> Report:
    report, highest, ids = Report(), -1, set[tuple[Any, ...]]()
    found, damaged = _jobs(old)
    target.execute("PRAGMA synchronous=FULL")
    target.execute("BEGIN")
    for row in reversed(found):
        highest = max(highest, row[0])
        owned = rows.check_job(row)[:2]
        if owned in ids or not _write_job(old, target, row, report):
            damaged += owned not in ids
            continue
        ids.add(owned)
    meta = journal_open.read_meta(target)
    meta = replace(meta, commits=1, jobs=report.kept, admit_seq=highest + 1)
    if known is not None:
        meta = replace(meta, admit_seq=max(known.admit_seq, highest + 1), limits=known.limits)
    target.execute("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", rows.meta_row(meta))
    target.execute("COMMIT")
    report.lost = max(damaged, known.jobs - report.kept if known else 0)
    return report


def _meta(old: sqlite3.Connection) -> rows.Meta | None:
    try:
        return journal_open.read_meta(old)
    except journal_open.READING:
        return None


def _jobs(old: sqlite3.Connection) -> tuple[list[rows.JobRow], int]:
    """Rows of the table of jobs that are whole, by number, and how many others were met."""
    found: dict[int, rows.JobRow] = {}
    bad: set[int] = set()

    def take(more: str, *given: int) -> bool:
        """Take what can be read; whether that was all."""
        try:
            for row in old.execute(f"SELECT admit_seq, head, body, sum FROM job {more}", given):  # noqa: S608 - ours
                if type(row[0]) is int:
                    _judge(row, found, bad)
        except journal_open.READING:
            return False
        return True

    if not take("ORDER BY admit_seq"):
        low = max(found.keys() | bad, default=-1)
        take("WHERE admit_seq > ? ORDER BY admit_seq DESC", low)
        high = min((seq for seq in found.keys() | bad if seq > low), default=low + 1000)
        for seq in range(low + 1, min(high, low + _MOST_ASKED)):
            take("WHERE admit_seq = ?", seq)
    return [found[seq] for seq in sorted(found)], len(bad - found.keys())


def _judge(row: rows.JobRow, found: dict[int, rows.JobRow], bad: set[int]) -> None:
    try:
        rows.check_job(row)
    except rows.DamagedError:
        bad.add(row[0])
    else:
        found[row[0]] = row


def _write_job(old: sqlite3.Connection, target: sqlite3.Connection, row: rows.JobRow, report: Report) -> bool:
    """Write one job with its state and answer, as far as they go; False where what is left makes no job."""
    seq, has_body = row[0], bool(row[2])
    answer, pieces = _answer(old, seq)
    state = _state(old, seq)
    if state is None or (state is rows.FRESH and answer.tokens):
        # Nobody knows who drew these tokens, or whether the job has ended: it is as if it had just come.
        report.begun_anew += has_body
        state, answer, pieces = rows.FRESH, Answer(), []
    word, buried = state.last_word, journal_open.is_poison(state.last_word)
    if (isinstance(word, Done) and answer.tokens != state.tokens) or ((word is None or buried) and not has_body):
        return False
    short = answer.tokens < state.tokens
    report.shortened += short
    if word is None:
        report.waiting += 1
    elif buried:
        report.buried += 1
    else:
        report.ended += 1
    target.execute("INSERT INTO job VALUES (?, ?, ?, ?)", row)
    if state is not rows.FRESH:
        told = state._replace(tokens=answer.tokens if word else min(state.tokens, answer.tokens))
        target.execute("INSERT INTO state VALUES (?, ?, ?)", rows.state_row(seq, told))
    target.executemany("INSERT INTO piece VALUES (?, ?, ?, ?)", pieces)
    return True


def _state(old: sqlite3.Connection, seq: int) -> rows.State | None:
    """The state of a job; None where it is damaged."""
    try:
        row = old.execute("SELECT admit_seq, data, sum FROM state WHERE admit_seq = ?", (seq,)).fetchone()
        return rows.FRESH if row is None else rows.read_state(row)
    except journal_open.READING:
        return None


def _answer(old: sqlite3.Connection, seq: int) -> tuple[Answer, list[rows.PieceRow]]:
    """The beginning of an answer that is whole, and its rows."""
    answer, kept = Answer(), []
    with suppress(*journal_open.READING):
        for row in old.execute(
            "SELECT admit_seq, first, data, sum FROM piece WHERE admit_seq = ? ORDER BY first", (seq,)
        ):
            piece = rows.read_piece(row)
            if piece.first != answer.tokens:
                break
            answer.add(piece)
            kept.append(row)
    return answer, kept
