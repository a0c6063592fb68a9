"""A power loss, for tests on Linux: kill -9, and then only what was flushed is left.

environment = power_loss.environment(shim, state)     # of the processes that are to lose power
...                                                   # SIGKILL them
power_loss.lose(state)
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def available() -> bool:
    """Whether there is a loader that takes the shim, and a compiler."""
    return sys.platform == "linux" and shutil.which("cc") is not None


def compiled(folder: Path) -> Path:
    """The shim, compiled into *folder*."""
    shim = folder / "power_loss.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(shim), str(SOURCE), "-ldl"], check=True, timeout=60)
    return shim


def environment(shim: Path, state: Path) -> dict[str, str]:
    """What a process needs so that flushes of files under *state* count; *state* without links."""
    return {"LD_PRELOAD": str(shim), "POWER_LOSS_UNDER": f"{state}/"}


def lose(state: Path, *, keep: tuple[str, ...] = ()) -> None:
    """Leave only what was flushed in *state*. Files named in *keep* happened to be written out by the system.

    What is left is on the disk: the power may be lost again before the next flush.
    """
    for path in list(state.glob("*")):
        durable = path.with_name(f"{path.name}.durable")
        if path.name.endswith(".durable"):
            continue
        if path.name in keep:
            shutil.copyfile(path, durable)
            continue
        path.unlink()
        if durable.exists():
            shutil.copyfile(durable, path)
            path.chmod(0o600)
