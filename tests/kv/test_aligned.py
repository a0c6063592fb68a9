"""Beginnings reused by whole forwards: a prefill that goes on where a cold one would begin a forward, too."""

from __future__ import annotations

import pytest
from kv.rig import Rig, text

from worker.kv.pages import PAGE, Pages
from worker.kv.prefix import Match, PrefixIndex


@pytest.fixture(params=[32, 64, 128])
def align(request):
    return request.param


@pytest.fixture
def rig(align):
    rig = Rig(40, 40, align)
    yield rig
    rig.check()
    for run in list(rig.runs):
        rig.end(run, store=False)
    rig.clear()
    rig.check()
    assert rig.pages.free == rig.pages.count, "every page came back"


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 257])
def test_the_same_prompt_again_reuses_all_forwards_before_its_last_id(rig, align, length):
    rig.answer(text(1, length))
    assert rig.index.pages_held == length // align * align // PAGE, "what nobody can reuse is not kept"
    again = rig.open(text(1, length), 20)
    assert again.opened.cached == (length - 1) // align * align
    assert again.opened.exact
    assert again.opened.copies == ()


@pytest.mark.parametrize("parts", [1, 31, 63, 64, 65, 127, 128, 129, 200])
def test_prompts_that_part_inside_a_forward_share_the_forwards_before(rig, align, parts):
    rig.answer(text(1, 256))
    assert rig.answer(text(1, parts) + text(2, 40)).cached == parts // align * align


def test_answer_rows_fill_forwards_for_jobs_that_ask_for_them_alone(rig, align):
    prompt, draws = text(1, align + 10), text(2, align)
    rig.answer(prompt, draws=draws)
    follow = prompt + draws + text(3, 5)
    exact = rig.index.lookup(follow, owner=b"", cache=True)
    assert (exact.length, exact.exact) == (align, True)
    both = rig.index.lookup(follow, owner=b"", cache="answers")
    assert (both.length, both.exact, both.exact_rows) == (2 * align, False, align + 10)
    assert both.without_tail() == both


def test_a_forward_whose_last_page_was_forgotten_is_not_reused(align):
    rig = Rig(40, align // PAGE, align)
    rig.answer(text(1, align))
    assert rig.index.lookup(text(1, align + 1), owner=b"", cache=True).length == align
    rig.answer(text(2, align))
    assert rig.index.lookup(text(1, align + 1), owner=b"", cache=True) == Match()
    rig.check()


@pytest.mark.parametrize("wrong", [0, -32, 2, 31, 33, 48])
def test_rows_are_aligned_to_pages_or_not_at_all(wrong):
    with pytest.raises(ValueError, match=f"multiple of 32, not to {wrong}"):
        PrefixIndex(Pages(1), page_bytes=1, limit_bytes=1, align=wrong)
