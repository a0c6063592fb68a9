"""What producers, workers and whoever disturbs them have noted, held against the promises of the queue.

A history is a list of `Line`s on one clock. `check` sorts it into a `Verdict`: each list of it names the promise that
was broken and has a sentence for every break. A submit whose answer was never heard is pending: where the job
appears later, it is recovered, and that is no fault.

Disturbances excuse what they explain and nothing else: a second run needs one near it, two workers at once need a
lost lease, an answer that changes needs a power loss.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path

from mtplx.testing import trajectory_sha256

# A RUN may lie in a pipe this long after the process that sent it, or the one that reads it, was disturbed.
NEAR_S = 2.0
CANCELLED = "cancelled"
WHOLE = ("stop", "length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One thing that happened, at `time.monotonic()`.

    Of a producer, by is its connection: asked (SUBMIT sent), took (ADMITTED), refused (no job is admitted by this
    answer), started, resumed (RESUME sent), came (CHUNK), word (the last one), unknown (the broker knows no such
    job), cancelled (CANCEL sent), left (gone for good), parted (the same, but the job is to `finish`), complaint (an
    ERROR about no job).
    Of a worker, by is its process: ran, first, final, fail, drop, overlap, astray.
    Of a disturbance, by is the process: kill, stop, continue, term, power; gone when a process has ended.
    code: of the word, or of an ERROR.  seq, first: of a chunk, or how many are there at a resume and a word.
    number: the admission number; of started and came the attempt.  lease: of the run.  again: ADMITTED said that it
    is a duplicate.
    """

    at: float
    what: str
    job: str = ""
    by: str = ""
    number: int = -1
    lease: int = 0
    seq: int = -1
    first: int = -1
    ids: tuple[int, ...] = ()
    text: str = ""
    code: str = ""
    sha: str = ""
    again: bool = False


@dataclass(frozen=True, slots=True)
class Expected:
    """The whole answer of a job: all ids, the text of each, or None where only the whole text is known."""

    ids: tuple[int, ...]
    texts: tuple[str, ...] | None
    text: str


@dataclass(slots=True)
class Verdict:
    """Sentences about broken promises, by promise, and counts."""

    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    flight: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def faults(self) -> dict[str, list[str]]:
        """The promises that were broken."""
        named = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "counts"}
        return {name: sentences for name, sentences in named.items() if sentences}


DISTURBANCES = ("kill", "stop", "term", "power")
ENDS = ("final", "fail", "drop")


class History:
    """Lines in order of time, and by job.

    open_jobs: those that the broker says are open at the end.  expected: the answer of a job; None where unknown.
    """

    def __init__(
        self,
        lines: Iterable[Line],
        open_jobs: Iterable[str] = (),
        expected: Callable[[str], Expected | None] = lambda _: None,
    ) -> None:
        self.lines = sorted(lines, key=lambda line: line.at)
        self.open_jobs = set(open_jobs)
        self.expected = expected
        self.of: dict[str, list[Line]] = defaultdict(list)
        for line in self.lines:
            if line.job:
                self.of[line.job].append(line)
        self.blows = [line for line in self.lines if line.what in DISTURBANCES]
        self.numbers = {line.job: line.number for line in self.lines if line.what == "took"}
        self.runs = [line for line in self.lines if line.what == "ran" and not self._stale(line)]

    def all(self, job: str, *what: str) -> list[Line]:
        """The lines of a job of these kinds."""
        return [line for line in self.of[job] if line.what in what]

    def disturbed(self, begin: float, end: float, *programs: str) -> bool:
        """Whether a disturbance (of one of *programs*) can explain what happened between two moments."""
        return any(
            line.at <= end and self._over_at(line) >= begin - NEAR_S
            for line in self.blows
            if not programs or line.by in programs
        )

    def power_lost(self, begin: float, end: float) -> bool:
        """Whether the power was lost between two moments."""
        return any(line.what == "power" and begin <= line.at <= end for line in self.blows)

    def _over_at(self, blow: Line) -> float:
        """When a disturbance is over: a stopped process is disturbed until it goes on or is gone."""
        if blow.what != "stop":
            return blow.at
        later = (line.at for line in self.lines if line.by == blow.by and line.what in ("continue", "gone"))
        return next((at for at in later if at >= blow.at), float("inf"))

    def _stale(self, run: Line) -> bool:
        """A RUN that lay in the pipe of a stopped worker until others had run the job, or it had ended."""
        stops = [line.at for line in self.blows if (line.by, line.what) == (run.by, "stop") and line.at < run.at]
        return bool(stops) and any(
            stops[-1] < line.at < run.at and (line.what == "word" or (line.what == "ran" and line.by != run.by))
            for line in self.of[run.job]
        )


