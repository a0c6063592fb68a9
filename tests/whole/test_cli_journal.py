"""`mtplx journal`: what it tells beside a running process, and the way out of damage."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing

import pytest
from queueing.journal_jobs import begin, draw, end, record
from whole.harness import ROOT, environment

from broker.journal_file import open_journal


def mtplx(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-P", "-m", "mtplx.cli.main", "journal", *arguments]
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def journal(state):
    """An open one, an ended one and a buried one, in a journal that this process holds."""
    jobs = [record(seq) for seq in range(3)]
    with closing(open_journal(state, "full")) as made:
        for job in jobs:
            made.admitted(job)
            begin(made, job)
            draw(made, job, 2)
        end(made, jobs[1])
        end(made, jobs[2], poison=True)
        made.commit()
        yield made


def test_info_counts_beside_the_process_that_writes(state, journal):
    said = mtplx("info", "--json", "--state-dir", str(state))
    assert said.returncode == 0, said.stderr
    report = json.loads(said.stdout)
    assert report["jobs"] == {"open": 1, "ended": 1, "buried": 1}
    assert (report["tokens"], report["next_admit_seq"], report["layout"]) == (6, 3, 1)
    assert report["bytes"] == (state / "journal.db").stat().st_size
    journal.admitted(record(9))
    journal.commit()
    said = mtplx("info", "--state-dir", str(state))
    assert "2 open, 1 ended, 1 buried" in said.stdout
    journal.close()
    assert "2 open, 1 ended, 1 buried" in mtplx("info", "--state-dir", str(state)).stdout


def test_salvage_is_refused_while_a_process_holds_the_journal(state, journal):
    refused = mtplx("salvage", "--state-dir", str(state))
    assert refused.returncode == 4
    assert "holds the journal" in refused.stderr


def test_a_damaged_journal_is_told_by_info_and_mended_by_salvage(state, journal):
    journal.close()
    path = state / "journal.db"
    data = path.read_bytes()
    assert data.count(record(0).body) == 1
    path.write_bytes(data.replace(record(0).body, record(7).body))
    told = mtplx("info", "--state-dir", str(state))
    assert told.returncode == 7
    assert told.stderr == (
        f"mtplx: The journal {path} is damaged (job 0); `mtplx journal salvage` saves what is whole into a new one.\n"
    )
    mended = mtplx("salvage", "--state-dir", str(state))
    assert mended.returncode == 0, mended.stderr
    assert mended.stdout.splitlines() == [
        "Jobs kept: 2 (0 open, 1 ended, 1 buried).",
        "Jobs lost: 1.",
        "The damaged files are now journal.db.damaged-1 and what begins so; they hold prompts.",
    ]
    assert "0 open, 1 ended, 1 buried" in mtplx("info", "--state-dir", str(state)).stdout
    again = mtplx("salvage", "--state-dir", str(state))
    assert again.stdout == f"The journal in {state} is whole; nothing was done.\n"


def test_where_there_is_no_journal_both_say_so(tmp_path):
    tmp_path.chmod(0o700)
    for command in ("info", "salvage"):
        said = mtplx(command, "--state-dir", str(tmp_path))
        assert said.returncode == 7
        assert f"no journal in {tmp_path}" in said.stderr
