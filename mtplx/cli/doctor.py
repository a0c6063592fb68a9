"""`mtplx doctor`: what is wrong with machine, settings, sockets, model, keys and services, in sentences."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any, Final

import click

from mtplx import __version__
from mtplx.cli.checkup import Finding, State, note, on_the_machine, well, wrong
from mtplx.cli.checkup_broker import of_the_broker
from mtplx.cli.options import load_settings, settings_options
from mtplx.endpoints import LOOPBACK
from mtplx.errors import Exit, SettingsError
from mtplx.logs import printable
from mtplx.paths import exists
from mtplx.settings import Settings

# A program that says nothing for so long is given up; loading MLX takes seconds.
PROGRAM_S: Final = 90.0
MARKS: Final = {State.WELL: "ok   ", State.NOTE: "note ", State.WRONG: "WRONG"}
INSTALL: Final = "pip install 'mtplx-line[worker]', in the virtual environment of this command."
MLX: Final = (sys.executable, "-P", "-c", "import mlx.core as mx; print(mx.default_device())")
MODEL: Final = (sys.executable, "-P", "-m", "worker.model_check")
JOURNAL: Final = (sys.executable, "-P", "-m", "broker.journal_tool", "info")
SERVICES: Final = (sys.executable, "-P", "-m", "mtplx.cli.main", "service", "status")

# Runs a program: its exit code, what it printed, and what it said on stderr. None where it did not end in time.
Run = Callable[[tuple[str, ...], Settings], "tuple[int, str, str] | None"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print all findings as JSON.")
@settings_options
@click.pass_context
def doctor(context: click.Context, /, as_json: bool, **flags: Any) -> None:
    """Say what is wrong with this machine, the settings, sockets, model, keys and services, and what to do.

    Exit code 0 when nothing is wrong, else 1. Nothing is changed; it works whether a broker runs or not.
    """
    found = list(findings(flags, context.obj, run))
    bad = [one for one in found if one.state is State.WRONG]
    if as_json:
        click.echo(json.dumps({"well": not bad, "findings": [asdict(one) for one in found]}, indent=2))
    else:
        for one in found:
            click.echo(printable(f"{MARKS[one.state]} {one.about:<9} {one.sentence}"))
            if one.advice:
                click.echo(printable(f"{'':<15} -> {one.advice}"))
        click.echo(f"{len(bad)} of {len(found)} findings are wrong." if bad else "All is well.")
    context.exit(int(Exit.FAILED) if bad else 0)


def run(command: tuple[str, ...], settings: Settings) -> tuple[int, str, str] | None:
    """Run a program of ours under *settings*."""
    try:
        done = subprocess.run(
            command, env=settings.environment(), capture_output=True, text=True, timeout=PROGRAM_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return done.returncode, done.stdout, done.stderr


def findings(flags: Mapping[str, Any], outer: Mapping[str, Any] | None, runs: Run) -> Iterator[Finding]:
    """Everything that is found, in the order in which one would ask."""
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    yield well("machine", f"mtplx {__version__} on {system}.")
    try:
        settings = load_settings(flags, outer)
    except SettingsError as error:
        yield wrong("settings", str(error), "`mtplx serve --help` lists the settings; the rest waits for this.")
        return
    yield well("settings", f"The settings can be read; the front endpoint is {settings.endpoint('front')}.")
    with ThreadPoolExecutor() as pool:
        slow = [pool.submit(check, settings, runs) for check in (_mlx, _journal, _services)]
        yield from on_the_machine(settings)
        yield from of_the_broker(settings)
        for one in slow:
            yield from one.result()


def _local(settings: Settings) -> bool:
    """Whether the broker of *settings* is on this machine, and so the worker may be."""
    front = settings.endpoint("front")
    return front.startswith("ipc://") or any(front.startswith(f"tcp://{host}:") for host in LOOPBACK)


def _mlx(settings: Settings, runs: Run) -> Iterable[Finding]:
    """MLX, and the model that it is to run."""
    try:
        version = importlib.metadata.version("mlx")
    except importlib.metadata.PackageNotFoundError:
        sentence = "MLX is not installed, so no worker can run here."
        if _local(settings):
            return [wrong("mlx", sentence, f"{INSTALL} A producer alone needs none: give its broker by --front.")]
        return [note("mlx", sentence, "A producer needs none.")]
    done = runs(MLX, settings)
    if done is None or done[0]:
        why = "it took too long" if done is None else _last_line(done[2])
        return [
            wrong("mlx", f"MLX {version} is installed and cannot be loaded: {why}", f"Install it anew: {INSTALL}")
        ]
    return [well("mlx", f"MLX {version} loads; its device is {done[1].strip()}."), *_model(settings, runs)]


def _model(settings: Settings, runs: Run) -> Iterator[Finding]:
    drafter = settings.draft.removeprefix("model:").strip()
    for name in (settings.model, *([drafter] if settings.draft.startswith("model:") else [])):
        done = runs(MODEL, replace(settings, model=name))
        if done is None:
            yield note("model", f"Looking at {name} took too long.")
        elif done[0] == Exit.OK:
            yield well("model", done[1].strip())
        else:
            do = f"Fetch it again (mtplx pull {name} for a pulled name), or choose another."
            yield wrong("model", _last_line(done[2]).removeprefix("mtplx: "), do)


def _journal(settings: Settings, runs: Run) -> Iterable[Finding]:
    if settings.durability == "none" or not exists(settings.state_folder / "journal.db"):
        return []
    done = runs(JOURNAL, settings)
    if done is None:
        return [note("journal", "Checking all of the journal took too long.", "mtplx journal info checks it.")]
    if done[0]:
        do = "`mtplx journal salvage` makes a new one of what is whole; docs/journal.md says more."
        return [wrong("journal", _last_line(done[2]).removeprefix("mtplx: "), do)]
    jobs = next((line.split(None, 1)[1] for line in done[1].splitlines() if line.startswith("jobs ")), "")
    return [well("journal", f"The journal is whole: {jobs} jobs.")]


def _services(settings: Settings, runs: Run) -> Iterable[Finding]:
    """What `mtplx service status` says of each: a line `NAME: state`, and under it file, log and last error."""
    done = runs(SERVICES, settings)
    if done is None:
        return [note("services", "The service manager did not answer in time.", "Try: mtplx service status.")]
    told: dict[str, dict[str, str]] = {}
    for line in done[1].splitlines():
        if line.startswith("  ") and told:
            key, _, rest = line.strip().partition(" ")
            told[next(reversed(told))][key] = rest.strip()
        else:
            told[line] = {}
    installed = {head: more for head, more in told.items() if more.get("file", "not installed") != "not installed"}
    return [_service(head, more) for head, more in installed.items()]


def _service(head: str, more: dict[str, str]) -> Finding:
    state = head.partition(": ")[2]
    if "last" not in more and state.startswith(("running", "active")):
        return well("services", f"{head}.")
    why = f" It last ended so: {more['last']}" if "last" in more else ""
    return wrong(
        "services", f"{head}.{why}", f"Mend that, then: mtplx service start. Its log: {more.get('log', '')}"
    )


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "it said nothing"
