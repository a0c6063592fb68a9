"""launchd and systemd, as the commands of `mtplx service` ask them."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from mtplx.errors import ServiceError
from mtplx.paths import exists
from mtplx.services import STOP_GRACE_S, Unit, plist, systemd_unit

COMMAND_LIMIT_S: Final = 60.0
LOOK_S: Final = 0.2


class Manager(Protocol):
    """Installs, starts and stops units; each call may take as long as a stop does."""

    name: str

    def file(self, unit: Unit) -> Path:
        """Where the file of *unit* lies."""

    def text(self, unit: Unit) -> bytes:
        """The file of *unit*."""

    def install(self, unit: Unit) -> None:
        """Put the file of *unit* in its place and start it, now and at each login."""

    def uninstall(self, unit: Unit) -> None:
        """Stop *unit* and take its file away."""

    def start(self, unit: Unit) -> None:
        """Start an installed *unit*."""

    def stop(self, unit: Unit) -> None:
        """Stop *unit* until it is started, or its user logs in again."""

    def state(self, unit: Unit) -> tuple[bool, str]:
        """Whether *unit* runs, and what the manager says of it."""


class Launchd:
    """The agents of this user, in the session at the screen."""

    name = "launchd"

    def __init__(self, home: Path, pause: Callable[[float], None] = time.sleep) -> None:
        self._agents = home / "Library" / "LaunchAgents"
        self._domain = f"gui/{os.getuid()}"
        self._pause = pause

    def file(self, unit: Unit) -> Path:
        """Where launchd looks at login."""
        return self._agents / f"{unit.label}.plist"

    def text(self, unit: Unit) -> bytes:
        """The plist."""
        return plist(unit)

    def install(self, unit: Unit) -> None:
        """Write the plist; an agent of that name is stopped first, and reads it when it starts."""
        _write(self.file(unit), self.text(unit))
        self.stop(unit)
        _ask("launchctl", "enable", self._target(unit))
        self.start(unit)

    def uninstall(self, unit: Unit) -> None:
        """Unload the agent."""
        self.stop(unit)
        self.file(unit).unlink(missing_ok=True)

    def start(self, unit: Unit) -> None:
        """Load the agent, which starts it; one that is loaded and down is started."""
        if self._known(unit):
            _ask("launchctl", "kickstart", self._target(unit))
        else:
            _ask("launchctl", "bootstrap", self._domain, str(_installed(self.file(unit))))

    def stop(self, unit: Unit) -> None:
        """Unload the agent, and wait until it is gone: launchctl does not."""
        if not self._known(unit):
            return
        _ask("launchctl", "bootout", self._target(unit), may_fail=True)
        ends = time.monotonic() + unit.stop_s + STOP_GRACE_S
        while self._known(unit):
            if time.monotonic() >= ends:
                raise ServiceError(f"launchd still knows {unit.label}; see: launchctl print {self._target(unit)}")
            self._pause(LOOK_S)

    def state(self, unit: Unit) -> tuple[bool, str]:
        """From `launchctl print`, whose form is nobody's promise."""
        told = _ask("launchctl", "print", self._target(unit), may_fail=True)
        if told.returncode:
            return False, "not loaded"
        found = dict(re.findall(r"^\t(state|pid|last exit code) = (.*)$", told.stdout, re.MULTILINE))
        words = [
            found.get("state", "loaded"),
            *(f"{key} {found[key]}" for key in ("pid", "last exit code") if key in found),
        ]
        return found.get("state") == "running", ", ".join(words)

    def _target(self, unit: Unit) -> str:
        return f"{self._domain}/{unit.label}"

    def _known(self, unit: Unit) -> bool:
        return _ask("launchctl", "print", self._target(unit), may_fail=True).returncode == 0


