"""Broker and worker as services of one user: launchd agents and systemd user units from one table.

Neither manager starts a shell, nor knows `~` or the caller's environment: every path is absolute, and what the
programs need to know stands in the file. Sources: launchd.plist(5), systemd.service(5), systemd.syntax(7).
"""

from __future__ import annotations

import math
import plistlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mtplx.errors import EXITS, SettingsError
from mtplx.settings import Settings

PROGRAMS: Final = ("broker", "worker")
SEARCH_PATH: Final = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
# Both managers start a program that ended anew after this long, and no sooner.
THROTTLE_S: Final = 10
# Beyond the drain limit: last words, spans, the journal; a hung worker ends itself sooner.
STOP_GRACE_S: Final = 10
UMASK: Final = 0o077
OPEN_FILES: Final = 10_240
# systemd gives a program up that ends this often within that many seconds; launchd never does.
STARTS: Final = 10
STARTS_WITHIN_S: Final = 120

Lines = dict[str, list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One program as a service. command: the program and its arguments, the path of the first absolute.

    folder: where it runs. logs: where it logs. stop_s: seconds between being told to stop and being killed.
    """

    name: str
    command: tuple[str, ...]
    folder: Path
    logs: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    stop_s: int

    def __post_init__(self) -> None:
        """Refuse what one of the two forms cannot hold.

        Raises:
            SettingsError: naming it.
        """
        paths = (self.command[0], str(self.folder), str(self.logs))
        for text in (*self.command, *paths, *self.environment, *self.environment.values()):
            if not text.isprintable():
                raise SettingsError(f"{text!r} cannot stand in a service file; leave out what is not printable.")
        for path in paths:
            if not path.startswith("/") or path.endswith((" ", "\\")):
                raise SettingsError(f"{path!r} cannot stand in a service file; it must be a plain absolute path.")

    @property
    def label(self) -> str:
        """The name for launchd."""
        return f"dev.mtplx.{self.name}"

    @property
    def unit(self) -> str:
        """The name for systemd."""
        return f"mtplx-{self.name}.service"

    def started_by(self, manager: str) -> list[str]:
        """The whole command line."""
        return [*self.command, "--service", manager, "--log-dir", str(self.logs)]


@dataclass(frozen=True, slots=True)
class Promise:
    """What is asked of both managers, in the words of each; an empty form where it needs no word."""

    text: str
    launchd: Callable[[Unit], dict[str, Any]] = lambda _: {}
    systemd: Callable[[Unit], Lines] = lambda _: {}


TABLE: Final = (
    Promise(
        "It has a name.",
        lambda unit: {"Label": unit.label},
        lambda unit: {"Unit": [f"Description=mtplx {unit.name}"]},
    ),
    Promise(
        "This is what runs, and no shell comes between.",
        lambda unit: {"ProgramArguments": unit.started_by("launchd")},
        lambda unit: {"Service": ["Type=exec", f"ExecStart={_command(unit.started_by('systemd'))}"]},
    ),
    Promise(
        "It starts when its user logs in.",
        lambda _: {"RunAtLoad": True, "LimitLoadToSessionType": ["Aqua", "Background"]},
        lambda _: {"Install": ["WantedBy=default.target"]},
    ),
    Promise(
        "One that died is started again; one that ended as asked, or for a reason that lasts, is left down.",
        lambda _: {"KeepAlive": {"SuccessfulExit": False}},
        lambda _: {"Service": ["Restart=on-failure", f"RestartPreventExitStatus={_lasting()}"]},
    ),
    Promise(
        "It is not started again at once; systemd gives up on one that only ever dies.",
        lambda _: {"ThrottleInterval": THROTTLE_S},
        lambda _: {
            "Unit": [f"StartLimitIntervalSec={STARTS_WITHIN_S}", f"StartLimitBurst={STARTS}"],
            "Service": [f"RestartSec={THROTTLE_S}"],
        },
    ),
    Promise(
        "SIGTERM stops it; it is killed only after the drain limit and some time to say goodbye.",
        lambda unit: {"ExitTimeOut": unit.stop_s},
        lambda unit: {"Service": [f"TimeoutStopSec={unit.stop_s}"]},
    ),
    Promise(
        "No limits of background work: somebody waits for the answer.", lambda _: {"ProcessType": "Interactive"}
    ),
    Promise(
        "What it makes is for its user alone.",
        lambda _: {"Umask": UMASK},
        lambda _: {"Service": [f"UMask={UMASK:04o}", "NoNewPrivileges=yes"]},
    ),
    Promise(
        "Each connection is an open file.",
        lambda _: {"SoftResourceLimits": {"NumberOfFiles": OPEN_FILES}},
        lambda _: {"Service": [f"LimitNOFILE={OPEN_FILES}"]},
    ),
    Promise(
        "It runs in a folder of ours.",
        lambda unit: {"WorkingDirectory": str(unit.folder)},
        lambda unit: {"Service": [f"WorkingDirectory={_specifiers(str(unit.folder))}"]},
    ),
    Promise(
        "It inherits no environment.",
        lambda unit: {"EnvironmentVariables": dict(unit.environment)},
        lambda unit: {
            "Service": [f"Environment={_word(f'{name}={value}')}" for name, value in unit.environment.items()]
        },
    ),
    Promise(
        "What it says beside its log is kept: one line when it ends, and crashes.",
        lambda unit: dict.fromkeys(("StandardOutPath", "StandardErrorPath"), f"{unit.logs}/mtplx-{unit.name}.err"),
    ),
)


def plist(unit: Unit) -> bytes:
    """The launchd agent."""
    keys: dict[str, Any] = {}
    for promise in TABLE:
        keys |= promise.launchd(unit)
    return plistlib.dumps(keys, sort_keys=False)


def systemd_unit(unit: Unit) -> bytes:
    """The systemd user unit.

    Raises:
        SettingsError: systemd takes no program of that path, however it is written.
    """
    if set(unit.command[0]) & set("\"'\\"):
        raise SettingsError(
            f"systemd takes no program with quotes or backslashes in its path: {unit.command[0]}. "
            "Install mtplx in a folder without them."
        )
    sections: Lines = {"Unit": [], "Service": [], "Install": []}
    for promise in TABLE:
        for section, lines in promise.systemd(unit).items():
            sections[section] += lines
    shown = (f"[{name}]\n" + "".join(f"{line}\n" for line in lines) for name, lines in sections.items())
    return "\n".join(shown).encode()


def unit_of(
    name: str, settings: Settings, given: Mapping[str, str], *, home: Path, logs: Path, python: str
) -> Unit:
    """*name*, one of PROGRAMS, as a service of whoever lives in *home*.

    given: variables of `mtplx.settings` and of the OpenTelemetry SDK that the program is to have; settings: what
    comes of them; python: the interpreter that has mtplx.

    Raises:
        SettingsError: something cannot stand in a service file.
    """
    return Unit(
        name=name,
        command=(python, "-P", "-m", name),
        folder=home / ".mtplx",
        logs=logs,
        environment={"HOME": str(home), "PATH": SEARCH_PATH, **given},
        stop_s=math.ceil(settings.drain_s) + STOP_GRACE_S,
    )


def stop_s_in(text: bytes) -> int | None:
    """Seconds that an installed service file gives its program to stop; None where it does not say."""
    found = re.search(rb"<key>ExitTimeOut</key>\s*<integer>(\d+)|^TimeoutStopSec=(\d+)", text, re.MULTILINE)
    return int(found[1] or found[2]) if found else None


def _lasting() -> str:
    return " ".join(str(int(code)) for code, ending in EXITS.items() if code and not ending.again)


def _specifiers(text: str) -> str:
    return text.replace("%", "%%")


def _word(text: str) -> str:
    """One word of a line of systemd's: quoted where it must be, without specifiers."""
    escaped = _specifiers(text.replace("\\", "\\\\").replace('"', '\\"'))
    return escaped if re.fullmatch(r"[\w@%+=:,./-]+", escaped, re.ASCII) else f'"{escaped}"'


def _command(words: list[str]) -> str:
    # The colon keeps systemd from putting variables in the place of words with a dollar sign.
    return " ".join(_word(word) for word in (":" + words[0], *words[1:]))
