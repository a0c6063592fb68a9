"""The packed lane in both forms of the cache: the module's numbers, and no copy of a pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import pytest
from mlx import nn
from tiny_models import VOCABULARY, bare

from worker.engine.dense_in_place import DenseInPlace
from worker.engine.dense_tail import TAIL, DenseTail
from worker.engine.forward import Forward, rows_needed
from worker.engine.packed import Packed, pack
from worker.engine.probe import graph_nodes
from worker.engine.verify_bank import SIZES, Switches, VerifyBank, size_for
from worker.kernels import dialect
from worker.kernels.rope_write import Heads, rope_write
from worker.kv.pages import Copy, Pages
from worker.kv.pool import Pool, Shape
from worker.kv.prefix import Opened, PrefixIndex

IDS = [place * 37 % VOCABULARY for place in range(200)]


@dataclass
class Rig:
    """A lane over a pool whose unwritten slots hold NaN."""

    lane: Forward
    pool: Pool
    index: PrefixIndex

    @contextmanager
    def job(self, prompt: list[int], budget: int) -> Iterator[Opened]:
        needed = rows_needed(len(prompt) + budget, self.lane.prefill_rows)
        opened = self.index.open(prompt, needed, owner=b"", cache=False)
        self.lane.begin(opened)
        yield opened
        self.lane.end()
        opened.sequence.release()

    def read(self, ids: list[int], chunk: int) -> mx.array:
        for start in range(0, len(ids), chunk):
            logits = self.lane.read(ids[start : start + chunk], last=start + chunk >= len(ids))
        return logits


def make(packed: Packed, form: str, rows: int, pages: int = 20) -> Rig:
    pool = Pool(
        Shape(len(packed.layers), packed.heads.kv_heads, packed.heads.dim, packed.dtype), pages, fill=float("nan")
    )
    lane: Forward = (
        DenseTail(packed, pool, prefill_rows=rows)
        if form == "tail"
        else DenseInPlace(packed, pool, prefill_rows=rows, switches=Switches())
    )
    return Rig(lane, pool, PrefixIndex(Pages(pages), page_bytes=1, limit_bytes=0))


FORMS = [("tail", 1), ("tail", 64), ("in place", 32), ("in place", 64)]


@pytest.mark.parametrize(("form", "rows"), FORMS)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_lane_computes_what_the_module_computes(kind: str, form: str, rows: int) -> None:
    model = bare(kind)
    rig = make(pack(model), form, rows)
    for length in (1, 31, 32, 33, 64, 65):
        want = model(mx.array([IDS[: length + 40]]))[0]
        with rig.job(IDS[:length], 40):
            got = [rig.read(IDS[:length], max(rows, 7))]
            at = length
            for count in (1, 1, 2, 16, 3, 1, 8, 5, 3):
                got.append(rig.lane.rows(mx.array(IDS[at : at + count], dtype=mx.uint32)))
                at += count
            assert at == length + 40
            got = mx.concatenate(got)
            assert mx.abs(got - want[length - 1 :]).max() < 2e-5 * mx.abs(want).max()


@pytest.mark.parametrize(("form", "rows"), FORMS)
def test_settling_computes_the_rows_of_a_prompt_whose_logits_nobody_asked_for(form: str, rows: int) -> None:
    """As after a cancel behind the last chunk: the rows are stored, so they must be there."""
    rig = make(pack(bare()), form, rows)
    with rig.job(IDS[:64], 40):
        rig.read(IDS[:64], max(rows, 32))
        rig.lane.settle()
        assert graph_nodes(*rig.pool.arrays) == 0


def test_rows_that_the_host_knows_are_computed_after_a_prompt_written_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A write in place leaves no trace in the graph, so the rows' graph must hold the prompt's last forward."""

    def in_place(
        qkv: mx.array, table: mx.array, pool: mx.array, meta: mx.array, heads: Heads, use_kernel: bool | None
    ) -> tuple[mx.array, mx.array]:
        return rope_write(qkv, table, pool, meta, heads, use_kernel=use_kernel)[0], pool

    monkeypatch.setattr("worker.engine.dense_in_place.rope_write", in_place)
    rig = make(pack(bare("llama")), "in place", 32)
    with rig.job(IDS[:32], 40):
        last = rig.read(IDS[:32], 32)
        rows = rig.lane.rows(mx.array(IDS[32:40], dtype=mx.uint32))
        assert 0 < graph_nodes(last) < graph_nodes(rows) == graph_nodes(rows, last)


@pytest.mark.parametrize(("form", "rows"), FORMS)
def test_rows_can_be_taken_back_after_they_were_settled(form: str, rows: int) -> None:
    model = bare()
    rig = make(pack(model), form, rows)
    want = model(mx.array([IDS[:40]]))[0]
    with rig.job(IDS[:30], 20) as opened:
        rig.read(IDS[:30], rows if rows > 1 else 30)
        rig.lane.rows(mx.array([*IDS[30:35], 95, 95, 95], dtype=mx.uint32))
        rig.lane.settle()
        opened.sequence.truncate(35)
        got = rig.lane.rows(mx.array(IDS[35:40], dtype=mx.uint32))
        assert mx.abs(got - want[35:]).max() < 2e-5 * mx.abs(want).max()


