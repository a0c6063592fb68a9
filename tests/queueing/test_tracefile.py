"""The trace file holds whole lines, whatever happens to the disk."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from broker.tracefile import LineFile


def test_a_line_that_does_not_fit_on_the_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    path.write_text("before\n")
    file = LineFile(path)
    file.write("one\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="large"):
            file.write("x" * 200 + "\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "before\none\n"
    file.write("two\n")
    file.close()
    assert path.read_text() == "before\none\ntwo\n"


def test_a_folder_that_is_not_there_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LineFile(tmp_path / "no" / "file")
