"""The first pass of attention on matrix units: sixteen (row, head) pairs at a time, as fast as the keys are read.

The contract is that of attention.py, for 16-bit T and D up to 128. Four simdgroups share a piece of the keys: each
visits every fourth step of 16 keys, scores, weighs and sums by itself, and they join at the end. Nothing waits in
between: while a simdgroup works on a step its values and the keys of the next step are on their way. Weights are
rounded to T before they meet the values; scores, maxima and sums are float32.

Row invariance: pairs lie along an axis of the matrix unit that it does not sum over, keys at their absolute
positions along one that it does. A step that holds new rows, or is not in the piece of every pair, is done for
one row of the forward after the other: with the keys and values of its own path, zeros where it sees none, and
what the unit makes for other pairs is dropped. So the instruction that counts for a row sees the same numbers at
the same places whatever else is in the forward.
"""

from __future__ import annotations

import re
from typing import Final

import mlx.core as mx

from worker.kernels import attention_piece, rope_write, rows
from worker.kernels.dialect import Kernel, Launch
from worker.kernels.rope_write import Heads

# Lane 4 g + t has pairs g and g + 8 of the simdgroup's sixteen (a and b). Of a step's keys it reads g and g + 8,
# the t-th eight of every 32 numbers; of its values 2 t, 2 t + 1 and these plus 8, the g-th eight of every 64.
_HEAD: Final = r"""
SHARED(QUAD, q8, TILE * STRIDE);
SHARED(QUAD, parts, TILE * 32);
SHARED(float, tops, TILE * 4);
SHARED(float, totals, TILE * 4);
SHARED(int, path, 256);
const int piece = by, kv = bz, first = bx * TILE;
"""

# Whole steps are old keys that all of the simdgroup's rows see. `s` is the step, `w` the row that a step which is
# not whole is done for.
_STEPS: Final = r"""
const int g = lane >> 2, t = lane & 3, part = sg & 3, m = sg >> 2, mine = first + m * 16;
const int w0 = mine / G, w1 = (mine + 15) / G < R ? (mine + 15) / G : R - 1;
int whole_from = 0, whole_until = length / 16;
for (int w = w0; w <= w1; w++) {
  const int position = length + DEPTH(w);
  CUT
  const int low = piece * cut / 16, high = (position < low * 16 + cut ? position + 1 : low * 16 + cut) / 16;
  whole_from = low > whole_from ? low : whole_from;
  whole_until = high < whole_until ? high : whole_until;
}
if (w0 > w1) t1 = t0;
int s = t0 * 2 + part, w = w0;
SETTLE
"""

# On to the next work: a step that is not whole has one for each row that sees some of its keys.
_SETTLE: Final = r"""
while (s < t1 * 2 && !WHOLE(s)) {
  for (; w <= w1; w++) {
    const int position = length + DEPTH(w);
    CUT
    if (s * 16 >= piece * cut && s * 16 < piece * cut + cut && s * 16 <= position) break;
  }
  if (w <= w1) break;
  s += 4;
  w = w0;
}
"""

# The slot of the step's key `key`, where row w sees it.
_SLOT: Final = r"""
      const int at = s * 16 + key;
      const bool seen = whole || at <= length + DEPTH(w);
      int slot = begin + key;
      if (TREE && !whole && seen && at >= length) {
        const int index = length + path[w * 16 + at - length];
        slot = meta[1 + index / 32] * 32 + index % 32;
      }
"""

_KEYS: Final = (
    r"""
  {
    const bool whole = WHOLE(s);
    const int begin = meta[1 + s / 2] * 32 + s % 2 * 16;
    UNROLL for (int h = 0; h < 2; h++) {
      const int key = g + 8 * h;
"""
    + _SLOT
    + r"""
      UNROLL for (int c = 0; c < CHUNKS; c++) if (seen && c * 32 + t * 8 < D)
        words4(keys + slot * (D / 2) + c * 16 + t * 4, k + (h * CHUNKS + c) * 4);
    }
  }
"""
)

