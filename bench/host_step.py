"""What speculation costs the host in a step: steps of a tiny model, whose forwards are nearly nothing, on the CPU.

    python bench/host_step.py

Plain decode beside a job that may draft: one whose text offers nothing; one whose drafts are offered at each step
and left alone, for rows cost too much; and one that verifies right drafts of 3 and 7 nodes at each step. In a
round each way answers the same prompt once; ratios and differences are medians of those of neighbours. A step of
more rows computes more, too: its figure is a bound. What Python alone costs stands in the last table of
bench/ngram.py.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import mlx.core as mx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from engines import build  # noqa: E402 - the folders come first
from report import Figure, write  # noqa: E402
from speculating.oracle import EAGER, Oracle  # noqa: E402
from tiny_models import make_tiny  # noqa: E402

from worker.engine.engine import Engine, EngineRequest, unheard  # noqa: E402
from worker.engine.load import load  # noqa: E402
from worker.engine.sample import Sampling  # noqa: E402
from worker.engine.serial import SerialEngine  # noqa: E402
from worker.speculation.costs import Costs, Measured  # noqa: E402
from worker.speculation.draft import Drafter  # noqa: E402
from worker.speculation.executor import Parts, SpeculatingEngine  # noqa: E402
from worker.speculation.ngram import Ngram  # noqa: E402

PROMPT = tuple(place * 7 % 250 for place in range(48))
TOKENS, SKIP = 144, 8
PLAIN, QUIET, LEFT = "plain", "nothing is offered", "drafts are left alone"
GOAL = 1.03
# No draft pays, whatever this machine's clock says of a step.
DEAR = Costs((1, 16), (0,), ((1.0, 128.0),), 16.0)


def wide(serial: SerialEngine, drafter: Drafter, costs: Costs, width: int) -> SpeculatingEngine:
    """A job of at most *width* rows a forward."""
    parts = Parts(drafter=drafter, measured=Measured(costs), trees=False, clock=time.perf_counter)
    return SpeculatingEngine(width, serial, parts)


def answered(engine: Engine) -> tuple[list[int], float, dict[int, int]]:
    """The ids of one answer, microseconds of a forward behind the first few ids, and forwards by rows."""
    request = EngineRequest(
        prompt=PROMPT, sampling=Sampling(seed=4, temperature=1.0), max_tokens=TOKENS, cache=False
    )
    engine.start(request, unheard)
    ids = [engine.step().token for _ in range(SKIP)]
    began = time.perf_counter()
    ids += [engine.step().token for _ in range(TOKENS - SKIP)]
    took = (time.perf_counter() - began) * 1e6
    widths = engine.stop().widths
    return ids, took * TOKENS / (TOKENS - SKIP) / sum(widths.values()), widths


def ways(serial: SerialEngine, ids: Sequence[int], vocabulary: int) -> dict[str, Any]:
    """What is compared, by name."""
    oracle = Oracle((*PROMPT, *ids), vocabulary, 0.0)
    return {
        PLAIN: serial,
        QUIET: wide(serial, Ngram(), DEAR, 16),
        LEFT: wide(serial, oracle, DEAR, 16),
        **{f"{nodes} nodes": wide(serial, oracle, EAGER, nodes + 1) for nodes in (3, 7)},
    }


@click.command()
@click.option("--rounds", default=25, show_default=True)
def main(rounds: int) -> None:
    """Measure what a step costs the host."""
    mx.set_default_device(mx.cpu)
    with tempfile.TemporaryDirectory() as folder:
        loaded = load(make_tiny("llama", Path(folder)))
    serial = build(loaded).engine
    assert isinstance(serial, SerialEngine)
    want, _, _ = answered(serial)
    engines = ways(serial, want, loaded.vocabulary)
    found: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(rounds):
        for name in list(engines) if turn % 2 else reversed(engines):
            ids, took, widths = answered(engines[name])
            assert ids == want, "one seed, one text"
            assert (max(widths) == 1) is (name in (PLAIN, QUIET, LEFT)), "a way does what its name says"
            found[name].append(took)
    figures = [Figure("a plain step", statistics.median(found[PLAIN]), "us", None, "lower")]
    for name in (QUIET, LEFT):
        ratio = statistics.median(one / two for one, two in zip(found[name], found[PLAIN], strict=True))
        figures.append(Figure(f"a step where {name} / a plain step", ratio, "x", GOAL, "lower"))
    for name in list(engines)[3:]:
        more = statistics.median(one - two for one, two in zip(found[name], found[PLAIN], strict=True))
        figures.append(Figure(f"a step that verifies {name}, over a plain step", more, "us", None, "lower"))
    write("host_step", figures)


if __name__ == "__main__":
    main()
