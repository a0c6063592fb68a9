"""The public names of the package, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import mtplx


def test_the_public_names_are_these() -> None:
    assert mtplx.__all__ == [
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
    assert all(hasattr(mtplx, name) for name in mtplx.__all__)


def test_importing_the_package_loads_neither_mlx_nor_the_command_line() -> None:
    script = "import sys, mtplx; print(sorted({n.split('.')[0] for n in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    for name in ("mlx", "mlx_lm", "rich", "click", "broker", "worker"):
        assert f"'{name}'" not in loaded
