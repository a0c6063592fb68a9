"""Matrix-vector products for all rows of a forward: each weight is read once for R rows.

The contract is in operands.py; all options run in the same launch. `matvec` picks between two kernels: the one in
this file, plain fused multiply-adds on any device, and matvec_mma.py where matrix units pay. The pick is by
target, type, shape and packing of the weight, never by R, so that a row's bits are the same for every R.

This kernel: x is normed in float32, without rounding in between. K is a multiple of 32. Row invariance: lane l
sums chunks l, l + 32, ... of K in order, then 32 lanes join; neither R nor the number of outputs a simdgroup makes
changes that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import mlx.core as mx

from worker.kernels import matvec_mma
from worker.kernels.dialect import MAX_ROWS, Kernel, Launch, chosen
from worker.kernels.operands import PLAIN, Affine, Extras, arrays, defines, reference, width_of

__all__ = ["PLAIN", "Affine", "Extras", "launch", "matvec", "pick", "reference", "serves", "supported", "unserved"]

_HEAD: Final = r"""
const int first = (bx * SIMDGROUPS + sg) * OUTPUTS, made = GLU ? 2 * OUTPUTS : OUTPUTS;
if (first >= N) return;
float acc[made * R];
float squares[R];
UNROLL for (int i = 0; i < made * R; i++) acc[i] = 0.0f;
UNROLL for (int i = 0; i < R; i++) squares[i] = 0.0f;
int line[made];
UNROLL for (int o = 0; o < made; o++) {
  const int n = first + o % OUTPUTS;
  line[o] = (n < N ? n : N - 1) + (o < OUTPUTS ? 0 : N);
}
for (int c = lane; c < K / CHUNK; c += 32) {
  float g[CHUNK];
  if (NORM) {
    UNROLL for (int j = 0; j < CHUNK; j += 8) load8(NORM_WEIGHT + c * CHUNK + j, g + j);
  }
"""

_ROW: Final = r"""
  UNROLL for (int w = 0; w < R; w++) {
    float v[CHUNK];
    UNROLL for (int j = 0; j < CHUNK; j += 8) load8(x + (long)w * K + c * CHUNK + j, v + j);
    if (NORM) {
      UNROLL for (int j = 0; j < CHUNK; j++) { squares[w] = FMA(v[j], v[j], squares[w]); v[j] = MUL(v[j], g[j]); }
    }
"""

_DENSE: Final = r"""
  float m[made * CHUNK];
  UNROLL for (int o = 0; o < made; o++) load8(weight + (long)line[o] * K + c * CHUNK, m + o * CHUNK);
ROW
    UNROLL for (int o = 0; o < made; o++) {
      UNROLL for (int j = 0; j < CHUNK; j++) acc[o * R + w] = FMA(m[o * CHUNK + j], v[j], acc[o * R + w]);
    }
  }
}
"""

# A number q of 4 or 8 bits as float32 without a conversion: 2^23 + q has q in its last bits.
_AFFINE: Final = r"""
  float m[made * CHUNK];
  float scale[made], bias[made];
  UNROLL for (int o = 0; o < made; o++) {
    unsigned words[CHUNK * BITS / 32];
    WORDS(weight + (long)line[o] * (K / 32 * BITS) + c * (CHUNK * BITS / 32), words);
    UNROLL for (int j = 0; j < CHUNK; j++) {
      const unsigned number = words[j * BITS / 32] >> (BITS * j % 32) & ((1u << BITS) - 1u);
      m[o * CHUNK + j] = AS_FLOAT(0x4b000000u | number) - 8388608.0f;
    }
    scale[o] = (float)scales[(long)line[o] * (K / GROUP) + c * CHUNK / GROUP];
    bias[o] = (float)biases[(long)line[o] * (K / GROUP) + c * CHUNK / GROUP];
  }
