"""The journal file: what is committed is there for the next process, and nothing else is."""

import os
import shutil
import sqlite3
import stat
from contextlib import closing
from dataclasses import replace

import pytest
from queueing.journal_jobs import ADMITTED, ENDED, begin, draw, end, record

from broker import journal_rows as rows
from broker.journal import Known, NoJournal
from broker.journal_file import open_journal
from broker.record import Answer, Piece
from mtplx import __version__
from mtplx.errors import JournalError, LockedError, SettingsError


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "state"


def opened(folder, durability="full"):
    return closing(open_journal(folder, durability))


def stored(folder):
    with opened(folder) as journal:
        return list(journal.jobs())


def test_what_is_committed_is_there_for_the_next_process_in_the_order_of_admission(folder):
    jobs = [record(seq) for seq in range(5)]
    with opened(folder) as journal:
        for job in reversed(jobs):
            journal.admitted(job)
        assert journal.pending
        assert journal.pending_bytes > sum(job.size for job in jobs)
        journal.commit()
        assert not journal.pending
        assert journal.pending_bytes == 0
    found = stored(folder)
    assert [one.admit_seq for one in found] == [0, 1, 2, 3, 4]
    for one, job in zip(found, jobs, strict=True):
        for name in ("id", "owner", "digest", "body", "headers", "seed", "finish", "ttl_ns", "attempts", "exact"):
            assert getattr(one, name) == getattr(job, name), name
        assert one.admitted_ns == ADMITTED.wall_ns
        assert (one.last_word, one.ended_ns, one.tokens, one.answer_bytes) == (None, None, 0, 0)
    assert found[0].deadline_ns == 2**63 - 1, "as good as never"


def test_what_is_not_committed_is_not_there(folder):
    with opened(folder) as journal:
        journal.admitted(record(0))
        journal.commit()
        journal.admitted(record(1))
    assert [one.admit_seq for one in stored(folder)] == [0]


def test_an_attempt_its_tokens_and_its_end_are_told_as_they_were(folder):
    job = record(7)
    with opened(folder) as journal:
        journal.admitted(job)
        begin(journal, job)
        journal.commit()
        pieces = draw(journal, job, 3, logprobs=True)
        journal.commit()
        assert journal.pieces(job, 0, 2) == pieces[:2]
        assert journal.pieces(job, 1, 100) == pieces[1:]
        assert journal.pieces(job, 3, 100) == []
        end(journal, job)
        journal.commit()
        assert journal.last_word(job) == job.last_word
    (found,) = stored(folder)
    assert (found.attempts, found.model, found.model_hash, found.build_hash) == (1, "tiny", "m" * 16, "b" * 16)
    assert (found.tokens, found.answer_bytes) == (3, job.answer.nbytes)
    assert (found.last_word, found.ended_ns, found.body) == (job.last_word, ENDED.wall_ns, b"")


def test_a_place_between_two_pieces_is_where_one_begins_or_nothing_is_told(folder):
    job = record(1)
    job.answer = Answer()
    with opened(folder) as journal:
        journal.admitted(job)
        for piece in (Piece(0, (5, 6), "ab", None), Piece(2, (7,), "c", None)):
            job.answer.add(piece)
            journal.piece(job, piece)
        journal.commit()
        assert journal.pieces(job, 1, 10) == []
        assert [piece.first for piece in journal.pieces(job, 2, 10)] == [2]


def test_an_attempt_is_barren_until_a_token_of_it_is_there(folder):
    job = record(1)
    with opened(folder) as journal:
        journal.admitted(job)
        begin(journal, job)
        begin(journal, job)
        journal.commit()
    assert [(one.attempts, one.barren) for one in stored(folder)] == [(2, 2)]
    with opened(folder) as journal:
        draw(journal, job, 1)
        journal.commit()
    assert [(one.attempts, one.barren) for one in stored(folder)] == [(2, 0)]


