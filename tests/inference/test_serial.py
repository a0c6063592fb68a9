"""The serial loop over a lane that plays a script: who is asked when, what is kept, what is given back."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import pytest

from worker.engine import serial
from worker.engine.engine import Cancelled, EngineRequest, NumericError
from worker.engine.forward import MAX_ROWS, Path, Started, branching, positions_within
from worker.engine.load import LoadedModel
from worker.engine.sample import Sampling
from worker.engine.serial import SerialEngine
from worker.kv.pages import Pages
from worker.kv.prefix import Opened, PrefixIndex

WIDTH = 100
PAGES = 12


class Script:
    """A lane in which id n is followed by n + 1; `heard` tells the calls. `spoiled`: position whose logits are NaN."""

    row_invariant = True
    prefix_reuse = True
    why = ""
    width = MAX_ROWS
    trees = True
    why_narrow = ""

    def __init__(self, *, prefill_rows: int = 1, one_ahead: bool = True, spoiled: int | None = None) -> None:
        self.prefill_rows = prefill_rows
        self.one_ahead = one_ahead
        self.spoiled = spoiled
        self.capacity = positions_within(PAGES, prefill_rows)
        self.heard: list[Any] = []
        self.opened: Opened | None = None
        self.started: Started | None = None

    def begin(self, opened: Opened) -> None:
        self.opened = opened
        self.heard.append(("begin", opened.cached))

    def read(self, ids: Sequence[int], last: bool) -> mx.array | None:
        assert self.opened is not None
        assert self.opened.sequence.length % self.prefill_rows == 0
        self.heard.append(("read", len(ids)))
        self.opened.sequence.append(len(ids), prompt=True)
        return self._after(mx.array(ids[-1:])) if last else None

    def size(self, rows: int) -> int:
        return rows

    def rows(self, tokens: mx.array, parents: Path | None = None) -> mx.array:
        assert self.opened is not None
        assert self.started is None or self.started.parents is None, "of a tree a path is kept"
        tree = branching(parents, tokens.size)
        self.started = Started(self.opened.sequence.length, tokens.size, tree)
        self.opened.sequence.append(tokens.size, prompt=False)
        self.heard.append(("rows", tokens.size) if tree is None else ("rows", tokens.size, tree))
        return self._after(tokens)

    def keep(self, path: Path) -> None:
        assert self.opened is not None
        assert self.started is not None, "rows come first"
        start, unmoved = self.started.start, self.started.unmoved(path)
        self.started = None
        self.opened.sequence.truncate(start + unmoved)
        self.opened.sequence.append(len(path) - unmoved, prompt=False)
        self.heard.append(("keep", path))

    def _after(self, tokens: mx.array) -> mx.array:
        assert self.opened is not None
        logits = (mx.arange(WIDTH) == (tokens[:, None] + 1) % WIDTH).astype(mx.float32) * 50
        return logits * float("nan") if self.opened.sequence.length == self.spoiled else logits

    def trace(self) -> None:
        self.heard.append("trace")

    def settle(self) -> None:
        self.heard.append("settle")

    def end(self) -> None:
        self.heard.append("end")


class Rig:
    def __init__(self, lane: Script, chunk: int = 512) -> None:
        self.lane = lane
        self.pages = Pages(PAGES)
        self.index = PrefixIndex(self.pages, page_bytes=1, limit_bytes=PAGES, align=lane.prefill_rows)
        loaded = cast("LoadedModel", SimpleNamespace(width=WIDTH, vocabulary=WIDTH, dtype="float32"))
        self.engine = SerialEngine(loaded, lane, self.index, prefill_chunk=chunk)

    def start(self, prompt: Sequence[int], budget: int = 5, **more: Any) -> list[tuple[int, int]]:
        told: list[tuple[int, int]] = []
        more.setdefault("sampling", Sampling(seed=0))
        request = EngineRequest(prompt=tuple(prompt), max_tokens=budget, **more)
        self.engine.start(request, lambda *progress: told.append(progress))
        return told

    def draw(self, count: int) -> list[int]:
        return [self.engine.step().token for _ in range(count)]

    def check(self, held: int) -> None:
        """The books are right, and only the index holds pages."""
        self.index.check()
        assert not self.pages.sequences
        assert self.pages.free == PAGES - held


def test_a_forward_runs_ahead_of_the_token_that_is_read() -> None:
    rig = Rig(Script())
    rig.start([1, 2, 3])
    assert rig.lane.heard == [("begin", 0), ("read", 3)]
    assert rig.draw(1) == [4]
    assert rig.lane.heard[2:] == [("rows", 1)]
    assert rig.draw(1) == [5]
    assert rig.lane.heard[2:] == [("rows", 1)] * 2


def test_the_last_token_of_the_budget_has_no_forward_behind_it() -> None:
    rig = Rig(Script())
    rig.start([1, 2, 3], budget=3)
    assert rig.draw(3) == [4, 5, 6]
    assert rig.lane.heard.count(("rows", 1)) == 2
    with pytest.raises(RuntimeError, match="beyond its budget"):
        rig.engine.step()


def test_a_lane_that_cannot_run_ahead_is_asked_after_the_token_was_read() -> None:
    rig = Rig(Script(one_ahead=False))
    rig.start([1, 2, 3], budget=3)
    assert rig.draw(3) == [4, 5, 6]
    assert rig.lane.heard.count(("rows", 1)) == 2
    figures = rig.engine.stop()
    assert (figures.verify_forwards, figures.widths) == (3, {1: 3})


def test_the_step_in_flight_is_dropped_and_its_row_is_not_kept() -> None:
    rig = Rig(Script())
    rig.start(range(40), budget=20)
    assert rig.draw(2) == [40, 41]
    assert rig.lane.opened.sequence.length == 42
    rig.engine.stop()
    rig.check(held=2)
    # 41 was drawn, and the forward over it dropped: its row may be anything.
    told = rig.start(range(60), cache="answers")
    assert told[0] == (41, 60)
    assert rig.engine.stop().prefix_exact is False
    assert rig.start(range(60))[0] == (40, 60)


def test_a_prompt_is_read_in_chunks_with_a_look_for_a_cancel_after_each() -> None:
    rig = Rig(Script(), chunk=16)
    assert rig.start(range(40)) == [(0, 40), (16, 40), (32, 40), (40, 40)]
    rig = Rig(Script(prefill_rows=32))
    assert rig.start(range(70)) == [(0, 70), (32, 70), (64, 70), (70, 70)]
    rig.engine.stop()
    assert rig.start(range(70)) == [(64, 70), (70, 70)]


def test_a_cancelled_prefill_keeps_the_chunks_that_were_read() -> None:
    rig = Rig(Script(), chunk=32)
    request = EngineRequest(prompt=tuple(range(90)), sampling=Sampling(seed=0), max_tokens=5)

    def cancel(done: int, _total: int) -> None:
        if done == 64:
            raise Cancelled

    with pytest.raises(Cancelled):
        rig.engine.start(request, cancel)
    assert rig.engine.stop().cached_tokens == 0
    rig.check(held=2)
    assert rig.start(range(90))[0] == (64, 90)


def test_ids_drawn_before_are_read_sixteen_at_a_time_and_not_drawn_again() -> None:
    rig = Rig(Script())
    rig.start(range(10), budget=4, drawn=tuple(range(10, 45)))
    kept = [("begin", 0), ("read", 10)]
    for count in (16, 16, 3):
        kept += [("rows", count), ("keep", tuple(range(count)))]
    assert rig.lane.heard == kept
    assert rig.draw(4) == [45, 46, 47, 48]
    rig.engine.stop()
    # 10 + 35 + 3 rows; as those of an answer they serve only who takes answers.
    assert rig.index.lookup(range(60), owner=b"", cache=True).length == 10
    assert rig.index.lookup(range(60), owner=b"", cache="answers").length == 48


@pytest.mark.parametrize("one_ahead", [True, False])
def test_logits_that_are_no_numbers_end_the_request_and_leave_nothing(one_ahead: bool) -> None:
    rig = Rig(Script(one_ahead=one_ahead, spoiled=34))
    rig.start(range(32), budget=9)
    assert rig.draw(2) == [32, 33]
    with pytest.raises(NumericError):
        rig.engine.step()
    rig.engine.stop()
    rig.check(held=0)
    assert rig.start(range(32))[0] == (0, 32)


def test_stop_frees_everything_and_may_be_called_again() -> None:
    rig = Rig(Script())
    rig.start(range(40), cache=False)
    rig.draw(1)
    assert rig.engine.stop().verify_forwards == 1
    rig.check(held=0)
    assert rig.engine.stop().verify_forwards == 0
    with pytest.raises(RuntimeError, match="without a started request"):
        rig.engine.step()


def test_a_start_ends_the_request_before() -> None:
    rig = Rig(Script())
    rig.start(range(40))
    rig.start(range(50))
    assert len(rig.pages.sequences) == 1
    assert rig.draw(1) == [50]


def test_a_request_that_cannot_be_drawn_holds_nothing() -> None:
    rig = Rig(Script())
    with pytest.raises(IndexError):
        rig.start(range(40), sampling=Sampling(seed=0, logit_bias={WIDTH: 1.0}))
    rig.check(held=0)
    assert rig.lane.heard == []


def test_a_lane_without_reuse_begins_cold_and_keeps_nothing() -> None:
    rig = Rig(Script())
    rig.lane.prefix_reuse = False
    rig.start(range(64))
    rig.engine.stop()
    rig.check(held=0)


def test_warm_up_leaves_nothing_behind() -> None:
    rig = Rig(Script())
    rig.engine.warm_up()
    rig.check(held=0)
    assert "trace" in rig.lane.heard


def test_a_warm_up_over_bad_numbers_is_no_error() -> None:
    rig = Rig(Script(spoiled=3))
    rig.engine.warm_up()
    rig.check(held=0)


def test_what_is_reused_stored_and_evicted_is_counted_for_health() -> None:
    rig = Rig(Script())
    assert set(rig.engine.counts().values()) == {0}
    for first in (0, 0, 50):
        rig.start([(first + place) % WIDTH for place in range(200)], budget=5)
        rig.engine.stop()
    counts = {
        "opened": 3,
        "hits": 1,
        "reused_tokens": 199,
        "stored_pages": 14,
        "evicted_pages": 2,
        "held_pages": 12,
    }
    assert rig.engine.counts() == counts
    rig.start(range(50), cache=False)
    rig.engine.stop()
    # A job without reuse takes room all the same.
    assert rig.engine.counts() == {**counts, "evicted_pages": 5, "held_pages": 9}
    without = Script()
    without.prefix_reuse = False
    assert Rig(without).engine.counts() is None


def test_memory_kept_for_reuse_is_given_back_now_and_then_and_behind_the_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serial, "_FREED_EVERY", 100)
    rig = Rig(Script(), chunk=30)
    monkeypatch.setattr(mx, "clear_cache", lambda: rig.lane.heard.append("freed"))
    rig.start(range(250))
    rig.draw(3)
    reads = [one for one in rig.lane.heard if one == "freed" or one[0] == "read"]
    whole = ("read", 30)
    assert reads == [*[whole] * 4, "freed", *[whole] * 3, "freed", whole, ("read", 10), "freed"]
