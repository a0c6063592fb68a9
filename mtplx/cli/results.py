"""The results file of `mtplx batch`: checked in full before a byte of it changes.

A result line is {"line", "digest", "id"?, "result"} or {"line", "digest", "id"?, "error"}; `digest` is
the SHA-256 of the job's line, so that a changed input is noticed when the work is taken up again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, NamedTuple, Self

from mtplx.errors import SettingsError
from mtplx.paths import exists

# How every result line begins: a first line that was cut off is told by it from a file of somebody else's.
BEGINS: Final = b'{"line": '

Line = tuple[int, bytes]


class Kept(NamedTuple):
    """A result of an earlier run: its line, whether it is an error, and whether its job has changed."""

    line: bytes
    failed: bool
    edited: bool


class ResultsFile:
    """The results at *path* for the jobs of *source*. Enter it to read and check; nothing changes before `begin`.

    kept: what earlier runs left, one for each of the first jobs.
    """

    def __init__(self, path: Path, source: Path) -> None:
        self.path = path
        self.kept: list[Kept] = []
        self._source = source
        self._open = ExitStack()
        self._file: IO[bytes] | None = None
        self._size = 0

    def take_up(self, lines: list[Line]) -> None:
        """Lock and check what is there for *lines*, the jobs.

        Raises:
            SettingsError: it cannot be written, or holds anything but results of these jobs.
        """
        if not exists(self.path):
            if not os.access(self.path.parent, os.W_OK):
                raise SettingsError(f"-o {self.path}: there is no folder {self.path.parent} to write into.")
            return
        if self.path.samefile(self._source):
            raise SettingsError(f"-o {self.path} is the file of the jobs; name another one for the results.")
        data = self._opened("r+b").read()
        self._size = data.rfind(b"\n") + 1
        self.kept = kept_of(self.path, data, lines, self._source)

    def begin(self) -> None:
        """Make the file ready for more: a record that was cut off goes.

        Raises:
            SettingsError: it cannot be written.
        """
        file = self._file or self._opened("x+b")
        file.truncate(self._size)
        file.seek(self._size)

    def append(self, record: dict[str, Any]) -> None:
        """Write one record; it has left this process when this returns."""
        if self._file is None:
            raise RuntimeError("begin() comes first.")
        self._file.write(line_of(record))
        self._file.flush()

    def replace(self, places: list[int], records: Iterator[dict[str, Any]]) -> None:
        """Put *records* in the *places* of `kept`.

        The old file stays as it is until the new one stands beside it, whole. Ctrl-C, or a broker that is gone,
        keeps every record: the new one where there was time for it, else the old one.
        """
        target = self.path.resolve()
        number, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        renewed = self._open.enter_context(os.fdopen(number, "w+b"))
        # The lock goes over with the name.
        fcntl.flock(renewed, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.copymode(target, name)
        lines = [old.line for old in self.kept]
        try:
            for place in places:
                lines[place] = line_of(next(records))
        finally:
            renewed.writelines(lines)
            renewed.flush()
            os.fsync(renewed.fileno())
            Path(name).replace(target)
        self._file = renewed

    def _opened(self, mode: str) -> IO[bytes]:
        try:
            file: IO[bytes] = self._open.enter_context(self.path.open(mode))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, FileExistsError):
            raise SettingsError(f"Another batch writes to {self.path}.") from None
        except OSError as error:
            raise SettingsError(f"-o {self.path} cannot be written: {error.strerror}.") from None
        self._file = file
        return file

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()


def line_of(record: dict[str, Any]) -> bytes:
    """A record as its line; always UTF-8, whatever the input's strings hold."""
    try:
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        # Half a surrogate pair, which JSON can escape and UTF-8 cannot hold.
        return json.dumps(record).encode() + b"\n"


def kept_of(path: Path, data: bytes, lines: list[Line], source: Path) -> list[Kept]:
    """The whole records of *data*, the content of *path*.

    Raises:
        SettingsError: they are not the results of *lines*, in order; only a failed job's line may have changed.
    """
    records = data.splitlines(keepends=True)
    torn = records.pop() if records and not records[-1].endswith(b"\n") else b""
    if torn and not records and not (torn.startswith(BEGINS) or BEGINS.startswith(torn)):
        raise _no_result(path, 1, torn)
    kept = [
        _kept(path, place, record, lines[place - 1] if place <= len(lines) else None, source)
        for place, record in enumerate(records, 1)
    ]
    if len(records) > len(lines):
        raise SettingsError(
            f"{path} has {len(records)} results and {source} has {len(lines)} jobs: jobs were removed. "
            "Put them back, or choose another -o."
        )
    return kept


def _kept(path: Path, place: int, record: bytes, job: Line | None, source: Path) -> Kept:
    try:
        told = json.loads(record)
        number, digest, failed = told["line"], told["digest"], "error" in told
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _no_result(path, place, record) from None
    if job is None:
        return Kept(record, failed, edited=False)
    edited = digest != hashlib.sha256(job[1]).hexdigest()
    if number != job[0] or (edited and not failed):
        raise SettingsError(
            f"Line {job[0]} of {source} is not the job whose result stands in line {place} of {path}; it was "
            "changed. Only jobs that failed may be changed: put the line back, or choose another -o."
        )
    return Kept(record, failed, edited)


def _no_result(path: Path, place: int, record: bytes) -> SettingsError:
    return SettingsError(
        f"{path} is no results file of `mtplx batch`: its line {place} is {record[:60]!r}. Nothing was "
        "changed; choose another -o."
    )
