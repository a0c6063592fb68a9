"""`mtplx health`, `mtplx jobs`, `mtplx cancel`: what the broker says, and ending one job."""

from __future__ import annotations

import json
from typing import Any, Final

import click

from mtplx.cli.connect import connect
from mtplx.cli.options import connection_options, load_settings
from mtplx.client import Client

ID_HEX: Final = 32
_ROW: Final = "{:<32}  {:<10}  {:>8}  {:>11}  {:>6}  {}"


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
        print_map(report)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
@connection_options
@click.pass_context
def jobs(context: click.Context, /, as_json: bool, **flags: Any) -> None:
    """List the running job, those that wait, and finished ones."""
    with connect(load_settings(flags, context.obj)) as client:
        listed = client.status(jobs=True)
    if as_json:
        click.echo(json.dumps(listed, indent=2))
        return
    click.echo(_ROW.format("ID", "STATE", "POSITION", "ADMITTED AS", "TOKENS", "OUTCOME").rstrip())
    for job in listed["jobs"]:
        shown = (job.get(name, "") for name in ("id", "state", "position", "admit_seq", "tokens", "outcome"))
        click.echo(_ROW.format(*shown).rstrip())


@click.command()
@click.argument("job_id", metavar="ID")
@connection_options
@click.pass_context
def cancel(context: click.Context, /, job_id: str, **flags: Any) -> None:
    """End the job ID (hexadecimal; the first digits are enough where they are unique)."""
    with connect(load_settings(flags, context.obj)) as client:
        state = client.cancel(bytes.fromhex(_full_id(client, job_id.lower())))
    click.echo(f"{state['id']} {state['state']} {state.get('outcome', '')}".rstrip())


def print_map(report: dict[str, Any]) -> None:
    """Nested maps as indented lines."""
    for line in _lines(report, ""):
        click.echo(line)


def _lines(report: dict[str, Any], indent: str) -> list[str]:
    lines = []
    for key, value in report.items():
        if isinstance(value, dict) and value:
            lines += [f"{indent}{key}", *_lines(value, indent + "  ")]
        else:
            shown = f"{value:.3f}" if isinstance(value, float) else str(value)
            lines.append(f"{indent}{key:<{max(1, 34 - len(indent))}} {shown}")
    return lines


def _full_id(client: Client, start: str) -> str:
    if not start or any(digit not in "0123456789abcdef" for digit in start) or len(start) > ID_HEX:
        raise click.UsageError(f"{start!r} is no job id; ids have up to {ID_HEX} hexadecimal digits.")
    if len(start) == ID_HEX:
        return start
    found = [job["id"] for job in client.status(jobs=True)["jobs"] if job["id"].startswith(start)]
    if len(found) != 1:
        raise click.ClickException(f"{len(found) or 'No'} jobs begin with {start}; see `mtplx jobs`.")
    return str(found[0])
