"""One job on a tiny model: what it yields, what it refuses, how it stops, and that nothing of it stays behind."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import pairwise

import mlx.core as mx
import pytest
from mlx_lm import stream_generate
from tiny_models import Kind, Room, make_llama, make_mamba

from mtplx.errors import BadJobError, JobError
from mtplx.job import Job
from mtplx.trajectory import trajectory_sha256
from worker.attempt import Attempt
from worker.engine.load import load
from worker.engine.sample import KeyedSampler, Sampling
from worker.job import run_job
from worker.width import WidthGate

# The random model would end its answer at a random place.
NO_END = {"logit_bias": {"1": -1000}}
PROMPT = {"prompt": "the quick brown fox", **NO_END}
SAMPLED = {**PROMPT, "temperature": 0.9}


def test_greedy_and_sampled_ids_are_those_of_mlx_lm(room, tiny):
    def ban(_tokens, logits):
        padded = mx.arange(tiny.width) >= tiny.vocabulary
        return mx.where(padded, -mx.inf, logits).at[:, 1].add(-1000)

    prompt = mx.array(tiny.tokenizer.encode("the quick brown fox"))
    for temperature in (0.0, 0.9):
        sampler = KeyedSampler(Sampling(seed=5, temperature=temperature), start=len(prompt))
        theirs = stream_generate(
            tiny.model, tiny.tokenizer, prompt, max_tokens=40, sampler=sampler, logits_processors=[ban]
        )
        assert room.ids({**PROMPT, "max_tokens": 40, "temperature": temperature}) == [r.token for r in theirs]


def test_chunks_are_gap_free_and_the_final_record_adds_up(room):
    chunks, final = room.run({**PROMPT, "max_tokens": 12})
    ids = [token for chunk in chunks for token in chunk.ids]
    assert [chunk.first for chunk in chunks] == list(range(12))
    assert (final.finish_reason, final.completion_tokens, final.max_tokens_used) == ("length", 12, 12)
    assert final.sha256 == trajectory_sha256(ids)
    assert final.prompt_tokens == len(room.loaded.tokenizer.encode("the quick brown fox"))
    assert (final.route, final.row_invariant, final.cached_tokens) == ("serial_b1", False, 0)
    assert final.speculation == {
        "drafted": 0,
        "accepted_by_depth": [],
        "verify_forwards": 12,
        "widths": {"1": 12},
        "why": "no width executor is installed",
    }
    assert 0 < final.prefill_s <= final.first_token_s
    assert final.decode_s == 11
    assert ("decode", 12, 12) in room.heard


def test_the_end_token_ends_the_answer_and_belongs_to_its_ids(room):
    chunks, final = room.run({"prompt": "the", "logit_bias": {"1": 1000}, "max_tokens": 9})
    assert [chunk.ids for chunk in chunks] == [(1,)]
    assert (final.finish_reason, chunks[0].text, final.sha256) == ("stop", "", trajectory_sha256([1]))


def test_a_stop_string_cuts_the_text_and_ends_the_ids_with_the_one_that_completed_it(room):
    chunks, _ = room.run({**PROMPT, "max_tokens": 40})
    text = "".join(chunk.text for chunk in chunks)
    stop = next(part for part in (text[i : i + 3] for i in range(8, len(text))) if text.count(part) == 1)
    stopped, final = room.run({**PROMPT, "max_tokens": 40, "stop": ["never", stop]})
    assert final.finish_reason == "stop"
    assert "".join(chunk.text for chunk in stopped) == text[: text.index(stop)]
    ids = [token for chunk in stopped for token in chunk.ids]
    assert ids == [token for chunk in chunks[: len(ids)] for token in chunk.ids]
    assert len(ids) < 40


@pytest.mark.parametrize("bad", ["V", "V+6", 999999])
def test_bias_ids_outside_the_real_vocabulary_are_refused(room, tiny, bad):
    token = {"V": tiny.vocabulary, "V+6": tiny.vocabulary + 6}.get(bad, bad)
    with pytest.raises(BadJobError, match=str(tiny.vocabulary - 1)) as caught:
        room.run({"prompt": "the", "logit_bias": {str(token): 1.0}})
    assert caught.value.field == "logit_bias"
    room.run({"prompt": "the", "logit_bias": {str(tiny.vocabulary - 1): 1.0}, "max_tokens": 1})


@pytest.mark.parametrize("bad", ["V", 100000])
def test_prompt_ids_outside_the_real_vocabulary_are_refused(room, tiny, bad):
    with pytest.raises(BadJobError) as caught:
        room.run({"token_ids": [5, tiny.vocabulary if bad == "V" else bad]})
    assert caught.value.field == "token_ids"


def test_padded_rows_are_never_drawn_by_a_job(room, tiny):
    ids = room.ids({**SAMPLED, "temperature": 100, "max_tokens": 120})
    assert max(ids) < tiny.vocabulary


@pytest.mark.parametrize(
    "body",
    [
        *({"prompt": "x", "max_tokens": budget} for budget in (0, -1, -5, None, True, 2**63)),
        {"prompt": ""},
        {"token_ids": []},
        {"messages": []},
        {},
    ],
)
def test_edge_budgets_and_empty_prompts_are_refused_and_the_next_job_works(room, body):
    with pytest.raises(BadJobError):
        room.run(body)
    assert len(room.ids({**PROMPT, "max_tokens": 2})) == 2


@pytest.mark.parametrize("length", [512, 513, 700])
def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers_before_any_forward(
    room, length, monkeypatch
):
    monkeypatch.setattr(room.engine, "start", lambda *_: pytest.fail("a forward ran"))
    for body in ({"token_ids": [5] * length}, {"prompt": "z" * (length - 1)}):
        with pytest.raises(BadJobError) as caught:
            room.run(body)
        assert caught.value.detail == {"prompt_tokens": length, "context": 512}


@pytest.mark.parametrize(
    ("length", "budget", "used"), [(511, 100, 1), (500, 100, 12), (500, 12, 12), (500, 11, 11)]
)
def test_a_budget_is_cut_to_what_fits_and_reported(room, length, budget, used):
    _, final = room.run({"token_ids": [5] * length, "max_tokens": budget, **NO_END})
    assert (final.finish_reason, final.completion_tokens, final.max_tokens_used) == ("length", used, used)


@pytest.mark.parametrize("length", [100, 101, 400])
def test_a_prompt_that_fills_the_engines_memory_is_refused_with_both_numbers_before_any_forward(
    room, length, monkeypatch
):
    room.engine.capacity = 100
    monkeypatch.setattr(room.engine, "start", lambda *_: pytest.fail("a forward ran"))
    for body, name in (({"token_ids": [5] * length}, "token_ids"), ({"prompt": "z" * (length - 1)}, "prompt")):
        with pytest.raises(BadJobError, match=f"{length} tokens .* 100 positions.*--kv-memory") as caught:
            room.run(body)
        assert (caught.value.code, caught.value.field) == ("E_BAD_JOB", name)
        assert caught.value.detail == {"prompt_tokens": length, "capacity": 100}


def test_a_prompt_beyond_context_and_memory_is_refused_for_the_context(room):
    room.engine.capacity = 100
    with pytest.raises(BadJobError) as caught:
        room.run({"token_ids": [5] * 512})
    assert caught.value.detail == {"prompt_tokens": 512, "context": 512}


@pytest.mark.parametrize(
    ("length", "budget", "used"), [(99, 100, 1), (90, 100, 10), (90, 11, 10), (90, 10, 10), (90, 9, 9)]
)
def test_a_budget_is_cut_to_what_the_engines_memory_holds(room, length, budget, used):
    room.engine.capacity = 100
    _, final = room.run({"token_ids": [5] * length, "max_tokens": budget, **NO_END})
    assert (final.finish_reason, final.completion_tokens, final.max_tokens_used) == ("length", used, used)


def test_a_memory_beyond_the_context_changes_nothing(room):
    room.engine.capacity = 600
    _, final = room.run({"token_ids": [5] * 500, "max_tokens": 100, **NO_END})
    assert final.max_tokens_used == 12


def test_one_seed_gives_one_text_whatever_ran_in_between(room):
    body = {**SAMPLED, "max_tokens": 30}
    first = room.ids(body, seed=11)
    assert room.ids(body, seed=12) != first
    room.cancelled = iter([False] * 6 + [True] * 99).__next__
    assert room.run(body, seed=13)[1].finish_reason == "cancelled"
    room.cancelled = lambda: False
    assert room.ids(body, seed=11) == first


def test_an_attempt_resumed_after_any_token_goes_on_as_if_nothing_had_happened(room):
    body = {**SAMPLED, "max_tokens": 16, "repetition_penalty": 1.2, "penalty_window": 0}
    chunks, whole = room.run(body)
    ids = [token for chunk in chunks for token in chunk.ids]
    for done in (1, 7, 15, 16):
        rest, final = room.run(body, drawn=tuple(ids[:done]))
        assert rest == chunks[done:]
        assert (final.sha256, final.finish_reason, final.completion_tokens) == (whole.sha256, "length", 16)


def test_ids_that_the_model_does_not_have_are_refused_before_any_forward(room, tiny, monkeypatch):
    """They were drawn with another model: MLX's CPU build would crash on them."""
    monkeypatch.setattr(room.engine, "start", lambda *_: pytest.fail("a forward ran"))
    with pytest.raises(JobError, match=str(tiny.vocabulary)) as caught:
        room.run({**PROMPT, "max_tokens": 9}, drawn=(4, tiny.vocabulary))
    assert caught.value.code == "E_MODEL_CHANGED"