_VALUES: Final = (
    r"""
  {
    const bool whole = WHOLE(s);
    const int begin = meta[1 + s / 2] * 32 + s % 2 * 16;
    UNROLL for (int i = 0; i < 4; i++) {
      const int key = 2 * t + i % 2 + i / 2 * 8;
"""
    + _SLOT
    + r"""
      if (!seen) { UNROLL for (int c = 0; c < BLOCKS * 4; c++) v[i * BLOCKS * 4 + c] = 0u; }
      UNROLL for (int c = 0; c < BLOCKS; c++) if (seen && c * 64 + g * 8 < D)
        words4(values + slot * (D / 2) + c * 32 + g * 4, v + (i * BLOCKS + c) * 4);
    }
  }
"""
)

_START: Final = r"""
GLOBAL(unsigned) keys = (GLOBAL(unsigned))((OUT(T))pool) + (long)kv * pool_shape[2] * (D / 2);
GLOBAL(unsigned) values = (GLOBAL(unsigned))((OUT(T))pool) + (long)(HKV + kv) * pool_shape[2] * (D / 2);
unsigned k[2 * CHUNKS * 4], v[4 * BLOCKS * 4];
UNROLL for (int i = 0; i < 2 * CHUNKS * 4; i++) k[i] = 0u;
UNROLL for (int i = 0; i < 4 * BLOCKS * 4; i++) v[i] = 0u;
float acc[BLOCKS * 32], best_a = -1e30f, best_b = -1e30f, total_a = 0.0f, total_b = 0.0f;
UNROLL for (int i = 0; i < BLOCKS * 32; i++) acc[i] = 0.0f;
const bool early = s < t1 * 2 && WHOLE(s);
if (early) { KEYS VALUES }
if (D % 32) for (int i = tid; i < TILE * (CHUNKS * 4 - D / 8); i += THREADS) {
  uint4 zero;
  zero.x = 0u; zero.y = 0u; zero.z = 0u; zero.w = 0u;
  q8[i / (CHUNKS * 4 - D / 8) * STRIDE + D / 8 + i % (CHUNKS * 4 - D / 8)].u = zero;
}
"""

# Scores: x of keys 0 to 7 of the step, y of keys 8 to 15, each from two chains of products.
_SCORES: Final = r"""
    float x[8], y[8];
    UNROLL for (int i = 0; i < 8; i++) { x[i] = 0.0f; y[i] = 0.0f; }
    UNROLL for (int c = 0; c < CHUNKS; c++) {
      const uint4 a = q8[(m * 16 + g) * STRIDE + c * 4 + t].u, b = q8[(m * 16 + g + 8) * STRIDE + c * 4 + t].u;
      MMA(T, x, a.x, b.x, a.y, b.y, k[c * 4], k[c * 4 + 1]);
      MMA(T, y, a.x, b.x, a.y, b.y, k[(CHUNKS + c) * 4], k[(CHUNKS + c) * 4 + 1]);
      MMA(T, x + 4, a.z, b.z, a.w, b.w, k[c * 4 + 2], k[c * 4 + 3]);
      MMA(T, y + 4, a.z, b.z, a.w, b.w, k[(CHUNKS + c) * 4 + 2], k[(CHUNKS + c) * 4 + 3]);
    }
"""

_WEIGHTS: Final = r"""
    UNROLL for (int i = 0; i < 4; i++) { x[i] += x[i + 4]; y[i] += y[i + 4]; }
    if (!whole) {
      UNROLL for (int i = 0; i < 2; i++) {
        if (!for_a || at0 + i > sees) x[i] = -3e38f;
        if (!for_b || at0 + i > sees) x[i + 2] = -3e38f;
        if (!for_a || at0 + i + 8 > sees) y[i] = -3e38f;
        if (!for_b || at0 + i + 8 > sees) y[i + 2] = -3e38f;
      }
    }
    float top_a = MAX(MAX(x[0], x[1]), MAX(y[0], y[1])), top_b = MAX(MAX(x[2], x[3]), MAX(y[2], y[3]));
    top_a = MAX(top_a, XOR(top_a, 1)); top_b = MAX(top_b, XOR(top_b, 1));
    top_a = MAX(top_a, XOR(top_a, 2)); top_b = MAX(top_b, XOR(top_b, 2));
    top_a = MAX(best_a, MUL(top_a, SCALE)); top_b = MAX(best_b, MUL(top_b, SCALE));
    const float shrink_a = EXP2(best_a - top_a), shrink_b = EXP2(best_b - top_b);
    best_a = top_a; best_b = top_b;
    UNROLL for (int i = 0; i < 2; i++) {
      x[i] = EXP2(FMA(x[i], SCALE, -top_a)); x[i + 2] = EXP2(FMA(x[i + 2], SCALE, -top_b));
      y[i] = EXP2(FMA(y[i], SCALE, -top_a)); y[i + 2] = EXP2(FMA(y[i + 2], SCALE, -top_b));
    }
    total_a = FMA(total_a, shrink_a, (x[0] + x[1]) + (y[0] + y[1]));
    total_b = FMA(total_b, shrink_b, (x[2] + x[3]) + (y[2] + y[3]));
    const unsigned p0 = PAIR(T, x[0], x[1]), p1 = PAIR(T, x[2], x[3]);
    const unsigned p2 = PAIR(T, y[0], y[1]), p3 = PAIR(T, y[2], y[3]);
    UNROLL for (int i = 0; i < BLOCKS * 32; i++) acc[i] *= i % 4 < 2 ? shrink_a : shrink_b;
"""

