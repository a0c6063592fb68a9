"""`mtplx trace FILE`: what a trace file tells, as trees with times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from mtplx.cli.options import load_settings, settings_options
from mtplx.cli.spans import Spans, read_spans, tree_of
from mtplx.errors import SettingsError

PIPE_WIDTH = 160


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option(
    "--last", type=click.IntRange(1), default=20, show_default=True, help="Show so many jobs, the latest."
)
@click.option("--job", metavar="ID", default="", help="Only the job whose id begins so.")
@click.option("--trace", "trace_id", metavar="ID", default="", help="Only spans of the trace whose id begins so.")
@settings_options
@click.pass_context
def trace(context: click.Context, /, file: Path | None, last: int, job: str, trace_id: str, **flags: Any) -> None:
    """Print the spans of FILE, as --trace-file writes it, as trees with times.

    Without FILE it is the one of the settings.
    """
    file = file or load_settings(flags, context.obj).trace_file
    if file is None:
        raise SettingsError("Name the file of spans, or set --trace-file, which makes the broker write one.")
    spans = read_or_refuse(file)
    roots = [
        one for one in spans.roots if one.trace.startswith(trace_id.lower()) and one.job.startswith(job.lower())
    ]
    console = Console()
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    if len(roots) > last:
        click.echo(f"{len(roots) - last} earlier ones are left out; --last shows more.", err=True)
    console.print(tree_of(roots[-last:], console.width), highlight=False)
    if not roots:
        click.echo(f"{file} has no such spans." if spans.roots else f"{file} has no spans yet.", err=True)
    if spans.damaged:
        click.echo(f"{spans.damaged} lines of {file} are no spans and were left out.", err=True)


def read_or_refuse(file: Path) -> Spans:
    """The spans of *file*.

    Raises:
        SettingsError: it cannot be read.
    """
    try:
        return read_spans(file)
    except OSError as error:
        raise SettingsError(
            f"{file} cannot be read ({error.strerror}); --trace-file FILE makes the broker write one."
        ) from error