@pytest.mark.parametrize(("form", "rows"), FORMS)
def test_rows_that_were_taken_back_leave_no_trace(form: str, rows: int) -> None:
    model = bare()
    rig = make(pack(model), form, rows)
    want = model(mx.array([IDS[:150]]))[0]
    with rig.job(IDS[:30], 120) as opened:
        rig.read(IDS[:30], rows if rows > 1 else 30)
        at, got = 30, []
        for kept in (0, 3, 16, 1, 0, 16, 16, 16, 7, 16, 16):
            wrong = mx.array([*IDS[at : at + kept], *[95] * (16 - kept)], dtype=mx.uint32)
            got.append(rig.lane.rows(wrong)[:kept])
            at += kept
            assert opened.sequence.truncate(at) == ()
            rig.lane.settle()
        got = mx.concatenate(got)
        assert mx.abs(got - want[30:at]).max() < 2e-5 * mx.abs(want).max()


@pytest.mark.parametrize(("form", "rows"), FORMS)
def test_a_table_that_changed_at_the_same_length_is_seen(form: str, rows: int) -> None:
    """The next row lies in a page that the sequence got after the forward before, or got anew."""
    model = bare()
    rig = make(pack(model), form, rows)
    want = model(mx.array([IDS[:72]]))[0]
    sequence = rig.index.pages.reserve(64)
    rig.lane.begin(Opened(sequence, tuple(IDS[:56]), b"", False, (), 0, True))
    rig.read(IDS[:56], rows if rows > 1 else 56)
    got = [rig.lane.rows(mx.array(IDS[56:64], dtype=mx.uint32))]
    rig.lane.settle()
    sequence.reserve(96)
    got.append(rig.lane.rows(mx.array(IDS[64:68], dtype=mx.uint32)))
    rig.lane.settle()
    # Another sequence relies on these rows, which are then taken back, and counted again behind copies.
    twin, copies = sequence.fork(96)
    rig.pool.copy(copies)
    sequence.fix(68)
    copies = sequence.truncate(63)
    rig.pool.copy(copies)
    sequence.append(1, prompt=False)
    rig.pool.copy([Copy(twin.table[1], sequence.table[1], 32), Copy(twin.table[2], sequence.table[2], 4)])
    sequence.append(4, prompt=False)
    got.append(rig.lane.rows(mx.array(IDS[68:72], dtype=mx.uint32)))
    assert mx.abs(mx.concatenate(got) - want[56:72]).max() < 2e-5 * mx.abs(want).max()
    # What the twin holds is untouched.
    rig.lane.end()
    sequence.release()
    rig.lane.begin(Opened(twin, (), b"", False, (), 68, True))
    again = rig.lane.rows(mx.array(IDS[68:72], dtype=mx.uint32))
    assert mx.abs(again - want[68:72]).max() < 2e-5 * mx.abs(want).max()
    rig.lane.end()
    twin.release()


def test_the_tail_form_copies_no_pool_while_steps_run_ahead() -> None:
    packed = pack(bare())
    rig = make(packed, "tail", 1, pages=4096)
    layer = rig.pool.arrays[0].nbytes
    with rig.job(IDS[:40], 300):
        logits = rig.read(IDS[:40], 40)

        def steps(count: int) -> int:
            nonlocal logits
            mx.synchronize()
            mx.reset_peak_memory()
            before = mx.get_active_memory()
            for _ in range(count):
                ahead = rig.lane.rows(mx.argmax(logits[-1:], axis=-1).astype(mx.uint32))
                mx.async_eval(ahead)
                mx.eval(logits)
                logits = ahead
            mx.eval(logits)
            return mx.get_peak_memory() - before

        # Beyond two tails, so that folds are among the steps.
        assert steps(2 * TAIL + 10) < layer / 4
        held = list(rig.pool.arrays[:1]), rig.pool.arrays[0][:, :, :1]
        assert steps(2 * TAIL + 10) > layer / 2, "a second reference makes MLX copy, and the count sees it"
        del held


def graph_of(packed: Packed, rows: int) -> tuple[list[str], set[str]]:
    """Names of the primitives of a step of *rows* rows on a GPU, and of those that take a pool."""
    pool = Pool(Shape(len(packed.layers), packed.heads.kv_heads, packed.heads.dim, packed.dtype), 8)
    tokens, meta = mx.zeros((rows,), dtype=mx.uint32), mx.zeros((9,), dtype=mx.int32)
    found: list[str] = []
    takers: set[str] = set()

    def hear(told: dict) -> None:
        if told["type"] == "primitive":
            found.append(told["name"])
            if any(shape == pool.arrays[0].shape for _, shape, _ in told["inputs"]):
                takers.add(told["name"])

    bank = VerifyBank(packed, Switches())
    mx.export_function(hear, partial(bank._forward, False), tokens, meta, *pool.arrays)
    return found, takers


@pytest.mark.parametrize("rows", SIZES)
def test_a_step_in_place_is_few_nodes_and_only_kernels_touch_a_pool(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialect, "target", lambda: "metal")
    packed = pack(bare())
    names, takers = graph_of(packed, rows)
    assert takers == {"CustomKernel"}
    layers = len(packed.layers)
    assert names.count("CustomKernel") == 6 * layers + 1
    # Beside them: the rows of the embedding, the length, and shapes.
    assert len(names) <= 9 * layers + 8, names


@pytest.mark.parametrize(("bits", "invariant"), [(4, True), (6, False), (8, True)])
def test_rows_are_told_to_be_invariant_only_where_our_products_serve_every_weight(
    bits: int, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bare()
    nn.quantize(model, 32, bits)
    packed = pack(model)
    monkeypatch.setattr(dialect, "target", lambda: "metal")
    assert VerifyBank(packed, Switches()).row_invariant is invariant
    assert not VerifyBank(packed, Switches(matvec=False)).row_invariant


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (16, 16)])
def test_a_forward_between_two_sizes_runs_the_larger(rows: int, size: int) -> None:
    assert size_for(rows) == size


def test_more_rows_than_a_forward_has_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 16 rows, not 17"):
        size_for(17)
