"""An engine that keeps rows answers as one that has just started: token for token, whatever ran before."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest
from engines import FORMS, build
from inference.story import LARGEST, LONGEST_ANSWER, Order, Story, next_order
from tiny_models import make_tiny

from worker.engine.engine import EngineRequest
from worker.engine.load import LoadedModel, load
from worker.engine.sample import Sampling
from worker.kv.pages import PAGE

MODELS = (
    "llama",
    "qwen3",
    "llama-4bit-64",
    "smollm3",
    "llama-128",
    "gemma3",
    "mistral",
    "granite_hybrid",
    "phi3",
    "qwen2",
)
JOBS = 14
# Pages that no schedule fills.
ROOMY = (JOBS + 1) * LARGEST
# Pages of the pool, and how many of them may be kept: all the room there is, hardly any, and a small index.
POOLS = ((ROOMY, None), (LARGEST, None), (LARGEST + 6, None), (ROOMY, 7), (LARGEST + 2, 4))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    return cache(lambda name: load(make_tiny(name, tmp_path_factory.mktemp(name))))


def told(tiny_model: Callable[[str], LoadedModel], seed: int) -> Story:
    """A whole random schedule."""
    loaded = tiny_model(MODELS[seed % len(MODELS)])
    draw = random.Random(seed)
    pages, stored = POOLS[seed % len(POOLS)]
    chunk = draw.choice((7, 32, 48, 128))
    form = FORMS[seed % len(FORMS)]
    story = Story(
        build(loaded, prefill_rows=chunk, pages=pages, stored=stored, form=form),
        build(loaded, prefill_rows=chunk, pages=pages, stored=0, form=form),
        roomy=(pages, stored) == POOLS[0],
    )
    for _ in range(JOBS):
        story.run(next_order(draw, story.past, loaded.vocabulary, chunk))
    return story


@pytest.mark.parametrize("seed", range(10))
def test_a_random_schedule_is_answered_as_by_a_cold_engine(tiny_model, seed):
    told(tiny_model, seed)


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(100, 200))
def test_a_hundred_random_schedules_are_answered_as_by_a_cold_engine(tiny_model, seed):
    told(tiny_model, seed)


def test_the_schedules_hold_every_kind_of_order():
    draw = random.Random(1)
    orders = [next_order(draw, [], 300, 32) for _ in range(300)]
    assert {order.request.cache for order in orders} == {True, False, "answers"}
    assert {order.request.owner for order in orders} == {b"", b"other"}
    assert any(order.chunks for order in orders)
    assert any(order.tokens is not None for order in orders)


@pytest.fixture(params=FORMS)
def story(tiny_model, request) -> Story:
    """A story on an engine with room for all."""
    loaded = tiny_model("llama")
    warm = build(loaded, prefill_rows=32, pages=ROOMY, form=request.param)
    assert warm.reuses
    return Story(warm, build(loaded, prefill_rows=32, stored=0, form=request.param))


def text(seed: int, count: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(4, 280) for _ in range(count))


def asked(prompt: tuple[int, ...], tokens: int = 40, **more) -> EngineRequest:
    return EngineRequest(prompt=prompt, sampling=Sampling(seed=0), max_tokens=tokens, **more)


def test_a_follow_up_reuses_the_prompt_alone_or_the_answer_too_where_that_is_wished(story):
    prompt = text(1, 75)
    first = story.run(Order(asked(prompt)))
    again = (*prompt, *first.ids, *text(2, 9))
    plain = story.run(Order(asked(again, cache=True))).figures
    assert (plain.cached_tokens, plain.prefix_exact) == (story.whole(75), True)
    longer = (*prompt, *first.ids, *text(3, 9))
    # The rows of the answer were written once more by the prefill of the follow-up: they are exact now.
    rewritten = story.run(Order(asked(longer, cache="answers"))).figures
    assert (rewritten.cached_tokens, rewritten.prefix_exact) == (story.whole(115), True)


def test_rows_that_drawing_wrote_are_told_of_in_the_figures(story):
    prompt = text(1, 75)
    first = story.run(Order(asked(prompt)))
    again = (*prompt, *first.ids, *text(2, 9))
    figures = story.run(Order(asked(again, cache="answers"))).figures
    assert figures.cached_tokens == story.whole(75 + 39), "the last token was never read"
    assert not figures.prefix_exact
    figures = story.run(Order(asked(again, cache=True))).figures
    assert (figures.cached_tokens, figures.prefix_exact) == (story.whole(75), True)


def test_the_same_prompt_again_reads_its_last_id_alone(story):
    for length in (1, 2, PAGE, PAGE + 1, 3 * PAGE - 1, 3 * PAGE):
        prompt = text(length, length)
        assert story.run(Order(asked(prompt, 3))).figures.cached_tokens == 0
        assert story.run(Order(asked(prompt, 3))).figures.cached_tokens == story.whole(length - 1)


def test_a_job_that_opts_out_finds_nothing_and_leaves_nothing(story):
    prompt = text(1, 80)
    for wish, found in ((False, 0), (True, 0), (False, 0), (True, story.whole(79))):
        assert story.run(Order(asked(prompt, 3, cache=wish))).figures.cached_tokens == found


def test_what_one_owner_left_is_found_by_no_other(story):
    prompt = text(1, 80)
    stored = story.whole(79)
    for owner, found in ((b"a", 0), (b"b", 0), (b"", 0), (b"a", stored), (b"b", stored)):
        assert story.run(Order(asked(prompt, 3, owner=owner))).figures.cached_tokens == found


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 5])
def test_a_job_cancelled_between_two_prefill_chunks_spoils_nothing(story, chunks):
    prompt = text(1, 110)
    assert story.run(Order(asked(prompt), chunks=chunks)).cancelled
    again = story.run(Order(asked(prompt)))
    assert again.figures.cached_tokens <= 32 * (chunks - 1)
    assert story.run(Order(asked(prompt))).ids == again.ids


@pytest.mark.parametrize("tokens", [0, 1, 17, 39])
def test_a_job_cancelled_while_it_draws_leaves_no_row_that_was_not_read(story, tokens):
    prompt = text(1, 60)
    cut = story.run(Order(asked(prompt), tokens=tokens))
    assert (cut.cancelled, len(cut.ids)) == (True, tokens)
    again = story.run(Order(asked((*prompt, *cut.ids, *text(2, 5)), cache="answers")))
    assert again.figures.cached_tokens <= 60 + max(tokens - 1, 0)
    assert story.run(Order(asked(prompt))).figures.cached_tokens == story.whole(59)


def test_beginnings_are_evicted_for_a_job_that_needs_the_room_and_answers_stay_right(tiny_model):
    loaded = tiny_model("llama")
    warm = build(loaded, prefill_rows=32, pages=LARGEST)
    story = Story(warm, build(loaded, prefill_rows=32, pages=LARGEST, stored=0), roomy=False)
    prompts = [text(seed, 120) for seed in range(6)]
    for turn in range(3):
        for prompt in prompts[turn:] + prompts[:turn]:
            story.run(Order(asked(prompt, LONGEST_ANSWER)))
    assert warm.index is not None
    assert warm.index.figures.evicted_pages > 0