@pytest.mark.parametrize("capacity", [29, 30, 31])
def test_an_answer_for_which_the_next_worker_has_no_room_ends_where_it_is(room, capacity):
    body = {"token_ids": [5] * 20, "max_tokens": 40, **NO_END}
    ids = tuple(room.ids(body)[:10])
    room.engine.capacity = capacity
    chunks, final = room.run(body, drawn=ids)
    more = max(0, capacity - 30)
    assert (len(chunks), final.finish_reason, final.max_tokens_used) == (more, "length", 10 + more)
    assert final.sha256 == trajectory_sha256([*ids, *(token for chunk in chunks for token in chunk.ids)])


def test_cancel_ends_a_long_prompt_at_the_next_chunk(tiny):
    room = Room(tiny, prefill_chunk=32)
    room.cancelled = lambda: ("prefill", 64, 400) in room.heard
    chunks, final = room.run({"token_ids": [5] * 400})
    assert (chunks, final.finish_reason, final.completion_tokens) == ([], "cancelled", 0)
    assert (final.first_token_s, final.sha256) == (None, trajectory_sha256([]))
    assert room.heard == [("prefill", 0, 400), ("prefill", 32, 400), ("prefill", 64, 400)]
    room.cancelled = lambda: False
    assert len(room.ids({**PROMPT, "max_tokens": 3})) == 3


