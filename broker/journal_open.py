"""How a journal is made, and how it is looked at before it is believed.

Beside `journal.db` lies `journal.mark`: the number of the last flushed commit, written after its flush and not
flushed itself. SQLite takes the first frame of its log that is wrong for the end of the log, so damage there would
lose jobs in silence: a journal that has fewer commits than its mark says is refused.
"""

from __future__ import annotations

import os
import re
import secrets
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Final, NamedTuple
from zlib import crc32

from broker import journal_rows as rows
from broker.journal import Stored
from mtplx import __version__
from mtplx.errors import JournalError
from mtplx.messages import Done, Error

NAME: Final = "journal.db"
# SQLite's words for the log and its index.
LOG, INDEX = "-wal", "-shm"
# A flush writes the pages that changed; a token, a state and most jobs need no more.
PAGE_BYTES: Final = 1024
# A complete journal that a salvage made, before it has taken its place.
SALVAGED: Final = ".salvaged"
_MARK: Final = struct.Struct("<4s16sQI")
_MARK_MAGIC: Final = b"MTXM"
HEADER_BYTES: Final = 100
# How long the loop may stand still while a tool of somebody else holds the file, and a look at all of it may wait.
_LOOP_S, _START_S = 0.5, 5.0
_SYSTEM: Final = frozenset(
    (
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
    )
)
# What a damaged file makes SQLite, its module and our checks say: numbers out of range, sizes no memory holds.
READING: Final = (sqlite3.Error, OSError, MemoryError, OverflowError, UnicodeError, rows.DamagedError)


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """A connection in autocommit, which neither checkpoints by itself nor trusts the file's schema.

    Reading only, it leaves file and log as they are, also when it is closed.
    """
    where = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rw'}"
    connection = sqlite3.connect(where, uri=True, isolation_level=None, timeout=_START_S if read_only else _LOOP_S)
    # Whatever text there is may be damaged.
    connection.text_factory = bytes
    for pragma in (
        "trusted_schema=OFF",
        "cell_size_check=ON",
        "mmap_size=0",
        "wal_autocheckpoint=0",
        "fullfsync=1",
        "checkpoint_fullfsync=1",
        # Where prompts were, zeros are written only into pages that are written anyway.
        "secure_delete=FAST",
    ):
        connection.execute(f"PRAGMA {pragma}").close()
    return connection


def create(path: Path) -> None:
    """Make an empty journal at *path*, whole or not at all.

    Raises:
        OSError, sqlite3.Error: it cannot be written.
    """
    made = path.with_name(f"{path.name}.new")
    begin(made)
    made.replace(path)
    sync_folder(path.parent)


