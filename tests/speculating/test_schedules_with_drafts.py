"""An engine that drafts and keeps rows answers as one that has just started and does neither."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from engines import build
from inference.story import LARGEST, Order, Story, next_order
from speculating.oracle import EAGER, Careless, executor

from worker.engine.engine import EngineRequest
from worker.engine.load import LoadedModel
from worker.engine.sample import Sampling
from worker.width import WidthPlan

MODELS = (
    "llama",
    "qwen3",
    "llama-4bit-64",
    "smollm3",
    "gemma3",
    "granite_hybrid",
    "phi3",
    "qwen2",
    "qwen3_5",
    "llama",
)
JOBS = 9
ROOMY = (JOBS + 1) * LARGEST
# Pages of the pool, and how many of them may be kept.
POOLS = ((ROOMY, None), (LARGEST, None), (LARGEST + 6, None), (ROOMY, 7))


def story_of(loaded: LoadedModel, chunk: int, pages: int = ROOMY, stored: int | None = None) -> Story:
    """Warm: with drafts at every step. Cold: plain, and nothing kept."""
    warm = build(loaded, prefill_rows=chunk, pages=pages, stored=stored)
    wide = executor(warm.engine, Careless(loaded.vocabulary), EAGER)
    drafting = replace(warm, engine=wide.run(WidthPlan(warm.engine.forward.width), warm.engine))
    cold = build(loaded, prefill_rows=chunk, pages=pages, stored=0)
    return Story(drafting, cold, roomy=(pages, stored) == POOLS[0])


def told(tiny_model: Callable[[str], LoadedModel], seed: int) -> None:
    """A whole random schedule: chats, follow-ups, attempts that go on, cancels at any chunk and any token."""
    loaded = tiny_model(MODELS[seed % len(MODELS)])
    draw = random.Random(seed)
    chunk = draw.choice((7, 32, 48))
    story = story_of(loaded, chunk, *POOLS[seed % len(POOLS)])
    drafted = 0
    for _ in range(JOBS):
        drafted += story.run(next_order(draw, story.past, loaded.vocabulary, chunk)).figures.drafted
    assert drafted > 0


@pytest.mark.parametrize("seed", range(10))
def test_a_random_schedule_with_drafts_is_answered_as_by_a_cold_plain_engine(tiny_model, seed: int) -> None:
    told(tiny_model, seed)


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(100, 200))
def test_a_hundred_random_schedules_with_drafts_are_answered_as_by_a_cold_plain_engine(tiny_model, seed) -> None:
    told(tiny_model, seed)


@pytest.mark.parametrize("cache", [True, "answers"])
def test_each_turn_of_a_chat_with_drafts_reuses_the_turns_before_and_none_is_one_id_too_long(
    tiny_model, cache
) -> None:
    """A key longer than its rows by one id would show in the turn that goes on behind it, wherever it ended."""
    story = story_of(tiny_model("llama"), 32)
    draw, text = random.Random(3), tuple(range(20, 53))
    for tokens in range(4, 20):
        sampling = Sampling(seed=tokens, temperature=0.7)
        turn = EngineRequest(prompt=text, sampling=sampling, max_tokens=tokens + 8, cache=cache)
        ids = story.run(Order(turn, tokens=tokens)).ids
        text = (*text, *ids, draw.randrange(4, 200))
        if len(text) > 220:
            text = text[:40]
