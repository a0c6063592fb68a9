"""The trial of writes in place: passed by a machine that carries them out, failed by one that loses or delays any."""

from __future__ import annotations

import mlx.core as mx
import pytest
from kernels.emulated import Machine

from worker.engine.visibility import STEPS, Seen, Trial, plan
from worker.kernels import rope_write
from worker.kernels.dialect import Launch
from worker.kernels.rope_write import Heads

HEADS = Heads(heads=4, kv_heads=2, dim=16, rotated=16)
LAYERS = 2


def trial(dtype: mx.Dtype = mx.float32, *, use_kernel: bool | None = None) -> Trial:
    table = rope_write.constants(HEADS, mx.ones((8,)) * 0.1, None, None)
    return Trial(HEADS, table, dtype, layers=LAYERS, use_kernel=use_kernel)


def run(machine: Machine, monkeypatch: pytest.MonkeyPatch, steps: int = 64) -> Seen:
    with machine.on(monkeypatch):
        return trial().run(steps)


def test_the_steps_are_many_and_of_every_width() -> None:
    script = plan(STEPS)
    assert len(script) >= 200
    assert {step.rows for step in script} == {1, 2, 4, 8, 16}
    assert sum(step.rows == 1 for step in script) >= 150
    assert any(step.kept < step.rows for step in script)
    assert [step.length for step in script].count(0) >= 2


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_plain_operations_pass(dtype: mx.Dtype) -> None:
    seen = trial(dtype, use_kernel=False).run(32)
    assert seen.ok
    assert seen.error == 0.0, "the same operations on the same numbers"


def test_kernels_that_write_in_place_pass_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    seen = run(machine, monkeypatch, STEPS)
    assert str(seen) == "seen in 208 steps"
    assert machine.launches == {"attention_fma": STEPS * LAYERS, "attention_combine": STEPS * LAYERS}


class Losing:
    """Loses the write of one launch of the attention."""

    def __init__(self, which: int) -> None:
        self.left = which

    def __call__(self, launch: Launch) -> bool:
        self.left -= launch.kernel.name == "attention_fma"
        return self.left == -1 and launch.kernel.name == "attention_fma"


# Rows of a fresh pool, of a second round over old rows, and of the last step, which nobody reads again.
@pytest.mark.parametrize("which", [0, 21, 2 * 55, 2 * 64 - 1])
def test_one_lost_write_fails(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = run(Machine(lost=Losing(which)), monkeypatch)
    assert not seen.ok
    assert "not all seen" in str(seen)


def test_writes_that_come_a_step_late_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = run(Machine(late=2 * LAYERS + 1), monkeypatch)
    assert not seen.ok
    assert seen.first_bad == 1


def test_a_kernel_that_computes_something_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Machine(spoiled=lambda launch, out: out * 1.1 if launch.kernel.name == "attention_combine" else out)
    assert not run(wrong, monkeypatch, 16).ok
