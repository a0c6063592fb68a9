"""Residual add and RMSNorm.

Contract: x, delta T [R, K]; weight T [K]; out T [2, R, K], the sum first, then the sum normed. One output holds
both, since a second output costs as much as a second kernel; the two results are views of it. The sum is
rounded to T before it is normed, and the normed value before it is weighed, as MLX does. K is a multiple of 8.
The order in which a row's squares are added depends on K alone.
"""

from __future__ import annotations

from typing import Final

import mlx.core as mx

from worker.kernels.dialect import Kernel, Launch, chosen, number

BODY: Final = r"""
SHARED(float, part, 32);
const long row = (long)bx * K;
float squares = 0.0f;
for (int c = tid * 8; c < K; c += GROUP * 8) {
  float a[8], b[8];
  load8(x + row + c, a);
  load8(delta + row + c, b);
  UNROLL for (int j = 0; j < 8; j++) {
    const T sum = (T)(a[j] + b[j]);
    out[row + c + j] = sum;
    squares = FMA((float)sum, (float)sum, squares);
  }
}
squares = SUM32(squares);
if (lane == 0) part[sg] = squares;
BARRIER();
squares = SUM32(lane < GROUP / 32 ? part[lane] : 0.0f);
const float scale = RSQRT(squares / K + EPS);
for (int c = tid * 8; c < K; c += GROUP * 8) {
  float w[8];
  load8(weight + c, w);
  UNROLL for (int j = 0; j < 8; j++)
    out[(long)x_shape[0] * K + row + c + j] = (T)((float)(T)((float)out[row + c + j] * scale) * w[j]);
}
"""


def launch(x: mx.array, delta: mx.array, weight: mx.array, eps: float) -> Launch:
    """The kernel on x, delta T [R, K] and weight T [K]."""
    rows, width = x.shape
    threads = min(256, -(-width // 256) * 32)
    kernel = Kernel("add_norm", ("x", "delta", "weight"), "out", BODY, (("EPS", number(eps)),))
    template = (("T", x.dtype), ("K", width), ("GROUP", threads))
    return Launch(kernel, (x, delta, weight), template, (rows, 1, 1), threads, (2, rows, width), x.dtype)


def reference(x: mx.array, delta: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """The same in plain operations."""
    total = x + delta
    return total, mx.fast.rms_norm(total, weight, eps)


def add_norm(
    x: mx.array, delta: mx.array, weight: mx.array, eps: float, *, use_kernel: bool | None = None
) -> tuple[mx.array, mx.array]:
    """Sum x + delta and its RMSNorm, both T [R, K]. `use_kernel=False` forces the plain operations."""
    target = chosen(use_kernel)
    if target is None or x.shape[1] % 8:
        return reference(x, delta, weight, eps)
    both = launch(x, delta, weight, eps).run(target)
    return both[0], both[1]
