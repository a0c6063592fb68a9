"""Matrix-vector products on matrix units: sixteen outputs and eight rows of x at a time, as fast as the weight is read.

The contract is in operands.py, for 16-bit x, K a multiple of 32. A threadgroup makes 16 x TILES outputs (with glu
half as many, each from a gate and an up); its SPLIT simdgroups take turns at steps of STEP units of K. A unit is 32
numbers, or 64 of a quantised weight with groups of 64 or more: what four lanes read of a line in one load. A
simdgroup holds STEP units of its lines in registers and asks for another one whenever one is used up.

A quantised number q enters the matrix unit as MAGIC + q, which is exact and takes no conversion; an 8-bit one as
two of 4 bits. The sum of x over the unit comes from the same place, and scale and bias are applied to a unit's sums
in float32. With norm, x is multiplied by the norm's weight in T, one rounding, and the products by 1 / rms in
float32.

Row invariance: rows lie along an axis of the matrix unit that it does not sum over. What a row's arithmetic does
depend on, the unit, the step and the split, is a function of N, K and the packing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from worker.kernels.dialect import MAX_ROWS, Kernel, Launch
from worker.kernels.operands import PLAIN, Affine, Extras, arrays, defines

# Lane 4 g + t: lines g and g + 8 of each tile, row g of each eight rows of x, a quarter t of a unit.
_HEAD: Final = r"""
SHARED(float, sums, SPLIT * TILES * 176);
SHARED(float, squares, SPLIT * 8);
const int g = lane >> 2, t = lane & 3, made = 16 * (GLU ? TILES / 2 : TILES), first = bx * made;
const int eights = (R + 7) / 8, units = K / UNIT, steps = (units + STEP - 1) / STEP;
const int pairs = UNIT / 8, words = UNIT * BITS / 128;
float acc[TILES * eights * 4], square[eights * 4];
UNROLL for (int i = 0; i < TILES * eights * 4; i++) acc[i] = 0.0f;
UNROLL for (int i = 0; i < eights * 4; i++) square[i] = 0.0f;
int line[TILES * 2];
UNROLL for (int i = 0; i < TILES * 2; i++) {
  const int n = first + i * 8 % made + g;
  line[i] = (N % made == 0 || n < N ? n : N - 1) + (i * 8 < made ? 0 : N);
}
unsigned a[STEP * TILES * 2 * words], v[STEP * eights * pairs], gain[NORM ? STEP * pairs : 1];
UNROLL for (int i = 0; i < STEP * eights * pairs; i++) v[i] = 0u;
UNROLL for (int q = 0; q < STEP; q++) {
  const int u = sg * STEP + q;
  FETCH
}
FIRST
for (int c = sg; c < steps; c += SPLIT) {
  LATER
  UNROLL for (int q = 0; q < STEP; q++) {
    if (units % STEP == 0 || c * STEP + q < units) {
"""

# Unit u into place q of the registers.
_FETCH: Final = r"""
  if (u < units) {
    UNROLL for (int i = 0; i < TILES * 2; i++) {
      const long from = (long)line[i] * (K / 32 * BITS) + (u * 4 + t) * words;
      STREAM((GLOBAL(unsigned))weight + from, a + (q * TILES * 2 + i) * words);
    }
    const int k = (u * 4 + t) * pairs;
    UNROLL for (int p = 0; p < pairs; p += 4) {
      UNROLL for (int e = 0; e < eights; e++) {
        if (8 * e + g < R)
          words4((GLOBAL(unsigned))x + (8 * e + g) * (K / 2) + k + p, v + (q * eights + e) * pairs + p);
      }
      if (NORM) words4((GLOBAL(unsigned))NORM_WEIGHT + k + p, gain + q * pairs + p);
    }
  }
"""

# Squares of x stand on the diagonal of x x^T; then x times the norm's weight.
_NORM: Final = r"""
      if (NORM) {
        UNROLL for (int e = 0; e < eights; e++) {
          UNROLL for (int p = 0; p < pairs; p++) {
            const int i = (q * eights + e) * pairs + p;
            if (p % 2 == 0) MMA(T, square + e * 4, v[i], 0u, v[i + 1], 0u, v[i], v[i + 1]);
          }
          UNROLL for (int p = 0; p < pairs; p++) {
            const int i = (q * eights + e) * pairs + p;
            v[i] = PAIR_MUL(T, SHRUNK(v[i]), gain[q * pairs + p]);
          }
        }
      }
"""

_DENSE: Final = r"""
      UNROLL for (int h = 0; h < TILES; h++) {
        UNROLL for (int e = 0; e < eights; e++) {
          UNROLL for (int p = 0; p < 4; p += 2) {
            const int i = (q * TILES + h) * 8 + p, j = (q * eights + e) * 4 + p;
            MMA(T, acc + (h * eights + e) * 4, a[i], a[i + 4], a[i + 1], a[i + 5], v[j], v[j + 1]);
          }
        }
      }
"""

# Of eight 4-bit numbers in a word, i and i + 4 make a pair; of four 8-bit ones the halves of j and j + 2.
_AFFINE: Final = r"""
      float plain[eights * 4];
      UNROLL for (int i = 0; i < eights * 4; i++) plain[i] = 0.0f;
      UNROLL for (int e = 0; e < eights; e++) {
        UNROLL for (int p = 0; p < pairs; p += 4) {
          const int j = (q * eights + e) * pairs + p;
          const unsigned v0 = v[j], v1 = v[j + (BITS == 4 ? 2 : 1)], v2 = v[j + (BITS == 4 ? 1 : 2)], v3 = v[j + 3];
          v[j] = (v0 & 0xffffu) | (v1 << 16);
          v[j + 1] = (v0 >> 16) | (v1 & 0xffff0000u);
          v[j + 2] = (v2 & 0xffffu) | (v3 << 16);
          v[j + 3] = (v2 >> 16) | (v3 & 0xffff0000u);
          MMA(T, plain + e * 4, ONES, ONES, ONES, ONES, v[j], v[j + 1]);
          MMA(T, plain + e * 4, ONES, ONES, ONES, ONES, v[j + 2], v[j + 3]);
        }
      }
      UNROLL for (int h = 0; h < TILES; h++) {
        float low[eights * 4], high[eights * 4];
        UNROLL for (int i = 0; i < eights * 4; i++) { low[i] = 0.0f; high[i] = 0.0f; }
        UNROLL for (int i = 0; i < words; i++) {
          unsigned m[4], n[4];
          UNROLL for (int j = 0; j < 4; j++) {
            m[j] = (a[(q * TILES + h) * 2 * words + i] >> (4 * j) & 0x000f000fu) | MAGIC;
            n[j] = (a[((q * TILES + h) * 2 + 1) * words + i] >> (4 * j) & 0x000f000fu) | MAGIC;
          }
          UNROLL for (int e = 0; e < eights; e++) {
            const int j = (q * eights + e) * pairs + i * 16 / BITS;
            if (BITS == 4) {
              MMA(T, low + e * 4, m[0], n[0], m[1], n[1], v[j], v[j + 1]);
              MMA(T, low + e * 4, m[2], n[2], m[3], n[3], v[j + 2], v[j + 3]);
            } else {
              MMA(T, low + e * 4, m[0], n[0], m[2], n[2], v[j], v[j + 1]);
              MMA(T, high + e * 4, m[1], n[1], m[3], n[3], v[j], v[j + 1]);
            }
          }
        }
        UNROLL for (int r = 0; r < 2; r++) {
          const int j = q * UNIT / GROUP, o = (h * 2 + r) * held + j / VECTOR * loaded * 2 + j % VECTOR / each;
          float scale[2], bias[2];
          UNPAIR(T, now[o], scale);
          UNPAIR(T, now[o + loaded], bias);
          const float by = scale[j % each], shift = FMA(by, -OFFSET, bias[j % each]);
          UNROLL for (int i = 0; i < eights * 4; i++) {
            const int z = h * eights * 4 + i;
            const float sum = BITS == 8 ? FMA(16.0f, high[i], low[i]) : low[i];
            if (i / 2 % 2 == r) acc[z] = FMA(by, sum, FMA(shift, plain[i], acc[z]));
          }
        }
      }
"""

# A load takes VECTOR groups: `loaded` words of scales, two a word or, where their number is odd, one; and as many of
# biases. A line has `held` words a step.
_FIRST: Final = r"""
const int each = VECTOR == 1 ? 1 : 2, loaded = VECTOR / each, groups = STEP * UNIT < GROUP ? 1 : STEP * UNIT / GROUP;
const int held = groups / VECTOR * loaded * 2;
unsigned now[TILES * 2 * held], next[TILES * 2 * held];
{
  const int s = sg;
  SCALES
  UNROLL for (int i = 0; i < TILES * 2 * held; i++) now[i] = next[i];
}
"""

_SCALES: Final = r"""
  UNROLL for (int i = 0; i < TILES * 2 && s < steps; i++) {
    UNROLL for (int p = 0; p < groups; p += VECTOR) {
      const int at = s * STEP * UNIT / GROUP + p, o = i * held + p / VECTOR * loaded * 2;
      if (units % STEP == 0 || at < K / GROUP) {
        const long from = (long)line[i] * (K / GROUP) + at;
        if (VECTOR == 1) {
          next[o] = ((GLOBAL(unsigned short))scales)[from];
          next[o + 1] = ((GLOBAL(unsigned short))biases)[from];
        } else {
          SCALE_WORDS((GLOBAL(unsigned))(scales + from), next + o);
          SCALE_WORDS((GLOBAL(unsigned))(biases + from), next + o + loaded);
        }
      }
    }
  }
"""

_LATER: Final = r"""
  const int s = c + SPLIT;
  SCALES
"""

# The sums of the simdgroups, in their order. A column of 16 sums lies 20 words from the next one: other banks.
_TAIL: Final = r"""
    }
    const int u = (c + SPLIT) * STEP + q;
    FETCH
  }
  NEXT
}
UNROLL for (int e = 0; e < eights; e++) {
  const int columns = R - 8 * e < 8 ? R - 8 * e : 8;
  if (e > 0) BARRIER();
  UNROLL for (int h = 0; h < TILES; h++) {
    const int z = (sg * TILES + h) * 176 + t * 40 + g, i = (h * eights + e) * 4;
    if (2 * t < columns) {
      sums[z] = acc[i];
      sums[z + 20] = acc[i + 1];
      sums[z + 8] = acc[i + 2];
      sums[z + 28] = acc[i + 3];
    }
  }
  if (NORM && t == g >> 1) squares[sg * 8 + g] = g % 2 ? square[e * 4 + 1] : square[e * 4];
  BARRIER();
  for (int i = tid; i < made * columns; i += 32 * SPLIT) {
    const int column = i / made, w = 8 * e + column, r = i % made, n = first + r;
    const int z = r / 16 * 176 + column * 20 + r % 16;
    float y = 0.0f, up = 0.0f, total = 0.0f;
    UNROLL for (int s = 0; s < SPLIT; s++) {
      y += sums[s * TILES * 176 + z];
      if (GLU) up += sums[(s * TILES + TILES / 2) * 176 + z];
      if (NORM) total += squares[s * 8 + column];
    }
    const float inverse = NORM ? MUL(RSQRT(total / K + EPS), GROWN) : 1.0f;
    if (n < N) {
      if (GLU) {
        y = MUL(y, inverse);
        y = y / (1.0f + EXP(-y)) * MUL(up, inverse);
      } else {
        y = FMA(y, inverse, ADDED(w, n));
      }
      out[(long)w * N + n] = (T)y;
    }
  }
}
"""

_DENSE_BODY: Final = (_HEAD + _NORM + _DENSE + _TAIL).replace("FETCH\n", _FETCH)
for _word in ("FIRST", "LATER", "NEXT"):
    _DENSE_BODY = _DENSE_BODY.replace(f"{_word}\n", "")

_AFFINE_BODY: Final = (
    (_HEAD + _NORM + _AFFINE + _TAIL)
    .replace("FETCH\n", _FETCH)
    .replace("FIRST\n", _FIRST)
    .replace("LATER\n", _LATER)
    .replace("NEXT\n", "UNROLL for (int i = 0; i < TILES * 2 * held; i++) now[i] = next[i];\n")
    .replace("SCALES\n", _SCALES)
)

# By type: a pair of ones; a pair of the number whose last bits are free, and that number; and by what x is shrunk
# before it meets the norm's weight, as their product may not overflow, and grown afterwards.
_TYPES: Final = {
    mx.bfloat16: ("0x3f803f80u", "0x43004300u", 128, "(v)", 1),
    mx.float16: ("0x3c003c00u", "0x64006400u", 1024, "PAIR_MUL(T, v, 0x2c002c00u)", 16),
}


@dataclass(frozen=True, slots=True)
class Tile:
    """Tiles of 16 lines a threadgroup, simdgroups that share K, units of K that one holds."""

    tiles: int
    split: int
    step: int


def tile_of(outputs: int, width: int, weight: mx.array | Affine, *, glu: bool) -> Tile:
    """The tile for a weight with that many outputs and inputs."""
    steps = -(-width // _unit(weight)) // 4
    return Tile(2 if glu or outputs >= 4096 else 1, max(1, min(8, steps)), 4)


def _unit(weight: mx.array | Affine) -> int:
    return 64 if isinstance(weight, Affine) and weight.group >= 64 else 32


def _packing(width: int, weight: mx.array | Affine, step: int) -> dict[str, int]:
    """BITS of a number, UNIT; of a quantised weight GROUP, and VECTOR: the groups whose scales come in one load."""
    unit = _unit(weight)
    if not isinstance(weight, Affine):
        return {"UNIT": unit, "BITS": 16}
    groups = max(1, step * unit // weight.group)
    vector = next(count for count in (8, 4, 2, 1) if groups % count == 0 and width // weight.group % count == 0)
    return {"UNIT": unit, "BITS": weight.bits, "GROUP": weight.group, "VECTOR": vector}


def _words(dtype: mx.Dtype, packing: dict[str, int]) -> tuple[tuple[str, str], ...]:
    ones, magic, offset, shrunk, grown = _TYPES[dtype]
    bits = packing["BITS"]
    return (
        ("STREAM", f"stream{packing['UNIT'] * bits // 128}"),
        ("SCALE_WORDS", f"words{max(1, packing.get('VECTOR', 1) // 2)}"),
        ("ONES", ones),
        ("MAGIC", magic),
        ("OFFSET", f"{offset * (17 if bits == 8 else 1)}.0f"),
        ("SHRUNK(v)", shrunk),
        ("GROWN", f"{grown}.0f"),
    )


def launch(x: mx.array, weight: mx.array | Affine, extras: Extras = PLAIN, tile: Tile | None = None) -> Launch:
    """The kernel on the operands of the contract; *tile* as measured unless given."""
    (rows, width), operands = x.shape, arrays(x, weight, extras)
    outputs = operands["weight"].shape[0] // (2 if extras.glu else 1)
    tile = tile or tile_of(outputs, width, weight, glu=extras.glu)
    packing = _packing(width, weight, tile.step)
    affine = isinstance(weight, Affine)
    template: dict[str, Any] = {"T": x.dtype, "K": width, "N": outputs, "R": rows}
    template |= {"NORM": extras.norm is not None, "GLU": extras.glu}
    template |= {"TILES": tile.tiles, "SPLIT": tile.split, "STEP": tile.step} | packing
    kernel = Kernel(
        "matvec_mma_affine" if affine else "matvec_mma",
        tuple(operands),
        "out",
        _AFFINE_BODY if affine else _DENSE_BODY,
        (*defines(extras), *_words(x.dtype, packing)),
        matrix=True,
    )
    made = 16 * (tile.tiles // 2 if extras.glu else tile.tiles)
    groups, threads = (-(-outputs // made), 1, 1), 32 * tile.split
    return Launch(
        kernel, tuple(operands.values()), tuple(template.items()), groups, threads, (rows, outputs), x.dtype
    )


def supported(x: mx.array, weight: mx.array | Affine) -> bool:
    """Whether the kernel serves these shapes and types."""
    packed = not isinstance(weight, Affine) or (weight.bits in (4, 8) and weight.group in (32, 64, 128))
    return packed and x.dtype in _TYPES and x.shape[0] <= MAX_ROWS and x.shape[1] % 32 == 0
