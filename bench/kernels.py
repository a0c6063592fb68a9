"""Each kernel on this machine's GPU: right, the same bits for every row count, faster than plain operations?

Errors are measured against the plain operations in float32 on the CPU, as parts of the bound of the type. Times
are minima over interleaved rounds of a chain of calls. Runs on CUDA and on Metal; most of its time is
compiling.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import click
import mlx.core as mx
import numpy as np
from report import Figure, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from worker.kernels import add_norm, attention, matvec, rope_write, rows, swiglu
from worker.kernels.dialect import MAX_ROWS, PAGE, target
from worker.kernels.matvec import Affine, Extras
from worker.kernels.rope_write import Heads

TYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
BOUND = {"float32": 1e-5, "float16": 2.5e-3, "bfloat16": 2e-2}
CALLS, ROUNDS = 50, 7
# A tree of eight rows, and the path to its last one.
PARENTS, PATH = (-1, 0, 0, 1, 1, 2, 3, 6), (0, 1, 3, 6, 7)


Step = Callable[[mx.array], mx.array]


@dataclass
class Results:
    """Figures by name; of errors and differing values the largest is kept."""

    figures: dict[str, Figure] = field(default_factory=dict)

    def error(self, name: str, kind: str, got: mx.array, want: mx.array) -> None:
        """The largest error of a row relative to its largest value, in bounds of the type *kind*."""
        have, true = np.array(got.astype(mx.float32)), np.array(want)
        size = np.maximum(np.abs(true).max(-1), 1e-3)
        worst = float((np.abs(have - true).max(-1) / size).max()) / BOUND[kind]
        self._keep(f"{name}: error", worst if math.isfinite(worst) else math.inf, "bounds", 1.0)

    def bits(self, name: str, one: mx.array, other: mx.array) -> None:
        """How many values of two results differ in their bits."""
        whole = mx.uint32 if one.dtype == mx.float32 else mx.uint16
        self._keep(
            f"{name}: differing values", float((one.view(whole) != other.view(whole)).sum().item()), "", 0.0
        )

    def _keep(self, name: str, value: float, unit: str, goal: float) -> None:
        before = self.figures.get(name)
        if before is None or value > before.value:
            self.figures[name] = Figure(name, value, unit, goal, "lower")

    def times(self, name: str, kernel: Step, plain: Step, start: mx.array) -> None:
        """Microseconds a call of both, and their ratio; each call's result is the next one's operand."""
        best = [math.inf, math.inf]
        for _ in range(ROUNDS):
            for index, step in enumerate((kernel, plain)):
                value = start
                began = time.perf_counter()
                for _ in range(CALLS):
                    value = step(value)
                mx.eval(value)
                best[index] = min(best[index], (time.perf_counter() - began) / CALLS)
        self.figures[f"{name}: kernel"] = Figure(f"{name}: kernel", best[0] * 1e6, "us", None, "lower")
        ratio = best[1] / best[0]
        self.figures[f"{name}: gain"] = Figure(f"{name}: plain / kernel", ratio, "x", None, "higher")


class Draw:
    """Seeded normal numbers, on the GPU in a type and on the CPU in float32 with the same values."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def one(self, *shape: int, kind: str) -> tuple[mx.array, mx.array]:
        """Numbers of *shape* in the type *kind*, and the same values in float32."""
        numbers = mx.array(self._random.standard_normal(shape, np.float32))
        narrow = numbers.astype(TYPES[kind])
        return narrow, mx.array(np.array(narrow.astype(mx.float32)))

    def order(self, count: int) -> np.ndarray:
        """The numbers below *count*, shuffled."""
        return self._random.permutation(count).astype(np.int32)


