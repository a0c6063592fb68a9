"""Every error mtplx raises, and every error code that travels on the wire.

    MtplxError
    ├── SettingsError       a flag, variable or settings file is wrong             exit 2
    ├── ModelFilesError     a model is missing, cut short or not what it says      exit 3
    ├── LockedError         another broker owns the endpoints                      exit 4
    ├── WorkerRefusedError  the broker will not take this worker                   exit 5
    ├── BrokerUnreachableError  no broker answered in time                         exit 6
    ├── JournalError        the journal is damaged, or cannot be written           exit 7
    ├── ServiceError        launchd or systemd did not do what it was asked        exit 1
    └── WireError           has a code of the table below
        ├── ProtocolError   bytes that are not MTX/1 (names the field)
        ├── BadJobError     a job that cannot be run as asked (names the field)
        └── JobError        the last word of a job, or a refusal, was an ERROR
            └── BusyError   a refusal that says when to come back

Messages say what is wrong and what to do about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class Exit(IntEnum):
    """Exit codes of the three programs."""

    OK = 0
    FAILED = 1
    SETTINGS = 2
    MODEL_FILES = 3
    LOCKED = 4
    WORKER_REFUSED = 5
    UNREACHABLE = 6
    JOURNAL = 7
    INTERNAL = 70
    STALLED = 71
    LEASE_LOST = 72


@dataclass(frozen=True, slots=True)
class Ending:
    """What an exit code says. again: whether a service manager should start the program again."""

    meaning: str
    again: bool


# The table for launchd and systemd: what ends for a reason that lasts would end so again.
EXITS: dict[Exit, Ending] = {
    Exit.OK: Ending("stopped as asked", again=False),
    Exit.FAILED: Ending("a job failed or was cancelled", again=True),
    Exit.SETTINGS: Ending("a setting or an argument is wrong", again=False),
    Exit.MODEL_FILES: Ending("the model is missing, incomplete or damaged", again=False),
    Exit.LOCKED: Ending("another broker holds the endpoints", again=False),
    Exit.WORKER_REFUSED: Ending("the broker refused this worker", again=False),
    Exit.UNREACHABLE: Ending("no broker answered", again=True),
    Exit.JOURNAL: Ending("the journal is damaged, or cannot be written", again=False),
    Exit.INTERNAL: Ending("a fault in mtplx; the log says more", again=True),
    Exit.STALLED: Ending("the worker made no progress with a job for the stall limit", again=True),
    Exit.LEASE_LOST: Ending("the worker lost its job and did not let go of it", again=True),
}


@dataclass(frozen=True, slots=True)
class Code:
    """What a wire code means to whoever receives it."""

    at_fault: str
    retryable: bool
    meaning: str


# The closed list of wire codes. Clients branch on `retryable`, never on the text of a message.
CODES: dict[str, Code] = {
    "E_VERSION": Code("caller", False, "The peer speaks another major version of the protocol."),
    "E_PROTOCOL": Code("caller", False, "Bytes that are not a valid message; `field` names the place."),
    "E_UNKNOWN_KIND": Code("caller", False, "A kind byte this side does not know."),
    "E_TOO_LARGE": Code("caller", False, "A frame above its size limit; `detail.limit` gives it in bytes."),
    "E_BAD_JOB": Code("caller", False, "A job field is wrong or unknown; `field` names it."),
    "E_CONFLICT": Code(
        "caller",
        False,
        "The job id is taken by a job with other content, so draw a new id; or the job is in no state for that.",
    ),
    "E_UNKNOWN_JOB": Code("caller", False, "No job of that id is known; it never came or is forgotten."),
    "E_QUEUE_FULL": Code("nobody", True, "The line is full; come back after `retry_after_ms`."),
    "E_DRAINING": Code("nobody", True, "The broker is stopping; submit again when it is back."),
    "E_EXPIRED": Code("nobody", False, "The job's own deadline or queue TTL ran out."),
    "E_SLOW_READER": Code(
        "caller", False, "The answer was not read, and unread ones filled their limit of bytes."
    ),
    "E_WORKER_LOST": Code("worker", True, "The worker hands this job back; the broker gives it to the next one."),
    "E_POISON": Code(
        "caller", False, "The job ended the worker too often and is buried; `mtplx jobs kick` runs it again."
    ),
    "E_MODEL_CHANGED": Code(
        "nobody", False, "The model is not the one that began the answer; submit under a new id for all of it."
    ),
    "E_ANSWER_LOST": Code(
        "nobody", False, "More was received than the journal kept, and it cannot go on from there; use a new id."
    ),
    "E_JOURNAL": Code("nobody", True, "The journal cannot be written, so no job is taken; make room on the disk."),
    "E_NUMERIC": Code("worker", False, "The model produced NaN or infinite logits."),
    "E_INTERNAL": Code("worker", True, "A fault in mtplx; the log of the program says more."),
    "E_WORKER_EXISTS": Code("worker", False, "Another worker is live; a broker takes one at a time."),
    "E_WORKER_MODE": Code("worker", False, "Worker and broker disagree on the scheduler mode."),
    "E_UNKNOWN_WORKER": Code("worker", True, "The broker does not know this worker; send READY again."),
}


class MtplxError(Exception):
    """The base of every error below; never raised itself."""

    exit_code = Exit.FAILED


class SettingsError(MtplxError):
    """A flag, an environment variable or a settings file is wrong; raised before anything starts."""

    exit_code = Exit.SETTINGS


class ModelFilesError(MtplxError):
    """A model is missing, incomplete or damaged; the message names the file."""

    exit_code = Exit.MODEL_FILES


class LockedError(MtplxError):
    """Another broker holds the lock beside the endpoint."""

    exit_code = Exit.LOCKED


class WorkerRefusedError(MtplxError):
    """The broker answered READY with a refusal; the message carries its reason."""

    exit_code = Exit.WORKER_REFUSED


class BrokerUnreachableError(MtplxError):
    """No broker answered in time; the message names the endpoint and the likely causes."""

    exit_code = Exit.UNREACHABLE


class JournalError(MtplxError):
    """The journal is damaged, of another version, or cannot be written; the message says what to do."""

    exit_code = Exit.JOURNAL


class ServiceError(MtplxError):
    """launchd or systemd refused, or is not there; the message carries its words."""


class WireError(MtplxError):
    """An error with a wire code. `field` names the offending key where there is one."""

    def __init__(
        self,
        message: str,
        *,
        code: str,
        field: str | None = None,
        retry_after_ms: int | None = None,
        detail: dict[str, Any] | None = None,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.field = field
        self.retry_after_ms = retry_after_ms
        self.detail = detail or {}
        # The peer's word where there is one: it may know codes that this version does not.
        self.retryable = CODES[code].retryable if retryable is None else retryable


class ProtocolError(WireError):
    """Bytes that are not a valid MTX/1 message. `job_id` is set where the id could still be read."""

    def __init__(
        self, message: str, *, field: str, code: str = "E_PROTOCOL", detail: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message, code=code, field=field, detail=detail)
        self.job_id: bytes | None = None


class BadJobError(WireError):
    """A job that cannot be run as asked; nothing was admitted."""

    def __init__(self, message: str, *, field: str, detail: dict[str, Any] | None = None) -> None:
        super().__init__(message, code="E_BAD_JOB", field=field, detail=detail)


class JobError(WireError):
    """The broker answered with an ERROR: a refusal, or the last word of a job."""


class BusyError(JobError):
    """The broker refused for now; `retry_after_ms` says when to come back."""
