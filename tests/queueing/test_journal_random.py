"""Random jobs, full disks, restarts and kill -9: the journal has what the last commit had, and nothing else."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from queueing.journal_jobs import begin, draw, end, record

from broker import journal_file
from broker.journal_file import open_journal
from broker.record import Record
from mtplx.errors import JournalError


class Line:
    """Records as the machine would move them, the journal, and what was committed of them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng, self.folder, self.next = random.Random(seed), folder, 0
        self.waiting: list[Record] = []
        self.ended: list[Record] = []
        self.buried: list[Record] = []
        self.new: list[Record] = []
        self.pieces: dict[int, list] = {}
        self.journal = open_journal(folder, "os")
        self.committed: dict[int, tuple] = {}

    def admit(self) -> None:
        job = record(self.next, body=self.rng.randbytes(self.rng.choice((10, 10, 6000))))
        self.next += 1
        self.journal.admitted(job)
        self.waiting.append(job)
        self.new.append(job)

    def run(self) -> None:
        if self.waiting:
            job = self.rng.choice(self.waiting)
            begin(self.journal, job)
            drawn = draw(self.journal, job, self.rng.randrange(4))
            self.pieces.setdefault(job.admit_seq, []).extend(drawn)

    def end(self) -> None:
        if self.waiting:
            job = self.waiting.pop(self.rng.randrange(len(self.waiting)))
            poison = self.rng.random() < 0.3
            end(self.journal, job, poison=poison)
            (self.buried if poison else self.ended).append(job)

    def kick(self) -> None:
        if self.buried:
            job = self.buried.pop()
            before, job.admit_seq, self.next = job.admit_seq, self.next, self.next + 1
            job.attempts, job.barren, job.last_word, job.ended = 0, 0, None, None
            kept = self.pieces.pop(before, [])
            if self.rng.random() < 0.5:
                job.answer = None
            else:
                self.pieces[job.admit_seq] = kept
            self.journal.kicked(job)
            self.waiting.append(job)

    def forget(self) -> None:
        for line in (self.ended, self.buried):
            if line and self.rng.random() < 0.5:
                job = line.pop()
                self.journal.forgotten(job)
                self.pieces.pop(job.admit_seq, None)

    def commit(self) -> None:
        try:
            self.journal.commit()
        except JournalError:
            assert self.journal.pending
            for job in self.new:
                self.journal.withdraw(job)
                for line in (self.waiting, self.ended, self.buried):
                    if job in line:
                        line.remove(job)
                self.pieces.pop(job.admit_seq, None)
        else:
            assert not self.journal.pending
            assert self.journal.pending_bytes == 0
            self.committed = self.now()
        self.new = []

    def now(self) -> dict[int, tuple]:
        """What the journal should tell of each job."""
        told = {}
        for job in (*self.waiting, *self.ended, *self.buried):
            pieces = list(self.pieces.get(job.admit_seq, []))
            told[job.admit_seq] = (job.id, job.body, job.attempts, job.last_word, pieces)
        return told

    def full_disk(self) -> None:
        self.journal._db.execute("PRAGMA max_page_count=1")
        self.commit()
        self.journal._db.execute("PRAGMA max_page_count=1000000")

    def look(self) -> None:
        """All that is committed is there, and nothing else."""
        found = {}
        for job in self.journal.jobs():
            pieces = self.journal.pieces(record(job.admit_seq), 0, 10**6)
            assert job.tokens == sum(len(piece.ids) for piece in pieces)
            found[job.admit_seq] = (job.id, job.body, job.attempts, job.last_word, pieces)
        assert found == self.committed

    def kill(self) -> None:
        """Kill -9 after a commit, and the next start."""
        self.commit()
        if self.journal.pending:
            return
        killed = self.folder.with_name("killed")
        shutil.copytree(self.folder, killed)
        self.journal.close()
        shutil.rmtree(self.folder)
        killed.rename(self.folder)
        self.folder.chmod(0o700)
        self.journal = open_journal(self.folder, "os")
        self.look()


STEPS = (
    "admit",
    "admit",
    "run",
    "run",
    "run",
    "end",
    "kick",
    "forget",
    "commit",
    "commit",
    "full_disk",
    "look",
    "kill",
)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.prove) for n in range(4, 60))])
def test_the_journal_has_what_the_last_commit_had_and_nothing_else(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(journal_file, "CHECKPOINT_FRAMES", 30)
    line = Line(tmp_path / "state", seed)
    for _ in range(300):
        getattr(line, line.rng.choice(STEPS))()
    line.kill()
    line.look()
    line.journal.close()
