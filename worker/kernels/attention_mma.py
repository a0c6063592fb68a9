"""The first pass of attention on matrix units: sixteen (row, head) pairs at a time, as fast as the keys are read.

The contract is that of attention.py, for 16-bit T and D up to 128. Four simdgroups share a piece of the keys: each
visits every fourth step of 16 keys, scores, weighs and sums by itself, and they join at the end. Nothing waits in
between: the keys and values of the next steps travel meanwhile, into a ring of which a lane reads only what it has
asked for itself. Weights are rounded to T before they meet the values; scores, maxima and sums are float32.

Row invariance: pairs lie along an axis of the matrix unit that it does not sum over, keys at their absolute
positions along one that it does. A step that holds new rows, or is not in the piece of every pair, meets its
values for one row of the forward after the other, zeros where that row sees none, and what the unit makes for
other pairs is dropped; in a tree the keys, too, are those of the row's path. So the instruction that counts for a
row sees the same numbers at the same places whatever else is in the forward.
"""

from __future__ import annotations

import re
from typing import Final

import mlx.core as mx

from worker.kernels import attention_piece, rope_write, rows
from worker.kernels.dialect import Kernel, Launch
from worker.kernels.rope_write import ANGLE, Heads

# Lane 4 g + t has pairs g and g + 8 of each sixteen. Of a step's keys it reads g and g + 8, the t-th eight of
# every 32 numbers; of its values 2 t, 2 t + 1 and these plus 8, the g-th eight of every 64 columns.
_HEAD: Final = r"""
LARGE(unsigned, ring, 4 * STAGES * STAGE);
SHARED(QUAD, q8, TILE * STRIDE);
SHARED(QUAD, parts, TILE * 32);
SHARED(float, tops, TILE * 4);
SHARED(float, totals, TILE * 4);
SHARED(float, sines, R * TURNS + 1);
SHARED(float, cosines, R * TURNS + 1);
SHARED(int, path, 256);
const int piece = by, kv = bz, first = bx * TILE;
"""

# Whole steps are old keys that all rows of the tile see. A pair sees keys `from` up to `until` of the piece.
_STEPS: Final = r"""
const int g = lane >> 2, t = lane & 3, w0 = first / G;
const int w1 = (first + TILE - 1) / G < R ? (first + TILE - 1) / G : R - 1;
int whole_from = 0, whole_until = length / 16, from[TILE / 8], until[TILE / 8];
for (int w = w0; w <= w1; w++) {
  PLACE(w)
  whole_from = piece * cut / 16 > whole_from ? piece * cut / 16 : whole_from;
  whole_until = end / 16 < whole_until ? end / 16 : whole_until;
}
UNROLL for (int i = 0; i < TILE / 8; i++) {
  const int x = first + i * 8 + g;
  PLACE(x < pairs ? x / G : w1)
  from[i] = piece * cut;
  until[i] = x < pairs ? end : 0;
}
"""

# On to the next work (s, w): a step that some row sees. In a tree a step which is not whole is work for each row.
_SETTLE: Final = r"""
  while (s < t1 * 2 && !WHOLE(s)) {
    for (; w <= w1; w++) { PLACE(w) if (s * 16 >= piece * cut && s * 16 < end) break; }
    if (w <= w1) break;
    s += 4;
    w = w0;
  }
"""

_ADVANCE: Final = "if (WHOLE(s) || !TREE || w == w1) { s += 4; w = w0; } else w++;" + _SETTLE

# The slot of the step's key `key`, where the row sees it.
_SLOT: Final = r"""
      const int at = s * 16 + key;
      const bool seen = whole || at <= latest;
      int slot = begin + key;
      if (TREE && !whole && seen && at >= length) {
        const int index = length + path[w * 16 + at - length];
        slot = meta[1 + index / 32] * 32 + index % 32;
      }
"""

