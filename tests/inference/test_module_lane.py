"""The lane of mlx-lm's modules: the same text as mlx-lm's own loop, from pages that hold nothing but what was written."""

from __future__ import annotations

import random
import re
from typing import Any

import mlx.core as mx
import pytest
from inference.modules import CONFIGS, NAN, PAGED, VOCABULARY, Serial, make, prompt, yardstick
from mlx_lm.models.cache import KVCache

from mtplx.errors import SettingsError
from worker.engine.forward import Forward, positions_within
from worker.engine.module_lane import UNPAGED_POSITIONS, ModuleForward, look_at, module_lane
from worker.kv.pages import PAGE
from worker.kv.pool import Shape

EDGES = [1, 2, 32, 33, 65]


@pytest.fixture(scope="module")
def models():
    return {kind: make(kind) for kind in CONFIGS}


@pytest.fixture(params=CONFIGS)
def model(request, models):
    return models[request.param]


@pytest.fixture(params=PAGED)
def paged(request, models):
    return models[request.param]


@pytest.fixture
def llama(models):
    return models["llama"]


def same(one: list[mx.array], other: list[mx.array]) -> bool:
    return len(one) == len(other) and all(mx.array_equal(a, b).item() for a, b in zip(one, other, strict=True))


def tear(serial: Serial, stride: int = 2) -> None:
    """Leave no two free pages side by side."""
    held = [serial.books.reserve(PAGE) for _ in range(serial.books.count)]
    for one in held[::stride]:
        one.release()


# --- the same text


@pytest.mark.parametrize("length", EDGES)
def test_the_text_is_that_of_mlx_lm_whatever_the_chunk(model, length):
    ids = prompt(length, seed=length)
    wanted = yardstick(model, ids, 6)
    for chunk in (7, 32, 512):
        serial = Serial(model, chunk=chunk)
        assert serial.answer(ids, 6) == wanted
        assert all(mx.isfinite(logits).all().item() for logits in serial.logits), "no poison leaks"


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_short_types_work_too(dtype):
    model, ids = make("llama", dtype), prompt(70)
    assert look_at(model).shapes == (Shape(3, 2, 16, dtype),)
    assert Serial(model).answer(ids, 10) == yardstick(model, ids, 10)


def test_scattered_pages_give_the_same_text(model):
    ids = prompt(90)
    serial = Serial(model, pages=60)
    tear(serial)
    assert serial.answer(ids, 10) == yardstick(model, ids, 10)


SCHEDULES = [("llama", 1), ("openelm", 1), ("qwen3", 64), ("lfm2", 1)]


def schedule(model: Any, prefill_rows: int, seed: int) -> Serial:
    """Follow-ups, shared beginnings, cancelled predecessors and evictions: warm equals cold, bit by bit."""
    draw = random.Random(seed)
    serial = Serial(model, pages=14, prefill_rows=prefill_rows, chunk=40)
    talks, hits = [prompt(100, seed=seed + 9)], 0
    for _ in range(15):
        known = draw.choice(talks)
        cut = draw.choice([len(known), draw.randrange(1, len(known) + 1)])
        ids = (known[:cut] + prompt(draw.randrange(1, 90), draw.randrange(9)))[:250]
        if draw.random() < 0.2:
            serial.open(ids, 9)
            serial.lane.rows(mx.array([3], dtype=mx.uint32))
            serial.close(ids, len(ids))
            continue
        drawn = serial.answer(ids, 4)
        hits += serial.opened.cached > 0
        fresh = Serial(model, pages=14, prefill_rows=prefill_rows, chunk=40)
        assert fresh.answer(ids, 4) == drawn
        assert same(fresh.logits, serial.logits)
        talks = [*talks[-5:], ids + drawn]
    assert (hits > 0) == serial.lane.prefix_reuse
    return serial


@pytest.mark.parametrize(("kind", "prefill_rows"), SCHEDULES)
def test_jobs_in_any_order_answer_as_fresh_ones(models, kind, prefill_rows):
    serial = schedule(models[kind], prefill_rows, seed=1)
    assert (serial.index.figures.evicted_pages > 0) == serial.lane.prefix_reuse


