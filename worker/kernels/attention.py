"""Attention of the rows of one forward over the paged pool, new rows written on the way: two launches a layer.

Contract: qkv, the constants, pool, meta, tree and heads as in `rope_write`. The first launch turns q, writes the
new rows of K and V into the pool in place, and makes, for each piece s of 32, row r and head h, the sum of exp2
weights times values, float32 [32, R H, D], and after all of these the pieces' (maximum, sum of weights), [32, R H,
2]; pieces that a row does not have stay unwritten. `attention_combine` joins them to T [R, H, D]. What is written
are the bits of `rope_write`; whoever reads the new rows takes the output as an operand to come after the write. D
is a multiple of 16 up to 256, H a multiple of Hkv, R in 1..16.

A threadgroup reads new rows only where it wrote them itself: it writes those on the paths of its rows whose
positions lie in its piece. Several threadgroups may write one row; they write the same bits.

Row invariance: a row's keys are visited in tiles of 32 at their absolute positions, each key at the lane of its
position, also where a tree stores it elsewhere; pieces are cut by the row's own position. Which rows and heads
share a threadgroup changes nothing in a row's arithmetic. Slots that a row does not see may hold anything:
their scores are not used and their values count as zero.
"""

from __future__ import annotations

import math
from typing import Final

import mlx.core as mx

from worker.kernels import attention_combine, rope_write, rows
from worker.kernels.dialect import MAX_ROWS, PAGE, Kernel, Launch, chosen, number
from worker.kernels.rope_write import Heads

# Which tiles of keys a threadgroup visits for TILE (row, head) pairs, `first` and on, and which rows it writes.
PIECE: Final = r"""
const int G = H / HKV, pairs = R * G, length = meta[0];
int t0 = 1 << 30, t1 = 0;
unsigned paths = 0u, needed = 0u;
for (int w = first / G; w <= (first + TILE - 1) / G && w < R; w++) {
  const int position = length + DEPTH(w);
  CUT
  if (piece * cut > position) continue;
  const int lo = piece * cut / 32, hi = position / 32 + 1 < lo + cut / 32 ? position / 32 + 1 : lo + cut / 32;
  t0 = lo < t0 ? lo : t0;
  t1 = hi > t1 ? hi : t1;
  paths |= MASK(w);
}
if (t0 >= t1) return;
for (int w = 0; w < R; w++) {
  const int t = (length + DEPTH(w)) / 32;
  if ((paths >> w & 1u) && t >= t0 && t < t1) needed |= 1u << w;
}
"""

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

PATHS: Final = r"""
if (TREE) for (int i = tid; i < R * 16; i += THREADS) {
  path[i] = 0;
  for (int j = 0; j < R; j++) if ((MASK(i / 16) >> j & 1u) && DEPTH(j) == i % 16) path[i] = j;
}
"""

# An item is a q head of the tile, kept by KEEP(pair, element, value), or K or V of a needed row, which goes to the
# pool. A simdgroup turns one item while the next one is on its way.
PROLOGUE: Final = (
    rope_write.PLACES
    + "int next = sg;\nwhile (next < ITEMS && !WANTED(next)) next += THREADS / 32;\n"
    + "if (next < ITEMS) { const int row = ROW_OF(next), head = HEAD_OF(next);"
    + rope_write.LOAD
    + "}\nwhile (next < ITEMS) {\nconst int now = next, row = ROW_OF(now), head = HEAD_OF(now);\n"
    + rope_write.TAKE
    + "do next += THREADS / 32; while (next < ITEMS && !WANTED(next));\n"
    + "if (next < ITEMS) { const int row = ROW_OF(next), head = HEAD_OF(next);"
    + rope_write.LOAD
    + "}\n"
    + rope_write.TURN
    + r"""
  if (is_q) {
    UNROLL for (int i = 0; i < each; i++) if (lane + 32 * i < D / 2) {
      KEEP(now, at_a[i], (T)a[i]);
      KEEP(now, at_b[i], (T)b[i]);
    }
  } else {
"""
    + rope_write.STORED
    + r"""
    UNROLL for (int i = 0; i < each; i++) if (lane + 32 * i < D / 2) {
      stored[at_a[i]] = (T)a[i];
      stored[at_b[i]] = (T)b[i];
    }
  }
}
DEVICE_BARRIER();
"""
)