# Keys and values of the work on their way to a stage of the ring.
_ASK: Final = (
    r"""
  {
    const bool whole = WHOLE(s);
    const int begin = meta[1 + s / 2] * 32 + s % 2 * 16, latest = length + DEPTH(TREE ? w : w1);
    const int to = (sg * STAGES + stage) * STAGE + lane * 4;
    UNROLL for (int h = 0; h < 2; h++) {
      const int key = g + 8 * h;
"""
    + _SLOT
    + r"""
      UNROLL for (int c = 0; c < CHUNKS; c++)
        COPY16(seen && c * 32 + t * 8 < D, ring, to + (h * CHUNKS + c) * 128,
               keys + slot * (D / 2) + c * 16 + t * 4);
    }
    UNROLL for (int i = 0; i < 4; i++) {
      const int key = 2 * t + i % 2 + i / 2 * 8;
"""
    + _SLOT
    + r"""
      UNROLL for (int c = 0; c < BLOCKS; c++)
        COPY16(seen && c * 64 + g * 8 < D, ring, to + (2 * CHUNKS + i * BLOCKS + c) * 128,
               values + slot * (D / 2) + c * 32 + g * 4);
    }
  }
"""
)

# Whole steps are asked for before the new rows are written.
_START: Final = r"""
GLOBAL(unsigned) keys = (GLOBAL(unsigned))((OUT(T))pool) + (long)kv * pool_shape[2] * (D / 2);
GLOBAL(unsigned) values = (GLOBAL(unsigned))((OUT(T))pool) + (long)(HKV + kv) * pool_shape[2] * (D / 2);
int s = t0 * 2 + sg, w = w0, stage = 0;
SETTLE
ROLL for (; stage < STAGES && s < t1 * 2 && WHOLE(s); stage++) {
  ASK
  COPIED();
  ADVANCE
}
"""

_ANGLES: Final = r"""
for (int i = tid; i < R * TURNS; i += THREADS) {
  const int row = i / PAIRS;
  float sine, cosine;
  SINCOS(ANGLE, sine, cosine)
  sines[i] = sine;
  cosines[i] = cosine;
}
for (int x = tid; x < TILE; x += THREADS) {
  uint4 zero;
  zero.x = 0u; zero.y = 0u; zero.z = 0u; zero.w = 0u;
  UNROLL for (int e = D / 8; e < CHUNKS * 4; e++) q8[x * STRIDE + e].u = zero;
}
BARRIER();
"""

_GO_ON: Final = r"""
ROLL for (; stage < STAGES; stage++) {
  if (s < t1 * 2) {
    ASK
    ADVANCE
  }
  COPIED();
}
float acc[TILE * BLOCKS * 2], best[TILE / 8], total[TILE / 8];
UNROLL for (int i = 0; i < TILE * BLOCKS * 2; i++) acc[i] = 0.0f;
UNROLL for (int i = 0; i < TILE / 8; i++) { best[i] = -1e30f; total[i] = 0.0f; }
stage = 0;
int next_s = s, next_w = w;
s = t0 * 2 + sg;
w = w0;
SETTLE
"""

# Scores: x of keys 0 to 7 of the step, y of keys 8 to 15; products of two chains.
_SCORES: Final = r"""
  float x[TILE / 2], y[TILE / 2];
  UNROLL for (int i = 0; i < TILE / 2; i++) { x[i] = 0.0f; y[i] = 0.0f; }
  UNROLL for (int c = 0; c < CHUNKS; c++) {
    unsigned k[8] = {0u, 0u, 0u, 0u, 0u, 0u, 0u, 0u};
    if (c * 32 + t * 8 < D) {
      TAKE4(ring, here + c * 128, k)
      TAKE4(ring, here + (CHUNKS + c) * 128, k + 4)
    }
    UNROLL for (int j = 0; j < TILE / 16; j++) {
      const uint4 a = q8[(j * 16 + g) * STRIDE + c * 4 + t].u, b = q8[(j * 16 + g + 8) * STRIDE + c * 4 + t].u;
      MMA(T, x + j * 8, a.x, b.x, a.y, b.y, k[0], k[1]);
      MMA(T, y + j * 8, a.x, b.x, a.y, b.y, k[4], k[5]);
      MMA(T, x + j * 8 + 4, a.z, b.z, a.w, b.w, k[2], k[3]);
      MMA(T, y + j * 8 + 4, a.z, b.z, a.w, b.w, k[6], k[7]);
    }
  }
"""

