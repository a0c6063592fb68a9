"""What the first passes of attention have in common: pieces of keys, and the new rows that a threadgroup writes.

The text stands in a body after `piece`, `kv` (the head of K and V) and `first` (a number of row and head among the
pairs of the key head) are known; TILE pairs from there on are the threadgroup's.
"""

from __future__ import annotations

import math
from typing import Final

import mlx.core as mx

from worker.kernels import rope_write, rows
from worker.kernels.dialect import Kernel, Launch, number
from worker.kernels.rope_write import Heads

# Which tiles of 32 keys the threadgroup visits, and which new rows it writes.
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

# Where in a tree the path of a row goes on: the row of the forward, by row and depth.
PATHS: Final = r"""
if (TREE) for (int i = tid; i < R * 16; i += THREADS) {
  path[i] = 0;
  for (int j = 0; j < R; j++) if ((MASK(i / 16) >> j & 1u) && DEPTH(j) == i % 16) path[i] = j;
}
"""

# An item is a q head of the tile, kept by KEEP(pair, element, value), or K or V of a needed row, which goes to the
# pool. A simdgroup turns one item while the next one is on its way.
FIRST_ITEM: Final = (
    rope_write.PLACES
    + "int next = sg;\nwhile (next < ITEMS && !WANTED(next)) next += THREADS / 32;\n"
    + "if (next < ITEMS) { const int row = ROW_OF(next), head = HEAD_OF(next);"
    + rope_write.LOAD
    + "}\n"
)

PROLOGUE: Final = (
    "while (next < ITEMS) {\nconst int now = next, row = ROW_OF(now), head = HEAD_OF(now);\n"
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


def words(heads: Heads, tree: mx.array | None) -> tuple[tuple[str, str], ...]:
    """The defines of a first pass. SCALE: of scores, for exp2; RECORD: where a pair's piece lies."""
    return (
        *rows.words(tree),
        *rope_write.turning(heads),
        *ITEMS,
        ("SCALE", number(heads.score_scale * math.log2(math.e))),
        ("RECORD(x)", "((piece * R + (first + (x)) / G) * H + kv * G + (first + (x)) % G)"),
    )


def launch_of(
    kernel: Kernel, operands: dict[str, mx.array], heads: Heads, tile: int, groups: tuple[int, int, int]
) -> Launch:
    """A first pass for tiles of *tile* pairs, on the operands of the contract."""
    rows.check_meta(operands["meta"])
    qkv = operands["qkv"]
    count = qkv.shape[0]
    template = (("T", qkv.dtype), *rope_write.shape(heads), ("R", count), ("TILE", tile), ("THREADS", 128))
    shape = (rows.SPLITS * count * heads.heads * (heads.dim + 2),)
    return Launch(kernel, tuple(operands.values()), template, groups, 128, shape, mx.float32)
