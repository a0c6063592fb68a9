"""`mtplx jobs`: the list of jobs, one of them whole, and what is to become of buried ones."""

from __future__ import annotations

import json
from typing import Any, Final

import click

from mtplx.cli.connect import connect
from mtplx.cli.ops import full_id, print_map
from mtplx.cli.options import connection_options, load_settings

STATES: Final = ("waiting", "running", "cancelling", "ended", "buried")
_COLUMNS: Final = ("id", "state", "position", "admit_seq", "tokens", "outcome")
_HEADS: Final = ("ID", "STATE", "POSITION", "ADMITTED AS", "TOKENS", "OUTCOME")
_ROW: Final = "{:<32}  {:<10}  {:>8}  {:>11}  {:>6}  {:<9}"
# Only whoever sees the jobs of all is told whose they are.
_OWNER: Final = "  {}"


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
@connection_options
@click.pass_context
def jobs(context: click.Context, /, as_json: bool, **flags: Any) -> None:
    """List the running job, those that wait, and finished ones; or look at one of them."""
    context.obj = {**(context.obj or {}), **{name: value for name, value in flags.items() if value is not None}}
    if context.invoked_subcommand is None:
        _print_list(context, None, as_json=as_json)


@jobs.command("list")
@click.option("--state", type=click.Choice(STATES), help="Only jobs in this state.")
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
@connection_options
@click.pass_context
def list_jobs(context: click.Context, /, state: str | None, as_json: bool, **flags: Any) -> None:
    """List the running job, those that wait, and finished ones."""
    _print_list(context, state, as_json=as_json, **flags)


@jobs.command()
@click.argument("job_id", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@connection_options
@click.pass_context
def show(context: click.Context, /, job_id: str, as_json: bool, **flags: Any) -> None:
    """Show all of the job ID: its state, its prompt, how it ended, and its answer."""
    with connect(load_settings(flags, context.obj)) as client:
        found = client.status(full_id(client, job_id), whole=True)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        print_map(found)


@jobs.command()
@click.argument("job_id", metavar="ID")
@connection_options
@click.pass_context
def kick(context: click.Context, /, job_id: str, **flags: Any) -> None:
    """Put the buried job ID at the end of the line, with all its attempts."""
    with connect(load_settings(flags, context.obj)) as client:
        _print_state(client.kick(full_id(client, job_id)))


@jobs.command()
@click.argument("job_id", metavar="ID")
@connection_options
@click.pass_context
def delete(context: click.Context, /, job_id: str, **flags: Any) -> None:
    """Forget the ended or buried job ID, with its prompt and its answer."""
    with connect(load_settings(flags, context.obj)) as client:
        _print_state(client.delete(full_id(client, job_id)))


def _print_list(context: click.Context, state: str | None, *, as_json: bool, **flags: Any) -> None:
    with connect(load_settings(flags, context.obj)) as client:
        listed = client.status(jobs=True, state=state)
    if as_json:
        click.echo(json.dumps(listed, indent=2))
        return
    owned = any("owner" in job for job in listed["jobs"])
    row = _ROW + _OWNER if owned else _ROW
    click.echo(row.format(*_HEADS, "OWNER").rstrip())
    for job in listed["jobs"]:
        click.echo(row.format(*(job.get(name, "") for name in _COLUMNS), job.get("owner", "")).rstrip())


def _print_state(state: dict[str, Any]) -> None:
    click.echo(f"{state['id']} {state['state']}")
