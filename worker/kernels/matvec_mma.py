"""Matrix-vector products on matrix units: sixteen outputs and eight rows of x at a time, as fast as the weight is read.

The contract is in operands.py, for 16-bit x, K a multiple of 32. A threadgroup makes 16 x TILES outputs (with glu
half as many, each of a gate and an up); its SPLIT simdgroups take turns at steps of STEP units of K. A unit is 32
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

# Lane 4 g + t: lines g and g + 8 of each tile (with glu a gate and its up), row g of each eight rows of x, a quarter t
# of a unit. In `ring` a line of a step is `chunks` of 16 bytes; units lie exchanged by line, in other banks.
_HEAD: Final = r"""
SHARED(unsigned, ring, SPLIT * SLOTS * TILES * STEP * UNIT * BITS / 2);
SHARED(float, sums, SPLIT * TILES * 176);
SHARED(float, squares, SPLIT * 16);
const int g = lane >> 2, t = lane & 3, made = (GLU ? 8 : 16) * TILES, first = bx * made;
const int eights = (R + 7) / 8, units = K / UNIT, steps = (units + STEP - 1) / STEP;
const int pairs = UNIT / 8, words = UNIT * BITS / 128, chunks = STEP * words, slot = TILES * 64 * chunks;
const int span = K / 32 * BITS, apart = 32 / chunks, mixed = (chunks < 8 ? chunks : 8) / words - 1;
float acc[TILES * eights * 4];
UNROLL for (int i = 0; i < TILES * eights * 4; i++) acc[i] = 0.0f;
GLOBAL(unsigned) from = (GLOBAL(unsigned))weight + LINE(lane / chunks) * span + (sg * chunks + lane % chunks) * 4;
GLOBAL(unsigned) rows = (GLOBAL(unsigned))x + g * (K / 2) + (sg * STEP * 4 + t) * pairs;
GLOBAL(unsigned) gains = (GLOBAL(unsigned))NORM_WEIGHT + (sg * STEP * 4 + t) * pairs;
unsigned v[eights * pairs], b[eights * pairs], gain[NORM ? pairs : 1];
UNROLL for (int i = 0; i < eights * pairs; i++) v[i] = 0u;
int to = sg * SLOTS * slot, at = to;
for (int i = 0; i < SLOTS - 1; i++) {
  const int step = sg + i * SPLIT;
  WEIGHT
}
if (NORM) {
  float square[R];
  UNROLL for (int w = 0; w < R; w++) square[w] = 0.0f;
  for (int k = tid * 8; k < K; k += SPLIT * 256) {
    UNROLL for (int w = 0; w < R; w++) {
      float y[8];
      load8(x + w * K + k, y);
      UNROLL for (int i = 0; i < 8; i++) square[w] = FMA(y[i], y[i], square[w]);
    }
  }
  UNROLL for (int w = 0; w < R; w++) {
    square[w] = SUM32(square[w]);
    if (lane == 0) squares[sg * 16 + w] = square[w];
  }
}
FIRST
{
  const bool more = sg < steps;
  const int skip = 0;
  ROWS
}
ROLL for (int c = sg; c < steps; c += SPLIT) {
  ARRIVED(SLOTS - 2);
  {
    const int step = c + (SLOTS - 1) * SPLIT;
    WEIGHT
  }
  LATER
  UNROLL for (int q = 0; q < STEP; q++) {
    if (units % STEP == 0 || c * STEP + q < units) {
"""

# A step of the weight on its way into the next slot.
_WEIGHT: Final = r"""
  UNROLL for (int i = 0; i < TILES * 16; i += apart) {
    const int l = i + lane / chunks, p = lane % chunks;
    const int place = (p / words ^ (l * chunks / 8 & mixed)) * words + p % words;
    const bool on = l < TILES * 16 && (units % STEP == 0 ? step < steps : step * chunks + p < span / 4);
    COPY16(on, ring, to + (l * chunks + place) * 4, from + (LINE(l) - LINE(lane / chunks)) * span);
  }
  COPIED();
  from += SPLIT * chunks * 4;
  to = to + slot == (sg + 1) * SLOTS * slot ? sg * SLOTS * slot : to + slot;
"""

_ROWS: Final = r"""
  UNROLL for (int p = 0; p < pairs; p += 4) {
    UNROLL for (int e = 0; e < eights; e++) {
      if (more && 8 * e + g < R) words4(rows + 8 * e * (K / 2) + skip + p, v + e * pairs + p);
    }
    if (NORM && more) words4(gains + skip + p, gain + p);
  }
"""

# b: what enters the matrix unit. Of eight 4-bit numbers in a word, i and i + 4 make a pair; of four 8-bit ones the
# halves of j and j + 2. Then the registers of x are free for the next unit.
_ENTER: Final = r"""
      UNROLL for (int e = 0; e < eights; e++) {
        UNROLL for (int p = 0; p < pairs; p++) {
          const int i = e * pairs + p;
          if (NORM) v[i] = PAIR_MUL(T, SHRUNK(v[i]), gain[p]);
        }
        UNROLL for (int p = e * pairs; p < (e + 1) * pairs; p += 4) {
          if (BITS == 16) {
            UNROLL for (int i = p; i < p + 4; i++) b[i] = v[i];
          } else {
            const unsigned v1 = v[p + (BITS == 4 ? 2 : 1)], v2 = v[p + (BITS == 4 ? 1 : 2)];
            b[p] = LOWS(v[p], v1);
            b[p + 1] = HIGHS(v[p], v1);
            b[p + 2] = LOWS(v2, v[p + 3]);
            b[p + 3] = HIGHS(v2, v[p + 3]);
          }
        }
      }
      const bool near = q + 1 < STEP && (units % STEP == 0 || c * STEP + q + 1 < units);
      const bool more = near || c + SPLIT < steps;
      const int skip = (q + 1 < STEP ? q + 1 : SPLIT * STEP) * 4 * pairs;
      ROWS
"""

# The unit's words of both lines of a tile.
_TAKEN: Final = r"""
        unsigned a[2 * words];
        UNROLL for (int r = 0; r < 2; r++) {
          const int unit = (q ^ (g * chunks / 8 & mixed)) * 4 + t;
          TAKE(ring, at + (h * 16 + r * 8 + g) * chunks * 4 + unit * words, a + r * words);
        }
"""

_DENSE: Final = r"""
      UNROLL for (int h = 0; h < TILES; h++) {
        TAKEN
        UNROLL for (int e = 0; e < eights; e++) {
          UNROLL for (int p = 0; p < 4; p += 2) {
            const int j = e * 4 + p;
            MMA(T, acc + (h * eights + e) * 4, a[p], a[p + 4], a[p + 1], a[p + 5], b[j], b[j + 1]);
          }
        }
      }
"""

_AFFINE: Final = r"""
      float plain[eights * 4];
      UNROLL for (int i = 0; i < eights * 4; i++) plain[i] = 0.0f;
      UNROLL for (int i = 0; i < eights * pairs; i += 2)
        MMA(T, plain + i / pairs * 4, ONES, ONES, ONES, ONES, b[i], b[i + 1]);
      UNROLL for (int h = 0; h < TILES; h++) {
        TAKEN
        float low[eights * 4], high[eights * 4];
        UNROLL for (int i = 0; i < eights * 4; i++) { low[i] = 0.0f; high[i] = 0.0f; }
        UNROLL for (int i = 0; i < words; i++) {
          unsigned m[4], n[4];
          UNROLL for (int j = 0; j < 4; j++) {
            m[j] = PART(a[i] >> (4 * j), 0x000f000fu, MAGIC);
            n[j] = PART(a[words + i] >> (4 * j), 0x000f000fu, MAGIC);
          }
          UNROLL for (int e = 0; e < eights; e++) {
            const int j = e * pairs + i * 16 / BITS;
            if (BITS == 4) {
              MMA(T, low + e * 4, m[0], n[0], m[1], n[1], b[j], b[j + 1]);
              MMA(T, low + e * 4, m[2], n[2], m[3], n[3], b[j + 2], b[j + 3]);
            } else {
              MMA(T, low + e * 4, m[0], n[0], m[2], n[2], b[j], b[j + 1]);
              MMA(T, high + e * 4, m[1], n[1], m[3], n[3], b[j], b[j + 1]);
            }
          }
        }
        UNROLL for (int r = 0; r < 2; r++) {
          float by[2];
          UNPAIR(T, FROM(now[h * 2 + r], (lane & 28) + q), by);
          const float shift = FMA(by[0], -OFFSET, by[1]);
          UNROLL for (int i = 0; i < eights * 4; i++) {
            const float sum = BITS == 8 ? FMA(16.0f, high[i], low[i]) : low[i];
            const int to = h * eights * 4 + i;
            if (i / 2 % 2 == r) acc[to] = FMA(by[0], sum, FMA(shift, plain[i], acc[to]));
          }
        }
      }
"""

# Lane t of four holds scale and bias of its lines for unit t of the step.
_FIRST: Final = r"""
unsigned now[TILES * 2], next[TILES * 4];
UNROLL for (int i = 0; i < TILES * 4; i++) next[i] = 0u;
{
  const int s = sg;
  SCALES
}
"""

_SCALES: Final = r"""
  UNROLL for (int i = 0; i < TILES * 2; i++) {
    if (t < STEP && s * STEP + (units % STEP == 0 ? 0 : t) < units) {
      const long from = LINE(i * 8 + g) * (K / GROUP) + (s * STEP + t) * UNIT / GROUP;
      next[i * 2] = ((GLOBAL(unsigned short))scales)[from];
      next[i * 2 + 1] = ((GLOBAL(unsigned short))biases)[from];
    }
  }
"""

_LATER: Final = r"""
  UNROLL for (int i = 0; i < TILES * 2; i++) now[i] = next[i * 2] | next[i * 2 + 1] << 16;
  {
    const int s = c + SPLIT;
    SCALES
  }
"""

# The sums of the simdgroups, in their order. A column of 16 sums lies 20 words from the next one: other banks.
_TAIL: Final = r"""
    }
  }
  at = at + slot == (sg + 1) * SLOTS * slot ? sg * SLOTS * slot : at + slot;
  rows += SPLIT * STEP * 4 * pairs;
  gains += SPLIT * STEP * 4 * pairs;
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
  BARRIER();
  for (int i = tid; i < made * columns; i += 32 * SPLIT) {
    const int column = i / made, w = 8 * e + column, r = i % made, n = first + r;
    const int size = GLU ? 8 : 16, z = r / size * 176 + column * 20 + r % size;
    float y = 0.0f, up = 0.0f, total = 0.0f;
    UNROLL for (int s = 0; s < SPLIT; s++) {
      y += sums[s * TILES * 176 + z];
      if (GLU) up += sums[s * TILES * 176 + z + 8];
      if (NORM) total += squares[s * 16 + w];
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

_DENSE_BODY: Final = (_HEAD + _ENTER + _DENSE + _TAIL).replace("WEIGHT\n", _WEIGHT).replace("TAKEN\n", _TAKEN).replace("ROWS\n", _ROWS)
for _word in ("FIRST", "LATER"):
    _DENSE_BODY = _DENSE_BODY.replace(f"{_word}\n", "")

_AFFINE_BODY: Final = (
    (_HEAD + _ENTER + _AFFINE + _TAIL)
    .replace("WEIGHT\n", _WEIGHT).replace("TAKEN\n", _TAKEN).replace("ROWS\n", _ROWS)
    .replace("FIRST\n", _FIRST)
    .replace("LATER\n", _LATER)
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
    slots: int = 3


def tile_of(outputs: int, width: int, weight: mx.array | Affine, *, glu: bool) -> Tile:
    """The tile for a weight with that many outputs and inputs."""
    steps = -(-width // _unit(weight)) // 4
    return Tile(2 if outputs >= 4096 else 1, max(1, min(8, steps)), 4)


def _unit(weight: mx.array | Affine) -> int:
    return 64 if isinstance(weight, Affine) and weight.group >= 64 else 32


def _packing(weight: mx.array | Affine) -> dict[str, int]:
    """BITS of a number, UNIT, and GROUP of a quantised weight."""
    unit = _unit(weight)
    if not isinstance(weight, Affine):
        return {"UNIT": unit, "BITS": 16}
    return {"UNIT": unit, "BITS": weight.bits, "GROUP": weight.group}


def _words(dtype: mx.Dtype, packing: dict[str, int]) -> tuple[tuple[str, str], ...]:
    ones, magic, offset, shrunk, grown = _TYPES[dtype]
    bits = packing["BITS"]
    return (
        ("TAKE", f"TAKE{packing['UNIT'] * bits // 128}"),
        ("LINE(l)", "((long)(N % made == 0 || FIRST_OF(l) < N ? FIRST_OF(l) : N - 1) + (GLU && (l) % 16 > 7 ? N : 0))"),
        ("FIRST_OF(l)", "(first + (GLU ? (l) / 16 * 8 + (l) % 8 : (l)))"),
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
    packing = _packing(weight)
    affine = isinstance(weight, Affine)
    template: dict[str, Any] = {"T": x.dtype, "K": width, "N": outputs, "R": rows}
    template |= {"NORM": extras.norm is not None, "GLU": extras.glu}
    template |= {"TILES": tile.tiles, "SPLIT": tile.split, "STEP": tile.step, "SLOTS": tile.slots} | packing
    kernel = Kernel(
        "matvec_mma_affine" if affine else "matvec_mma",
        tuple(operands),
        "out",
        _AFFINE_BODY if affine else _DENSE_BODY,
        (*defines(extras), *_words(x.dtype, packing)),
        matrix=True,
        threads=32 * tile.split,
    )
    made = (8 if extras.glu else 16) * tile.tiles
    groups, threads = (-(-outputs // made), 1, 1), 32 * tile.split
    return Launch(
        kernel, tuple(operands.values()), tuple(template.items()), groups, threads, (rows, outputs), x.dtype
    )


def supported(x: mx.array, weight: mx.array | Affine) -> bool:
    """Whether the kernel serves these shapes and types."""
    packed = not isinstance(weight, Affine) or (weight.bits in (4, 8) and weight.group in (32, 64, 128))
    return packed and x.dtype in _TYPES and x.shape[0] <= MAX_ROWS and x.shape[1] % 32 == 0
