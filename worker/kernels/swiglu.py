"""SwiGLU of a packed projection.

Contract: gate_up T [R, 2 N], the gate's columns first; out T [R, N] = silu(gate) * up, computed in float32 and
rounded once. T is float32, float16 or bfloat16; N is a multiple of 8. A value depends on its own row alone.
"""

from __future__ import annotations

from typing import Final

import mlx.core as mx

from worker.kernels.dialect import Kernel, Launch, chosen

THREADS: Final = 128

KERNEL: Final = Kernel(
    name="swiglu",
    inputs=("gate_up",),
    output="out",
    body=r"""
const int c = (bx * THREADS + tid) * 8;
if (c >= N) return;
float g[8], u[8];
load8(gate_up + (long)by * 2 * N + c, g);
load8(gate_up + (long)by * 2 * N + N + c, u);
UNROLL for (int j = 0; j < 8; j++) out[(long)by * N + c + j] = (T)(g[j] / (1.0f + EXP(-g[j])) * u[j]);
""",
    defines=(("THREADS", str(THREADS)),),
)


def launch(gate_up: mx.array) -> Launch:
    """The kernel on gate_up T [R, 2 N]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    return Launch(
        KERNEL,
        (gate_up,),
        (("T", gate_up.dtype), ("N", width)),
        (-(-width // (8 * THREADS)), rows, 1),
        THREADS,
        (rows, width),
        gate_up.dtype,
    )


def reference(gate_up: mx.array) -> mx.array:
    """The same in plain operations."""
    gate, up = mx.split(gate_up.astype(mx.float32), 2, axis=-1)
    return (gate * mx.sigmoid(gate) * up).astype(gate_up.dtype)


def serves(width: int) -> bool:
    """Whether the kernel serves rows of *width* values, gates and the others together."""
    return width % 16 == 0


def swiglu(gate_up: mx.array, *, use_kernel: bool | None = None) -> mx.array:
    """silu(gate) * up: gate_up T [R, 2 N] to T [R, N]. `use_kernel=False` forces the plain operations."""
    target = chosen(use_kernel)
    if target is None or not serves(gate_up.shape[1]):
        return reference(gate_up)
    return launch(gate_up).run(target)
