"""The settings as command-line options, made from the settings class, for all three programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from mtplx.settings import Settings, flag

Command = TypeVar("Command", bound=Callable[..., Any])


def settings_options(command: Command) -> Command:
    """Add one option for each setting, and `--config`. Only what was given reaches the command."""
    for item in reversed(fields(Settings)):
        option = click.option(flag(item.name), item.name, metavar="VALUE", help=item.metadata["help"])
        command = option(command)
    config = click.option("--config", type=click.Path(path_type=Path), help="Settings file (TOML).")
    return config(command)


def load_settings(options: Mapping[str, Any]) -> Settings:
    """The settings in force, from the options of a command that has `settings_options`.

    Raises:
        SettingsError: naming the flag, variable or key, and what is allowed.
    """
    given = {name: value for name, value in options.items() if value is not None and name != "config"}
    return Settings.load(given, config=options.get("config"))
