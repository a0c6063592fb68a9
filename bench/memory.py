"""Does memory stay flat? Jobs of different lengths one after the other on a tiny model, bytes after each of them.

Counted is what MLX holds, in arrays and in its cache of freed buffers. The slope is that of the best straight line
through the jobs behind the warm-up.
"""

from __future__ import annotations

import os
import random
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click
import mlx.core as mx
import numpy as np
from report import Figure, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from engines import answer, build
from tiny_models import make_tiny

from worker.engine.engine import EngineRequest
from worker.engine.load import LoadedModel, load
from worker.engine.sample import Sampling

LONGEST_PROMPT, LONGEST_ANSWER = 600, 48
# Bytes a job that count as flat: arrays are exact, freed buffers have many sizes and come and go.
FLAT_ARRAYS, FLAT_ALL = 1.0, 1000.0


@dataclass(frozen=True)
class Reading:
    """Bytes after a job: of live arrays, and of freed buffers that MLX keeps."""

    active: int
    cached: int


def request(draw: random.Random, loaded: LoadedModel, past: list[tuple[int, ...]]) -> EngineRequest:
    """New prompts and such as begin like an earlier one; greedy, filtered and penalized draws."""
    begin = draw.choice(past)[: draw.randint(1, LONGEST_PROMPT // 2)] if past and draw.random() < 0.4 else ()
    length = draw.choice((draw.randint(1, 64), draw.randint(1, LONGEST_PROMPT)))
    prompt = (*begin, *(draw.randrange(loaded.vocabulary) for _ in range(length)))[:LONGEST_PROMPT]
    past[-20:] = [*past[-19:], prompt]
    sampling = draw.choice(
        (
            Sampling(seed=0),
            Sampling(seed=draw.randrange(2**64), temperature=0.8, top_p=0.95),
            Sampling(seed=1, temperature=0.7, repetition_penalty=1.1, penalty_window=draw.choice((0, 20))),
        )
    )
    return EngineRequest(prompt=prompt, sampling=sampling, max_tokens=draw.randint(1, LONGEST_ANSWER))


def readings(loaded: LoadedModel, jobs: int, form: str) -> list[Reading]:
    """Run the jobs; every tenth one is cancelled."""
    engine = build(loaded, form=form).engine
    engine.warm_up()
    draw, past, found = random.Random(1), [], []
    for number in range(jobs):
        cut = draw.randint(0, 5) if number % 10 == 9 else None
        answer(engine, request(draw, loaded, past), tokens=cut)
        # What was in flight when the job ended is dropped.
        mx.synchronize()
        found.append(Reading(mx.get_active_memory(), mx.get_cache_memory()))
    return found


def slope(values: list[int]) -> float:
    """Bytes a job."""
    return float(np.polyfit(np.arange(len(values)), np.array(values, dtype=np.float64), 1)[0])


def peak_resident() -> int:
    """Bytes of the process at its largest."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@click.command()
@click.option("--jobs", default=500, show_default=True)
@click.option("--warm-up", default=100, show_default=True, help="Jobs at the beginning that may fill caches.")
@click.option("--model", default="llama", show_default=True, help="One of the tests' tiny models.")
@click.option("--form", default="tail", show_default=True, type=click.Choice(["tail", "in place"]))
def main(jobs: int, warm_up: int, model: str, form: str) -> None:
    """Measure and write bench/results/memory.json."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = load(make_tiny(model, Path(folder)))
    began = time.perf_counter()
    found = readings(loaded, jobs, form)
    first, later = found[:warm_up], found[warm_up:]
    both = [one.active + one.cached for one in later]
    most = max(one.active + one.cached for one in first)
    figures = [
        Figure("arrays: slope", slope([one.active for one in later]), "bytes a job", FLAT_ARRAYS, "lower"),
        Figure("arrays and freed buffers: slope", slope(both), "bytes a job", FLAT_ALL, "lower"),
        Figure("most after the warm-up / most in it", max(both) / most, "ratio", None, "lower"),
        Figure("arrays after the last job", found[-1].active, "bytes", None, "lower"),
        Figure("freed buffers after the last job", found[-1].cached, "bytes", None, "lower"),
        Figure("process at its largest", peak_resident(), "bytes", None, "lower"),
        Figure("jobs", jobs / (time.perf_counter() - began), "a second", None, "higher"),
    ]
    write("memory", figures)


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parents[1])
    main()
