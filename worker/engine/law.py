"""The law of a draw in the graph, for the rows of a forward: what `sample.py` says, with nothing left to the host.

Each row of a chain or tree is drawn as if it stood alone: its history is the history so far and the ids fed to the
rows of its path, itself included; its position is that of row 0, plus its depth. Its numbers depend on nothing
else, so they are the same bits for any number of rows. One row runs on vectors [V], without the axis of rows: each
node of a graph costs the host time.

State, where there are penalties, is the history so far without its newest id, the one that the next forward is
fed: the last ids, uint32 [window], with `width` in the places of those that a short history lacks; or, if the
window is 0 and so all of it, how often each id was there, int32 [width].

The numbers of a job are operands, never constants, and so is a tree: new ones make no new graph. The numbers are
views of arrays of more than 8 bytes, because CUDA keeps smaller ones in the host's memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import mlx.core as mx

from worker.engine.draw_tree import Tree, accepted
from worker.engine.filters import apply_top_k, apply_top_p
from worker.engine.sample import LEAST_TOP_P, Sampling, gumbel_of, key, words

NOT_A_NUMBER: Final = 0xFFFFFFFF
"""What the host reads in the place of a token whose logits were not numbers."""

# (logits T [R, V], position uint32 [2], ids fed uint32 [R], state, *operands, then of more rows than one the tree)
# to (tokens uint32 [R], read uint32 [R], then where wanted ids [R, n] and log-probabilities [R, n], then where
# wanted the runners-up uint32 [R] and the gaps float32 [R], then of one row with penalties the state, of more the
# path uint32 [1 + R]). Of one row ids and log-probabilities are [n].
Law = Callable[..., tuple[mx.array, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What of the law is on: all that the graph of a draw depends on, besides the shape and type of the logits.

    window: how many ids penalties look back at, 0 for all; None where there are none. logprobs: how many likeliest
    ids are wanted beside each token. ranked: whether the second best of each draw is wanted, and how far it is
    behind.
    """

    width: int
    vocabulary: int
    biased: bool
    window: int | None
    sampled: bool
    top_p: bool
    min_p: bool
    top_k: int
    logprobs: int
    ranked: bool = False

    @classmethod
    def of(cls, sampling: Sampling, width: int, vocabulary: int, reach: int | None) -> Self:
        """The kind of *sampling*.

        reach: how many ids prompt and answer can have; a penalty window as long as that is all of them.
        """
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        window: int | None = sampling.penalty_window
        if penalties == (1, 0, 0):
            window = None
        elif reach is not None and sampling.penalty_window >= reach:
            window = 0
        sampled = sampling.temperature > 0
        return cls(
            width=width,
            vocabulary=vocabulary,
            biased=bool(sampling.logit_bias),
            window=window,
            sampled=sampled,
            top_p=sampled and sampling.top_p < 1,
            min_p=sampled and sampling.min_p > 0,
            top_k=sampling.top_k if sampled and 0 < sampling.top_k < width else 0,
            logprobs=min(sampling.logprobs, vocabulary),
        )

    @property
    def padded(self) -> bool:
        """The logits have rows that stand for no id."""
        return self.width > self.vocabulary

    @property
    def plain(self) -> bool:
        """Greedy, and nothing else."""
        return not (self.sampled or self.biased or self.logprobs) and self.window is None


class Operands(NamedTuple):
    """The numbers of a job: float32 [1], but for key, uint32 [2], of position 0, and shift.

    least: logarithm of min_p. shift: float32 [width], added to the logits, -inf where a row is padding; [1] where
    the kind has neither bias nor padding.
    """

    temperature: mx.array
    top_p: mx.array
    least: mx.array
    repetition: mx.array
    presence: mx.array
    frequency: mx.array
    key: mx.array
    shift: mx.array


def operands(sampling: Sampling, kind: Kind) -> Operands:
    """The operands of *sampling*, evaluated."""
    numbers = [
        sampling.temperature,
        max(sampling.top_p, LEAST_TOP_P),
        math.log(sampling.min_p) if kind.min_p else 0.0,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
    ]
    shift = [0.0]
    if kind.biased or kind.padded:
        shift = [0.0] * kind.vocabulary + [-math.inf] * (kind.width - kind.vocabulary)
        for token, bias in sampling.logit_bias.items():
            shift[token] += bias
    first_key = mx.concatenate([key(sampling.seed, 0)] * 2)
    views = mx.split(mx.array(numbers, dtype=mx.float32), len(numbers))
    values = Operands(*(*views, first_key[:2], mx.array(shift, dtype=mx.float32)))
    mx.eval(values)
    return values


