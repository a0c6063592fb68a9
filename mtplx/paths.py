"""Where files live: the run folder of sockets and lock, the cache of models, the settings file."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Final

from mtplx.errors import SettingsError

# macOS has 104 bytes for a socket's path, its closing NUL included; Linux has 108.
MAX_IPC_PATH: Final = 103


def exists(path: Path) -> bool:
    """Whether a thing is seen at *path*; `Path.exists` raises where nobody may look, or a name is too long."""
    return os.path.exists(path)  # noqa: PTH110


def is_folder(path: Path) -> bool:
    """Whether a folder can be seen at *path*."""
    return os.path.isdir(path)  # noqa: PTH112


def is_file(path: Path) -> bool:
    """Whether a file can be seen at *path*."""
    return os.path.isfile(path)  # noqa: PTH113


def expanded(text: str | Path) -> Path:
    """The path *text* with the home folder in the place of `~`.

    Raises:
        SettingsError: there is no such home folder.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise SettingsError(f"{text} begins with no home folder known here; write it from the root.") from None


def home() -> Path:
    """The user's home folder.

    Raises:
        SettingsError: neither HOME nor the system's list of users has it.
    """
    try:
        return Path.home()
    except RuntimeError:
        raise SettingsError("No home folder is known here; set HOME to a folder of your own.") from None


def default_run() -> Path:
    """`~/.mtplx/run`, or a short folder under /tmp where the home path is too long for a socket."""
    run = home() / ".mtplx" / "run"
    if len(os.fsencode(run / "front.sock")) > MAX_IPC_PATH:
        run = Path(f"/tmp/mtplx-{os.getuid()}")  # noqa: S108 - owner and mode are checked before use
    return run


def default_state() -> Path:
    """`~/.mtplx/state`: what outlives a restart."""
    return home() / ".mtplx" / "state"


def default_cache(cache_home: Path | None) -> Path:
    """The user's cache folder by the habit of the system; *cache_home* is XDG's word for it."""
    if cache_home is not None:
        return cache_home / "mtplx"
    if sys.platform == "darwin":
        return home() / "Library" / "Caches" / "mtplx"
    return home() / ".cache" / "mtplx"


def default_config() -> Path:
    """The settings file that is read when no other is named."""
    return home() / ".mtplx" / "config.toml"


def default_logs() -> Path:
    """Where services log: by the habit of macOS, else beside the state."""
    user = home()
    return user / "Library" / "Logs" / "mtplx" if sys.platform == "darwin" else user / ".mtplx" / "logs"


def check_ipc_path(path: str) -> None:
    """Refuse a socket path that libzmq or some system cannot hold.

    Raises:
        SettingsError: it is too long, with both lengths, or no UTF-8.
    """
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise SettingsError(f"The socket path {path!r} is no UTF-8 text; choose another --run-dir.") from error
    length = len(os.fsencode(path))
    if length > MAX_IPC_PATH:
        raise SettingsError(
            f"The socket path {path} has {length} bytes; sockets hold {MAX_IPC_PATH}. "
            "Choose a shorter --run-dir, for instance ~/.mtplx/run."
        )


def private_folder(path: Path, flag: str = "--run-dir") -> Path:
    """Make *path* a folder that only this user can enter; an existing one must already be.

    *flag* is what chooses it.

    Raises:
        SettingsError: when it belongs to somebody else, is a link, or others may enter.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(path, flag)
    except OSError as error:
        raise SettingsError(
            f"The folder {path} cannot be made ({error.strerror or error}); choose another {flag}."
        ) from error
    return path


def check_private(path: Path, flag: str) -> None:
    """Refuse an existing folder that is not this user's alone; raises SettingsError, and OSError."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise SettingsError(f"{path} must be a folder of your own; choose another {flag}.")
    if stat.S_IMODE(found.st_mode) & 0o077:
        # Advice to close a shared folder such as /tmp would break the machine.
        ours = f", or run: chmod 700 {path}" if path.is_relative_to(home()) else ""
        own = f"{flag} ~/.mtplx/{flag.removeprefix('--').removesuffix('-dir')}"
        raise SettingsError(f"{path} is open to others; choose a folder of your own, for instance {own}{ours}.")
