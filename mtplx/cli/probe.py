"""`mtplx probe`: what this device does with the model's kernels, by the worker's program."""

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

from mtplx.cli.options import load_settings, settings_options
from mtplx.errors import SettingsError
from mtplx.settings import Settings

PROBE: Final = (sys.executable, "-P", "-m", "worker.probe", "--json")
_COLUMNS: Final = ("ok", "error", "bound", "alone, us", "plain, us", "step, ms", "without, ms")


@click.command()
@click.option("--kernels", is_flag=True, help="Print the table of kernels (also printed where nothing is asked).")
@click.option(
    "--report", "file", type=click.Path(path_type=Path, dir_okay=False), help="Measure all of it into FILE (JSON)."
)
@click.option(
    "--rows",
    is_flag=True,
    help="Measure what forwards of several rows cost, print it, and keep it for the worker.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the whole report as JSON.")
@settings_options
@click.pass_context
def probe(
    context: click.Context, /, kernels: bool, file: Path | None, rows: bool, as_json: bool, **flags: Any
) -> None:
    """Check each kernel on this device, and time it; no service need run, and none should."""
    if rows:
        context.exit(run_rows(load_settings(flags, context.obj)))
    code, report = run_probe(load_settings(flags, context.obj), file)
    if report is None:
        context.exit(code)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    elif kernels or file is None:
        show(report)


def run_rows(settings: Settings) -> int:
    """Print what rows cost, measured in a process of its own; its exit code.

    Raises:
        SettingsError: the worker's libraries are not installed.
    """
    _need_mlx()
    command = [*PROBE[:-1], "--rows"]
    return subprocess.run(command, env=settings.environment(), check=False).returncode


def _need_mlx() -> None:
    if importlib.util.find_spec("mlx") is None:
        raise SettingsError("Kernels run on MLX, which needs the extra: pip install 'mtplx-line[worker]'.")


def run_probe(settings: Settings, file: Path | None) -> tuple[int, dict[str, Any] | None]:
    """Probe in a process of its own, which may load MLX; its exit code, and the report where that is 0.

    Raises:
        SettingsError: the worker's libraries are not installed.
    """
    _need_mlx()
    command = [*PROBE, *([] if file is None else ["--report", str(file.absolute())])]
    done = subprocess.run(command, env=settings.environment(), stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, json.loads(done.stdout) if done.returncode == 0 else None


def show(report: Mapping[str, Any]) -> None:
    """Draw the table of kernels, and what stands beside it."""
    device = report["device"]
    place = device.get("device_name", device["kind"])
    title = f"{report['model']['name']} on {place} ({device['kind']}), cache: {report.get('form', 'module lane')}"
    console = Console()
    console.print(title, highlight=False)
    if report.get("why"):
        console.print(report["why"], highlight=False)
    if not report["kernels"]:
        return
    table = Table()
    table.add_column("kernel")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    table.add_column("state", overflow="fold")
    for name, row in report["kernels"].items():
        table.add_row(name, *_figures(row), row["state"])
    console.print(table)


def _figures(row: Mapping[str, Any]) -> list[str]:
    alone, step = row.get("alone_us", {}), row.get("step_ms", {})
    ok = {True: "yes", False: "no", None: ""}[row.get("ok")]
    values = (
        row.get("error"),
        row.get("bound"),
        alone.get("kernel"),
        alone.get("plain"),
        step.get("on"),
        step.get("off"),
    )
    return [ok, *("" if value is None else f"{value:.3g}" for value in values)]
