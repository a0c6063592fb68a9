"""Tiny models with a law for every context; the law of their answers by enumeration; answers drawn with drafts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import mlx.core as mx
import numpy as np
from eager_rule import by_the_law

from worker.engine.draw import Draws, place
from worker.engine.sample import Sampling, gumbel, key

Ids = tuple[int, ...]
# What is drafted after the ids so far, at most so deep: tokens and parents of rows 1, 2, ...
Drafting = Callable[[Ids, int], tuple[list[int], list[int]]]


class Model(Protocol):
    """Logits float32 [width] of the id after any ids; rows from *vocabulary* on are padding."""

    vocabulary: int
    width: int

    def logits(self, ids: Ids) -> np.ndarray: ...


@dataclass(frozen=True)
class MadeUp:
    """Logits that depend on all ids before, with many ids that cannot follow."""

    vocabulary: int
    seed: int
    padding: int = 0
    known: dict[Ids, np.ndarray] = field(default_factory=dict)

    @property
    def width(self) -> int:
        return self.vocabulary + self.padding

    def logits(self, ids: Ids) -> np.ndarray:
        if ids not in self.known:
            rng = np.random.default_rng([self.seed, *ids])
            row = rng.normal(size=self.width)
            row[rng.permutation(self.vocabulary)[: rng.integers(0, self.vocabulary - 1)]] = -math.inf
            self.known[ids] = row.astype(np.float32)
        return self.known[ids]


def plain(model: Model, prompt: Ids, sampling: Sampling, count: int) -> Ids:
    """The answer of *count* ids, drawn one by one by the eager rule."""
    ids = prompt
    for _ in range(count):
        ids = (*ids, by_the_law(mx.array(model.logits(ids))[None], ids, sampling, model.vocabulary))
    return ids[len(prompt) :]


def speculated(model: Model, prompt: Ids, sampling: Sampling, count: int, drafting: Drafting) -> Ids:
    """The answer of *count* ids, drawn over drafts."""
    return all_together([answering(model, prompt, sampling, count, drafting)])[0]


def answering(
    model: Model, prompt: Ids, sampling: Sampling, count: int, drafting: Drafting, compiled: bool = False
) -> Generator[mx.array, None, Ids]:
    """Draws an answer over drafts; hands out each path before it is read."""
    draws = Draws(sampling, prompt, width=model.width, vocabulary=model.vocabulary, compiled=compiled)
    ids, end = prompt, len(prompt) + count
    while len(ids) < end:
        tokens, parents = drafting(ids, end - len(ids) - 1)
        # As the forwards are compiled: 2, 4, 8 or 16 rows. One row is not drawn by itself here.
        size = max(2, 1 << len(tokens).bit_length())
        paths: list[Ids] = [()]
        for row, parent in enumerate(parents, start=1):
            paths.append((*paths[parent], row))
        contexts = [(*ids, *(tokens[row - 1] for row in path)) for path in paths]
        logits = [model.logits(context) for context in contexts]
        padding = size - len(logits)
        rows = mx.array(np.stack([*logits, *logits[:1] * padding]))
        fed = mx.array([ids[-1], *tokens, *[0] * padding], dtype=mx.uint32)
        drawn = draws.rows(rows, fed, place(len(ids)), parents)
        yield drawn.path
        last, *read = drawn.path.tolist()
        assert last < len(paths), "padding was accepted"
        draws.accept((0, *paths[last]))
        ids = (*contexts[last], read[last])
    return ids[len(prompt) :]


def all_together(answers: Sequence[Generator[mx.array, None, Ids]]) -> list[Ids]:
    """The ids of *answers*, of which every step is computed at once."""
    done: dict[int, Ids] = {}
    while len(done) < len(answers):
        waiting = []
        for i, one in enumerate(answers):
            if i not in done:
                try:
                    waiting.append(next(one))
                except StopIteration as end:
                    done[i] = end.value
        mx.eval(waiting)
    return [done[i] for i in range(len(answers))]


def random_trees(vocabulary: int, seed: int, ids: Ids, depth: int) -> tuple[list[int], list[int]]:
    """A tree of up to 15 nodes that knows nothing of the model."""
    rng = np.random.default_rng([seed, *ids, 1])
    tokens, parents, depths = [], [], [0]
    for _ in range(rng.integers(0, 16)):
        parent = int(rng.integers(0, len(depths)))
        taken = {token for token, other in zip(tokens, parents, strict=True) if other == parent}
        if depths[parent] < depth and len(taken) < vocabulary:
            tokens.append(int(rng.choice([id_ for id_ in range(vocabulary) if id_ not in taken])))
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return tokens, parents


def chains_of_the_newest(ids: Ids, depth: int) -> tuple[list[int], list[int]]:
    """The last ids once more, as lookup in the prompt would have it."""
    tokens = list(ids[-3:])[:depth]
    return tokens, list(range(len(tokens)))


def shared_noise(model: Model, sampling: Sampling, ids: Ids, depth: int) -> tuple[list[int], list[int]]:
    """Two branches by a law near the model's, with the noise of the target: the best, and its runner-up."""
    rng = np.random.default_rng([sampling.seed % 2**32, *ids, 2])
    tokens: list[int] = []
    parents: list[int] = []
    for first in range(2) if depth else ():
        context, parent = ids, 0
        for step in range(min(depth, 4)):
            row = model.logits(context)[: model.vocabulary] + rng.normal(size=model.vocabulary) * 0.3
            if sampling.temperature:
                noise = np.array(gumbel(key(sampling.seed, len(context)), model.width))[: model.vocabulary]
                row = row / sampling.temperature + noise
            best = int(np.argsort(-row, kind="stable")[first if step == 0 else 0])
            if parent == 0 and best in tokens[:1]:
                break
            tokens.append(best)
            parents.append(parent)
            parent, context = len(tokens), (*context, best)
    return tokens, parents


