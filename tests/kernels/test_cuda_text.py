"""The CUDA text that cubins are compiled from beforehand is the one that MLX asks its cache for."""

import importlib
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from bench.cuda_text import Custom, recording
from worker.kernels import dialect, swiglu
from worker.kernels.disk_cache import string_hash

# As MLX 0.32.4's CUDA build made it of the same call.
TEXT = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

#define ONE 1
namespace mlx::core::cu {

namespace cg = cooperative_groups;

__global__ void custom_kernel_trial_1_bfloat16_t_5_t_f(
    const __nv_bfloat16* x,
    const int32_t* meta,
    const __grid_constant__ Shape meta_shape,
    __nv_bfloat16* out) {
  using T = __nv_bfloat16;
  constexpr int N = 5;
  constexpr bool YES = true;
  constexpr bool NO = false;

if (threadIdx.x < N) out[threadIdx.x] = (T)(x[0] + meta_shape[0]);
}

} // namespace mlx::core::cu
"""


def test_the_text_is_that_of_mlx() -> None:
    custom = Custom(
        "trial_1",
        ("x", "meta"),
        ("out",),
        "if (threadIdx.x < N) out[threadIdx.x] = (T)(x[0] + meta_shape[0]);",
        "#define ONE 1\n",
    )
    template = [("T", mx.bfloat16), ("N", 5), ("YES", True), ("NO", False)]
    operands = [mx.zeros((5,), mx.bfloat16), mx.zeros((8,), mx.int32)]
    module = custom.module(operands, [mx.bfloat16], template)
    assert module.source == TEXT
    assert module.functions == ("mlx::core::cu::custom_kernel_trial_1_bfloat16_t_5_t_f",)
    assert module.name == f"custom_kernel_trial_1_bfloat16_t_5_t_f_{string_hash(TEXT.encode()):x}"


def test_a_kernel_is_noted_and_gives_zeros() -> None:
    launch = swiglu.launch(mx.ones((3, 64), dtype=mx.float16))
    with recording() as found:
        out = launch.run("cuda")
    assert out.shape == (3, 32)
    assert not out.any()
    (module,) = found.values()
    assert module.name.startswith("custom_kernel_swiglu_")
    assert "__half" in module.source


@pytest.mark.prove
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no compiler for CUDA here")
@pytest.mark.parametrize("model", ["smol-bf16", "smol-4bit"])
def test_every_kernel_of_a_forward_compiles(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "bench")
    precompile, models = importlib.import_module("precompile"), importlib.import_module("models")
    monkeypatch.setattr(dialect, "target", lambda: "cuda")
    # One of each text; instances differ in numbers only.
    texts = {
        module.name.split("_bfloat16_t_")[0]: module for module in precompile.ours(models.SHAPES[model]).values()
    }
    kinds = {name.removeprefix("custom_kernel_").split("_")[0] for name in texts}
    assert kinds >= {"attention", "matvec", "rope", "read", "swiglu"}
    precompile.light(tmp_path)
    for module in texts.values():
        assert "registers" in precompile.compiled(module, tmp_path / "out", [f"-I{tmp_path}"], "sm_90a")
