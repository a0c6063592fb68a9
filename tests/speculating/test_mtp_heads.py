"""Heads of all families: what they compute is what their formulas say, primed, deep, and after a partial acceptance."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from speculating.mtp_checkpoints import FAMILIES, checkpoint

from worker.engine.load import load
from worker.engine.trunk import Trunk
from worker.speculation.mtp import weights as weights_module
from worker.speculation.mtp.head import Reading
from worker.speculation.mtp.weights import load_head


class Made:
    """A family's checkpoint, loaded, with a text and the states of its trunk."""

    def __init__(self, folder, name: str) -> None:
        self.formula, self.folder = FAMILIES[name].formula, folder
        self.config, self.raw = checkpoint(folder, name)
        self.loaded = load(folder)
        self.trunk = Trunk.of(self.loaded)
        luck = random.Random(3)
        self.ids = [luck.randrange(4, 200) for _ in range(16)]
        tap = self.trunk.tap()
        self.loaded.model(mx.array([self.ids]))
        self.states = tap.states()
        mx.eval(self.states)

    def head(self):
        return load_head(self.folder, self.loaded, self.trunk, None)

    def read(self, reading: Reading, first: int, end: int, *, normed: bool) -> None:
        hidden = self.states[first:end]
        reading.read(mx.array(self.ids[first + 1 : end + 1]), self.trunk.normed(hidden) if normed else hidden)

    def expected(self, end: int, drafted: list[int]) -> list[np.ndarray]:
        states = np.array(self.states[:end]).astype(np.float64)
        return self.formula.logits(self.raw, self.config, self.ids[1 : end + 1], states, drafted)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return cache(lambda name: Made(tmp_path_factory.mktemp("head"), name))


def drafts(reading: Reading, count: int) -> tuple[list[np.ndarray], list[int]]:
    """The logits of each depth, and the ids drawn from them."""
    seen = []

    def choose(logits: mx.array) -> mx.array:
        seen.append(np.array(logits[0]).astype(np.float64))
        return mx.argmax(logits, axis=-1).astype(mx.uint32)

    tokens = reading.draft(count, choose)
    return seen, [int(token.item()) for token in tokens]


def error(found: list[np.ndarray], wanted: list[np.ndarray]) -> list[float]:
    return [float(np.abs(f - w).max() / np.abs(w).max()) for f, w in zip(found, wanted, strict=True)]


def run(made: Made, head, *, normed: bool | None = None) -> list[float]:
    """Errors by depth of drafts behind a primed text, behind one more pair, and after partial acceptances."""
    normed = head.takes_normed if normed is None else normed
    reading, errors = Reading(head, made.trunk), []
    # Several pairs; one; then as many as hold of the four rows of a verify.
    for first, end in ((0, 6), (6, 7), (7, 9), (9, 10), (10, 14)):
        made.read(reading, first, end, normed=normed)
        found, ids = drafts(reading, 4)
        errors += error(found, made.expected(end, ids[:3]))
    # Drafting twice behind one pair is drafting it anew.
    again, same = drafts(reading, 4)
    assert same == ids
    assert [np.array_equal(one, other) for one, other in zip(found, again, strict=True)] == [True] * 4
    mx.eval(reading.arrays)
    return errors


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_formula_at_every_depth(made, name: str) -> None:
    errors = run(made(name), made(name).head())
    assert max(errors) < 1e-5, errors


@pytest.mark.parametrize("name", FAMILIES)
def test_the_halves_of_the_projection_swapped_change_the_logits(made, name: str) -> None:
    head = made(name).head()
    for one in head.steps:
        one.wiring = replace(one.wiring, embedding_first=not one.wiring.embedding_first)
    assert min(run(made(name), head)) > 1e-2


@pytest.mark.parametrize("name", FAMILIES)
def test_the_other_hidden_state_changes_the_logits(made, name: str) -> None:
    head = made(name).head()
    assert min(run(made(name), head, normed=not head.takes_normed)) > 1e-2


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].formula.shift])
def test_norms_that_are_not_shifted_change_the_logits(made, name: str, monkeypatch) -> None:
    monkeypatch.setattr(weights_module, "_is_centred", lambda *_: False)
    assert min(run(made(name), made(name).head())) > 1e-2


@pytest.mark.parametrize("name", FAMILIES)
def test_what_deeper_steps_take_is_what_the_family_passes_on(made, name: str) -> None:
    head = made(name).head()
    if not head.wiring.ends_normed:
        return
    for one in head.steps:
        one.wiring = replace(one.wiring, passes_normed=not one.wiring.passes_normed)
    errors = np.array(run(made(name), head)).reshape(-1, 4)
    assert errors[:, 0].max() < 1e-5
    assert errors[:, 1:].min() > 1e-3


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].formula.zeroes])
def test_where_a_reading_begins_inside_a_text_no_embedding_is_hidden(made, name: str) -> None:
    one, head = made(name), made(name).head()
    reading = Reading(head, one.trunk, from_start=False)
    one.read(reading, 0, 6, normed=True)
    found, ids = drafts(reading, 3)
    formula = replace(one.formula, zeroes=False)
    states = np.array(one.states[:6]).astype(np.float64)
    wanted = formula.logits(one.raw, one.config, one.ids[1:7], states, ids[:2])
    assert max(error(found, wanted)) < 1e-5
    assert min(error(found, one.expected(6, ids[:2]))) > 1e-3
