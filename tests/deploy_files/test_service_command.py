"""`mtplx service`, with stand-ins for launchctl and systemctl that note what they are asked."""

import json
import os
import plistlib
import stat
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from deploy_files import managers

from mtplx import last_error, paths
from mtplx.cli.main import main
from mtplx.errors import Exit

FILES = {
    "launchd": ("Library/LaunchAgents/dev.mtplx.{}.plist", "dev.mtplx.{}"),
    "systemd": (".config/systemd/user/mtplx-{}.service", "mtplx-{}.service"),
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tools = tmp_path / "bin"
    tools.mkdir()
    managers.put(tools)
    for name in [name for name in os.environ if name.startswith(("MTPLX_", "OTEL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    return tmp_path


def mtplx(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def done(*words: str) -> str:
    found = mtplx(*words)
    assert found.exit_code == 0, found.output
    return found.output


def asked(home: Path) -> list[str]:
    file = home / "asked"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize("manager", FILES)
def test_services_are_installed_stopped_started_and_removed(home: Path, manager: str) -> None:
    file, loaded = FILES[manager]
    flag = f"--{manager}"
    assert mtplx("service", "status", flag).exit_code == Exit.FAILED
    done("service", "install", flag, "--drain-s", "3")
    for name in ("broker", "worker"):
        written = home / file.format(name)
        assert written.read_bytes() == done("service", "print", flag, name, "--drain-s", "3").encode()
        assert stat.S_IMODE(written.stat().st_mode) == 0o600
        assert (home / loaded.format(name)).exists()
    assert "running" in done("service", "status", flag)
    done("service", "install", flag)  # once more, over the running ones
    done("service", "stop", flag, "worker")
    assert mtplx("service", "status", flag).exit_code == Exit.FAILED
    assert "running" in done("service", "status", flag, "broker")
    done("service", "start", flag, "worker")
    done("service", "status", flag)
    done("service", "uninstall", flag)
    assert not [name for name in ("broker", "worker") if (home / file.format(name)).exists()]
    assert not [name for name in ("broker", "worker") if (home / loaded.format(name)).exists()]
    done("service", "uninstall", flag)  # nothing is there, and that is what was asked for
    assert mtplx("service", "start", flag).exit_code == Exit.FAILED
    assert "run `mtplx service install` first" in mtplx("service", "start", flag).output


def test_launchd_hears_of_an_agent_only_when_the_one_before_is_gone(home: Path) -> None:
    done("service", "install", "--launchd", "broker")
    (home / "asked").unlink()
    done("service", "install", "--launchd", "broker")
    target = f"gui/{os.getuid()}/dev.mtplx.broker"
    plist = home / "Library/LaunchAgents/dev.mtplx.broker.plist"
    assert asked(home) == [
        f"launchctl print {target}",
        f"launchctl bootout {target}",
        f"launchctl print {target}",
        f"launchctl print {target}",
        f"launchctl enable {target}",
        f"launchctl print {target}",
        f"launchctl bootstrap gui/{os.getuid()} {plist}",
    ]


def test_what_was_given_here_by_flag_and_variable_stands_in_the_file_with_absolute_paths(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    for folder in ("model", "draft"):
        (home / folder).mkdir()
    (home / "key").touch()
    (home / "some.toml").write_text("queue_jobs = 7\ndrain_s = 50.0\n")
    monkeypatch.setenv("MTPLX_SCHEDULER_MODE", "serial")
    monkeypatch.setenv("MTPLX_CURVE", "false")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    flags = ["--model", "model", "--draft", "model:draft", "--key", "key", "--run-dir", "r", "--beat-s", "0.5"]
    text = done("--config", "some.toml", "service", "print", "--launchd", "worker", *flags)
    keys = plistlib.loads(text.encode())
    assert keys["EnvironmentVariables"] == {
        "HOME": str(home),
        "PATH": keys["EnvironmentVariables"]["PATH"],
        "OTEL_SERVICE_NAME": "mine",
        "MTPLX_CONFIG": str(home / "some.toml"),
        "MTPLX_MODEL": str(home / "model"),
        "MTPLX_SCHEDULER_MODE": "serial",
        "MTPLX_DRAFT": f"model:{home}/draft",
        "MTPLX_RUN_DIR": str(home / "r"),
        "MTPLX_CURVE": "0",
        "MTPLX_KEY": str(home / "key"),
        "MTPLX_BEAT_S": "0.5",
    }
    assert keys["ProgramArguments"][0] == sys.executable
    assert keys["ExitTimeOut"] == 60, "the drain limit of the settings file counts"


def test_a_wrong_setting_is_told_before_anything_is_written(home: Path) -> None:
    (home / ".mtplx").mkdir()
    (home / ".mtplx" / "config.toml").write_text("drain = 1\n")
    assert mtplx("service", "install", "--systemd").exit_code == Exit.SETTINGS
    assert asked(home) == []
    assert not (home / ".config").exists()


@pytest.mark.parametrize("manager", FILES)
def test_status_tells_why_a_service_is_down_though_its_settings_are_wrong(home: Path, manager: str) -> None:
    done("service", "install", f"--{manager}")
    (home / ".mtplx" / "config.toml").write_text("drain = 1\n")
    last_error.note(paths.default_logs(), "mtplx-broker", Exit.SETTINGS, "Unknown setting drain")
    assert "Unknown setting" not in mtplx("service", "status", f"--{manager}").output, "it runs"
    done("service", "stop", f"--{manager}", "broker")
    told = mtplx("service", "status", f"--{manager}").output
    assert "exit code 2 (a setting or an argument is wrong): Unknown setting drain" in told
    assert "mtplx-worker.log" in told


DAMAGED = {
    "deep": "[" * 100_000,
    "types": '{"at": 1, "exit_code": [2], "message": {}}',
    "list": "[]",
    "endless": '{"at": "", "exit_code": 1e999, "message": ""}',
    "bytes": "\udcff",
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_status_is_told_beside_a_last_error_that_nobody_can_read(home: Path, kind: str) -> None:
    paths.private_folder(paths.default_logs())
    file = paths.default_logs() / "mtplx-broker.last-error.json"
    file.write_bytes(DAMAGED[kind].encode(errors="surrogateescape"))
    found = mtplx("service", "status", "--systemd")
    assert (found.exit_code, "last" in found.output) == (Exit.FAILED, False), found.output


def test_a_last_error_speaks_in_one_harmless_line(home: Path) -> None:
    paths.private_folder(paths.default_logs())
    file = paths.default_logs() / "mtplx-broker.last-error.json"
    file.write_text(json.dumps({"at": "\x1b[2J", "exit_code": 2, "message": "a\nbroker: active\x1b[2J"}))
    (told,) = [
        line for line in mtplx("service", "status", "--systemd").output.splitlines() if line.startswith("  last")
    ]
    assert told.isprintable()
    assert "a\\nbroker: active" in told


def test_a_systemd_that_cannot_be_reached_is_told_before_anything_is_written(home: Path) -> None:
    (home / "refuses").touch()
    found = mtplx("service", "install", "--systemd")
    assert "No medium found" in found.output
    assert "`mtplx serve`" in found.output
    assert not (home / ".config").exists()


@pytest.mark.parametrize(("manager", "words"), [("launchd", "Input/output error"), ("systemd", "No medium found")])
def test_what_the_manager_says_is_told(home: Path, manager: str, words: str) -> None:
    (home / "refuses").touch()
    found = mtplx("service", "install", f"--{manager}")
    assert (found.exit_code, words in found.output) == (Exit.FAILED, True), found.output


@pytest.mark.parametrize("manager", FILES)
def test_a_machine_without_the_manager_is_told_what_else_to_run(
    home: Path, manager: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(home))
    found = mtplx("service", "install", f"--{manager}")
    assert found.exit_code == Exit.FAILED
    assert "run `mtplx serve`" in found.output


def test_a_stop_waits_as_long_as_the_installed_file_says(home: Path) -> None:
    done("service", "install", "--launchd", "broker", "--drain-s", "300")
    (home / "leaving").touch()
    assert "stopped" in done("service", "stop", "--launchd", "broker")
