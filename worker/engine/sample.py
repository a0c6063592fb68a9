"""The law of a draw: one seed, one text.

The token at position t is `argmax(log p / T + G(seed, t))`, ties to the lower id. G is Gumbel noise that depends
on the seed and on t alone, t being the number of ids before the drawn one, prompt included. So the text does not
depend on what ran before, on how often a job was resumed, or on who computed the log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx

from worker.engine.filters import apply_top_k, apply_top_p, make_logits_processors

_MASK64: Final = 2**64 - 1
_MASK32: Final = 2**32 - 1

LEAST_TOP_P: Final = 1e-30
"""A smaller top_p is taken for this one, which keeps the likeliest id alone as well: rounded to 0, as float32 does
far below it and a GPU sooner, it would keep none, and mlx-lm's filter would read past the end."""

Processor = Callable[[mx.array, mx.array], mx.array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn; the fields mean what they mean in a job.

    `logprobs` is the number of raw log-probabilities wanted beside each token.
    """

    seed: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 20
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int = 0


def splitmix64(state: int) -> int:
    """The next output of SplitMix64 at *state*, an integer of 64 bits (Steele, Lea and Flood, 2014)."""
    z = (state + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def key(seed: int, t: int) -> mx.array:
    """The noise key of position *t*: uint32 [2], the halves of SplitMix64(seed), the high one XORed with t."""
    mixed = splitmix64(seed)
    return mx.array([mixed & _MASK32, (mixed >> 32) ^ t], dtype=mx.uint32)


def words(noise_key: mx.array, width: int) -> mx.array:
    """The random bits of *noise_key*, uint32 [width], indexed by token id.

    The first *width* words of `mx.random.split(noise_key, h)`, h = ceil(width / 2): MLX's threefry2x32, where the
    counters (i, i + h) give the words i and i + h.
    """
    bits: mx.array = mx.random.split(noise_key, (width + 1) // 2).reshape(-1)[:width]
    return bits


def gumbel_of(bits: mx.array) -> mx.array:
    """Gumbel noise of random *bits*: uint32 to float32 of the same shape.

    The uniform number keeps the upper 23 bits and sits in the middle of its interval: exact in float32, never 0
    and never 1.
    """
    uniform = ((bits >> 9).astype(mx.float32) + 0.5) * (2.0**-23)
    return -mx.log(-mx.log(uniform))


def gumbel(noise_key: mx.array, width: int) -> mx.array:
    """Gumbel noise of *noise_key*, float32 [width], indexed by token id."""
    return gumbel_of(words(noise_key, width))


class KeyedSampler:
    """A sampler for mlx-lm's `generate_step`: log-probabilities [1, V] in, token ids [1] out.

    It counts positions itself: the first call draws position *start* (the number of prompt ids), the next one
    start + 1. One object serves one answer.
    """

    def __init__(self, sampling: Sampling, start: int) -> None:
        self.position = start
        self._sampling = sampling
        # As an array, a top_p of its own does not make MLX compile the filter anew for every job.
        self._top_p = mx.array(max(sampling.top_p, LEAST_TOP_P), dtype=mx.float32)

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Draw the token of the current position and move on by one."""
        position, self.position = self.position, self.position + 1
        temperature = self._sampling.temperature
        if temperature == 0:
            return mx.argmax(logprobs, axis=-1)
        kept = self._filtered(logprobs.astype(mx.float32))
        noise = gumbel(key(self._sampling.seed, position), logprobs.shape[-1])
        return mx.argmax(kept / temperature + noise, axis=-1)

    def _filtered(self, logprobs: mx.array) -> mx.array:
        """Log-probabilities [1, V] with -inf where top_p, min_p and top_k, in this order, take a token out."""
        if self._sampling.top_p < 1:
            logprobs = apply_top_p(logprobs, self._top_p)
        if self._sampling.min_p > 0:
            # mlx-lm's apply_min_p in one line: its own is compiled anew, for a second, at each new value.
            least = mx.max(logprobs, axis=-1, keepdims=True) + math.log(self._sampling.min_p)
            logprobs = mx.where(logprobs < least, -math.inf, logprobs)
        if 0 < self._sampling.top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, self._sampling.top_k)
        return logprobs


class RawLogits:
    """The first logits processor: float32, and no token for rows that are padding.

    Where log-probabilities are wanted it also keeps, in `top`, the ids [1, n] and log-softmax values [1, n] of the
    n likeliest tokens of the latest call, before any penalty; they are part of the graph and not yet evaluated.
    """

    def __init__(self, vocabulary: int, width: int, top: int) -> None:
        self._padded = mx.arange(width) >= vocabulary if width > vocabulary else None
        self._wanted = min(top, vocabulary)
        self.top: tuple[mx.array, mx.array] | None = None

    def __call__(self, _tokens: mx.array, logits: mx.array) -> mx.array:
        """Logits [1, V] in any float type in, float32 out."""
        logits = logits.astype(mx.float32)
        if self._padded is not None:
            logits = mx.where(self._padded, -math.inf, logits)
        if self._wanted:
            ids = mx.argpartition(-logits, kth=self._wanted - 1, axis=-1)[:, : self._wanted]
            likely = mx.take_along_axis(logits, ids, axis=-1) - mx.logsumexp(logits, axis=-1, keepdims=True)
            self.top = (ids, likely)
        return logits


def penalties(sampling: Sampling) -> list[Any]:
    """mlx-lm's processors in the order of the law: bias, then repetition, presence and frequency penalty.

    Each looks at the last `penalty_window` ids of prompt and answer; 0 means all (a slice from -0 is the whole).
    """
    window = sampling.penalty_window
    processors: list[Any] = make_logits_processors(
        logit_bias=sampling.logit_bias or None,
        repetition_penalty=None if sampling.repetition_penalty == 1 else sampling.repetition_penalty,
        repetition_context_size=window,
        presence_penalty=sampling.presence_penalty or None,
        presence_context_size=window,
        frequency_penalty=sampling.frequency_penalty or None,
        frequency_context_size=window,
    )
    return processors
