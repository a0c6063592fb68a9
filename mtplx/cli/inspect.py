"""`mtplx inspect MODEL`: what could draft for a model, by the worker's program."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from mtplx.cli.options import load_settings
from mtplx.errors import SettingsError

INSPECT: Final = (sys.executable, "-P", "-m", "worker.inspect", "--json")


@click.command()
@click.argument("model")
@click.option("--mtp", type=click.Path(path_type=Path, file_okay=False, exists=True), help="Directory of a head.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
@click.pass_context
def inspect(context: click.Context, /, model: str, mtp: Path | None, as_json: bool) -> None:
    """Tell which sources of drafts the MODEL has, and why one is refused; weights are not read."""
    if importlib.util.find_spec("mlx") is None:
        raise SettingsError(
            "Models are looked at with MLX, which needs the extra: pip install 'mtplx-line[worker]'."
        )
    command = [*INSPECT, *([] if mtp is None else ["--mtp", str(mtp)]), "--", model]
    environment = load_settings({}, context.obj).environment()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        context.exit(done.returncode)
    report = json.loads(done.stdout)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        show(report)


def show(report: Mapping[str, Any]) -> None:
    """Draw the table."""
    table = Table(title=report["model"], title_justify="left")
    for name in ("draft source", "usable"):
        table.add_column(name)
    table.add_column("MB", justify="right")
    table.add_column("what, or why not", overflow="fold")
    for row in report["sources"]:
        size = "" if row["bytes"] is None else f"{row['bytes'] / 1e6:.3g}"
        table.add_row(
            row["source"], "yes" if row["usable"] else "no", size, row["what"] if row["usable"] else row["why"]
        )
    Console().print(table)
