"""The checker of histories: a good history passes, and each kind of fault has a history that shows it."""

from __future__ import annotations

from pathlib import Path

import pytest
from whole.history import Expected, History, Line, Verdict, check, read, write

from mtplx.testing import trajectory_sha256

IDS = (3, 1, 4, 1)
TEXTS = ("a ", "b ", "c ", "d ")
ANSWER = Expected(IDS, TEXTS, "".join(TEXTS))


class Story:
    """Writes a history line by line, a tenth of a second apart."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.open_jobs: set[str] = set()

    def tell(self, what: str, job: str = "", by: str = "p", **more: object) -> Story:
        self.lines.append(Line(at=len(self.lines) / 10, what=what, job=job, by=by, **more))  # type: ignore[arg-type]
        return self

    def wait(self) -> Story:
        """Let so much time pass that no disturbance before it explains anything after it."""
        for _ in range(40):
            self.tell("gone", by="nobody")
        return self

    def take(self, job: str = "j", number: int = 0, **more: object) -> Story:
        return self.tell("asked", job).tell("took", job, number=number, **more)

    def run(self, job: str = "j", lease: int = 1, by: str = "w") -> Story:
        return self.tell("ran", job, by, lease=lease)

    def chunk(self, job: str = "j", seq: int = 0, first: int = 0, n: int = 2, **more: object) -> Story:
        part = slice(first, first + n)
        return self.tell(
            "came", job, **{"seq": seq, "first": first, "ids": IDS[part], "text": "".join(TEXTS[part]), **more}
        )

    def word(self, job: str = "j", code: str = "stop", seq: int = 2, n: int = 4, **more: object) -> Story:
        answer = {"text": "".join(TEXTS[:n]), "sha": trajectory_sha256(IDS[:n])}
        return self.tell("word", job, **{"code": code, "seq": seq, **answer, **more})

    def end(self, job: str = "j", lease: int = 1, by: str = "w") -> Story:
        """The worker ends the run, and the producer hears all of the answer."""
        return self.tell("final", job, by, lease=lease).chunk(job).chunk(job, 1, 2).word(job)

    def whole(self, job: str = "j", number: int = 0, lease: int = 1) -> Story:
        return self.take(job, number).run(job, lease).end(job, lease)

    def check(self) -> Verdict:
        return check(History(self.lines, self.open_jobs, lambda _: ANSWER))


def test_a_history_without_a_fault_passes():
    verdict = Story().whole("a", 0, 1).whole("b", 1, 2).check()
    assert verdict.faults == {}
    counts = verdict.counts
    assert (counts["jobs"], counts["admitted"], counts["ended"], counts["runs"]) == (2, 2, 2, 2)


def test_a_job_goes_on_over_a_worker_that_dies_and_a_new_connection():
    story = Story().take().run().chunk().tell("kill", by="w").tell("gone", by="w").run(lease=2, by="v")
    story.tell("resumed", "j", "q", seq=1, first=2).chunk(seq=1, first=2, by="q").word(by="q")
    verdict = story.tell("final", "j", "v", lease=2).check()
    assert verdict.faults == {}
    assert (verdict.counts["runs"], verdict.counts["resumed"]) == (2, 1)


def test_an_admission_whose_answer_was_never_seen_is_recovered():
    story = (
        Story()
        .tell("asked", "j")
        .tell("kill", by="broker")
        .tell("asked", "j", "q")
        .tell("took", "j", "q", number=0, again=True)
    )
    story.run().tell("final", "j", "w", lease=1).chunk(by="q").chunk(seq=1, first=2, by="q").word(by="q")
    verdict = story.check()
    assert verdict.faults == {}
    assert verdict.counts["recovered"] == 1


def test_a_job_that_is_to_finish_without_its_producer_needs_no_last_word():
    assert Story().take().run().tell("parted", "j").tell("final", "j", "w", lease=1).check().faults == {}


def test_a_submit_that_nobody_answered_is_no_fault():
    assert Story().tell("asked", "j").check().faults == {}


BAD = {
    # An admitted job without its last word.
    "lost: no word": ("lost", lambda: Story().take().run()),
    "lost: forgotten": ("lost", lambda: Story().take().tell("kill", by="broker").tell("unknown", "j").word()),
    "lost: still open though its producer left": ("lost", lambda: _open(Story().take().tell("left", "j"))),
    "lost: to finish without its producer": ("lost", lambda: Story().take().run().chunk().tell("parted", "j").tell("drop", "j", "w", lease=1)),
    # A second run, or a second admission.
    "duplicated: ran twice": ("duplicated", lambda: Story().take().run().tell("fail", "j", "w", lease=1).run(lease=2).end(lease=2)),
    "duplicated: a disturbance long ago explains nothing": (
        "duplicated",
        lambda: Story().tell("kill", by="w").wait().take().run().tell("fail", "j", "w", lease=1).run(lease=2).end(lease=2),
    ),
    "duplicated: ran after its last word": ("duplicated", lambda: Story().whole().tell("kill", by="broker").run(lease=1)),
    "duplicated: two numbers": ("duplicated", lambda: Story().take().tell("asked", "j").tell("took", "j", number=1, again=True).run().end()),
    # Something that nobody asked for.
    "unexpected: ran unasked": ("unexpected", lambda: Story().whole().run("x", 2).tell("final", "x", "w", lease=2)),
    "unexpected: refused and run": ("unexpected", lambda: Story().tell("asked", "j").tell("refused", "j", code="E_QUEUE_FULL").run().end()),
    "unexpected: a first submit is no duplicate": ("unexpected", lambda: Story().take(again=True).run().end()),
    # Order.
    "order: the later one first": ("order", lambda: Story().take("a", 0).take("b", 1).run("b").end("b").run("a", 2).end("a", 2)),
    "order: a retried job lost its place": (
        "order",
        lambda: Story().take("a", 0).take("b", 1).run("a").tell("kill", by="w").tell("gone", by="w").run("b", 2, "v").end("b", 2, "v").run("a", 3, "v").end("a", 3, "v"),
    ),
    "order: one number for two": ("order", lambda: Story().whole("a", 0).whole("b", 0, 2)),
    # Two at once.
    "flight: the worker saw two": ("flight", lambda: Story().take().run().tell("overlap", "x", "w").end()),
    "flight: two on one worker": ("flight", lambda: Story().take("a", 0).take("b", 1).run("a").run("b", 2).end("a").end("b", 2)),
    "flight: two workers, no lease lost": ("flight", lambda: Story().take("a", 0).take("b", 1).run("a").run("b", 2, "v").end("a").end("b", 2, "v")),
    # Last words.
    "words: two": ("words", lambda: Story().whole().word()),
    "words: a chunk after it": ("words", lambda: Story().take().run().chunk().chunk(seq=1, first=2).word().chunk(seq=2, first=4, n=0)),
    "words: another one to a second reader": (
        "words",
        lambda: Story().whole().tell("resumed", "j", "q", seq=2, first=4).tell("word", "j", "q", code="E_INTERNAL"),
    ),
    # Chunks.
    "gaps: a token is missing": ("gaps", lambda: Story().take().run().chunk().chunk(seq=1, first=3, n=1).word()),
    "gaps: a token comes twice": ("gaps", lambda: Story().take().run().chunk().chunk(seq=1, first=1, n=3).word()),
    "gaps: a number is missing": ("gaps", lambda: Story().take().run().chunk().chunk(seq=2, first=2).word(seq=3)),
    "gaps: repeated after a resume": (
        "gaps",
        lambda: Story().take().run().chunk().tell("resumed", "j", "q", seq=1, first=2).chunk(seq=1, first=0, n=4, by="q").word(by="q"),
    ),
    "gaps: the last word counts another number": ("gaps", lambda: Story().take().run().chunk().chunk(seq=1, first=2).word(seq=3)),
    # Content.
    "wrong: another token": ("wrong", lambda: Story().take().run().chunk(ids=(3, 9)).chunk(seq=1, first=2).word()),
    "wrong: another text": ("wrong", lambda: Story().take().run().chunk(text="a x").chunk(seq=1, first=2).word()),
    "wrong: another hash": ("wrong", lambda: Story().take().run().chunk().chunk(seq=1, first=2).word(sha="0" * 64)),
    "wrong: cut short": ("wrong", lambda: Story().take().run().chunk().word(seq=1, n=2)),
    "wrong: a cancelled text that is not a beginning": (
        "wrong",
        lambda: Story().take().run().chunk().tell("cancelled", "j").word(code="cancelled", seq=1, n=2, text="x"),
    ),
    "wrong: DRAWN of another answer": ("wrong", lambda: Story().take().run().tell("astray", "j", "w").end()),
    # Ends that nothing explains.
    "failed: an error": ("failed", lambda: Story().take().run().tell("word", "j", code="E_WORKER_LOST")),
    "failed: cancelled by nobody": ("failed", lambda: Story().take().run().chunk().word(code="cancelled", seq=1, n=2)),
    "failed: buried after one run": ("failed", lambda: Story().take().run().tell("kill", by="w").tell("word", "j", code="E_POISON")),
    "failed: an answer lost by a kill": ("failed", lambda: Story().take().run().chunk().tell("cancelled", "j").tell("kill", by="broker").tell("word", "j", code="E_ANSWER_LOST")),
    "failed: complaint": ("failed", lambda: Story().whole().tell("complaint", code="E_PROTOCOL")),
}  # fmt: skip


def _open(story: Story) -> Story:
    story.open_jobs = {"j"}
    return story


@pytest.mark.parametrize("name", BAD)
def test_a_history_that_shows_a_fault_fails_by_its_name(name: str):
    promise, story = BAD[name]
    assert promise in story().check().faults


def test_every_promise_has_a_history_that_breaks_it():
    promises = set(Verdict.__dataclass_fields__) - {"counts"}
    assert {promise for promise, _ in BAD.values()} == promises


def test_a_run_read_late_by_a_worker_that_was_stopped_changes_nothing():
    """The broker gave it up, another ran the job and the next one; then it woke up and read its RUN."""
    story = Story().take("a", 0).take("b", 1).tell("stop", by="w").run("a", 2, "v").end("a", 2, "v")
    story.run("b", 3, "v").tell("continue", by="w").run("a", 1, "w").tell("drop", "a", "w", lease=1).end(
        "b", 3, "v"
    )
    assert story.check().faults == {}


def test_two_workers_may_run_a_job_where_the_first_lost_its_lease():
    story = Story().take().run().chunk().tell("stop", by="w").run(lease=2, by="v").tell("continue", by="w")
    story.tell("drop", "j", "w", lease=1).chunk(seq=1, first=2).tell("final", "j", "v", lease=2).word()
    assert story.check().faults == {}


def test_a_power_loss_may_take_a_last_word_back_and_a_kill_may_not():
    def told(blow: str) -> Verdict:
        return Story().whole().tell(blow, by="broker").run(lease=1).tell("final", "j", "w", lease=1).check()

    assert told("power").faults == {}
    assert list(told("kill").faults) == ["duplicated"]


def test_a_cancel_may_meet_an_answer_that_a_power_loss_took():
    story = Story().take().run().chunk().tell("cancelled", "j").tell("power", by="broker")
    assert story.tell("word", "j", code="E_ANSWER_LOST").check().faults == {}


def test_a_job_is_buried_by_two_runs_that_were_disturbed():
    story = Story().take().run().tell("kill", by="w").run(lease=2, by="v").tell("kill", by="v")
    assert story.tell("word", "j", code="E_POISON").check().faults == {}


def test_a_log_is_read_up_to_the_line_in_which_its_writer_was_killed(tmp_path: Path):
    lines = Story().whole().lines
    write(tmp_path / "log", lines)
    text = (tmp_path / "log").read_text()
    assert read(tmp_path / "log") == lines
    (tmp_path / "log").write_text(text[:-20])
    assert read(tmp_path / "log") == lines[:-1]