def test_a_buried_job_keeps_its_body_and_a_kicked_one_comes_with_its_answer_under_its_new_number(folder):
    job, body = record(1), record(1).body
    with opened(folder) as journal:
        journal.admitted(job)
        begin(journal, job)
        pieces = draw(journal, job, 2)
        end(journal, job, poison=True)
        journal.commit()
    (found,) = stored(folder)
    assert (found.body, found.last_word) == (body, job.last_word)
    with opened(folder) as journal:
        job.admit_seq, job.attempts, job.barren, job.last_word, job.ended = 9, 0, 0, None, None
        journal.kicked(job)
        journal.commit()
        assert journal.pieces(job, 0, 9) == pieces
    (found,) = stored(folder)
    assert (found.admit_seq, found.body, found.last_word, found.attempts, found.tokens) == (9, body, None, 0, 2)
    with opened(folder) as journal:
        journal.forgotten(job)
        journal.commit()
    assert stored(folder) == []


def test_a_kicked_job_that_begins_anew_loses_its_answer(folder):
    job = record(1)
    with opened(folder) as journal:
        journal.admitted(job)
        draw(journal, job, 2)
        end(journal, job, poison=True)
        journal.commit()
        job.answer, job.last_word, job.ended = None, None, None
        journal.kicked(job)
        journal.commit()
    assert [(one.admit_seq, one.tokens, one.last_word) for one in stored(folder)] == [(1, 0, None)]


def test_a_withdrawn_kick_leaves_the_job_buried(folder):
    job = record(1)
    with opened(folder) as journal:
        journal.admitted(job)
        end(journal, job, poison=True)
        journal.commit()
        word, job.last_word, job.admit_seq = job.last_word, None, 5
        journal.kicked(job)
        journal.withdraw(job)
        journal.commit()
        journal.kicked(job)
        journal.withdraw(job)
        assert not journal.pending
    assert [(one.admit_seq, one.last_word) for one in stored(folder)] == [(1, word)]


def test_forgotten_jobs_leave_nothing_and_their_numbers_are_not_given_again(folder):
    jobs = [record(seq) for seq in range(3)]
    with opened(folder) as journal:
        assert journal.known() == Known()
        for job in jobs:
            journal.admitted(job)
        draw(journal, jobs[0], 5)
        journal.limits(50_000, 4096)
        journal.commit()
        for job in jobs:
            journal.forgotten(job)
        journal.commit()
    with opened(folder) as journal:
        assert list(journal.jobs()) == []
        assert journal.known() == Known(limits=(50_000, 4096), admit_seq=3)


def test_a_job_admitted_and_forgotten_in_one_turn_leaves_nothing(folder):
    job = record(4)
    with opened(folder) as journal:
        journal.admitted(job)
        draw(journal, job, 2)
        end(journal, job)
        journal.forgotten(job)
        journal.commit()
    assert stored(folder) == []


def test_a_withdrawn_job_was_never_there_and_the_others_are(folder):
    first, second = record(0), record(1)
    with opened(folder) as journal:
        journal.admitted(first)
        held = journal.pending_bytes
        journal.admitted(second)
        begin(journal, second)
        draw(journal, second, 1)
        journal.withdraw(second)
        assert journal.pending_bytes == held
        journal.commit()
    assert [one.admit_seq for one in stored(folder)] == [0]


def test_only_the_owner_may_enter_and_read(folder):
    with opened(folder) as journal:
        journal.admitted(record(0))
        journal.commit()
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
        assert set(modes) == {"journal.db", "journal.db-wal", "journal.db-shm", "journal.mark", "journal.lock"}
        assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_second_process_is_refused_with_the_name_of_the_first(folder):
    with (
        opened(folder),
        pytest.raises(LockedError, match=rf"\({os.getpid()}\) holds the journal in .*--state-dir"),
    ):
        open_journal(folder, "full")


def test_a_folder_that_others_may_enter_is_refused(folder):
    folder.mkdir(mode=0o755)
    with pytest.raises(SettingsError, match=r"--state-dir ~/\.mtplx/state"):
        open_journal(folder, "full")


