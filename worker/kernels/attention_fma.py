"""The first pass of attention in fused multiply-adds, for any device and type.

The contract is that of attention.py. Row invariance: a row's keys are visited in tiles of 32 at their absolute
positions, each key at the lane of its position, also where a tree stores it elsewhere. Which rows and heads
share a threadgroup changes nothing in a row's arithmetic.
"""

from __future__ import annotations

from typing import Final

import mlx.core as mx

from worker.kernels import attention_piece, rope_write, rows
from worker.kernels.dialect import Kernel, Launch
from worker.kernels.rope_write import Heads

# For each pair of the tile what it sees of the piece, and where in a tree its path goes on.
_SEEN: Final = r"""
for (int x = tid; x < TILE; x += THREADS) {
  const int w = (first + x) / G;
  best[x] = -1e30f; total[x] = 0.0f; last[x] = -1; begin[x] = 0; end[x] = 0;
  if (first + x >= pairs) continue;
  const int position = length + DEPTH(w);
  CUT
  if (piece * cut > position) continue;
  last[x] = position;
  begin[x] = piece * cut / 32;
  end[x] = position / 32 + 1 < begin[x] + cut / 32 ? position / 32 + 1 : begin[x] + cut / 32;
}
"""

# A threadgroup takes one piece of one key head for TILE (row, head) pairs. 8 threads share a key's score; each
# thread sums 4 columns of the values over its share of the tile's keys.
BODY: Final = (
    r"""
SHARED(QUAD, q4, TILE * D / 4);
SHARED(float, weight, 2 * TILE * 32);
SHARED(float, best, TILE);
SHARED(float, total, TILE);
SHARED(float, shrink, TILE);
SHARED(int, last, TILE);
SHARED(int, begin, TILE);
SHARED(int, end, TILE);
SHARED(int, path, 256);
const int piece = bx, kv = by, first = bz * TILE;
"""
    + attention_piece.PIECE
    + _SEEN
    + attention_piece.PATHS
    + attention_piece.FIRST_ITEM
    + attention_piece.PROLOGUE
    + r"""
const int CHUNKS = (D + 31) / 32, ACROSS = D / 4;
const int GROUPS = ACROSS <= 16 ? 8 : ACROSS <= 32 ? 4 : 2, KEYS = 32 / GROUPS;
const int part = lane & 7, key = sg * 4 + (lane >> 3), column = tid % ACROSS * 4, share = tid / ACROSS;
const bool sums = share < GROUPS;
GLOBAL(T) keys = (OUT(T))pool + (long)kv * pool_shape[2] * D;
GLOBAL(T) values = (OUT(T))pool + (long)(HKV + kv) * pool_shape[2] * D;
float acc[TILE * 4];
UNROLL for (int i = 0; i < TILE * 4; i++) acc[i] = 0.0f;
for (int t = t0; t < t1; t++) {
  const bool tail = t * 32 + 32 > length;
  const long page = (long)meta[1 + t] * 32;
  float k0[CHUNKS * 4], k1[CHUNKS * 4], v[KEYS * 4];
  UNROLL for (int c = 0; c < CHUNKS; c++) if (c * 32 + part * 4 < D) {
    load4(keys + (page + key) * D + c * 32 + part * 4, k0 + c * 4);
    load4(keys + (page + key + 16) * D + c * 32 + part * 4, k1 + c * 4);
  }
  if (sums) {
    UNROLL for (int i = 0; i < KEYS; i++) load4(values + (page + share * KEYS + i) * D + column, v + i * 4);
  }
  const int buffer = (t & 1) * TILE * 32;
  UNROLL for (int x = 0; x < TILE; x++) {
    if (TREE && tail) {
      UNROLL for (int h = 0; h < 2; h++) {
        const int at = t * 32 + key + 16 * h, far = at - length;
        const int index = far < 0 || at > last[x] ? at : length + path[(first + x) / G * 16 + far];
        const long slot = at > last[x] ? page : (long)meta[1 + index / 32] * 32 + index % 32;
        UNROLL for (int c = 0; c < CHUNKS; c++) if (c * 32 + part * 4 < D)
          load4(keys + slot * D + c * 32 + part * 4, (h ? k1 : k0) + c * 4);
      }
    }
    float s0 = 0.0f, s1 = 0.0f;
    UNROLL for (int c = 0; c < CHUNKS; c++) if (c * 32 + part * 4 < D) {
      const float4 a = q4[x * (D / 4) + c * 8 + part].f;
      s0 = FMA(a.x, k0[c * 4], s0); s0 = FMA(a.y, k0[c * 4 + 1], s0);
      s0 = FMA(a.z, k0[c * 4 + 2], s0); s0 = FMA(a.w, k0[c * 4 + 3], s0);
      s1 = FMA(a.x, k1[c * 4], s1); s1 = FMA(a.y, k1[c * 4 + 1], s1);
      s1 = FMA(a.z, k1[c * 4 + 2], s1); s1 = FMA(a.w, k1[c * 4 + 3], s1);
    }
    s0 += XOR(s0, 1); s1 += XOR(s1, 1);
    s0 += XOR(s0, 2); s1 += XOR(s1, 2);
    s0 += XOR(s0, 4); s1 += XOR(s1, 4);
    if (part == 0) { weight[buffer + x * 32 + key] = s0; weight[buffer + x * 32 + key + 16] = s1; }
  }
  BARRIER();
  for (int x = sg; x < TILE; x += 4) if (t >= begin[x] && t < end[x]) {
    const bool visible = t * 32 + lane <= last[x];
    const float s = visible ? weight[buffer + x * 32 + lane] : -1e30f;
    const float before = best[x], now = MAX(before, MAX32(s)), p = visible ? EXP2(s - now) : 0.0f, sum = SUM32(p);
    weight[buffer + x * 32 + lane] = p;
    if (lane == 0) {
      shrink[x] = EXP2(before - now);
      total[x] = FMA(total[x], shrink[x], sum);
      best[x] = now;
    }
  }
  BARRIER();
  UNROLL for (int x = 0; x < TILE; x++) if (sums && t >= begin[x] && t < end[x]) {
    const float s = shrink[x];
    UNROLL for (int c = 0; c < 4; c++) acc[x * 4 + c] *= s;
    UNROLL for (int i = 0; i < KEYS; i++) {
      const int at = t * 32 + share * KEYS + i;
      const float p = weight[buffer + x * 32 + share * KEYS + i];
      float u[4] = {v[i * 4], v[i * 4 + 1], v[i * 4 + 2], v[i * 4 + 3]};
      if (tail) {
        if (at > last[x]) { u[0] = 0.0f; u[1] = 0.0f; u[2] = 0.0f; u[3] = 0.0f; }
        else if (TREE && at >= length) {
          const int index = length + path[(first + x) / G * 16 + at - length];
          load4(values + ((long)meta[1 + index / 32] * 32 + index % 32) * D + column, u);
        }
      }
      UNROLL for (int c = 0; c < 4; c++) acc[x * 4 + c] = FMA(p, u[c], acc[x * 4 + c]);
    }
  }
}
for (int g = 0; g < GROUPS; g++) {
  BARRIER();
  UNROLL for (int x = 0; x < TILE; x++) if (share == g) {
    float4 o;
    o.x = acc[x * 4]; o.y = acc[x * 4 + 1]; o.z = acc[x * 4 + 2]; o.w = acc[x * 4 + 3];
    if (g > 0) {
      const float4 b = q4[x * (D / 4) + column / 4].f;
      o.x += b.x; o.y += b.y; o.z += b.z; o.w += b.w;
    }
    q4[x * (D / 4) + column / 4].f = o;
  }
}
BARRIER();
OUT(float4) sums_out = (OUT(float4))pieces;
OUT(float) marks = pieces + (long)SPLITS * R * H * D;
for (int i = tid; i < TILE * D / 4; i += THREADS) {
  const int x = i / (D / 4);
  if (last[x] >= 0) sums_out[(long)RECORD(x) * (D / 4) + i % (D / 4)] = q4[i].f;
}
for (int x = tid; x < TILE; x += THREADS) if (last[x] >= 0) {
  marks[RECORD(x) * 2] = best[x];
  marks[RECORD(x) * 2 + 1] = total[x];
}
"""
)


def launch(  # noqa: PLR0917 - the operands of the contract, in its order
    qkv: mx.array, table: mx.array, pool: mx.array, meta: mx.array, heads: Heads, tree: mx.array | None = None
) -> Launch:
    """The first pass on the operands of the contract; *table* holds the constants."""
    pairs = len(qkv) * heads.heads // heads.kv_heads
    tile = min(pairs, 32 if heads.dim <= 128 else 16)
    operands = rope_write.operands(qkv, table, pool, meta, tree)
    keep = ("KEEP(x, e, v)", "q4[(x) * (D / 4) + (e) / 4].s[(e) % 4] = (float)(v) * SCALE")
    words = (*attention_piece.words(heads, tree), rope_write.TURNED, keep)
    kernel = Kernel("attention_fma", tuple(operands), "pieces", BODY, words)
    return attention_piece.launch_of(
        kernel, operands, heads, tile, (rows.SPLITS, heads.kv_heads, -(-pairs // tile))
    )
