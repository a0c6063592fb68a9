"""The stand-in finds the mistakes it is there for, and its 16-bit floats are those of the machine."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from kernels import standin

from worker.kernels.dialect import Kernel, Launch, build, chosen, target


def launch(body: str, threads: int = 64, size: int = 64, array: mx.array | None = None) -> Launch:
    array = mx.arange(64, dtype=mx.float32) if array is None else array
    kernel = Kernel("probe", ("x",), "out", body)
    return Launch(kernel, (array,), (("T", array.dtype),), (1, 1, 1), threads, (size,), mx.float32)


def test_lanes_and_threadgroup_memory_work() -> None:
    body = (
        "SHARED(float, all, 64); all[tid] = SUM32(x[tid]) + XOR(x[tid], 3) + MAX32(x[tid]); BARRIER();"
        "out[tid] = all[63 - tid];"
    )
    got = np.array(standin.run(launch(body))[0])
    x = np.arange(64.0).reshape(2, 32)
    want = (x.sum(1, keepdims=True) + x[:, np.arange(32) ^ 3] + x.max(1, keepdims=True)).reshape(-1)[::-1]
    assert (got == want).all()


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("if (tid < 32) BARRIER(); out[tid] = 1.0f;", "missed a barrier"),
        ("if (lane < 16) BARRIER(); out[tid] = 1.0f;", "parted"),
        ("out[tid] = lane < 16 ? SUM32(x[tid]) : 0.0f;", "parted"),
        ("out[tid] = lane < 16 ? SUM32(x[tid]) : MAX32(x[tid]);", "different things"),
        ("out[tid + 1] = x[tid];", "written beyond its end"),
        ("((OUT(T))x)[tid] = 2.0f; out[tid] = 1.0f;", "is an operand and was written"),
    ],
)
def test_a_mistake_is_found(body: str, word: str) -> None:
    with pytest.raises(AssertionError, match=word):
        standin.run(launch(body))


def groups_of(body: str) -> Launch:
    return replace(launch(body), groups=(2, 1, 1), shape=(128,))


def test_a_threadgroup_does_not_see_what_another_one_writes_in_place() -> None:
    for _ in range(2):
        body = "out[64 * bx + tid] = x[63 - tid]; BARRIER(); ((OUT(T))x)[bx * 32 + lane] = 7.0f;"
        got, written = standin.run(groups_of(body), written="x")
        assert written is not None
        assert np.array(got).tolist() == [*range(63, -1, -1)] * 2
        assert np.array(written).tolist() == [7] * 64


def test_threadgroups_that_write_one_place_differently_are_found() -> None:
    with pytest.raises(AssertionError, match="different bits"):
        standin.run(groups_of("((OUT(T))x)[lane] = (float)bx + 0.5f; out[64 * bx + tid] = 0.0f;"), written="x")
    standin.run(groups_of("((OUT(T))x)[lane] = 0.5f; out[64 * bx + tid] = 0.0f;"), written="x")


def test_text_that_is_no_metal_does_not_compile() -> None:
    for body in ("out[tid] = x[tid];", "T t = 1.0f; out[tid] = (float)t;"):
        with pytest.raises(AssertionError, match="does not compile"):
            standin.run(launch(body, array=mx.zeros((64,), dtype=mx.bfloat16)))


def test_a_missing_barrier_shows_in_one_of_two_orders() -> None:
    body = "SHARED(float, all, 64); all[tid] = x[tid]; out[tid] = all[63 - tid];"
    wrong = 0
    for _ in range(2):
        array = mx.array(np.random.default_rng(wrong).standard_normal(64).astype(np.float32))
        wrong += not (np.array(standin.run(launch(body, array=array))[0]) == np.array(array)[::-1]).all()
    assert wrong


def test_what_is_not_written_is_nan_and_so_is_what_lies_beyond() -> None:
    got = np.array(standin.run(launch("if (tid > 0) out[tid] = x[64 + tid];"))[0])
    assert np.isnan(got).all()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_16_bit_floats_convert_as_the_machine_does(dtype: mx.Dtype) -> None:
    every = mx.array(np.arange(65536, dtype=np.uint16)).view(dtype)
    body = "for (int i = tid; i < 65536; i += 64) out[i] = (float)x[i];"
    got, _ = standin.run(launch(body, size=65536, array=every))
    want = np.array(every.astype(mx.float32))
    assert np.array_equal(np.array(got), want, equal_nan=True)

    random = np.random.default_rng(1)
    floats = np.concatenate([
        random.integers(0, 2**32, 60000, dtype=np.uint32).view(np.float32),
        np.nan_to_num(want)[random.integers(0, 65536, 5536)] * np.float32(0.99951171875),
    ])  # fmt: skip
    kernel = Kernel("narrow", ("x",), "out", "for (int i = tid; i < 65536; i += 64) out[i] = (T)x[i];")
    narrow, _ = standin.run(Launch(kernel, (mx.array(floats),), (("T", dtype),), (1, 1, 1), 64, (65536,), dtype))
    assert np.array_equal(
        np.array(narrow.astype(mx.float32)),
        np.array(mx.array(floats).astype(dtype).astype(mx.float32)),
        equal_nan=True,
    )


@pytest.mark.parametrize(
    ("metal", "cuda", "kind"), [(True, False, "metal"), (False, True, "cuda"), (False, False, None)]
)
def test_kernels_run_where_mlx_computes_and_that_may_change(
    metal: bool, cuda: bool, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: cuda)
    found = []
    for device in (mx.gpu, mx.cpu, mx.gpu):
        monkeypatch.setattr(mx, "default_device", lambda device=device: mx.Device(device))
        found.append((target(), chosen(None)))
    assert found == [(kind, kind), (None, None), (kind, kind)]


def test_without_a_gpu_the_plain_operations_are_chosen() -> None:
    if mx.default_device().type == mx.DeviceType.cpu:
        assert chosen(None) is None
    assert chosen(False) is None
    assert build.cache_info().currsize >= 0
