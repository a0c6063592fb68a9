"""Why a service last ended, if it did not end as asked: one small file for each program, beside its log."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from mtplx.errors import EXITS, Exit
from mtplx.logs import printable


@dataclass(frozen=True, slots=True)
class LastError:
    """at: UTC, ISO 8601. exit_code: the one of `mtplx.errors.EXITS`, also where the process left with 0."""

    at: str
    exit_code: int
    message: str

    def __str__(self) -> str:
        known = self.exit_code in set(Exit)
        meaning = f" ({EXITS[Exit(self.exit_code)].meaning})" if known else ""
        return f"ended at {self.at} with exit code {self.exit_code}{meaning}: {self.message}"


def _path(folder: Path, program: str) -> Path:
    return folder / f"{program}.last-error.json"


def note(folder: Path, program: str, code: int, message: str) -> None:
    """Write down why *program* ends; where that cannot be written, the log and stderr have to do."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    path = _path(folder, program)
    whole = path.with_suffix(".tmp")
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        whole.unlink(missing_ok=True)
        whole.touch(mode=0o600, exist_ok=False)
        whole.write_text(json.dumps(asdict(LastError(now, int(code), message))), encoding="utf-8")
        whole.replace(path)


def clear(folder: Path, program: str) -> None:
    """*program* ended as asked."""
    with suppress(OSError):
        _path(folder, program).unlink(missing_ok=True)


def read(folder: Path, program: str) -> LastError | None:
    """Why *program* last ended; None where it ended as asked, or that is not known."""
    try:
        found = json.loads(_path(folder, program).read_text(encoding="utf-8"))
        return LastError(printable(str(found["at"])), int(found["exit_code"]), printable(str(found["message"])))
    except (OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return None
