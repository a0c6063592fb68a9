"""Split of the packed projection, q/k norm, rope, and the new rows of K and V into the pool.

Contract: qkv T [R, (H + 2 Hkv) D], heads of q, then k, then v; constants float32 [2 D + ROT / 2]: weights of
the q norm, of the k norm, then one frequency (radians a position) per rotated pair; pool T [2, Hkv, slots, D],
K then V; meta and tree as in `rows`. Out: q T [R, H, D]. The pool is written in place: the kernel casts its
const away, MLX does not see it, and whoever reads the new rows must take q (or something made from it) as an
operand to come after the write. D is even; angles are float32. Rows round as MLX's own operations do: after the
norm, after the input scale, after the rotation. A row depends on its own values and position alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from worker.kernels import rows
from worker.kernels.dialect import Kernel, Launch, chosen, number

# One simdgroup turns one `head` of one `row`; attention has the same text before its own. PLACES: a lane's pairs
# and their constants, the same for every head. LOAD reads the pairs to raw_a and raw_b, TAKE hands them to TURN,
# which makes a and b, the pairs as they are stored.
PLACES: Final = r"""
const int each = (D / 2 + 31) / 32;
int at_a[each], at_b[each];
float raw_a[each], raw_b[each], a[each], b[each], gain[4 * each], frequency[each];
UNROLL for (int i = 0; i < each; i++) {
  const int p = lane + 32 * i;
  const bool turned = p < ROT / 2;
  at_a[i] = turned && !TRADITIONAL ? p : 2 * p;
  at_b[i] = turned && !TRADITIONAL ? p + ROT / 2 : 2 * p + 1;
  raw_a[i] = raw_b[i] = 0.0f;
  if (turned) frequency[i] = constants[2 * D + p];
  UNROLL for (int k = 0; k < 2; k++) if (NORM && p < D / 2) {
    gain[4 * i + 2 * k] = constants[k * D + at_a[i]];
    gain[4 * i + 2 * k + 1] = constants[k * D + at_b[i]];
  }
}
"""

LOAD: Final = r"""
{
  GLOBAL(T) from = qkv + ((long)row * (H + 2 * HKV) + head) * D;
  UNROLL for (int i = 0; i < each; i++) if (lane + 32 * i < D / 2) {
    raw_a[i] = (float)from[at_a[i]];
    raw_b[i] = (float)from[at_b[i]];
  }
}
"""

TAKE: Final = "UNROLL for (int i = 0; i < each; i++) { a[i] = raw_a[i]; b[i] = raw_b[i]; }\n"

TURN: Final = r"""
const bool is_q = head < H, is_v = head >= H + HKV;
float squares = 0.0f;
UNROLL for (int i = 0; i < each; i++) squares = FMA(b[i], b[i], FMA(a[i], a[i], squares));
if (NORM && !is_v) {
  const float scale = RSQRT(SUM32(squares) / D + EPS);
  UNROLL for (int i = 0; i < each; i++) if (lane + 32 * i < D / 2) {
    a[i] = (float)(T)((float)(T)(a[i] * scale) * (is_q ? gain[4 * i] : gain[4 * i + 2]));
    b[i] = (float)(T)((float)(T)(b[i] * scale) * (is_q ? gain[4 * i + 1] : gain[4 * i + 3]));
  }
}
if (!is_v) {
  UNROLL for (int i = 0; i < each; i++) if (lane + 32 * i < ROT / 2) {
    float s, c;
    TURNED(row, lane + 32 * i, frequency[i], s, c)
    const float x = SCALED ? (float)(T)(a[i] * INPUT_SCALE) : a[i];
    const float y = SCALED ? (float)(T)(b[i] * INPUT_SCALE) : b[i];
    a[i] = FMA(x, c, -MUL(y, s));
    b[i] = FMA(x, s, MUL(y, c));
  }
}
"""

# The place in the pool of a head of K or V of a row.
STORED: Final = r"""
const int index = length + row;
const long slot = (long)meta[1 + index / PAGE] * PAGE + index % PAGE;
OUT(T) stored = (OUT(T))pool + ((long)(head - H) * pool_shape[2] + slot) * D;
"""

BODY: Final = (
    r"""
const int head = bx * 4 + sg, row = by, length = meta[0];
if (head >= H + 2 * HKV) return;
"""
    + PLACES
    + LOAD
    + TAKE
    + TURN
    + STORED
    + r"""
OUT(T) to = is_q ? q + ((long)row * H + head) * D : stored;
UNROLL for (int i = 0; i < each; i++) if (lane + 32 * i < D / 2) {
  to[at_a[i]] = (T)a[i];
  to[at_b[i]] = (T)b[i];
}
"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The attention's shape, how its rows are turned and its scores scaled.

    `rotated`: dimensions that rope turns, 0 for none; `traditional`: pairs are neighbours, else halves;
    `input_scale`: what turned dimensions of q and k are multiplied with first; `norm_eps`: None where no norm;
    `scale`: what scores are multiplied with, None for 1 / sqrt(dim).
    """

    heads: int
    kv_heads: int
    dim: int
    rotated: int
    traditional: bool = False
    input_scale: float = 1.0
    norm_eps: float | None = None
    scale: float | None = None

    @property
    def score_scale(self) -> float:
        """What scores are multiplied with."""
        return self.dim**-0.5 if self.scale is None else self.scale


def constants(
    heads: Heads, frequencies: mx.array | None, q_norm: mx.array | None, k_norm: mx.array | None
) -> mx.array:
    """The kernel's constants, float32 [2 D + rotated / 2]; norms T [D], frequencies [rotated / 2]."""
    parts = [mx.ones((heads.dim,)) if norm is None else norm.astype(mx.float32) for norm in (q_norm, k_norm)]
    if frequencies is not None:
        parts.append(frequencies.astype(mx.float32))
    return mx.concatenate(parts)


