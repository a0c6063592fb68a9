"""How often a drafted token is kept, by the rule that decides it: SmolLM2-135M's real weights, teacher-forced.

    python bench/acceptance.py

The drafters are the model's own first layers under its own head: near it and far from it. For each position of
four kinds of text p is the model's law and q the drafter's, both at a temperature; bench/rules.py has the chance
of each rule. All laws of a text come of one forward.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import numpy as np
from report import Figure, write
from rules import RULES, Law, kept

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from speculating.texts import texts  # noqa: E402 - the folders come first

from mtplx.settings import Settings  # noqa: E402
from worker.engine.load import load, resolve_model  # noqa: E402

LAYERS = (6, 15, 24, 28)
TEMPERATURES = (0.7, 1.0)
WHOLE = "all layers"
Logits = np.ndarray[Any, np.dtype[np.float32]]


def laws(model: Any, ids: tuple[int, ...], start: int) -> dict[str, Logits]:
    """Logits [n, V] of the positions whose ids are *ids* from *start* on, of the model and of its first layers.

    The head, which is the embedding, reads those positions alone.
    """
    inner = model.model
    x = inner.embed_tokens(mx.array([ids[:-1]]))
    found = {}
    for count, layer in enumerate(inner.layers, start=1):
        x = layer(x, "causal")
        if count in LAYERS:
            found[f"first {count} of {len(inner.layers)} layers"] = _read(inner, x[0, start - 1 :])
    found[WHOLE] = _read(inner, x[0, start - 1 :])
    return found


def _read(inner: Any, x: mx.array) -> Logits:
    return np.array(inner.embed_tokens.as_linear(inner.norm(x)))


def softmax(logits: np.ndarray[Any, Any], temperature: float) -> Law:
    """The law at *temperature*."""
    scaled = logits.astype(np.float64) / temperature
    powers = np.exp(scaled - scaled.max())
    law: Law = powers / powers.sum()
    return law


@click.command()
@click.option("--positions", default=200, show_default=True, help="Of each text, at most.")
def main(positions: int) -> None:
    """Measure acceptance."""
    mx.set_default_device(mx.cpu)
    model: Any = load(resolve_model("smollm2-135m", Settings.load({}).cache_dir)).model
    # The same weights, without the roundings of 16 bits.
    model.set_dtype(mx.float32)
    asked = [((*text.prompt, *text.answer[:positions]), len(text.prompt)) for text in texts()]
    found = [laws(model, *one) for one in asked]
    figures = []
    for drafter in [name for name in found[0] if name != WHOLE]:
        for temperature in TEMPERATURES:
            rows = [
                kept(softmax(target, temperature), softmax(draft, temperature))
                for of in found
                for target, draft in zip(of[WHOLE], of[drafter], strict=True)
            ]
            for rule, mean in zip(RULES, np.mean(rows, axis=0), strict=True):
                title = f"{drafter}, temperature {temperature}: {rule}"
                figures.append(Figure(title, float(mean), f"of {len(rows)} drafts kept", None, "higher"))
    write("acceptance", figures)


if __name__ == "__main__":
    main()
