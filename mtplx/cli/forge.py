"""`mtplx forge`: a head for a model that has none, made by the worker's program."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from mtplx.cli.options import load_settings
from mtplx.errors import SettingsError

Command = TypeVar("Command", bound=Callable[..., Any])
FORGE: Final = (sys.executable, "-P", "-m", "worker.forge")
_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)
_OPTIONS: Final = (
    click.argument("model"),
    click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Where it goes."),
    click.option("--prompts", type=_FILE, help="Prompts to learn from, a line each or JSON lines; else our own."),
    click.option("--tokens", default=4_000_000, show_default=True, help="Tokens of answers that are written."),
    click.option(
        "--temperatures", default="0,0.7,1", show_default=True, help="Of the answers, in turn; by comma."
    ),
    click.option("--length", default=384, show_default=True, help="Tokens of an answer at most."),
    click.option("--batch", default=256, show_default=True, help="Answers that are written at once."),
    click.option("--step-tokens", default=32768, show_default=True, help="Tokens of a training step."),
    click.option("--depths", default=4, show_default=True, help="Guesses in a row that are trained."),
    click.option(
        "--epochs", default=4, show_default=True, help="Times that the text is read, if --steps is not set."
    ),
    click.option("--steps", type=int, help="Training steps, whatever --epochs says."),
    click.option("--minutes", type=float, help="Minutes of training at most."),
    click.option("--rate", default=1e-3, show_default=True, help="Learning rate at its peak."),
    click.option("--hard", default=0.3, show_default=True, help="Share of the likeliest token in what is taught."),
    click.option("--seed", default=0, show_default=True, help="Of all that is random."),
    click.option("--bits", default=8, show_default=True, help="Of the head's weights; 0: as the model's."),
    click.option("--group", default=64, show_default=True, help="Weights that share a scale."),
    click.option("--every", default=20.0, show_default=True, help="Seconds between lines of progress."),
    click.option("--checkpoint-minutes", default=5.0, show_default=True, help="Minutes between checkpoints."),
    click.option("--resume", is_flag=True, help="Go on from the checkpoint in --out."),
    click.option("--force", is_flag=True, help="Write the head even if it does not pay on this device."),
)


def forge_options(command: Command) -> Command:
    """Add the model and all options of `mtplx forge`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command()
@forge_options
@click.pass_context
def forge(context: click.Context, /, **given: Any) -> None:
    """Make a multi-token prediction head for the dense MODEL, by its own text; no service should run meanwhile."""
    if importlib.util.find_spec("mlx") is None:
        raise SettingsError("Heads are made with MLX, which needs the extra: pip install 'mtplx-line[worker]'.")
    arguments = []
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if name == "model" or value is None or value is False:
            continue
        arguments += [option] if value is True else [option, str(value)]
    environment = load_settings({}, context.obj).environment()
    command = [*FORGE, *arguments, "--", given["model"]]
    context.exit(subprocess.run(command, env=environment, check=False).returncode)
