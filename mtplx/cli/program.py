"""What the broker's and the worker's programs share: settings, logging, and how each failure ends."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import click

from mtplx.cli.options import load_settings
from mtplx.errors import Exit, MtplxError
from mtplx.settings import Settings


def run_program(name: str, serve: Callable[[Settings], None], options: Mapping[str, Any]) -> None:
    """Load the settings and *serve*; ends the process with the exit code of whatever went wrong."""
    try:
        settings = load_settings(options)
        logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(name)s %(message)s")
        serve(settings)
    except MtplxError as error:
        click.echo(f"{name}: {error}", err=True)
        sys.exit(error.exit_code)
    except Exception:
        logging.getLogger(name).exception("failed")
        sys.exit(Exit.INTERNAL)
