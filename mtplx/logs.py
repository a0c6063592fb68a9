"""Logs of broker and worker: one event a line, as text or JSON, on stderr or in files of bounded size.

A line tells when, how grave, who, which job, and what. What is not printable is escaped, so that nobody who sends
a name or an error can add a line of his own or speak to the terminal. Errors from below tell their type and place;
what they say is left out unless it can only come from the system: it may quote what was being worked on.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
import threading
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from traceback import extract_tb
from typing import Any, Final

from mtplx.errors import MtplxError, SettingsError, WireError
from mtplx.paths import private_folder
from mtplx.settings import Settings

# Five files of 10 MiB for each program.
FILE_BYTES: Final = 10 * 1024**2
OLD_FILES: Final = 4
LINE_CHARACTERS: Final = 8192
FRAMES: Final = 12
# launchd appends to its file of stderr for ever; only ends and crashes are told there.
STDERR_BYTES: Final = 1024**2
# Their words are the system's, or our own sentences.
_QUOTABLE: Final = (OSError, RuntimeError, MemoryError, ImportError, MtplxError)


def of_job(job_id: bytes) -> dict[str, str]:
    """The `extra` of a log line about the job *job_id*."""
    return {"job": job_id.hex()}


def printable(text: str) -> str:
    """*text* on one line: whatever is not printable is escaped, and what is too long is cut."""
    if len(text) > LINE_CHARACTERS:
        text = text[:LINE_CHARACTERS] + "..."
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def told(error: BaseException | None) -> str:
    """*error* and what led to it in one line: types and places, and words where they quote nothing."""
    parts = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        words = isinstance(error, _QUOTABLE) and not isinstance(error, WireError)
        frames = extract_tb(error.__traceback__)[-FRAMES:]
        places = " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)
        parts.append(type(error).__name__ + (f" ({error})" if words else "") + (f" at {places}" if places else ""))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "; after ".join(parts)


class _Form(logging.Formatter):
    """A record as `text` or `json`."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self._json = form == "json"

    def format(self, record: logging.LogRecord) -> str:
        """One line for *record*."""
        job = getattr(record, "job", "")
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        error = told(record.exc_info[1]) if record.exc_info else ""
        message = record.getMessage()
        if self._json:
            told_of: dict[str, Any] = {"time": at, "level": record.levelname.lower(), "logger": record.name}
            optional = {"job": job, "message": message[:LINE_CHARACTERS], "error": error[:LINE_CHARACTERS]}
            return json.dumps(told_of | {key: value for key, value in optional.items() if value})
        parts = [at, record.levelname.lower(), record.name, f"job={job}" if job else "", message, error]
        return printable(" ".join(part for part in parts if part))


def set_up(settings: Settings, program: str) -> None:
    """Log from now on as *settings* say; *program* names the file in `log_dir`.

    Raises:
        SettingsError: the folder is no private one, or the file cannot be written.
    """
    handler: logging.Handler = logging.StreamHandler()
    if settings.log_dir is not None:
        handler = _file(private_folder(settings.log_dir, "--log-dir") / f"{program}.log")
    handler.setFormatter(_Form(settings.log_format))
    # A log that cannot be written costs lines and nothing else.
    logging.raiseExceptions = False
    level = settings.log_level.upper()
    root = logging.getLogger()
    for known in root.handlers[:]:
        root.removeHandler(known)
        known.close()
    root.addHandler(handler)
    for name in ("mtplx", "worker"):
        logging.getLogger(name).setLevel(level)
    # The libraries' own chatter quotes what they work on.
    root.setLevel(max(logging.WARNING, logging.getLogger("mtplx").level))
    logging.captureWarnings(capture=True)
    threading.excepthook = _of_thread


def take_over(*libraries: str) -> None:
    """Let what *libraries*, imported by now, have to say come through our log, by no handler of theirs."""
    for name in libraries:
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True


def _of_thread(ended: threading.ExceptHookArgs) -> None:
    name = ended.thread.name if ended.thread else "unknown"
    logging.getLogger("mtplx").error("thread %s ended", name, exc_info=ended.exc_value)


class _File(RotatingFileHandler):
    """Files of bounded size that only this user can read, whatever the umask when one is begun."""

    def _open(self) -> Any:
        def private(path: str, flags: int) -> int:
            return os.open(path, flags | os.O_NOFOLLOW, 0o600)

        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=private)


def _file(path: Path) -> logging.Handler:
    try:
        return _File(path, maxBytes=FILE_BYTES, backupCount=OLD_FILES, encoding="utf-8")
    except OSError as error:
        raise SettingsError(
            f"The log {path} cannot be written: {error.strerror}; choose another --log-dir."
        ) from error


def bound_stderr() -> None:
    """Empty the file behind stderr where it has grown beyond STDERR_BYTES; its writer appends."""
    try:
        found = os.fstat(sys.__stderr__.fileno()) if sys.__stderr__ else None
        if found is not None and stat.S_ISREG(found.st_mode) and found.st_size > STDERR_BYTES:
            os.ftruncate(sys.__stderr__.fileno(), 0)  # type: ignore[union-attr]
    except OSError:
        # It is somebody else's to bound.
        return