@pytest.mark.prove
@pytest.mark.parametrize(("kind", "prefill_rows"), SCHEDULES)
def test_jobs_in_many_more_orders_answer_as_fresh_ones(models, kind, prefill_rows):
    for seed in range(100, 125):
        schedule(models[kind], prefill_rows, seed)


# --- what lies in pages


@pytest.mark.parametrize(
    ("kind", "places", "why"),
    [
        ("llama", (0, 1, 2), ""),
        ("openelm", (0, 1, (1, 0)), ""),
        ("gemma3_text", (None, 0, None, 1), "it has layers with RotatingKVCache"),
        ("lfm2", (None, 0, None), "it has layers with ArraysCache"),
        ("mamba", (None, None), "it has layers with ArraysCache"),
        ("deepseek_v2", (None, None, None), "it has layers with keys of another shape than values"),
        ("iquestloopcoder", (0, 1, 2, None, None, None), "it has layers with RotatingKVCache"),
    ],
)
def test_full_attention_lies_in_pages_and_nothing_else(models, kind, places, why):
    layout = look_at(models[kind])
    assert layout.places == tuple((0, place) if isinstance(place, int) else place for place in places)
    assert layout.why == why
    assert layout.page_bytes == sum(place is not None for place in places) * 2 * 2 * PAGE * 16 * 4 + (
        2 * PAGE * 16 * 4 if kind == "openelm" else 0
    )
    lane: Forward = ModuleForward(models[kind], layout, pages=4)
    assert lane.one_ahead == (layout.shapes == ())
    assert lane.prefix_reuse == (why == "")
    assert (lane.why, lane.row_invariant, lane.prefill_rows, lane.capacity) == (why, False, 1, 4 * PAGE - 16)


class Odd:
    """A llama that does something of its own with its caches."""

    def __init__(self, model: Any, habit: str) -> None:
        self.layers, self._model, self._habit = model.layers, model, habit

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        logits = self._model(ids, cache=cache)
        if self._habit == "looks inside":
            return logits + 0 * cache[0].keys.sum()
        if self._habit == "answers by class":
            return logits * (1.0 if type(cache[0]) is KVCache else 0.5)
        if self._habit == "knows classes by name":
            return logits * {"KVCache": 1.0}[type(cache[0]).__name__]
        if self._habit == "refuses" and type(cache[0]) is not KVCache:
            raise NotImplementedError
        return logits


@pytest.mark.parametrize(
    ("habit", "why"),
    [
        ("looks inside", "in a way of its own .*keys"),
        ("answers by class", "answers otherwise from pages"),
        ("knows classes by name", r"in a way of its own \('PagedCache'\)"),
        ("refuses", r"in a way of its own \(NotImplementedError\)"),
    ],
)
def test_a_model_that_cannot_use_pages_keeps_mlx_lms_caches_and_says_why(llama, habit, why):
    assert look_at(Odd(llama, "")).why == ""
    odd, ids = Odd(llama, habit), prompt(40)
    layout = look_at(odd)
    assert layout.shapes == ()
    assert re.search(why, layout.why)
    serial = Serial(odd)
    assert not serial.lane.prefix_reuse
    assert serial.lane.why == layout.why != ""
    assert serial.answer(ids, 10) == yardstick(llama, ids, 10)


def test_a_model_without_reuse_is_never_given_rows(models):
    serial = Serial(models["lfm2"])
    serial.answer(prompt(50), 5)
    assert serial.index.pages_held == 0
    warm = Serial(models["llama"])
    warm.answer(prompt(50), 5)
    opened = warm.index.open(prompt(50), 60, owner=b"", cache=True)
    assert opened.cached == 49
    with pytest.raises(AssertionError, match="another job"):
        serial.lane.begin(opened)


