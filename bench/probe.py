"""`mtplx probe` on the models of the benches, whose random weights are made where they run.

    python bench/probe.py [--models NAME,...] [--out FOLDER] [--kernels-only] [--cache FOLDER]

prints the table of kernels of each model and writes the report of each, NAME.json, to FOLDER. With --cache a
second run finds its kernels compiled.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import models

from worker.engine.load import LoadedModel
from worker.engine.probe import Wish, probe
from worker.probe import lines


def made(name: str) -> LoadedModel:
    """The model of that name; `tiny-` before it makes it small."""
    shape = models.SHAPES[name.removeprefix("tiny-")]
    shape = shape.tiny if name.startswith("tiny-") else shape
    return models.loaded(shape, models.make(shape))


def main() -> None:
    """Probe each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="smol-bf16,smol-4bit")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--kernels-only", action="store_true")
    parser.add_argument("--cache", type=Path, default=None, help="folder of compiled kernels; default, a new one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        for name in given.models.split(","):
            cache = given.cache or Path(place)
            wish = Wish(model=partial(made, name), cache_dir=cache, full=not given.kernels_only)
            report = probe(wish, lambda line: print(line, file=sys.stderr, flush=True))
            print("\n".join(lines(report)), flush=True)
            for part in ("in_place", "cost_ms", "row_invariance", "step"):
                if part in report:
                    print(part, json.dumps(report[part]), flush=True)
            (given.out / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")
            mx.clear_cache()


if __name__ == "__main__":
    main()
