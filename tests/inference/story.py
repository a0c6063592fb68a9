"""Random requests one after the other on an engine that keeps rows: what they reuse is bounded by what went before."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from engines import Answer, Built, answer

from worker.engine.engine import EngineRequest
from worker.engine.sample import Sampling
from worker.kv.pages import PAGE
from worker.kv.prefix import Cache

LONGEST_PROMPT, LONGEST_ANSWER = 260, 40
# The largest request: its rows, and 16 more that a forward may pad.
LARGEST = -(-(LONGEST_PROMPT + 2 * LONGEST_ANSWER + 16) // PAGE)
SAMPLINGS = (
    Sampling(seed=0),
    Sampling(seed=0),
    Sampling(seed=5, temperature=0.9, top_p=0.95),
    Sampling(seed=6, temperature=0.6, repetition_penalty=1.2, penalty_window=0),
)


@dataclass(frozen=True)
class Order:
    """A request, and where it is cancelled: as in `engines.answer`."""

    request: EngineRequest
    chunks: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Past:
    """What a request may have left behind: a row for each of *ids*.

    exact: leading rows that a cold run would have written alike, at most. sure: leading rows that must be found where
    nothing was evicted; sure_exact: the exact ones of them.
    """

    request: EngineRequest
    drawn: tuple[int, ...]
    ids: tuple[int, ...]
    exact: int
    sure: int
    sure_exact: int


class Story:
    """Runs orders on *warm* and on *cold*, which keeps nothing, and compares. roomy: nothing has to be evicted."""

    def __init__(self, warm: Built, cold: Built, *, roomy: bool = True) -> None:
        self.warm = warm
        self.cold = cold
        self.roomy = roomy
        self.past: list[Past] = []

    def run(self, order: Order) -> Answer:
        got = answer(self.warm.engine, order.request, chunks=order.chunks, tokens=order.tokens)
        wanted = answer(self.cold.engine, order.request, tokens=len(got.ids))
        assert got.ids == wanted.ids, order
        assert (wanted.figures.cached_tokens, wanted.figures.prefix_exact) == (0, True), "cold is cold"
        self._check_reuse(order.request, got)
        self.warm.check_idle()
        self._note(order.request, got)
        return got

    def whole(self, rows: int) -> int:
        """What of so many rows can be reused: whole prefill forwards."""
        return rows // self.warm.align * self.warm.align

    def _check_reuse(self, request: EngineRequest, got: Answer) -> None:
        cached, exact = got.figures.cached_tokens, got.figures.prefix_exact
        if request.cache is False or not self.warm.reuses:
            assert (cached, exact) == (0, True)
            return
        answers = request.cache == "answers"
        most_exact = self._longest(request, lambda past: past.exact)
        assert cached <= (self._longest(request, lambda past: len(past.ids)) if answers else most_exact)
        assert exact or (answers and cached > 0)
        assert not exact or cached <= most_exact
        if self.roomy:
            sure = self._longest(request, lambda past: past.sure if answers else past.sure_exact)
            assert cached >= self.whole(sure // PAGE * PAGE), "full pages are found"
        assert cached == self.whole(cached)

    def _longest(self, request: EngineRequest, rows) -> int:
        """The longest beginning of the prompt, its last id left out, within the *rows* of what the owner left."""
        prompt = request.prompt[:-1]
        kept = [
            past for past in self.past if past.request.owner == request.owner and past.request.cache is not False
        ]
        return max((shared(prompt, past.ids[: rows(past)]) for past in kept), default=0)

    def _note(self, request: EngineRequest, got: Answer) -> None:
        prompt = len(request.prompt)
        ids = (*request.prompt, *request.drawn)
        # The last token drawn was never read.
        ids = (*ids, *got.ids[:-1]) if got.ids else ids[: got.read]
        exact = min(prompt, len(ids))
        if not got.figures.prefix_exact:
            exact = min(exact, self._longest(request, lambda past: past.exact))
        sure = len(ids) if not got.cancelled else prompt if got.ids else 0
        sure_exact = min(sure, exact) if got.figures.prefix_exact else 0
        self.past.append(Past(request, tuple(got.ids), ids, exact, sure, sure_exact))


def shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Length of the common beginning."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def next_order(draw: random.Random, past: list[Past], vocabulary: int, chunk: int) -> Order:
    """What a producer may ask after *past*: something new, the same again, a follow-up, a shared beginning."""
    request = _request(draw, past, vocabulary)
    if draw.random() < 0.15:
        forwards = (len(request.prompt) + len(request.drawn)) // chunk + 2
        return Order(request, chunks=draw.randint(1, forwards))
    if draw.random() < 0.15:
        return Order(request, tokens=draw.randint(0, request.max_tokens - 1))
    return Order(request)


def _request(draw: random.Random, past: list[Past], vocabulary: int) -> EngineRequest:
    def text(most: int) -> tuple[int, ...]:
        # Half of the lengths at page edges.
        count = draw.randint(1, most)
        if draw.random() < 0.5:
            count = max(1, count // PAGE * PAGE + draw.randint(-1, 1))
        return tuple(draw.randrange(vocabulary) for _ in range(count))

    cache: Cache = draw.choices((True, "answers", False), (6, 3, 1))[0]
    fresh = EngineRequest(
        prompt=text(140),
        sampling=replace(draw.choice(SAMPLINGS), seed=draw.randrange(2**64)),
        max_tokens=draw.choice((1, 2, draw.randint(3, 16), LONGEST_ANSWER)),
        cache=cache,
        owner=draw.choice((b"", b"", b"", b"other")),
    )
    if not past or draw.random() < 0.15:
        return fresh
    # The latest ones most of all, as in a chat.
    model = draw.choice(past[-3:] if draw.random() < 0.6 else past)
    owner = model.request.owner if draw.random() < 0.9 else fresh.owner
    kind = draw.choices(("again", "resumed", "follow-up", "part", "shared"), (2, 1, 4, 1, 3))[0]
    prompt, drawn = model.request.prompt, model.request.drawn + model.drawn
    if kind == "resumed":
        kept = drawn[: draw.randint(0, min(len(drawn), LONGEST_ANSWER))]
        return replace(model.request, drawn=kept, max_tokens=fresh.max_tokens, cache=cache, owner=owner)
    if kind == "follow-up":
        prompt = prompt + drawn + text(40)
    elif kind == "part":
        prompt = prompt + drawn[: draw.randint(0, len(drawn))] + text(2)
    elif kind == "shared":
        prompt = prompt[: draw.randint(1, len(prompt))] + text(70)
    return replace(fresh, prompt=prompt[:LONGEST_PROMPT], owner=owner)
