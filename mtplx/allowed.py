"""The list of keys that may connect, one a line: `ROLE NAME PUBLIC-KEY`. The broker reads it while it runs."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from mtplx.errors import SettingsError
from mtplx.keys import NAME, is_public_key
from mtplx.paths import private_folder

FILE: Final = "allowed"
PRODUCER: Final = "producer"
OPERATOR: Final = "operator"
WORKER: Final = "worker"
ROLES: Final = (PRODUCER, OPERATOR, WORKER)
# Far above any list kept by hand; a file beyond it is none.
MAX_BYTES: Final = 1024**2


class Allowed(NamedTuple):
    """One key that may connect. role: `producer`, `operator` (sees and ends the jobs of all), `worker`."""

    role: str
    name: str
    key: str


# What of a file tells that it is another: device, inode, size, and when it or its mode last changed, in ns.
Mark = tuple[int, int, int, int]


def mark(file: Path) -> Mark | None:
    """The mark of *file*; None where it is missing."""
    try:
        found = file.lstat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns)


def read(folder: Path) -> dict[str, Allowed]:
    """The allowed keys by public key; none where there is no list.

    Raises:
        SettingsError: the list cannot be read, is open to others, or has a line that is none.
    """
    file = folder / FILE
    try:
        with open(file, "rb", opener=_open_itself) as stream:
            found = os.fstat(stream.fileno())
            content = stream.read(MAX_BYTES + 1)
        text = content.decode("ascii")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"The list of allowed keys {file} cannot be read ({error}).") from error
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise SettingsError(
            f"The list of allowed keys {file} must be a file of your own that nobody else can write to."
        )
    if len(text) > MAX_BYTES:
        raise SettingsError(f"The list of allowed keys {file} is longer than {MAX_BYTES} bytes.")
    return _parsed(file, text)


def _open_itself(path: str, flags: int) -> int:
    # No link's target, and a pipe without a writer must not hold the broker up.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _parsed(file: Path, text: str) -> dict[str, Allowed]:
    listed: dict[str, Allowed] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words:
            continue
        right = len(words) == len(Allowed._fields) and words[0] in ROLES and is_public_key(words[2])
        if not right or not NAME.fullmatch(words[1]) or words[2] in listed:
            raise SettingsError(
                f"Line {number} of {file} is wrong: a key stands once, as `ROLE NAME PUBLIC-KEY`, and a role is "
                f"one of {', '.join(ROLES)}. Nobody is allowed until it is right."
            )
        listed[words[2]] = Allowed(*words)
    return listed


def change(folder: Path, edit: Callable[[dict[str, Allowed]], None]) -> None:
    """Let *edit* change the list. Readers see the old list or the new one, and never a part.

    Raises:
        SettingsError: the list or its folder cannot be used.
    """
    private_folder(folder.parent, "--state-dir")
    private_folder(folder, "--state-dir")
    try:
        with _alone(folder):
            listed = read(folder)
            edit(listed)
            with tempfile.TemporaryDirectory(dir=folder, prefix=f".{FILE}-") as made:
                new = Path(made, FILE)
                new.touch(mode=0o600)
                with new.open("w") as stream:
                    stream.writelines(f"{' '.join(one)}\n" for one in listed.values())
                    stream.flush()
                    os.fsync(stream.fileno())
                new.replace(folder / FILE)
    except OSError as error:
        raise SettingsError(
            f"The list of allowed keys in {folder} cannot be written: {error.strerror}."
        ) from error


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One change at a time, or one of two would be lost."""
    lock = os.open(folder / f".{FILE}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
