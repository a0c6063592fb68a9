"""What the journal does where the disk is full or fails, and how large it gets."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from queueing.journal_jobs import begin, draw, end, record

from broker import journal_file
from broker.journal_file import open_journal
from broker.journal_open import PAGE_BYTES
from broker.record import Piece
from mtplx.errors import JournalError


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def journal(folder):
    with closing(open_journal(folder, "full")) as made:
        yield made


def numbers(folder) -> list[int]:
    with closing(open_journal(folder, "full")) as journal:
        return [job.admit_seq for job in journal.jobs()]


def full(journal, pages: int | None) -> None:
    """Let the file have no more than that many pages, or as many as it likes."""
    journal._db.execute(f"PRAGMA max_page_count={pages or 2**30}")


def test_a_full_disk_is_told_in_a_sentence_and_the_entries_are_written_when_there_is_room(folder, journal):
    journal.admitted(record(0))
    journal.commit()
    full(journal, 1)
    large = record(1, body=bytes(50_000))
    journal.admitted(large)
    held = journal.pending_bytes
    for _ in range(2):
        with pytest.raises(
            JournalError, match=r"journal\.db cannot be written \(database or disk is full\); make room"
        ):
            journal.commit()
        assert (journal.pending, journal.pending_bytes) == (True, held)
        assert [job.admit_seq for job in journal.jobs()] == [0]
    draw(journal, large, 1)
    full(journal, None)
    journal.commit()
    assert not journal.pending
    assert [(job.admit_seq, job.tokens) for job in journal.jobs()] == [(0, 0), (1, 1)]


def test_a_job_withdrawn_on_a_full_disk_is_not_there_and_the_others_go_on(folder, journal):
    running, refused = record(0), record(1, body=bytes(50_000))
    journal.admitted(running)
    begin(journal, running)
    journal.commit()
    full(journal, 1)
    journal.admitted(refused)
    draw(journal, running, 3)
    with pytest.raises(JournalError):
        journal.commit()
    journal.withdraw(refused)
    journal.commit()
    assert [(job.admit_seq, job.tokens) for job in journal.jobs()] == [(0, 3)]
    journal.close()
    assert numbers(folder) == [0]


LIMITED = """
import resource, sys, pathlib
sys.path.insert(0, "tests")
from queueing.journal_jobs import record
from broker.journal_file import open_journal
from broker.record import Piece
from mtplx.errors import JournalError
journal = open_journal(pathlib.Path(sys.argv[1]), "full")
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
taken = refused = 0
for seq in range(200):
    journal.admitted(record(seq, body=bytes(3000)))
    try:
        journal.commit()
        taken += 1
    except JournalError:
        journal.withdraw(record(seq))
        refused += 1
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for seq in range(200, 210):
    journal.admitted(record(seq))
    journal.commit()
