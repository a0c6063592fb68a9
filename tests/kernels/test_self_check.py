"""The check at start: what is right stays on, what is wrong, loses or cannot run is off, with the reason."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import mlx.core as mx
import pytest
from kernels.emulated import Machine
from mlx import nn
from tiny_models import BARE, bare

from worker.engine import step_time
from worker.engine.check_cases import Product, cases
from worker.engine.dense_in_place import DenseInPlace
from worker.engine.packed import Packed, pack
from worker.engine.self_check import Choice, Sizes, check, check_one, choose
from worker.engine.step_time import Taken
from worker.engine.verify_bank import SIZES, Switches, VerifyBank
from worker.kernels import dialect
from worker.kernels.dialect import Launch
from worker.kv.pages import Pages
from worker.kv.pool import Pool, Shape
from worker.kv.prefix import Opened

ROWS = 32
FEW = Sizes(rows=(1, 4), contexts=(0, 31, 70), steps=24, layers=2)
ALL_ON = dict.fromkeys(("attention", "rope_write", "read_pages", "matvec", "swiglu", "in place"), "on")


def packed(
    kind: str = "llama", dtype: mx.Dtype = mx.float32, *, quantized: bool = False, bits: int = 4, **changed: object
) -> Packed:
    model = bare(kind, **{"num_hidden_layers": 1, **changed})
    model.set_dtype(dtype)
    if quantized:
        nn.quantize(model, 32, bits)
    mx.eval(model.parameters())
    return pack(model)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> dict[str, Taken]:
    """The times that are measured."""
    times = {"on": Taken(1.0, 1.0), "off": Taken(1.0, 1.0)}
    monkeypatch.setattr(step_time, "compare", lambda *_: times)
    return times


def chosen(machine: Machine, monkeypatch: pytest.MonkeyPatch, model: Packed) -> Choice:
    with machine.on(monkeypatch):
        return choose(model, prefill_rows=ROWS, sizes=FEW)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("kind", "dtype", "quantized"), [("qwen3", mx.float32, False), ("llama", mx.bfloat16, True)]
)
def test_right_kernels_are_on(
    kind: str, dtype: mx.Dtype, quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = chosen(Machine(), monkeypatch, packed(kind, dtype, quantized=quantized))
    assert choice.kernels == ALL_ON
    assert choice.in_place
    assert choice.switches == Switches()
    assert set(choice.report["seconds"]) == {"compile", "check", "trial", "time"}
    assert choice.report["trial"]["steps"] == 24


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("bits", [3, 6])
def test_weights_that_our_products_do_not_serve_are_mlxs_and_health_says_so(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()
    choice = chosen(machine, monkeypatch, packed(quantized=True, bits=bits))
    assert choice.in_place
    assert choice.switches == Switches(matvec=False)
    assert choice.kernels == {**ALL_ON, "matvec": f"does not serve {bits}-bit weights"}
    assert "matvec_affine" not in machine.launches


@pytest.mark.usefixtures("quick")
def test_where_some_weights_are_not_served_the_others_are_checked_in_every_layer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = bare(num_hidden_layers=3)
    for layer, bits in zip(model.model.layers, (6, 4, 8), strict=True):
        nn.quantize(layer, 32, bits)
    found = pack(model)
    with Machine().on(monkeypatch):
        choice = choose(found, prefill_rows=ROWS, sizes=FEW)
        products = {
            (one.rows.name, getattr(one.rows.weight, "bits", 0))
            for one in cases(found, ROWS, (1,), (0,))
            if isinstance(one, Product)
        }
    assert choice.kernels == {**ALL_ON, "matvec": "on; does not serve 6-bit weights"}
    assert choice.switches == Switches()
    assert caplog.records == []
    four = {(name, bits) for name in ("qkv", "out", "gate_up", "down") for bits in (4, 8)}
    assert products == {*four, ("head", 0)}


@pytest.mark.usefixtures("quick")
def test_an_mlp_that_no_kernel_serves_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = chosen(Machine(), monkeypatch, packed(intermediate_size=100))
    assert choice.in_place
    assert choice.kernels == {
        **ALL_ON,
        "matvec": "on; does not serve weights 100 wide",
        "swiglu": "does not serve an MLP 100 wide",
    }


def test_on_the_cpu_there_is_nothing_to_check() -> None:
    choice = choose(packed(), prefill_rows=ROWS)
    assert not choice.in_place
    assert choice.kernels == {}
    assert choice.report == {"why": "MLX runs on the CPU here"}


def test_what_kernels_cannot_serve_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = chosen(Machine(), monkeypatch, packed(head_dim=12))
    assert not choice.in_place
    assert choice.report == {"why": "its head dimension 12 is not a multiple of 16 up to 256"}


def spoiled(name: str, factor: float = 1.1) -> Machine:
    return Machine(spoiled=lambda launch, out: out * factor if launch.kernel.name == name else out)


@pytest.mark.usefixtures("quick")
def test_wrong_products_are_off_and_all_else_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choice = chosen(spoiled("matvec"), monkeypatch, packed())
    assert choice.in_place
    assert choice.switches == Switches(matvec=False)
    assert choice.kernels.pop("matvec").startswith("wrong: off by 0.1 at ")
    assert set(choice.kernels.values()) == {"on"}
    assert [(one.levelno, one.getMessage()[:28]) for one in caplog.records] == [
        (logging.WARNING, "matvec is switched off: wron")
    ]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["attention_combine", "rope_write", "swiglu"])
def test_another_wrong_kernel_means_that_the_pool_is_not_written_in_place(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = chosen(spoiled(name), monkeypatch, packed())
    assert not choice.in_place
    assert "in place" not in choice.kernels
    assert sum(state.startswith("wrong") for state in choice.kernels.values()) == 1


@pytest.mark.usefixtures("quick")
def test_a_row_that_is_not_written_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = chosen(Machine(lost=lambda launch: launch.kernel.name == "rope_write"), monkeypatch, packed())
    assert not choice.in_place
    assert choice.kernels["rope_write"].startswith("wrong: off by inf")


@pytest.mark.usefixtures("quick")
def test_a_text_that_does_not_compile_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = chosen(Machine(refused=lambda launch: launch.kernel.name == "read_pages"), monkeypatch, packed())
    assert not choice.in_place
    assert choice.kernels["read_pages"] == (
        "does not run (rows: 32, positions before: 48): Unable to build metal library from source: read_pages"
    )


@pytest.mark.usefixtures("quick")
def test_writes_that_are_not_seen_mean_the_other_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel alone is right: its operands wait for nothing."""
    machine = Machine()

    def lost(launch: Launch) -> bool:
        return launch.kernel.name == "attention_fma" and machine.launches.get("swiglu", 0) == 3

    machine.lost = lost
    choice = chosen(machine, monkeypatch, packed())
    assert not choice.in_place
    assert "not all seen" in choice.kernels.pop("in place")
    assert set(choice.kernels.values()) == {"on"}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("spoiled", ["", "move_rows", "attention over a tree"])
