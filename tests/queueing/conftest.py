"""Journals for the tests of damage: made once for each file of tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from queueing.journal_files import MOVED, Journal, written

from broker.journal_open import PAGE_BYTES


@pytest.fixture(scope="module", params=MOVED)
def killed(request, tmp_path_factory) -> Journal:
    return written(tmp_path_factory.mktemp("journal") / "state", PAGE_BYTES, MOVED[request.param])


@pytest.fixture(scope="module", params=MOVED)
def killed_small(request, tmp_path_factory) -> Journal:
    """With pages of 512 bytes."""
    return written(tmp_path_factory.mktemp("journal") / "state", 512, MOVED[request.param])


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A private folder in memory, where there is such a thing: many thousand journals are opened in it."""
    memory = Path("/dev/shm")
    made = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() and os.access(memory, os.W_OK) else None))
    yield made
    shutil.rmtree(made)