def all_draftings(model: Model, sampling: Sampling) -> dict[str, Drafting]:
    return {
        "random trees": partial(random_trees, model.vocabulary, sampling.seed % 2**32),
        "chains": chains_of_the_newest,
        "shared noise": partial(shared_noise, model, sampling),
    }


def law_after(model: Model, ids: Ids, sampling: Sampling) -> np.ndarray:
    """The probabilities float64 [vocabulary] of the id after *ids*, from the description of the law alone."""
    scores = model.logits(ids)[: model.vocabulary].astype(np.float64)
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    counts = np.bincount(ids[-sampling.penalty_window :], minlength=model.vocabulary)
    repeated = np.where(scores < 0, scores * sampling.repetition_penalty, scores / sampling.repetition_penalty)
    scores = np.where(counts > 0, repeated - sampling.presence_penalty, scores)
    scores -= counts * sampling.frequency_penalty
    if sampling.temperature == 0:
        return np.eye(model.vocabulary)[int(np.argmax(scores))]
    likely = np.exp(scores - scores.max())
    likely /= likely.sum()
    order = np.argsort(-likely, kind="stable")
    above = np.concatenate([[0.0], np.cumsum(likely[order])[:-1]])
    kept = np.zeros(model.vocabulary, dtype=bool)
    kept[order[above < sampling.top_p]] = True
    kept &= likely >= sampling.min_p * likely.max()
    if 0 < sampling.top_k < model.vocabulary:
        kept[order[sampling.top_k :]] = False
    tempered = np.where(kept, likely, 0.0) ** (1 / sampling.temperature)
    return tempered / tempered.sum()


def law_of_answers(model: Model, prompt: Ids, sampling: Sampling, count: int) -> Iterator[tuple[Ids, float]]:
    """Every answer of *count* ids that the model can give, and its probability."""
    if count == 0:
        yield (), 1.0
        return
    for token, likely in enumerate(law_after(model, prompt, sampling)):
        if likely > 0:
            for rest, further in law_of_answers(model, (*prompt, token), sampling, count - 1):
                yield (token, *rest), float(likely) * further


def check_paths(model: Model, prompt: Ids, sampling: Sampling, seeds: Sequence[int], count: int = 5) -> None:
    """Drafted answers are the plain ones, for every seed and every way of drafting."""
    for seed in seeds:
        seeded = replace(sampling, seed=seed)
        wanted = plain(model, prompt, seeded, count)
        named = all_draftings(model, seeded)
        answers = all_together([answering(model, prompt, seeded, count, one) for one in named.values()])
        assert dict.fromkeys(named, wanted) == dict(zip(named, answers, strict=True)), seed


def check_counts(
    model: Model, prompt: Ids, sampling: Sampling, answers: int, count: int = 3, compiled: bool = False
) -> None:
    """Drafted answers of *answers* seeds come as often as the enumerated law says; chi-square at 1e-6."""
    got: Counter[Ids] = Counter()
    for first in range(0, answers, 250):
        running = []
        for seed in range(first, min(first + 250, answers)):
            seeded = replace(sampling, seed=seed)
            drafting = list(all_draftings(model, seeded).values())[seed % 3]
            running.append(answering(model, prompt, seeded, count, drafting, compiled))
        got.update(all_together(running))
    expected = {ids: likely * answers for ids, likely in law_of_answers(model, prompt, sampling, count)}
    assert math.isclose(sum(expected.values()), answers)
    assert set(got) <= set(expected), "an answer came that the law does not know"
    pairs = [(got[ids], often) for ids, often in expected.items() if often >= 5]
    rare = answers - sum(often for _, often in pairs)
    if rare >= 5:
        pairs.append((answers - sum(came for came, _ in pairs), rare))
    assert len(pairs) > 1, "too few answers to tell a law"
    statistic = sum((came - often) ** 2 / often for came, often in pairs)
    assert statistic < chi_square_limit(len(pairs) - 1)


def chi_square_limit(freedom: int) -> float:
    """What chi-square exceeds once in 1e6, by Wilson and Hilferty's approximation."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 4.7534 * math.sqrt(spread)) ** 3
