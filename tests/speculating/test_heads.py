"""Drafts of heads, which the device alone knows: the text is that of plain decode, and heads read what they should."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count

import mlx.core as mx
import pytest
from speculating.heads import Bench, Knowing, Noting, pool_of, random_head, request_of
from speculating.oracle import EAGER, Priced

from worker.engine.draw import Draws, place
from worker.engine.engine import EngineRequest
from worker.engine.trunk import Trunk
from worker.engine.verify_bank import Switches
from worker.speculation.costs import Costs
from worker.speculation.mtp.following import Ask
from worker.speculation.mtp.head import Head, Reading
from worker.speculation.mtp.module import ModuleHead
from worker.speculation.mtp.packed import PackedHead

SAMPLERS = {
    "greedy": {},
    "0.7": {"temperature": 0.7},
    "filters": {"temperature": 1.0, "top_p": 0.9, "top_k": 30, "min_p": 0.01},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.3},
    "logprobs": {"temperature": 0.7, "logprobs": 3},
}
FORMS = ("in place", "tail")
JOBS = 25


def ticking():
    ticks = count()
    return lambda: next(ticks) / 1e3


def prompt_of(luck: random.Random, vocabulary: int) -> list[int]:
    return [luck.randrange(4, vocabulary) for _ in range(luck.choice((1, 2, 17, 31, 32, 33, 64, 70)))]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_answers_drafted_on_the_device_are_those_of_plain_decode(tiny_model, form: str, model: str) -> None:
    bench = Bench(tiny_model(model), form)
    luck, behind, kept, refused = random.Random(1), 0, 0, 0
    for number, (name, share, width) in enumerate(
        (name, share, width) for name in SAMPLERS for share in (0.0, 0.3, 0.9) for width in (2, 5, 16)
    ):
        budget = luck.randint(8, 40)
        request = request_of(prompt_of(luck, bench.loaded.vocabulary), budget, seed=number, **SAMPLERS[name])
        whole = bench.plain(request)
        text = [*request.prompt, *whole]
        head = Knowing(text, bench.loaded.vocabulary, share, goes_behind=True)
        engine = bench.drafting(head, EAGER, width, ticking())
        launches = watch_launches(bench)
        end = luck.choice((None, None, budget // 2, 1))
        ids, figures = bench.drafted(engine, request, end)
        assert ids == whole[:end], (name, share, width)
        assert sum(figures.accepted_by_depth) == figures.drafting["rows_committed"]
        behind += launches.count(True)
        kept += figures.drafting["rows_committed"]
        refused += figures.drafted - figures.drafting["rows_committed"]
    assert kept > 200
    assert refused > 200
    assert (behind > 100) is (form == "in place"), "forwards went on behind others where the lane pipelines"


def watch_launches(bench: Bench) -> list[bool]:
    """Whether each launch from now on came behind a forward in flight."""
    noted: list[bool] = []
    launch = type(bench.engine).launch

    def watched(draft, tokens=None):
        noted.append(bench.engine.flight is not None)
        launch(bench.engine, draft, tokens)

    bench.engine.launch = watched
    return noted


@pytest.mark.parametrize("form", FORMS)
def test_an_attempt_interrupted_anywhere_goes_on_with_the_same_ids(tiny_model, form: str) -> None:
    bench = Bench(tiny_model("llama"), form)
    request = request_of(range(20, 60), 24, temperature=0.8)
    whole = bench.plain(request)
    for done in range(0, 23, 3):
        rest = EngineRequest(
            prompt=request.prompt, drawn=tuple(whole[:done]), sampling=request.sampling, max_tokens=24 - done
        )
        head = Knowing([*request.prompt, *whole], bench.loaded.vocabulary, 0.3, goes_behind=True)
        ids, _ = bench.drafted(bench.drafting(head, EAGER, 4, ticking()), rest)
        assert ids == whole[done:]


@pytest.mark.parametrize("form", FORMS)
def test_a_draft_that_never_pays_is_left_alone_and_taken_up_again(tiny_model, form: str) -> None:
    bench = Bench(tiny_model("llama"), form)
    request = request_of(range(20, 50), 120, temperature=0.9)
    whole = bench.plain(request)
    head = Knowing([*request.prompt, *whole], bench.loaded.vocabulary, 1.0, goes_behind=True)
    costs = Costs((1, 16), (0,), ((1.0, 4.0),), 0.0)
    engine = bench.drafting(head, costs, 4, Priced(bench.engine, costs))
    ids, figures = bench.drafted(engine, request)
    assert ids == whole
    assert figures.widths[1] > 80, "most steps are plain"
    assert figures.drafting["offs"] > 0


def expected(head: Head, trunk: Trunk, text: list[int], states: mx.array, ask: Ask) -> list[int]:
    """What a head drafts that reads all pairs of *text* at once."""
    reading = Reading(head, trunk)
    reading.read(mx.array(text[1:], dtype=mx.uint32), trunk.normed(states[: len(text) - 1]))
    position = len(text)

    def choose(logits: mx.array) -> mx.array:
        nonlocal position
        position += 1
        return ask.draws(logits, place(position - 1)).token

    return mx.concatenate(reading.draft(ask.count, choose)).tolist()


@pytest.mark.parametrize(("form", "run"), [("in place", "packed"), ("in place", "module"), ("tail", "module")])
@pytest.mark.parametrize("sampler", ["greedy", "0.7"])
def test_every_draft_is_that_of_a_head_that_reads_the_text_at_once(tiny_model, form, run, sampler) -> None:
    loaded = tiny_model("llama")
    bench = Bench(loaded, form)
    head, trunk = random_head(loaded), Trunk.of(loaded)
    luck = random.Random(2)
    seen: list[mx.array] = []
    for number, share in enumerate((0.0, 0.4, 0.4, 1.0)):
        request = request_of(prompt_of(luck, loaded.vocabulary), 30, seed=number, **SAMPLERS[sampler])
        # Rows of earlier jobs have no states here.
        request = replace(request, cache=False)
        whole = bench.plain(request)
        text = [*request.prompt, *whole]
        knowing = Knowing(text, loaded.vocabulary, share, goes_behind=run == "packed")
        if run == "packed":
            inner = PackedHead(head, bench.engine.forward._packed, pool_of(bench.engine), Switches())
        else:
            inner = ModuleHead(head, trunk)
        noting = Noting(inner, knowing)
        ids, _ = bench.drafted(bench.drafting(noting, EAGER, 5, ticking()), request)
        assert ids == whole
        states = states_of(loaded, trunk, text)
        for position, drafted in noting.noted:
            at = position.tolist()[1]
            draws = Draws(request.sampling, text[:at], width=loaded.width, vocabulary=loaded.vocabulary)
            ask = Ask(drafted.size, draws, position)
            assert drafted.tolist() == expected(head, trunk, text[:at], states, ask), at
            seen.append(drafted)
    assert len(seen) > 20


@pytest.mark.parametrize("form", FORMS)
def test_after_an_interruption_the_first_draft_knows_what_was_drawn_before(tiny_model, form: str) -> None:
    loaded = tiny_model("llama")
    bench = Bench(loaded, form)
    head, trunk = random_head(loaded), Trunk.of(loaded)
    request = replace(request_of(range(20, 57), 30, temperature=0.7), cache=False)
    whole = bench.plain(request)
    for done in (1, 2, 16, 20):
        text = [*request.prompt, *whole]
        rest = replace(request, drawn=tuple(whole[:done]), max_tokens=30 - done)
        noting = Noting(ModuleHead(head, trunk), Knowing(text, loaded.vocabulary, 0.0, goes_behind=False))
        ids, _ = bench.drafted(bench.drafting(noting, EAGER, 4, ticking()), rest)
        assert ids == whole[done:]
        position, drafted = noting.noted[0]
        at = position.tolist()[1]
        draws = Draws(request.sampling, text[:at], width=loaded.width, vocabulary=loaded.vocabulary)
        states = states_of(loaded, trunk, text)
        assert drafted.tolist() == expected(head, trunk, text[:at], states, Ask(drafted.size, draws, position)), (
            done
        )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rubbish", [False, True])
def test_jobs_cancelled_anywhere_leave_nothing_behind_and_the_text_stays(tiny_model, form, rubbish: bool) -> None:
    """Plain and drafted jobs by turns over shared prefixes; heads of random weights, and of no numbers at all."""
    loaded = tiny_model("llama")
    bench = Bench(loaded, form)
    head = random_head(loaded)
    if rubbish:
        head.eh_proj.weight = head.eh_proj.weight * float("nan")
    if form == "in place":
        inner = PackedHead(head, bench.engine.forward._packed, pool_of(bench.engine), Switches())
    else:
        inner = ModuleHead(head, Trunk.of(loaded))
    luck, begun = random.Random(11), [prompt_of(random.Random(seed), 200) for seed in range(3)]
    for number in range(JOBS):
        sampling = SAMPLERS[luck.choice(list(SAMPLERS))]
        prompt = [*luck.choice(begun), *prompt_of(luck, 200)[:3]]
        request = request_of(prompt, luck.randint(3, 40), seed=number, **sampling)
        whole = bench.plain(replace(request, cache=False))
        request = replace(request, cache=luck.choice(("answers", True, False)))
        end = luck.randint(0, request.max_tokens)
        if luck.random() < 0.2:
            assert bench.plain(request, end or None)[:end] == whole[:end]
            continue
        width = luck.randint(2, 16)
        knowing = Knowing([*prompt, *whole], loaded.vocabulary, luck.random(), goes_behind=form == "in place")
        which = inner if luck.random() < 0.5 else Noting(inner, knowing)
        engine = bench.drafting(which, EAGER, width, ticking(), copies=luck.random() < 0.3)
        engine.start(request, lambda *_: None)
        ids = [engine.step().token for _ in range(end)]
        engine.stop()
        bench.built.check_idle()
        assert bench.engine.forward.follower is None
        assert ids == whole[:end], number


def states_of(loaded, trunk: Trunk, text: list[int]) -> mx.array:
    """The states of all positions of *text*, before the final norm."""
    tap = trunk.tap()
    loaded.model(mx.array([text], dtype=mx.uint32))
    states = tap.states()
    mx.eval(states)
    # A model with a tap is none of the dense family's.
    trunk.stack[trunk.norm_name] = tap.norm
    return states


@pytest.mark.parametrize("form", FORMS)
def test_prompt_lookup_beside_a_head_takes_what_it_promises_more_of(tiny_model, form: str) -> None:
    bench = Bench(tiny_model("llama"), form)
    luck, copied, behind = random.Random(5), 0, 0
    for number, (name, share) in enumerate((name, share) for name in SAMPLERS for share in (0.2, 0.8)):
        phrase = [luck.randrange(4, bench.loaded.vocabulary) for _ in range(7)]
        request = request_of(phrase * 5, 60, seed=number, **SAMPLERS[name])
        # A text that repeats itself, which a bias makes of it.
        bias = dict.fromkeys(phrase, 40.0)
        request = replace(request, sampling=replace(request.sampling, logit_bias=bias))
        whole = bench.plain(request)
        head = Knowing([*request.prompt, *whole], bench.loaded.vocabulary, share, goes_behind=True)
        costs = Costs((1, 16), (0,), ((1.0, 1.2),), 0.1)
        engine = bench.drafting(head, costs, 16, Priced(bench.engine, costs), copies=True)
        launches = watch_launches(bench)
        ids, figures = bench.drafted(engine, request)
        assert ids == whole, (name, share)
        assert sum(figures.accepted_by_depth) == figures.drafting["rows_committed"]
        copied += engine._beside.planner.counts.steps
        behind += launches.count(True)
    assert copied > 20, "prompt lookup drafted"
    assert (behind > 20) is (form == "in place"), "and so did the head, ahead of the host"
