"""Broker and worker as launchd would run them: the real programs, by their own plists, under the stand-in."""

import json
import os
import plistlib
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from deploy_files.homes import Home, home
from deploy_files.launchd import Launchd
from tiny_models import Kind, make_llama
from whole.harness import ROOT, environment

from mtplx import last_error
from mtplx.errors import Exit
from mtplx.services import THROTTLE_S

# Ten seconds of a service file are half a second here.
SPEED = 20.0
MAIN = "from broker.__main__ import main; main()"
SLOW = json.dumps({"tokens": 60, "token_s": 0.02})


@pytest.fixture
def mac() -> Iterator[Home]:
    with home() as found:
        yield found


@pytest.fixture
def launchd() -> Iterator[Launchd]:
    with Launchd(SPEED) as running:
        yield running


def answered(place: Home, prompt: str = "one two three") -> str:
    with place.client() as client:
        return client.run(prompt).text


@pytest.mark.parametrize("order", ["broker first", "worker first"])
def test_a_job_is_answered_in_either_start_order_and_both_end_with_0(mac: Home, order: str) -> None:
    with Launchd() as launchd:
        texts = [mac.broker(), mac.scripted()]
        agents = [launchd.bootstrap(text) for text in (texts if order == "broker first" else reversed(texts))]
        assert "one" in answered(mac)
    assert [turn.code for agent in agents for turn in agent.turns] == [0, 0]
    assert not any(agent.killed for agent in agents)


def test_a_worker_that_crashes_or_is_killed_comes_back_after_the_throttle_and_its_job_goes_on(
    mac: Home, launchd: Launchd
) -> None:
    launchd.bootstrap(mac.broker())
    worker = launchd.bootstrap(mac.scripted())
    crash = json.dumps({"tokens": 4, "fault": "abort", "fault_after": 2, "fault_attempts": 1})
    with mac.client() as client:
        assert client.run("x", metadata={"script": crash}).run["attempt"] == 2
        stream = client.submit("x", metadata={"script": SLOW})
        next(iter(stream))
        os.kill(worker.pid, signal.SIGKILL)
        result = stream.result(timeout=20)
    assert (result.usage["completion_tokens"], result.run["attempt"]) == (60, 2)
    assert [turn.code for turn in worker.turns] == [-signal.SIGABRT, -signal.SIGKILL]
    assert worker.turns[1].began - worker.turns[0].began >= THROTTLE_S / SPEED


def test_a_broker_that_is_killed_comes_back_through_its_own_lock_and_loses_no_job(
    mac: Home, launchd: Launchd
) -> None:
    broker = launchd.bootstrap(mac.broker())
    launchd.bootstrap(mac.scripted())
    with mac.client() as client:
        stream = client.submit("x", metadata={"script": SLOW})
        next(iter(stream))
        os.kill(broker.pid, signal.SIGKILL)
        assert stream.result(timeout=20).usage["completion_tokens"] == 60
    assert [turn.code for turn in broker.turns] == [-signal.SIGKILL]
    assert broker.pid


def test_a_running_job_is_handed_back_in_time_and_goes_on_after_the_next_login() -> None:
    with home(drain_s=0.1) as mac, Launchd() as launchd:
        broker, worker = launchd.bootstrap(mac.broker()), launchd.bootstrap(mac.scripted())
        with mac.client() as client:
            long = json.dumps({"tokens": 60, "token_s": 0.02})
            stream = client.submit("x", metadata={"script": long}, finish=True)
            next(iter(stream))
            launchd.bootout(broker)
            assert [turn.code for turn in broker.turns] == [0]
            assert not broker.killed
            launchd.bootstrap(mac.broker())
            assert stream.result(timeout=20).usage["completion_tokens"] == 60
        assert worker.turns == []


def bad_config(place: Home, _: Launchd) -> tuple[bytes, Exit]:
    config = place.path / ".mtplx" / "config.toml"
    config.write_text("queue_job = 5\n")
    return place.broker(), Exit.SETTINGS


def unknown_option(place: Home, _: Launchd) -> tuple[bytes, Exit]:
    keys = plistlib.loads(place.broker())
    keys["ProgramArguments"].append("--of-another-version")
    return plistlib.dumps(keys), Exit.SETTINGS


def locked(place: Home, launchd: Launchd) -> tuple[bytes, Exit]:
    launchd.bootstrap(place.broker().replace(b"dev.mtplx.broker", b"another"))
    assert place.client().health()
    return place.broker(), Exit.LOCKED


def damaged_journal(place: Home, _: Launchd) -> tuple[bytes, Exit]:
    state = place.path / ".mtplx" / "state"
    state.mkdir(mode=0o700)
    (state / "journal.db").write_bytes(b"no database at all" * 100)
    return place.broker(), Exit.JOURNAL


def no_model(place: Home, _: Launchd) -> tuple[bytes, Exit]:
    folder = place.path / "half"
    folder.mkdir()
    (folder / "model.safetensors.incomplete").touch()
    place.given["model"] = folder
    return place.worker(), Exit.MODEL_FILES


def refused(place: Home, launchd: Launchd) -> tuple[bytes, Exit]:
    launchd.bootstrap(place.broker())
    launchd.bootstrap(place.scripted().replace(b"dev.mtplx.worker", b"another"))
    answered(place)
    place.given["model"] = make_llama(place.path / "tiny", Kind(context=128))
    return place.worker(), Exit.WORKER_REFUSED


