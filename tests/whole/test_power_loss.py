"""Jobs that were told to be taken are there after the power was lost, and the test sees a flush that is missing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from whole import power_loss
from whole.harness import ROOT, environment

from broker.journal_file import open_journal
from mtplx.errors import JournalError

pytestmark = pytest.mark.skipif(not power_loss.available(), reason="needs LD_PRELOAD and a C compiler")

# Takes jobs, runs some, forgets some; a line for each job that was committed. The log is moved often.
WRITER = """
import pathlib, sys
sys.path.insert(0, "tests")
from queueing.journal_jobs import begin, draw, end, record
from broker import journal_file
state, durability, fault, start = sys.argv[1:]
# Moving the log flushes it, too.
journal_file.CHECKPOINT_FRAMES = 40 if not fault else 10**6
journal = journal_file.open_journal(pathlib.Path(state), durability)
if fault == "no flush":
    whole = journal._transaction
    journal._transaction = lambda flush: whole(False)
kept = []
for seq in range(int(start), 10**9):
    job = record(seq)
    journal.admitted(job)
    journal.commit()
    print(seq, flush=True)
    if seq % 3 == 0:
        begin(journal, job)
        journal.commit()
        for _ in range(seq % 7):
            draw(journal, job, 3)
            journal.commit()
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory) -> Path:
    return power_loss.compiled(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def state(tmp_path) -> Path:
    return Path(os.path.realpath(tmp_path)) / "state"


def write_until(shim: Path, state: Path, lines: int, *, start: int, durability: str, fault: str = "") -> int:
    """Run the writer, kill it after that many lines; the last number it told."""
    command = [sys.executable, "-c", WRITER, str(state), durability, fault, str(start)]
    env = environment(**power_loss.environment(shim, state))
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as writer:
        try:
            last = start - 1
            for line in writer.stdout:
                last = int(line)
                if last >= start + lines:
                    writer.send_signal(signal.SIGKILL)
        finally:
            writer.kill()
    assert writer.returncode == -signal.SIGKILL
    return last


def found(state: Path) -> list[int]:
    with closing(open_journal(state, "full")) as journal:
        return [job.admit_seq for job in journal.jobs()]


def rounds(shim: Path, state: Path, seed: int, count: int, *, durability: str, fault: str = "") -> int:
    """Kill, lose the power, start again, *count* times; how many told jobs were lost."""
    rng, told, lost = random.Random(seed), set(), 0
    for number in range(count):
        start = max(told, default=-1) + 2
        last = write_until(shim, state, rng.randrange(5, 60), start=start, durability=durability, fault=fault)
        told |= set(range(start, last + 1))
        # The mark is not flushed, but the system may have written it out.
        power_loss.lose(state, keep=("journal.mark",) if number % 2 else ())
        there = set(found(state))
        lost += len(told - there)
        told &= there
    return lost


@pytest.mark.parametrize("count", [4, pytest.param(60, marks=pytest.mark.prove)])
def test_no_job_that_was_told_is_lost_with_the_power(shim, state, count):
    assert rounds(shim, state, 1, count, durability="full") == 0


def test_with_durability_os_a_power_loss_costs_jobs_and_never_the_journal(shim, state):
    assert rounds(shim, state, 2, 4, durability="os") > 0


def test_a_flush_that_is_missing_is_seen(shim, state):
    assert rounds(shim, state, 3, 1, durability="full", fault="no flush") > 0


def test_a_flush_that_the_disk_did_not_do_is_told_by_the_mark(shim, state):
    with pytest.raises(JournalError, match=r"it ends at commit \d+, and commit \d+ was flushed"):
        rounds(shim, state, 3, 2, durability="full", fault="no flush")
