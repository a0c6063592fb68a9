"""How often a drafted token is kept, by the rule that decides it: SmolLM2-135M's real weights, teacher-forced.

    python bench/acceptance.py

The drafters are the model's own first layers under its own head: near it and far from it. For each position of
four kinds of text p is the model's law and q the drafter's, both at a temperature. Rules: the ratio rule keeps a
draft of q with 1 - TV(p, q); shared noise keeps it where argmax(log p + G) is argmax(log q + G), which has the
probability sum over x of 1 / sum over y of max(p_y / p_x, q_y / q_x) (Daliri et al. 2408.07978); independent draws
with sum of p q; the drafter's likeliest token with p of it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import numpy as np
from report import Figure, write

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from speculating.texts import texts  # noqa: E402 - the folders come first

from mtplx.settings import Settings  # noqa: E402
from worker.engine.load import load, resolve_model  # noqa: E402

LAYERS = (6, 15, 24, 28)
TEMPERATURES = (0.7, 1.0)
# Ids beyond these, by what both laws give at least, are left out of the sum; what they could add is told.
LIKELIEST = 128
RULES = ("ratio rule", "shared noise", "independent draws", "likeliest token")


def laws(model: Any, ids: tuple[int, ...], start: int) -> dict[int, np.ndarray[Any, Any]]:
    """Logits float32 [n, V] of the positions whose ids are *ids* from *start* on, by the number of first layers.

    One forward serves the model and its drafters; the head, which is the embedding, reads those positions alone.
    """
    inner = model.model
    x = inner.embed_tokens(mx.array([ids[:-1]]))
    found = {}
    for count, layer in enumerate(inner.layers, start=1):
        x = layer(x, "causal")
        if count in (*LAYERS, len(inner.layers)):
            found[count] = np.array(inner.embed_tokens.as_linear(inner.norm(x[0, start - 1 :])))
    return found


def softmax(logits: np.ndarray[Any, Any], temperature: float) -> np.ndarray[Any, Any]:
    """The law at *temperature*, float64."""
    scaled = logits.astype(np.float64) / temperature
    powers = np.exp(scaled - scaled.max())
    return powers / powers.sum()


def kept(p: np.ndarray[Any, Any], q: np.ndarray[Any, Any]) -> tuple[float, float, float, float, float]:
    """The chance of each of `RULES`, and what is left out of shared noise at most."""
    both = np.minimum(p, q)
    likely = np.argpartition(-both, LIKELIEST)[:LIKELIEST]
    shared = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in likely if both[x] > 0)
    ratio = float(both.sum())
    return ratio, float(shared), float(p @ q), float(p[q.argmax()]), ratio - float(both[likely].sum())


@click.command()
@click.option("--positions", default=120, show_default=True, help="Of each text, at most.")
def main(positions: int) -> None:
    """Measure acceptance."""
    mx.set_default_device(mx.cpu)
    loaded = load(resolve_model("smollm2-135m", Settings.load({}).cache_dir))
    # The same weights, without the roundings of 16 bits.
    loaded.model.set_dtype(mx.float32)
    found: dict[tuple[int, float], list[tuple[float, ...]]] = {}
    for text in texts():
        ids = (*text.prompt, *text.answer[:positions])
        of = laws(loaded.model, ids, len(text.prompt))
        target = of[len(loaded.model.layers)]
        for layers in LAYERS:
            for temperature in TEMPERATURES:
                found.setdefault((layers, temperature), []).extend(
                    kept(softmax(one, temperature), softmax(other, temperature))
                    for one, other in zip(target, of[layers], strict=True)
                )
        click.echo(f"{text.kind}: {len(target)} positions", err=True)
    figures = []
    for (layers, temperature), rows in found.items():
        means = np.mean(rows, axis=0)
        title = f"first {layers} of {len(loaded.model.layers)} layers, temperature {temperature}"
        for rule, mean in zip(RULES, means, strict=False):
            figures.append(Figure(f"{title}: {rule}", float(mean), "of drafts kept", None, "higher"))
        figures.append(Figure(f"{title}: left out of shared noise at most", float(means[-1]), "", None, "lower"))
    write("acceptance", figures)


if __name__ == "__main__":
    main()