# Of pairs i: the weights p, two keys a word, and what is already there brought down to the new maximum.
_WEIGHTS: Final = r"""
  unsigned p[TILE / 4];
  UNROLL for (int i = 0; i < TILE / 8; i++) {
    const int j = i / 2 * 8 + i % 2 * 2;
    float e[4] = {x[j] + x[j + 4], x[j + 1] + x[j + 5], y[j] + y[j + 4], y[j + 1] + y[j + 5]};
    if (!whole) {
      const bool meant = !TREE || (first + i * 8 + g) / G == w;
      UNROLL for (int n = 0; n < 4; n++) {
        const int at = s * 16 + 2 * t + n % 2 + n / 2 * 8;
        if (!meant || at < from[i] || at >= until[i]) e[n] = -3e38f;
      }
    }
    float top = MAX(MAX(e[0], e[1]), MAX(e[2], e[3]));
    top = MAX(top, XOR(top, 1));
    top = MAX(best[i], MUL(MAX(top, XOR(top, 2)), SCALE));
    const float shrink = EXP2(best[i] - top);
    best[i] = top;
    UNROLL for (int n = 0; n < 4; n++) e[n] = EXP2(FMA(e[n], SCALE, -top));
    total[i] = FMA(total[i], shrink, (e[0] + e[1]) + (e[2] + e[3]));
    p[i / 2 * 4 + i % 2] = PAIR(T, e[0], e[1]);
    p[i / 2 * 4 + i % 2 + 2] = PAIR(T, e[2], e[3]);
    const int own = i / 2 * BLOCKS * 32 + i % 2 * 2;
    UNROLL for (int c = 0; c < BLOCKS * 16; c++) acc[own + c / 2 * 4 + c % 2] *= shrink;
  }
"""

# Column j of a lane's eight is in tile j of its block: a tile's columns are 8 apart.
_SUMS: Final = r"""
  if (whole) {
    UNROLL for (int c = 0; c < BLOCKS; c++) {
      unsigned v[16];
      UNROLL for (int i = 0; i < 4; i++) TAKE4(ring, here + (2 * CHUNKS + i * BLOCKS + c) * 128, v + i * 4)
      UNROLL for (int i = 0; i < 4; i++) {
        const unsigned low0 = LOWS(v[i], v[4 + i]), low1 = LOWS(v[8 + i], v[12 + i]);
        const unsigned high0 = HIGHS(v[i], v[4 + i]), high1 = HIGHS(v[8 + i], v[12 + i]);
        UNROLL for (int j = 0; j < TILE / 16; j++) {
          const int o = j * BLOCKS * 32 + c * 32 + i * 8;
          MMA(T, acc + o, p[j * 4], p[j * 4 + 1], p[j * 4 + 2], p[j * 4 + 3], low0, low1);
          MMA(T, acc + o + 4, p[j * 4], p[j * 4 + 1], p[j * 4 + 2], p[j * 4 + 3], high0, high1);
        }
      }
    }
  } else {
    ROLL for (int u = TREE ? w : w0; u <= (TREE ? w : w1); u++) {
      PLACE(u)
      if (s * 16 < piece * cut || s * 16 >= end) continue;
      unsigned sees[4];
      UNROLL for (int i = 0; i < 4; i++) sees[i] = s * 16 + 2 * t + i % 2 + i / 2 * 8 < end ? 0xffffffffu : 0u;
      UNROLL for (int c = 0; c < BLOCKS; c++) {
        unsigned v[16];
        UNROLL for (int i = 0; i < 4; i++) TAKE4(ring, here + (2 * CHUNKS + i * BLOCKS + c) * 128, v + i * 4)
        UNROLL for (int i = 0; i < 16; i++) v[i] &= sees[i / 4];
        UNROLL for (int j = 0; j < TILE / 16; j++) {
          if ((first + j * 16) / G > u || (first + j * 16 + 15) / G < u) continue;
          const bool for_a = (first + j * 16 + g) / G == u, for_b = (first + j * 16 + g + 8) / G == u;
          UNROLL for (int i = 0; i < 4; i++) {
            const int o = j * BLOCKS * 32 + c * 32 + i * 8;
            float made[8];
            UNROLL for (int n = 0; n < 8; n++) made[n] = acc[o + n];
            MMA(T, made, p[j * 4], p[j * 4 + 1], p[j * 4 + 2], p[j * 4 + 3],
                LOWS(v[i], v[4 + i]), LOWS(v[8 + i], v[12 + i]));
            MMA(T, made + 4, p[j * 4], p[j * 4 + 1], p[j * 4 + 2], p[j * 4 + 3],
                HIGHS(v[i], v[4 + i]), HIGHS(v[8 + i], v[12 + i]));
            UNROLL for (int n = 0; n < 8; n++) if (n % 4 < 2 ? for_a : for_b) acc[o + n] = made[n];
          }
        }
      }
    }
  }
"""