def test_cancel_ends_decoding_within_one_step(room):
    room.cancelled = lambda: ("decode", 4, 50) in room.heard
    chunks, final = room.run({**PROMPT, "max_tokens": 50})
    assert (len(chunks), final.finish_reason, final.completion_tokens) == (4, "cancelled", 4)


def test_after_cancels_at_every_phase_a_probe_equals_a_fresh_run(tiny):
    room = Room(tiny, prefill_chunk=8)
    probe = {**SAMPLED, "max_tokens": 5}
    fresh = room.ids(probe)
    for phase in range(14):
        room.cancelled = iter([False] * phase + [True] * 99).__next__
        assert room.run({"token_ids": [5] * 40, "max_tokens": 30, **NO_END})[1].finish_reason == "cancelled"
        room.cancelled = lambda: False
        assert room.ids(probe) == fresh


def test_progress_of_a_long_prompt_is_told_chunk_by_chunk_and_never_goes_back(tiny):
    room = Room(tiny, prefill_chunk=100)
    room.run({"token_ids": [5] * 350, "max_tokens": 1})
    told = [done for phase, done, total in room.heard if phase == "prefill" and total == 350]
    assert (told[0], told[-1]) == (0, 350)
    assert all(0 <= after - before <= 100 for before, after in pairwise(told))