class Systemd:
    """The units of this user's systemd."""

    name = "systemd"

    def __init__(self, home: Path) -> None:
        self._units = home / ".config" / "systemd" / "user"

    def file(self, unit: Unit) -> Path:
        """Where systemd looks for a user's own units."""
        return self._units / unit.unit

    def text(self, unit: Unit) -> bytes:
        """The unit file."""
        return systemd_unit(unit)

    def install(self, unit: Unit) -> None:
        """Write the unit; one that runs is started anew."""
        # A systemd that does not answer leaves no half of an installation behind.
        _systemctl("show", "--property=Version")
        _write(self.file(unit), self.text(unit))
        _systemctl("daemon-reload")
        _systemctl("enable", unit.unit)
        _systemctl("reset-failed", unit.unit, may_fail=True)
        _systemctl("restart", unit.unit, stop_s=unit.stop_s)

    def uninstall(self, unit: Unit) -> None:
        """Stop and disable the unit; one that is not there is as good."""
        absent = not exists(self.file(unit))
        _systemctl("disable", "--now", unit.unit, may_fail=absent, stop_s=unit.stop_s)
        self.file(unit).unlink(missing_ok=True)
        _systemctl("daemon-reload")
        _systemctl("reset-failed", unit.unit, may_fail=True)

    def start(self, unit: Unit) -> None:
        """Start the unit, also one that systemd has given up."""
        _installed(self.file(unit))
        _systemctl("reset-failed", unit.unit, may_fail=True)
        _systemctl("start", unit.unit)

    def stop(self, unit: Unit) -> None:
        """Stop the unit."""
        _systemctl("stop", unit.unit, stop_s=unit.stop_s)

    def state(self, unit: Unit) -> tuple[bool, str]:
        """From `systemctl show`, whose form is promised."""
        names = ("ActiveState", "SubState", "MainPID", "Result")
        told = _systemctl("show", unit.unit, f"--property={','.join(names)}", may_fail=True)
        found = dict(line.split("=", 1) for line in told.stdout.splitlines() if "=" in line)
        if told.returncode or "ActiveState" not in found:
            return False, f"systemd does not answer: {told.stderr.strip()}"
        words = [f"{found['ActiveState']} ({found.get('SubState', '')})"]
        words += [f"pid {found['MainPID']}"] if found.get("MainPID", "0") != "0" else []
        words += [f"result {found['Result']}"] if found.get("Result", "success") != "success" else []
        return found["ActiveState"] == "active", ", ".join(words)


def _installed(file: Path) -> Path:
    if not exists(file):
        raise ServiceError(f"{file} is not there; run `mtplx service install` first.")
    return file


def _write(file: Path, text: bytes) -> None:
    """Put *text* at *file* at once; it may carry keys of a collector, and is for its user alone."""
    whole = file.with_name(f".{file.name}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        whole.unlink(missing_ok=True)
        whole.touch(mode=0o600, exist_ok=False)
        whole.write_bytes(text)
        whole.replace(file)
    except OSError as error:
        raise ServiceError(f"The service file {file} cannot be written: {error.strerror}.") from error


def _systemctl(*words: str, may_fail: bool = False, stop_s: float = 0.0) -> subprocess.CompletedProcess[str]:
    try:
        return _ask("systemctl", "--user", *words, may_fail=may_fail, limit_s=COMMAND_LIMIT_S + stop_s)
    except ServiceError as error:
        if "connect to bus" not in str(error):
            raise
        raise ServiceError(
            f"{error}. This user has no systemd of its own here: log in as it (not by su or sudo), "
            "`loginctl enable-linger` keeps it; or run `mtplx serve`."
        ) from None


def _ask(
    *words: str, may_fail: bool = False, limit_s: float = COMMAND_LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """Run a command of the manager, which has *limit_s* to end.

    Raises:
        ServiceError: it is not there, does not end, or fails though it may not; with its words.
    """
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit_s, check=False)
    except FileNotFoundError:
        raise ServiceError(
            f"There is no {words[0]} here; run `mtplx serve`, or let your service manager run `mtplx-broker` and "
            "`mtplx-worker`."
        ) from None
    except subprocess.TimeoutExpired:
        raise ServiceError(f"`{' '.join(words)}` did not end within {limit_s:.0f} s.") from None
    if done.returncode and not may_fail:
        said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise ServiceError(f"`{' '.join(words)}` failed: {said}")
    return done