_LOOP: Final = (
    r"""
while (s < t1 * 2) {
  const bool whole = WHOLE(s);
  const int here = (sg * STAGES + stage) * STAGE + lane * 4;
  ARRIVED(STAGES - 1);
"""
    + _SCORES
    + _WEIGHTS
    + _SUMS
    + r"""
  ADVANCE
  {
    const int now_s = s, now_w = w;
    s = next_s;
    w = next_w;
    if (s < t1 * 2) {
      ASK
      ADVANCE
    }
    COPIED();
    next_s = s;
    next_w = w;
    s = now_s;
    w = now_w;
  }
  stage = stage + 1 == STAGES ? 0 : stage + 1;
}
"""
)

# The four simdgroups' sums on one scale, then (0 + 1) + (2 + 3).
_JOIN: Final = r"""
float shrink[TILE / 8];
UNROLL for (int i = 0; i < TILE / 8; i++) {
  total[i] += XOR(total[i], 1);
  total[i] += XOR(total[i], 2);
  if (t == 0) { tops[(i * 8 + g) * 4 + sg] = best[i]; totals[(i * 8 + g) * 4 + sg] = total[i]; }
}
BARRIER();
UNROLL for (int i = 0; i < TILE / 8; i++) {
  const int r = (i * 8 + g) * 4;
  shrink[i] = EXP2(best[i] - MAX(MAX(tops[r], tops[r + 1]), MAX(tops[r + 2], tops[r + 3])));
}
UNROLL for (int c = 0; c < BLOCKS; c++) {
  const int place = sg / 2 * TILE * 16 + lane;
  float4 o[TILE / 2];
  UNROLL for (int j = 0; j < TILE / 2; j++) {
    const int from = j / 8 * BLOCKS * 32 + c * 32 + j % 8 * 4;
    o[j].x = acc[from] * shrink[j / 8 * 2];
    o[j].y = acc[from + 1] * shrink[j / 8 * 2];
    o[j].z = acc[from + 2] * shrink[j / 8 * 2 + 1];
    o[j].w = acc[from + 3] * shrink[j / 8 * 2 + 1];
  }
  if (c > 0) BARRIER();
  if (sg % 2 == 1) { UNROLL for (int j = 0; j < TILE / 2; j++) parts[place + j * 32].f = o[j]; }
  BARRIER();
  if (sg % 2 == 0) {
    UNROLL for (int j = 0; j < TILE / 2; j++) {
      const float4 other = parts[place + j * 32].f;
      o[j].x += other.x; o[j].y += other.y; o[j].z += other.z; o[j].w += other.w;
      parts[place + j * 32].f = o[j];
    }
  }
  BARRIER();
  UNROLL for (int i = 0; i < TILE / 16; i++) {
    OUTPUT
  }
}
"""