print(taken, refused, flush=True)
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_writes_that_fail_in_the_middle_cost_what_was_refused_alone(folder):
    """The limit on the size of files cuts a write short, as no `max_page_count` does."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(folder)], cwd=Path(__file__).parents[2], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": "."}, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    taken, refused = map(int, done.stdout.split())
    assert taken > 5
    assert refused > 5
    found = numbers(folder)
    assert len(found) == taken + 10
    assert found[-10:] == list(range(200, 210))


class Failing:
    """A connection whose next statements of one kind fail as a disk does."""

    def __init__(self, connection, statement: str, error: Exception) -> None:
        self._connection, self._statement, self._error = connection, statement, error
        self.said: list[str] = []

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def execute(self, sql, *given):
        self.said.append(sql)
        if sql.startswith(self._statement):
            raise self._error
        return self._connection.execute(sql, *given)


def disk_error() -> Exception:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = 1034  # SQLITE_IOERR_FSYNC
    return error


def test_after_a_flush_that_failed_all_of_the_log_is_written_anew_before_the_next_is_believed(journal):
    sound, journal._frames = journal._db, 0
    journal.admitted(record(0))
    journal._db = Failing(sound, "COMMIT", disk_error())
    with pytest.raises(JournalError, match="disk I/O error"):
        journal.commit()
    assert not sound.in_transaction
    # While even that fails nothing is committed.
    journal._db = Failing(sound, "PRAGMA wal_checkpoint", disk_error())
    with pytest.raises(JournalError):
        journal.commit()
    assert not any(sql.startswith("BEGIN") for sql in journal._db.said)
    journal._db = Failing(sound, "nothing", disk_error())
    journal.commit()
    order = [sql.split()[1].split("(")[0] for sql in journal._db.said if sql.startswith(("PRAGMA wal", "BEGIN"))]
    assert order == ["wal_checkpoint", "IMMEDIATE"]
    journal.admitted(record(1))
    journal._db.said.clear()
    journal.commit()
    assert not any("wal_checkpoint" in sql for sql in journal._db.said)
    journal._db = sound


def synced(journal, entries) -> bool:
    """Whether a commit of these entries is flushed."""
    sound, journal._db = journal._db, Failing(journal._db, "nothing", disk_error())
    entries()
    journal.commit()
    said, journal._db = journal._db.said, sound
    (level,) = [sql.split("=")[1] for sql in said if sql.startswith("PRAGMA synchronous")]
    return level == "FULL"


@pytest.mark.parametrize("taken", ["folder", "journal.db", "journal.db-wal"])
def test_nothing_is_promised_on_a_journal_that_was_moved_away_or_deleted_until_it_is_back(folder, journal, taken):
    """Under a name that is gone SQLite would write on, and the end of the process would take it all."""
    journal.admitted(record(0))
    journal.commit()
    place, aside = folder if taken == "folder" else folder / taken, folder.with_name("aside")
    place.rename(aside)
    journal.admitted(record(1))
    for _ in range(2):
        with pytest.raises(JournalError, match=r"journal\.db was moved away or replaced .* put it back, or start"):
            journal.commit()
    aside.rename(place)
    journal.commit()
    journal.close()
    assert numbers(folder) == [0, 1]


@pytest.mark.parametrize("durability", ["full", "os"])
def test_a_commit_is_flushed_where_an_entry_needs_it_and_the_durability_asks(folder, durability):
    job, other = record(0), record(1)
    with closing(open_journal(folder, durability)) as journal:
        journal.limits(5, 5)
        journal.commit()
        journal._frames = 0
        full = durability == "full"
        assert synced(journal, lambda: (journal.admitted(job), journal.admitted(other))) == full
        assert synced(journal, lambda: begin(journal, job)) == full
        assert not synced(journal, lambda: draw(journal, job, 5))
        assert not synced(journal, lambda: end(journal, job, poison=True))
        assert synced(journal, lambda: journal.kicked(job)) == full
        assert not synced(journal, lambda: end(journal, other))
        assert not synced(journal, lambda: journal.forgotten(other))
        assert not synced(journal, lambda: journal.limits(7, 7))


def churn(journal, jobs: int, tokens: int, keep: int) -> None:
    """Jobs come, run, end and are forgotten; *keep* of them stay."""
    kept = []
    for seq in range(jobs):
        job = record(seq, body=bytes(2000))
        journal.admitted(job)
        begin(journal, job)
        journal.commit()
        for _ in range(tokens // 10):
            draw(journal, job, 10)
            journal.commit()
        end(journal, job)
        kept.append(job)
        if len(kept) > keep:
            journal.forgotten(kept.pop(0))
        journal.commit()


def test_the_file_and_its_log_stay_as_large_as_what_is_kept(folder, monkeypatch):
    monkeypatch.setattr(journal_file, "CHECKPOINT_FRAMES", 200)
    monkeypatch.setattr(journal_file, "ROOM_FRAMES", 200)
    sizes = []
    with closing(open_journal(folder, "os")) as journal:
        for start in (0, 100, 400):
            churn(journal, 100 if start < 400 else 300, 50, keep=10)
            for job in list(journal.jobs()):
                journal.forgotten(record(job.admit_seq))
            journal.commit()
            sizes.append([(folder / name).stat().st_size for name in ("journal.db", "journal.db-wal")])
    # After the first round nothing grows, though five times as much went through.
    assert sizes[2][0] <= sizes[0][0] * 1.1
    assert sizes[2][1] <= 2 * 200 * 4120 + 100_000
    assert sizes[2][0] < 400_000


def test_no_flush_has_to_make_the_log_longer(folder):
    log = folder / "journal.db-wal"
    with closing(open_journal(folder, "full")) as journal:
        begun = log.stat().st_size
        for seq in range(700):
            journal.admitted(record(seq))
            journal.commit()
        assert log.stat().st_size == begun > 4900 * PAGE_BYTES


def test_a_disk_without_room_for_a_long_log_has_a_short_one(folder, monkeypatch):
    with closing(open_journal(folder, "full")):
        pass
    monkeypatch.setattr(journal_file, "ROOM_FRAMES", 2**20)
    with closing(open_journal(folder, "full")) as journal:
        journal.admitted(record(0))
        journal.commit()
    assert numbers(folder) == [0]


def test_after_a_very_large_turn_the_log_is_cut(folder, monkeypatch):
    monkeypatch.setattr(journal_file, "LOG_BYTES", 300_000)
    with closing(open_journal(folder, "os")) as journal:
        journal.admitted(record(0, body=bytes(3_000_000)))
        journal.commit()
        assert (folder / "journal.db-wal").stat().st_size > 3_000_000
        for seq in range(1, 4):
            journal.admitted(record(seq))
            journal.commit()
            journal._frames = journal_file.CHECKPOINT_FRAMES
        assert (folder / "journal.db-wal").stat().st_size <= 300_000


def token_turns_s(journal, job, first: int) -> float:
    """Processor time of 300 turns with a token each, at best of a few."""
    best = float("inf")
    for at in range(first, first + 5 * 300, 300):
        begun = time.process_time()
        for token in range(at, at + 300):
            journal.piece(job, Piece(token, (token,), " w", None))
            journal.commit()
        best = min(best, time.process_time() - begun)
    return best


def test_a_token_costs_no_more_where_many_jobs_are_kept(folder):
    with closing(open_journal(folder, "os")) as journal:
        job = record(0)
        journal.admitted(job)
        journal.commit()
        few = token_turns_s(journal, job, 0)
        for seq in range(1, 20_001):
            journal.admitted(record(seq, body=b"\x80"))
        journal.commit()
        assert token_turns_s(journal, job, 10_000) < 4 * few
