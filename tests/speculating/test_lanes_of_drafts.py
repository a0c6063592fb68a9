"""Drafted rows in every lane: each row has the bits of a chain along its path, and what is not kept leaves no trace."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inference.modules import NAN, make
from kernels.emulated import Machine
from mlx_lm.models.cache import RotatingKVCache
from tiny_models import VOCABULARY, bare, make_tiny

from worker.engine import dense_in_place
from worker.engine.dense_in_place import DenseInPlace
from worker.engine.dense_tail import TAIL, DenseTail
from worker.engine.forward import MAX_ROWS, Forward, Path, rows_needed
from worker.engine.load import load
from worker.engine.module_lane import ModuleForward, look_at, snapshot
from worker.engine.packed import Packed, pack
from worker.engine.probe import bits, graph_nodes
from worker.engine.verify_bank import SIZES, TREE_SIZES, Switches, VerifyBank
from worker.kernels import dialect
from worker.kv.pages import PAGE, Pages, Sequence
from worker.kv.pool import Pool, Shape
from worker.kv.prefix import Opened

PAGES = 14
IDS = [place * 37 % VOCABULARY for place in range(200)]
EXACT = settings(derandomize=True, deadline=None, max_examples=12)


@dataclass
class Rig:
    """A lane over pools whose unwritten slots hold NaN, and one sequence."""

    lane: Forward
    pools: list[Pool]
    pages: Pages
    sequence: Sequence | None = None

    @classmethod
    def packed(cls, packed: Packed, form: str, pages: int = PAGES) -> Rig:
        heads = packed.heads
        pool = Pool(Shape(len(packed.layers), heads.kv_heads, heads.dim, packed.dtype), pages, fill=NAN)
        lane: Forward
        if form == "tail":
            lane = DenseTail(packed, pool)
        else:
            lane = DenseInPlace(packed, pool, prefill_rows=PAGE, switches=Switches(trees=True))
        return cls(lane, [pool], Pages(pages))

    @classmethod
    def module(cls, model: Any, pages: int = PAGES) -> Rig:
        lane = ModuleForward(model, look_at(model), pages=pages)
        for pool in lane.pools:
            pool.arrays[:] = [mx.full(array.shape, NAN, dtype=array.dtype) for array in pool.arrays]
            pool.finish()
        return cls(lane, lane.pools, Pages(pages))

    @contextmanager
    def job(self, ids: list[int], budget: int = 200) -> Iterator[Rig]:
        """The prompt *ids* is read, in scattered pages."""
        torn = [self.pages.reserve(PAGE) for _ in range(self.pages.count)]
        for one in torn[::2] + torn[1::2]:
            one.release()
        self.sequence = self.pages.reserve(rows_needed(len(ids) + budget, self.lane.prefill_rows))
        random.Random(len(ids)).shuffle(self.sequence.table)
        self.lane.begin(Opened(self.sequence, tuple(ids), b"", False, (), 0, True))
        step = max(self.lane.prefill_rows, 32)
        for start in range(0, len(ids), step):
            logits = self.lane.read(ids[start : start + step], last=start + step >= len(ids))
            mx.eval([] if logits is None else logits)
        yield self
        self.pages.check()
        self.lane.end()
        self.sequence.release()
        assert self.pages.free == self.pages.count

    def rows(self, tokens: list[int], parents: Path | None = None) -> mx.array:
        logits = self.lane.rows(mx.array(tokens, dtype=mx.uint32), parents)
        mx.eval(logits)
        assert logits.shape[0] == len(tokens)
        return logits

    def singles(self, tokens: list[int]) -> mx.array:
        return mx.concatenate([self.rows([token]) for token in tokens])

    def held(self, sequence: Sequence) -> list[mx.array]:
        """All rows of *sequence* in all layers, apart from the pools."""
        found = [
            mx.contiguous(pool.read(layer, sequence.table, sequence.length))
            for pool in self.pools
            for layer in range(len(pool.arrays))
        ]
        mx.eval(found)
        return [mx.array(np.array(one.astype(mx.float32))) for one in found]


def same(one: mx.array, other: mx.array) -> bool:
    return one.shape == other.shape and mx.array_equal(bits(one), bits(other)).item()


def lines(parents: Path | None, count: int) -> list[Path]:
    """The path of each row."""
    found: list[Path] = [(0,)]
    for row in range(1, count):
        found.append((*found[row - 1 if parents is None else parents[row - 1]], row))
    return found


@dataclass(frozen=True)
class Round:
    """One verify: its rows, whether a settle comes between it and the keep, and the row at the path's end."""

    tokens: list[int]
    parents: Path | None
    end: int
    settled: bool


