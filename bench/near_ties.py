"""How many answers with drafts part from the plain ones in mlx-lm's module, where no row is promised to be alike.

    python bench/near_ties.py

Tiny models of each kind that runs there, on this machine's device; on the CPU in float32. Answers of 24 ids behind
random prompts, drafted by one who knows the plain answer and errs at a fifth of all places, in chains of up to 15
nodes. The same over MLX's own products on a GPU: part "near-ties" of bench/speculation.py.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click
import mlx.core as mx
import random_prompts
from report import Figure, write
from ways import Prompt, ours, plain

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from engines import build  # noqa: E402 - the folders come first
from speculating.oracle import FREE, Oracle, executor  # noqa: E402
from tiny_models import make_mamba, make_tiny  # noqa: E402

from worker.engine import geometry  # noqa: E402
from worker.engine.load import load  # noqa: E402
from worker.width import WidthPlan  # noqa: E402

MODELS = ("gemma3", "qwen3_5", "granite_hybrid", "mamba")
TEMPERATURES = (0.0, 0.7)
TOKENS = 24
WRONG = 0.2


class Knowing(Oracle):
    """Goes on where the answer parted from the text that it knows."""

    def extend(self, ids: Sequence[int]) -> None:
        """As in `Drafter`."""
        self._at += len(ids)


def measure(name: str, prompts: int) -> list[Figure]:
    """The figures of the model *name*."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = load(make_mamba(Path(folder)) if name == "mamba" else make_tiny(name, Path(folder)))
    built = build(loaded)
    serial = built.engine
    assert built.lane == "module", built.lane
    extent = geometry.Extent(contexts=(64,), steps=2, turns=1)
    moved = geometry.measure(serial.forward, serial.index.pages, extent, time.perf_counter).moved
    figures = [Figure(f"{name}: first row's logits move, at most", max(moved), "of the largest", None, "lower")]
    for temperature in TEMPERATURES:
        other = drafted = 0
        for place, ids in enumerate(random_prompts.prompts(loaded.vocabulary, prompts)):
            prompt = Prompt(tuple(ids), TOKENS, temperature, seed=place)
            want = plain(serial)(prompt)
            oracle = Knowing((*ids, *want.ids), loaded.vocabulary, WRONG)
            wide = executor(serial, oracle, FREE, clock=lambda: 0.0).run(WidthPlan(serial.forward.width), serial)
            got = ours(serial, lambda _, wide=wide: wide, prompt)
            other, drafted = other + (want.ids != got.ids), drafted + got.drafted
        title = f"{name}, temperature {temperature:g}"
        figures.append(Figure(f"{title}: answers that differ with drafts", other, f"of {prompts}", None, "lower"))
        figures.append(Figure(f"{title}: ids drafted", drafted, "", None, "higher"))
    return figures


@click.command()
@click.option("--prompts", default=60, show_default=True, help="Of each model at each temperature.")
@click.option("--device", default="", help="The GPU in words, where there is one.")
def main(prompts: int, device: str) -> None:
    """Measure and write bench/results/near_ties.json."""
    mx.random.seed(0)
    figures = []
    for name in MODELS:
        figures += measure(name, prompts)
        click.echo(f"{name} done", err=True)
    write("near_ties", figures, device=device)


if __name__ == "__main__":
    main()
