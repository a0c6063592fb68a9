"""How many pages the pool gets: from numbers alone, and what the setting takes."""

from __future__ import annotations

import re

import hypothesis.strategies as st
import mlx.core as mx
import pytest
from hypothesis import given

from mtplx.errors import SettingsError
from mtplx.settings import Settings
from mtplx.sizes import format_size, parse_size
from worker.engine import memory
from worker.engine.forward import MAX_ROWS, positions_within, rows_needed
from worker.engine.memory import Need, Room, pool_pages, prefill_bytes, room
from worker.kv.pages import PAGE, pages_for

GB, MIB = 1000**3, 1024**2
# SmolLM2-135M in float32: 30 layers of 3 heads of 64.
SMALL = Need(page_bytes=30 * 2 * 3 * 32 * 64 * 4, context=8192, prefill_rows=1, reserve=400 * MIB)
# A model of 8B in bfloat16, its context far beyond what a small machine holds.
LARGE = Need(page_bytes=36 * 2 * 8 * 32 * 128 * 2, context=40960, prefill_rows=128, reserve=700 * MIB)


# --- what a job needs


@pytest.mark.parametrize("rows", [1, 32, 64, 128, 512])
@pytest.mark.parametrize("pages", [1, 2, 3, 4, 5, 16, 17, 100])
def test_the_most_positions_that_fit_are_those_whose_rows_fit(pages, rows):
    most = positions_within(pages, rows)
    assert pages_for(rows_needed(most, rows)) <= pages or most == 0
    assert pages_for(rows_needed(most + 1, rows)) > pages


@pytest.mark.parametrize(
    ("positions", "prefill", "rows"),
    [(1, 1, 17), (100, 1, 116), (100, 64, 128), (120, 64, 136), (129, 128, 256), (128, 128, 144)],
)
def test_rows_for_padded_forwards_are_counted(positions, prefill, rows):
    assert rows_needed(positions, prefill) == rows
    assert MAX_ROWS == 16


# --- auto


def test_where_there_is_plenty_the_pool_holds_two_jobs_of_full_length():
    for need in (SMALL, LARGE):
        pages = pool_pages(None, Room(141 * GB, 16 * GB), need)
        assert pages == 2 * pages_for(rows_needed(need.context, need.prefill_rows))


def test_where_there_is_less_it_takes_half_of_what_weights_and_reserve_leave():
    pages = pool_pages(None, Room(16 * GB, 5 * GB), LARGE)
    left = 11 * GB - LARGE.reserve
    assert pages * LARGE.page_bytes <= left / 2 < (pages + 1) * LARGE.page_bytes
    assert 64 < positions_within(pages, 128) < LARGE.context, "a pool smaller than the context is fine"


@pytest.mark.parametrize("used", [8 * GB, 9 * GB])
def test_where_there_is_nothing_left_it_still_holds_a_short_job(used, caplog):
    for need in (SMALL, LARGE):
        pages = pool_pages(None, Room(8 * GB, used), need)
        assert pages == need.least
        assert positions_within(pages, need.prefill_rows) >= memory.LEAST_POSITIONS
    assert ["--kv-memory" in one.getMessage() for one in caplog.records] == [True, True]


