"""The text that a head learns from: the model's own answers, written in large batches and kept in one file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from worker.forge.target import Target, compiled, up_to

Ids = npt.NDArray[np.int32]
# Answers all ended are looked for this often: each look waits for the device.
_LOOK: Final = 64
# The numbers of taught positions of a batch are multiples of this at least.
_LEAST: Final = 64
# A loop has at most this period and repeats at least so many ids; what comes before it has to be worth a text.
_PERIOD, _LOOP, _LEAST_KEPT = 64, 40, 32


class Text(NamedTuple):
    """A prompt and its answer. ids: [n]; prompt: how many of them the prompt has."""

    ids: Ids
    prompt: int


@dataclass(frozen=True, slots=True)
class Writing:
    """How text is written.

    length: tokens of an answer at most. batch: answers at once. temperatures: that take turns.
    """

    length: int
    batch: int
    eos_ids: frozenset[int]
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)


def write(
    target: Target, prompts: Sequence[Sequence[int]], temperatures: Sequence[float], writing: Writing, seed: int
) -> list[Text]:
    """The answers to *prompts*, each at its temperature; an answer ends with its first end token."""
    begun = target.begin(prompts)
    warmth = mx.array(list(temperatures))[:, None]
    ends = mx.array(sorted(writing.eos_ids) or [-1])
    key = mx.random.key(seed)
    ended = mx.zeros(len(prompts), dtype=mx.bool_)
    drawn: list[mx.array] = []
    draw = compiled(_draw)
    while len(drawn) < writing.length:
        key, now = mx.random.split(key)
        ids = draw(begun.logits, warmth, now)
        ended = ended | (ids[:, None] == ends).any(-1)
        drawn.append(ids)
        begun = target.step(begun, ids)
        # One ahead: the next step is built while this one runs.
        mx.async_eval(ids, ended, begun.logits, begun.kept)  # type: ignore[no-untyped-call]
        if len(drawn) > 1:
            mx.eval(drawn[-2])
        if len(drawn) % _LOOK == 0 and bool(ended.all().item()):
            break
    answers = np.array(mx.stack(drawn, axis=1)).astype(np.int32)
    return [_cut(prompt, answer, writing.eos_ids) for prompt, answer in zip(prompts, answers, strict=True)]


def _draw(logits: mx.array, warmth: mx.array, key: mx.array) -> mx.array:
    """A token of each row, int32 [B], at temperatures float32 [B, 1]; 0: the likeliest."""
    noise = mx.random.gumbel(logits.shape, key=key)
    return (logits.astype(mx.float32) + noise * warmth).argmax(axis=-1).astype(mx.int32)


def _cut(prompt: Sequence[int], answer: Ids, eos_ids: frozenset[int]) -> Text:
    ends = np.flatnonzero(np.isin(answer, list(eos_ids)))
    kept = answer[: ends[0] + 1] if ends.size else answer
    kept = kept[: before_loop(kept)]
    return Text(np.concatenate([np.array(prompt, np.int32), kept]), len(prompt))


def written(
    target: Target, prompts: Sequence[Sequence[int]], tokens: int, writing: Writing, seed: int
) -> Iterator[list[Text]]:
    """Batches of answers until they have *tokens* tokens; the prompts in turn, each turn at another warmth."""
    luck = np.random.default_rng(seed)
    made = turn = 0
    # Of near lengths together, or short prompts are mostly padding.
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    groups = [order[start : start + writing.batch] for start in range(0, len(order), writing.batch)]
    while True:
        for group in luck.permutation(len(groups)):
            places = groups[group]
            temperatures = [writing.temperatures[(place + turn) % len(writing.temperatures)] for place in places]
            texts = write(target, [prompts[place] for place in places], temperatures, writing, seed + 1 + made)
            mx.clear_cache()
            made += sum(len(one.ids) - one.prompt for one in texts)
            yield texts
            if made >= tokens:
                return
        turn += 1


def save(path: Path, texts: Sequence[Text]) -> None:
    """Write *texts* to *path* (.npz), whole or not at all."""
    fresh = path.with_suffix(".part.npz")
    lengths = np.array([len(one.ids) for one in texts], np.int32)
    prompts = np.array([one.prompt for one in texts], np.int32)
    np.savez(fresh, ids=np.concatenate([one.ids for one in texts]), lengths=lengths, prompts=prompts)
    fresh.replace(path)


def load(path: Path) -> list[Text]:
    """What `save` wrote."""
    with np.load(path) as kept:
        parts = np.split(kept["ids"], np.cumsum(kept["lengths"])[:-1])
        return [Text(ids, int(prompt)) for ids, prompt in zip(parts, kept["prompts"], strict=True)]


def before_loop(answer: Ids) -> int:
    """How many ids of *answer* come before it only repeats itself, once included; all where that is hardly any.

    A small model's greedy answers often end in a loop. It teaches nothing, and a head that knows loops alone looks
    good by it. A loop is up to `_PERIOD` ids that come again, for as long as they are and `_LOOP` ids at least.
    """
    count, least = len(answer), len(answer)
    for period in range(1, min(_PERIOD, count - _LOOP) + 1):
        same = answer[period:] == answer[:-period]
        breaks = np.flatnonzero(np.concatenate([[True], ~same, [True]]))
        runs = np.diff(breaks) - 1
        found = np.flatnonzero(runs >= max(_LOOP, period))
        if found.size:
            # The run begins one period behind the first of the ids that come again.
            least = min(least, int(breaks[found[0]]) + period)
    return least if least >= _LEAST_KEPT else count


class Batch(NamedTuple):
    """Rows of one length.

    ids: int32 [B, n], zeros behind a text. rows: int32 [B, n], which of all ids of all texts, one text after the
    other, each is; -1 behind a text. places: int32 [M], the positions j (of B * n) whose guess x[j+2] is taught.
    weights: float32 [D, M], 1 where depth d guesses there.
    """

    ids: Ids
    rows: Ids
    places: Ids
    weights: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Shape:
    """Of batches. positions: of a batch. length: columns at most. depths: D."""

    positions: int
    length: int
    depths: int


def batches(
    texts: Sequence[Text], shape: Shape, luck: Callable[[int], npt.NDArray[np.int64]] | None
) -> Iterator[Batch]:
    """All *texts* once, in batches of near lengths; luck: a random order of so many, None: as they come.

    Their number depends on the texts alone, not on luck.
    """
    order = range(len(texts)) if luck is None else luck(len(texts))
    starts = np.cumsum([0, *(len(one.ids) for one in texts)])
    buckets: dict[int, list[int]] = {}
    for place in order:
        text = texts[place]
        # A text that teaches nothing: its answer is one token, or behind what is read.
        if min(len(text.ids), shape.length) > text.prompt + 1:
            buckets.setdefault(min(up_to(len(text.ids)), shape.length), []).append(place)
    groups: list[tuple[int, int, list[int]]] = []
    for length, members in sorted(buckets.items()):
        rows = max(1, shape.positions // length)
        groups += [(rows, length, members[at : at + rows]) for at in range(0, len(members), rows)]
    for place in range(len(groups)) if luck is None else luck(len(groups)):
        rows, length, members = groups[place]
        yield _batch([(int(starts[one]), texts[one]) for one in members], rows, length, shape)


def _batch(texts: Sequence[tuple[int, Text]], rows: int, length: int, shape: Shape) -> Batch:
    ids, numbers = np.zeros((rows, length), np.int32), np.full((rows, length), -1, np.int32)
    live = np.zeros((shape.depths, rows, length), np.float32)
    for row, (start, text) in enumerate(texts):
        kept = min(len(text.ids), length)
        numbers[row, :kept] = np.arange(start, start + kept)
        ids[row, :kept] = text.ids[:kept]
        for depth in range(1, shape.depths + 1):
            # The first draft stands behind the pair of the answer's first token, x[j+1].
            live[depth - 1, row, max(text.prompt + depth - 2, depth - 1) : max(kept - 2, 0)] = 1
    places = np.flatnonzero(live.any(axis=0).reshape(-1))
    # Few sizes, so that few shapes are compiled.
    size = max(up_to(len(places), max(_LEAST, rows * length // 4)), 1)
    index = np.zeros(size, np.int32)
    index[: len(places)] = places
    weights = np.zeros((shape.depths, size), np.float32)
    weights[:, : len(places)] = live.reshape(shape.depths, -1)[:, places]
    return Batch(ids, numbers, index, weights)
