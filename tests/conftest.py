"""Tests in several processes: what MLX's CPU backend compiles while it runs is kept apart for each of them.

MLX writes its fused kernels into the temporary folder under their final names: another process could load half of one.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Python keeps this one, whatever TMPDIR becomes; MLX looks at TMPDIR.
SHARED = Path(tempfile.gettempdir())


def apart() -> Path:
    """The folder of this user's test processes."""
    folder = SHARED / f"mtplx-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.stat().st_uid == os.getuid(), "nobody else's programs are run"
    return folder


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        folder = apart() / config.workerinput["workerid"]
        folder.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = str(folder)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hands what the processes compiled to whatever runs next, such as workers in tests of the whole."""
    if not session.config.pluginmanager.hasplugin("dsession"):
        return
    for made in apart().glob("*/mlx/**/*.so"):
        target = SHARED / made.relative_to(apart()).relative_to(made.relative_to(apart()).parts[0])
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            whole = target.with_name(f"{os.getpid()}.tmp")
            shutil.copy(made, whole)
            whole.replace(target)


@pytest.fixture
def hangups_count() -> Iterator[None]:
    """Programs that are started hear of SIGHUP, though the tests may run under nohup, which they honour."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
