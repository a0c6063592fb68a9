"""The engine's ids are those of mlx-lm's own loop: every kind of model, around every page edge, however cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import mlx.core as mx
import pytest
from engines import answer, build
from inference.yardstick import GREEDY, case
from tiny_models import FAMILIES, ZOO, make_tiny

from worker.engine.engine import Engine, EngineRequest
from worker.engine.load import LoadedModel, load
from worker.engine.reference import ReferenceEngine
from worker.engine.sample import Sampling

CHUNKS = (1, 7, 32, 33, 64, 512)
# One before, at and behind page edges; the last ones also around chunks of 512.
EDGES = (1, 2, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129)
FAR = (159, 160, 161, 192, 255, 256, 257, 514)
# A brief answer has one draw behind the prompt and one behind a row that drawing wrote. A long one crosses a page edge
# wherever it begins, the longest two of them.
BRIEF, LONG, LONGEST = 2, 34, 66
# In the long forms.
FULL = 44
SAMPLINGS = (
    Sampling(seed=3, temperature=0.8),
    Sampling(seed=2**64 - 1, temperature=0.8, top_p=0.95),
    Sampling(seed=11, temperature=1.3, top_p=0.9, top_k=40, min_p=0.02),
    Sampling(seed=7, temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    Sampling(seed=1, repetition_penalty=1.2, penalty_window=0, logit_bias={9: 2.0, 12: -5.0}),
)


# Lane, and whether beginnings are reused, of those that have no packed form.
LANES = {
    **dict.fromkeys(("gemma3", "qwen3_5", "granite_hybrid", "deepseek_v3", "llama-window"), ("module", False)),
    "phi3": ("module", True),
}
# Of each lane and kind of cache some.
SAMPLED = ("llama", "qwen3-4bit-32", "gemma3", "qwen3_5", "granite_hybrid", "deepseek_v3", "phi3", "llama-bias")
# How an attempt goes on: ids that an earlier one drew, and the rest.
DRAWN = (1, 15, 16, 17, 31)


@dataclass(frozen=True)
class Model:
    """A loaded tiny model, and one engine for each prefill chunk."""

    name: str
    loaded: LoadedModel
    engines: dict[int, Engine] = field(default_factory=dict)

    def ids(self, request: EngineRequest, chunk: int) -> list[int]:
        if chunk not in self.engines:
            self.engines[chunk] = build(self.loaded, prefill_rows=chunk).engine
        return answer(self.engines[chunk], request).ids


@pytest.fixture(scope="module", params=ZOO)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Each model in turn, loaded once."""
    yield Model(request.param, load(make_tiny(request.param, tmp_path_factory.mktemp(request.param))))
    mx.clear_cache()


def short_form() -> list[tuple[int, int, int]]:
    """64 triples of prompt length, prefill chunk and answer length; every length with several chunks."""
    pairs = [
        (length, CHUNKS[(place + turn) % len(CHUNKS)]) for turn in range(4) for place, length in enumerate(EDGES)
    ]
    # One by one the long prompts take most of the time.
    pairs = [(length, 7 if chunk == 1 and length > 65 else chunk) for length, chunk in pairs]
    pairs += [(length, CHUNKS[2 + place % 4]) for place, length in enumerate(FAR)]
    tokens = [BRIEF if place % 11 else LONG if place else LONGEST for place in range(len(pairs))]
    return [(*pair, count) for pair, count in zip(pairs, tokens, strict=True)]


def test_the_short_form_has_64_prompts_every_chunk_size_and_every_edge():
    triples = short_form()
    assert len(triples) == 64
    assert {chunk for _, chunk, _ in triples} == set(CHUNKS)
    assert {length for length, _, _ in triples} == {*EDGES, *FAR}
    assert sum(count >= LONG for _, _, count in triples) == 6


def test_greedy_ids_are_those_of_mlx_lm_for_prompts_around_every_page_edge(model):
    triples = short_form() if model.name in FAMILIES else short_form()[::9]
    for place, (length, chunk, tokens) in enumerate(triples):
        wanted = case(model.loaded, length, tokens, seed=place)
        assert model.ids(wanted.request, chunk) == wanted.ids, (length, chunk, tokens)


def test_each_model_runs_on_its_lane_and_a_warm_up_changes_no_answer(model):
    built = build(model.loaded)
    assert (built.lane, built.reuses) == LANES.get(model.name, ("packed", True))
    built.engine.warm_up()
    wanted = case(model.loaded, 33, BRIEF, seed=0)
    assert answer(built.engine, wanted.request).ids == wanted.ids


@pytest.mark.parametrize("model", SAMPLED, indirect=True)
def test_sampled_ids_are_those_of_the_reference_engine_with_the_same_seed(model):
    reference = ReferenceEngine(model.loaded)
    for place, sampling in enumerate(SAMPLINGS):
        wanted = case(model.loaded, 20 + 11 * place, 11, seed=place, sampling=sampling)
        assert answer(reference, wanted.request).ids == wanted.ids
        assert model.ids(wanted.request, 32) == wanted.ids, sampling
        other = replace(wanted.request, sampling=replace(sampling, seed=sampling.seed ^ 1))
        assert not sampling.temperature or model.ids(other, 32) != wanted.ids, "the seed counts"


@pytest.mark.parametrize("model", SAMPLED, indirect=True)
def test_an_attempt_goes_on_behind_what_an_earlier_one_drew(model):
    for place, sampling in enumerate((GREEDY, SAMPLINGS[1])):
        wanted = case(model.loaded, 50 + place, 33, seed=place, sampling=sampling)
        for done in DRAWN[place::2]:
            rest = replace(wanted.request, drawn=tuple(wanted.ids[:done]), max_tokens=33 - done)
            assert model.ids(rest, 33) == wanted.ids[done:], done


@pytest.mark.prove
def test_greedy_ids_are_those_of_mlx_lm_for_every_prompt_with_every_chunk_size(model):
    triples = short_form() if model.name in FAMILIES else short_form()[::4]
    for place, (length, _, _) in enumerate(triples):
        wanted = case(model.loaded, length, FULL, seed=100 + place)
        for chunk in CHUNKS:
            assert model.ids(wanted.request, chunk) == wanted.ids, (length, chunk)


@pytest.mark.prove
def test_greedy_ids_of_smollm2_are_those_of_mlx_lm(smollm2):
    model = Model("smollm2", smollm2)
    for place, (length, chunk, _) in enumerate(short_form()):
        wanted = case(smollm2, length, FULL, seed=place)
        assert model.ids(wanted.request, chunk) == wanted.ids, (length, chunk)