def test_trees_are_offered_where_their_kernels_are_right(spoiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(launch: Launch) -> bool:
        return bool(spoiled) and ("tree" in launch.kernel.inputs or launch.kernel.name == "move_rows")

    def wrong(launch: Launch, out: mx.array) -> mx.array:
        return out + 1 if spoiled == "move_rows" == launch.kernel.name else out

    machine = Machine(spoiled=wrong) if spoiled == "move_rows" else Machine(refused=refused)
    with machine.on(monkeypatch):
        choice = choose(packed(), prefill_rows=ROWS, sizes=replace(FEW, trees=True))
    assert choice.in_place, "chains need neither"
    assert choice.switches == Switches(trees=not spoiled)
    states = {name: choice.kernels.pop(name) for name in ("attention over a tree", "move_rows")}
    assert choice.kernels == ALL_ON
    assert (set(states.values()) == {"on"}) == (not spoiled)


def test_products_that_lose_time_are_off(quick: dict[str, Taken], monkeypatch: pytest.MonkeyPatch) -> None:
    quick |= {"on": Taken(1.04, 1.04), "off": Taken(1.0, 1.0)}
    choice = chosen(Machine(), monkeypatch, packed())
    assert choice.in_place
    assert choice.switches == Switches(matvec=False)
    assert choice.kernels == {**ALL_ON, "matvec": "slower: 1.04 ms a step with it, 1 without"}


def test_a_loss_within_three_percent_is_none() -> None:
    off = Taken(1.0, 0.9)
    assert step_time.verdict({"on": Taken(1.03, 0.95), "off": off}) == ""
    assert step_time.verdict({"on": Taken(0.5, 0.4), "off": off}) == ""


def test_a_slow_phase_of_the_host_is_no_loss() -> None:
    off = Taken(1.0, 0.9)
    assert step_time.verdict({"on": Taken(1.8, 0.9), "off": off}) == ""
    assert step_time.verdict({"on": Taken(1.0, 1.0), "off": off}) == ""


def test_runs_take_turns_and_the_median_counts() -> None:
    now, log = [0.0], []

    def run(name: str, lengths: list[float]) -> None:
        log.append(name)
        now[0] += lengths[len(log) // 2 % len(lengths)] / 1000

    runs = {
        "a": lambda steps: run("a", [1.0 * steps, 9.0 * steps, 1.0 * steps]),
        "b": lambda steps: run("b", [2.0 * steps]),
    }
    times = step_time.in_turns(runs, lambda: now[0], steps=4, repeats=3)
    assert log == ["a", "b"] * 4
    assert times["a"].median == pytest.approx(1.0)
    assert times["b"] == Taken(pytest.approx(2.0), pytest.approx(2.0))


def test_the_step_that_is_timed_is_the_banks(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    with machine.on(monkeypatch):
        times = step_time.compare(packed(), Switches(), "matvec", iter(range(1000)).__next__, repeats=1)
    assert set(times) == {"on", "off"}
    # Both attend in every step; one alone uses our products.
    assert machine.launches["attention_fma"] == 2 * (2 + 16)
    assert machine.launches["matvec"] == 5 * (2 + 16)
    assert machine.launches["swiglu"] == 2 + 16


@contextmanager
def without_running(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs with kernels can be built and not run."""

    def build(_kernel: object, _target: str) -> object:
        return lambda output_shapes, output_dtypes, **_: [mx.zeros(output_shapes[0], dtype=output_dtypes[0])]

    with monkeypatch.context() as patch:
        patch.setattr(dialect, "target", lambda: "metal")
        patch.setattr(dialect, "build", build)
        yield


def texts(launches: list[Launch]) -> set[tuple[object, ...]]:
    return {(one.kernel, str(one.template), tuple(array.dtype for array in one.arrays)) for one in launches}


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("kind", BARE)
def test_every_kernel_that_a_forward_launches_is_checked(
    kind: str, quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = packed(kind, mx.bfloat16, quantized=quantized, num_hidden_layers=4)
    shape = Shape(4, 2, 16, mx.bfloat16)
    with without_running(monkeypatch), dialect.recorded() as launched:
        for switches in (Switches(trees=True), Switches(matvec=False)):
            pool = Pool(shape, 12)
            for size in SIZES:
                meta = mx.zeros((8,), dtype=mx.int32)
                VerifyBank(model, switches).run(mx.zeros((size,), dtype=mx.uint32), meta, pool.arrays)
            lane = DenseInPlace(model, pool, prefill_rows=ROWS, switches=switches)
            sequence = Pages(12).reserve(100)
            lane.begin(Opened(sequence, (), b"", False, (), 0, True))
            for start in (0, ROWS):
                lane.read(range(ROWS), last=start > 0)
            lane.trace()
    with without_running(monkeypatch), dialect.recorded() as checked:
        for case in Sizes(trees=True).cases(model, ROWS, (0,)):
            case.got()
    assert {"move_rows", "attention_combine"} <= {one.kernel.name for one in launched}
    assert texts(launched) <= texts(checked)
    assert len(texts(launched)) > 20


def test_products_are_compared_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of 16 rows is wrong: only the widest forward has it."""

    def last(launch: Launch, out: mx.array) -> mx.array:
        if launch.kernel.name == "matvec" and launch.shape[0] == 4:
            return mx.concatenate([out[:3], out[3:] + 1])
        return out

    with Machine(spoiled=last).on(monkeypatch):
        products = [one for one in cases(packed(), ROWS, (1, 4), (0,)) if isinstance(one, Product)]
        outcome = {one.what: check_one(one).ok for one in products}
        assert [what for what, ok in outcome.items() if ok] == [
            what for what in outcome if what.endswith("rows: 1")
        ]
        assert not check(products)["matvec"].ok
