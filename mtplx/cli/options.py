"""The settings as command-line options, made from the settings class, for all three programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from mtplx import paths
from mtplx.errors import SettingsError
from mtplx.settings import Settings, flag

Command = TypeVar("Command", bound=Callable[..., Any])
# All that a producer needs to find its broker.
CONNECTION: Final = ("front", "run_dir", "state_dir", "curve", "server_key", "key")
# All that tells where the journal and the keys lie.
STATE: Final = ("state_dir", "run_dir")


def settings_options(command: Command) -> Command:
    """Add one option for each setting, and `--config`. Only what was given reaches the command."""
    return _options(command, tuple(item.name for item in fields(Settings)))


def service_options(command: Command) -> Command:
    """Add the options of a service file: all but the folder of logs, which has its place."""
    return _options(command, tuple(item.name for item in fields(Settings) if item.name != "log_dir"))


def connection_options(command: Command) -> Command:
    """Add the options of a command that only talks to a broker."""
    return _options(command, CONNECTION)


def state_options(command: Command) -> Command:
    """Add the options of a command that looks at the journal or the keys by itself."""
    return _options(command, STATE)


def load_settings(options: Mapping[str, Any], outer: Mapping[str, Any] | None = None) -> Settings:
    """The settings in force, from the options of a command; *outer* are those before the subcommand.

    Raises:
        SettingsError: naming the flag, variable or key, and what is allowed.
    """
    asked = {name: value for name, value in (outer or {}).items() if value is not None}
    asked.update({name: value for name, value in options.items() if value is not None})
    config = asked.pop("config", None)
    return Settings.load(asked, config=config)


def _default(item: Field[Any]) -> str:
    try:
        value = item.default if item.default_factory is MISSING else item.default_factory()
        home = str(paths.home())
    except SettingsError:
        # Whoever loads the settings is told.
        return ""
    if value in (None, ""):
        return ""
    return f"  [default: {str(value).replace(home, '~', 1)}]"


def _options(command: Command, names: tuple[str, ...]) -> Command:
    for item in reversed(fields(Settings)):
        if item.name in names:
            text = item.metadata["help"]
            if item.type == "bool":
                option = click.option(flag(item.name), item.name, is_flag=True, default=None, help=text)
            else:
                option = click.option(flag(item.name), item.name, metavar="VALUE", help=text + _default(item))
            command = option(command)
    config = click.option("--config", type=click.Path(path_type=Path), help="Settings file (TOML).")
    return config(command)