def test_logprobs_are_those_of_the_raw_logits_likeliest_first(room, tiny):
    chunks, _ = room.run({"prompt": "the fox", "logprobs": 5, "logit_bias": {"9": 1000}, "max_tokens": 3})
    ids = mx.array([tiny.tokenizer.encode("the fox")])
    logits = tiny.model(ids)[0, -1, : tiny.vocabulary]
    expected = (logits - mx.logsumexp(logits)).tolist()
    best = sorted(range(tiny.vocabulary), key=lambda i: (-expected[i], i))[:5]
    (pairs,) = chunks[0].logprobs
    assert chunks[0].ids == (9,)
    assert [token for token, _ in pairs] == best
    assert [value for _, value in pairs] == pytest.approx([expected[i] for i in best], abs=1e-4)


def test_without_logprobs_none_are_carried(room):
    assert room.run({**PROMPT, "max_tokens": 1})[0][0].logprobs is None


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("logprobs", [0, 3])
def test_logits_that_are_not_numbers_end_the_job_as_a_numeric_error(tmp_path, temperature, logprobs):
    room = Room(load(make_llama(tmp_path, Kind(spoiled=True))))
    with pytest.raises(JobError, match="token 0") as caught:
        room.run({"prompt": "the", "temperature": temperature, "logprobs": logprobs})
    assert caught.value.code == "E_NUMERIC"
    room.engine.warm_up()


def test_everything_happens_on_the_calling_thread(tiny_dir, monkeypatch):
    seen = set()
    for name in ("eval", "async_eval"):
        real = getattr(mx, name)
        monkeypatch.setattr(
            mx, name, lambda *a, _real=real, **k: (seen.add(threading.get_ident()), _real(*a, **k))[1]
        )
    before = set(threading.enumerate())
    Room(load(tiny_dir)).run({**SAMPLED, "max_tokens": 4, "logprobs": 2})
    assert seen == {threading.get_ident()}
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(("cache", "exact"), [(True, True), ("answers", False), (False, True)])
def test_the_wish_for_reuse_reaches_the_engine_and_the_final_record_tells_what_came_of_it(
    room, monkeypatch, cache, exact
):
    engine, asked = room.engine, []
    start, stop = engine.start, engine.stop
    monkeypatch.setattr(
        engine, "start", lambda request, progress: (asked.append(request), start(request, progress))
    )
    monkeypatch.setattr(engine, "stop", lambda: replace(stop(), cached_tokens=3, prefix_exact=exact))
    final = room.run({**PROMPT, "max_tokens": 1, "cache": cache})[1]
    assert [(one.cache, one.owner) for one in asked] == [(cache, b"")]
    assert (final.cached_tokens, final.prefix_exact) == (3, exact)


def test_leaving_the_iterator_early_stops_the_engine(room):
    run = run_job(
        Attempt(job=Job.parse(PROMPT), seed=1),
        WidthGate(room.engine),
        room.loaded,
        clock=room.tick,
        cancelled=lambda: False,
        progress=lambda *_: None,
    )
    next(run)
    run.close()
    with pytest.raises(RuntimeError):
        room.engine.step()


def test_a_recurrent_model_answers_too_and_has_no_context_limit_of_its_own(tmp_path):
    loaded = load(make_mamba(tmp_path))
    assert loaded.context == 2**31 - 1
    room = Room(loaded)
    room.engine.warm_up()
    assert room.ids({**SAMPLED, "max_tokens": 6}) == room.ids({**SAMPLED, "max_tokens": 6})