def of_tree(parents: list[int], data: random.Random) -> Round:
    count = len(parents) + 1
    tokens = [data.randrange(VOCABULARY) for _ in range(count)]
    return Round(tokens, tuple(parents), data.randrange(count), data.random() < 0.2)


def rounds_of(seed: int, count: int, *, trees: bool = True) -> list[Round]:
    """Rounds of any width, chains and trees."""
    data = random.Random(seed)
    made = []
    for _ in range(count):
        size = data.choice([1, 2, 3, 4, 5, 8, 11, 16])
        if trees and data.random() < 0.7:
            made.append(of_tree([data.randrange(row) for row in range(1, size)], data))
        else:
            made.append(
                Round([data.randrange(VOCABULARY) for _ in range(size)], None, data.randrange(size), settled=False)
            )
    return made


def check_rounds(rig: Rig, other: Rig, fresh: Rig, ids: list[int], script: list[Round], budget: int = 200) -> None:
    """Every row as *other* computes it alone, and every kept one as *fresh* does, which sees no draft at all."""
    kept: list[int] = []
    got: list[mx.array] = []
    with rig.job(ids, budget), other.job(ids, budget):
        for one in script:
            start = rig.sequence.length
            logits = rig.rows(one.tokens, one.parents)
            paths = lines(one.parents, len(one.tokens))
            for row in {path[-1] for path in paths} - {above for path in paths for above in path[:-1]}:
                alone = other.singles([one.tokens[each] for each in paths[row]])
                assert same(mx.take(logits, mx.array(paths[row]), axis=0), alone), (one, row)
                other.sequence.truncate(start)
                other.lane.settle()
            if one.settled:
                rig.lane.settle()
            path = paths[one.end]
            rig.lane.keep(path)
            assert rig.sequence.length == start + len(path)
            other.singles([one.tokens[row] for row in path])
            kept += [one.tokens[row] for row in path]
            got += [logits[row : row + 1] for row in path]
            rig.pages.check()
        with fresh.job(ids, budget):
            want = fresh.singles(kept)
            assert same(mx.concatenate(got), want)
            rig.lane.settle()
            fresh.lane.settle()
            for held, wanted in zip(rig.held(rig.sequence), fresh.held(fresh.sequence), strict=True):
                assert same(held, wanted), "the stored rows are those of a run without drafts"


# --- packed, official operations


@EXACT
@given(
    st.sampled_from(["llama", "qwen3", "smollm3"]),
    st.sampled_from([1, 30, 31, 32, 33, 50, 64]),
    st.integers(0, 10**6),
)
def test_in_the_tail_form_drafts_change_no_bit(kind: str, length: int, seed: int) -> None:
    packed = pack(bare(kind))
    rigs = [Rig.packed(packed, "tail") for _ in range(3)]
    check_rounds(*rigs, IDS[:length], rounds_of(seed, 9))


def test_drafts_over_many_folds_of_the_tail_change_no_bit() -> None:
    packed = pack(bare("qwen2"))
    script = rounds_of(3, 30)
    assert sum(one.end + 1 for one in script) > 2 * TAIL
    assert any(one.settled for one in script)
    check_rounds(*[Rig.packed(packed, "tail", pages=24) for _ in range(3)], IDS[:40], script, budget=500)


