"""Small journals as kill -9 leaves them, and every way to damage them by one byte."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from queueing.journal_jobs import begin, draw, end, record

from broker import journal_file
from broker.journal_file import CHECKPOINT_FRAMES, open_journal
from broker.journal_open import begin as begin_file

FILES = ("journal.db", "journal.db-wal", "journal.mark")
SEED = 5
# The commit after which the log is moved into the file.
MOVED = {"all in the log": None, "half moved": 3, "all moved": 8}


class Journal(NamedTuple):
    """The files as kill -9 leaves them, and what was to be read after each commit from the last flushed one on."""

    files: dict[str, bytes]
    allowed: list[list]


def content(journal):
    """All that a journal tells."""
    told = [journal.known()]
    for job in journal.jobs():
        told += [job, journal.pieces(record(job.admit_seq), 0, 10**6) if job.tokens else []]
    return told


def with_pages_of(size: int, folder: Path) -> None:
    """An empty journal with small pages: fewer bytes, more pages."""
    folder.mkdir(mode=0o700)
    begin_file(folder / "journal.db", size)


def written(folder: Path, page: int, checkpoint_after: int | None, room: int = 0) -> Journal:
    """A few jobs, one of them long, one with an answer of some pages, one ended, one buried; moved after that commit.

    room: frames that the log has room for; more than none would hide most damage.
    """
    jobs = [record(seq) for seq in range(4)] + [record(4, body=random.Random(SEED).randbytes(6000))]
    states = []

    def commit(number: int, *, flushed: bool) -> None:
        if number == checkpoint_after:
            journal._frames = CHECKPOINT_FRAMES
        journal.commit()
        if flushed or number == checkpoint_after:
            states.clear()
        states.append(content(journal))

    with_pages_of(page, folder)
    with patch.object(journal_file, "ROOM_FRAMES", room):
        journal = open_journal(folder, "full")
    journal.limits(50_000, 4096)
    for job in jobs[:3]:
        journal.admitted(job)
    commit(1, flushed=True)
    begin(journal, jobs[0])
    commit(2, flushed=True)
    draw(journal, jobs[0], 60)
    end(journal, jobs[0])
    journal.admitted(jobs[4])
    commit(3, flushed=True)
    begin(journal, jobs[1])
    commit(4, flushed=True)
    end(journal, jobs[1], poison=True)
    commit(5, flushed=False)
    journal.admitted(jobs[3])
    begin(journal, jobs[2])
    commit(6, flushed=True)
    draw(journal, jobs[2], 2, logprobs=True)
    commit(7, flushed=False)
    draw(journal, jobs[2], 3)
    commit(8, flushed=False)
    files = {name: (folder / name).read_bytes() for name in FILES}
    assert len(states) == (1 if checkpoint_after == 8 else 3)
    journal.close()
    return Journal(files, states)


def lay(folder: Path, files: dict[str, bytes]) -> None:
    """Put *files* into *folder* in place of all there is."""
    for path in folder.iterdir():
        path.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)


def cases(journal: Journal):
    """Every cut and every changed byte, as (kind, file, offset)."""
    for name in FILES:
        for offset in range(len(journal.files[name])):
            yield "cut", name, offset
            yield "flip", name, offset


def damaged(journal: Journal, case) -> dict[str, bytes]:
    """The files of *journal* with that damage."""
    kind, name, offset = case
    data = journal.files[name]
    if kind == "cut":
        data = data[:offset]
    else:
        mask = random.Random(f"{SEED} {name} {offset}").randrange(1, 256)
        data = data[:offset] + bytes([data[offset] ^ mask]) + data[offset + 1 :]
    return {**journal.files, name: data}