ROW
    float plain = 0.0f;
    UNROLL for (int j = 0; j < CHUNK; j++) plain += v[j];
    UNROLL for (int o = 0; o < made; o++) {
      float sum = 0.0f;
      UNROLL for (int j = 0; j < CHUNK; j++) sum = FMA(m[o * CHUNK + j], v[j], sum);
      acc[o * R + w] = FMA(scale[o], sum, FMA(bias[o], plain, acc[o * R + w]));
    }
  }
}
"""

_TAIL: Final = r"""
UNROLL for (int w = 0; w < R; w++) {
  const float inverse = NORM ? RSQRT(SUM32(squares[w]) / K + EPS) : 1.0f;
  UNROLL for (int o = 0; o < OUTPUTS; o++) {
    float y = SUM32(acc[o * R + w]);
    if (GLU) {
      const float u = MUL(SUM32(acc[(made - OUTPUTS + o) * R + w]), inverse);
      y = MUL(y, inverse);
      y = y / (1.0f + EXP(-y)) * u;
    }
    if (lane == 0 && first + o < N) {
      if (!GLU) y = FMA(y, inverse, ADDED(w, first + o));
      out[(long)w * N + first + o] = (T)y;
    }
  }
}
"""


def _shape(rows: int, outputs: int, glu: bool) -> tuple[int, int]:
    """Outputs a simdgroup makes, and simdgroups of a threadgroup. No result depends on it."""
    each = (4 if rows <= 8 else 2) // (2 if glu else 1)
    while each > 1 and outputs < 1024 * each:
        each //= 2
    return each, 8 if outputs // each >= 8192 else 4


def launch(x: mx.array, weight: mx.array | Affine, extras: Extras = PLAIN) -> Launch:
    """The kernel on the operands of the contract."""
    (rows, width), affine = x.shape, isinstance(weight, Affine)
    operands = arrays(x, weight, extras)
    outputs = operands["weight"].shape[0] // (2 if extras.glu else 1)
    bits = weight.bits if isinstance(weight, Affine) else 32
    chunk = 16 if affine and width >= 1024 else 8
    each, simdgroups = _shape(rows, outputs, extras.glu)
    body = _HEAD + (_AFFINE if affine else _DENSE).replace("ROW\n", _ROW) + _TAIL
    template = {"T": x.dtype, "K": width, "N": outputs, "R": rows, "CHUNK": chunk, "OUTPUTS": each}
    template |= {"SIMDGROUPS": simdgroups, "NORM": extras.norm is not None, "GLU": extras.glu}
    if isinstance(weight, Affine):
        template |= {"BITS": weight.bits, "GROUP": weight.group}
    words = (*defines(extras), ("WORDS", f"words{chunk * bits // 32}"))
    kernel = Kernel("matvec_affine" if affine else "matvec", tuple(operands), "out", body, words)
    groups = (-(-outputs // (each * simdgroups)), 1, 1)
    return Launch(
        kernel,
        tuple(operands.values()),
        tuple(template.items()),
        groups,
        32 * simdgroups,
        (rows, outputs),
        x.dtype,
    )


def unserved(weight: mx.array | Affine) -> str:
    """What the kernel does not serve about a weight, whatever the row count, in words; empty if it serves it."""
    if isinstance(weight, Affine) and weight.bits not in (4, 8):
        return f"{weight.bits}-bit weights"
    if isinstance(weight, Affine) and weight.group not in (32, 64, 128):
        return f"weights in groups of {weight.group}"
    return f"weights {width_of(weight)} wide" if width_of(weight) % 32 else ""


def serves(weight: mx.array | Affine) -> bool:
    """Whether the kernel serves a weight of this packing and width, for all row counts of a forward."""
    return not unserved(weight)


def supported(x: mx.array, weight: mx.array | Affine) -> bool:
    """Whether the kernel serves these shapes."""
    return serves(weight) and x.shape[0] <= MAX_ROWS


def pick(target: str, x: mx.array, weight: mx.array | Affine) -> Callable[..., Launch]:
    """The kernel for a weight on *target*: its `launch`. The rows of x do not matter."""
    return matvec_mma.launch if target == "cuda" and matvec_mma.supported(x, weight) else launch


def matvec(
    x: mx.array, weight: mx.array | Affine, extras: Extras = PLAIN, *, use_kernel: bool | None = None
) -> mx.array:
    """Product x weight^T for x T [R, K], T [R, N]. `use_kernel=False` forces the plain operations."""
    target = chosen(use_kernel)
    if target is None or not supported(x, weight):
        return reference(x, weight, extras)
    return pick(target, x, weight)(x, weight, extras).run(target)
