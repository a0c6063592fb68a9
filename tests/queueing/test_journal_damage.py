"""A journal cut at every byte, and with every byte changed: all that was flushed is there, or the start is refused."""

from __future__ import annotations

import random
from contextlib import closing, suppress
from pathlib import Path

import pytest
from queueing.journal_files import SEED, cases, content, damaged, lay, written
from queueing.journal_jobs import record

from broker.journal_file import open_journal
from broker.journal_open import PAGE_BYTES
from mtplx.errors import JournalError

SHARES = 16


def outcome(folder: Path, files: dict[str, bytes], allowed: list[list], *, goes_on: bool = True) -> str:
    """Opens the journal as a start would, and *goes_on* with it; what happened."""
    lay(folder, files)
    try:
        journal = open_journal(folder, "full")
    except JournalError as error:
        said = str(error)
    else:
        said = ""
        with closing(journal):
            assert content(journal) in allowed
            journal.admitted(record(77))
            if goes_on:
                journal.commit()
    if said:
        assert str(folder / "journal.db") in said
        assert {name: (folder / name).read_bytes() for name in files} == files, "a refusal changes nothing"
        return "refused"
    if goes_on:
        with closing(open_journal(folder, "full")) as journal:
            assert record(77).id in [job.id for job in journal.jobs()]
    return "recovered"


def hold_all(folder, killed, chosen):
    seen = {"refused": 0, "recovered": 0}
    for number, case in enumerate(chosen):
        try:
            seen[outcome(folder, damaged(killed, case), killed.allowed, goes_on=number % 8 == 0)] += 1
        except BaseException as error:
            error.add_note(f"the case was {case}")
            raise
    return seen


def test_undamaged_it_opens_with_all_there_is(folder, killed):
    assert outcome(folder, killed.files, killed.allowed[-1:]) == "recovered"


def test_a_seeded_share_of_all_damage_ends_in_recovery_or_a_clear_refusal(folder, killed):
    chosen = random.Random(SEED).sample(list(cases(killed)), 200)
    seen = hold_all(folder, killed, chosen)
    assert min(seen.values()) > 10, "the damage is neither always found nor never"


@pytest.mark.prove
@pytest.mark.parametrize("share", range(SHARES))
def test_all_damage_ends_in_recovery_or_a_clear_refusal(folder, killed_small, share):
    hold_all(folder, killed_small, list(cases(killed_small))[share::SHARES])


def test_damage_where_the_log_only_has_room_is_none(folder, tmp_path):
    short, roomy = (written(tmp_path / str(room), PAGE_BYTES, None, room) for room in (0, 300))
    log = "journal.db-wal"
    begins, ends = len(short.files[log]), len(roomy.files[log])
    assert ends > begins + 200 * PAGE_BYTES
    chosen = [
        (how, log, at) for at in random.Random(SEED).sample(range(begins, ends), 40) for how in ("flip", "cut")
    ]
    for case in chosen:
        assert outcome(folder, damaged(roomy, case), roomy.allowed[-1:]) == "recovered"


def test_a_mark_that_is_damaged_or_gone_is_ignored(folder, killed):
    whole = killed.allowed[-1:]
    for case in cases(killed):
        if case[1] == "journal.mark":
            assert outcome(folder, damaged(killed, case), whole) == "recovered"
    left = {name: data for name, data in killed.files.items() if name != "journal.mark"}
    assert outcome(folder, left, whole) == "recovered"


@pytest.mark.parametrize("gone", ["journal.db", "journal.db-wal"])
def test_a_file_that_is_gone_is_missed(folder, killed, gone):
    left = {name: data for name, data in killed.files.items() if name != gone}
    found = outcome(folder, left, killed.allowed)
    # All of it lies in the main file, so that the log is not needed.
    moved = gone == "journal.db-wal" and len(killed.allowed) == 1
    assert found == ("recovered" if moved else "refused")


def test_without_the_mark_a_cut_log_would_lose_promised_jobs_in_silence(folder, killed):
    """What the mark is for: SQLite alone takes the cut for the end of its log."""
    cut = len(killed.files["journal.db-wal"]) // 4
    files = {**killed.files, "journal.db-wal": killed.files["journal.db-wal"][:cut]}
    if len(killed.allowed) > 1:
        assert outcome(folder, files, []) == "refused"
    lay(folder, {name: data for name, data in files.items() if name != "journal.mark"})
    lost = False
    with suppress(JournalError), closing(open_journal(folder, "full")) as opened:
        lost = content(opened) not in killed.allowed
    assert lost == (len(killed.allowed) > 1)
