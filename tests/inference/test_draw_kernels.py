"""The children that compile what MLX fuses for draws: what they make is kept whole, and none is waited for in vain."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from worker.engine import draw_kernels
from worker.engine.draw import COMMON
from worker.engine.draw_child import PREFIX, adopt
from worker.engine.draw_kernels import Wanted, compiling

WANTED = Wanted(width=323, vocabulary=319, dtype="bfloat16", rows=(1, 4))
KINDS = range(len(COMMON))
# What a child does that is not told otherwise: a kernel that all share, and one of its own.
CHILD = """
import json, os, signal, sys
from pathlib import Path
job = json.loads(sys.stdin.readline())
place, kept = Path(job["place"]), Path(job["folder"])
(kept.parent / f"seen-{job['kind']}").write_text(json.dumps(job))
assert os.environ["MLX_PTX_CACHE_DIR"] == job["place"]
what = json.loads((kept.parent / "script").read_text()).get(str(job["kind"]), "")
for name in ("shared", f"own-{job['kind']}", "long/name"):
    (place / name).parent.mkdir(exist_ok=True)
    (place / f"{name}.ptx").write_text("" if what == "half" else f"code of {job['kind']}")
    if what == "die":
        sys.exit("the compiler is out of memory")
    (place / f"{name}.txt").write_text("f\\tg\\n")
    (place / f"{name}.cu").write_text("text")
if what == "hang":
    signal.pause()