# --- prefill in aligned forwards


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 129])
def test_padded_forwards_draw_what_exact_ones_draw(paged, length):
    ids = prompt(length, seed=length)
    serial = Serial(paged, prefill_rows=64)
    wanted = yardstick(paged, ids, 6)
    assert serial.answer(ids, 6) == wanted
    again = Serial(paged, prefill_rows=64)
    again.answer([*ids[: max(length - 1, 1)], 5], 1)
    assert again.answer(ids, 6) == wanted
    assert again.opened.cached == (length - 1) // 64 * 64
    assert same(serial.logits, again.logits), "warm equals cold bit by bit"


@pytest.mark.parametrize("kind", ["lfm2", "gemma3_text", "mamba", "deepseek_v2"])
def test_what_cannot_be_padded_is_read_as_it_is(models, kind):
    for length in (1, 64, 65):
        ids = prompt(length)
        assert Serial(models[kind], prefill_rows=64).answer(ids, 6) == yardstick(models[kind], ids, 6, chunk=64)


def test_a_forward_of_another_size_is_refused(llama):
    serial = Serial(llama, prefill_rows=64)
    serial.open(prompt(10), 100)
    for ids, last in ((prompt(63), False), (prompt(65), True), ([], True)):
        with pytest.raises(AssertionError):
            serial.lane.read(ids, last)


# --- rows of the answer


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_forced_rows_go_on_as_if_they_had_been_drawn(model, rows):
    ids = prompt(45)
    serial = Serial(model)
    drawn = serial.answer(ids, 30)
    after, known = serial.logits, Serial(model)
    logits, found = known.open(ids, 30), []
    for start in range(0, 29, rows):
        found += list(logits)
        logits = known.lane.rows(mx.array(drawn[start : start + rows], dtype=mx.uint32))
        assert logits.shape == (len(drawn[start : start + rows]), VOCABULARY)
        mx.eval(logits)
    for one, other in zip([*found, *logits], after, strict=False):
        assert mx.allclose(one, other, atol=1e-3).item()


def test_rows_taken_back_leave_no_trace(paged):
    ids, draw = prompt(50), random.Random(2)
    wanted = yardstick(paged, ids, 20)
    serial = Serial(paged)
    logits, drawn = serial.open(ids, 40), []
    while len(drawn) < 20:
        drawn.append(mx.argmax(logits[0]).item())
        wrong = [draw.randrange(VOCABULARY) for _ in range(draw.randrange(15))]
        logits = serial.lane.rows(mx.array([drawn[-1], *wrong], dtype=mx.uint32))
        mx.eval(logits)
        serial.opened.sequence.truncate(len(ids) + len(drawn))
    assert drawn == wanted


def test_a_recurrent_state_refuses_to_go_back(models):
    serial = Serial(models["mamba"])
    serial.open(prompt(5), 10)
    serial.lane.rows(mx.array([1, 2], dtype=mx.uint32))
    serial.opened.sequence.truncate(6)
    with pytest.raises(AssertionError, match="cannot go back"):
        serial.lane.rows(mx.array([1], dtype=mx.uint32))


def test_a_model_without_pages_may_be_built_ahead(models):
    ids = prompt(20)
    wanted = yardstick(models["mamba"], ids, 10)
    serial = Serial(models["mamba"])
    token = mx.argmax(serial.open(ids, 20), axis=-1).astype(mx.uint32)
    drawn = []
    for _ in range(10):
        drawn.append(token)
        token = mx.argmax(serial.lane.rows(token), axis=-1).astype(mx.uint32)
    assert [one.item() for one in drawn] == wanted


def test_forwards_need_a_sequence_and_end_may_come_twice(llama):
    serial = Serial(llama)
    with pytest.raises(AssertionError, match="begin"):
        serial.lane.rows(mx.array([1], dtype=mx.uint32))
    serial.answer(prompt(5), 2)
    serial.lane.end()
    with pytest.raises(AssertionError, match="begin"):
        serial.lane.read([1], True)


# --- memory