# Column j of a lane's eight is in tile j of its block: a tile's columns are 8 apart.
_SUMS: Final = r"""
    UNROLL for (int c = 0; c < BLOCKS * 4; c++) {
      const unsigned v0 = v[c], v1 = v[BLOCKS * 4 + c], v2 = v[BLOCKS * 8 + c], v3 = v[BLOCKS * 12 + c];
      if (whole) {
        MMA(T, acc + c * 8, p0, p1, p2, p3, LOWS(v0, v1), LOWS(v2, v3));
        MMA(T, acc + c * 8 + 4, p0, p1, p2, p3, HIGHS(v0, v1), HIGHS(v2, v3));
      } else {
        float o[8];
        UNROLL for (int i = 0; i < 8; i++) o[i] = acc[c * 8 + i];
        MMA(T, o, p0, p1, p2, p3, LOWS(v0, v1), LOWS(v2, v3));
        MMA(T, o + 4, p0, p1, p2, p3, HIGHS(v0, v1), HIGHS(v2, v3));
        UNROLL for (int i = 0; i < 8; i++) if (i % 4 < 2 ? for_a : for_b) acc[c * 8 + i] = o[i];
      }
    }
"""

_LOOP: Final = (
    r"""
if (!early && s < t1 * 2) { KEYS VALUES }
while (s < t1 * 2) {
  const bool whole = WHOLE(s), for_a = (mine + g) / G == w, for_b = (mine + g + 8) / G == w;
  const int at0 = s * 16 + 2 * t, sees = length + DEPTH(w);
"""
    + _SCORES
    + r"""
  if (whole || w == w1) { s += 4; w = w0; } else w++;
  SETTLE
  if (s < t1 * 2) KEYS
"""
    + _WEIGHTS
    + _SUMS
    + "if (s < t1 * 2) VALUES\n}\n"
)

# The four simdgroups' sums on one scale, then (0 + 1) + (2 + 3).
_JOIN: Final = r"""
total_a += XOR(total_a, 1); total_b += XOR(total_b, 1);
total_a += XOR(total_a, 2); total_b += XOR(total_b, 2);
if (t == 0) {
  tops[(m * 16 + g) * 4 + part] = best_a; totals[(m * 16 + g) * 4 + part] = total_a;
  tops[(m * 16 + g + 8) * 4 + part] = best_b; totals[(m * 16 + g + 8) * 4 + part] = total_b;
}
BARRIER();
const int ra = (m * 16 + g) * 4, rb = ra + 32;
const float top_a = MAX(MAX(tops[ra], tops[ra + 1]), MAX(tops[ra + 2], tops[ra + 3]));
const float top_b = MAX(MAX(tops[rb], tops[rb + 1]), MAX(tops[rb + 2], tops[rb + 3]));
const float shrink_a = EXP2(best_a - top_a), shrink_b = EXP2(best_b - top_b);
const int place = (m * 2 + part / 2) * 256 + lane;
UNROLL for (int c = 0; c < BLOCKS; c++) {
  float4 o[8];
  UNROLL for (int j = 0; j < 8; j++) {
    o[j].x = acc[c * 32 + j * 4] * shrink_a; o[j].y = acc[c * 32 + j * 4 + 1] * shrink_a;
    o[j].z = acc[c * 32 + j * 4 + 2] * shrink_b; o[j].w = acc[c * 32 + j * 4 + 3] * shrink_b;
  }
  if (c > 0) BARRIER();
  if (part % 2 == 1) { UNROLL for (int j = 0; j < 8; j++) parts[place + j * 32].f = o[j]; }
  BARRIER();
  if (part % 2 == 0) {
    UNROLL for (int j = 0; j < 8; j++) {
      const float4 other = parts[place + j * 32].f;
      o[j].x += other.x; o[j].y += other.y; o[j].z += other.z; o[j].w += other.w;
      parts[place + j * 32].f = o[j];
    }
  }
  BARRIER();
  OUTPUT
}
"""

