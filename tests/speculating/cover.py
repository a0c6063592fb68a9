"""A pairwise cover of what speculation may meet, and one case of it: a job with drafts beside the job without."""

from __future__ import annotations

import random
from dataclasses import astuple, dataclass, replace
from itertools import combinations
from typing import Any

from speculating.oracle import EAGER, FREE, Oracle, Priced, Watched, executor
from tiny_models import Room

from worker.attempt import Chunk, Final
from worker.engine.load import LoadedModel
from worker.speculation.draft import Drafter
from worker.speculation.executor import ROUTE
from worker.speculation.ngram import Ngram

SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "0.7": {"temperature": 0.7},
    "1.0": {"temperature": 1.0},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "top_k and min_p": {"temperature": 0.9, "top_k": 12, "min_p": 0.02},
    "penalties over 20": {
        "temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3,
    },
    "penalties over all": {
        "repetition_penalty": 1.2, "presence_penalty": 0.2, "frequency_penalty": 0.5, "penalty_window": 0,
    },
    "bias": {"temperature": 1.0, "logit_bias": {"9": 2.0, "20": -1000.0, "40": 1.5}},
    "logprobs": {"temperature": 0.7, "logprobs": 4},
}  # fmt: skip
# What share of its trunk the oracle has wrong.
ORACLES = {"oracle": 0.0, "oracle that errs": 0.25, "oracle mostly wrong": 0.8}
ENDS = ("full", "end token", "stop string", "budget", "interrupted")
FACTORS: dict[str, tuple[Any, ...]] = {
    "model": ("llama", "qwen3", "smollm3", "qwen2", "llama-4bit-64"),
    "drafter": ("ngram", *ORACLES),
    "depth": (1, 3, 7, 15),
    "trees": (True, False),
    "sampler": tuple(SAMPLERS),
    "end": ENDS,
    "cache": (True, "answers", False),
    "eager": (True, True, False),
}


@dataclass(frozen=True)
class Case:
    """seed: of prompt, noise and where it ends. depth: rows behind the first. eager: all that is proposed is verified."""

    seed: int
    model: str
    drafter: str
    depth: int
    trees: bool
    sampler: str
    end: str
    cache: bool | str
    eager: bool


def drawn_case(draw: random.Random, seed: int) -> Case:
    return Case(seed, **{name: draw.choice(values) for name, values in FACTORS.items()})


def pairs(case: Case) -> set[tuple[Any, ...]]:
    """Every two settings that meet in *case*."""
    return {(*two, *(getattr(case, name) for name in two)) for two in combinations(FACTORS, 2)}


def all_pairs() -> set[tuple[Any, ...]]:
    return {(*two, a, b) for two in combinations(FACTORS, 2) for a in FACTORS[two[0]] for b in FACTORS[two[1]]}


def cases(count: int) -> list[Case]:
    """A cover of all pairs, and behind it drawn cases up to *count*."""
    draw, missing, found = random.Random(4), all_pairs(), []
    while missing:
        # Of many drawn cases the one with most new pairs.
        found.append(
            max((drawn_case(draw, len(found)) for _ in range(60)), key=lambda one: len(pairs(one) & missing))
        )
        missing -= pairs(found[-1])
    return found + [drawn_case(draw, seed) for seed in range(len(found), count)]


@dataclass
class Tally:
    """What the cases came to: that drafts were kept, refused, forked, and cut by ends, with a forward in flight too."""

    launched: int = 0
    committed: int = 0
    wins: int = 0
    cut: int = 0
    dropped: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(one + another for one, another in zip(astuple(self), astuple(other), strict=True)))

    def add(self, figures: dict[str, Any], watched: Watched) -> None:
        self.launched += figures["rows_launched"]
        self.committed += figures["rows_committed"]
        self.wins += figures["fork_wins"]
        self.cut += watched.left > 0 or watched.dropped
        self.dropped += watched.dropped


