"""Matrix-vector products on matrix units: sixteen outputs and eight rows of x at a time.

The contract is in operands.py, for 16-bit x, K a multiple of 32. A threadgroup makes 16 x TILES outputs (with glu
half as many, each of a gate and an up); its SPLIT simdgroups take turns at steps of STEP units of K. A unit is 32
numbers, or 64 of a quantised weight with groups of 64 or more: what four lanes take of a line at once. The weight
travels to threadgroup memory while the steps before it are computed: each simdgroup has SLOTS places for a step.

A quantised number q enters the matrix unit as MAGIC + q, which is exact and takes no conversion; an 8-bit one as
two of 4 bits. The sum of x over the unit comes from there too, and scale and bias are applied to a unit's sums in
float32. With norm, x is multiplied by the norm's weight in T, one rounding, and the products by 1 / rms.

Row invariance: rows lie along an axis of the matrix unit that it does not sum over. What a row's arithmetic does
depend on, the unit, the step and the split, is a function of N, K and the packing.
"""

from __future__ import annotations

import re
from typing import Any, Final

import mlx.core as mx

from worker.kernels.dialect import MAX_ROWS, Kernel, Launch
from worker.kernels.matvec_tiles import Tile, for_rows, tile_of, unit_of
from worker.kernels.operands import PLAIN, Affine, Extras, arrays, defines

# Lane 4 g + t: lines g and g + 8 of each tile (with glu a gate and its up), row g of each eight rows of x, quarter
# t of a unit. In `ring` a line of a step is `chunks` of 16 bytes; its units are exchanged, so that what the lanes
# take at once lies in different banks.
_HEAD: Final = r"""
RING(unsigned, ring, SPLIT * SLOTS * TILES * STEP * UNIT * BITS / 2);
SHARED(float, sums, TURNS * SPLIT * TILES * 176);
SHARED(float, squares, SPLIT * 16);
const int g = lane >> 2, t = lane & 3, made = (GLU ? 8 : 16) * TILES, total = (N + made - 1) / made;
const int eights = (R + 7) / 8, units = K / UNIT, steps = (units + STEP - 1) / STEP;
const int trips = (steps + SPLIT - 1) / SPLIT, span = K / 32 * BITS;
const int pairs = UNIT / 8, words = UNIT * BITS / 128, chunks = STEP * words, slot = TILES * 64 * chunks;
const int apart = 32 / chunks, exchanged = (chunks < 8 ? chunks : 8) / words - 1;
GLOBAL(unsigned) rows = (GLOBAL(unsigned))x + g * (K / 2) + t * pairs;
GLOBAL(unsigned) gains = (GLOBAL(unsigned))NORM_WEIGHT + t * pairs;
GLOBAL(unsigned) from;
int filling = bx, filled = sg, to = 0, at = 0;
const int room = sg * SLOTS * slot, l = lane / chunks, p = lane % chunks;
const int into = room + (l * chunks + (p / words ^ (l * chunks / 8 & exchanged)) * words + p % words) * 4;
const int out_of = room + g * chunks * 4 + ((g * chunks / 8 & exchanged) * 4 + t) * words;
START
for (int i = 0; i < SLOTS - 1; i++) {
  FILL
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
"""

# The next step of the weight on its way into the next slot; behind a tile's last step comes the next tile.
_START: Final = r"""
  {
    const int first = filling * made;
    from = (GLOBAL(unsigned))weight + LINE(l) * span + (sg * chunks + p) * 4;
  }
"""

_FILL: Final = r"""
  UNROLL for (int i = 0; i < TILES * 16; i += apart) {
    const int first = filling * made;
    const bool on = (apart <= TILES * 16 || l < TILES * 16) && filling < total
        && (steps % SPLIT == 0 || filled < steps) && (units % STEP == 0 || filled * chunks + p < span / 4);
    COPY16(on, ring, into + to + i * chunks * 4, from + (N % made == 0 ? AWAY(i) : LINE(i + l) - LINE(l)) * span);
  }
  COPIED();
  to = to + slot == SLOTS * slot ? 0 : to + slot;
  from += SPLIT * chunks * 4;
  filled += SPLIT;
  if (filled >= steps) {
    filled = sg;
    filling += GROUPS;
    START
  }
"""