ANGLE: Final = "MUL((float)(length + DEPTH(row)), (frequency))"

TURNED: Final = ("TURNED(row, p, frequency, s, c)", f"SINCOS({ANGLE}, s, c)")
"""How far the pair p of a row is turned."""


def turning(heads: Heads) -> tuple[tuple[str, str], ...]:
    """The defines of TURN, but for TURNED."""
    return ("EPS", number(heads.norm_eps or 0.0)), ("INPUT_SCALE", number(heads.input_scale))


def shape(heads: Heads) -> tuple[tuple[str, int], ...]:
    """The template of TURN, beside the type."""
    return (
        ("D", heads.dim),
        ("H", heads.heads),
        ("HKV", heads.kv_heads),
        ("ROT", heads.rotated),
        ("NORM", heads.norm_eps is not None),
        ("TRADITIONAL", heads.traditional),
        ("SCALED", heads.input_scale != 1.0),
    )


def operands(
    qkv: mx.array, table: mx.array, pool: mx.array, meta: mx.array, tree: mx.array | None
) -> dict[str, mx.array]:
    """The operands by the names that the text has for them."""
    named = {"qkv": qkv, "constants": table, "pool": pool, "meta": meta}
    return named if tree is None else named | {"tree": tree}


def launch(  # noqa: PLR0917 - the operands of the contract, in its order
    qkv: mx.array, table: mx.array, pool: mx.array, meta: mx.array, heads: Heads, tree: mx.array | None = None
) -> Launch:
    """The kernel on the operands of the contract; *table* holds the constants."""
    rows.check_meta(meta)
    named = operands(qkv, table, pool, meta, tree)
    kernel = Kernel("rope_write", tuple(named), "q", BODY, (*rows.words(tree), *turning(heads), TURNED))
    template = (("T", qkv.dtype), *shape(heads))
    count = qkv.shape[0]
    groups = (-(-(heads.heads + 2 * heads.kv_heads) // 4), count, 1)
    return Launch(kernel, tuple(named.values()), template, groups, 128, (count, heads.heads, heads.dim), qkv.dtype)


def _turn(x: mx.array, angles: mx.array, heads: Heads) -> mx.array:
    """Rope of x T [R, n, D] at angles float32 [R, rotated / 2]."""
    dtype, turned, rest = x.dtype, x[..., : heads.rotated], x[..., heads.rotated :]
    if heads.input_scale != 1.0:
        turned = (turned * heads.input_scale).astype(dtype)
    turned = turned.astype(mx.float32)
    pairs = (*turned.shape[:-1], -1, 2) if heads.traditional else (*turned.shape[:-1], 2, -1)
    axis = -1 if heads.traditional else -2
    a, b = (part.squeeze(axis) for part in mx.split(turned.reshape(pairs), 2, axis=axis))
    c, s = mx.cos(angles)[:, None], mx.sin(angles)[:, None]
    new = mx.stack([a * c - b * s, a * s + b * c], axis=axis).reshape(turned.shape)
    return mx.concatenate([new.astype(dtype), rest], axis=-1)


def reference(  # noqa: PLR0917 - as above
    qkv: mx.array, table: mx.array, pool: mx.array, meta: mx.array, heads: Heads, tree: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """The same in plain operations: q, and a new pool."""
    count = qkv.shape[0]
    parts = qkv.reshape(count, -1, heads.dim)
    q, k, v = mx.split(parts, [heads.heads, heads.heads + heads.kv_heads], axis=1)
    if heads.norm_eps is not None:
        q = mx.fast.rms_norm(q, table[: heads.dim].astype(q.dtype), heads.norm_eps)
        k = mx.fast.rms_norm(k, table[heads.dim : 2 * heads.dim].astype(k.dtype), heads.norm_eps)
    if heads.rotated:
        positions = (meta[:1] + rows.depths(count, tree)).astype(mx.float32)
        angles = positions[:, None] * table[None, 2 * heads.dim :]
        q, k = _turn(q, angles, heads), _turn(k, angles, heads)
    slots = rows.slots(meta, meta[:1] + mx.arange(count, dtype=mx.int32))
    new = mx.stack([k, v]).swapaxes(1, 2)
    # Read where it is written: a scatter would be one more kernel for MLX on CUDA to compile at start.
    here = mx.arange(pool.shape[2], dtype=mx.uint32)[:, None] == slots
    written = mx.take(new, mx.argmax(here, axis=1), axis=2)
    return q, mx.where(here.any(axis=1)[:, None], written, pool)


def rope_write(  # noqa: PLR0917 - as above
    qkv: mx.array,
    table: mx.array,
    pool: mx.array,
    meta: mx.array,
    heads: Heads,
    tree: mx.array | None = None,
    *,
    use_kernel: bool | None = None,
) -> tuple[mx.array, mx.array]:
    """The turned q T [R, H, D], and the pool with the new rows of K and V.

    The kernel writes the pool it was given and returns it: take q as an operand before reading the new rows. The
    plain operations (`use_kernel=False`) return a new pool.
    """
    target = chosen(use_kernel)
    if target is None or heads.dim % 2:
        return reference(qkv, table, pool, meta, heads, tree)
    return launch(qkv, table, pool, meta, heads, tree).run(target), pool
