"""What hundreds of rounds of disturbances lose: kills, stops, power losses of broker and worker at seeded moments.

Each round is a process (tests/whole/rounds.py) with a broker, workers and producers of its own. Then rounds
with the real worker on a tiny model in float32, whose streams must be those of a quiet service. `--seed 17`, or
SEED=17, plays one round.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
from report import ROOT, Figure, write

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tiny_models import make_llama  # noqa: E402 - the folders come first
from whole.harness import environment  # noqa: E402
from whole.plan import real_plan_of  # noqa: E402
from whole.real_rounds import RealRounds  # noqa: E402

# The promises of a round, in words.
NAMES = {
    "lost": "lost",
    "duplicated": "duplicated",
    "unexpected": "unexpected",
    "order": "order breaks",
    "flight": "two in flight",
    "words": "last words beyond one",
    "gaps": "gaps or repeats in streams",
    "wrong": "wrong tokens, texts or hashes",
    "failed": "ends that nothing explains",
}
COUNTS = ("jobs", "runs", "disturbances", "resumed", "interrupted", "recovered", "cancelled", "buried")
ROUND_S = 180


def play(seed: int) -> dict[str, Any]:
    """The round of *seed*, as a process."""
    env = environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    command = [sys.executable, "-P", "-m", "whole.rounds", str(seed)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=ROUND_S, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[0])
    except (IndexError, ValueError):
        found = {"seed": seed, "counts": {}, "faults": {"failed": [done.stderr[-2000:]]}, "exits": {}}
    if found["faults"]:
        click.echo(done.stderr or found["faults"], err=True)
    return found


def play_all(seeds: range, side_by_side: int) -> list[dict[str, Any]]:
    """The rounds of all *seeds*, some side by side."""
    with ThreadPoolExecutor(side_by_side) as pool:
        return list(pool.map(play, seeds))


def play_real(
    seeds: range, side_by_side: int, model: Path | None, more: tuple[str, ...]
) -> tuple[Counter[str], Counter[str]]:
    """Broken promises and counts of the rounds with the real worker, by default on a tiny model."""
    faults: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    plans = [real_plan_of(seed) for seed in seeds]
    with tempfile.TemporaryDirectory(prefix="mxf", dir="/tmp") as folder:
        rounds = RealRounds(model or make_llama(Path(folder)), *more)
        rounds.learn(plans)
        with ThreadPoolExecutor(side_by_side) as pool:
            reports = list(pool.map(rounds.play, plans))
        for report in reports:
            counts.update(report.verdict.counts)
            if report.verdict.faults:
                click.echo(report.told(), err=True)
                faults.update({name: len(found) for name, found in report.verdict.faults.items()})
    return faults, counts


def figures_of(found: list[dict[str, Any]], seconds: float) -> list[Figure]:
    """The figures of the scripted rounds."""
    faults: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    exits: Counter[str] = Counter()
    for one in found:
        faults.update({name: len(sentences) for name, sentences in one["faults"].items()})
        counts.update(one["counts"])
        exits.update(one["exits"])
    bad = [one["seed"] for one in found if one["faults"]]
    if bad:
        click.echo(f"Seeds that broke a promise: {bad}", err=True)
    return [
        Figure("rounds", len(found), "", None, "higher"),
        Figure("rounds with a broken promise", len(bad), "", 0, "lower"),
        *(Figure(words, faults[name], "", 0, "lower") for name, words in NAMES.items()),
        *(Figure(f"{name} in all", counts[name], "", None, "higher") for name in COUNTS),
        *(
            Figure(f"{name}: ends while disturbed", number, "", None, "lower")
            for name, number in sorted(exits.items())
        ),
        Figure("time", seconds, "s", None, "lower"),
    ]


def real_figures(rounds: int, faults: Counter[str], counts: Counter[str]) -> list[Figure]:
    """The figures of the rounds with the real worker."""
    unlike = faults["wrong"] + faults["gaps"]
    return [
        Figure("rounds with the real worker", rounds, "", None, "higher"),
        Figure("streams there", counts["jobs"], "", None, "higher"),
        Figure("streams that went on in another attempt there", counts["interrupted"], "", None, "higher"),
        Figure("tokens, texts or hashes unlike the quiet service's", unlike, "", 0, "lower"),
        Figure("other broken promises there", faults.total() - unlike, "", 0, "lower"),
    ]


@click.command()
@click.option("--rounds", default=300, show_default=True, help="Rounds with the scripted worker.")
@click.option("--real", default=20, show_default=True, help="Rounds with the real worker.")
@click.option("--first", default=1000, show_default=True, help="The first seed.")
@click.option("--side-by-side", default=2, show_default=True, help="Rounds at a time.")
@click.option("--real-side-by-side", default=1, show_default=True, help="Rounds of those at a time.")
@click.option("--model", type=click.Path(path_type=Path, exists=True), help="For the real worker.")
@click.option("--worker-flag", "flags", multiple=True, help="A flag of the real worker, such as --kv-memory=4GB.")
@click.option("--name", default="faults", show_default=True, help="Of the results file.")
@click.option("--device", default="", help="The GPU in words, where the real worker has one.")
@click.option("--seed", type=int, envvar="SEED", help="Play this one round, and write nothing.")
def main(seed: int | None, name: str, device: str, **given: Any) -> None:
    """Play, print, write `bench/results/faults.json`."""
    if seed is not None:
        one = play(seed)
        click.echo(json.dumps(one, indent=1))
        sys.exit(1 if one["faults"] else 0)
    first, rounds, real, began = given["first"], given["rounds"], given["real"], time.monotonic()
    figures = []
    if rounds:
        found = play_all(range(first, first + rounds), given["side_by_side"])
        figures += figures_of(found, time.monotonic() - began)
    if real:
        faults, counts = play_real(
            range(first, first + real), given["real_side_by_side"], given["model"], given["flags"]
        )
        figures += real_figures(real, faults, counts)
    write(name, figures, device=device)
    sys.exit(1 if any(one.met == "no" for one in figures) else 0)


if __name__ == "__main__":
    main()
