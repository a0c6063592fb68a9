"""`mtplx journal`: what the journal holds, and a way out where it is damaged; by the broker's program."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Final

import click

from mtplx.cli.options import load_settings, state_options

TOOL: Final = (sys.executable, "-P", "-m", "broker.journal_tool")


@click.group()
def journal() -> None:
    """Look at the journal of the broker, or mend it."""


@journal.command()
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@state_options
@click.pass_context
def info(context: click.Context, /, as_json: bool, **flags: Any) -> None:
    """Check all of the journal and count what it holds; a broker may be running."""
    _run(context, flags, "info", *(["--json"] if as_json else []))


@journal.command()
@state_options
@click.pass_context
def salvage(context: click.Context, /, **flags: Any) -> None:
    """Write what is whole in a damaged journal into a new one; no broker may be running.

    The damaged files are kept beside it, as journal.db.damaged-N.
    """
    _run(context, flags, "salvage")


def _run(context: click.Context, flags: dict[str, Any], *arguments: str) -> None:
    settings = load_settings(flags, context.obj)
    done = subprocess.run([*TOOL, *arguments], env=settings.environment(), check=False)
    context.exit(done.returncode)
