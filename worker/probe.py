"""`python -m worker.probe`: what the device can do with a model's kernels, as a table or as a file to send."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from mtplx.errors import Exit, MtplxError
from mtplx.settings import Settings
from worker.engine.probe import Wish, named, probe
from worker.speculation.build import probe_rows

_ROW: Final = "{:<12} {:<9} {:>9} {:>12} {:>12} {:>10} {:>10}  {}"
_HEAD: Final = ("kernel", "error", "bound", "us alone", "us plain", "ms with", "ms without", "state")


def lines(report: Mapping[str, Any]) -> list[str]:
    """The table of kernels as text."""
    found = [f"{report['model']['name']} on {report['device']['kind']}: {report.get('form', 'module lane')}"]
    if report.get("why"):
        found.append(report["why"])
    if report["kernels"]:
        found.append(_ROW.format(*_HEAD))
    for name, row in report["kernels"].items():
        alone, step = row.get("alone_us", {}), row.get("step_ms", {})
        figures = (row.get("error"), row.get("bound"), alone.get("kernel"), alone.get("plain"))
        shown = ["" if value is None else f"{value:.3g}" for value in (*figures, step.get("on"), step.get("off"))]
        found.append(_ROW.format(name, *shown, row["state"]))
    seconds = (f"{name} {value:.2f}" for name, value in report["start_s"].items())
    return [*found, f"seconds: {', '.join(seconds)}"]


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m worker.probe", description="Check and time the kernels.")
    parser.add_argument("--kernels", action="store_true", help="print the table of kernels")
    parser.add_argument("--report", type=Path, metavar="FILE", help="measure all, and write it to FILE (JSON)")
    parser.add_argument(
        "--rows", action="store_true", help="measure what forwards of several rows cost, and keep it"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--model", help="as in the settings")
    given = parser.parse_args(arguments)
    try:
        settings = Settings.load({} if given.model is None else {"model": given.model})
        if given.rows:
            sys.stdout.write("\n".join(probe_rows(settings, perf_counter).table()) + "\n")
            return 0
        if given.report is not None:
            # What takes a minute to measure must have a place.
            given.report.touch()
        model = named(settings.model, settings.cache_dir)
        wish = Wish(model=model, cache_dir=settings.cache_dir, full=given.report is not None)
        report = probe(wish, _say)
        if given.report is not None:
            given.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            _say(f"written to {given.report}")
    except MtplxError as error:
        sys.stderr.write(f"mtplx-probe: {error}\n")
        return int(error.exit_code)
    except OSError as error:
        sys.stderr.write(f"mtplx-probe: {given.report} cannot be written: {error.strerror or error}\n")
        return int(Exit.SETTINGS)
    if given.json:
        sys.stdout.write(json.dumps(report) + "\n")
    elif given.kernels or given.report is None:
        sys.stdout.write("\n".join(lines(report)) + "\n")
    return 0


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
