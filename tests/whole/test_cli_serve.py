"""`mtplx serve` with the real broker and scripted workers in place of the real one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from tools import need_library

from mtplx.cli.demo import run_demo
from mtplx.cli.serve import HEALTHY_S, MAX_DEATHS, Service, absolute_model
from mtplx.cli.signals import Signals
from mtplx.client import Client
from mtplx.errors import EXITS, JobError
from mtplx.settings import Settings
from mtplx.testing import ManualClock

ROOT = Path(__file__).parents[2]
LIMIT_S = 40.0


@pytest.fixture(autouse=True)
def _our_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    return Settings(run_dir=folder, beat_s=0.2, dead_s=1.0, stall_s=1.0, drain_s=2.0)


def scripted(settings: Settings, *flags: str) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", "mtplx.testing", "--back", settings.endpoint("back"), *flags)


@contextlib.contextmanager
def service(settings: Settings, worker: tuple[str, ...]) -> Iterator[tuple[Service, list[str]]]:
    said: list[str] = []
    with Service(settings, say=said.append, worker=worker) as running:
        yield running, said


def turn_until(running: Service, holds: Callable[[], bool]) -> None:
    assert running.turn_until(holds, LIMIT_S), "it did not come to pass"


def exit_code_of(running: Service) -> int | None:
    assert not running.turn_until(lambda: False, LIMIT_S)
    return running.exit_code


def test_it_says_when_the_broker_is_bound_and_when_the_worker_is_ready(settings: Settings) -> None:
    with service(settings, scripted(settings)) as (running, said):
        turn_until(running, lambda: running.ready)
        with Client(settings=settings) as client:
            assert client.run("one two").finish_reason == "stop"
    assert said[0].startswith(f"The broker takes jobs at {settings.endpoint('front')}")
    assert said[1].startswith("The worker is ready with scripted")
    assert running._broker.returncode == 0
    assert running._worker is not None
    assert running._worker.returncode == 0


def test_it_says_where_its_page_is(settings: Settings) -> None:
    with service(replace(settings, http="127.0.0.1:0"), scripted(settings)) as (running, said):
        turn_until(running, lambda: running.ready)
        assert f"Its page is at {running.health['broker']['http']}" in said
        assert running.health["broker"]["http"].startswith("http://127.0.0.1:")


def test_a_worker_that_crashes_is_started_again(settings: Settings) -> None:
    with service(settings, scripted(settings)) as (running, said):
        turn_until(running, lambda: running.ready)
        first = running.health["worker"]["pid"]
        os.kill(first, signal.SIGKILL)
        turn_until(running, lambda: not running.ready)
        turn_until(running, lambda: running.ready)
        assert running.health["worker"]["pid"] != first
    assert "The worker ended (SIGKILL); starting it again in 1 s." in said


def test_a_stalled_worker_is_killed_and_started_again(settings: Settings) -> None:
    with service(settings, scripted(settings)) as (running, said):
        turn_until(running, lambda: running.ready)
        with Client(settings=settings) as client:
            script = '{"tokens": 9, "fault": "hang", "fault_after": 2, "fault_attempts": 1}'
            job = client.submit("x", metadata={"script": script})
            turn_until(running, lambda: any("is stalled" in line for line in said))
            turn_until(running, lambda: running.ready)
            assert job.result(timeout=LIMIT_S).run["attempt"] == 2
            assert client.run("one two").finish_reason == "stop"
    assert len([line for line in said if "is stalled" in line]) == 1
    assert "The worker ended (SIGKILL); starting it again in 1 s." in said


def test_a_worker_that_ends_itself_says_why_and_is_started_again(settings: Settings, tmp_path: Path) -> None:
    once = (
        "import os, sys\n"
        "if not os.path.exists(sys.argv[1]): open(sys.argv[1], 'w').close(); sys.exit(71)\n"
        "os.execv(sys.executable, [sys.executable, '-P', '-m', 'mtplx.testing', *sys.argv[2:]])"
    )
    worker = (sys.executable, "-c", once, str(tmp_path / "started"), *scripted(settings)[4:])
    with service(settings, worker) as (running, said):
        turn_until(running, lambda: running.ready)
    assert any("exit code 71: the worker made no progress" in line and "again in 1 s" in line for line in said)


@pytest.mark.parametrize("code", [code for code, ending in EXITS.items() if code and not ending.again])
def test_a_worker_that_cannot_run_ends_the_service_with_its_code(settings: Settings, code: int) -> None:
    with service(settings, (sys.executable, "-c", f"raise SystemExit({code})")) as (running, said):
        assert exit_code_of(running) == code
    assert any("cannot run" in line for line in said)


def test_a_second_service_on_the_same_folder_ends_with_exit_code_4(settings: Settings) -> None:
    with service(settings, scripted(settings)) as (first, _):
        turn_until(first, lambda: first.ready)
        with service(settings, scripted(settings)) as (second, said):
            assert exit_code_of(second) == 4
        assert not any("takes jobs" in line for line in said)


def test_a_broker_that_dies_ends_the_service(settings: Settings) -> None:
    with service(settings, scripted(settings)) as (running, said):
        turn_until(running, lambda: running.ready)
        running._broker.kill()
        assert exit_code_of(running) == 70
    assert "The broker ended by itself (SIGKILL); stopping." in said


SERVE = """
import sys
from mtplx.cli.serve import serve_until_told
from mtplx.settings import Settings
settings = Settings(run_dir=sys.argv[1], drain_s=float(sys.argv[2]), durability=sys.argv[3])
worker = (sys.executable, "-P", "-m", "mtplx.testing", "--back", settings.endpoint("back"))
sys.exit(serve_until_told(settings, lambda line: print(line, flush=True), worker=worker))
"""


@contextlib.contextmanager
def serving(settings: Settings, drain_s: float) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SERVE, str(settings.run_dir), str(drain_s), settings.durability]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            assert "takes jobs" in process.stdout.readline()
            assert "ready" in process.stdout.readline()
            yield process
        finally:
            process.terminate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_lets_the_running_job_end_and_stops_both(settings: Settings, number: int) -> None:
    with serving(settings, 20.0) as process, Client(settings=settings) as client:
        stream = client.submit("x", max_tokens=20, metadata={"script": '{"tokens": 20, "token_s": 0.02}'})
        next(stream)
        pids = [client.health()[name]["pid"] for name in ("broker", "worker")]
        process.send_signal(number)
        assert len(stream.result().ids) == 20
        assert process.wait(LIMIT_S) == 0
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_second_signal_ends_the_drain(settings: Settings) -> None:
    settings = replace(settings, durability="none")
    with serving(settings, 300.0) as process, Client(settings=settings) as client:
        stream = client.submit("x", max_tokens=900, metadata={"script": '{"tokens": 900, "token_s": 0.5}'})
        next(stream)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert "Stopping" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 0
        with pytest.raises(JobError, match="stopping") as caught:
            stream.result()
        assert caught.value.code == "E_DRAINING"


def test_a_local_model_is_named_from_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert absolute_model(Settings(model="model")).model == str(tmp_path / "model")
    assert absolute_model(Settings(model="smollm2-135m")).model == "smollm2-135m"


def test_the_demo_checks_itself_and_shows_everything(settings: Settings, tmp_path: Path) -> None:
    need_library("opentelemetry.sdk")
    console = Console(record=True, width=110, force_terminal=False, quiet=False)
    folder = tmp_path / "demo"
    folder.mkdir(mode=0o700)
    worker = scripted(Settings(run_dir=folder), "--tokens", "12", "--token-s", "0.01")
    with Signals() as signals:
        assert run_demo(settings, folder, console, signals, worker=worker) == 0
    shown = console.export_text()
    for part in ("amber asked", "FIRST TOKEN", "process mtplx.jobs", "chat scripted", "All checks passed"):
        assert part in shown


def demo_of(settings: Settings, folder: Path, worker: tuple[str, ...], signals: Signals) -> tuple[int, str]:
    console = Console(record=True, width=110, force_terminal=False)
    folder.mkdir(mode=0o700)
    return run_demo(settings, folder, console, signals, worker=worker), console.export_text()


def test_a_demo_whose_worker_cannot_run_ends_with_its_code(settings: Settings, tmp_path: Path) -> None:
    with Signals() as signals:
        code, shown = demo_of(settings, tmp_path / "d", (sys.executable, "-c", "raise SystemExit(3)"), signals)
    assert code == 3
    assert "did not become ready" in shown


def test_a_demo_whose_worker_ends_for_good_while_jobs_run_ends_with_its_code(
    settings: Settings, tmp_path: Path
) -> None:
    # Its second start is refused, as that of a worker whose model is gone.
    once = (
        "import os, sys\n"
        "if os.path.exists(sys.argv[1]): sys.exit(3)\n"
        "open(sys.argv[1], 'w').close()\n"
        "os.execv(sys.executable, [sys.executable, '-P', '-m', 'mtplx.testing', *sys.argv[2:]])"
    )
    folder = tmp_path / "d"
    flags = scripted(Settings(run_dir=folder), "--tokens", "12", "--fault", "exit", "--fault-after", "3")[4:]
    with Signals() as signals:
        worker = (sys.executable, "-c", once, str(tmp_path / "started"), *flags)
        code, shown = demo_of(settings, folder, worker, signals)
    assert code == 3
    assert "Not all jobs have ended" in shown


def test_a_demo_that_is_told_to_stop_removes_its_folder(tmp_path: Path) -> None:
    script = (
        "import sys, mtplx.cli.demo as demo\n"
        "def run(settings, folder, console, signals):\n"
        "    print(folder, flush=True)\n"
        "    while not signals.count: signals.pause(60)\n"
        "    return 128 + signals.last\n"
        "demo.run_demo = run\n"
        "demo.demo(['--model', '/nowhere'])"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert folder.is_dir()
        process.terminate()
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert not folder.exists()


class Dead:
    """A child that ended as soon as it was looked at."""

    pid, stdin, returncode = 1, None, 1

    def poll(self) -> int:
        return 1


class Storm(Service):
    """A service whose broker is well and whose workers all die; what the broker says of jobs is given."""

    def __init__(self, clock: ManualClock, said: list[str]) -> None:
        self.jobs: list[dict] = []
        self.spawned: list[float] = []
        self.clock = clock
        super().__init__(Settings(), say=said.append, clock=clock.monotonic, pause=clock.advance)
        self._broker.poll = lambda: None
        self._client = self

    def _spawn(self, name: str) -> Dead:
        if name == "worker":
            self.spawned.append(self.clock.seconds)
        return Dead()

    def _ask_health(self) -> None:
        pass

    def status(self, *, jobs: bool) -> dict:
        return {"jobs": self.jobs}


def test_a_worker_that_dies_again_and_again_is_started_ever_later_and_then_given_up() -> None:
    clock, said = ManualClock(), []
    storm = Storm(clock, said)
    # Ready for a moment, each time: that alone is no sign of health.
    storm._ready_at = 0.0
    assert not storm.turn_until(lambda: False, 1000.0)
    assert storm.exit_code == 70
    assert f"{MAX_DEATHS} times in a row" in said[-1]
    waits = [1, 2, 4, 8, 16, 30, 30, 30, 30]
    assert [line.split("again in ")[1] for line in said[:-1]] == [f"{wait} s." for wait in waits]
    assert len(storm.spawned) == MAX_DEATHS
    gaps = [after - before for before, after in pairwise(storm.spawned)]
    assert gaps == pytest.approx(waits, abs=0.5)


def test_a_job_run_to_its_end_or_a_while_in_good_health_ends_the_series() -> None:
    clock, said = ManualClock(), []
    storm = Storm(clock, said)
    for number in range(3 * MAX_DEATHS):
        storm.jobs = [{"admit_seq": number // 2, "outcome": "stop"}, {"admit_seq": 99, "outcome": "worker_lost"}]
        deaths = len(said)
        assert storm.turn_until(lambda deaths=deaths: len(said) > deaths, 100.0)
    assert storm.exit_code is None
    for _ in range(2 * MAX_DEATHS):
        deaths = len(said)
        storm._ready_at = clock.seconds
        clock.advance(HEALTHY_S)
        assert storm.turn_until(lambda deaths=deaths: len(said) > deaths, 100.0)
    assert said[-1].endswith("again in 1 s.")