def state(kind: Kind, history: Sequence[int]) -> mx.array:
    """The state before the first draw after *history*, at least one id; [1] where the kind has no penalties."""
    seen = history[:-1]
    if kind.window is None:
        return mx.zeros(1, dtype=mx.int32)
    if kind.window == 0:
        counts = mx.zeros(kind.width, dtype=mx.int32)
        return counts.at[mx.array(list(seen), dtype=mx.uint32)].add(1) if seen else counts
    recent = list(seen[-kind.window :])
    return mx.array([kind.width] * (kind.window - len(recent)) + recent, dtype=mx.uint32)


def after(kind: Kind, started: mx.array, tokens: mx.array, rows: int) -> mx.array:
    """The state once the first *rows* of *tokens*, uint32 [R], are history. started: the state before them."""
    if kind.window is None:
        return started
    if kind.window == 0:
        fed = mx.arange(tokens.size, dtype=mx.int32) < rows
        return started.at[tokens].add(fed.astype(mx.int32))
    return mx.concatenate([started, tokens])[rows : rows + kind.window]


def law(kind: Kind) -> Law:
    """The function that draws by *kind*; what it takes and gives stands at `Law`."""
    not_a_number = mx.array(NOT_A_NUMBER, dtype=mx.uint32)

    def draw(
        logits: mx.array, position: mx.array, tokens: mx.array, held: mx.array, *values: mx.array
    ) -> tuple[mx.array, ...]:
        given = Operands(*values[: len(Operands._fields)])
        one = logits.shape[0] == 1
        rows, tree = (logits.reshape(-1), None) if one else (logits, Tree.of(values[-1]))
        top: tuple[mx.array, ...] = ()
        further: tuple[mx.array, ...] = ()
        if kind.plain and rows.dtype != mx.float32:
            # Unequal 16-bit logits stay unequal as log-probabilities in float32, unless the largest is within 2^-8
            # of zero: so the likeliest is found on the logits as they are.
            rows = rows[..., : kind.vocabulary]
            total = mx.logsumexp(rows, axis=-1, keepdims=one)
        else:
            rows, top = _raw(kind, rows.astype(mx.float32), given.shift)
            if kind.window is not None:
                counts, further = _counts(kind, held, tokens, tree)
                rows = _penalised(rows, counts, given)
            total = mx.logsumexp(rows, axis=-1, keepdims=True)
            rows = _log_softmax(kind, rows, total, given.shift)
            if kind.sampled:
                rows = _perturbed(_filtered(kind, rows, given), given, _noise(kind, given.key, position, tree))
            total = total if one else total.squeeze(-1)
        drawn = mx.argmax(rows, axis=-1, keepdims=one)
        read = mx.where(mx.isfinite(total), drawn, not_a_number)
        second = _second(rows, drawn) if kind.ranked else ()
        if tree is not None:
            further = (mx.concatenate([accepted(tree, tokens, read), read]),)
        return (drawn, read, *top, *second, *further)

    return draw


def _raw(kind: Kind, rows: mx.array, shift: mx.array) -> tuple[mx.array, tuple[mx.array, ...]]:
    """Logits without padding and with the bias; ids and log-probabilities of the likeliest, before the bias."""
    top: tuple[mx.array, ...] = ()
    padding = shift == -math.inf if kind.padded else None
    if kind.logprobs:
        raw = rows if padding is None else mx.where(padding, -math.inf, rows)
        ids = mx.argpartition(-raw, kth=kind.logprobs - 1, axis=-1)[..., : kind.logprobs]
        top = (ids, mx.take_along_axis(raw, ids, axis=-1) - mx.logsumexp(raw, axis=-1, keepdims=True))
    if kind.biased:
        rows = rows + shift
    if padding is not None:
        # Not by the sum: a padded row may hold anything, and -inf + inf is no number.
        rows = mx.where(padding, -math.inf, rows)
    return rows, top


