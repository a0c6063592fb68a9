"""mtplx: a local LLM service for one GPU and many producers. These names are the public ones."""

from importlib.metadata import PackageNotFoundError, version

from mtplx.aio import AsyncClient, AsyncStream
from mtplx.client import Client, Stream
from mtplx.errors import (
    BadJobError,
    BrokerUnreachableError,
    BusyError,
    JobError,
    LockedError,
    ModelFilesError,
    MtplxError,
    ProtocolError,
    SettingsError,
    WireError,
    WorkerRefusedError,
)
from mtplx.job import Job
from mtplx.settings import SchedulerMode, Settings
from mtplx.stream import Piece, Result

try:
    __version__ = version("mtplx-line")
except PackageNotFoundError:
    # A source tree on the path that was never installed.
    __version__ = "0+unknown"

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "BadJobError",
    "BrokerUnreachableError",
    "BusyError",
    "Client",
    "Job",
    "JobError",
    "LockedError",
    "ModelFilesError",
    "MtplxError",
    "Piece",
    "ProtocolError",
    "Result",
    "SchedulerMode",
    "Settings",
    "SettingsError",
    "Stream",
    "WireError",
    "WorkerRefusedError",
    "__version__",
]
