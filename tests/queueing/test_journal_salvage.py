"""What a salvage saves: all that has right checksums, the jobs beyond the damage too, and nothing that is wrong."""

from __future__ import annotations

import os
import random
import sqlite3
import struct
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from queueing.journal_files import SEED, cases, content, damaged, lay, written
from queueing.journal_jobs import begin, draw, end, record

from broker import journal_rows as rows
from broker.journal_file import open_journal
from broker.journal_open import PAGE_BYTES, check
from broker.journal_salvage import salvage
from mtplx.errors import JournalError


def refused(folder: Path) -> bool:
    try:
        open_journal(folder, "full").close()
    except JournalError:
        return True
    return False


def read(folder: Path) -> dict[int, tuple]:
    """Jobs by number, each with its pieces."""
    with closing(open_journal(folder, "full")) as journal:
        told = content(journal)[1:]
    return {job.admit_seq: (job, pieces) for job, pieces in zip(told[::2], told[1::2], strict=True)}


def all_of(journal) -> dict[int, tuple]:
    told = journal.allowed[-1][1:]
    return {job.admit_seq: (job, pieces) for job, pieces in zip(told[::2], told[1::2], strict=True)}


def salvaged(folder: Path, journal, case) -> tuple:
    """What a salvage of that damage found: its report, and the jobs that are there then; None where none was needed."""
    files = damaged(journal, case)
    lay(folder, files)
    if not refused(folder):
        return None
    lay(folder, files)
    report = salvage(folder)
    for name in ("journal.db", "journal.db-wal"):
        assert (folder / f"{report.moved_to}{name.removeprefix('journal.db')}").read_bytes() == files[name]
    return report, read(folder)


def nothing_wrong(journal, report, found) -> None:
    """All that was saved is as it was written, or the beginning of it, or begins anew."""
    truth = all_of(journal)
    assert report.kept == len(found)
    for seq, (job, pieces) in found.items():
        true, answer = truth[seq]
        assert (job.id, job.owner, job.digest, job.seed) == (true.id, true.owner, true.digest, true.seed)
        assert pieces == answer[: len(pieces)]
        assert job.last_word in (None, true.last_word)
        if job.last_word is None:
            assert job.body == record(seq).body or seq == 4
    assert len(truth) - len(found) <= report.lost or not report.counted


