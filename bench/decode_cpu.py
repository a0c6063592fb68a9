"""Decode on the CPU: our loop over SmolLM2-135M's real weights, interleaved with mlx-lm's generate_step.

The lane is the packed one in the tail form, as a worker on the CPU runs it. Contexts lie in both caches already.
Greedy; medians of interleaved rounds; the ids of both must be equal behind a real prompt. Beside it the time from
the start of a process to a worker that could tell READY.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import mlx.core as mx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rig
from mlx_lm.generate import generate_step
from report import Figure, write

from mtplx.settings import Settings
from worker.engine.build import Options, build
from worker.engine.engine import EngineRequest, unheard
from worker.engine.load import LoadedModel, load, resolve_model
from worker.engine.sample import Sampling
from worker.engine.serial import SerialEngine

GOALS = {64: 0.98, 1024: 0.9}
IDS = 48
READY_S = 10.0
ROOT = Path(__file__).resolve().parents[1]
START = "from mtplx.settings import Settings; from worker.runtime import start; start(Settings.load({}))"


def ready(rounds: int) -> float:
    """Seconds from the start of a process to a worker with a warm model, the median of *rounds*."""
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", START], cwd=ROOT, check=True)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def same_ids(loaded: LoadedModel, engine: SerialEngine) -> int:
    """Of `IDS` greedy ids behind a real prompt, how many equal mlx-lm's."""
    prompt = loaded.tokenizer.encode("Explain why the sky is blue in three sentences.")
    want = [token for token, _ in generate_step(mx.array(prompt), loaded.model, max_tokens=IDS)]
    request = EngineRequest(prompt=tuple(prompt), sampling=Sampling(seed=0), max_tokens=IDS, cache=False)
    engine.start(request, unheard)
    got = [engine.step().token for _ in range(IDS)]
    engine.stop()
    return sum(one == other for one, other in zip(got, want, strict=True))


@click.command()
@click.option("--rounds", default=7, show_default=True)
@click.option("--tokens", default=24, show_default=True)
def main(rounds: int, tokens: int) -> None:
    """Measure decode on the CPU."""
    waited = ready(3)
    mx.set_default_device(mx.cpu)
    settings = Settings.load({})
    loaded = load(resolve_model("smollm2-135m", settings.cache_dir))
    engine, _ = build(loaded, Options())
    placed = SerialEngine(loaded, rig.Placed(engine.forward), engine.index)
    figures = [Figure("start to READY", waited, "s", READY_S, "lower")]
    figures.append(Figure("ids equal to mlx-lm's", same_ids(loaded, engine), f"of {IDS}", IDS, "higher"))
    for context, goal in GOALS.items():
        runs: dict[str, Callable[[], float]] = {
            "mlx-lm": partial(rig.decode_mlx, loaded.model, context, tokens, dtype=mx.float32),
            "ours": partial(rig.decode, placed, context, Sampling(seed=0), tokens),
        }
        times = rig.interleaved(runs, rounds)
        for kind, found in times.items():
            figures.append(Figure(f"context {context}: {kind}, median", found.median, "ms/token", None, "lower"))
            figures.append(Figure(f"context {context}: {kind}, minimum", found.least, "ms/token", None, "lower"))
        medians = times["mlx-lm"].median / times["ours"].median
        minima = times["mlx-lm"].least / times["ours"].least
        figures.append(Figure(f"context {context}: mlx-lm / ours, medians", medians, "x", goal, "higher"))
        figures.append(Figure(f"context {context}: mlx-lm / ours, minima", minima, "x", None, "higher"))
    write("decode_cpu", figures)


if __name__ == "__main__":
    main()