def test_a_settle_between_rows_and_keep_costs_nothing_but_a_fold() -> None:
    packed = pack(bare())
    fork = (0, 1, 1, 0, 4)
    for end in range(6):
        for length in (40, 61):
            script = [Round(IDS[:6], fork, end, settled=True), Round(IDS[9:15], fork, 5 - end, settled=True)]
            check_rounds(*[Rig.packed(packed, "tail") for _ in range(3)], IDS[:length], script)


def test_the_tail_form_copies_no_pool_for_a_tree() -> None:
    rig = Rig.packed(pack(bare()), "tail", pages=4096)
    layer = rig.pools[0].arrays[0].nbytes

    def verifies(count: int) -> int:
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        for _ in range(count):
            rig.rows(IDS[:6], (0, 1, 1, 0, 4))
            rig.lane.keep((0, 4, 5))
        return mx.get_peak_memory() - before

    with rig.job(IDS[:40], 300):
        verifies(2)
        # Beyond two tails, so that folds are among them.
        assert verifies(2 * TAIL // 3 + 4) < layer / 4
        held = list(rig.pools[0].arrays[:1]), rig.pools[0].arrays[0][:, :, :1]
        assert verifies(2 * TAIL // 3 + 4) > layer / 2, "a second reference makes MLX copy, and the count sees it"
        del held


@pytest.mark.parametrize("form", ["tail", "in place"])
def test_a_step_of_one_row_is_no_node_more_where_drafts_are_possible(form: str) -> None:
    rig = Rig.packed(pack(bare()), form)
    with rig.job(IDS[:40]):
        found = []
        for kept in (False, True, True):
            rig.rows([5])
            if kept:
                rig.lane.keep((0,))
            logits = rig.lane.rows(mx.array([6], dtype=mx.uint32), () if kept else None)
            found.append(graph_nodes(logits))
            mx.eval(logits)
        assert len(set(found)) == 1


# --- packed, in place


@EXACT
@given(st.sampled_from(["llama", "qwen3"]), st.sampled_from([1, 31, 32, 50, 64]), st.integers(0, 10**6))
def test_in_place_with_plain_operations_drafts_change_no_bit(kind: str, length: int, seed: int) -> None:
    packed = pack(bare(kind))
    check_rounds(*[Rig.packed(packed, "in place") for _ in range(3)], IDS[:length], rounds_of(seed, 5))


TREES = [
    # (parents, row at the end of the path): a prefix of a chain, all of it, row 0 alone, and moves near and far.
    (None, 2),
    (None, 0),
    ((0, 1, 2, 0, 4, 5), 6),
    ((0, 0, 0, 3, 3, 3), 6),
    ((0, 1, 1, 1, 0, 5, 6, 6, 0, 9, 10, 11, 12, 13, 14), 15),
]


@pytest.mark.parametrize(("parents", "end"), TREES)
@pytest.mark.parametrize("length", [29, 63])
def test_kernels_that_write_in_place_give_the_rows_of_a_chain(
    length: int, parents: Path | None, end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bare(head_dim=16, num_hidden_layers=2)
    model.set_dtype(mx.bfloat16)
    count = 7 if parents is None else len(parents) + 1
    script = [Round([place * 5 for place in range(count)], parents, end, settled=False)] * 2
    machine = Machine()
    with machine.on(monkeypatch):
        packed = pack(model)
        check_rounds(*[Rig.packed(packed, "in place") for _ in range(3)], IDS[:length], script)
    moves = 0 if parents is None else 2 * len(packed.layers)
    assert machine.launches.get("move_rows", 0) == moves, "a prefix of a chain moves nothing"


@pytest.mark.parametrize("start", [2040, 2047])
def test_a_tree_over_the_edge_where_pieces_grow_gives_the_rows_of_a_chain(
    start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bare(num_hidden_layers=1)
    model.set_dtype(mx.bfloat16)
    parents = (0, 1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12, 13, 14)
    with Machine().on(monkeypatch):
        rig = Rig.packed(pack(model), "in place", pages=66)
        noise = mx.random.normal(rig.pools[0].arrays[0].shape, key=mx.random.key(1)).astype(mx.bfloat16)
        rig.pools[0].arrays[0] = noise
        rig.sequence = rig.pages.reserve(start + 2 * MAX_ROWS)
        rig.sequence.append(start, prompt=True)
        rig.lane.begin(Opened(rig.sequence, (), b"", False, (), start, True))
        got = rig.rows(IDS[:16], parents)
        rig.lane.keep((0, 9, 10, 11, 12, 13, 14, 15))
        after = rig.rows([7])
        rig.sequence.truncate(start)
        want = rig.singles([IDS[0], *IDS[9:16], 7])
        assert same(mx.concatenate([got[:1], got[9:], after]), want)
        rig.sequence.truncate(start)
        assert same(rig.singles(IDS[:9]), got[:9])


def test_a_forward_after_a_move_in_place_comes_after_it_by_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write in place leaves no trace in the graph: the next graph must hold every move."""
    made: list[mx.array] = []

    def in_place(pool: mx.array, moves: mx.array, use_kernel: bool | None) -> tuple[mx.array, mx.array]:
        made.append(moves + 0)
        return made[-1], pool

    monkeypatch.setattr(dense_in_place, "move_rows", in_place)
    rig = Rig.packed(pack(bare()), "in place")
    with rig.job(IDS[:40]):
        lane = rig.lane
        mx.eval(lane.rows(mx.array([1, 2, 3, 4], dtype=mx.uint32), (0, 0, 0)))
        lane.keep((0, 2))
        assert len(made) == 2
        assert 0 < graph_nodes(made[0]) < graph_nodes(made[1]) == graph_nodes(*made)
        after = lane.rows(mx.array([4], dtype=mx.uint32))
        assert graph_nodes(made[1]) < graph_nodes(after) == graph_nodes(after, *made)


@pytest.mark.parametrize("rows", TREE_SIZES)
def test_of_a_tree_in_place_only_kernels_touch_a_pool(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialect, "target", lambda: "metal")
    packed = pack(bare())
    pool = Pool(Shape(len(packed.layers), packed.heads.kv_heads, packed.heads.dim, packed.dtype), 8)
    bank, names, takers = VerifyBank(packed, Switches()), {"": 0}, set()

    def hear(told: dict) -> None:
        if told["type"] == "primitive":
            names[""] += 1
            if any(shape == pool.arrays[0].shape for _, shape, _ in told["inputs"]):
                takers.add(told["name"])

    tokens, meta = mx.zeros((rows,), dtype=mx.uint32), mx.zeros((9,), dtype=mx.int32)
    mx.export_function(hear, partial(bank._forward, False), tokens, meta, *pool.arrays)
    chain, names[""] = names[""], 0
    over_tree = partial(bank._over_tree, False)
    mx.export_function(hear, over_tree, tokens, meta, mx.zeros((2, 16), dtype=mx.int32), *pool.arrays)
    assert takers == {"CustomKernel"}
    assert names[""] == chain, "a tree is an operand, no step of its own"


def test_tracing_compiles_every_size_as_chain_and_as_tree() -> None:
    packed = pack(bare())
    rig = Rig.packed(packed, "in place")
    with rig.job(IDS[:33], 31):
        rig.lane.trace()
        wanted = {(size, False, False) for size in SIZES} | {(size, True, False) for size in TREE_SIZES}
        assert set(rig.lane.bank._compiled) == wanted
        rig.rows([1, 2, 3], (0, 0))
        rig.lane.keep((0, 2))
        assert set(rig.lane.bank._compiled) == wanted
    plain = DenseInPlace(packed, rig.pools[0], prefill_rows=PAGE, switches=Switches())
    assert (plain.width, plain.trees, plain.why_narrow) == (16, False, "forwards over trees are switched off")


# --- shared pages


SHARED = [(form, None, path) for form in ("tail", "in place", "module") for path in ((0,), (0, 1, 2))]
SHARED += [(form, (0, 1, 0, 3, 4, 5), (0, 3, 4, 5, 6)) for form in ("tail", "in place")]


@pytest.mark.parametrize(("form", "parents", "path"), SHARED)
def test_rows_that_another_sequence_took_over_meanwhile_stay_as_they_are(
    form: str, parents: Path | None, path: Path
) -> None:
    """A page may be shared as soon as it was settled; what a keep then takes back or moves is copied before."""
    model = bare()
    packed = pack(model) if form != "module" else None
    rigs = [Rig.module(model) if packed is None else Rig.packed(packed, form) for _ in range(2)]
    rig, fresh = rigs
    for length in (29, 31, 40, 62):
        with rig.job(IDS[:length], 60), fresh.job(IDS[:length], 60):
            rig.rows(IDS[:7], parents)
            rig.lane.settle()
            twin, copies = rig.sequence.fork(length + 20)
            for pool in rig.pools:
                pool.copy(copies)
            before = rig.held(twin)
            rig.lane.keep(path)
            rig.pages.check()
            fresh.singles([IDS[row] for row in path])
            for _ in range(3):
                assert same(rig.singles(IDS[50:59]), fresh.singles(IDS[50:59]))
            rig.lane.settle()
            rig.pages.check()
            assert all(same(one, other) for one, other in zip(rig.held(twin), before, strict=True))
            twin.release()


# --- paths that are none


@pytest.mark.parametrize("form", ["tail", "in place"])
def test_what_is_no_path_is_refused(form: str) -> None:
    rig = Rig.packed(pack(bare()), form)
    with rig.job(IDS[:40]):
        with pytest.raises(AssertionError, match="rows come first"):
            rig.lane.keep((0,))
        rig.rows([1, 2, 3, 4], (0, 0, 2))
        for path in ((), (1,), (0, 3), (0, 1, 3), (0, 2, 3, 4), (0, 0)):
            with pytest.raises(AssertionError, match="path"):
                rig.lane.keep(path)
        with pytest.raises(AssertionError, match="a path is kept"):
            rig.rows([1])
        rig.lane.keep((0, 2, 3))
        with pytest.raises(AssertionError, match="rows come first"):
            rig.lane.keep((0,))
        for parents in ((0,), (0, 2, 0), (0, -1, 0)):
            with pytest.raises(AssertionError, match="parent"):
                rig.rows([1, 2, 3, 4], parents)


# --- mlx-lm's modules

EXACT_KINDS = ["llama", "openelm", "deepseek_v2"]
RESTORED_KINDS = ["lfm2", "mamba", "qwen3_5"]
ROUNDED_KINDS = ["gemma3_text", "iquestloopcoder", "granite_hybrid", "llama-window"]


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    def of(kind: str) -> Any:
        if kind in ("qwen3_5", "granite_hybrid", "llama-window"):
            return load(make_tiny(kind, tmp_path_factory.mktemp(kind))).model
        return make(kind)

    return {kind: of(kind) for kind in (*EXACT_KINDS, *RESTORED_KINDS, *ROUNDED_KINDS)}


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_caches_that_hold_rows_are_cut_and_drafts_change_no_bit(kind: str, modules: dict[str, Any]) -> None:
    model = modules[kind]
    assert not look_at(model).replays
    for length in (1, 31, 60):
        script = rounds_of(length, 8, trees=False)
        check_rounds(*[Rig.module(model) for _ in range(3)], IDS[:length], script)


def kept_of(rig: Rig, script: list[Round]) -> tuple[list[list[int]], mx.array]:
    """Runs *script*: the kept ids of each round, and their logits."""
    kept, got = [], []
    for one in script:
        logits = rig.rows(one.tokens)
        rig.lane.keep(tuple(range(one.end + 1)))
        kept.append(one.tokens[: one.end + 1])
        got.append(logits[: one.end + 1])
    return kept, mx.concatenate(got)


@pytest.mark.parametrize("kind", RESTORED_KINDS)
def test_recurrent_states_are_put_back_and_drafts_change_no_bit(kind: str, modules: dict[str, Any]) -> None:
    model = modules[kind]
    assert look_at(model).replays
    for length in (1, 31, 60):
        rig, fresh = Rig.module(model), Rig.module(model)
        assert (rig.lane.width, rig.lane.trees) == (MAX_ROWS, False)
        with rig.job(IDS[:length]), fresh.job(IDS[:length]):
            kept, got = kept_of(rig, rounds_of(length, 8, trees=False))
            assert same(got, fresh.singles([token for ids in kept for token in ids]))
            assert same(rig.singles(IDS[:5]), fresh.singles(IDS[:5]))


@pytest.mark.parametrize("kind", ROUNDED_KINDS)
def test_windows_are_put_back_to_what_forwards_without_the_wrong_rows_leave(
    kind: str, modules: dict[str, Any]
) -> None:
    """These models round otherwise in a forward of one row, so the other lane is given the same forwards."""
    model = modules[kind]
    for length in (20, 60):
        rig, fresh = Rig.module(model), Rig.module(model)
        with rig.job(IDS[:length]), fresh.job(IDS[:length]):
            for one in rounds_of(length, 8, trees=False):
                kept, got = kept_of(rig, [one])
                want = fresh.rows(kept[0])
                assert mx.allclose(got, want, atol=1e-4 * mx.abs(want).max().item()).item()
                assert same(rig.singles(IDS[:2]), fresh.singles(IDS[:2]))


def test_a_snapshot_is_not_changed_by_rows_that_a_cache_writes_in_place() -> None:
    cache = RotatingKVCache(4)
    for place in range(6):
        cache.update_and_fetch(*[mx.full((1, 1, 1, 8), float(place))] * 2)
    before = snapshot(cache)
    held = [one.tolist() for one in before[:2]]
    cache.update_and_fetch(*[mx.full((1, 1, 1, 8), 9.0)] * 2)
    assert [one.tolist() for one in before[:2]] == held != [one.tolist() for one in cache.state[:2]]
    cache.state = before
    assert (cache.offset, cache.keys.tolist()) == (6, held[0])


class Stubborn:
    """A model whose caches do not go back: their state is only half of what they hold."""

    def __init__(self, model: Any, how: str) -> None:
        self.layers, self._model, self._how = model.layers, model, how

    def make_cache(self) -> list[Any]:
        made = self._model.make_cache()
        for cache in made:
            kind = type(cache)
            if self._how == "refuses":
                # No setter: the state can be looked at alone.
                cache.__class__ = type(kind.__name__, (kind,), {"state": property(kind.state.fget)})
            else:
                cache.__class__ = type(
                    kind.__name__, (kind,), {"state": property(kind.state.fget, lambda _self, _state: None)}
                )
        return made

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        return self._model(ids, cache=cache)


@pytest.mark.parametrize(("how", "why"), [("refuses", "cannot be put back"), ("forgets", "not what they were")])
def test_caches_that_cannot_be_put_back_take_one_row_and_say_why(
    how: str, why: str, modules: dict[str, Any]
) -> None:
    rig = Rig.module(Stubborn(modules["mamba"], how))
    assert rig.lane.width == 1
    assert why in rig.lane.why_narrow
    with rig.job(IDS[:10]):
        # Rows that are known are no drafts.
        rig.rows(IDS[:4])
        rig.rows(IDS[4:8])
        with pytest.raises(AssertionError, match=why):
            rig.lane.keep((0, 1))
        rig.lane.keep((0, 1, 2, 3))


def test_a_module_takes_no_tree(modules: dict[str, Any]) -> None:
    rig = Rig.module(modules["llama"])
    with rig.job(IDS[:10]), pytest.raises(AssertionError, match="chain alone"):
        rig.rows([1, 2, 3], (0, 0))


def test_the_module_lane_copies_no_pool_for_drafts(modules: dict[str, Any]) -> None:
    for kind in ("llama", "lfm2"):
        rig = Rig.module(modules[kind], pages=4000)
        layer = rig.pools[0].arrays[0].nbytes
        with rig.job(IDS[:40], 300):
            peaks = []
            for _ in range(12):
                mx.synchronize()
                mx.reset_peak_memory()
                before = mx.get_active_memory()
                rig.rows(IDS[:8])
                rig.lane.keep((0, 1, 2))
                peaks.append(mx.get_peak_memory() - before)
            assert max(peaks) < layer / 2
