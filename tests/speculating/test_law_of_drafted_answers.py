"""Drafts cannot change an answer: pathwise against plain draws, by counts against the enumerated law, and what breaks it."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from speculating.tiny_laws import (
    MadeUp,
    all_draftings,
    check_counts,
    check_paths,
    chi_square_limit,
    law_after,
    speculated,
)
from tiny_models import bare

from worker.engine import draw as draw_module
from worker.engine import law as law_module
from worker.engine.draw_tree import Tree, tree_operand
from worker.engine.sample import Sampling

PROMPT = (1, 0, 2, 1, 1)
PENALISED = Sampling(
    seed=0, temperature=0.9, repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=0.7, penalty_window=20
)
FILTERED = Sampling(seed=0, temperature=1.0, top_p=0.8, min_p=0.05)
EVERYTHING = replace(PENALISED, top_p=0.9, min_p=0.02, top_k=3, logit_bias={0: 1.0, 2: -0.5}, penalty_window=3)
SAMPLINGS = {
    "greedy": Sampling(seed=0),
    "greedy, penalties": replace(PENALISED, temperature=0.0),
    "temperature": Sampling(seed=0, temperature=0.7),
    "top_p": Sampling(seed=0, temperature=1.0, top_p=0.8),
    "min_p": Sampling(seed=0, temperature=1.3, min_p=0.2),
    "top_k": Sampling(seed=0, temperature=1.0, top_k=2),
    "bias": Sampling(seed=0, temperature=1.0, logit_bias={0: 2.0, 1: -3.0}),
    "penalties over 20": PENALISED,
    "penalties over 1": replace(PENALISED, penalty_window=1),
    "penalties over all": replace(PENALISED, penalty_window=0),
    "all at once": EVERYTHING,
}
MODELS = {"V 3": MadeUp(3, 11), "V 5": MadeUp(5, 12), "V 8, padded": MadeUp(8, 13, padding=3)}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_drafted_answers_are_the_plain_ones_path_by_path(model, sampling):
    check_paths(model, PROMPT, sampling, [*range(4), 2**63 + 1, 2**64 - 1])


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "penalties over 20", "penalties over all", "all at once"]
)
def test_drafted_answers_come_as_often_as_the_enumerated_law_says(name):
    check_counts(MODELS["V 5"], PROMPT, SAMPLINGS[name], 400)


def test_the_drafts_of_these_tests_are_accepted_to_every_depth_and_on_both_branches(monkeypatch):
    accepted = []

    def noted(self, path, real=draw_module.Draws.accept):
        accepted.append((len(path) - 1, path[-1] == len(path) - 1))
        real(self, path)

    monkeypatch.setattr(draw_module.Draws, "accept", noted)
    for seed in range(30):
        sampling = Sampling(seed=seed, temperature=1.0)
        for drafting in all_draftings(MODELS["V 5"], sampling).values():
            speculated(MODELS["V 5"], PROMPT, sampling, 5, drafting)
    assert {depth for depth, _ in accepted} == {0, 1, 2, 3, 4}
    assert {depth for depth, prefix in accepted if not prefix} >= {1, 2, 3}


# Mutations: each is put in, and must be caught by the checks of the tests above.


def shifted_by(change, monkeypatch):
    def mutated(_cls, operand, real=Tree.of):
        tree = real(operand)
        return tree._replace(**change(tree))

    monkeypatch.setattr(Tree, "of", classmethod(mutated))


def row_numbers(tree):
    return mx.array([[0, row] for row in range(tree.parent.size)], dtype=mx.uint32)


def caught_by_paths(sampling, model=MODELS["V 5"]):
    with pytest.raises(AssertionError):
        check_paths(model, PROMPT, sampling, range(30))


def caught_by_counts(sampling):
    with pytest.raises(AssertionError):
        check_counts(MODELS["V 3"], PROMPT, sampling, 400)


def test_noise_of_the_row_in_the_place_of_its_position_is_caught(monkeypatch):
    shifted_by(lambda tree: {"offsets": row_numbers(tree)}, monkeypatch)
    caught_by_paths(Sampling(seed=0, temperature=1.0))


def test_noise_of_the_first_position_for_all_rows_is_caught(monkeypatch):
    shifted_by(lambda tree: {"offsets": mx.zeros_like(tree.offsets)}, monkeypatch)
    caught_by_paths(Sampling(seed=0, temperature=1.0))
    caught_by_counts(Sampling(seed=0, temperature=1.0))


def test_noise_drawn_over_a_sorted_vocabulary_is_caught(monkeypatch):
    def mutated(rows, given, noise):
        ranks = mx.argsort(mx.argsort(-rows, axis=-1), axis=-1)
        return rows / given.temperature + mx.take_along_axis(noise, ranks, axis=-1)

    monkeypatch.setattr(law_module, "_perturbed", mutated)
    caught_by_paths(Sampling(seed=0, temperature=1.0))


@pytest.mark.parametrize("window", [20, 0])
def test_a_penalty_history_without_the_prompt_is_caught(window, monkeypatch):
    real = draw_module.state
    monkeypatch.setattr(draw_module, "state", lambda kind, history: real(kind, history[-1:]))
    sampling = replace(PENALISED, penalty_window=window)
    caught_by_paths(sampling)
    caught_by_counts(sampling)


@pytest.mark.parametrize("window", [20, 0])
def test_a_penalty_history_of_rows_in_the_place_of_paths_is_caught(window, monkeypatch):
    def mutated(kind, held, tokens, tree, real=law_module._counts):
        return real(kind, held, tokens, Tree.of(tree_operand(window, tokens.size, range(tokens.size - 1))))

    monkeypatch.setattr(law_module, "_counts", mutated)
    caught_by_paths(replace(PENALISED, penalty_window=window))


@pytest.mark.parametrize("sampling", [FILTERED, SAMPLINGS["top_k"], SAMPLINGS["min_p"]])
def test_a_filter_on_the_law_of_the_draft_only_is_caught(sampling, monkeypatch):
    real = law_module._filtered
    monkeypatch.setattr(
        law_module, "_filtered", lambda kind, rows, given: rows if rows.ndim == 2 else real(kind, rows, given)
    )
    caught_by_paths(sampling)
    caught_by_counts(sampling)


def test_a_row_accepted_for_its_parent_alone_is_caught(monkeypatch):
    def mutated(tree, tokens, read):
        parent = tree.parent.squeeze(1)
        right = (tokens == read[parent]) | (mx.arange(tokens.size) == 0)
        return mx.argmax(tree.rank.squeeze(1) * right, axis=-1, keepdims=True)

    monkeypatch.setattr(law_module, "accepted", mutated)
    caught_by_paths(Sampling(seed=0, temperature=1.0))
    caught_by_counts(Sampling(seed=0, temperature=1.0))


def test_a_draft_kept_unseen_is_caught(monkeypatch):
    """The first child is always kept, whatever was drawn."""
    monkeypatch.setattr(law_module, "accepted", lambda tree, _tokens, _read: mx.minimum(tree.rank[1], 1))
    caught_by_paths(Sampling(seed=0, temperature=1.0))


class Trained:
    """A tiny Llama, its logits told apart by a factor: `bare` gives random weights, whose laws are flat."""

    vocabulary = width = 8

    def __init__(self):
        self._model = bare(vocab_size=8)
        self._known = {}

    def logits(self, ids):
        if ids not in self._known:
            row = self._model(mx.array([ids]))[0, -1].astype(mx.float32) * 4
            self._known[ids] = np.array(row)
        return self._known[ids]


REAL = {
    "temperature": Sampling(seed=0, temperature=0.8),
    "filters and penalties": replace(EVERYTHING, top_k=6),
}


@pytest.mark.parametrize("sampling", REAL.values(), ids=REAL)
def test_drafted_answers_of_a_real_model_have_its_law(sampling):
    check_counts(Trained(), PROMPT, sampling, 300, count=2)


@pytest.mark.prove
def test_two_hundred_thousand_drafted_draws_of_a_real_model_have_its_law():
    model = Trained()
    assert law_after(model, PROMPT, REAL["temperature"]).max() < 0.9
    check_counts(model, PROMPT, REAL["temperature"], 50_000, count=4, compiled=True)
    check_counts(model, PROMPT, REAL["filters and penalties"], 10_000, count=4, compiled=True)


def test_the_limit_of_chi_square_is_that_of_the_tables():
    assert [chi_square_limit(n) for n in (10, 100, 1000)] == pytest.approx([47.7, 180.8, 1229], rel=0.03)