class Stand:
    """One model, one engine, and jobs on it with and without drafts."""

    def __init__(self, loaded: LoadedModel, pages: int = 32) -> None:
        self.room = Room(loaded, prefill_chunk=32, pages=pages)
        self.clock = Priced(self.room.engine, FREE)
        self.tally = Tally()

    def job(
        self, body: dict[str, Any], seed: int, ends: frozenset[int] = frozenset(), drawn: tuple[int, ...] = ()
    ) -> tuple[list[Chunk], Final]:
        """At the width that is planned. ends: ids that end the answer."""
        self.room.loaded = replace(self.room.loaded, eos_ids=ends)
        found = self.room.run(body, seed=seed, drawn=drawn)
        self.room.built.check_idle()
        self.room.engine.index.pages.check()
        return found

    def plain(self, body: dict[str, Any], *more: Any) -> tuple[list[Chunk], Final]:
        self.room.gate.executor = None
        return self.job(body, *more)

    def drafted(self, drafter: Drafter, case: Case, body: dict[str, Any], *more: Any) -> tuple[list[Chunk], Final]:
        self.clock.costs = costs = EAGER if case.eager else FREE
        watched = executor(
            self.room.engine, drafter, costs, width=case.depth + 1, trees=case.trees, clock=self.clock
        )
        self.room.gate.executor = watched
        chunks, final = self.job(body, *more)
        if final.route == ROUTE:
            check_counts(final, len(chunks) + watched.left, case.depth + 1)
            self.tally.add(final.speculation, watched)
        return chunks, final

    def check(self, case: Case) -> None:
        """The whole answer, and the one that ends as the case says, are those of plain decode."""
        luck = random.Random(case.seed)
        prompt = prompt_of(luck, self.room.loaded.vocabulary)
        body = {
            "token_ids": prompt,
            "max_tokens": luck.randint(12, 36),
            "cache": case.cache,
            **SAMPLERS[case.sampler],
        }
        whole, final = self.plain(body, case.seed)
        assert final.finish_reason == "length"
        ids = ids_of(whole)
        drafter: Drafter = Ngram()
        if case.drafter != "ngram":
            drafter = Oracle((*prompt, *ids), self.room.loaded.vocabulary, ORACLES[case.drafter])
        body, *more = ended(case.end, body, whole, luck)
        if case.end != "full":
            whole, final = self.plain(body, case.seed, *more)
        chunks, other = self.drafted(drafter, case, body, case.seed, *more)
        assert chunks == whole, case
        assert last_word(other) == last_word(final), case
        assert not getattr(drafter, "held", False), "the drafter was told of the end"


def prompt_of(luck: random.Random, vocabulary: int) -> list[int]:
    """Some of it repeats; some begin alike, around page edges."""
    shared = [7 + place * 5 % 200 for place in range(luck.choice((0, 31, 33, 64)))]
    phrase = [luck.randrange(4, vocabulary) for _ in range(luck.randint(2, 9))]
    return [
        *shared,
        *phrase * luck.randint(1, 4),
        *(luck.randrange(4, vocabulary) for _ in range(luck.randint(0, 20))),
    ]


def ended(end: str, body: dict[str, Any], whole: list[Chunk], luck: random.Random) -> tuple[Any, ...]:
    """How the job ends otherwise than by its budget: its body, the ids that end answers, and those drawn before."""
    ids, text = ids_of(whole), "".join(chunk.text for chunk in whole)
    place = luck.randint(len(ids) // 4, len(ids) - 2)
    none: frozenset[int] = frozenset()
    if end == "end token":
        return body, frozenset({ids[place]})
    if end == "stop string":
        parts = [text[at : at + 3] for at in range(len(text) // 3, len(text) - 2)]
        return ({**body, "stop": ["never", luck.choice(parts)]}, none) if parts else (body, none)
    if end == "budget":
        return {**body, "max_tokens": place}, none
    if end == "interrupted":
        return body, none, tuple(ids[:place])
    return body, none


def ids_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.ids]


def last_word(final: Final) -> tuple[Any, ...]:
    """What does not depend on how it was computed."""
    return final.finish_reason, final.prompt_tokens, final.completion_tokens, final.max_tokens_used, final.sha256


def check_counts(final: Final, drawn: int, width: int) -> None:
    """The figures are those of this job: they add up to the ids that it drew."""
    told = final.speculation
    widths = {int(rows): count for rows, count in told["widths"].items()}
    assert max(widths, default=1) <= width
    assert told["verify_forwards"] == sum(widths.values())
    assert told["rows_launched"] == told["drafted"] == sum((rows - 1) * count for rows, count in widths.items())
    assert told["rows_committed"] == sum(told["accepted_by_depth"])
    assert told["verify_forwards"] + told["rows_committed"] == drawn
    assert told["fork_wins"] <= told["fork_attempts"]