# A simdgroup gives out eight pairs of each sixteen and half of the columns of a block.
_OUTPUT: Final = r"""
    const int row = i * 16 + g + sg / 2 * 8, x = first + row, column = c * 64 + t * 16 + sg % 2 * 4;
    PLACE(x < pairs ? x / G : w1)
    if (x < pairs && piece * cut < end) {
      UNROLL for (int n = 0; n < 2; n++) if (column + n * 8 < D) {
        float sum[4];
        UNROLL for (int j = 0; j < 4; j++) {
          const int at = (i * 8 + sg % 2 * 4 + j) * 32 + lane;
          sum[j] = parts[at].s[sg / 2 * 2 + n] + parts[at + TILE * 16].s[sg / 2 * 2 + n];
        }
        float4 four;
        four.x = sum[0]; four.y = sum[1]; four.z = sum[2]; four.w = sum[3];
        ((OUT(float4))pieces)[((long)RECORD(row) * D + column + n * 8) / 4] = four;
      }
      if (c == 0 && sg % 2 == 0 && t == 0) {
        const float top = MAX(MAX(tops[row * 4], tops[row * 4 + 1]), MAX(tops[row * 4 + 2], tops[row * 4 + 3]));
        float sum[4];
        UNROLL for (int j = 0; j < 4; j++) sum[j] = MUL(totals[row * 4 + j], EXP2(tops[row * 4 + j] - top));
        OUT(float) mark = pieces + (long)SPLITS * R * H * D + RECORD(row) * 2;
        mark[0] = top;
        mark[1] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
      }
    }
"""


def _spelt(text: str) -> str:
    parts = {"SETTLE": _SETTLE, "ADVANCE": _ADVANCE, "ASK": _ASK, "OUTPUT": _OUTPUT, "ANGLE": _ANGLE}
    return re.sub(r"\b(SETTLE|ADVANCE|ASK|OUTPUT|ANGLE)\b", lambda found: parts[found[1]], text)


_ANGLE: Final = ANGLE.replace("frequency", "constants[2 * D + i % PAIRS]")

BODY: Final = (
    _HEAD
    + attention_piece.PIECE
    + _spelt(_STEPS + _START)
    + attention_piece.FIRST_ITEM
    + attention_piece.PATHS
    + _spelt(_ANGLES)
    + attention_piece.PROLOGUE
    + _spelt(_GO_ON + _LOOP + _JOIN)
)

WORDS: Final = (
    ("CHUNKS", "((D + 31) / 32)"),
    ("BLOCKS", "((D + 63) / 64)"),
    ("STRIDE", "((CHUNKS | 1) * 4)"),
    ("STAGE", "((2 * CHUNKS + 4 * BLOCKS) * 128)"),
    ("TURNS", "(ROT / 2)"),
    ("PAIRS", "(ROT > 1 ? ROT / 2 : 1)"),
    ("WHOLE(s)", "((s) >= whole_from && (s) < whole_until)"),
    ("PLACE(w)", "const int position = length + DEPTH(w); CUT const int end = END;"),
    ("END", "(position < piece * cut + cut ? position + 1 : piece * cut + cut)"),
    ("TURNED(row, p, frequency, s, c)", "{ s = sines[(row) * TURNS + p]; c = cosines[(row) * TURNS + p]; }"),
    ("KEEP(x, e, v)", "q8[(x) * STRIDE + (e) / 8].h[(e) % 8] = RAW(v)"),
)


def launch(  # noqa: PLR0917 - the operands of the contract, in its order
    qkv: mx.array, table: mx.array, pool: mx.array, meta: mx.array, heads: Heads, tree: mx.array | None = None
) -> Launch:
    """The first pass on the operands of the contract; *table* holds the constants."""
    sixteens = -(-len(qkv) * heads.heads // heads.kv_heads // 16)
    tile = 16 * min(sixteens, 2)
    stages = 2 if tile == 32 and heads.dim > 64 else 3
    stage = (2 * -(-heads.dim // 32) + 4 * -(-heads.dim // 64)) * 512
    operands = rope_write.operands(qkv, table, pool, meta, tree)
    words = (*attention_piece.words(heads, tree), *WORDS, ("STAGES", str(stages)))
    kernel = Kernel(
        "attention_mma", tuple(operands), "pieces", BODY, words, matrix=True, threads=128, large=4 * stages * stage
    )
    groups = (-(-sixteens * 16 // tile), rows.SPLITS, heads.kv_heads)
    return attention_piece.launch_of(kernel, operands, heads, tile, groups)


def supported(qkv: mx.array, heads: Heads) -> bool:
    """Whether the kernel serves these shapes."""
    return qkv.dtype in (mx.bfloat16, mx.float16) and heads.dim <= 128
