"""Prompt lookup over four kinds of text, teacher-forced, and what the planner makes of it on known devices.

    python bench/ngram.py

No model runs: the answers are those of tests/speculating/texts.py, the costs those of tests/speculating/rig.py. A
plain step draws one token; a round is a step of any kind.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from speculating.rig import DEVICES, follow, table  # noqa: E402 - the folders come first
from speculating.texts import texts  # noqa: E402

from worker.speculation.ngram import NGRAM  # noqa: E402
from worker.speculation.planner import Planner  # noqa: E402

# Rows and waiting cost nothing: every proposal is verified in full.
FREE = table({1: 1, 16: 1}, 1, 0.0)


def main() -> None:
    """Two tables: what the drafter offers, and the speed over plain decode on each device."""
    offers = Table(title="every proposal verified, 15 nodes at most")
    for column in ("text", "prompt", "answer", "rounds", "proposed in", "drafted", "accepted", "forks, fork wins"):
        offers.add_column(column, justify="left" if column == "text" else "right")
    speeds = Table(title="planned, speed over plain decode: chains / with forks")
    for column in ("text", *DEVICES):
        speeds.add_column(column, justify="left" if column == "text" else "right")
    for text in texts():
        spent, chain = follow(Planner(FREE, 15, False, NGRAM), text.prompt, text.answer, FREE, 0)
        _, tree = follow(Planner(FREE, 15, True, NGRAM), text.prompt, text.answer, FREE, 2)
        counts = (
            len(text.prompt),
            len(text.answer),
            round(spent.ms),
            chain["steps"],
            chain["drafted"],
            chain["accepted"],
        )
        offers.add_row(text.kind, *map(str, counts), f"{tree['fork_attempts']}, {tree['fork_wins']}")
        row = []
        for costs in DEVICES.values():
            runs = [
                follow(Planner(costs, 15, forks > 0, NGRAM), text.prompt, text.answer, costs, forks)[0].speedup
                for forks in (0, 2)
            ]
            row.append(" / ".join(f"{speedup:.2f}" for speedup in runs))
        speeds.add_row(text.kind, *row)
    console = Console(width=150)
    console.print(offers)
    console.print(speeds)


if __name__ == "__main__":
    main()