def check(history: History) -> Verdict:
    """Sort a history."""
    verdict = Verdict()
    verdict.lost = _lost(history)
    verdict.duplicated = _duplicated(history)
    verdict.unexpected = _unexpected(history)
    verdict.order = _order(history)
    verdict.flight = _flight(history)
    verdict.words = _words(history)
    verdict.gaps = _gaps(history)
    verdict.wrong = _wrong(history)
    verdict.failed = _failed(history)
    ran = {line.job for line in history.runs}
    verdict.counts = {
        "jobs": sum(1 for job in history.of if history.all(job, "asked")),
        "admitted": len(history.numbers),
        "ended": sum(1 for job in history.of if history.all(job, "word")),
        "runs": len(history.runs),
        "resumed": sum(1 for line in history.lines if line.what == "resumed"),
        "interrupted": sum(
            1 for job in history.of if any(one.number > 1 for one in history.all(job, "started", "came"))
        ),
        "recovered": sum(1 for job in history.of if _recovered(history, job, ran)),
        "cancelled": sum(1 for job in history.of if any(w.code == CANCELLED for w in history.all(job, "word"))),
        "buried": sum(1 for job in history.of if any(w.code == "E_POISON" for w in history.all(job, "word"))),
        "disturbances": len(history.blows),
    }
    return verdict


def _recovered(history: History, job: str, ran: set[str]) -> bool:
    took = history.all(job, "took")
    return took[0].again if took else job in ran


def _lost(history: History) -> list[str]:
    """An admitted job that never got its last word, or that the broker no longer knows."""
    found = []
    for job in history.numbers:
        word = history.all(job, "word")
        unknown = history.all(job, "unknown")
        if unknown and not (word and word[0].at < unknown[0].at):
            found.append(f"{job} was admitted, and later the broker did not know it")
        elif not word and not history.all(job, "left", "parted"):
            found.append(f"{job} was admitted and got no last word")
        elif not word and history.all(job, "parted") and not _finished(history, job):
            found.append(f"{job} was to finish without its producer, and did not")
        elif job in history.open_jobs:
            found.append(f"{job} is still open at the end")
    return found


def _finished(history: History, job: str) -> bool:
    # One that wears out two runs is buried, and nobody hears it.
    return bool(history.all(job, "final")) or len(history.all(job, "ran")) > 1


def _duplicated(history: History) -> list[str]:
    """A job that ran again without need, or was admitted twice."""
    found = []
    for job in history.of:
        numbers = {line.number for line in history.all(job, "took")}
        if len(numbers) > 1:
            found.append(f"{job} was admitted under the numbers {sorted(numbers)}")
        runs = [line for line in history.runs if line.job == job]
        for before, after in pairwise(runs):
            if not history.disturbed(before.at, after.at):
                found.append(f"{job} ran at {before.at:.3f} and again at {after.at:.3f}; nothing was disturbed")
        for word in history.all(job, "word"):
            late = [run for run in runs if run.at > word.at and not history.power_lost(word.at, run.at)]
            found += [f"{job} ran at {run.at:.3f}, after its last word" for run in late]
    return found


def _unexpected(history: History) -> list[str]:
    """Something about a job that nobody asked for, or that was refused."""
    found = []
    for job, lines in history.of.items():
        asked = 0
        refused = False
        for line in lines:
            if line.what == "asked":
                asked, refused = asked + 1, False
            elif line.what == "refused":
                refused = True
            elif line.what in ("took", "ran", "came", "word") and not asked:
                found.append(f"{job}: {line.what} before anybody asked for it")
            elif line.what == "ran" and refused:
                found.append(f"{job} was refused and ran")
            if line.what == "took" and line.again and asked == 1:
                found.append(f"{job} was asked for once and taken for a duplicate")
    return found


def _order(history: History) -> list[str]:
    """Runs that are not in the order of admission; a job that runs again keeps its place."""
    found = []
    highest = -1
    for run in history.runs:
        number = history.numbers.get(run.job)
        if number is None:
            continue
        if number < highest:
            found.append(f"{run.job}, admitted as {number}, ran after number {highest}")
        highest = max(highest, number)
    owners: dict[int, str] = {}
    for job, number in history.numbers.items():
        if owners.setdefault(number, job) != job:
            found.append(f"{job} and {owners[number]} were both admitted as {number}")
    return found


def _flight(history: History) -> list[str]:
    """Two jobs at once, but for a lost lease."""
    found = [f"{line.job} came to {line.by} while it ran" for line in history.lines if line.what == "overlap"]
    for number, run in enumerate(history.runs):
        ended = _end_of(history, run)
        for other in history.runs[number + 1 :]:
            if other.at >= ended:
                break
            lost = other.by != run.by and history.disturbed(run.at, other.at, run.by, "broker")
            if not lost:
                found.append(f"{other.job} ran on {other.by} while {run.job} ran on {run.by}")
    return found


def _end_of(history: History, run: Line) -> float:
    for line in history.lines:
        of_run = line.what in ENDS and (line.job, line.lease) == (run.job, run.lease)
        if line.at >= run.at and line.by == run.by and (of_run or line.what == "gone"):
            return line.at
    return float("inf")