# Unit u of x and of the norm's weight into place o of the registers.
_ROWS: Final = r"""
  UNROLL for (int p = 0; p < pairs; p += 4) {
    UNROLL for (int e = 0; e < eights; e++) {
      if (more && 8 * e + g < R)
        words4(rows + 8 * e * (K / 2) + u * 4 * pairs + p, v + (o * eights + e) * pairs + p);
    }
    if (NORM && more) words4(gains + u * 4 * pairs + p, gain + o * pairs + p);
  }
"""

# b: what enters the matrix unit. Of eight 4-bit numbers in a word, i and i + 4 make a pair; of four 8-bit ones the
# halves of j and j + 2.
_ENTER: Final = r"""
  UNROLL for (int e = 0; e < eights; e++) {
    UNROLL for (int p = 0; p < pairs; p += 4) {
      const int i = (o * eights + e) * pairs + p, z = (k * eights + e) * pairs + p;
      UNROLL for (int w = 0; w < 4; w++) {
        if (NORM) v[i + w] = PAIR_MUL(T, SHRUNK(v[i + w]), gain[o * pairs + p + w]);
      }
      if (BITS == 16) {
        UNROLL for (int w = 0; w < 4; w++) b[z + w] = v[i + w];
      } else {
        const unsigned v1 = v[i + (BITS == 4 ? 2 : 1)], v2 = v[i + (BITS == 4 ? 1 : 2)];
        b[z] = LOWS(v[i], v1);
        b[z + 1] = HIGHS(v[i], v1);
        b[z + 2] = LOWS(v2, v[i + 3]);
        b[z + 3] = HIGHS(v2, v[i + 3]);
      }
    }
    PLAIN
  }
"""

_PLAIN: Final = r"""
    float four[4];
    UNROLL for (int i = 0; i < 4; i++) four[i] = 0.0f;
    UNROLL for (int p = 0; p < pairs; p += 2) {
      const int z = (k * eights + e) * pairs + p;
      MMA(T, four, ONES, ONES, ONES, ONES, b[z], b[z + 1]);
    }
    plain[(k * eights + e) * 2] = four[0];
    plain[(k * eights + e) * 2 + 1] = four[1];
"""

# Either the simdgroup's part of x stays in registers for all tiles, or it comes again, AHEAD units before its use.
_LOOP: Final = r"""
unsigned b[(HELD ? trips * STEP : 1) * eights * pairs];
float plain[(HELD ? trips * STEP : 1) * eights * 2];
unsigned v[AHEAD * eights * pairs], gain[NORM ? AHEAD * pairs : 1];
UNROLL for (int i = 0; i < AHEAD * eights * pairs; i++) v[i] = 0u;
UNROLL for (int i = 0; i < (HELD ? trips * STEP : AHEAD); i++) {
  const bool more = steps % SPLIT == 0 || sg < steps;
  const int o = i % AHEAD, k = i, u = (sg + i / STEP * SPLIT) * STEP + i % STEP;
  ROWS
  if (HELD) { ENTER }
}
int turn = 0;
ROLL for (int tile = bx; tile < total; tile += GROUPS) {
  float acc[TILES * eights * 4];
  UNROLL for (int i = 0; i < TILES * eights * 4; i++) acc[i] = 0.0f;
  TRIPS for (int trip = 0; trip < trips; trip++) {
    const int c = sg + trip * SPLIT;
    if (steps % SPLIT == 0 || c < steps) {
      ARRIVED(SLOTS - 2);
      FILL
      LATER
      UNROLL for (int q = 0; q < STEP; q++) {
        const int o = q % AHEAD, k = HELD ? trip * STEP + q : 0;
        if (units % STEP == 0 || c * STEP + q < units) {
          if (!HELD) {
            ENTER
            const int later = q + AHEAD;
            const bool near = later < STEP && (units % STEP == 0 || c * STEP + later < units);
            const bool more = near || c + SPLIT < steps || tile + GROUPS < total;
            const int u = (near ? c : c + SPLIT < steps ? c + SPLIT : sg) * STEP
                + (near ? later : later < STEP ? 0 : later - STEP);
            ROWS
          }
          PRODUCT
        }
      }
      at = at + slot == SLOTS * slot ? 0 : at + slot;
    }
  }
  TAIL
}
"""