def test_durability_none_keeps_nothing(folder):
    assert isinstance(open_journal(folder, "none"), NoJournal)
    assert not folder.exists()


def test_another_layout_is_refused_with_both_versions_named(folder):
    with opened(folder):
        pass
    with closing(sqlite3.connect(folder / "journal.db")) as file:
        file.execute("PRAGMA user_version=7")
        file.execute("ALTER TABLE job ADD COLUMN priority")
    with pytest.raises(JournalError, match=r"has layout 7, .* reads layout 1; run the version that made it"):
        open_journal(folder, "full")


@pytest.mark.parametrize("made_by", [__version__, "99.1.0"])
def test_a_later_layout_with_the_same_tables_is_called_later_and_not_damaged(folder, made_by):
    with opened(folder) as journal:
        meta = replace(journal._meta, program=made_by)
    with closing(sqlite3.connect(folder / "journal.db")) as file:
        file.execute("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", rows.meta_row(meta))
        file.commit()
        file.execute("PRAGMA user_version=2")
    with pytest.raises(
        JournalError, match=r"has layout 2, .* reads layout 1; run the version that made it"
    ) as told:
        open_journal(folder, "full")
    assert "is damaged (" not in str(told.value)
    # Where this version made it, the header alone can be wrong.
    assert ("mtplx journal salvage" in str(told.value)) is (made_by == __version__)


def test_a_journal_that_a_tool_has_put_into_another_mode_is_put_back(folder):
    with opened(folder) as journal:
        journal.admitted(record(0))
        journal.commit()
    with closing(sqlite3.connect(folder / "journal.db")) as file:
        assert file.execute("PRAGMA journal_mode=DELETE").fetchone() == ("delete",)
    with opened(folder) as journal:
        journal.admitted(record(1))
        journal.commit()
        assert (folder / "journal.db-wal").stat().st_size > 0
    assert [one.admit_seq for one in stored(folder)] == [0, 1]


def test_a_look_with_another_tool_after_a_kill_does_no_harm(folder, tmp_path):
    """Such a tool moves the log into the file and removes it when it closes."""
    with opened(folder) as journal:
        journal.admitted(record(0))
        journal.commit()
        shutil.copytree(folder, tmp_path / "killed")
    with closing(sqlite3.connect(tmp_path / "killed" / "journal.db")) as file:
        file.execute("SELECT * FROM job").fetchall()
    assert not (tmp_path / "killed" / "journal.db-wal").exists()
    (tmp_path / "killed").chmod(0o700)
    assert [one.admit_seq for one in stored(tmp_path / "killed")] == [0]


def test_a_database_of_another_program_is_refused(folder):
    folder.mkdir(mode=0o700)
    with closing(sqlite3.connect(folder / "journal.db")) as file:
        file.execute("CREATE TABLE cake (layers)")
    with pytest.raises(JournalError, match="is damaged"):
        open_journal(folder, "full")


def test_a_start_cut_short_while_it_made_the_file_is_no_hindrance(folder):
    folder.mkdir(mode=0o700)
    (folder / "journal.db.new").write_bytes(b"half")
    (folder / "journal.db.new-journal").write_bytes(b"half")
    assert stored(folder) == []
    assert not (folder / "journal.db.new").exists()


class Unread(set):
    """Jobs in the journal that may be looked up, and not gone through."""

    def unread(self, *_others):
        raise AssertionError("a commit went through all jobs")

    __iter__ = __or__ = __ror__ = __and__ = __sub__ = copy = union = unread


def test_a_commit_takes_no_longer_the_more_jobs_there_are(folder):
    with opened(folder) as journal:
        first, second = record(0), record(1)
        journal.admitted(first)
        journal.commit()
        journal._live = Unread(set(journal._live))
        journal.admitted(second)
        journal.commit()
        journal.forgotten(first)
        journal.commit()
        assert 0 not in journal._live
        assert 1 in journal._live
