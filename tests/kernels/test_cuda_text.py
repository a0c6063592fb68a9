"""The CUDA text that cubins are compiled from beforehand is the one that MLX asks its cache for."""

import mlx.core as mx

from bench.cuda_text import Custom, recording
from worker.kernels import swiglu
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