# The unit's words of both lines of a tile.
_TAKEN: Final = r"""
    unsigned a[2 * words];
    UNROLL for (int r = 0; r < 2; r++)
      TAKE(ring, ((out_of + at) ^ (q * words * 4)) + (h * 16 + r * 8) * chunks * 4, a + r * words);
"""

_DENSE: Final = r"""
  UNROLL for (int h = 0; h < TILES; h++) {
    TAKEN
    UNROLL for (int e = 0; e < eights; e++) {
      UNROLL for (int p = 0; p < 4; p += 2) {
        const int j = (k * eights + e) * 4 + p;
        MMA(T, acc + (h * eights + e) * 4, a[p], a[p + 4], a[p + 1], a[p + 5], b[j], b[j + 1]);
      }
    }
  }
"""

_AFFINE: Final = r"""
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
        const int j = (k * eights + e) * pairs + i * 16 / BITS;
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
        const int z = h * eights * 4 + i, s = (k * eights + i / 4) * 2 + i % 2;
        if (i / 2 % 2 == r) acc[z] = FMA(by[0], sum, FMA(shift, plain[s], acc[z]));
      }
    }
  }
"""

# Lane t of four holds scale and bias of its lines for unit t of the step.
_FIRST: Final = r"""
unsigned now[TILES * 2], next[TILES * 4];
UNROLL for (int i = 0; i < TILES * 4; i++) next[i] = 0u;
{
  const int first = bx * made, s = sg;
  SCALES
}
"""

_SCALES: Final = r"""
  UNROLL for (int i = 0; i < TILES * 2; i++) {
    if (t < STEP && first < total * made && (units % STEP == 0 && steps % SPLIT == 0 || s * STEP + t < units)) {
      const int place = (N % made == 0 ? first + g + AWAY(i * 8) : LINE(i * 8 + g)) * (K / GROUP)
          + (s * STEP + t) * UNIT / GROUP;
      next[i * 2] = ((GLOBAL(unsigned short))scales)[place];
      next[i * 2 + 1] = ((GLOBAL(unsigned short))biases)[place];
    }
  }
"""

_LATER: Final = r"""
  UNROLL for (int i = 0; i < TILES * 2; i++) now[i] = LOWS(next[i * 2], next[i * 2 + 1]);
  {
    const int first = (c + SPLIT < steps ? tile : tile + GROUPS) * made, s = c + SPLIT < steps ? c + SPLIT : sg;
    SCALES
  }
"""

# The sums of the simdgroups, in their order; a column of 16 sums lies 20 words from the next one: other banks. The
# next sums go to another place, so that nobody waits until these are read.
_TAIL: Final = r"""
  UNROLL for (int e = 0; e < eights; e++) {
    const int columns = R - 8 * e < 8 ? R - 8 * e : 8, here = (TURNS == 1 ? 0 : turn % 2) * SPLIT * TILES * 176;
    UNROLL for (int h = 0; h < TILES; h++) {
      const int z = here + (sg * TILES + h) * 176 + t * 40 + g, i = (h * eights + e) * 4;
      if (2 * t < columns) {
        sums[z] = acc[i];
        sums[z + 20] = acc[i + 1];
        sums[z + 8] = acc[i + 2];
        sums[z + 28] = acc[i + 3];
      }
    }
    BARRIER();
    for (int i = (tid + turn * 32) % (32 * SPLIT); i < made * columns; i += 32 * SPLIT) {
      const int column = i / made, w = 8 * e + column, r = i % made, n = tile * made + r;
      const int size = GLU ? 8 : 16, z = here + r / size * 176 + column * 20 + r % size;
      float y = 0.0f, up = 0.0f, whole = 0.0f;
      UNROLL for (int s = 0; s < SPLIT; s++) {
        y += sums[s * TILES * 176 + z];
        if (GLU) up += sums[s * TILES * 176 + z + 8];
        if (NORM) whole += squares[s * 16 + w];
      }
      const float inverse = NORM ? MUL(RSQRT(whole / K + EPS), GROWN) : 1.0f;
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
    turn++;
  }
"""


