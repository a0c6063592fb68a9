"""Who a process id belongs to: its system, its start, its user and its command."""

from __future__ import annotations

import calendar
import os
import subprocess
import time
from pathlib import Path
from typing import Final, NamedTuple

_PROC: Final = Path("/proc")
_BOOT: Final = _PROC / "sys/kernel/random/boot_id"
_LIMIT_S: Final = 2.0
# Same words and same clock, whoever asks.
_PLAIN: Final = {"LC_ALL": "C", "TZ": "UTC"}
_DATE_WORDS: Final = 5


class Process(NamedTuple):
    """A process that lives. born: its start in seconds, as its system counts them; user: real user id."""

    born: float
    user: int
    command: tuple[str, ...]

    @property
    def program(self) -> str:
        """The module or script that a Python process runs; else the program itself."""
        for place, word in enumerate(self.command[1:], 1):
            if word == "-m":
                return "".join(self.command[place + 1 : place + 2])
            if not word.startswith("-"):
                return Path(word).name
        return Path(self.command[0]).name if self.command else ""


def host_id() -> str:
    """The running system and its process ids: another one after each boot, in each container; empty if unknown."""
    try:
        if _BOOT.exists():
            return f"{_BOOT.read_text().strip()} {(_PROC / 'self/ns/pid').readlink()}"
        return _said("/usr/sbin/sysctl", "-n", "kern.bootsessionuuid").strip()
    except OSError:
        return ""


def look(pid: int) -> Process | None:
    """The process of that id; None where there is none that lives."""
    try:
        return _from_proc(pid) if _BOOT.exists() else from_ps(pid)
    except OSError:
        return None


def _from_proc(pid: int) -> Process | None:
    folder = _PROC / str(pid)
    # The name in parentheses may hold anything; what counts comes after it.
    state, *fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
    if state in b"ZX":
        return None
    users = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("Uid:"))
    words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
    # Ticks since boot: they stay when the clock is set.
    return Process(int(fields[18]) / os.sysconf("SC_CLK_TCK"), int(users.split()[1]), tuple(words[:-1]))


def from_ps(pid: int) -> Process | None:
    """As `look`, by the `ps` that every system has; a start is told to the second, and words end at spaces."""
    columns = [part for name in ("lstart", "ruid", "state", "command") for part in ("-o", f"{name}=")]
    words = _said("/bin/ps", "-ww", *columns, "-p", str(pid)).split()
    if len(words) < _DATE_WORDS + 3 or words[_DATE_WORDS + 1].startswith("Z"):
        return None
    born = calendar.timegm(time.strptime(" ".join(words[:_DATE_WORDS]), "%a %b %d %H:%M:%S %Y"))
    return Process(float(born), int(words[_DATE_WORDS]), tuple(words[_DATE_WORDS + 2 :]))


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, env=_PLAIN)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout
