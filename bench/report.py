"""What every bench writes: one table on the terminal, and bench/results/NAME.json."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value. goal None: reported without a goal. better: `higher` or `lower`."""

    name: str
    value: float
    unit: str
    goal: float | None
    better: str

    @property
    def met(self) -> str:
        """`yes`, `no`, or nothing where there is no goal."""
        if self.goal is None:
            return ""
        reached = self.value >= self.goal if self.better == "higher" else self.value <= self.goal
        return "yes" if reached else "no"


def machine(device: str = "") -> str:
    """The machine in words, without its name; *device*: its GPU."""
    own = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return f"{device}, {own}" if device else own


def commit() -> str:
    """The commit measured, marked where the tree differs from it; a copy without git names it in .commit."""
    named = ROOT / ".commit"
    if named.exists():
        return named.read_text().strip()
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no", "--", "mtplx", "broker", "worker", "bench/*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return (head.stdout.strip() or "unknown") + ("+changes" if changed.stdout.strip() else "")


def write(name: str, figures: list[Figure], command: str | None = None, device: str = "") -> None:
    """Print the table of *figures* and write bench/results/NAME.json.

    *command* is this program's by default; *device*, the GPU in words where one was measured.
    """
    table = Table(title=name)
    for column in ("figure", "value", "unit", "goal", "met"):
        table.add_column(column, justify="left" if column in ("figure", "unit") else "right")
    for one in figures:
        sign = {"higher": ">=", "lower": "<="}[one.better]
        table.add_row(
            one.name, f"{one.value:.4g}", one.unit, "" if one.goal is None else f"{sign} {one.goal:g}", one.met
        )
    Console().print(table)
    save(name, figures, command, device)


def save(name: str, figures: list[Figure], command: str | None = None, device: str = "") -> None:
    """As `write`, without the table."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    report = {
        "machine": machine(device),
        "commit": commit(),
        "command": command or " ".join(["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "figures": [asdict(one) for one in figures],
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
