"""The trace file holds whole lines, whatever happens to the disk."""

from __future__ import annotations

import os
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


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_plain_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "spans"
    if kind == "pipe":
        os.mkfifo(path)  # nobody reads it: to open it would take for ever
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(OSError, match=r"plain file|directory"):
        LineFile(Path("/dev/null") if kind == "device" else path)


def test_a_pipe_that_somebody_reads_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "spans"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(OSError, match="plain file"):
            LineFile(path)
    finally:
        os.close(reader)


def test_a_folder_that_is_not_there_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LineFile(tmp_path / "no" / "file")
