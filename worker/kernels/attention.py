"""Attention of the rows of one forward over the paged pool, new rows written on the way: two launches a layer.

Contract: qkv, the constants, pool, meta, tree and heads as in `rope_write`. The first launch turns q, writes the
new rows of K and V into the pool in place, and makes, for each piece s of 32, row r and head h, the sum of exp2
weights times values, float32 [32, R H, D], and after all of these the pieces' (maximum, sum of weights), [32, R H,
2]; pieces that a row does not have stay unwritten. `attention_combine` joins them to T [R, H, D]. What is written
are the bits of `rope_write`; whoever reads the new rows takes the output as an operand to come after the write. D
is a multiple of 16 up to 256, H a multiple of Hkv, R in 1..16.

A threadgroup reads new rows only where it wrote them itself: it writes those on the paths of its rows whose
positions lie in its piece. Several threadgroups may write one row; they write the same bits.

Two kernels make the first launch: attention_mma.py where a device has matrix units that pay, else
attention_fma.py. The pick is by target, type and D, never by R.

Row invariance: pieces are cut by the row's own position, and a piece is gone through in steps at absolute
positions, with each key at the place of its position, also where a tree stores it elsewhere. Slots that a row does
not see may hold anything: their scores are not used and their values count as zero.
"""

from __future__ import annotations

import math
from dataclasses import replace

import mlx.core as mx

from worker.kernels import attention_combine, attention_fma, attention_mma, rope_write, rows
from worker.kernels.dialect import MAX_ROWS, PAGE, chosen
from worker.kernels.rope_write import Heads


def reference(q: mx.array, pool: mx.array, meta: mx.array, scale: float, tree: mx.array | None = None) -> mx.array:
    """Attention of turned q T [R, H, D] in plain operations: T [R, H, D]. Reads every page of the block table."""
    count, heads, dim = q.shape
    kv_heads = pool.shape[1]
    indices = mx.arange((meta.size - 1) * PAGE, dtype=mx.int32)
    keys, values = mx.take(pool, rows.all_slots(meta), axis=2).astype(mx.float32)
    visible = rows.seen(meta, count, tree)
    values = mx.where((indices < meta[:1] + count)[None, :, None], values, 0.0)
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
    """Attention T [R, H D] of the packed projection's rows, and the pool with their K and V.

    The kernels write the pool they were given and return it: take the attention as an operand before reading the
    new rows. The plain operations (`use_kernel=False`) return a new pool.
    """
    target = chosen(use_kernel)
    if target is None or not supported(qkv, heads):
        q, pool = rope_write.reference(qkv, table, pool, meta, heads, tree)
        return reference(q, pool, meta, heads.score_scale, tree).reshape(len(qkv), -1), pool
    first = attention_mma if target == "cuda" and attention_mma.supported(qkv, heads) else attention_fma
    pieces = first.launch(qkv, table, pool, meta, heads, tree).run(target)
    joined = attention_combine.launch(pieces, meta, (len(qkv), heads.heads, heads.dim), qkv.dtype, tree)
    # Shaped as the next product takes it: a reshape would be one more node of the graph for the host to handle.
    return replace(joined, shape=(len(qkv), heads.heads * heads.dim)).run(target), pool