@pytest.mark.parametrize(("need", "advice"), [(SMALL, "smaller --prefill-chunk"), (LARGE, "another model")])
def test_a_long_prefill_forward_takes_no_more_than_a_quarter_of_what_is_left(need, advice, caplog):
    """With 4000 ids a forward the reserve alone would take a machine of 8 GB whole, and the pool hold 64 tokens."""
    greedy = Need(**{**fields(need), "reserve": prefill_bytes(4000, 151936)})
    pages = pool_pages(None, Room(8 * GB, 6 * GB), greedy)
    assert pages == min(750_000_000 // need.page_bytes, 2 * need.pages(need.context))
    (warned,) = caplog.records
    assert warned.levelname == "WARNING"
    assert advice in warned.getMessage()
    assert warned.getMessage().startswith("little memory: 2GB are left beside the 6GB in use")


def test_where_the_reserve_fits_nothing_is_said(caplog):
    pool_pages(None, Room(16 * GB, 5 * GB), LARGE)
    pool_pages(10**9, Room(16 * GB, 15 * GB), LARGE)
    assert caplog.records == []


def test_a_model_that_names_no_context_gets_a_pool_of_bounded_size():
    unnamed = Need(page_bytes=1000, context=2**31 - 1, prefill_rows=1, reserve=0)
    assert pool_pages(None, Room(500 * GB, 0), unnamed) == 2 * pages_for(memory.UNNAMED_CONTEXT + 16)


def test_a_context_below_the_least_is_enough_for_itself():
    tiny = Need(page_bytes=1000, context=20, prefill_rows=1, reserve=0)
    assert pool_pages(None, Room(0, 0), tiny) == pages_for(36)
    assert pool_pages(2000, Room(GB, 0), tiny) == 2


# --- a size of one's own


def test_an_explicit_size_is_filled_with_pages_and_nothing_more():
    asked = 512_000_000
    pages = pool_pages(asked, Room(16 * GB, GB), SMALL)
    assert pages * SMALL.page_bytes <= asked < (pages + 1) * SMALL.page_bytes
    assert pool_pages(100 * GB, Room(141 * GB, 16 * GB), SMALL) == 100 * GB // SMALL.page_bytes, "the user's word"


@pytest.mark.parametrize("need", [SMALL, LARGE])
def test_a_size_that_holds_no_short_job_is_refused_and_the_least_is_told(need):
    least = need.least * need.page_bytes
    with pytest.raises(SettingsError, match="less than 64 tokens") as caught:
        pool_pages(least - 1, Room(16 * GB, GB), need)
    told = re.search(r"at least (\S+B), or auto", str(caught.value))
    assert least <= parse_size(told[1]) <= least * 1.01
    assert pool_pages(parse_size(told[1]), Room(16 * GB, GB), need) == need.least
    assert pool_pages(least, Room(16 * GB, GB), need) == need.least


def test_a_size_beyond_the_device_is_refused_with_what_is_left():
    with pytest.raises(SettingsError, match=r"10GB is more than the 8GB that .* beside the 8GB in use"):
        pool_pages(10 * GB, Room(16 * GB, 8 * GB), SMALL)
    assert pool_pages(8 * GB, Room(16 * GB, 8 * GB), SMALL) > 1000


def test_the_reserve_grows_with_the_rows_and_the_head():
    assert prefill_bytes(512, 49152) == 512 * (49152 * 8 + 512 * 1024)
    assert 200 * MIB < prefill_bytes(512, 49152) < prefill_bytes(512, 151936) < GB


# --- what MLX says


@pytest.mark.parametrize(
    ("info", "total"),
    [
        ({"max_recommended_working_set_size": 11 * GB, "memory_size": 16 * GB}, 11 * GB),
        ({"free_memory": 100 * GB, "total_memory": 141 * GB}, 100 * GB + 7 + 5),
        ({"device_name": "AMD"}, 4096 * 1000),
    ],
    ids=["metal", "cuda", "cpu"],
)
def test_each_kind_of_device_says_what_it_holds_in_its_own_way(monkeypatch, info, total):
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 7)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 5)
    monkeypatch.setattr(memory.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.__getitem__)
    assert room() == Room(total, 7)


def test_this_machine_holds_more_than_nothing():
    assert room().left > 100 * MIB
    assert Room(5, 7).left == 0


def test_arrays_count_as_used():
    before = room().used
    held = mx.zeros((1 << 20,), dtype=mx.float32)
    mx.eval(held)
    assert room().used >= before + held.nbytes
    assert PAGE == 32


# --- the setting


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MB", 512_000_000), ("4GB", 4 * GB), ("1.5GiB", 1536 * MIB), ("1 KB", 1000), ("0.5KiB", 512), ("2TB", 2000 * GB),
    ],
)  # fmt: skip
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_size(text) == size
    assert Settings.load({"kv_memory": text}, environ={}).kv_bytes == size


def test_auto_leaves_the_choice_to_the_worker():
    assert Settings.load({}, environ={}).kv_bytes is None
    assert Settings.load({}, environ={"MTPLX_KV_MEMORY": "4GB"}).kv_bytes == 4 * GB


@pytest.mark.parametrize(
    "text", ["", "4", "4 gb", "GB", "-1GB", "0GB", "1e3MB", "4GBs", "half", "٤GB", "1,5GB", " 4GB"]
)
def test_other_sizes_are_refused_at_the_start_with_what_is_allowed(text):
    with pytest.raises(
        SettingsError, match=r"--kv-memory .* must be auto, or a size such as 512MB, 4GB or 1\.5GiB"
    ):
        Settings.load({"kv_memory": text}, environ={})


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0KB"),
        (999, "0.99KB"),
        (1536, "1.53KB"),
        (4 * GB, "4GB"),
        (1474560, "1.47MB"),
        (123456 * GB, "123.45TB"),
    ],
)
def test_sizes_are_told_in_a_form_that_can_be_given(size, text):
    assert format_size(size) == text


@given(st.integers(10, 2**50))
def test_sizes_are_told_no_larger_or_no_smaller_than_they_are(size):
    assert parse_size(format_size(size)) <= size <= parse_size(format_size(size, up=True))
    assert parse_size(format_size(size, up=True)) <= size * 1.02 + 10


def fields(need: Need) -> dict[str, int]:
    return {name: getattr(need, name) for name in ("page_bytes", "context", "prefill_rows", "reserve")}
