"""What `mtplx doctor` looks at on the machine itself: folders, sockets, disk, keys. Nothing is changed or made."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from mtplx.cli.connect import listens
from mtplx.errors import SettingsError
from mtplx.keys import credentials
from mtplx.overview import size
from mtplx.paths import check_private, exists, is_folder
from mtplx.settings import Settings

# Below the first a journal soon cannot be written; below the second a model may not fit.
LEAST_BYTES: Final = 256 * 1024**2
FEW_BYTES: Final = 2 * 1024**3
SIDES: Final = ("front", "back")


class State(StrEnum):
    """How a finding is meant."""

    WELL = "well"
    NOTE = "note"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one thing, and what to do where something is wrong with it."""

    about: str
    state: State
    sentence: str
    advice: str = ""


def well(about: str, sentence: str) -> Finding:
    """Nothing is wrong."""
    return Finding(about, State.WELL, sentence)


def note(about: str, sentence: str, advice: str = "") -> Finding:
    """Worth knowing, and no fault."""
    return Finding(about, State.NOTE, sentence, advice)


def wrong(about: str, sentence: str, advice: str) -> Finding:
    """A fault, and what to do about it."""
    return Finding(about, State.WRONG, sentence, advice)


def on_the_machine(settings: Settings) -> Iterator[Finding]:
    """All that can be seen without asking anybody."""
    yield from (note("settings", sentence) for sentence in settings.warnings())
    for flag, folder in (("--run-dir", settings.run_dir), ("--state-dir", settings.state_folder)):
        yield _private(flag, folder)
    yield _writable(settings.cache_dir)
    for side in SIDES:
        yield from _socket(side, settings.endpoint(side))
    for folder in _disks(settings):
        yield _room(folder)
    yield from _keys(settings)


def _private(flag: str, folder: Path) -> Finding:
    try:
        check_private(folder, flag)
    except FileNotFoundError:
        return _to_be_made(flag, folder)
    except SettingsError as error:
        return wrong(
            "folders", str(error), f"chmod 700 {folder} if nobody else uses it, or choose another {flag}."
        )
    except OSError as error:
        return wrong("folders", f"{folder} cannot be looked at: {error.strerror}.", f"Choose another {flag}.")
    if not os.access(folder, os.W_OK | os.X_OK):
        return wrong("folders", f"{folder} cannot be written to.", f"chmod 700 {folder}")
    return well("folders", f"{folder} is yours alone.")


def _to_be_made(flag: str, folder: Path) -> Finding:
    above = _existing(folder)
    if not is_folder(above) or not os.access(above, os.W_OK | os.X_OK):
        return wrong(
            "folders", f"{folder} is not there, and {above} cannot be written to.", f"Choose another {flag}."
        )
    return well("folders", f"{folder} is not there yet; the first start makes it.")


def _writable(folder: Path) -> Finding:
    if not exists(folder):
        return _to_be_made("--cache-dir", folder)
    if not is_folder(folder) or not os.access(folder, os.W_OK | os.X_OK):
        return wrong("folders", f"{folder} is no folder that can be written to.", "Choose another --cache-dir.")
    return well("folders", f"{folder} can be written to.")


def _existing(path: Path) -> Path:
    return next(one for one in (path, *path.parents) if exists(one))


def _socket(side: str, endpoint: str) -> Iterator[Finding]:
    if not endpoint.startswith("ipc://"):
        return
    path = Path(endpoint.removeprefix("ipc://"))
    try:
        found = path.lstat()
    except OSError:
        return
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.getuid():
        yield wrong(
            "sockets",
            f"{path} is no socket of yours, so no broker can start there.",
            f"Remove it, or set --{side}.",
        )
    elif not listens(endpoint):
        yield note(
            "sockets", f"{path} is left over from a broker that was killed.", "The next start takes it away."
        )


def _disks(settings: Settings) -> list[Path]:
    """One existing folder for each disk that is written to."""
    folders = [_existing(settings.state_folder), _existing(settings.cache_dir)]
    if settings.trace_file is not None:
        folders.append(_existing(settings.trace_file.parent))
    return list({folder.stat().st_dev: folder for folder in reversed(folders)}.values())


def _room(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    if free < LEAST_BYTES:
        return wrong(
            "disk",
            f"The disk of {folder} has {size(free)} left; when it is full no job is taken.",
            "Make room, or move the folder by --state-dir or --cache-dir.",
        )
    if free < FEW_BYTES:
        return note("disk", f"The disk of {folder} has {size(free)} left.", "Models need more than that.")
    return well("disk", f"The disk of {folder} has {size(free)} left.")


def _keys(settings: Settings) -> Iterator[Finding]:
    for side in SIDES:
        endpoint = settings.endpoint(side)
        try:
            found = credentials(settings, endpoint)
        except SettingsError as error:
            yield wrong(
                "keys", str(error), "docs/security.md goes through it; `mtplx keys list` shows what is there."
            )
        else:
            if found is not None:
                yield well("keys", f"The keys for {endpoint} can be read; ours is {found.own.public}.")