def _words(history: History) -> list[str]:
    """More than one last word, something after it, or two that differ."""
    found = []
    for job in history.of:
        spoken: set[str] = set()
        for line in history.of[job]:
            if line.what in ("asked", "resumed"):
                spoken.discard(line.by)
            elif line.what in ("started", "came", "word") and line.by in spoken:
                found.append(f"{job}: {line.what} on {line.by} after its last word")
            if line.what == "word":
                spoken.add(line.by)
        for before, after in pairwise(history.all(job, "word")):
            same = (before.code, before.text, before.sha) == (after.code, after.text, after.sha)
            if not same and not history.power_lost(before.at, after.at):
                found.append(f"{job} ended with {before.code}, and then with {after.code}")
    return found


def _gaps(history: History) -> list[str]:
    """Chunks that do not follow each other, in number or in token."""
    found = []
    for job in history.of:
        place: dict[str, tuple[int, int]] = {}
        for line in history.of[job]:
            if line.what == "asked":
                place.setdefault(line.by, (0, 0))
            elif line.what == "resumed":
                place[line.by] = (line.seq, line.first)
            elif line.what == "came":
                seq, tokens = place.get(line.by, (0, 0))
                # The library does not tell numbers; it checks them itself.
                if line.first != tokens or line.seq not in (seq, -1):
                    found.append(f"{job}: chunk {line.seq} from token {line.first}, due {seq} from {tokens}")
                place[line.by] = (line.seq + 1, line.first + len(line.ids))
            elif line.what == "word" and line.code in (*WHOLE, CANCELLED) and line.seq >= 0:
                seq = place.get(line.by, (0, 0))[0]
                if line.seq != seq:
                    found.append(f"{job}: the last word counts {line.seq} chunks, {seq} came")
    return found


def _wrong(history: History) -> list[str]:
    """Tokens, text or hash that are not the job's."""
    found = [f"{line.job}: DRAWN does not begin its answer" for line in history.lines if line.what == "astray"]
    for job, lines in history.of.items():
        right = history.expected(job)
        if right is None:
            continue
        tokens = 0
        for line in lines:
            if line.what == "came":
                part = slice(line.first, line.first + len(line.ids))
                tokens = max(tokens, part.stop)
                if line.ids != right.ids[part]:
                    found.append(f"{job}: tokens {part.start} to {part.stop} are not its own")
                if right.texts is not None and line.text != "".join(right.texts[part]):
                    found.append(f"{job}: the text from token {part.start} on is not its own")
            elif line.what == "word" and line.code in WHOLE:
                if line.text != right.text or line.sha != trajectory_sha256(right.ids):
                    found.append(f"{job} ended with {line.code} and another text or hash")
            elif line.what == "word" and line.code == CANCELLED and line.sha:
                prefix = right.ids[:tokens]
                if line.sha != trajectory_sha256(prefix) or not right.text.startswith(line.text):
                    found.append(f"{job} was cancelled after {tokens} tokens and has another text or hash")
    return found


def _failed(history: History) -> list[str]:
    """Last words that nothing explains."""
    found = [f"ERROR about no job: {line.code} {line.text}" for line in history.lines if line.what == "complaint"]
    for job in history.of:
        for word in history.all(job, "word"):
            if word.code in WHOLE:
                continue
            if word.code == CANCELLED:
                if not any(line.at <= word.at for line in history.all(job, "cancelled", "left")):
                    found.append(f"{job} was cancelled by nobody")
            elif word.code == "E_ANSWER_LOST":
                # Its producer had more of it than was flushed, and ended it before the worker came to that place again.
                came = history.all(job, "came")
                taken_back = bool(came) and history.power_lost(came[0].at, word.at)
                if not (taken_back and any(line.at <= word.at for line in history.all(job, "cancelled"))):
                    found.append(f"{job} ended with E_ANSWER_LOST, though no power loss and cancel explain it")
            elif word.code == "E_POISON":
                if not _worn_out(history, job, word):
                    found.append(f"{job} was buried without two runs that ended in a disturbance")
            else:
                found.append(f"{job} ended with {word.code}: {word.text}")
    return found


def _worn_out(history: History, job: str, word: Line) -> bool:
    """Whether the job ran at least twice, and each run can have ended in a disturbance."""
    # The real worker writes no log; its producers hear STARTED.
    ran = history.all(job, "ran") or history.all(job, "started")
    runs = [line for line in ran if line.at <= word.at]
    ends = [*(run.at for run in runs[1:]), word.at]
    return len(runs) >= 2 and all(history.disturbed(run.at, end) for run, end in zip(runs, ends, strict=True))


def read(path: Path) -> list[Line]:
    """The lines of a log; the last may be torn, where its writer was killed."""
    lines = []
    for text in path.read_text().splitlines():
        try:
            told = json.loads(text)
        except ValueError:
            break
        lines.append(Line(**{**told, "ids": tuple(told.get("ids", ()))}))
    return lines


def write(path: Path, lines: Iterable[Line]) -> None:
    """Write a log."""
    path.write_text("".join(json.dumps(asdict(line)) + "\n" for line in lines))
