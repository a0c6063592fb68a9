"""`mtplx pull NAME`: fetch a model into the cache, by the worker's program."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import click

from mtplx.cli.options import load_settings, settings_options
from mtplx.errors import SettingsError
from mtplx.settings import Settings


@click.command()
@click.argument("name", default="smollm2-135m")
@settings_options
@click.pass_context
def pull(context: click.Context, /, name: str, **flags: Any) -> None:
    """Fetch the model NAME (smollm2-135m) and convert it into the cache."""
    context.exit(pull_model(name, load_settings(flags, context.obj)))


def pull_model(name: str, settings: Settings) -> int:
    """Fetch *name* in a process of its own, which may load MLX; its exit code.

    Raises:
        SettingsError: the worker's libraries are not installed.
    """
    if importlib.util.find_spec("mlx") is None:
        raise SettingsError(
            "Models are converted with MLX, which needs the extra: pip install 'mtplx-line[worker]'."
        )
    command = [sys.executable, "-P", "-m", "worker.pull", name, "--cache-dir", str(settings.cache_dir)]
    return subprocess.run(command, env=settings.environment(), check=False).returncode