def _body(*, affine: bool) -> str:
    parts = {"FIRST": _FIRST, "LATER": _LATER, "PLAIN": _PLAIN, "SCALES": _SCALES}
    if not affine:
        parts = dict.fromkeys(parts, "")
    parts = {"TAIL": _TAIL, "PRODUCT": _AFFINE if affine else _DENSE, "ENTER": _ENTER} | parts
    parts |= {"FILL": _FILL, "START": _START, "TAKEN": _TAKEN, "ROWS": _ROWS}
    text = _HEAD + _LOOP
    for word, part in parts.items():
        text = part.join(re.split(rf"\b{word}\b", text))
    return text


_BODIES: Final = {affine: _body(affine=affine) for affine in (False, True)}

# By type: a pair of ones; a pair of the number whose last bits are free, and that number; and by what x is shrunk
# before it meets the norm's weight, as their product may not overflow, and grown afterwards.
_TYPES: Final = {
    mx.bfloat16: ("0x3f803f80u", "0x43004300u", 128, "(v)", 1),
    mx.float16: ("0x3c003c00u", "0x64006400u", 1024, "PAIR_MUL(T, v, 0x2c002c00u)", 16),
}


def _packing(weight: mx.array | Affine) -> dict[str, int]:
    """BITS of a number, UNIT, and GROUP of a quantised weight."""
    unit = unit_of(weight)
    if not isinstance(weight, Affine):
        return {"UNIT": unit, "BITS": 16}
    return {"UNIT": unit, "BITS": weight.bits, "GROUP": weight.group}


def _words(dtype: mx.Dtype, packing: dict[str, int]) -> tuple[tuple[str, str], ...]:
    ones, magic, offset, shrunk, grown = _TYPES[dtype]
    bits = packing["BITS"]
    return (
        ("TAKE", f"TAKE{packing['UNIT'] * bits // 128}"),
        ("OUTPUT(l)", "(GLU ? (l) / 16 * 8 + (l) % 8 : (l))"),
        ("UP(l)", "(GLU && (l) % 16 > 7 ? N : 0)"),
        ("AWAY(l)", "(long)(OUTPUT(l) + UP(l))"),
        ("LINE(l)", "(long)((N % made == 0 || first + OUTPUT(l) < N ? first + OUTPUT(l) : N - 1) + UP(l))"),
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
    tile = for_rows(tile or tile_of(outputs, width, weight, glu=extras.glu), rows, width, weight)
    packing = _packing(weight)
    affine = isinstance(weight, Affine)
    total = -(-outputs // ((8 if extras.glu else 16) * tile.tiles))
    groups, threads = min(total, tile.groups), 32 * tile.split
    template: dict[str, Any] = {"T": x.dtype, "K": width, "N": outputs, "R": rows}
    template |= {"NORM": extras.norm is not None, "GLU": extras.glu}
    template |= {"TILES": tile.tiles, "SPLIT": tile.split, "STEP": tile.step, "SLOTS": tile.slots} | packing
    turns = 2 if groups < total or rows > 8 else 1
    ring = tile.split * tile.slots * tile.tiles * tile.step * packing["UNIT"] * packing["BITS"] * 2
    large = ring + 4 * tile.split * (turns * tile.tiles * 176 + 16) > 48 * 1024
    words = (("TRIPS", "ROLL" if tile.ahead else "UNROLL"), ("RING", "LARGE" if large else "SHARED"))
    template |= {"AHEAD": max(1, tile.ahead), "HELD": tile.ahead == 0, "GROUPS": groups, "TURNS": turns}
    kernel = Kernel(
        "matvec_mma_affine" if affine else "matvec_mma",
        tuple(operands),
        "out",
        _BODIES[affine],
        (*defines(extras), *_words(x.dtype, packing), *words),
        matrix=True,
        threads=threads,
        large=ring if large else 0,
    )
    return Launch(
        kernel,
        tuple(operands.values()),
        tuple(template.items()),
        (groups, 1, 1),
        threads,
        (rows, outputs),
        x.dtype,
    )


def supported(x: mx.array, weight: mx.array | Affine) -> bool:
    """Whether the kernel serves these shapes and types."""
    packed = not isinstance(weight, Affine) or (weight.bits in (4, 8) and weight.group in (32, 64, 128))
    return packed and x.dtype in _TYPES and x.shape[0] <= MAX_ROWS and x.shape[1] % 32 == 0
