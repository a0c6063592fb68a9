"""Split, norm, rope and the write into the pool, over the stand-in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kernels import standin
from kernels.oracle import TYPES, History, bits, close, draw, random_tree, same, wide
from mlx import nn
from mlx_lm.models.rope_utils import initialize_rope

from worker.kernels import rope_write, rows
from worker.kernels.rope_table import rope_of
from worker.kernels.rope_write import Heads

SCALINGS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "longrope": {
        "type": "longrope", "original_max_position_embeddings": 4096, "short_factor": [1.0] * 32,
        "long_factor": [1.0 + i / 8 for i in range(32)],
    },
    "proportional": {"type": "proportional", "partial_rotary_factor": 0.5},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    heads: Heads
    dtype: str
    length: int
    count: int
    tree: bool = False


def turn(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray, heads: Heads) -> np.ndarray:
    """Rope of x [R, n, D] in float64, of angles that are float32: at long positions their rounding is the larger part."""
    out, half = x.copy(), heads.rotated // 2
    at = (
        (np.arange(half) * 2, np.arange(half) * 2 + 1)
        if heads.traditional
        else (np.arange(half), np.arange(half) + half)
    )
    angles = (positions[:, None, None].astype(np.float32) * frequencies).astype(np.float64)
    a, b = (x[..., place] * heads.input_scale for place in at)
    out[..., at[0]], out[..., at[1]] = (
        a * np.cos(angles) - b * np.sin(angles),
        a * np.sin(angles) + b * np.cos(angles),
    )
    return out


def normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def check(case: Case, seed: int) -> None:
    random = np.random.default_rng(seed)
    heads, dtype = case.heads, TYPES[case.dtype]
    frequencies = (100.0 ** -(np.arange(heads.rotated // 2) / max(1, heads.rotated // 2))).astype(np.float32)
    q_norm, k_norm = (draw(random, (heads.dim,), dtype) for _ in range(2))
    table = rope_write.constants(heads, mx.array(frequencies), q_norm, k_norm)
    qkv = draw(random, (case.count, (heads.heads + 2 * heads.kv_heads) * heads.dim), dtype)
    pool, meta = History(random, case.length, heads.kv_heads, heads.dim, dtype).pool(case.length, [])
    tree = rows.tree_array(random_tree(random, case.count)) if case.tree else None
    q, written = standin.run(rope_write.launch(qkv, table, pool, meta, heads, tree), written="pool")
    assert written is not None

    want_q, want_k, want_v = np.split(
        wide(qkv).reshape(case.count, -1, heads.dim), [heads.heads, heads.heads + heads.kv_heads], 1
    )
    positions = case.length + (np.arange(case.count) if tree is None else np.array(tree)[0, : case.count])
    if heads.norm_eps is not None:
        want_q, want_k = normed(want_q, wide(q_norm), heads.norm_eps), normed(want_k, wide(k_norm), heads.norm_eps)
    want_q, want_k = (turn(part, positions, frequencies, heads) for part in (want_q, want_k))
    at = np.array(rows.slots(meta, mx.arange(case.length, case.length + case.count, dtype=mx.int32)))
    plain_q, plain_pool = rope_write.rope_write(qkv, table, pool, meta, heads, tree, use_kernel=False)
    for some_q, some_pool in ((q, written), (plain_q, plain_pool)):
        close(some_q, want_q)
        close(some_pool[0][:, mx.array(at)], want_k.swapaxes(0, 1))
        close(some_pool[1][:, mx.array(at)], want_v.swapaxes(0, 1))
        others = np.setdiff1d(np.arange(pool.shape[2]), at)
        assert (bits(some_pool)[:, :, others] == bits(pool)[:, :, others]).all(), "other slots stay"


QWEN = Heads(heads=4, kv_heads=2, dim=128, rotated=128, norm_eps=1e-6)
CASES = [
    Case(Heads(heads=3, kv_heads=1, dim=64, rotated=64), "float32", 0, 1),
    Case(QWEN, "bfloat16", 31, 4),
    Case(QWEN, "float32", 33, 7, tree=True),
    Case(Heads(heads=2, kv_heads=2, dim=80, rotated=32, traditional=True), "float16", 32, 2),
    Case(Heads(heads=2, kv_heads=1, dim=96, rotated=96, input_scale=1.19), "bfloat16", 255, 16),
    Case(Heads(heads=2, kv_heads=1, dim=256, rotated=0), "float32", 257, 3),
]


@pytest.mark.parametrize("case", CASES)
def test_rows_agree_with_float64_and_other_slots_stay(case: Case) -> None:
    check(case, seed=case.length)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_table_turns_as_mlx_lm_does(scaling: str) -> None:
    module = initialize_rope(64, 10000.0, False, SCALINGS[scaling], max_position_embeddings=131072)
    rope = rope_of(module)
    assert rope is not None
    heads = Heads(
        heads=2, kv_heads=1, dim=64, rotated=rope.dims, traditional=rope.traditional, input_scale=rope.input_scale
    )
    random = np.random.default_rng(1)
    qkv = draw(random, (3, 4 * 64), mx.float32)
    pool, meta = History(random, 100, 1, 64, mx.float32).pool(100, [])
    table = rope_write.constants(heads, rope.frequencies, None, None)
    got, _ = standin.run(rope_write.launch(qkv, table, pool, meta, heads), written="pool")
    want = module(qkv.reshape(1, 3, 4, 64).swapaxes(1, 2)[:, :2], offset=100)[0].swapaxes(0, 1)
    assert np.abs(wide(got) - wide(want)).max() < 5e-5


def test_a_rope_whose_table_moves_with_the_length_is_refused() -> None:
    moving = initialize_rope(64, 1e4, False, {"type": "dynamic", "factor": 2.0}, max_position_embeddings=2048)
    assert rope_of(moving) is None
    assert rope_of(nn.Identity()) is None


def test_bits_depend_on_row_and_position_alone() -> None:
    random = np.random.default_rng(5)
    table = rope_write.constants(
        QWEN, mx.array(1e4 ** -(np.arange(64) / 64)), *draw(random, (2, 128), mx.bfloat16)
    )
    qkv = draw(random, (16, 8 * 128), mx.bfloat16)

    def run(start: int, count: int) -> tuple[mx.array, mx.array]:
        pool, meta = History(random, 50 + start, 2, 128, mx.bfloat16).pool(50 + start, [])
        launch = rope_write.launch(qkv[start : start + count], table, pool, meta, QWEN)
        q, written = standin.run(launch, written="pool")
        at = rows.slots(meta, mx.arange(50 + start, 50 + start + count, dtype=mx.int32))
        return q, written[:, :, at]

    q, new = run(0, 16)
    for start, count in ((0, 1), (3, 1), (8, 8), (15, 1)):
        some_q, some_new = run(start, count)
        same(some_q, q[start : start + count])
        same(some_new, new[:, :, start : start + count])


@pytest.mark.prove
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_the_whole_sweep_agrees_with_float64(dim: int) -> None:
    for count in range(1, 17):
        for length in (0, 1, 31, 32, 33, 255, 256, 257, 1023):
            norm_eps, traditional = ((None, False), (1e-6, True))[length % 2]
            heads = Heads(heads=4, kv_heads=2, dim=dim, rotated=dim, norm_eps=norm_eps, traditional=traditional)
            check(Case(heads, list(TYPES)[count % 3], length, count, tree=count % 2 == 0), seed=length)