def begin(made: Path, page_bytes: int = PAGE_BYTES) -> None:
    """Make an empty journal at *made*, in place of whatever a start that was cut short has left there."""
    for suffix in ("", "-journal", LOG, INDEX):
        made.with_name(made.name + suffix).unlink(missing_ok=True)
    os.close(os.open(made, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    with closing(connect(made)) as connection:
        connection.execute(f"PRAGMA page_size={page_bytes}")
        connection.execute(f"PRAGMA application_id={rows.APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={rows.VERSION}")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("BEGIN")
        for sql in rows.TABLES.values():
            connection.execute(sql)
        meta = rows.Meta(secrets.token_bytes(16), __version__)
        connection.execute("INSERT INTO meta VALUES (?, ?, ?)", rows.meta_row(meta))
        connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode=WAL")


def grow_log(connection: sqlite3.Connection, frames: int) -> None:
    """Give the log room for *frames*, in a transaction that is taken back; where there is none it stays short.

    A flush of a file that grows writes its new size too, which takes several times as long.
    """
    with suppress(sqlite3.Error):
        (cached,) = connection.execute("PRAGMA cache_size").fetchone()
        connection.execute("PRAGMA cache_size=10").close()
        connection.execute("BEGIN IMMEDIATE").close()
        try:
            # Pages that the cache cannot hold go to the log before there is a commit.
            connection.execute("CREATE TABLE filler (data BLOB)").close()
            connection.execute("INSERT INTO filler VALUES (zeroblob(?))", (frames * PAGE_BYTES,)).close()
        finally:
            connection.execute("ROLLBACK").close()
            connection.execute(f"PRAGMA cache_size={cached}").close()


def sync_folder(folder: Path) -> None:
    """Flush the names in *folder*."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


class Found(NamedTuple):
    """What a journal holds: numbers of its jobs, buried ones by owner and id; other ended ones, and tokens."""

    meta: rows.Meta | None
    live: set[int]
    buried: dict[tuple[str, bytes], int]
    ended: int
    tokens: int


def check(path: Path) -> Found:
    """Look at all of the journal at *path*, and change nothing; a journal that is not there is empty.

    Raises:
        JournalError: it is damaged, another program or version made it, or it cannot be read.
    """
    try:
        if not _is_there(path):
            return Found(None, set(), {}, 0, 0)
        # Before the snapshot is taken: beside a running broker the mark goes ahead.
        mark = read_mark(path)
        with closing(connect(path, read_only=True)) as connection:
            connection.execute("BEGIN")
            check_layout(connection, path)
            return _check_content(connection, mark)
    except READING as error:
        raise damage(path, error) from error


def damage(path: Path, error: object) -> JournalError:
    """The one sentence about a journal that is damaged, or cannot be read."""
    if isinstance(error, OSError) or getattr(error, "sqlite_errorcode", 0) & 0xFF in _SYSTEM:
        return JournalError(f"The journal {path} cannot be read ({error}); make room, or mend its disk.")
    return JournalError(
        f"The journal {path} is damaged ({error}); `mtplx journal salvage` saves what is whole into a new one."
    )


def check_plain(path: Path) -> None:
    """Refuse the journal at *path* where one of its files is a link, a folder, or a pipe, which nobody may fill.

    Raises:
        JournalError: naming the file.
    """
    for one in (path, log_of(path), path.with_name(path.name + INDEX), mark_of(path)):
        if os.path.lexists(one) and (one.is_symlink() or not one.is_file()):
            raise JournalError(f"{one} is no plain file; move it away, or choose another --state-dir.")


def _is_there(path: Path) -> bool:
    check_plain(path)
    if path.with_name(path.name + SALVAGED).exists():
        raise JournalError(f"A salvage of the journal {path} was cut short; run `mtplx journal salvage` again.")
    # SQLite takes an empty file for a new database, and throws its log away.
    beside = [one for one in (log_of(path), mark_of(path)) if one.exists()]
    if not path.exists():
        if beside:
            raise JournalError(
                f"The journal {path} is missing beside {beside[0].name}; put it back, or move "
                f"{' and '.join(one.name for one in beside)} away to begin an empty one."
            )
        return False
    if path.stat().st_size < HEADER_BYTES:
        raise damage(path, "it is cut short")
    return True


def check_layout(connection: sqlite3.Connection, path: Path, *, salvaging: bool = False) -> None:
    """Refuse the journal of another version; where *salvaging*, one that may as well be damaged counts as that.

    Raises:
        JournalError: another version made it.
        DamagedError, sqlite3.Error: it is damaged.
    """
    kind, version = _number(connection, "application_id"), _number(connection, "user_version")
    schema = connection.execute("SELECT name, sql FROM sqlite_schema ORDER BY rowid").fetchall()
    same = schema == [(name.encode(), sql.encode()) for name, sql in rows.TABLES.items()]
    if kind == rows.APPLICATION_ID and version != rows.VERSION and (not same or version > rows.VERSION):
        told = (
            f"The journal {path} has layout {version}, and this version of mtplx ({__version__}) reads layout "
            f"{rows.VERSION}; run the version that made it, or choose another --state-dir."
        )
        if not same or _made_later(read_meta(connection).program):
            raise JournalError(told)
        if not salvaging:
            raise JournalError(f"{told} If none did, its header is damaged, and `mtplx journal salvage` mends it.")
    if (kind, version, same) != (rows.APPLICATION_ID, rows.VERSION, True):
        raise rows.DamagedError("its header and tables are not those of a journal")


def _made_later(program: str) -> bool:
    """Whether *program*, a version of mtplx, came after this one."""
    made, own = ([int(part) for part in re.findall(r"\d+", text)] for text in (program, __version__))
    return made > own


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    return int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])


def _check_content(connection: sqlite3.Connection, mark: Mark | None) -> Found:
    meta = read_meta(connection)
    if mark is not None and mark.name == meta.name and mark.flushed > meta.commits:
        raise rows.DamagedError(f"it ends at commit {meta.commits}, and commit {mark.flushed} was flushed")
    (said,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if said != b"ok":
        raise rows.DamagedError(said.decode(errors="replace").replace("\n", " "))
    live, ids, buried, ended, tokens = set(), set(), {}, 0, 0
    for job in read_jobs(connection):
        live.add(job.admit_seq)
        ids.add((job.owner, job.id))
        tokens += job.tokens
        if is_poison(job.last_word):
            buried[job.owner, job.id] = job.admit_seq
        elif job.last_word is not None:
            ended += 1
    if len(live) != meta.jobs or len(ids) != meta.jobs:
        raise rows.DamagedError(f"{meta.jobs} jobs were written, and {len(live)} are there with {len(ids)} ids")
    if live and max(live) >= meta.admit_seq:
        raise rows.DamagedError(f"job {max(live)} is beyond the last that was admitted")
    return Found(meta, live, buried, ended, tokens)


def is_poison(word: Done | Error | None) -> bool:
    """Whether a job with this last word is buried."""
    return isinstance(word, Error) and word.code == "E_POISON"


def read_meta(connection: sqlite3.Connection) -> rows.Meta:
    """The row about the whole journal; raises DamagedError and sqlite3.Error."""
    found = connection.execute("SELECT one, data, sum FROM meta").fetchall()
    if len(found) != 1:
        raise rows.DamagedError("the row about the journal is missing")
    return rows.read_meta(found[0])


def read_jobs(connection: sqlite3.Connection) -> Iterator[Stored]:
    """All jobs, by `admit_seq`; raises DamagedError and sqlite3.Error."""
    # A statement that is left open keeps the log from being begun anew.
    with ExitStack() as opened:
        read = [
            opened.enter_context(closing(connection.execute(sql)))
            for sql in (rows.READ_JOBS, rows.READ_STATES, rows.READ_PIECES)
        ]
        yield from rows.read_jobs(*read)


def log_of(path: Path) -> Path:
    """SQLite's log of the journal at *path*."""
    return path.with_name(path.name + LOG)


def mark_of(path: Path) -> Path:
    """The mark of the journal at *path*."""
    return path.with_suffix(".mark")


class Mark(NamedTuple):
    """What the mark says: the journal's name, and its last flushed commit."""

    name: bytes
    flushed: int


def read_mark(path: Path) -> Mark | None:
    """The mark of the journal at *path*; None where there is none, or only a damaged one."""
    try:
        data = mark_of(path).read_bytes()
    except OSError:
        return None
    if len(data) != _MARK.size:
        return None
    magic, name, flushed, checksum = _MARK.unpack(data)
    return Mark(name, flushed) if magic == _MARK_MAGIC and crc32(data[:-4]) == checksum else None


def mark_bytes(mark: Mark) -> bytes:
    """The file of *mark*."""
    data = _MARK.pack(_MARK_MAGIC, *mark, 0)[:-4]
    return data + struct.pack("<I", crc32(data))
