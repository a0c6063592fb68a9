"""`mtplx health` and `mtplx cancel`: what the broker says, and ending one job."""

from __future__ import annotations

import json
from typing import Any, Final

import click

from mtplx.cli.connect import connect
from mtplx.cli.options import connection_options, load_settings
from mtplx.client import Client

ID_HEX: Final = 32


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the whole report as JSON.")
@connection_options
@click.pass_context
def health(context: click.Context, /, as_json: bool, **flags: Any) -> None:
    """Show the state of broker, worker and line."""
    with connect(load_settings(flags, context.obj)) as client:
        report = client.health()
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        # Lists of what goes on are drawn by `mtplx top`.
        report.pop("recent", None)
        report.get("line", {}).pop("first", None)
        print_map(report)


@click.command()
@click.argument("job_id", metavar="ID")
@connection_options
@click.pass_context
def cancel(context: click.Context, /, job_id: str, **flags: Any) -> None:
    """End the job ID (hexadecimal; the first digits are enough where they are unique)."""
    with connect(load_settings(flags, context.obj)) as client:
        state = client.cancel(full_id(client, job_id))
    click.echo(f"{state['id']} {state['state']} {state.get('outcome', '')}".rstrip())


def print_map(report: dict[str, Any]) -> None:
    """Nested maps as indented lines."""
    for line in _lines(report, ""):
        click.echo("".join(map(_shown, line)))


def _shown(character: str) -> str:
    # Texts of other producers must not move the terminal of whoever looks at them.
    harmless = character.isprintable() or character in "\n\t"
    return character if harmless else character.encode("unicode_escape").decode()


def _lines(report: dict[str, Any], indent: str) -> list[str]:
    lines = []
    for key, value in report.items():
        if isinstance(value, dict) and value:
            lines += [f"{indent}{key}", *_lines(value, indent + "  ")]
        else:
            shown = f"{value:.3f}" if isinstance(value, float) else str(value)
            lines.append(f"{indent}{key:<{max(1, 34 - len(indent))}} {shown}")
    return lines


def full_id(client: Client, start: str) -> bytes:
    """The id of the one job whose hexadecimal id begins with *start*.

    Raises:
        click.ClickException: it is no id, or there is no such job, or more than one.
    """
    start = start.lower()
    if not start or any(digit not in "0123456789abcdef" for digit in start) or len(start) > ID_HEX:
        raise click.UsageError(f"{start!r} is no job id; ids have up to {ID_HEX} hexadecimal digits.")
    if len(start) == ID_HEX:
        return bytes.fromhex(start)
    found = [job["id"] for job in client.status(jobs=True)["jobs"] if job["id"].startswith(start)]
    if len(found) != 1:
        raise click.ClickException(f"{len(found) or 'No'} jobs begin with {start}; see `mtplx jobs`.")
    return bytes.fromhex(found[0])