"""


class Rig:
    """A kernel folder, and a child program that does what the script says."""

    def __init__(self, place: Path) -> None:
        self.place, self.folder, self.time = place, place / "kept", 0.0
        self.folder.mkdir()
        (place / "child.py").write_text(CHILD)
        self.program = (sys.executable, "-S", str(place / "child.py"))
        self.script()

    def script(self, **what: str) -> None:
        (self.place / "script").write_text(
            json.dumps({kind.removeprefix("k"): does for kind, does in what.items()})
        )

    def clock(self) -> float:
        return self.time

    def run(self, wanted: Wanted = WANTED, late: float = 0.0) -> None:
        with compiling(wanted, self.folder, program=self.program, clock=self.clock) as compiled:
            self.pids = [child.process.pid for child in self.children]
            self.wait_for_hanging()
            self.time += late
            compiled()
            compiled()

    def wait_for_hanging(self) -> None:
        """All but the children that hang are done, so that only these are late."""
        hanging = json.loads((self.place / "script").read_text())
        for child in self.children:
            if hanging.get(child.place.name) != "hang":
                child.process.wait(60)

    @property
    def children(self) -> list[draw_kernels._Child]:
        return self.made._all if self.made else []

    made: draw_kernels.Children | None = None
    pids: tuple[int, ...] | list[int] = ()

    def seen(self) -> dict[int, dict[str, object]]:
        """What the children were told, by kind, since the last time."""
        found = {}
        for path in self.place.glob("seen-*"):
            told = json.loads(path.read_text())
            found[told["kind"]] = told
            path.unlink()
        return found

    def codes(self) -> dict[str, str]:
        return {str(path.relative_to(self.folder)): path.read_text() for path in self.folder.rglob("*.ptx")}

    def temporary(self) -> list[Path]:
        return list(self.folder.glob(f"{PREFIX}*"))


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(draw_kernels, "target", lambda: "cuda")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    made = Rig(tmp_path)

    class Noted(draw_kernels.Children):
        def start(self, wanted: Wanted, program: tuple[str, ...]) -> None:
            made.made = self
            super().start(wanted, program)

    monkeypatch.setattr(draw_kernels, "Children", Noted)
    yield made
    assert made.temporary() == []
    assert made.children == []


def test_what_the_children_compile_is_kept_where_mlx_looks(rig: Rig) -> None:
    rig.run()
    assert set(rig.codes()) == {"shared.ptx", "long/name.ptx", *(f"own-{kind}.ptx" for kind in KINDS)}
    for code in rig.folder.rglob("*.ptx"):
        assert code.with_suffix(".txt").read_text() == "f\tg\n"
        assert code.with_suffix(".cu").exists()
    told = rig.seen()
    assert set(told) == set(KINDS)
    assert told[1].items() >= {"width": 323, "vocabulary": 319, "dtype": "bfloat16", "rows": [1, 4]}.items()
    assert told[2]["rows"] == [4, 1], "children begin at both ends"


def test_where_all_is_present_no_child_is_started(rig: Rig) -> None:
    rig.run()
    rig.seen()
    rig.run()
    assert rig.seen() == {}
    (rig.folder / "own-3.ptx").unlink()
    rig.run()
    assert set(rig.seen()) == set(KINDS), "what somebody took away is made again"


@pytest.mark.parametrize("other", [{"width": 324}, {"vocabulary": 318}, {"dtype": "float16"}, {"rows": (1,)}])
def test_other_draws_have_kernels_of_their_own(rig: Rig, other: dict[str, object]) -> None:
    assert replace(WANTED, **other).mark != WANTED.mark


def test_another_law_or_another_mlx_has_kernels_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = {WANTED.mark}
    with monkeypatch.context() as patched:
        patched.setattr(draw_kernels.inspect, "getsource", lambda module: module.__name__)
        marks.add(WANTED.mark)
    monkeypatch.setattr(draw_kernels, "version", lambda name: f"{name} 9")
    marks.add(WANTED.mark)
    assert len(marks) == 3


def test_what_is_there_is_not_written_over(rig: Rig) -> None:
    (rig.folder / "shared.ptx").write_text("of another worker")
    rig.run()
    assert rig.codes()["shared.ptx"] == "of another worker"
    assert "own-5.ptx" in rig.codes()


def test_a_child_that_hangs_is_killed_at_the_limit(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.script(k2="hang")
    with caplog.at_level(logging.DEBUG, "worker.engine"):
        rig.run(late=draw_kernels.LIMIT_S)
    assert [record.getMessage().strip() for record in caplog.records] == [
        "draws of kind 2 are left to MLX to compile: it takes too long"
    ]
    with pytest.raises(ProcessLookupError):
        os.kill(rig.pids[2], 0)
    assert "own-2.ptx" not in rig.codes()
    assert "own-1.ptx" in rig.codes()
    rig.run()
    assert rig.pids == [], "it would hang at each start"


def test_a_child_that_dies_costs_a_line_in_the_debug_log(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.script(**{f"k{kind}": "die" for kind in KINDS})
    with caplog.at_level(logging.DEBUG, "worker.engine"):
        rig.run()
    assert len(caplog.records) == len(KINDS)
    assert all(record.levelno == logging.DEBUG for record in caplog.records)
    assert "kind 0 are left to MLX to compile: exit code 1 the compiler is out of memory" in caplog.text
    assert rig.codes() == {}


def test_half_a_file_is_not_kept(rig: Rig) -> None:
    rig.script(k4="half")
    rig.run()
    assert "own-4.ptx" not in rig.codes()
    assert "" not in rig.codes().values()


def test_a_program_that_cannot_be_started_is_no_error(rig: Rig) -> None:
    rig.program = (str(rig.place / "nowhere"),)
    rig.run()
    rig.place.joinpath("other").touch()
    with compiling(WANTED, rig.place / "other", program=rig.program) as compiled:
        compiled()
    assert rig.codes() == {}


def test_children_end_when_the_start_fails(rig: Rig) -> None:
    rig.script(**{f"k{kind}": "hang" for kind in KINDS})
    pids = []

    def start() -> None:
        with compiling(WANTED, rig.folder, program=rig.program, clock=rig.clock):
            pids.extend(child.process.pid for child in rig.children)
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        start()
    assert len(pids) == len(KINDS)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert list(rig.folder.iterdir()) == [], "nothing is marked as present"


def test_what_a_killed_worker_left_is_removed_and_what_a_living_one_uses_stays(rig: Rig) -> None:
    left, used = rig.folder / f"{PREFIX}left", rig.folder / f"{PREFIX}used"
    for place in (left, used):
        (place / "0").mkdir(parents=True)
        (place / "0" / "some.ptx").write_text("code")
    lock = os.open(used, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    rig.run()
    assert rig.temporary() == [used]
    os.close(lock)
    rig.run()


@pytest.mark.parametrize("device", ["metal", None])
def test_children_are_for_cuda_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch, device: str | None) -> None:
    monkeypatch.setattr(draw_kernels, "target", lambda: device)
    rig.run()
    assert rig.seen() == {}
    assert list(rig.folder.iterdir()) == []
    with compiling(WANTED, None, program=rig.program) as compiled:
        compiled()


def test_few_cores_are_left_to_the_check(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    rig.run()
    assert rig.seen() == {}


def kernel(place: Path, name: str, code: str, *, source: bool = True) -> None:
    (place / name).parent.mkdir(parents=True, exist_ok=True)
    (place / f"{name}.ptx").write_text(code)
    (place / f"{name}.txt").write_text("f\tg\n")
    if source:
        (place / f"{name}.cu").touch()


def test_a_child_takes_what_another_has_finished_and_nothing_else(tmp_path: Path) -> None:
    other, own = tmp_path / "other", tmp_path / "own"
    for name in ("done", "a/long name", "mine"):
        kernel(other, name, "theirs")
    kernel(other, "in work", "theirs", source=False)
    kernel(other, "empty", "")
    kernel(other, f"{PREFIX}x/0/theirs", "theirs")
    (other / "text.cu").touch()
    kernel(own, "mine", "mine", source=False)
    adopt(other, own)
    found = {str(path.relative_to(own)): path.read_text() for path in own.rglob("*.ptx")}
    assert found == {"done.ptx": "theirs", "a/long name.ptx": "theirs", "mine.ptx": "mine"}
    assert (own / "a" / "long name.txt").read_text() == "f\tg\n"
    assert list(own.rglob("*.cu")) == [], "what is taken is not passed on: its own MLX may be about to write it"


def child(code: str, place: Path) -> subprocess.Popen[bytes]:
    (place / "0").mkdir()
    env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PATH": os.environ["PATH"]}
    return subprocess.Popen([sys.executable, "-P", *code.split("|")], stdin=subprocess.PIPE, env=env)


def test_the_child_itself_draws_its_kind(tmp_path: Path) -> None:
    with child("-m|worker.engine.draw_child", tmp_path) as process:
        job = {
            "width": 64,
            "vocabulary": 60,
            "dtype": "float32",
            "rows": [1, 2],
            "kind": 5,
            "folder": str(tmp_path),
        }
        assert process.stdin is not None
        process.stdin.write(json.dumps(job | {"place": str(tmp_path / "0")}).encode() + b"\n")
        process.stdin.flush()
        assert process.wait(120) == 0


def test_the_child_starts_without_the_packages_that_take_seconds() -> None:
    code = "import sys, worker.engine.draw_child; print({'mlx_lm', 'transformers'} & {*sys.modules})"
    env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_child_ends_when_its_parent_does(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from worker.engine.draw_child import _attend; _attend(Path(sys.argv[1]))"
    kernel(tmp_path / "1", "done", "theirs")
    with child(f"-c|{code}|{tmp_path / '0'}", tmp_path) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(120) == 1


def test_a_stopped_child_leaves_no_process(rig: Rig) -> None:
    rig.script(k0="hang")
    with compiling(WANTED, rig.folder, program=rig.program, clock=rig.clock) as compiled:
        rig.wait_for_hanging()
        os.kill(rig.children[0].process.pid, signal.SIGKILL)
        compiled()
    assert "own-1.ptx" in rig.codes()
    assert "own-0.ptx" not in rig.codes()
