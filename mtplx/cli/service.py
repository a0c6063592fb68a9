"""`mtplx service`: broker and worker as services of this user, by launchd on macOS, by systemd on Linux."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

import click

from mtplx import last_error, paths
from mtplx.cli.managers import Launchd, Manager, Systemd
from mtplx.cli.options import load_settings, service_options
from mtplx.cli.program import MANAGERS
from mtplx.cli.serve import absolute_model
from mtplx.services import PROGRAMS, Unit, stop_s_in, unit_of
from mtplx.settings import PREFIX, Settings, variables

HERE: Final = "launchd" if sys.platform == "darwin" else "systemd"


def _manager(which: str | None) -> Manager:
    return Launchd(paths.home()) if (which or HERE) == "launchd" else Systemd(Path.home())


def _manager_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for name in reversed(MANAGERS):
        text = f"Use {name}." + ("  [default here]" if name == HERE else "")
        command = click.option(f"--{name}", "manager", flag_value=name, help=text)(command)
    return command


def _programs(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.argument("programs", nargs=-1, type=click.Choice(PROGRAMS), metavar="[broker] [worker]")(command)


@click.group()
def service() -> None:
    """Run broker and worker in the background, from login on.

    Without a name a command means both; they may start in either order.
    """


def given_settings(flags: Mapping[str, Any], outer: Mapping[str, Any] | None) -> tuple[Settings, dict[str, str]]:
    """The settings in force, and the variables that bring a service what was given here by flag or variable.

    Raises:
        SettingsError: as `Settings.load`; nothing was written yet.
    """
    here = variables()
    asked = {name for name, value in {**(outer or {}), **flags}.items() if value is not None}
    asked |= {key.removeprefix(PREFIX).lower() for key in here if key.startswith(PREFIX)}
    loaded = _absolute(absolute_model(load_settings(flags, outer)))
    given = {key: value for key, value in here.items() if not key.startswith(PREFIX)}
    config = flags.get("config") or (outer or {}).get("config") or here.get(f"{PREFIX}CONFIG")
    if config:
        given[f"{PREFIX}CONFIG"] = str(paths.expanded(config).absolute())
    for name in (item.name for item in fields(Settings) if item.name in asked - {"log_dir"}):
        value = getattr(loaded, name)
        given[PREFIX + name.upper()] = str(int(value)) if isinstance(value, bool) else str(value)
    return loaded, given


def _absolute(settings: Settings) -> Settings:
    """*settings* with files of keys and of a draft model named from the root."""
    files: dict[str, Any] = {
        name: str(paths.expanded(value).absolute())
        for name in ("key", "server_key")
        if (value := getattr(settings, name)) and paths.is_file(paths.expanded(value))
    }
    if settings.mtp:
        files["mtp"] = str(paths.expanded(settings.mtp).absolute())
    kind, _, path = settings.draft.partition(":")
    if path and paths.is_folder(paths.expanded(path)):
        files["draft"] = f"{kind}:{paths.expanded(path).absolute()}"
    return replace(settings, **files)


def _python() -> str:
    # Not resolved: the link in a virtual environment is what finds its packages.
    return os.path.abspath(sys.executable)  # noqa: PTH100


def _plain(name: str, manager: Manager) -> Unit:
    """*name* for commands that need its names and its limit alone, and must work with any settings."""
    home = paths.home()
    unit = unit_of(name, Settings(), {}, home=home, logs=paths.default_logs(), python=_python())
    file = manager.file(unit)
    return replace(unit, stop_s=stop_s_in(file.read_bytes()) or unit.stop_s) if paths.exists(file) else unit


@service.command()
@_programs
@_manager_options
@service_options
@click.pass_context
def install(context: click.Context, /, programs: tuple[str, ...], manager: str | None, **flags: Any) -> None:
    """Write the service files for these settings, and start the services."""
    settings, given = given_settings(flags, context.obj)
    chosen, home, logs = _manager(manager), paths.home(), paths.default_logs()
    names = programs or PROGRAMS
    units = [unit_of(name, settings, given, home=home, logs=logs, python=_python()) for name in names]
    # launchd makes neither, and starts nothing without them.
    (home / ".mtplx").mkdir(mode=0o700, exist_ok=True)
    paths.private_folder(logs)
    for unit in units:
        last_error.clear(logs, f"mtplx-{unit.name}")
        chosen.install(unit)
        click.echo(f"{unit.name}: installed as {chosen.file(unit)}")
    click.echo("`mtplx service status` tells how they fare.")


@service.command()
@_programs
@_manager_options
def uninstall(programs: tuple[str, ...], manager: str | None) -> None:
    """Stop the services and remove their files; jobs, models and logs stay."""
    chosen = _manager(manager)
    for name in programs or PROGRAMS:
        chosen.uninstall(_plain(name, chosen))
        click.echo(f"{name}: removed")


@service.command()
@_programs
@_manager_options
def start(programs: tuple[str, ...], manager: str | None) -> None:
    """Start installed services."""
    chosen = _manager(manager)
    for name in programs or PROGRAMS:
        chosen.start(_plain(name, chosen))
        click.echo(f"{name}: started")


@service.command()
@_programs
@_manager_options
def stop(programs: tuple[str, ...], manager: str | None) -> None:
    """Stop the services until they are started or you log in again; the running job gets `--drain-s` to end."""
    chosen = _manager(manager)
    for name in programs or PROGRAMS:
        chosen.stop(_plain(name, chosen))
        click.echo(f"{name}: stopped")


@service.command()
@_programs
@_manager_options
@click.pass_context
def status(context: click.Context, /, programs: tuple[str, ...], manager: str | None) -> None:
    """Tell which services run, and why one last ended; exit code 1 unless all of them run."""
    chosen, logs, well = _manager(manager), paths.default_logs(), True
    for name in programs or PROGRAMS:
        unit = _plain(name, chosen)
        runs, words = chosen.state(unit)
        well = well and runs
        installed = chosen.file(unit) if paths.exists(chosen.file(unit)) else "not installed"
        click.echo(f"{name}: {words}\n  file  {installed}\n  log   {logs}/mtplx-{name}.log")
        last = last_error.read(logs, f"mtplx-{name}")
        # One that runs has got over it.
        if last is not None and not runs:
            click.echo(f"  last  {last}")
    context.exit(0 if well else 1)


@service.command("print")
@click.argument("program", type=click.Choice(PROGRAMS))
@_manager_options
@service_options
@click.pass_context
def show(context: click.Context, /, program: str, manager: str | None, **flags: Any) -> None:
    """Print the service file of PROGRAM for these settings; nothing is installed."""
    settings, given = given_settings(flags, context.obj)
    unit = unit_of(program, settings, given, home=paths.home(), logs=paths.default_logs(), python=_python())
    click.echo(_manager(manager).text(unit), nl=False)