def test_neither_prefill_nor_decode_copies_a_pool(llama):
    serial = Serial(llama, pages=4000)
    layer = serial.lane.pools[0].arrays[0].nbytes
    assert layer > 30_000_000
    peaks = []

    def since(before: int) -> None:
        peaks.append(mx.get_peak_memory() - before)
        mx.reset_peak_memory()

    for ids in (prompt(500), prompt(500)[:300] + prompt(200, seed=3)):
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        logits = serial.open(ids, 100)
        mx.eval(logits)
        since(before)
        for _ in range(40):
            token = mx.argmax(logits[0]).astype(mx.uint32)[None]
            mx.eval(token)
            logits = serial.lane.rows(token)
            mx.eval(logits)
            since(before)
        serial.close(ids + [0] * 40, len(ids))
        since(before)
    assert max(peaks) < layer // 2, "a copy of one layer would show"
    assert serial.opened.cached == 300
    # A view that somebody keeps makes it copy: the count can fail.
    serial.open(prompt(50), 10)
    held = serial.lane.pools[0].arrays[1][:, :, :5]
    mx.eval(held)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(serial.lane.rows(mx.array([1], dtype=mx.uint32)))
    assert mx.get_peak_memory() - before > layer


def test_memory_kept_for_reuse_is_given_back_by_the_engine_alone(model, monkeypatch):
    """It does so every 2048 rows: given back after each chunk it would be asked for again by the next."""
    monkeypatch.setattr(mx, "clear_cache", lambda: pytest.fail("the lane freed what it needs again"))
    assert len(Serial(model, chunk=10).answer(prompt(45), 2)) == 2


def test_jobs_leave_nothing_behind(llama):
    serial, draw = Serial(llama, pages=100), random.Random(1)
    serial.answer(prompt(300), 2)
    before = mx.get_active_memory()
    for _ in range(20):
        serial.answer(prompt(draw.randrange(1, 300), seed=draw.randrange(9)), 2)
    serial.logits, serial.opened = [], None
    assert mx.get_active_memory() <= before + 10_000


# --- sizes


def test_the_pool_of_a_loaded_model_follows_the_setting(tiny):
    lane = module_lane(tiny, asked=None, prefill_rows=1, chunk=512)
    assert lane.pages == 2 * -(-(512 + 16) // PAGE), "two jobs of full length"
    assert lane.page_bytes == 2 * 2 * 2 * PAGE * 16 * 4
    small = module_lane(tiny, asked=5 * lane.page_bytes, prefill_rows=1, chunk=512)
    assert (small.pages, small.capacity) == (5, positions_within(5, 1))
    with pytest.raises(SettingsError, match="--kv-memory"):
        module_lane(tiny, asked=2 * lane.page_bytes, prefill_rows=1, chunk=512)
    assert module_lane(tiny, asked=None, prefill_rows=64, chunk=512).pages == 2 * -(-528 // PAGE)
    assert module_lane(tiny, asked=None, prefill_rows=1, chunk=10**6).pages == 2 * -(-528 // PAGE), (
        "no forward is longer than the context"
    )


def test_a_model_without_pages_is_limited_by_its_context_alone(tiny, models):
    loaded = type(tiny)(**{**{name: getattr(tiny, name) for name in tiny.__slots__}, "model": models["mamba"]})
    assert 512 <= module_lane(loaded, asked=1, prefill_rows=1, chunk=512).capacity < 512 + PAGE
    endless = type(tiny)(**{**{name: getattr(loaded, name) for name in tiny.__slots__}, "context": 2**31 - 1})
    lane = module_lane(endless, asked=None, prefill_rows=1, chunk=512)
    assert (lane.page_bytes, lane.pools) == (0, [])
    assert UNPAGED_POSITIONS <= lane.capacity < UNPAGED_POSITIONS + PAGE


def test_poison_is_not_a_number_for_the_tests_to_mean_anything(llama):
    serial = Serial(llama)
    assert NAN != NAN
    assert mx.isnan(serial.lane.pools[0].arrays[0]).all().item()