def groups(counts: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(start, count) of the groups in which sixteen rows are computed again."""
    for count in counts:
        for start in range(0, MAX_ROWS - count + 1, count):
            yield start, count


def on_cpu(call: Callable[[], mx.array]) -> mx.array:
    """The result of plain operations on the CPU."""
    with mx.stream(mx.cpu):
        out = call()
        mx.eval(out)
    return out


def check_matvec(results: Results, kind: str, packing: tuple[int, int] | None, counts: tuple[int, ...]) -> None:
    draw, width, lines = Draw(1), 1152, 2048
    (x, wide_x), (dense, wide_dense) = draw.one(MAX_ROWS, width, kind=kind), draw.one(lines, width, kind=kind)
    (norm, wide_norm), (add, wide_add) = draw.one(width, kind=kind), draw.one(MAX_ROWS, lines, kind=kind)
    weight: mx.array | Affine = dense
    name = f"matvec {kind}"
    if packing is not None:
        bits, group = packing
        name += f" {bits} bits, groups of {group}"
        words, scales, biases = mx.quantize(dense, group_size=group, bits=bits)
        weight = Affine(words, scales, biases, group, bits)
        parts = [part.astype(mx.float32) for part in (scales, biases)]
        values = mx.dequantize(words, *parts, group_size=group, bits=bits)
        wide_dense = mx.array(np.array(values))
    for extras, wide in (
        (Extras(norm=norm, eps=1e-5, add=add), Extras(norm=wide_norm, eps=1e-5, add=wide_add)),
        (Extras(norm=norm, eps=1e-5, glu=True), Extras(norm=wide_norm, eps=1e-5, glu=True)),
    ):
        all_rows = matvec.matvec(x, weight, extras)
        mx.eval(all_rows)
        want = on_cpu(lambda wide=wide: matvec.reference(wide_x, wide_dense, wide))
        results.error(name, kind, all_rows, want)
        for start, count in groups(counts):
            end = start + count
            part = None if extras.add is None else extras.add[start:end]
            some = Extras(norm=norm, eps=1e-5, glu=extras.glu, add=part)
            results.bits(name, matvec.matvec(x[start:end], weight, some), all_rows[start:end])


def pool_of(draw: Draw, kind: str, heads: Heads, length: int) -> tuple[mx.array, mx.array, mx.array]:
    """A pool with a shuffled table, NaN where nothing is stored; the same in float32; and meta for *length*."""
    pages = max(8, -(-(length + MAX_ROWS) // PAGE))
    table = draw.order(pages)
    slots = np.repeat(table * PAGE, PAGE) + np.tile(np.arange(PAGE), pages)
    full, wide = draw.one(2, heads.kv_heads, pages * PAGE, heads.dim, kind=kind)
    unused = np.zeros(pages * PAGE, dtype=bool)
    unused[slots[length + MAX_ROWS :]] = True
    hole = mx.array(unused)[None, None, :, None]
    spoiled, wide = mx.where(hole, mx.array(math.nan, dtype=full.dtype), full), mx.where(hole, math.nan, wide)
    return spoiled, mx.array(np.array(wide)), mx.array(np.concatenate([[length], table]).astype(np.int32))


def at(meta: mx.array, length: int) -> mx.array:
    """The same block table with another length."""
    return mx.concatenate([mx.array([length], dtype=mx.int32), meta[1:]])


def unturned(heads: Heads) -> mx.array:
    """The constants of heads that nothing turns or norms."""
    return rope_write.constants(heads, None, None, None)


def check_attention(results: Results, kind: str, heads: Heads, length: int, counts: tuple[int, ...]) -> None:
    draw, table = Draw(length), unturned(heads)
    name = f"attention {kind} {heads.dim}"
    pool, wide_pool, meta = pool_of(draw, kind, heads, length)
    qkv, wide_qkv = draw.one(MAX_ROWS, (heads.heads + 2 * heads.kv_heads) * heads.dim, kind=kind)
    wide_meta, wide_table = mx.array(np.array(meta)), mx.array(np.array(table))

    def run(part: mx.array, start: int = 0, tree: mx.array | None = None) -> mx.array:
        out, _ = attention.attend(part, table, pool, at(meta, length + start), heads, tree)
        # The rows it writes are read by the next one, of which MLX knows nothing.
        mx.eval(out)
        return out

    def want(part: mx.array, tree: mx.array | None = None) -> mx.array:
        call = partial(attention.attend, part, wide_table, wide_pool, wide_meta, heads, tree, use_kernel=False)
        return on_cpu(lambda: call()[0])

    chain = run(qkv)
    results.error(name, kind, chain, want(wide_qkv))
    for start, count in groups(counts):
        results.bits(name, run(qkv[start : start + count], start), chain[start : start + count])
    tree = rows.tree_array(PARENTS)
    branches = run(qkv[: len(PARENTS)], tree=tree)
    results.error(name, kind, branches, want(wide_qkv[: len(PARENTS)], mx.array(np.array(tree))))
    # The rows of a path, computed as a chain, must give the bits they have in the tree.
    path = mx.array(PATH, dtype=mx.int32)
    results.bits(name, branches[path], run(qkv[path]))


def check_rope(results: Results, kind: str, heads: Heads, length: int, counts: tuple[int, ...]) -> None:
    draw, name = Draw(2), f"rope_write {kind} {heads.dim}"
    frequencies = mx.array((1e4 ** -(np.arange(heads.rotated // 2) / (heads.rotated // 2))).astype(np.float32))
    norms, wide_norms = draw.one(2, heads.dim, kind=kind)
    table = rope_write.constants(heads, frequencies, norms[0], norms[1])
    wide_table = mx.array(np.array(rope_write.constants(heads, frequencies, wide_norms[0], wide_norms[1])))
    width = (heads.heads + 2 * heads.kv_heads) * heads.dim
    qkv, wide_qkv = draw.one(MAX_ROWS, width, kind=kind)
    pool, wide_pool, meta = pool_of(draw, kind, heads, length)
    wide_meta, wide_slots = mx.array(np.array(meta)), mx.arange(length, length + MAX_ROWS, dtype=mx.int32)
    slots = rows.slots(meta, wide_slots)
    mx.eval(pool, slots)

    def run(start: int, end: int) -> tuple[mx.array, mx.array]:
        q, written = rope_write.rope_write(qkv[start:end], table, pool, at(meta, length + start), heads)
        mx.eval(q)
        mx.synchronize()
        new = mx.take(written, slots[start:end], axis=2) + mx.array(0, dtype=pool.dtype)
        mx.eval(new)
        return q, new

    q, new = run(0, MAX_ROWS)
    want_q = on_cpu(lambda: rope_write.reference(wide_qkv, wide_table, wide_pool, wide_meta, heads)[0])
    want_pool = on_cpu(lambda: rope_write.reference(wide_qkv, wide_table, wide_pool, wide_meta, heads)[1])
    results.error(name, kind, q, want_q)
    results.error(name, kind, new, on_cpu(lambda: mx.take(want_pool, rows.slots(wide_meta, wide_slots), axis=2)))
    for start, count in groups(counts):
        some_q, some_new = run(start, start + count)
        results.bits(name, some_q, q[start : start + count])
        results.bits(name, some_new, new[:, :, start : start + count])


def check_elementwise(results: Results, kind: str, counts: tuple[int, ...]) -> None:
    draw, width = Draw(3), 2304
    (x, wide_x), (delta, wide_delta) = (draw.one(MAX_ROWS, width, kind=kind) for _ in range(2))
    (weight, wide_weight), (gate_up, wide_gate_up) = (
        draw.one(width, kind=kind),
        draw.one(MAX_ROWS, 1536, kind=kind),
    )
    _, normed = add_norm.add_norm(x, delta, weight, 1e-5)
    want = on_cpu(lambda: add_norm.reference(wide_x, wide_delta, wide_weight, 1e-5)[1])
    results.error(f"add_norm {kind}", kind, normed, want)
    product = swiglu.swiglu(gate_up)
    results.error(f"swiglu {kind}", kind, product, on_cpu(lambda: swiglu.reference(wide_gate_up)))
    for start, count in groups(counts):
        end = start + count
        some = add_norm.add_norm(x[start:end], delta[start:end], weight, 1e-5)[1]
        results.bits(f"add_norm {kind}", some, normed[start:end])
        results.bits(f"swiglu {kind}", swiglu.swiglu(gate_up[start:end]), product[start:end])


def time_attention(results: Results, heads: Heads, length: int, count: int) -> None:
    draw, scale, table = Draw(4), heads.score_scale, unturned(heads)
    q, _ = draw.one(count, heads.heads * heads.dim, kind="bfloat16")
    new, _ = draw.one(count, 2 * heads.kv_heads * heads.dim, kind="bfloat16")
    k, v = (draw.one(1, heads.kv_heads, length + count, heads.dim, kind="bfloat16")[0] for _ in range(2))
    pages = -(-(length + count) // PAGE) + 8
    pool = mx.random.normal((2, heads.kv_heads, pages * PAGE, heads.dim)).astype(mx.bfloat16)
    meta = mx.array(np.concatenate([[length], draw.order(pages)]).astype(np.int32))
    mx.eval(q, new, k, v, pool, meta, table)

    def kernel(x: mx.array) -> mx.array:
        return attention.attend(mx.concatenate([x, new], axis=1), table, pool, meta, heads)[0]

    def plain(x: mx.array) -> mx.array:
        turned = x.reshape(count, heads.heads, heads.dim).swapaxes(0, 1)[None]
        y = mx.fast.scaled_dot_product_attention(turned, k, v, scale=scale, mask="causal")
        return y[0].swapaxes(0, 1).reshape(count, -1)

    name = f"attention bfloat16, {heads.heads}/{heads.kv_heads} x {heads.dim}, context {length}, {count} rows"
    results.times(name, kernel, plain, q)


def time_matvec(results: Results, width: int, lines: int, count: int, bits: int | None) -> None:
    """The pair up and down: norm and SwiGLU in the first launch, the residual in the second."""
    up, down = (
        mx.random.normal(shape).astype(mx.bfloat16) * 0.02 for shape in ((2 * lines, width), (width, lines))
    )
    weights: list[mx.array | Affine] = [up, down]
    if bits is not None:
        weights = [Affine(*mx.quantize(one, group_size=64, bits=bits), 64, bits) for one in (up, down)]
    x, norm = mx.random.normal((count, width)).astype(mx.bfloat16), mx.ones((width,), dtype=mx.bfloat16)
    arrays = [
        part for one in weights for part in ([one] if isinstance(one, mx.array) else [one.words, one.scales])
    ]
    mx.eval(x, norm, arrays)

    def step(use_kernel: bool | None) -> Callable[[mx.array], mx.array]:
        def call(y: mx.array) -> mx.array:
            z = matvec.matvec(y, weights[0], Extras(norm=norm, eps=1e-5, glu=True), use_kernel=use_kernel)
            return matvec.matvec(z, weights[1], Extras(add=y), use_kernel=use_kernel)

        return call

    name = f"matvec pair {'bfloat16' if bits is None else f'{bits} bits'}, {width} x {lines}, {count} rows"
    results.times(name, step(None), step(False), x)


def time_add_norm(results: Results, width: int, count: int) -> None:
    x, weight = mx.random.normal((count, width)).astype(mx.bfloat16), mx.ones((width,), dtype=mx.bfloat16)
    mx.eval(x, weight)
    name = f"add_norm bfloat16, {width}, {count} rows"
    results.times(
        name,
        lambda y: add_norm.add_norm(x, y, weight, 1e-5)[1],
        lambda y: add_norm.add_norm(x, y, weight, 1e-5, use_kernel=False)[1],
        x,
    )


def check_all(results: Results, kind: str, quick: bool) -> None:
    counts = (1, 2, 5, 8) if kind == "bfloat16" and not quick else (1, 5)
    check_elementwise(results, kind, counts)
    for packing in (None, (4, 64)) if quick else (None, (4, 32), (4, 64), (8, 128)):
        check_matvec(results, kind, packing, counts if packing in (None, (4, 64)) else (1,))
    for dim in (64, 128) if quick else (64, 80, 96, 128, 256):
        heads = Heads(heads=6, kv_heads=2, dim=dim, rotated=dim, norm_eps=1e-6)
        few = counts if dim in (64, 128) else (1, 5)
        check_rope(results, kind, heads, 250, few)
        for length in (0, 17, 250, 1023, 2040):
            still = Heads(heads=6, kv_heads=2, dim=dim, rotated=0)
            check_attention(results, kind, still, length, few)


def time_all(results: Results) -> None:
    small, large = (Heads(heads=h, kv_heads=k, dim=d, rotated=0) for h, k, d in ((9, 3, 64), (32, 8, 128)))
    for count in (1, 8):
        for heads in (small, large):
            for length in (64, 1024, 4096, 16384):
                time_attention(results, heads, length, count)
        for width, lines in ((576, 1536), (4096, 12288)):
            time_add_norm(results, width, count)
            for bits in (None, 4):
                time_matvec(results, width, lines, count, bits)


@click.command()
@click.option("--quick", is_flag=True, help="bfloat16 and a few shapes only.")
def main(quick: bool) -> None:
    """Check and time every kernel."""
    if target() is None:
        raise SystemExit("no GPU: the kernels do not run here")
    results = Results()
    for kind in ("bfloat16",) if quick else tuple(TYPES):
        began = time.perf_counter()
        check_all(results, kind, quick)
        click.echo(f"{kind} checked in {time.perf_counter() - began:.0f} s", err=True)
    time_all(results)
    write("kernels", list(results.figures.values()))


if __name__ == "__main__":
    main()
