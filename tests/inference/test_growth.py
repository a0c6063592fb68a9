"""Memory has one limit, which every lane keeps to, and jobs of whatever length leave no more of it taken."""

from __future__ import annotations

import gc
import random

import mlx.core as mx
import pytest
from engines import FORMS, answer
from tiny_models import make_tiny

from worker.engine.build import Options, build
from worker.engine.engine import EngineRequest
from worker.engine.load import LoadedModel, load
from worker.engine.sample import Sampling

ASKED = 3 * 10**6
SAMPLINGS = (
    Sampling(seed=0),
    Sampling(seed=1, temperature=0.8, top_p=0.95),
    Sampling(seed=2, temperature=0.7, repetition_penalty=1.1),
)


@pytest.fixture(
    scope="module", params=["llama", "llama-4bit-64", "phi3", "gemma3", "granite_hybrid", "deepseek_v3"]
)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(make_tiny(request.param, tmp_path_factory.mktemp(request.param)))


def held() -> int:
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()


@pytest.mark.parametrize("form", FORMS)
def test_keys_and_values_of_every_lane_keep_to_the_memory_that_was_given(loaded: LoadedModel, form: str) -> None:
    build(loaded, Options(kv_bytes=ASKED, form=form))
    before = held()
    engine, info = build(loaded, Options(kv_bytes=ASKED, form=form))
    if "pool" not in info:
        assert info["why"], "a model without a pool says what keeps it from one"
        return
    pool = info["pool"]
    assert ASKED - pool["bytes"] // pool["pages"] < pool["bytes"] <= ASKED, "health tells it"
    mx.eval([one.arrays for one in getattr(engine.forward, "pools", [])])
    assert held() - before <= pool["bytes"] + 200_000, "and nothing of its size lies beside it"
    assert engine.index.pages.count == pool["pages"], "sequences and beginnings share these pages"


def live_through(loaded: LoadedModel, jobs: int, longest: int) -> None:
    engine, _ = build(loaded, Options(kv_bytes=ASKED))
    draw = random.Random(1)
    lengths = draw.sample(range(1, longest + 1), jobs)
    found = []
    for number, length in enumerate([*range(1, longest, longest // 6), *lengths]):
        prompt = tuple(draw.randrange(4, 200) for _ in range(length))
        request = EngineRequest(
            prompt=prompt, sampling=SAMPLINGS[number % 3], max_tokens=draw.randint(1, 6), cache=number % 5 > 0
        )
        got = answer(engine, request, tokens=draw.randint(0, 2) if number % 10 == 9 else None)
        assert len(got.ids) <= request.max_tokens
        found.append(held())
        assert mx.get_cache_memory() < 64 * 2**20
    warm = len(found) // 3
    assert max(found[warm:]) <= max(found[:warm]) + 1024


def test_jobs_of_many_lengths_leave_no_more_taken(loaded: LoadedModel) -> None:
    live_through(loaded, 12, 200)


@pytest.mark.prove
def test_five_hundred_jobs_each_of_another_length_leave_no_more_taken(loaded: LoadedModel) -> None:
    live_through(loaded, 500, 600)
