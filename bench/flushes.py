"""Flushes of files: what one costs here, and which a program made, by strace."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sys
import time
from bisect import bisect_left
from pathlib import Path

FLUSHES = "fsync,fdatasync"
# One frame of SQLite's write-ahead log: its head and a page. The log has so many before it is written from its
# beginning again.
FRAME = bytes(24 + 4096)
FRAMES = 1000
# A call in one line, with the moment at which it began and the seconds it took; or its end in a line of its own,
# with the moment at which it returned.
WHOLE = re.compile(r"^\d+\s+([\d.]+) (?:fsync|fdatasync)\(\d+\)\s+= 0 <([\d.]+)>")
RESUMED = re.compile(r"^\d+\s+([\d.]+) <\.\.\. (?:fsync|fdatasync) resumed>\)\s+= 0 ")


class Flush:
    """A file that is written frame by frame, each flushed, and from its beginning again: as SQLite's log is."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "flushed", os.O_WRONLY | os.O_CREAT, 0o600)
        self._next = 0
        os.write(self._file, FRAME * FRAMES)
        os.fsync(self._file)

    def __call__(self) -> float:
        """Write a frame and flush it, by F_FULLFSYNC on macOS; seconds."""
        began = time.monotonic()
        os.pwrite(self._file, FRAME, self._next * len(FRAME))
        if sys.platform == "darwin":
            fcntl.fcntl(self._file, fcntl.F_FULLFSYNC)
        else:
            os.fdatasync(self._file)
        self._next = (self._next + 1) % FRAMES
        return time.monotonic() - began

    def close(self) -> None:
        """Let the file go."""
        os.close(self._file)


def strace() -> str | None:
    """strace, where it is installed."""
    return shutil.which("strace")


def traced(program: str, output: Path, *, slower_us: int = 0) -> list[str]:
    """Words before a command that have its flushes noted in *output*, and take *slower_us* longer each.

    With -D the tracer is no parent: a signal to the process reaches the program. The filter spares other calls.
    """
    slower = ["-e", f"inject={FLUSHES}:delay_exit={slower_us}"] if slower_us else []
    words = "-D -f --seccomp-bpf -qq -ttt -T -o"
    return [program, *words.split(), str(output), "-e", f"trace={FLUSHES}", *slower]


def returned(output: Path) -> list[float]:
    """When the flushes noted in *output* had been done, in seconds since 1970, sorted."""
    found = []
    for line in output.read_text().splitlines():
        whole, resumed = WHOLE.match(line), RESUMED.match(line)
        if whole:
            found.append(float(whole[1]) + float(whole[2]))
        elif resumed:
            found.append(float(resumed[1]))
    return sorted(found)


def between(flushes: list[float], begin: float, end: float) -> int:
    """How many of the sorted *flushes* lie between two moments."""
    return bisect_left(flushes, end) - bisect_left(flushes, begin)
