"""The GPU's kernel sweep, over the stand-in: it finds right kernels right, and each kind of fault."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from kernels.emulated import Machine

from worker.kernels.dialect import MAX_ROWS, Launch
from worker.kernels.rope_write import Heads

BENCH = Path(__file__).resolve().parents[2] / "bench"
STILL = Heads(heads=4, kv_heads=2, dim=64, rotated=0)
TURNED = Heads(heads=4, kv_heads=2, dim=64, rotated=64, norm_eps=1e-6)


class Bench:
    """The sweep's modules, whose launches go to a machine of the stand-in."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.sweep, self.base, self.attention, self.products = (
            importlib.import_module(name) for name in ("sweep", "sweep_base", "sweep_attention", "sweep_products")
        )

    @property
    def launching(self) -> list[ModuleType]:
        return [self.attention, self.products]

    def cases(self) -> dict[str, Any]:
        attention, products = self.attention, self.products
        return {
            "attention": attention.Attention(False, "bfloat16", STILL, 31, (3,), (5,)),
            "turned": attention.Turned("bfloat16", TURNED, 30, 3, 5, (False,)),
            "moves": attention.Moves("float16", 80, 16),
            "product": products.Product(False, "float32", (4, 32), 128, 33, "norm residual", (5,)),
            "elementwise": products.Elementwise("bfloat16", 104),
        }

    def found(self, name: str) -> Any:
        findings = self.base.Findings()
        self.cases()[name].check(findings)
        findings.settle()
        return findings


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.syspath_prepend(BENCH)
    machine = Machine()
    made = Bench(machine)
    for module in made.launching:
        monkeypatch.setattr(module, "run", machine._run)
    with machine.on(monkeypatch):
        yield made


CASES = ("attention", "turned", "moves", "product", "elementwise")


@pytest.mark.parametrize("name", CASES)
def test_right_kernels_are_found_right(bench: Bench, name: str) -> None:
    findings = bench.found(name)
    assert findings.right
    assert findings.errors or findings.differing
    assert all(0 < error < 1 for error in findings.errors.values())


@pytest.mark.parametrize("name", CASES)
def test_a_value_that_is_no_number_is_found(bench: Bench, name: str) -> None:
    def spoiled(_launch: Launch, out: mx.array) -> mx.array:
        if out.dtype == mx.int32:
            return out + 1
        flat = out.flatten()
        return mx.concatenate([mx.array([float("nan")]).astype(out.dtype), flat[1:]]).reshape(out.shape)

    bench.machine.spoiled = spoiled
    assert not bench.found(name).right


@pytest.mark.parametrize("name", ["attention", "product", "elementwise"])
def test_a_bit_that_depends_on_the_number_of_rows_is_found(bench: Bench, name: str) -> None:
    def spoiled(launch: Launch, out: mx.array) -> mx.array:
        rows = dict(launch.template).get("R") or launch.arrays[0].shape[0]
        if rows == MAX_ROWS or launch.kernel.name == "attention_fma":
            return out
        whole = {2: mx.uint16, 4: mx.uint32}[out.dtype.size]
        return (out.view(whole) ^ 1).view(out.dtype)

    bench.machine.spoiled = spoiled
    findings = bench.found(name)
    assert max(findings.errors.values()) < 1, "too small an error to be seen"
    assert any(findings.differing.values())


@pytest.mark.parametrize("name", ["attention", "turned", "moves"])
def test_rows_that_are_not_written_are_found(bench: Bench, name: str) -> None:
    bench.machine.lost = lambda _launch: True
    assert not bench.found(name).right


def test_the_same_seed_gives_the_same_order_and_a_limit_cuts_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, seen = bench.sweep, []

    class Case:
        def check(self, _judge: object) -> None:
            seen.append(self)

    made = [Case() for _ in range(9)]
    now = iter(range(100))
    monkeypatch.setattr(sweep, "every", lambda _seed: made)
    assert sweep.sweep(bench.base.Findings(), 0, 4.5, lambda: next(now)) == (4, 9)
    assert seen == made[:4]


def test_the_order_comes_from_the_seed_and_every_length_and_row_count_is_in_it(bench: Bench) -> None:
    one, same, other = (bench.sweep.every(seed) for seed in (0, 0, 1))
    assert one == same
    assert {type(case) for case in one} == {type(case) for case in other}
    assert [type(case) for case in one] != [type(case) for case in other]
    attention = [case for case in one if isinstance(case, bench.attention.Attention)]
    for matrix, kind, dim in {(case.matrix, case.kind, case.heads.dim) for case in attention}:
        mine = [case for case in attention if (case.matrix, case.kind, case.heads.dim) == (matrix, kind, dim)]
        assert {case.length for case in mine} == set(bench.sweep.LENGTHS)
        if matrix or kind == "float32":
            assert all(case.counts == tuple(range(1, 17)) for case in mine)
    assert {case.packing for case in one if isinstance(case, bench.products.Product)} == set(bench.sweep.PACKINGS)


def test_kernels_are_the_same_at_every_length_so_the_shortest_shows_them_all(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.attention, "run", bench.base.run)

    def kernels(case: Any, length: int) -> set[object]:
        with bench.base.noted() as found:
            replace(case, length=length).check(bench.base.Silent())
        return set(found)

    for name in ("attention", "turned"):
        case = bench.cases()[name]
        shortest = kernels(case, 0)
        assert len(shortest) > 3
        assert all(kernels(case, length) == shortest for length in (33, 255, 2040))
