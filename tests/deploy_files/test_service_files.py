"""Service files: one table, two forms, and what others read out of them."""

import importlib.util
import plistlib
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy_files import launchd
from deploy_files.homes import Home, home
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tools import need
from whole.harness import ROOT

from mtplx.errors import EXITS, SettingsError
from mtplx.process import look
from mtplx.services import PROGRAMS, STOP_GRACE_S, TABLE, Unit, plist, systemd_unit, unit_of
from mtplx.settings import Settings

DEPLOY = ROOT / "deploy"
LIMIT_S = 20.0


@pytest.fixture
def place() -> Iterator[Home]:
    with home() as found:
        yield found


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location("make_services", DEPLOY / "make_services.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines_of(text: bytes, key: str) -> list[str]:
    return [line.partition("=")[2] for line in text.decode().splitlines() if line.startswith(f"{key}=")]


def words(line: str) -> list[str]:
    """A line's words by the rules of systemd.syntax(7): quotes and backslashes as here, a doubled percent sign is one."""
    return [word.replace("%%", "%") for word in shlex.split(line)]


def units() -> st.SearchStrategy[Unit]:
    text = st.text(
        st.characters(codec="utf-8", exclude_categories=("C", "Z")) | st.sampled_from(" %$&<>'\"\\;#~é")
    )
    path = text.map(lambda part: f"/{part}/x")
    return st.builds(
        Unit,
        name=st.sampled_from(PROGRAMS),
        command=st.tuples(path, text, text),
        folder=path.map(Path),
        logs=path.map(Path),
        environment=st.dictionaries(st.from_regex(r"[A-Z_]{1,8}", fullmatch=True), text, max_size=3),
        stop_s=st.integers(1, 1000),
    )


# --- one table


def test_the_files_in_deploy_are_what_the_table_gives_and_name_no_path_of_a_machine(maker):
    for name, text in maker.files().items():
        assert (DEPLOY / name).read_bytes() == text, "run: python deploy/make_services.py"
        paths = re.findall(r"(?<=[>=: ])/\w[\w./-]*", text.decode())
        assert len(paths) > 5
        assert {path.split("/")[1] for path in paths} <= {"usr", "bin", "sbin", "Users", "home"}, name
        assert all("/you" in path for path in paths if path.startswith(("/Users", "/home"))), name
    made = {path.name for path in (*DEPLOY.glob("*.plist"), *DEPLOY.glob("*.service"))}
    assert made == set(maker.files())


def test_every_promise_is_kept_by_a_manager_and_has_its_own_keys(maker):
    unit = unit_of("broker", Settings(), {}, home=maker.MAC, logs=maker.MAC, python="/p")
    keys = [key for promise in TABLE for key in promise.launchd(unit)]
    assert len(keys) == len(set(keys))
    assert all(promise.launchd(unit) or promise.systemd(unit) for promise in TABLE)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_service_is_killed_only_after_its_drain_and_restarted_for_what_does_not_last(name):
    settings = Settings(drain_s=41.2)
    unit = unit_of(name, settings, {}, home=Path("/h"), logs=Path("/l"), python="/p")
    assert plistlib.loads(plist(unit))["ExitTimeOut"] == 42 + STOP_GRACE_S
    text = systemd_unit(unit)
    assert lines_of(text, "TimeoutStopSec") == [str(42 + STOP_GRACE_S)]
    lasting = [str(int(code)) for code, ending in EXITS.items() if code and not ending.again]
    assert lines_of(text, "RestartPreventExitStatus") == [" ".join(lasting)]


# --- second readers


@settings(deadline=None)
@given(units())
def test_both_forms_give_back_every_path_and_variable(unit):
    keys = plistlib.loads(plist(unit))
    assert keys["ProgramArguments"] == unit.started_by("launchd")
    assert (keys["WorkingDirectory"], keys["EnvironmentVariables"]) == (str(unit.folder), unit.environment)
    assume(not set(unit.command[0]) & set("\"'\\"))
    text = systemd_unit(unit)
    (command,) = lines_of(text, "ExecStart")
    assert words(command) == [":" + unit.command[0], *unit.started_by("systemd")[1:]]
    assert [words(line) for line in lines_of(text, "Environment")] == [
        [f"{name}={value}"] for name, value in unit.environment.items()
    ]
    assert [line.replace("%%", "%") for line in lines_of(text, "WorkingDirectory")] == [str(unit.folder)]
    assert not re.search(r"(?<!%)(%%)*%(?!%)", text.decode()), "no specifier of systemd's is left"


@pytest.mark.parametrize("name", PROGRAMS)
def test_plistutil_reads_what_plistlib_wrote(place, name):
    text = plist(place.unit(name))
    file = place.path / "agent.plist"
    file.write_bytes(text)
    done = subprocess.run(
        [need("plistutil"), "-i", file, "-f", "xml"], capture_output=True, check=True, timeout=LIMIT_S
    )
    assert plistlib.loads(done.stdout) == plistlib.loads(text)


@pytest.mark.parametrize("name", PROGRAMS)
def test_systemd_itself_finds_no_fault_and_finds_the_program(place, name):
    python = place.path.parent / "p & ü%h%% $x; y"
    python.symlink_to(sys.executable)
    unit = unit_of(name, Settings(), {"X": "$y%z"}, home=place.path, logs=place.logs, python=str(python))
    file = place.path.parent / unit.unit
    file.write_bytes(systemd_unit(unit))
    done = verified(file)
    assert (done.returncode, done.stderr) == (0, "")
    python.unlink()
    assert str(python) in verified(file).stderr, "it reads the path that was meant"


def verified(file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [need("systemd-analyze"), "verify", "--man=no", file],
        capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip


# --- what is refused


@pytest.mark.parametrize("character", "\"'\\")
def test_a_program_that_systemd_takes_in_no_spelling_is_refused(place, character):
    python = place.path.parent / f"py{character}thon"
    python.symlink_to(sys.executable)
    unit = unit_of("broker", Settings(), {}, home=place.path, logs=place.logs, python=str(python))
    with pytest.raises(SettingsError, match="Install mtplx in a folder without them"):
        systemd_unit(unit)
    assert plist(unit)


@pytest.mark.parametrize(
    "change",
    [
        {"command": ("python", "-m", "broker")},
        {"command": ("~/python", "-m", "broker")},
        {"folder": Path("here")},
        {"logs": Path("~/logs")},
        {"folder": Path("/ends with a space ")},
        {"environment": {"X": "two\nlines"}},
        {"command": ("/p", "\x1b[31m")},
        {"logs": Path("/no\udc80utf8")},
    ],
    ids=str,
)
def test_what_a_service_file_cannot_hold_is_refused_by_name(change):
    usual = {"name": "broker", "command": ("/p",), "folder": Path("/f"), "logs": Path("/l"), "stop_s": 5}
    with pytest.raises(SettingsError, match="cannot stand in a service file"):
        Unit(**{**usual, **change})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("KeepAlife", True),
        ("KeepAlive", {"Crashed": True}),
        ("KeepAlive", True),
        ("Umask", 77),
        ("Umask", "077"),
        ("ThrottleInterval", 0),
        ("ExitTimeOut", "30"),
        ("WorkingDirectory", "~/x"),
        ("StandardErrorPath", "logs/x"),
        ("ProgramArguments", ["python"]),
        ("EnvironmentVariables", {"HOME": "~"}),
        ("SoftResourceLimits", {"NumberOfFile": 300}),
    ],
    ids=str,
)
def test_the_stand_in_refuses_keys_without_a_promise_and_values_that_mean_something_else(maker, key, value):
    keys = plistlib.loads(maker.files()["dev.mtplx.broker.plist"])
    launchd.check(keys)
    with pytest.raises(ValueError, match=key):
        launchd.check({**keys, key: value})


def test_the_stand_in_kills_what_does_not_heed_sigterm_and_ends_the_group_of_what_died(place):
    stubborn = "sleep 60 & trap '' TERM; echo $$; printf '%s\\n' \"$! $(umask) $(pwd)\"; wait; wait"
    keys = plistlib.loads(place.broker())
    keys |= {"ProgramArguments": ["/bin/sh", "-c", stubborn], "ExitTimeOut": 1}
    with launchd.Launchd() as running:
        agent = running.bootstrap(plistlib.dumps(keys))
        out = Path(keys["StandardOutPath"])
        while not out.exists() or out.read_text().count("\n") < 2:
            agent._told.wait(0.01)
        running.bootout(agent)
    assert agent.killed
    assert [turn.code for turn in agent.turns] == [-9]
    me, rest = out.read_text().splitlines()
    child, mask, folder = rest.split(maxsplit=2)
    assert (int(me), mask, folder) == (agent.turns[0].pid, "0077", str(place.path / ".mtplx"))
    ends = time.monotonic() + LIMIT_S
    while look(int(child)) is not None:
        assert time.monotonic() < ends, "the group was not ended"