def test_jobs_beyond_a_damaged_frame_of_the_log_are_saved(folder, killed):
    # A byte of the first page in the log that is no page of the schema.
    saved = salvaged(folder, killed, ("flip", "journal.db-wal", 32 + 24 + PAGE_BYTES + 24 + PAGE_BYTES // 2))
    if saved is None:
        assert len(killed.allowed) == 1, "only where the log has been moved"
        return
    report, found = saved
    nothing_wrong(killed, report, found)
    assert report.lost == 0
    assert found.keys() == all_of(killed).keys()


@pytest.mark.parametrize("page", [PAGE_BYTES, 4096])
def test_the_room_that_a_log_has_is_no_content_whatever_the_size_of_a_page(folder, tmp_path, page):
    roomy = written(tmp_path / "state", page, None, 300)
    saved = salvaged(folder, roomy, ("flip", "journal.db-wal", 32 + 24 + page + 24 + page // 2))
    assert saved is not None
    nothing_wrong(roomy, *saved)
    assert saved[1].keys() == all_of(roomy).keys()


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.prove)])
def test_whatever_is_damaged_what_is_saved_is_right_and_most_is_saved(folder, killed, count):
    flips = [case for case in cases(killed) if case[0] == "flip"]
    kept = needed = 0
    for case in random.Random(SEED + 1).sample(flips, count):
        saved = salvaged(folder, killed, case)
        if saved is not None:
            nothing_wrong(killed, *saved)
            needed += 1
            kept += saved[0].kept
    assert needed > count // 20
    assert kept / needed > 0.8 * len(all_of(killed)), "one byte costs one job at most, or a page of them"


def test_a_file_cut_anywhere_is_salvaged_with_what_is_left(folder, killed):
    for name in ("journal.db", "journal.db-wal"):
        for tenth in range(10):
            saved = salvaged(folder, killed, ("cut", name, len(killed.files[name]) * tenth // 10))
            if saved is not None:
                nothing_wrong(killed, *saved)


def test_a_lost_main_file_is_made_anew_from_the_log(folder, killed):
    lay(folder, {name: data for name, data in killed.files.items() if name != "journal.db"})
    assert refused(folder)
    report = salvage(folder)
    nothing_wrong(killed, report, read(folder))


@pytest.fixture
def state(tmp_path):
    """A journal with three jobs, closed in order."""
    place = tmp_path / "state"
    with closing(open_journal(place, "full")) as made:
        for seq in range(3):
            made.admitted(record(seq))
        made.limits(100, 50)
        made.commit()
    return place


def overwrite(path: Path, find: bytes, by: bytes) -> None:
    data = path.read_bytes()
    assert data.count(find) == 1
    path.write_bytes(data.replace(find, by))


def test_a_job_whose_row_is_wrong_is_lost_and_counted_and_the_numbers_go_on(state):
    overwrite(state / "journal.db", record(1).body, b"X" * len(record(1).body))
    assert refused(state)
    report = salvage(state)
    assert (report.waiting, report.lost, report.moved_to) == (2, 1, "journal.db.damaged-1")
    assert sorted(read(state)) == [0, 2]
    with closing(open_journal(state, "full")) as made:
        assert (made.known().admit_seq, made.known().limits) == (3, (100, 50))


def test_a_job_whose_state_is_wrong_begins_anew(tmp_path):
    place, job = tmp_path / "state", record(1)
    with closing(open_journal(place, "full")) as made:
        made.admitted(job)
        begin(made, job)
        draw(made, job, 2)
        made.commit()
    overwrite(place / "journal.db", b"tiny", b"tidy")
    assert refused(place)
    report = salvage(place)
    assert (report.waiting, report.begun_anew, report.lost) == (1, 1, 0)
    ((found, pieces),) = read(place).values()
    assert (found.attempts, found.tokens, found.body, pieces) == (0, 0, job.body, [])


def test_an_open_answer_is_cut_at_the_first_piece_that_is_wrong_and_an_ended_one_is_lost(tmp_path):
    place, running, ended = tmp_path / "state", record(1), record(2)
    with closing(open_journal(place, "full")) as made:
        for job in (running, ended):
            made.admitted(job)
            begin(made, job)
            pieces = draw(made, job, 4)
            begin(made, job)
        end(made, ended)
        made.commit()
    data = (place / "journal.db").read_bytes()
    assert data.count(b" w2") == 3, "in both answers, and in the last word"
    (place / "journal.db").write_bytes(data.replace(b" w2\xc3\xa9\xc0", b" w3\xc3\xa9\xc0"))
    assert refused(place)
    report = salvage(place)
    assert (report.waiting, report.shortened, report.lost) == (1, 1, 1)
    ((found, kept),) = read(place).values()
    assert (found.admit_seq, found.tokens, kept) == (1, 2, pieces[:2])


def test_a_whole_journal_is_left_alone(state):
    before = {path.name: path.read_bytes() for path in state.iterdir() if path.suffix != ".lock"}
    assert salvage(state) is None
    after = {path.name: path.read_bytes() for path in state.iterdir() if path.suffix != ".lock"}
    assert {name: after[name] for name in before} == before


def test_the_journal_of_another_version_is_left_alone(state):
    data = bytearray((state / "journal.db").read_bytes())
    data[60:64] = struct.pack(">I", 9)
    changed = bytes(data).replace(b"CREATE TABLE job (admit_seq", b"CREATE TABLE job (admit_ske")
    (state / "journal.db").write_bytes(changed)
    with pytest.raises(JournalError, match="layout 9"):
        salvage(state)
    assert (state / "journal.db").read_bytes() == changed


def test_a_journal_whose_tables_a_later_version_has_taken_over_is_left_alone(state):
    with closing(sqlite3.connect(state / "journal.db")) as file:
        meta = rows.read_meta(file.execute("SELECT one, data, sum FROM meta").fetchone())
        file.execute(
            "INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", rows.meta_row(replace(meta, program="99.1.0"))
        )
        file.commit()
    data = bytearray((state / "journal.db").read_bytes())
    data[60:64] = struct.pack(">I", 9)
    (state / "journal.db").write_bytes(data)
    with pytest.raises(JournalError, match="layout 9"):
        salvage(state)
    assert (state / "journal.db").read_bytes() == data


def test_where_there_is_no_journal_the_folder_is_asked_for(tmp_path):
    with pytest.raises(JournalError, match=r"no journal in .*--state-dir"):
        salvage(tmp_path)


@pytest.mark.parametrize("moves", range(5))
def test_a_salvage_that_was_cut_short_is_finished_by_the_next_and_no_broker_starts_between(
    folder,
    killed,
    monkeypatch,
    moves,
):
    half = len(killed.files["journal.db-wal"]) // 2
    lay(folder, {name: data[: 5000 if name == "journal.db" else half] for name, data in killed.files.items()})
    assert refused(folder)
    left, move = moves, Path.replace

    def stops(self, target):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return move(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", stops)
        with pytest.raises(KeyboardInterrupt):
            salvage(folder)
    assert refused(folder)
    assert salvage(folder) is not None
    assert not refused(folder)
    assert not list(folder.glob("*salvage*"))


def test_a_second_damage_is_kept_beside_the_first(state):
    for number in (1, 2):
        with (state / "journal.db").open("r+b") as file:
            file.truncate(5000)
        assert salvage(state).moved_to == f"journal.db.damaged-{number}"


@pytest.mark.parametrize("name", ["journal.db", "journal.db-wal", "journal.db-shm", "journal.mark"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "link to nothing"])
def test_what_is_no_plain_file_is_told_by_its_name_and_waited_for_by_nobody(
    tmp_path, name: str, kind: str
) -> None:
    folder = tmp_path / "state"
    lay(folder, written(folder, 1024, 3).files)
    file = folder / name
    if file.exists():
        file.rename(tmp_path / "elsewhere")
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case "link":
            (tmp_path / "elsewhere").touch()
            file.symlink_to(tmp_path / "elsewhere")
        case _:
            file.symlink_to(tmp_path / "nothing")
    told = rf"{name} is no plain file; move it away, or choose another --state-dir"
    for call in (check, partial(open_journal, durability="full"), salvage):
        with pytest.raises(JournalError, match=told):
            call(folder / "journal.db" if call is check else folder)
