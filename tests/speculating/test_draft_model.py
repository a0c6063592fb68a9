"""A second model drafts with the target's own noise: the answer stays, and how much is kept says how alike they are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from engines import build
from tiny_models import Kind, make_llama, make_mamba, make_tiny
from tiny_models.classic import PADDED_ROWS
from transformers import AutoTokenizer

from mtplx.errors import ModelFilesError, SettingsError
from mtplx.settings import Settings
from worker.engine import draw_tree, memory
from worker.engine.draw import Draws, place
from worker.engine.engine import Cancelled, EngineRequest, Figures, NumericError, unheard
from worker.engine.load import LoadedModel, load
from worker.engine.memory import Room as Memory
from worker.engine.same_tokenizer import difference
from worker.engine.sample import Sampling, gumbel, key
from worker.engine.serial import SerialEngine
from worker.speculation import build as speculation
from worker.speculation.build import draft_model, width
from worker.speculation.costs import Costs, Measured
from worker.speculation.draft import MAX_NODES, Terms
from worker.speculation.draft_model import DraftModel
from worker.speculation.executor import HyperWidthExecutor, Parts, SpeculatingEngine
from worker.width import WidthPlan

# Rows are free, and so is a drafted token: all that may be drafted is.
FREE = Costs((1, 16), (0,), ((1.0, 1.001),), 0.0, draft_ms=1e-4)
TOKENS = 48
PROMPT = tuple(place * 7 % 260 for place in range(29))


def samplings() -> list[Sampling]:
    return [
        Sampling(seed=1),
        Sampling(seed=2, temperature=0.7),
        Sampling(seed=3, temperature=1.0, top_p=0.9, logprobs=3),
        Sampling(seed=4, temperature=1.0, top_k=12, min_p=0.01, repetition_penalty=1.2),
        Sampling(seed=5, temperature=0.9, frequency_penalty=0.5, presence_penalty=0.2, penalty_window=0),
        Sampling(seed=6, repetition_penalty=1.3, penalty_window=5, logit_bias={7: 2.0, 9: -1.0}),
    ]


each_sampling = pytest.mark.parametrize("sampling", samplings(), ids=lambda one: str(one.seed))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(make_llama(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(make_llama(tmp_path_factory.mktemp("small"), Kind(layers=1, seed=7)))


@pytest.fixture(scope="module")
def alike(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """The target with a little noise on its weights."""
    folder = make_llama(tmp_path_factory.mktemp("alike"))
    weights = mx.load(str(folder / "model.safetensors"))
    keys = iter(mx.random.split(mx.random.key(3), len(weights)))
    noisy = {
        name: one + 0.06 * mx.abs(one).mean() * mx.random.normal(one.shape, key=next(keys))
        for name, one in weights.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), noisy, metadata={"format": "mlx"})
    return load(folder)


Pair = tuple[SerialEngine, DraftModel]


@pytest.fixture(scope="module")
def pair(target: LoadedModel) -> Pair:
    """An engine, and its own model as drafter: their jobs follow each other."""
    return build(target).engine, drafter_of(target, target)


def ticking() -> Callable[[], float]:
    def ticks() -> Iterator[float]:
        now = 0.0
        while True:
            now += 0.001
            yield now

    clock = ticks()
    return lambda: next(clock)


def drafter_of(draft: LoadedModel, target: LoadedModel, **options: int) -> DraftModel:
    engine = build(draft, **options).engine
    assert isinstance(engine, SerialEngine)
    return DraftModel(draft, engine, target.width)


def speculating(engine: SerialEngine, drafter: DraftModel, costs: Costs = FREE) -> SpeculatingEngine:
    parts = Parts(drafter=drafter, measured=Measured(costs), trees=engine.forward.trees, clock=ticking())
    wide = HyperWidthExecutor(parts, engine.forward.width).run(WidthPlan(engine.forward.width), engine)
    assert isinstance(wide, SpeculatingEngine)
    return wide


def ids_of(engine: object, request: EngineRequest, steps: int | None = None) -> list[int]:
    engine.start(request, unheard)
    return [engine.step().token for _ in range(steps or request.max_tokens)]


def plain(engine: SerialEngine, request: EngineRequest) -> list[int]:
    ids = ids_of(engine, request)
    engine.stop()
    return ids


def all_kept(figures: Figures) -> int:
    """How many ids were drafted, every one of which was kept; runners-up had no chance."""
    told = figures.drafting
    assert told["fork_wins"] == 0
    assert told["rows_committed"] == figures.drafted - told["fork_attempts"]
    return told["rows_committed"]


def check_books(engine: SerialEngine, drafter: DraftModel) -> None:
    for index in (engine.index, drafter.index):
        assert not index.pages.sequences, "an ended job holds pages"
        assert index.pages.free + index.pages_held == index.pages.count
        index.check()
        index.pages.check()


@each_sampling
@pytest.mark.parametrize("which", ["small", "alike"])
def test_an_answer_with_a_draft_model_is_the_answer_without(
    target: LoadedModel, pair: Pair, which: str, sampling: Sampling, request: pytest.FixtureRequest
) -> None:
    engine, drafter = pair[0], drafter_of(request.getfixturevalue(which), target)
    job = EngineRequest(prompt=PROMPT, sampling=sampling, max_tokens=TOKENS)
    answer = plain(engine, job)
    wide = speculating(engine, drafter)
    assert ids_of(wide, job) == answer
    figures = wide.stop()
    assert figures.drafted > 0
    if which == "alike":
        assert figures.drafting["rows_committed"] > 0, "a model that is nearly the target is kept"
    check_books(engine, drafter)


@each_sampling
def test_the_target_itself_as_its_draft_is_always_kept(pair: Pair, sampling: Sampling) -> None:
    engine, drafter = pair
    job = EngineRequest(prompt=PROMPT, sampling=sampling, max_tokens=3 * TOKENS, cache=False)
    answer = plain(engine, job)
    wide = speculating(engine, drafter)
    assert ids_of(wide, job) == answer
    figures = wide.stop()
    assert all_kept(figures) > 2 * TOKENS
    assert figures.verify_forwards < TOKENS
    check_books(engine, drafter)


@pytest.mark.parametrize("rows", [0, 3, PADDED_ROWS + 9])
@pytest.mark.parametrize("sampling", samplings()[:3], ids=lambda one: str(one.seed))
def test_a_head_padded_otherwise_draws_with_the_same_noise(
    target: LoadedModel, sampling: Sampling, rows: int, tmp_path: Path
) -> None:
    folder = make_llama(tmp_path)
    weights = mx.load(str(folder / "model.safetensors"))
    name = "model.embed_tokens.weight"
    table = weights[name][: target.vocabulary]
    weights[name] = mx.concatenate([table, mx.full((rows, table.shape[1]), 5.0)])
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": target.vocabulary + rows}))
    draft = load(folder)
    assert draft.width != target.width
    assert not difference(target, draft)
    engine, drafter = build(target).engine, drafter_of(draft, target)
    job = EngineRequest(prompt=PROMPT, sampling=sampling, max_tokens=TOKENS, cache=False)
    answer = plain(engine, job)
    wide = speculating(engine, drafter)
    assert ids_of(wide, job) == answer
    figures = wide.stop()
    assert all_kept(figures) > 0


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "granite_hybrid"])
def test_targets_of_every_lane_take_drafts_of_a_model(family: str, tmp_path: Path) -> None:
    for name in ("goal", "draft"):
        (tmp_path / name).mkdir()
    goal = load(make_tiny(family, tmp_path / "goal"))
    draft = load(make_llama(tmp_path / "draft", Kind(layers=1)))
    assert not difference(goal, draft)
    engine, drafter = build(goal).engine, drafter_of(draft, goal)
    job = EngineRequest(prompt=PROMPT, sampling=Sampling(seed=8, temperature=0.8), max_tokens=24)
    answer = plain(engine, job)
    wide = speculating(engine, drafter)
    assert ids_of(wide, job) == answer
    assert wide.stop().drafted > 0
    check_books(engine, drafter)


def test_runners_up_are_verified_beside_the_trunk_and_win(target: LoadedModel, alike: LoadedModel) -> None:
    attempts = wins = 0
    for seed in range(6):
        engine, drafter = build(target).engine, drafter_of(alike, target)
        sampling = Sampling(seed=seed, temperature=1.0)
        job = EngineRequest(prompt=PROMPT, sampling=sampling, max_tokens=TOKENS, cache=False)
        answer = plain(engine, job)
        wide = speculating(engine, drafter)
        assert ids_of(wide, job) == answer
        told = wide.stop().drafting
        attempts, wins = attempts + told["fork_attempts"], wins + told["fork_wins"]
        check_books(engine, drafter)
    assert attempts > wins > 0


@pytest.mark.parametrize("cut", range(1, 14))
def test_an_answer_may_end_inside_an_accepted_block(target: LoadedModel, pair: Pair, cut: int) -> None:
    engine, drafter = pair
    job = EngineRequest(prompt=PROMPT, sampling=Sampling(seed=9, temperature=0.8), max_tokens=TOKENS)
    answer = plain(engine, job)
    wide = speculating(engine, drafter)
    assert ids_of(wide, job, cut) == answer[:cut]
    wide.stop()
    check_books(engine, drafter)
    # The next job of the same beginning reuses what both models kept of it, and says the same.
    longer = EngineRequest(prompt=(*PROMPT, *answer[:cut], 3), sampling=Sampling(seed=1), max_tokens=12)
    assert ids_of(wide, longer) == plain(build(target).engine, longer)
    figures = wide.stop()
    assert all_kept(figures) > 0
    assert drafter.index.figures.reused_tokens > 0
    check_books(engine, drafter)


@pytest.mark.parametrize("budget", range(1, 9))
def test_a_budget_is_not_drafted_beyond(pair: Pair, budget: int) -> None:
    engine, drafter = pair
    job = EngineRequest(prompt=(1, 2, 3), sampling=Sampling(seed=9), max_tokens=budget, cache=False)
    answer = plain(engine, job)
    wide = speculating(engine, drafter)
    assert ids_of(wide, job) == answer
    with pytest.raises(RuntimeError, match="budget"):
        wide.step()
    wide.stop()
    check_books(engine, drafter)


@pytest.mark.parametrize("before", [1, 5, 16, 37])
@each_sampling
def test_an_answer_that_is_resumed_goes_on_as_it_would_have(pair: Pair, sampling: Sampling, before: int) -> None:
    engine, drafter = pair
    job = EngineRequest(prompt=PROMPT, sampling=sampling, max_tokens=TOKENS, cache=False)
    answer = plain(engine, job)
    rest = replace(job, drawn=tuple(answer[:before]), max_tokens=TOKENS - before)
    wide = speculating(engine, drafter)
    assert ids_of(wide, rest) == answer[before:]
    figures = wide.stop()
    all_kept(figures)
    check_books(engine, drafter)


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_a_cancel_while_either_model_reads_the_prompt_leaves_nothing_behind(
    target: LoadedModel, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.speculation.draft_model._CHUNK", 16)
    engine, drafter = build(target, prefill_rows=512).engine, drafter_of(target, target)
    wide = speculating(engine, drafter)
    heard = [0]

    def progress(_done: int, _total: int) -> None:
        heard[0] += 1
        if heard[0] > after:
            raise Cancelled

    job = EngineRequest(prompt=PROMPT * 2, sampling=Sampling(seed=9), max_tokens=TOKENS)
    with pytest.raises(Cancelled):
        wide.start(job, progress)
    wide.stop()
    check_books(engine, drafter)
    assert ids_of(wide, job) == plain(build(target).engine, job)
    wide.stop()
    check_books(engine, drafter)


def test_a_text_that_outgrows_the_draft_model_goes_on_without(target: LoadedModel, tmp_path: Path) -> None:
    short = load(make_llama(tmp_path, Kind(context=40)))
    engine, drafter = build(target).engine, drafter_of(short, target)
    for prompt in (PROMPT, PROMPT * 2):
        job = EngineRequest(prompt=prompt, sampling=Sampling(seed=9), max_tokens=TOKENS, cache=False)
        answer = plain(engine, job)
        wide = speculating(engine, drafter)
        assert ids_of(wide, job) == answer
        figures = wide.stop()
        assert (figures.drafted > 0) == (len(prompt) < 40)
        all_kept(figures)
        check_books(engine, drafter)


def test_a_draft_model_whose_numbers_are_none_drafts_nothing_and_changes_nothing(
    target: LoadedModel, tmp_path: Path
) -> None:
    engine = build(target).engine
    drafter = drafter_of(load(make_llama(tmp_path, Kind(spoiled=True))), target)
    job = EngineRequest(prompt=PROMPT, sampling=Sampling(seed=9), max_tokens=TOKENS)
    answer = plain(engine, job)
    wide = speculating(engine, drafter)
    assert ids_of(wide, job) == answer
    assert wide.stop().drafted == 0
    check_books(engine, drafter)


def test_numbers_of_the_target_that_are_none_end_the_job_as_they_end_a_plain_one(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, drafter = pair
    job = EngineRequest(prompt=PROMPT, sampling=Sampling(seed=9), max_tokens=TOKENS, cache=False)
    answer = plain(engine, job)
    rows, calls = engine.forward.rows, [0]

    def spoiled(tokens: mx.array, parents: tuple[int, ...] | None = None) -> mx.array:
        calls[0] += 1
        return rows(tokens, parents) * (float("nan") if calls[0] == 2 else 1)

    monkeypatch.setattr(engine.forward, "rows", spoiled)
    wide = speculating(engine, drafter)
    got: list[int] = []
    wide.start(job, unheard)
    with pytest.raises(NumericError):
        got.extend(wide.step().token for _ in range(TOKENS))
    wide.stop()
    assert got == answer[: len(got)]
    check_books(engine, drafter)


def test_a_draft_that_was_left_alone_reads_what_it_missed(target: LoadedModel) -> None:
    drafter = drafter_of(target, target)
    sampling = Sampling(seed=2, temperature=0.8, repetition_penalty=1.2)
    engine = build(target).engine
    job = EngineRequest(prompt=PROMPT, sampling=sampling, max_tokens=TOKENS, cache=False)
    answer = plain(engine, job)
    drafter.begin(PROMPT, sampling, Terms(budget=TOKENS))
    at = 0
    for more in (1, 16, 3, 20):
        for token in answer[at : at + more]:
            drafter.extend((token,))
        at += more
        drafter.catch_up()
        assert len(PROMPT) + at - drafter.index.pages.sequences.copy().pop().length <= 2
        drafted = drafter.propose(5, 0).draft.tokens
        assert list(drafted) == answer[at : at + 5]
        assert drafter.propose(5, 0).draft.tokens == drafted
        assert drafter.propose(2, 0).draft.tokens == drafted[:2]
    drafter.end()
    drafter.index.pages.check()


def test_drafted_tokens_are_read_together(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = pair[1]
    drafter.begin(PROMPT, Sampling(seed=2, temperature=0.8), Terms(budget=TOKENS))
    drafter.extend((5,))
    reads = []
    real = mx.concatenate
    monkeypatch.setattr(mx, "concatenate", lambda parts, **named: reads.append(len(parts)) or real(parts, **named))
    waits = []
    evaluate = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *arrays: waits.append(arrays) or evaluate(*arrays))
    assert len(drafter.propose(8, 0).draft) == 8
    assert reads.count(24) == 1, "tokens, runners-up and gaps come in one"
    assert not waits
    drafter.end()


@each_sampling
def test_a_margin_is_the_gap_between_the_two_best_perturbed_scores(sampling: Sampling) -> None:
    width, history = 11, [1, 2, 3, 2]
    logits = mx.random.normal((1, width), key=mx.random.key(sampling.seed)) * 3
    sampling = replace(sampling, top_p=1.0, top_k=0, min_p=0.0, logit_bias={}, logprobs=0)
    ranked = Draws(sampling, history, width=width, vocabulary=width - 1, ranked=True)
    drawn = ranked(logits, place(4))
    assert drawn.second is not None
    without = Draws(sampling, history, width=width, vocabulary=width - 1)(logits, place(4))
    assert drawn.token.item() == without.token.item()
    assert without.second is None
    scores = np.array(logits[0, : width - 1], dtype=np.float64)
    recent = history[-sampling.penalty_window :] if sampling.penalty_window else history
    counts = np.bincount(recent, minlength=width - 1)
    repeated = np.where(scores < 0, scores * sampling.repetition_penalty, scores / sampling.repetition_penalty)
    scores = (
        np.where(counts > 0, repeated - sampling.presence_penalty, scores) - counts * sampling.frequency_penalty
    )
    if sampling.temperature:
        scores = scores - np.log(np.exp(scores).sum())
        noise = np.array(gumbel(key(sampling.seed, 4), width))[: width - 1]
        scores = scores / sampling.temperature + noise
    order = np.argsort(-scores, kind="stable")
    assert drawn.token.item() == order[0]
    assert drawn.second[0].item() == order[1]
    assert drawn.second[1].item() == pytest.approx(scores[order[0]] - scores[order[1]], rel=1e-4)


def test_what_follows_in_the_text_becomes_history_as_if_it_had_been_drawn() -> None:
    luck = np.random.default_rng(4)
    for window in (0, 3, 20):
        sampling = Sampling(seed=4, temperature=0.8, frequency_penalty=1.0, penalty_window=window)
        for more in (1, 2, 16, 17, 40):
            ids = [int(one) for one in luck.integers(0, 9, 5 + more)]
            told = Draws(sampling, ids[:5], width=9, vocabulary=9)
            aside = told.fork()
            told.extend(ids[5:])
            whole = Draws(sampling, ids, width=9, vocabulary=9)
            logits = mx.random.normal((1, 9), key=mx.random.key(more))
            assert told(logits, place(len(ids))).token.item() == whole(logits, place(len(ids))).token.item()
            first = Draws(sampling, ids[:5], width=9, vocabulary=9)
            assert aside(logits, place(5)).token.item() == first(logits, place(5)).token.item()


def test_memory_is_flat_over_many_jobs(target: LoadedModel, alike: LoadedModel) -> None:
    engine, drafter = build(target).engine, drafter_of(alike, target, pages=12)
    wide = speculating(engine, drafter)
    held = []
    for number in range(50):
        prompt = tuple((place * 7 + number) % 260 for place in range(20 + number % 30))
        job = EngineRequest(prompt=prompt, sampling=samplings()[number % 6], max_tokens=20)
        ids_of(wide, job, 2 + number % 19)
        wide.stop()
        check_books(engine, drafter)
        # What is remembered of shapes has a bound of its own.
        draw_tree._operand.cache_clear()
        mx.clear_cache()
        held.append(mx.get_active_memory())
    assert max(held[25:]) <= max(held[10:25]) + 4096


# Loading: what is refused, and what health is told.


def settings(draft: Path | str, tmp_path: Path) -> Settings:
    return Settings(draft=f"model:{draft}", cache_dir=tmp_path / "cache", run_dir=tmp_path / "run")


def renamed(folder: Path, change: Callable[[dict], None]) -> Path:
    path = folder / "tokenizer.json"
    words = json.loads(path.read_text())
    change(words)
    path.write_text(json.dumps(words))
    return folder


def swap(words: dict) -> None:
    vocabulary = words["model"]["vocab"]
    one, other = [token for token, number in vocabulary.items() if number in (40, 41)]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]


def test_a_tokenizer_that_differs_in_a_token_is_refused_with_the_token(
    target: LoadedModel, tmp_path: Path
) -> None:
    (tmp_path / "draft").mkdir()
    folder = renamed(make_llama(tmp_path / "draft"), swap)
    with pytest.raises(
        SettingsError, match=r"2 of its ids stand for other tokens: id 40 is .* not .*--draft auto"
    ):
        draft_model(settings(folder, tmp_path), target, 512, ticking())


def test_a_tokenizer_with_more_ids_is_refused_with_both_numbers(target: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    folder = make_llama(tmp_path / "draft")
    longer = AutoTokenizer.from_pretrained(folder)
    longer.add_tokens(["<tool>"])
    longer.save_pretrained(folder)
    with pytest.raises(
        SettingsError, match=rf"it has {target.vocabulary + 1} ids, and the model has {target.vocabulary}"
    ):
        draft_model(settings(folder, tmp_path), target, 512, ticking())


def test_ids_that_are_special_in_one_model_alone_are_refused(target: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    folder = make_llama(tmp_path / "draft")
    other = AutoTokenizer.from_pretrained(folder)
    other.pad_token = other.convert_ids_to_tokens(60)
    other.save_pretrained(folder)
    with pytest.raises(SettingsError, match="other ids are special: 60"):
        draft_model(settings(folder, tmp_path), target, 512, ticking())


def test_a_draft_model_that_memory_does_not_hold_is_refused_before_it_is_loaded(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "draft").mkdir()
    folder = make_llama(tmp_path / "draft")
    monkeypatch.setattr(memory, "room", lambda: Memory(total=10**6, used=10**6 - 1000))
    monkeypatch.setattr(speculation, "load", lambda _path: pytest.fail("it is not loaded"))
    with pytest.raises(SettingsError, match=r"its weights take .* --kv-memory.* something smaller"):
        draft_model(settings(folder, tmp_path), target, 512, ticking())


def test_a_model_with_a_recurrent_state_does_not_draft(target: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    folder = make_mamba(tmp_path / "draft")
    with pytest.raises(SettingsError, match="cannot be taken back"):
        draft_model(settings(folder, tmp_path), target, 512, ticking())


def test_a_draft_model_that_is_not_there_is_told_with_the_setting(target: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"--draft model:nowhere"):
        draft_model(settings("nowhere", tmp_path), target, 512, ticking())
    (tmp_path / "draft").mkdir()
    folder = make_llama(tmp_path / "draft")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFilesError, match=r"--draft model:.*has no model"):
        draft_model(settings(folder, tmp_path), target, 512, ticking())


def test_health_tells_the_drafter_its_model_and_what_a_token_costs(target: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    folder = make_llama(tmp_path / "small", Kind(layers=1))
    engine = build(target).engine
    assert isinstance(engine, SerialEngine)
    found = width(settings(folder, tmp_path), target, engine, ticking())
    assert found.info["draft"] == "model"
    told = found.info["draft_model"]
    assert told["model"] == "small"
    assert told["draft_ms"] > 0
    assert told["bytes"] > 0
    assert told["lane"] == "packed"
    # One job of the target's length, twice: the pool is bounded by what the target takes.
    assert told["pool"]["tokens"] <= 2 * (engine.capacity + MAX_NODES + 64)
    shutil.rmtree(folder)
