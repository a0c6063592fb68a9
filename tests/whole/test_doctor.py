"""`mtplx doctor`: each thing that can be wrong is told in a sentence with what to do, whatever runs or does not."""

from __future__ import annotations

import importlib.metadata
import json
import signal
import socket
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner
from tools import need_library
from whole.fake_broker import FakeBroker
from whole.harness import service
from whole.keyed import keyed

from mtplx import __version__
from mtplx.cli import checkup, checkup_broker, doctor
from mtplx.cli.checkup import Finding, State
from mtplx.cli.main import main
from mtplx.keys import make
from mtplx.settings import Settings

WELL = (0, "said", "")


class Usage(NamedTuple):
    """As `shutil.disk_usage` tells it."""

    total: int
    used: int
    free: int


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("MTPLX_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr(checkup_broker, "ANSWER_S", 0.5)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    return folder


def found(run_dir: Path, runs: Any = lambda *_: WELL, **flags: Any) -> list[Finding]:
    """All findings, with programs that are not run."""
    return list(doctor.findings({"run_dir": str(run_dir), **flags}, None, runs))


def wrongs(run_dir: Path, about: str, **given: Any) -> list[str]:
    """The sentences of what is wrong there; each says what to do."""
    bad = [one for one in found(run_dir, **given) if one.state is State.WRONG and one.about == about]
    assert all(one.advice for one in bad)
    return [one.sentence for one in bad]


def of(health: dict[str, Any]) -> list[Finding]:
    return list(checkup_broker.judged(health, Settings()))


def sound(**changes: Any) -> dict[str, Any]:
    """A health report with nothing wrong in it."""
    plain = {
        "service": {"able": True, "why": ""},
        "broker": {"version": __version__, "pid": 1},
        "worker": {"state": "ready", "model": "m", "info": {"versions": {"mtplx": __version__}}},
        "scheduler": {"mode": "hyper"},
        "line": {"depth": 0, "limit_jobs": 10},
    }
    return {**plain, **changes}


def test_a_service_that_is_well_gets_exit_code_0_in_words_and_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "run", lambda *_: WELL)
    with service("--beat-s", "0.2") as running:
        running.worker()
        flags = ("doctor", "--run-dir", str(running.run))
        said = CliRunner().invoke(main, flags)
        assert (said.exit_code, said.stdout.splitlines()[-1]) == (0, "All is well."), said.stdout
        told = json.loads(CliRunner().invoke(main, (*flags, "--json")).stdout)
    assert told["well"] is True
    assert {"machine", "settings", "folders", "disk", "broker", "worker"} <= {
        one["about"] for one in told["findings"]
    }


