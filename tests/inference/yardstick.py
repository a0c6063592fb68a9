"""What an answer must be: that of mlx-lm's own loop, on prompts where no draw hangs by a hair.

Two right engines add float32 numbers in different order. Where the best two candidates of a draw are closer than
that, either is right; such prompts are drawn anew, so that every answer here has one right text on every machine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.generate import generate_step

from worker.engine.engine import EngineRequest
from worker.engine.load import LoadedModel
from worker.engine.sample import KeyedSampler, RawLogits, Sampling, gumbel, key, penalties

# In nats; rounding moves logits of a tiny model by some 1e-5.
LEAST_GAP = 1e-3
GREEDY = Sampling(seed=0)


class _Watched(KeyedSampler):
    """Keeps, for every draw, the best two scores of those that the draw chooses from."""

    def __init__(self, sampling: Sampling, start: int) -> None:
        super().__init__(sampling, start)
        self.best: list[mx.array] = []

    def __call__(self, logprobs: mx.array) -> mx.array:
        scores, temperature = logprobs, self._sampling.temperature
        if temperature:
            noise = gumbel(key(self._sampling.seed, self.position), logprobs.shape[-1])
            scores = self._filtered(logprobs) / temperature + noise
        self.best.append(mx.topk(scores, 2))
        return super().__call__(logprobs)


@dataclass(frozen=True)
class Case:
    """A request, and the one right answer to it."""

    request: EngineRequest
    ids: list[int]


def mlx_lm_answer(loaded: LoadedModel, request: EngineRequest) -> tuple[list[int], float]:
    """The ids by `generate_step`, and the smallest gap between the best two candidates of a draw."""
    sampler = _Watched(request.sampling, start=len(request.prompt))
    first = RawLogits(loaded.vocabulary, loaded.width, 0)
    drawn = generate_step(
        mx.array(request.prompt, dtype=mx.uint32),
        loaded.model,
        max_tokens=request.max_tokens,
        sampler=sampler,
        logits_processors=[first, *penalties(request.sampling)],
    )
    ids = [token for token, _ in drawn]
    best = mx.concatenate(sampler.best[: len(ids)])
    return ids, mx.min(mx.abs(best[:, 1] - best[:, 0])).item()


def case(loaded: LoadedModel, length: int, tokens: int, seed: int, sampling: Sampling = GREEDY) -> Case:
    """A random prompt of *length* ids whose answer has *tokens*."""
    draw = random.Random(f"{seed} {length} {tokens}")
    for _ in range(50):
        prompt = tuple(draw.randrange(loaded.vocabulary) for _ in range(length))
        request = EngineRequest(prompt=prompt, sampling=sampling, max_tokens=tokens)
        ids, gap = mlx_lm_answer(loaded, request)
        if gap >= LEAST_GAP:
            return Case(request, ids)
    raise AssertionError("this model has hardly a clear draw")
