"""Pieces of text and stop strings: the cut is exact, nothing leaks, and the way a text arrives changes nothing."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from worker.text import StopFilter, TextStream

LETTERS = st.text(alphabet="aab ", max_size=30)
STOPS = st.lists(st.text(alphabet="ab ", min_size=1, max_size=6), max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the stop string that ends first; of two that end together, the longer one."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def pieces(text: str, borders: list[int]) -> list[str]:
    places = sorted({0, len(text), *(border % (len(text) + 1) for border in borders)})
    return [text[a:b] for a, b in pairwise(places)]


@given(text=LETTERS, stops=STOPS, borders=st.lists(st.integers(0, 40), max_size=20))
@example(text="aaaaaaaaaaaa", stops=["aab"], borders=list(range(13)))
@example(text="alpha beta gamma", stops=["beta gamma"], borders=[2, 8, 14])
def test_where_a_text_is_cut_does_not_depend_on_how_it_arrives(text, stops, borders):
    stream, released, longest = StopFilter(stops), "", max(map(len, stops), default=1)
    arrived = 0
    for piece in pieces(text, borders):
        arrived += len(piece)
        released += stream.feed(piece)
        assert stream.stopped or arrived - len(released) < longest
    assert (released + stream.finish(), stream.stopped) == cut(text, stops)


@pytest.mark.parametrize("split", range(1, 16))
def test_a_stop_string_across_a_border_leaks_nothing(split):
    text, stream = "alpha beta gamma", StopFilter(["beta gamma"])
    assert stream.feed(text[:split]) + stream.feed(text[split:]) + stream.finish() == "alpha "
    assert stream.stopped


def test_a_stop_string_never_completed_is_released_at_the_end():
    stream = StopFilter(["beta gamma"])
    assert stream.feed("alpha beta gam") == "alpha "
    assert (stream.finish(), stream.stopped) == ("beta gam", False)


def test_of_two_stop_strings_where_one_begins_the_other_the_first_complete_one_cuts():
    stream = StopFilter(["beta gamma", "beta"])
    assert stream.feed("alpha beta gamma") == "alpha "


def test_text_after_a_stop_string_is_never_released():
    stream = StopFilter(["x"])
    assert [stream.feed("axb"), stream.feed("c"), stream.finish()] == ["a", "", ""]


def stream_of(tiny, text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(tiny.tokenizer, stop)
    return [stream.add(token) for token in tiny.tokenizer.encode(text, add_special_tokens=False)], stream


def test_characters_of_several_bytes_arrive_whole(tiny):
    text = "é 漢字 🦊🦉 end"
    parts, stream = stream_of(tiny, text)
    assert "".join(parts) + stream.finish() == text
    assert not any("�" in part for part in parts)
    assert len(parts) > len(text)


def test_an_unfinished_character_shows_at_the_end_and_not_before(tiny):
    first, *_ = tiny.tokenizer.encode("🦊", add_special_tokens=False)
    stream = TextStream(tiny.tokenizer, ())
    assert stream.add(first) == ""
    assert stream.finish() == "�"


def test_a_stop_string_of_several_bytes_is_found_across_tokens(tiny):
    parts, stream = stream_of(tiny, "owl 🦉🦊 fox", ("🦊",))
    assert ("".join(parts), stream.stopped) == ("owl 🦉", True)


def test_a_stop_string_in_the_last_held_back_piece_still_counts(tiny):
    parts, stream = stream_of(tiny, "a ", ("a ",))
    assert "".join(parts) + stream.finish() == ""
    assert stream.stopped