def test_nothing_runs_and_nothing_was_ever_set_up(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    (sentence,) = wrongs(folder, "broker")
    assert "No broker listens" in sentence
    assert not folder.exists(), "the doctor makes nothing"
    need_library("mlx_lm")
    said = CliRunner().invoke(main, ("doctor", "--run-dir", str(folder), "--model", "/no/such/model"))
    assert (said.exit_code, "There is no model '/no/such/model'" in said.stdout) == (1, True)
    assert not folder.exists(), "nor do the programs that it asks"


def test_wrong_settings_are_told_and_end_the_visit(run_dir: Path) -> None:
    bad = found(run_dir, scheduler_mode="wide")
    assert [(one.about, one.state) for one in bad[1:]] == [("settings", State.WRONG)]
    assert "serial, hyper" in bad[1].sentence


def test_folders_that_others_may_enter_are_told(run_dir: Path) -> None:
    run_dir.chmod(0o755)
    (run_dir / "state").mkdir(mode=0o750)
    assert [sentence.split()[0] for sentence in wrongs(run_dir, "folders")] == [
        str(run_dir),
        str(run_dir / "state"),
    ]


def test_a_folder_that_is_a_file_or_a_link_is_told(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run_dir)
    (tmp_path / "file").touch()
    for wrong in ("link", "file"):
        assert "must be a folder of your own" in wrongs(tmp_path / wrong, "folders")[0]
    assert "can be written to" in wrongs(run_dir, "folders", cache_dir=str(tmp_path / "file"))[0]


# Longer than a name may be: looking there fails, as it does in a folder of somebody else.
UNSEEN = f"/{'x' * 5000}"


@pytest.mark.parametrize(
    "flag", ["cache_dir", "state_dir", "trace_file", "model", "draft", "mtp", "key", "server_key"]
)
@pytest.mark.parametrize("where", [UNSEEN, "~nobody-of-that-name/x"])
def test_paths_where_nothing_can_be_seen_are_told_or_left_to_who_needs_them(
    run_dir: Path, flag: str, where: str
) -> None:
    value = f"model:{where}" if flag == "draft" else where
    away = {"front": "tcp://127.0.0.1:9", "curve": "true"} if "key" in flag else {}
    told = found(run_dir, **{flag: value}, **away)
    assert all(one.advice for one in told if one.state is State.WRONG)
    said = CliRunner().invoke(main, ("service", "print", "broker", f"--{flag.replace('_', '-')}", value))
    assert said.exit_code in (0, 2), said.exception
    assert (said.exit_code == 2) == ("no home folder known here" in said.stderr)


def test_a_settings_file_where_nothing_can_be_seen_is_told(monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> None:
    monkeypatch.delenv("MTPLX_CONFIG")
    monkeypatch.setenv("HOME", UNSEEN)
    assert "config.toml cannot be read" in wrongs(run_dir, "settings")[0]


def test_a_socket_left_by_a_killed_broker_is_no_fault_and_a_file_in_its_place_is(run_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(run_dir / "front.sock"))
    (run_dir / "back.sock").touch()
    assert "is no socket of yours" in wrongs(run_dir, "sockets")[0]
    assert any("left over" in one.sentence for one in found(run_dir) if one.state is State.NOTE)
    assert "No broker listens" in wrongs(run_dir, "broker")[0]


@pytest.mark.parametrize(("free", "state"), [(2**20, State.WRONG), (2**30, State.NOTE), (2**40, State.WELL)])
def test_a_disk_that_is_nearly_full_is_told(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, free: int, state: State
) -> None:
    monkeypatch.setattr(checkup.shutil, "disk_usage", lambda _: Usage(2**41, 0, free))
    assert {one.state for one in found(run_dir) if one.about == "disk"} == {state}


def test_a_broker_that_hangs_is_told_with_its_process() -> None:
    with service("--beat-s", "0.2") as running:
        running.broker.send(signal.SIGSTOP)
        try:
            bad = [one for one in found(running.run) if one.about == "broker"]
        finally:
            running.broker.send(signal.SIGCONT)
    (one,) = bad
    assert (one.state, "Something listens" in one.sentence) == (State.WRONG, True)
    assert f"process {running.broker.pid}" in one.advice


def test_something_else_that_listens_there_is_told(run_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(run_dir / "front.sock"))
        other.listen()
        assert "Something listens" in wrongs(run_dir, "broker")[0]


@pytest.mark.parametrize(
    ("health", "about", "words"),
    [
        ({"service": {"able": False, "why": "No worker is connected."}, "worker": {"state": "absent"}}, "worker", "No worker"),
        ({"service": {"able": False, "why": "The journal cannot be written: full"}}, "broker", "cannot be written"),
        ({"line": {"depth": 10, "limit_jobs": 10}}, "line", "full with 10 jobs"),
        ({"broker": {"version": "0.0.9"}}, "versions", "broker runs mtplx 0.0.9"),
        ({"worker": {"state": "ready", "info": {"versions": {"mtplx": "9"}}}}, "versions", "worker runs mtplx 9"),
    ],
)  # fmt: skip
def test_what_health_tells_of_faults_becomes_a_sentence(health: dict[str, Any], about: str, words: str) -> None:
    assert [one for one in of(sound()) if one.state is not State.WELL] == []
    (one,) = [one for one in of(sound(**health)) if one.state is State.WRONG]
    assert (one.about, words in one.sentence, bool(one.advice)) == (about, True, True)


@pytest.mark.parametrize("name", sorted(checkup_broker.COUNTERS))
def test_counters_that_tell_of_a_wrong_set_up_are_noted(name: str) -> None:
    (one,) = [one for one in of(sound(counters={name: 3})) if one.state is State.NOTE]
    assert one.sentence.startswith("3 ")


def test_another_mode_than_the_brokers_and_a_process_that_was_left_alone_are_noted() -> None:
    lost = {**sound()["worker"], "lost_process": "left alone: on another machine"}
    sentences = [
        one.sentence for one in of(sound(scheduler={"mode": "serial"}, worker=lost)) if one.advice or lost
    ]
    assert any("runs in serial mode" in sentence for sentence in sentences)
    assert any("left alone" in sentence for sentence in sentences)


def test_a_broker_of_another_version_that_tells_little_breaks_nothing(broker: FakeBroker) -> None:
    broker.health = {}
    bad = list(checkup_broker.of_the_broker(Settings(front=broker.endpoint)))
    assert bad[0].state is State.WELL


def test_keys_that_are_missing_or_open_to_others_are_told(run_dir: Path) -> None:
    front = {"front": "tcp://127.0.0.1:1", "back": "tcp://127.0.0.1:2", "curve": True}
    assert "needs the broker's public key" in wrongs(run_dir, "keys", **front)[0]
    make(run_dir / "state" / "keys", "broker")
    assert wrongs(run_dir, "keys", **front) == []
    (run_dir / "state" / "keys" / "broker.key_secret").chmod(0o644)
    assert "is open to others" in wrongs(run_dir, "keys", **front)[0]


def test_mlx_that_is_missing_is_a_fault_only_where_a_worker_is_to_run(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", missing)
    assert "MLX is not installed" in wrongs(run_dir, "mlx")[0]
    make(run_dir / "state" / "keys", "me")
    far = {"front": "tcp://192.0.2.1:5555", "server_key": "", "key": "me"}
    assert wrongs(run_dir, "mlx", **far) == []


def test_programs_that_fail_or_hang_are_told_by_their_last_line(run_dir: Path) -> None:
    (run_dir / "state").mkdir(mode=0o700)
    (run_dir / "state" / "journal.db").touch()

    def runs(command: tuple[str, ...], _: Settings) -> tuple[int, str, str] | None:
        failures = {
            doctor.MLX: (1, "", "Traceback\nImportError: libcuda.so.1: no such file"),
            doctor.JOURNAL: (7, "", "mtplx: The journal is damaged."),
            doctor.SERVICES: None,
        }
        return failures.get(command, WELL)

    need_library("mlx")
    assert "libcuda" in wrongs(run_dir, "mlx", runs=runs)[0]
    assert wrongs(run_dir, "journal", runs=runs) == ["The journal is damaged."]
    assert any(one.about == "services" for one in found(run_dir, runs=runs))
    assert found(run_dir, runs=lambda *_: None)


def test_the_state_of_services_and_why_one_ended_are_told(run_dir: Path) -> None:
    told = """broker: active (running), pid 7
  file  /x/mtplx-broker.service
  log   /x/mtplx-broker.log
worker: failed (failed)
  file  /x/mtplx-worker.service
  log   /x/mtplx-worker.log
  last  2026: exit code 3: The model is missing.
"""

    def runs(command: tuple[str, ...], _: Settings) -> tuple[int, str, str]:
        return (1, told, "") if command == doctor.SERVICES else WELL

    (sentence,) = wrongs(run_dir, "services", runs=runs)
    assert "The model is missing." in sentence
    told = "broker: not loaded\n  file  not installed\n  log   /x\n"
    assert [one for one in found(run_dir, runs=runs) if one.about == "services"] == []


@pytest.mark.prove
def test_the_real_model_check_names_what_is_missing_and_what_is_cut_short(tmp_path: Path, run_dir: Path) -> None:
    need_library("mlx_lm")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    for wanted, words in ((str(tmp_path / "none"), "There is no model"), (str(model), "no model*.safetensors")):
        done = doctor.run(doctor.MODEL, Settings(model=wanted, run_dir=run_dir))
        assert done is not None
        assert (done[0], words in done[2]) == (3, True), done


def test_a_key_that_is_not_allowed_is_told_by_what_the_broker_answers() -> None:
    with keyed() as running:
        pair = running.key("friend")
        running.producer(pair).socket.close()
        running.key("stranger", role=None)
        for key, state in (("friend", State.WELL), ("stranger", State.WRONG)):
            one = next(checkup_broker.of_the_broker(running.settings(key)))
            assert (one.about, one.state) == ("broker", state), one
        assert "does not allow this key" in one.sentence
        assert "allows it" in one.advice
