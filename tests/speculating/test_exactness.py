"""Speculation changes no token: drafters, depths, trees, samplers, models, and every way in which an answer ends."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from speculating.cover import (
    FACTORS,
    ORACLES,
    SAMPLERS,
    Case,
    Stand,
    Tally,
    all_pairs,
    cases,
    ids_of,
    last_word,
    pairs,
)
from speculating.oracle import Careless, Oracle

from mtplx.errors import BadJobError
from worker.attempt import Chunk, Final
from worker.engine.engine import ROUTE
from worker.engine.load import LoadedModel
from worker.speculation.executor import ROUTE as WIDE
from worker.speculation.ngram import Ngram

COVER = cases(0)
# Beside the cover itself.
PROMPTS = 500


def test_every_two_settings_meet_in_the_short_form() -> None:
    assert set.union(*map(pairs, COVER)) == all_pairs()
    assert 45 <= len(COVER) <= 60
    assert cases(PROMPTS)[: len(COVER)] == COVER


def check_all(stand: Stand, chosen: list[Case]) -> Tally:
    for case in chosen:
        stand.check(case)
    return stand.tally


def test_answers_with_drafts_are_those_without(tiny_model) -> None:
    found = [
        check_all(Stand(tiny_model(name)), [case for case in COVER if case.model == name])
        for name in FACTORS["model"]
    ]
    check_tally(sum(found, Tally()), len(COVER))


def check_tally(tally: Tally, count: int) -> None:
    assert tally.committed > 3 * count, "drafts are kept"
    assert tally.launched - tally.committed > 3 * count, "and refused"
    assert tally.wins > count / 20, "on branches too"
    assert tally.cut > count / 6, "and answers end inside of them"
    assert tally.dropped > count / 10, "while the next forward runs"


@pytest.mark.prove
@pytest.mark.parametrize("model", FACTORS["model"])
def test_five_hundred_answers_with_drafts_are_those_without(tiny_model, model: str) -> None:
    # A pool that these jobs fill: beginnings are evicted between them.
    stand = Stand(tiny_model(model), pages=16)
    chosen = [case for case in cases(PROMPTS) if case.model == model]
    check_tally(check_all(stand, chosen), len(chosen))


def case_of(**settings: object) -> Case:
    usual = {"seed": 1, "model": "llama", "drafter": "oracle", "depth": 7, "trees": True}
    return Case(**usual | {"sampler": "0.7", "end": "full", "cache": True, "eager": True} | settings)


@pytest.mark.parametrize(
    ("model", "sampler"), [("llama", "1.0"), ("llama", "penalties over 20"), ("qwen3", "penalties over all")]
)
def test_an_attempt_interrupted_after_any_token_goes_on_with_the_same_ids(tiny_model, model, sampler) -> None:
    stand = Stand(tiny_model(model))
    body = {"token_ids": list(range(20, 50)), "max_tokens": 18, **SAMPLERS[sampler]}
    whole, final = stand.plain(body, 3)
    ids = ids_of(whole)
    oracle = Oracle((*body["token_ids"], *ids), stand.room.loaded.vocabulary, 0.2)
    for done in range(len(ids) + 1):
        drawn = tuple(ids[:done])
        for drafter in (oracle, Ngram()):
            rest, other = stand.drafted(drafter, case_of(), body, 3, frozenset(), drawn)
            assert rest == whole[done:], done
            assert last_word(other) == last_word(final)
            wide = len(ids) - done >= 3
            assert other.route == (WIDE if wide else ROUTE), "what is too short for a draft is not drafted"


def test_answers_up_to_the_last_position_of_context_and_pool_are_those_without_drafts(tiny_model) -> None:
    loaded = tiny_model("llama")
    for pages in (40, 5):
        stand = Stand(loaded, pages)
        room = min(loaded.context, stand.room.engine.capacity)
        assert (room == loaded.context) is (pages == 40)
        for length in range(room - 20, room, 3):
            tokens = [place * 7 % 200 + 4 for place in range(length)]
            body = {"token_ids": tokens, "max_tokens": 100, "temperature": 0.9, "cache": "answers"}
            whole, final = stand.plain(body, length)
            assert final.completion_tokens == room - length
            oracle = Oracle((*tokens, *ids_of(whole)), loaded.vocabulary, 0.0)
            chunks, other = stand.drafted(oracle, case_of(depth=15), body, length)
            assert (chunks, last_word(other)) == (whole, last_word(final))


def test_a_job_that_wants_no_speculation_runs_as_if_there_were_none(tiny_model) -> None:
    stand = Stand(tiny_model("llama"))
    body = {"token_ids": [9, 8, 7] * 5, "max_tokens": 20, "temperature": 0.8}
    whole, final = stand.plain(body, 3)
    oracle = Oracle((*body["token_ids"], *ids_of(whole)), stand.room.loaded.vocabulary, 0.0)
    off = {**body, "speculation": "off"}
    for asked, wide in ((off, False), (body, True), (off, False)):
        chunks, other = stand.drafted(oracle, case_of(), asked, 3)
        assert (chunks, last_word(other)) == (whole, last_word(final))
        assert (other.route == WIDE) is wide
        if wide:
            assert other.speculation["rows_committed"] > 10
        else:
            # Nothing of the job before: the words of a worker without an executor, but for the reason.
            assert {**other.speculation, "why": ""} == {**final.speculation, "why": ""}
            assert other.speculation["why"] == "the job asks for no speculation"


def test_edge_budgets_are_refused_and_honoured_with_drafts_as_without(tiny_model) -> None:
    stand = Stand(tiny_model("llama"))
    prompt = [5, 6, 7] * 6
    for bad in (0, -1, -5, None, True, 2**63):
        with pytest.raises(BadJobError):
            stand.drafted(Ngram(), case_of(), {"token_ids": prompt, "max_tokens": bad}, 1)
    with pytest.raises(BadJobError):
        stand.drafted(Ngram(), case_of(), {"token_ids": []}, 1)
    for budget in range(1, 7):
        body = {"token_ids": prompt, "max_tokens": budget}
        whole, final = stand.plain(body, 1)
        oracle = Oracle((*prompt, *ids_of(whole)), stand.room.loaded.vocabulary, 0.0)
        chunks, other = stand.drafted(oracle, case_of(depth=15), body, 1)
        assert (chunks, last_word(other)) == (whole, last_word(final))


def test_a_top_k_beyond_the_vocabulary_spoils_no_later_job(tiny_model) -> None:
    stand = Stand(tiny_model("llama"))
    body = {"token_ids": [5, 6, 7] * 6, "max_tokens": 12, "temperature": 0.9}
    fresh = stand.plain(body, 1)[0]
    for top_k in (5000, 2**31 - 1):
        wide = stand.drafted(Ngram(), case_of(), {**body, "top_k": top_k}, 1)[0]
        assert wide == fresh, "it filters nothing"
        assert stand.drafted(Ngram(), case_of(), body, 1)[0] == fresh
        assert stand.plain(body, 1)[0] == fresh


def test_padded_rows_are_never_drawn_though_they_be_drafted(tiny_model) -> None:
    loaded = tiny_model("llama")
    assert loaded.vocabulary < loaded.width
    stand, body = Stand(loaded), {"token_ids": [5, 6, 7] * 6, "max_tokens": 60, "temperature": 100.0}
    whole, final = stand.plain(body, 1)
    assert max(ids_of(whole)) < loaded.vocabulary
    drafter = Careless(loaded.width, least=loaded.vocabulary)
    for trees in (True, False):
        chunks, other = stand.drafted(drafter, case_of(depth=15, trees=trees), body, 1)
        assert (chunks, last_word(other)) == (whole, last_word(final))
        assert other.speculation["rows_committed"] == 0


# Where the model is the real one: what there is to draft, and how it is drawn.
COMBINATIONS = [
    case_of(sampler=sampler, drafter=drafter, depth=depth, trees=trees)
    for sampler, drafter, depth, trees in (
        ("greedy", "ngram", 7, True),
        ("0.7", "oracle that errs", 3, True),
        ("1.0", "oracle", 15, False),
        ("greedy", "oracle that errs", 3, False),
        ("0.7", "ngram", 3, False),
        ("1.0", "oracle that errs", 3, True),
    )
]
QUESTIONS = (
    "Explain why the sky is blue.", "Repeat: one two three one two three one two three.", "Name four colours.",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return", "Write a haiku about rain.",
    "What is 12 times 12?", "List the days of the week twice.", "Translate to French: good morning, good morning.",
    "for i in range(10):\n    print(i)\nfor j in range(10):\n    print(", "Who wrote Hamlet?",
    "Summarise: the cat sat on the mat, and the cat was glad.", "Tell me a story about a fox.",
    "Spell the word necessary.", "What do bees make?", "Count from one to ten, then back.", "Give me a recipe for tea.",
    '{"a": 1, "b": 2, "a": 1, "b":', "Why do leaves fall?", "Say hello hello hello.", "What is a noun?",
)  # fmt: skip


class Real:
    """The real model, and what it answers without drafts."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.stand = Stand(loaded)
        self.plain = cache(self._plain)

    def _body(self, sampler: str, seed: int) -> dict[str, Any]:
        prompt = self.stand.room.loaded.tokenizer.encode(QUESTIONS[seed])
        return {"token_ids": prompt, "max_tokens": 24, **SAMPLERS[sampler]}

    def _plain(self, sampler: str, seed: int) -> tuple[list[Chunk], Final]:
        return self.stand.plain(self._body(sampler, seed), seed)

    def check(self, case: Case, seed: int) -> None:
        whole, final = self.plain(case.sampler, seed)
        body = self._body(case.sampler, seed)
        text, vocabulary = (*body["token_ids"], *ids_of(whole)), self.stand.room.loaded.vocabulary
        drafter = Ngram() if case.drafter == "ngram" else Oracle(text, vocabulary, ORACLES[case.drafter])
        chunks, other = self.stand.drafted(drafter, case, body, seed)
        assert chunks == whole, QUESTIONS[seed]
        assert last_word(other) == last_word(final)


@pytest.fixture(scope="module")
def real(smollm2: LoadedModel) -> Real:
    return Real(smollm2)


@pytest.mark.prove
@pytest.mark.parametrize("case", COMBINATIONS, ids=lambda one: f"{one.sampler}, {one.drafter}, {one.depth}")
def test_twenty_answers_of_the_real_model_with_drafts_are_those_without(real: Real, case: Case) -> None:
    assert len(QUESTIONS) == 20
    real.stand.tally = Tally()
    for seed in range(len(QUESTIONS)):
        real.check(case, seed)
    assert real.stand.tally.committed > 10
