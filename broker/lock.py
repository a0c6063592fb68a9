"""A lock file with the id of the process that holds it: who may bind an endpoint, who may write a journal."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from mtplx.errors import LockedError, SettingsError


def take(path: Path, busy: str) -> int:
    """Lock the file at *path*, made where there is none; the descriptor that holds the lock until it is closed.

    The file stays for the next to lock. *busy* is what to say when it is taken, with `{holder}` for the process.

    Raises:
        LockedError: another process holds it.
        SettingsError: it cannot be opened: a link, a folder, or in a folder that cannot be written to.
    """
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SettingsError(f"The lock {path} cannot be opened: {error.strerror}.") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(lock, 32).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise LockedError(busy.replace("{holder}", holder)) from None
    # On a full disk the lock counts, although nobody can learn whose it is.
    with suppress(OSError):
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    return lock


def is_at(lock: int, path: Path) -> bool:
    """Whether the file at *path* is the one that was opened as *lock*."""
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except OSError:
        return False