ITEMS: Final = (
    ("ITEMS", "(TILE + 2 * R)"),
    ("WANTED(n)", "((n) < TILE ? first + (n) < pairs : (needed >> ((n) - TILE) / 2 & 1u) != 0u)"),
    ("ROW_OF(n)", "((n) < TILE ? (first + (n)) / G : ((n) - TILE) / 2)"),
    ("HEAD_OF(n)", "((n) < TILE ? kv * G + (first + (n)) % G : H + ((n) - TILE) % 2 * HKV + kv)"),
)

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
    + PIECE
    + _SEEN
    + PATHS
    + PROLOGUE
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


def words(heads: Heads, tree: mx.array | None) -> tuple[tuple[str, str], ...]:
    """The defines of a first pass. SCALE: of scores, for exp2; RECORD: where a pair's piece lies."""
    scale = heads.dim**-0.5 if heads.scale is None else heads.scale
    return (
        *rows.words(tree),
        *rope_write.turning(heads),
        *ITEMS,
        ("SCALE", number(scale * math.log2(math.e))),
        ("RECORD(x)", "((piece * R + (first + (x)) / G) * H + kv * G + (first + (x)) % G)"),
    )


def launch(  # noqa: PLR0917 - the operands of the contract, in its order
    qkv: mx.array, table: mx.array, pool: mx.array, meta: mx.array, heads: Heads, tree: mx.array | None = None
) -> Launch:
    """The first pass on the operands of the contract; *table* holds the constants."""
    rows.check_meta(meta)
    count, pairs = qkv.shape[0], qkv.shape[0] * heads.heads // heads.kv_heads
    tile = min(pairs, 32 if heads.dim <= 128 else 16)
    operands = rope_write.operands(qkv, table, pool, meta, tree)
    keep = ("KEEP(x, e, v)", "q4[(x) * (D / 4) + (e) / 4].s[(e) % 4] = (float)(v) * SCALE")
    kernel = Kernel("attention", tuple(operands), "pieces", BODY, (*words(heads, tree), keep))
    template = (("T", qkv.dtype), *rope_write.shape(heads), ("R", count), ("TILE", tile), ("THREADS", 128))
    groups = (rows.SPLITS, heads.kv_heads, -(-pairs // tile))
    shape = (rows.SPLITS * count * heads.heads * (heads.dim + 2),)
    return Launch(kernel, tuple(operands.values()), template, groups, 128, shape, mx.float32)


def reference(q: mx.array, pool: mx.array, meta: mx.array, scale: float, tree: mx.array | None = None) -> mx.array:
    """Attention of turned q T [R, H, D] in plain operations: T [R, H, D]. Reads every page of the block table."""
    count, heads, dim = q.shape
    kv_heads = pool.shape[1]
    indices = mx.arange((meta.size - 1) * PAGE, dtype=mx.int32)
    keys, values = mx.take(pool, rows.slots(meta, indices), axis=2).astype(mx.float32)
    visible = rows.seen(meta, count, tree)
    values = mx.where((indices < meta[0] + count)[None, :, None], values, 0.0)
    grouped = q.astype(mx.float32).reshape(count, kv_heads, -1, dim).transpose(1, 2, 0, 3)
    scores = (grouped * scale) @ keys[:, None].swapaxes(-1, -2)
    weights = mx.softmax(mx.where(visible, scores, -math.inf), axis=-1)
    out = weights @ values[:, None]
    return out.transpose(2, 0, 1, 3).reshape(count, heads, dim).astype(q.dtype)


def supported(qkv: mx.array, heads: Heads) -> bool:
    """Whether the kernel serves these shapes."""
    return heads.dim % 16 == 0 and heads.dim <= 256 and heads.heads % heads.kv_heads == 0 and len(qkv) <= MAX_ROWS


def attend(  # noqa: PLR0917 - as above
    qkv: mx.array,
    table: mx.array,
    pool: mx.array,
    meta: mx.array,
    heads: Heads,
    tree: mx.array | None = None,
    *,
    use_kernel: bool | None = None,
) -> tuple[mx.array, mx.array]:
    """Attention T [R, H, D] of the packed projection's rows, and the pool with their K and V.

    The kernels write the pool they were given and return it: take the attention as an operand before reading the
    new rows. The plain operations (`use_kernel=False`) return a new pool.
    """
    target = chosen(use_kernel)
    if target is None or not supported(qkv, heads):
        q, pool = rope_write.reference(qkv, table, pool, meta, heads, tree)
        scale = heads.dim**-0.5 if heads.scale is None else heads.scale
        return reference(q, pool, meta, scale, tree), pool
    pieces = launch(qkv, table, pool, meta, heads, tree).run(target)
    shape = (len(qkv), heads.heads, heads.dim)
    return attention_combine.launch(pieces, meta, shape, qkv.dtype, tree).run(target), pool