@pytest.mark.parametrize("fault", [bad_config, unknown_option, locked, damaged_journal, no_model, refused])
def test_what_would_fail_again_is_told_once_and_left_down(mac: Home, launchd: Launchd, fault) -> None:
    text, code = fault(mac, launchd)
    agent = launchd.bootstrap(text)
    agent.wait_for(lambda one: bool(one.turns))
    assert [turn.code for turn in agent.turns] == [0]
    agent._thread.join(5)
    assert not agent._thread.is_alive(), "no restart loop"
    name = f"mtplx-{'worker' if fault in (no_model, refused) else 'broker'}"
    told = last_error.read(mac.logs, name)
    assert told is not None
    assert told.exit_code == code
    line = f"{name}: {told.message}\n"
    assert (mac.logs / f"{name}.err").read_text() == line
    assert stat.S_IMODE((mac.logs / f"{name}.last-error.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("started", ["systemd", "by hand"])
def test_exit_codes_stand_wherever_launchd_does_not_read_them(mac: Home, started: str) -> None:
    bad_config(mac, Launchd())
    service = ["--service", "systemd", "--log-dir", str(mac.logs)] if started == "systemd" else []
    done = subprocess.run(
        [sys.executable, "-P", "-m", "broker", *service],
        env=environment(HOME=str(mac.path)), capture_output=True, text=True, check=False, timeout=20,
    )  # fmt: skip
    assert done.returncode == Exit.SETTINGS
    assert "queue_job" in done.stderr
    assert (last_error.read(mac.logs, "mtplx-broker") is not None) == bool(service)


def test_a_service_has_its_page_and_a_port_that_is_taken_costs_it_the_port_alone() -> None:
    with ExitStack() as stack:
        # Held by whoever came first: by this test, or by somebody else on this machine.
        with suppress(OSError):
            stack.enter_context(socket.create_server(("127.0.0.1", 8000)))
        mac, launchd = stack.enter_context(home(http="")), stack.enter_context(Launchd())
        agent = launchd.bootstrap(mac.broker())
        page = urlsplit(mac.client().health()["broker"]["http"])
        assert (page.scheme, page.hostname) == ("http", "127.0.0.1")
        assert page.port != 8000
        with urlopen(page.geturl(), timeout=20) as answer:
            assert b"<title>" in answer.read()
        log = (mac.logs / "mtplx-broker.log").read_text()
        assert f"port 8000 is in use, so the page is at {page.geturl()}\n" in log
        assert log.count("\n") == 1
        assert agent.turns == []


def test_a_service_follows_its_settings_file_about_the_page() -> None:
    with home(http="") as mac, Launchd() as launchd:
        (mac.path / ".mtplx" / "config.toml").write_text('http = "off"\n')
        del mac.given["http"]
        launchd.bootstrap(mac.broker())
        assert not mac.client().health()["broker"].get("http")


def test_a_broker_without_any_environment_serves(mac: Home) -> None:
    bare = [
        "/usr/bin/env",
        "-i",
        sys.executable,
        "-P",
        "-c",
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{MAIN}",
    ]
    running = subprocess.Popen([*bare, "--run-dir", str(mac.run)], cwd="/", stdin=subprocess.DEVNULL)
    try:
        with mac.client() as client:
            assert client.health()["broker"]["pid"] == running.pid
    finally:
        running.terminate()
        assert running.wait(20) == Exit.OK


def test_a_user_without_a_home_is_told_so_and_no_restart_loop_begins(mac: Home) -> None:
    keys = plistlib.loads(mac.broker())
    missing = "def missing():\n    raise RuntimeError('no home')\n"
    program = f"{missing}import pathlib\npathlib.Path.home = missing\n{MAIN}"
    keys["ProgramArguments"][2:4] = ["-c", program]
    with Launchd(SPEED) as launchd:
        agent = launchd.bootstrap(plistlib.dumps(keys))
        agent.wait_for(lambda one: bool(one.turns))
    assert [turn.code for turn in agent.turns] == [0]
    told = last_error.read(mac.logs, "mtplx-broker")
    assert told is not None
    assert "set HOME" in told.message


def test_a_good_end_clears_the_last_error(mac: Home) -> None:
    last_error.note(mac.logs, "mtplx-broker", Exit.LOCKED, "another one")
    with Launchd() as launchd:
        launchd.bootstrap(mac.broker())
        mac.client().health()
        assert last_error.read(mac.logs, "mtplx-broker") is not None, "it tells of the last end, not of the start"
    assert last_error.read(mac.logs, "mtplx-broker") is None


def test_the_real_worker_runs_in_an_empty_environment_and_its_libraries_are_quiet(tmp_path: Path) -> None:
    with home(model=make_llama(tmp_path, Kind(context=128))) as place, Launchd() as launchd:
        agents = [launchd.bootstrap(place.worker()), launchd.bootstrap(place.broker())]
        with place.client() as client:
            assert client.submit("fox", max_tokens=3).result(timeout=60).usage["completion_tokens"] == 3
        assert [file.read_text() for file in place.logs.glob("*.err")] == ["", ""]
    assert [turn.code for agent in agents for turn in agent.turns] == [0, 0]
    assert not any(agent.killed for agent in agents)