# A simdgroup gives out half of the pairs and half of the columns of a block.
_OUTPUT: Final = r"""
  const int row = m * 16 + g + part / 2 * 8, x = first + row, column = c * 64 + t * 16 + part % 2 * 4;
  const int position = length + DEPTH(x < pairs ? x / G : 0);
  CUT
  if (x < pairs && piece * cut <= position) {
    UNROLL for (int n = 0; n < 2; n++) if (column + n * 8 < D) {
      float4 sum;
      UNROLL for (int j = 0; j < 4; j++) {
        const int at = m * 512 + (part % 2 * 4 + j) * 32 + lane;
        const float one = parts[at].s[part / 2 * 2 + n] + parts[at + 256].s[part / 2 * 2 + n];
        if (j == 0) sum.x = one; else if (j == 1) sum.y = one; else if (j == 2) sum.z = one; else sum.w = one;
      }
      ((OUT(float4))pieces)[((long)RECORD(row) * D + column + n * 8) / 4] = sum;
    }
    if (c == 0 && part % 2 == 0 && t == 0) {
      const float top = MAX(MAX(tops[row * 4], tops[row * 4 + 1]), MAX(tops[row * 4 + 2], tops[row * 4 + 3]));
      float sum[4];
      UNROLL for (int i = 0; i < 4; i++) sum[i] = MUL(totals[row * 4 + i], EXP2(tops[row * 4 + i] - top));
      OUT(float) mark = pieces + (long)SPLITS * R * H * D + RECORD(row) * 2;
      mark[0] = top;
      mark[1] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
  }
"""


def _spelt(text: str) -> str:
    parts = {"SETTLE": _SETTLE, "KEYS": _KEYS, "VALUES": _VALUES, "OUTPUT": _OUTPUT}
    return re.sub(r"\b(SETTLE|KEYS|VALUES|OUTPUT)\b", lambda found: parts[found[1]], text)


BODY: Final = (
    _HEAD
    + attention_piece.PIECE
    + _spelt(_STEPS + _START)
    + attention_piece.PATHS
    + attention_piece.PROLOGUE
    + _spelt(_LOOP)
    + _spelt(_JOIN)
)

WORDS: Final = (
    ("CHUNKS", "((D + 31) / 32)"),
    ("BLOCKS", "((D + 63) / 64)"),
    ("STRIDE", "((CHUNKS | 1) * 4)"),
    ("WHOLE(s)", "((s) >= whole_from && (s) < whole_until)"),
    ("KEEP(x, e, v)", "q8[(x) * STRIDE + (e) / 8].h[(e) % 8] = RAW(v)"),
)


def launch(  # noqa: PLR0917 - the operands of the contract, in its order
    qkv: mx.array, table: mx.array, pool: mx.array, meta: mx.array, heads: Heads, tree: mx.array | None = None
) -> Launch:
    """The first pass on the operands of the contract; *table* holds the constants."""
    sixteens = -(-len(qkv) * heads.heads // heads.kv_heads // 16)
    tile = 16 * min(sixteens, 2)
    operands = rope_write.operands(qkv, table, pool, meta, tree)
    words = (*attention_piece.words(heads, tree), *WORDS)
    kernel = Kernel("attention_mma", tuple(operands), "pieces", BODY, words, matrix=True)
    return attention_piece.launch_of(
        kernel, operands, heads, tile, (-(-sixteens * 16 // tile), rows.SPLITS, heads.kv_heads)
    )


def supported(qkv: mx.array, heads: Heads) -> bool:
    """Whether the kernel serves these shapes."""
    return qkv.dtype in (mx.bfloat16, mx.float16) and heads.dim <= 128
