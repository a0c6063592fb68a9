"""Looks at the files of the model of the settings, and fetches nothing: `python -m worker.model_check`."""

from __future__ import annotations

from pathlib import Path

import click
from huggingface_hub import try_to_load_from_cache

from mtplx.cli.program import run_program
from mtplx.paths import exists, expanded
from mtplx.settings import Settings
from worker.engine.files import HUB_ID, check_model_files, resolve_model


def main() -> None:
    """Print one sentence on the model; exit code 3 with what is wrong where it cannot be loaded."""
    run_program("mtplx", _look, {})


def _look(settings: Settings) -> None:
    name = settings.model
    if HUB_ID.fullmatch(name) and not exists(expanded(name)):
        cached = try_to_load_from_cache(name, "config.json")
        if not isinstance(cached, str):
            click.echo(f"{name} is not fetched yet; the first start fetches it from Hugging Face.")
            return
        path = Path(cached).parent
    else:
        path = resolve_model(name, settings.cache_dir)
    check_model_files(path)
    click.echo(f"The files of {path} are whole.")


if __name__ == "__main__":
    main()
