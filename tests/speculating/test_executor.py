"""A job with drafts has the ids of a job without, whatever drafts, sampling or end."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from engines import build
from speculating.oracle import LINEAR, Oracle, executor
from tiny_models import make_tiny

from worker.engine.draw import Draws
from worker.engine.engine import EngineRequest, NumericError, Step, unheard
from worker.engine.load import LoadedModel, load
from worker.engine.sample import Sampling
from worker.engine.verify_bank import SIZES
from worker.speculation.draft import Draft, Proposal
from worker.speculation.executor import ROUTE
from worker.speculation.ngram import Ngram
from worker.width import Meta, WidthError, WidthGate, WidthPlan

TOKENS = 40


def run(engine: object, request: EngineRequest, steps: int) -> list[Step]:
    engine.start(request, unheard)
    return [engine.step() for _ in range(steps)]


def samplings() -> list[Sampling]:
    return [
        Sampling(seed=1),
        Sampling(seed=2, temperature=0.7),
        Sampling(seed=3, temperature=1.0, top_p=0.9, logprobs=3),
        Sampling(seed=4, temperature=1.0, top_k=12, min_p=0.01, repetition_penalty=1.2),
        Sampling(seed=5, frequency_penalty=0.5, presence_penalty=0.2, penalty_window=0, logprobs=2),
    ]


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3", "qwen3_5", "granite_hybrid"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(make_tiny(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("sampling", samplings(), ids=lambda one: str(one.seed))
def test_an_answer_with_drafts_is_the_answer_without(
    loaded: LoadedModel, sampling: Sampling, share: float
) -> None:
    engine = build(loaded).engine
    prompt = tuple(place * 7 % loaded.vocabulary for place in range(29 + sampling.seed))
    request = EngineRequest(prompt=prompt, sampling=sampling, max_tokens=TOKENS, cache=False)
    plain = run(engine, request, TOKENS)
    engine.stop()
    answer = [step.token for step in plain]
    drafter = Oracle((*prompt, *answer), loaded.vocabulary, share)
    wide = executor(engine, drafter).run(WidthPlan(engine.forward.width), engine)
    drafted = run(wide, request, TOKENS)
    figures = wide.stop()
    assert [step.token for step in drafted] == answer
    assert wide.width in figures.widths or not figures.drafted
    if engine.forward.trees:
        assert [step.logprobs for step in drafted] == [step.logprobs for step in plain]
    assert not drafter.held
    assert figures.route == ROUTE
    if share == 0.0:
        assert figures.verify_forwards < TOKENS / 2, "what is right is kept"
        assert figures.drafting["rows_committed"] == figures.drafted
    assert figures.drafting["rows_launched"] == sum((rows - 1) * count for rows, count in figures.widths.items())
    engine.index.pages.check()


@pytest.mark.parametrize("cut", range(1, 14))
def test_an_answer_may_end_inside_an_accepted_block_and_leaves_what_a_plain_one_leaves(
    loaded: LoadedModel, cut: int
) -> None:
    engine = build(loaded).engine
    prompt = tuple(place * 5 % loaded.vocabulary for place in range(33))
    request = EngineRequest(prompt=prompt, sampling=Sampling(seed=9, temperature=0.8), max_tokens=TOKENS)
    answer = [step.token for step in run(engine, request, TOKENS)]
    engine.stop()
    drafter = Oracle((*prompt, *answer), loaded.vocabulary, 0.0)
    wide = executor(engine, drafter).run(WidthPlan(engine.forward.width), engine)
    assert [step.token for step in run(wide, request, cut)] == answer[:cut]
    wide.stop()
    engine.index.pages.check()
    assert not engine.index.pages.sequences
    # What was left behind serves the next job: it is that of a cold one.
    longer = EngineRequest(
        prompt=(*prompt, *answer[:cut], 3), sampling=Sampling(seed=1), max_tokens=6, cache="answers"
    )
    warm = [step.token for step in run(engine, longer, 6)]
    engine.stop()
    cold = build(loaded).engine
    assert [step.token for step in run(cold, longer, 6)] == warm


def test_a_budget_is_not_drafted_beyond(loaded: LoadedModel) -> None:
    engine = build(loaded).engine
    for budget in range(1, 9):
        request = EngineRequest(prompt=(1, 2, 3), sampling=Sampling(seed=9), max_tokens=budget, cache=False)
        answer = [step.token for step in run(engine, request, budget)]
        engine.stop()
        drafter = Oracle((1, 2, 3, *answer, *[0] * 20), loaded.vocabulary, 0.0)
        wide = executor(engine, drafter).run(WidthPlan(engine.forward.width), engine)
        assert [step.token for step in run(wide, request, budget)] == answer
        with pytest.raises(RuntimeError, match="budget"):
            wide.step()
        wide.stop()


def test_the_next_draft_runs_while_the_ids_of_the_last_are_handed_out_and_is_dropped_with_the_job(
    loaded: LoadedModel,
) -> None:
    engine = build(loaded).engine
    request = EngineRequest(prompt=(1, 2, 3), sampling=Sampling(seed=9), max_tokens=TOKENS, cache=False)
    answer = [step.token for step in run(engine, request, TOKENS)]
    engine.stop()
    drafter = Oracle((1, 2, 3, *answer), loaded.vocabulary, 0.0)
    wide = executor(engine, drafter, width=5).run(WidthPlan(5), engine)
    for cut in range(2, 12):
        assert [step.token for step in run(wide, request, cut)] == answer[:cut]
        assert engine._run is not None
        assert engine._run.flights
        figures = wide.stop()
        assert figures.drafted == 4 * figures.widths[5], "a forward that was dropped is not told"
        engine.index.pages.check()
        assert not engine.index.pages.sequences
    assert [step.token for step in run(wide, request, TOKENS)] == answer
    wide.stop()


def test_width_one_is_the_serial_path_itself_and_a_wider_plan_needs_an_executor(loaded: LoadedModel) -> None:
    engine = build(loaded).engine
    gate = WidthGate(engine)
    meta = Meta(speculation="auto", prompt=5, budget=50)
    assert gate.engine(gate.plan(meta)) is engine
    with pytest.raises(WidthError, match="width 4"):
        gate.engine(WidthPlan(4))
    gate.executor = executor(engine, Ngram())
    assert gate.plan(meta).width == engine.forward.width
    assert gate.engine(gate.plan(meta)) is not engine
    assert gate.width == 1, "before its first forward"
    off = gate.plan(Meta(speculation="off", prompt=5, budget=50))
    assert gate.engine(off) is engine
    assert "asks" in off.why


def test_where_every_row_costs_a_forward_all_jobs_are_planned_at_width_one(loaded: LoadedModel) -> None:
    engine = build(loaded).engine
    found = executor(engine, Ngram(), LINEAR)
    assert found.width == 1
    assert "cost" in found.plan(Meta(speculation="auto", prompt=5, budget=50)).why


def test_numbers_that_are_none_end_a_job_with_drafts_as_they_end_a_plain_one(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(loaded).engine
    request = EngineRequest(prompt=(1, 2, 3), sampling=Sampling(seed=9), max_tokens=20, cache=False)
    answer = [step.token for step in run(engine, request, 20)]
    engine.stop()
    rows, calls = engine.forward.rows, [0]

    def spoiled(tokens: object, parents: object = None) -> object:
        calls[0] += 1
        logits = rows(tokens, parents)
        return logits * float("nan") if calls[0] == 2 else logits

    monkeypatch.setattr(engine.forward, "rows", spoiled)
    drafter = Oracle((1, 2, 3, *answer), loaded.vocabulary, 0.0)
    wide = executor(engine, drafter).run(WidthPlan(engine.forward.width), engine)
    got: list[int] = []
    wide.start(request, unheard)
    with pytest.raises(NumericError):
        got.extend(wide.step().token for _ in range(20))
    wide.stop()
    assert got == answer[: len(got)]
    assert len(got) < 20
    engine.index.pages.check()


@pytest.mark.parametrize("sampling", samplings()[1:4:2], ids=lambda one: str(one.seed))
def test_in_place_forwards_and_draws_run_the_sizes_that_are_compiled_and_no_other(
    sampling: Sampling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(make_tiny("llama", tmp_path))
    engine = build(loaded, prefill_rows=32, form="in place").engine
    engine.forward.trees = True
    request = EngineRequest(
        prompt=tuple(place * 3 % 50 for place in range(40)), sampling=sampling, max_tokens=TOKENS, cache=False
    )
    answer = [step.token for step in run(engine, request, TOKENS)]
    engine.stop()
    seen: set[tuple[int, int]] = set()
    rows = Draws.rows

    def noted(draws: Draws, logits: mx.array, tokens: mx.array, *rest: Any) -> Any:
        seen.add((logits.shape[0], tokens.size))
        return rows(draws, logits, tokens, *rest)

    monkeypatch.setattr(Draws, "rows", noted)
    drafter = Oracle((*request.prompt, *answer), loaded.vocabulary, 0.25)
    wide = executor(engine, drafter, clock=lambda: 0.0).run(WidthPlan(engine.forward.width), engine)
    assert [step.token for step in run(wide, request, TOKENS)] == answer
    widths = wide.stop().widths
    assert set(widths) - set(SIZES), "rows are told as they were wanted"
    assert seen <= {(size, size) for size in SIZES[1:]}
    engine.index.pages.check()


class Sparing(Ngram):
    """Finds fewer forks for the draft than it spoke of."""

    def propose(self, limit: int, forks: int = 0) -> Proposal:
        found = super().propose(limit, forks)
        if found.draft.is_chain:
            return found
        return found._replace(draft=Draft.chain(found.draft.tokens[: found.draft.trunk]))


@pytest.mark.parametrize("drafter", [Ngram, Sparing])
def test_forks_are_counted_where_they_were_verified_and_not_where_they_were_planned(
    tiny_model, drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = tiny_model("llama")
    engine = build(loaded).engine
    launched: list[Draft] = []
    launch = engine.launch
    monkeypatch.setattr(engine, "launch", lambda draft, *rest: (launched.append(draft), launch(draft, *rest))[1])
    told = {"fork_attempts": 0, "fork_wins": 0}
    planned = 0
    for seed in range(8):
        luck = random.Random(seed)
        prompt = tuple(luck.choice((5, 6, 7, 8)) for _ in range(80))
        bias = dict.fromkeys((5, 6, 7, 8), 60.0)
        sampling = Sampling(seed=seed, temperature=1.0, logit_bias=bias)
        request = EngineRequest(prompt=prompt, sampling=sampling, max_tokens=TOKENS, cache=False)
        parts = executor(engine, drafter()).run(WidthPlan(engine.forward.width), engine)
        planner = parts._planner
        plan = planner.plan

        def noted(*asked: Any, plan: Any = plan) -> Any:
            nonlocal planned
            found = plan(*asked)
            planned += found.forks
            return found

        monkeypatch.setattr(planner, "plan", noted)
        run(parts, request, TOKENS)
        figures = parts.stop().drafting
        told = {name: count + figures[name] for name, count in told.items()}
    verified = sum(len(draft) - len(set(draft.parents)) for draft in launched)
    assert planned > 5
    assert told["fork_attempts"] == verified
    assert (verified > 5) is (drafter is Ngram)
