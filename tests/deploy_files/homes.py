"""A home folder for tests of services, with a name that asks for trouble, and the units of whoever lives there."""

from __future__ import annotations

import plistlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from whole.harness import ROOT

from mtplx.client import Client
from mtplx.services import Unit, plist, unit_of
from mtplx.settings import Settings

# A space, an ampersand, a percent sign that would be a specifier, a dollar sign, quotes, a backslash, no ASCII.
STRANGE = "J & ü%h $x'\"\\b"


class Home:
    """Services of one user, in a folder of their own."""

    def __init__(self, path: Path, **given: Any) -> None:
        self.path = path
        self.logs = path / "logs"
        self.run = path / ".mtplx" / "run"
        for folder in (self.run, self.logs):
            folder.mkdir(mode=0o700, parents=True)
        # A port would be one for all tests that run side by side.
        self.given = {
            "http": "off",
            "beat_s": 0.2,
            "dead_s": 1.0,
            "stall_s": 5.0,
            "drain_s": 1.0,
            "orphan_s": 60.0,
            **given,
        }
        self.front, self.back = f"ipc://{self.run}/front.sock", f"ipc://{self.run}/back.sock"

    def unit(self, name: str) -> Unit:
        """The service file's contents, with this checkout's code."""
        variables = {f"MTPLX_{key.upper()}": str(value) for key, value in self.given.items()}
        settings = Settings(run_dir=self.run, drain_s=self.given["drain_s"])
        variables["PYTHONPATH"] = str(ROOT)
        return unit_of(name, settings, variables, home=self.path, logs=self.logs, python=sys.executable)

    def broker(self) -> bytes:
        """The broker's agent."""
        return plist(self.unit("broker"))

    def worker(self) -> bytes:
        """The real worker's agent."""
        return plist(self.unit("worker"))

    def scripted(self, *flags: str) -> bytes:
        """The worker's agent, with the worker double in its place."""
        keys = plistlib.loads(self.worker())
        keys["ProgramArguments"] = [sys.executable, "-P", "-m", "mtplx.testing", "--back", self.back, *flags]
        return plistlib.dumps(keys)

    def client(self) -> Client:
        """A producer."""
        return Client(self.front, timeout=20)


@contextmanager
def home(**given: Any) -> Iterator[Home]:
    """A home folder that goes with the block."""
    folder = Path(mkdtemp(prefix="mx", dir="/tmp"))
    try:
        yield Home(folder / STRANGE, **given)
    finally:
        rmtree(folder)
