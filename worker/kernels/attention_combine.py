"""Second pass of attention: joins the pieces of each row and head.

Contract: pieces as `attention` writes them, float32; meta and tree as in `rows`; out T [R, H, D]. A row has as
many pieces as its position says; they are added in the same order whatever R is.
"""

from __future__ import annotations

import math
from typing import Final

import mlx.core as mx

from worker.kernels import rows
from worker.kernels.dialect import Kernel, Launch, chosen

# A thread has four columns and every SHARES-th piece; all of its loads are on their way at once.
BODY: Final = r"""
const int ACROSS = D / 4, SHARES = 128 / ACROSS, EACH = (SPLITS + SHARES - 1) / SHARES;
SHARED(float, weight, 32);
SHARED(float, part, 128 / (D / 4) * D);
const int position = meta[0] + DEPTH(bx / H), share = tid / ACROSS, column = tid % ACROSS * 4;
CUT
const int count = position / cut + 1;
GLOBAL(float) marks = pieces + (long)SPLITS * R * H * D;
float v[EACH * 4], acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
UNROLL for (int i = 0; i < EACH; i++) {
  const int piece = share + i * SHARES;
  if (piece < count && share < SHARES) load4(pieces + (long)(piece * R * H + bx) * D + column, v + i * 4);
}
const float mine = lane < count ? marks[(lane * R * H + bx) * 2] : -1e30f, best = MAX32(mine);
const float scale = lane < count ? EXP2(mine - best) : 0.0f;
const float total = SUM32(lane < count ? MUL(scale, marks[(lane * R * H + bx) * 2 + 1]) : 0.0f);
if (sg == 0) weight[lane] = scale;
BARRIER();
UNROLL for (int i = 0; i < EACH; i++) {
  const int piece = share + i * SHARES;
  if (piece < count && share < SHARES) {
    UNROLL for (int c = 0; c < 4; c++) acc[c] = FMA(weight[piece], v[i * 4 + c], acc[c]);
  }
}
if (share < SHARES) { UNROLL for (int c = 0; c < 4; c++) part[share * D + column + c] = acc[c]; }
BARRIER();
for (int c = tid; c < D; c += 128) {
  float sum = part[c];
  UNROLL for (int i = 1; i < SHARES; i++) sum += part[i * D + c];
  out[(long)bx * D + c] = (T)(sum / total);
}
"""


def launch(
    pieces: mx.array, meta: mx.array, shape: tuple[int, ...], dtype: mx.Dtype, tree: mx.array | None = None
) -> Launch:
    """The kernel on the operands of the contract; *shape* is (R, H, D)."""
    count, heads, dim = shape
    operands = {"pieces": pieces, "meta": meta} | ({} if tree is None else {"tree": tree})
    kernel = Kernel("attention_combine", tuple(operands), "out", BODY, rows.words(tree))
    template = (("T", dtype), ("D", dim), ("H", heads), ("R", count))
    return Launch(kernel, tuple(operands.values()), template, (count * heads, 1, 1), 128, tuple(shape), dtype)


def reference(
    pieces: mx.array, meta: mx.array, shape: tuple[int, ...], dtype: mx.Dtype, tree: mx.array | None = None
) -> mx.array:
    """The same in plain operations."""
    count, heads, dim = shape
    records = rows.SPLITS * count * heads
    sums = pieces[: records * dim].reshape(rows.SPLITS, count, heads, dim)
    marks = pieces[records * dim :].reshape(rows.SPLITS, count, heads, 2)
    positions = meta[:1] + rows.depths(count, tree)
    cuts = rows.FIRST_CUT * (positions // (rows.FIRST_CUT * rows.SPLITS) + 1)
    has = (mx.arange(rows.SPLITS)[:, None] <= positions // cuts)[:, :, None, None]
    best = mx.max(mx.where(has, marks[..., :1], -1e30), axis=0)
    weights = mx.where(has, mx.exp((marks[..., :1] - best) * math.log(2)), 0.0)
    out = mx.sum(mx.where(has, weights * sums, 0.0), axis=0)
    return (out / mx.sum(mx.where(has, weights * marks[..., 1:], 0.0), axis=0)).astype(dtype)


def attention_combine(
    pieces: mx.array,
    meta: mx.array,
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    tree: mx.array | None = None,
    *,
    use_kernel: bool | None = None,
) -> mx.array:
    """The rows' attention T [R, H, D] from its pieces. `use_kernel=False` forces the plain operations."""
    target = chosen(use_kernel)
    if target is None:
        return reference(pieces, meta, shape, dtype, tree)
    return launch(pieces, meta, shape, dtype, tree).run(target)