def _counts(
    kind: Kind, held: mx.array, tokens: mx.array, tree: Tree | None
) -> tuple[mx.array, tuple[mx.array, ...]]:
    """How often each id stands in the window of each row, int32 [V] or [R, V]; and the state after one row."""
    rows, window = tokens.size, kind.window or 0
    if tree is None and not window:
        counts = held.at[tokens].add(1)
        return counts, (counts,)
    none = mx.array(0, dtype=mx.int32)
    if tree is None:
        ids = mx.concatenate([held[1:], tokens])
        counts = mx.broadcast_to(none, (kind.width + 1,)).at[ids].add(mx.array([1] * window))
        return counts[: kind.width], (ids,)
    row = mx.array([[j] for j in range(rows)], dtype=mx.uint32)
    if not window:
        counts = mx.broadcast_to(held, (rows, kind.width))
        return counts.at[row, tokens[None]].add((tree.on_path > 0).astype(mx.int32)), ()
    places = tree.recent
    if window > rows:
        # Of a long window only the end is an operand: what comes before slides by one with each row of the path.
        older = mx.arange(window - rows, dtype=mx.uint32) + tree.rank
        places = mx.concatenate([older, places], axis=1)
    windows = mx.concatenate([held, tokens])[places]
    counts = mx.broadcast_to(none, (rows, kind.width + 1)).at[row, windows].add(1)
    return counts[:, : kind.width], ()


def _penalised(rows: mx.array, counts: mx.array, given: Operands) -> mx.array:
    """Logits after repetition, presence and frequency penalty, in this order.

    The frequency penalty is count * penalty, subtracted once; mlx-lm subtracts it once for each time, which rounds
    more often and would need the ids themselves, of which an endless window has no bound.
    """
    seen = counts > 0
    repeated = mx.where(rows < 0, rows * given.repetition, rows / given.repetition)
    rows = mx.where(seen, repeated, rows) - mx.where(seen, given.presence, 0)
    # Through a choice, so that no compiler joins product and difference into one rounding.
    return rows - mx.where(seen, counts.astype(mx.float32) * given.frequency, 0)


def _log_softmax(kind: Kind, rows: mx.array, total: mx.array, shift: mx.array) -> mx.array:
    """Logits less their log-sum-exp.

    Where the sum is not finite, all ids are as likely before top_p: of a row of -inf alone mlx-lm's filter would
    read past the end. Without sampling it is the same, so that the two share a kernel. That the sum is finite is
    asked in other words than for the host: what two kernels share would become a node between them.
    """
    if kind.sampled and not kind.top_p:
        return rows - total
    likely = mx.where(shift == -math.inf, -math.inf, 0) if kind.padded else mx.array(0, dtype=mx.float32)
    return mx.where(mx.abs(total) < math.inf, rows - total, likely)


def _filtered(kind: Kind, rows: mx.array, given: Operands) -> mx.array:
    """Log-probabilities with -inf where top_p, min_p and top_k, in this order, take an id out."""
    if kind.top_p:
        rows = apply_top_p(rows, given.top_p)
    if kind.min_p:
        rows = mx.where(rows < mx.max(rows, axis=-1, keepdims=True) + given.least, -math.inf, rows)
    if kind.top_k:
        rows = apply_top_k(rows, kind.top_k)
    return rows


def _noise(kind: Kind, first_key: mx.array, position: mx.array, tree: Tree | None) -> mx.array:
    """Gumbel noise by token id, float32 [V] or [R, V], of the position of each row."""
    if tree is None:
        return gumbel_of(words(first_key ^ position, kind.width))
    return gumbel_of(mx.vmap(lambda one: words(one, kind.width))(first_key ^ (position + tree.offsets)))


def _second(rows: mx.array, drawn: mx.array) -> tuple[mx.array, mx.array]:
    """The second best of each row, uint32 [R], and how far its score is below the drawn id's, float32 [R]."""
    one = rows.ndim == 1
    ids = mx.arange(rows.shape[-1], dtype=mx.uint32)
    others = mx.where(ids == (drawn if one else drawn[:, None]), -math.inf, rows)
    best, next_best = (mx.max(scores, axis=-1, keepdims=one).astype(mx.float32) for scores in (rows, others))
    return mx.argmax(others, axis=-1, keepdims=one), best - next_best


def _perturbed(rows: mx.array, given: Operands, noise: mx.array) -> mx.array:
    """Log-probabilities that a draw may choose from, tempered, with the noise."""
    return rows / given.temperature + noise
