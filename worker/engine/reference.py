"""The reference lane: mlx-lm's own `generate_step`, one row, one token ahead of what was asked for."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, cast

import mlx.core as mx
from mlx_lm.generate import generate_step

from mtplx.job import MAX_INT
from worker.engine.engine import (
    ROUTE,
    EngineRequest,
    Figures,
    NumericError,
    PrefillProgress,
    Step,
    likeliest_first,
    unheard,
)
from worker.engine.load import LoadedModel
from worker.engine.sample import KeyedSampler, RawLogits, Sampling, penalties

DEFAULT_PREFILL_CHUNK: Final = 512


class ReferenceEngine:
    """The `Engine` over mlx-lm's loop at batch size 1.

    While the caller handles a token, the device already computes the next; one forward is dropped at the end.
    mlx-lm's caches grow as they need: the model's context alone limits a request.
    """

    capacity = MAX_INT

    def __init__(self, loaded: LoadedModel, prefill_chunk: int = DEFAULT_PREFILL_CHUNK) -> None:
        self._loaded = loaded
        self._prefill_chunk = prefill_chunk
        self._tokens: Iterator[tuple[int, mx.array]] | None = None
        self._watch: _Watch | None = None
        self._first: int | None = None
        self._steps = 0

    def warm_up(self) -> None:
        """Run a greedy and a filtered draw on a few ids, so that no job waits for a kernel to be compiled."""
        filtered = Sampling(
            seed=0, temperature=1.0, top_p=0.5, top_k=2, min_p=0.1, repetition_penalty=1.1, logprobs=1
        )
        for sampling in (Sampling(seed=0), filtered):
            self.start(EngineRequest(prompt=(0, 0, 0), sampling=sampling, max_tokens=2), unheard)
            # Straight from the loop: a model whose first numbers are bad must fail in a job, where it is told.
            for _ in self._tokens or ():
                pass
            self.stop()

    def start(self, request: EngineRequest, progress: PrefillProgress) -> None:
        """As in `Engine`."""
        self.stop()
        ids = (*request.prompt, *request.drawn)
        sampling, loaded = request.sampling, self._loaded
        first = []
        if loaded.width > loaded.vocabulary or loaded.dtype != "float32" or sampling.logprobs:
            first = [RawLogits(loaded.vocabulary, loaded.width, sampling.logprobs)]
        self._watch = _Watch(KeyedSampler(sampling, start=len(ids)), first[0] if first else None)
        self._tokens = generate_step(
            mx.array(ids, dtype=mx.uint32),
            loaded.model,
            max_tokens=request.max_tokens,
            sampler=self._watch,
            logits_processors=[*first, *penalties(sampling)],
            prefill_step_size=self._prefill_chunk,
            prompt_progress_callback=progress,
        )
        self._first = next(self._tokens)[0]

    def step(self) -> Step:
        """As in `Engine`."""
        if self._tokens is None or self._watch is None:
            raise RuntimeError("step() without a started request")
        if self._first is None:
            token = next(self._tokens)[0]
        else:
            token, self._first = self._first, None
        self._steps += 1
        return self._watch.read(token)

    def stop(self) -> Figures:
        """As in `Engine`."""
        widths = {1: self._steps} if self._steps else {}
        figures = Figures(route=ROUTE, row_invariant=False, verify_forwards=self._steps, widths=widths)
        self._tokens = self._watch = self._first = None
        self._steps = 0
        return figures

    def counts(self) -> None:
        """As in `Engine`: nothing is reused."""


class _Watch:
    """A sampler that also has the numbers beside each token computed in the token's own evaluation.

    Asked for afterwards they would wait for the forward that already runs ahead.
    """

    def __init__(self, sampler: KeyedSampler, raw: RawLogits | None) -> None:
        self._sampler = sampler
        self._raw = raw
        self._beside: deque[list[mx.array]] = deque()

    def __call__(self, logprobs: mx.array) -> mx.array:
        token = self._sampler(logprobs)
        beside = [mx.take_along_axis(logprobs, token[:, None], axis=-1)]
        if self._raw is not None and self._raw.top is not None:
            beside += self._raw.top
        self._beside.append(beside)
        drawn: mx.array = mx.depends([token], beside)[0]
        return drawn

    def read(self, token: int) -> Step:
        """The step of *token*, the oldest one not yet read."""
        drawn, *top = self._beside.popleft()
        if not math.isfinite(cast("float", drawn.item())):
            raise NumericError("the model produced NaN or infinite logits")
        if not top:
            return Step(token)
        ids, values = (cast("list[Any]", part[0].tolist()) for part in top)
        return Step(token, likeliest_first(ids, values))
