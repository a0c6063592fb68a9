"""Residual add with RMSNorm, and SwiGLU, over the stand-in."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from kernels import standin
from kernels.oracle import TYPES, close, draw, same, wide

from worker.kernels import add_norm, swiglu

QUICK = [(1, 64, "float32"), (3, 576, "bfloat16"), (16, 2304, "float16")]
SWEEP = [(rows, width, dtype) for rows in range(1, 17) for width in (64, 104, 576, 4096, 12288) for dtype in TYPES]


def check_norm(rows: int, width: int, dtype: str) -> None:
    random = np.random.default_rng(width)
    x, delta, weight = (draw(random, shape, TYPES[dtype]) for shape in ((rows, width), (rows, width), (width,)))
    both, _ = standin.run(add_norm.launch(x, delta, weight, 1e-5))
    total = wide(x + delta)
    want = total / np.sqrt((total * total).mean(-1, keepdims=True) + 1e-5) * wide(weight)
    same(both[0], x + delta)
    close(both[1], want)
    for row in range(rows):
        same(
            standin.run(add_norm.launch(x[row : row + 1], delta[row : row + 1], weight, 1e-5))[0][:, 0],
            both[:, row],
        )
    plain = add_norm.add_norm(x, delta, weight, 1e-5, use_kernel=False)
    close(plain[0], total)
    close(plain[1], want)


def check_swiglu(rows: int, width: int, dtype: str) -> None:
    gate_up = 4 * draw(np.random.default_rng(width), (rows, 2 * width), TYPES[dtype])
    out, _ = standin.run(swiglu.launch(gate_up))
    gate, up = np.split(wide(gate_up), 2, -1)
    close(out, gate / (1 + np.exp(-gate)) * up)
    close(swiglu.swiglu(gate_up, use_kernel=False), gate / (1 + np.exp(-gate)) * up)
    same(standin.run(swiglu.launch(gate_up[rows - 1 :]))[0][0], out[rows - 1])


@pytest.mark.parametrize(("rows", "width", "dtype"), QUICK)
def test_sum_and_norm_agree_with_float64_row_by_row(rows: int, width: int, dtype: str) -> None:
    check_norm(rows, width, dtype)


@pytest.mark.parametrize(("rows", "width", "dtype"), QUICK)
def test_swiglu_agrees_with_float64_row_by_row(rows: int, width: int, dtype: str) -> None:
    check_swiglu(rows, width, dtype)


def test_swiglu_of_extreme_gates_is_no_nan() -> None:
    gate_up = mx.array([[-200.0, 200.0, -1e4, 1e4, 0.0, -88.0, 88.0, -103.0] + [2.0] * 8])
    assert not mx.isnan(standin.run(swiglu.launch(gate_up))[0]).any()


@pytest.mark.prove
def test_the_whole_sweep_agrees_with_float64() -> None:
    for rows, width, dtype in SWEEP:
        check_norm(rows, width, dtype)
        check_swiglu(rows, width, dtype)
