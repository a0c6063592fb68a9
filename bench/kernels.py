"""Each kernel on this machine's GPU: right, the same bits for every row count, faster than plain operations?

The sweep: errors against float64 of the same inputs, as parts of the bound of the type; bits of every row count,
row and start; what was written, and that nothing else was. Its cases come in an order that a seed gives, so a time
limit takes an even share of them. First, on CUDA, what MLX_PTX_CACHE_DIR lacks is compiled on all cores;
`precompile.py --sweep` does that beforehand. Speed: times are minima over interleaved rounds of a chain of calls.
"""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import click
import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from report import RESULTS, Figure, write
from sweep import launch_all, sweep
from sweep_attention import table_of
from sweep_base import Findings, Numbers, noted

from worker.kernels import add_norm, attention, disk_cache, matvec
from worker.kernels.dialect import PAGE, recorded, target
from worker.kernels.matvec import Affine, Extras
from worker.kernels.rope_write import Heads

CALLS, ROUNDS = 50, 7
PARTS = ("compile", "errors", "speed")

Step = Callable[[mx.array], mx.array]


class Times(Protocol):
    """Who times a chain of calls of a kernel against plain operations."""

    def times(self, name: str, kernel: Step, plain: Step, start: mx.array, operands: Sequence[mx.array]) -> None:
        """Each call's result is the next one's operand, *start* the first; *operands* are computed before."""


class Once:
    """Calls the kernel, to no end: for a run that only shows which kernels there are."""

    def times(
        self, _name: str, kernel: Step, _plain: Step, start: mx.array, _operands: Sequence[mx.array]
    ) -> None:
        """As in `Times`."""
        kernel(start)


@dataclass
class Timed:
    """Figures by name: microseconds a call of the kernel, and its gain."""

    figures: list[Figure] = field(default_factory=list)

    def times(self, name: str, kernel: Step, plain: Step, start: mx.array, operands: Sequence[mx.array]) -> None:
        """As in `Times`."""
        mx.eval(start, operands)
        best = [math.inf, math.inf]
        for _ in range(ROUNDS):
            for index, step in enumerate((kernel, plain)):
                value = start
                began = time.perf_counter()
                for _ in range(CALLS):
                    value = step(value)
                mx.eval(value)
                best[index] = min(best[index], (time.perf_counter() - began) / CALLS)
        self.figures.append(Figure(f"{name}: kernel", best[0] * 1e6, "us", None, "lower"))
        self.figures.append(Figure(f"{name}: plain / kernel", best[1] / best[0], "x", None, "higher"))


def time_attention(timer: Times, heads: Heads, length: int, count: int) -> None:
    draw, scale, table = Numbers(4), heads.score_scale, table_of(heads)
    q, _ = draw.normal(count, heads.heads * heads.dim, kind="bfloat16")
    new, _ = draw.normal(count, 2 * heads.kv_heads * heads.dim, kind="bfloat16")
    k, v = (draw.normal(1, heads.kv_heads, length + count, heads.dim, kind="bfloat16")[0] for _ in range(2))
    pages = -(-(length + count) // PAGE) + 8
    pool = mx.random.normal((2, heads.kv_heads, pages * PAGE, heads.dim)).astype(mx.bfloat16)
    meta = mx.array(np.concatenate([[length], draw.random.permutation(pages)]).astype(np.int32))

    def kernel(x: mx.array) -> mx.array:
        return attention.attend(mx.concatenate([x, new], axis=1), table, pool, meta, heads)[0]

    def plain(x: mx.array) -> mx.array:
        turned = x.reshape(count, heads.heads, heads.dim).swapaxes(0, 1)[None]
        y = mx.fast.scaled_dot_product_attention(turned, k, v, scale=scale, mask="causal")
        return y[0].swapaxes(0, 1).reshape(count, -1)

    name = f"attention bfloat16, {heads.heads}/{heads.kv_heads} x {heads.dim}, context {length}, {count} rows"
    timer.times(name, kernel, plain, q, (new, k, v, pool, meta, table))


def time_matvec(timer: Times, width: int, lines: int, count: int, bits: int | None) -> None:
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

    def step(use_kernel: bool | None) -> Callable[[mx.array], mx.array]:
        def call(y: mx.array) -> mx.array:
            z = matvec.matvec(y, weights[0], Extras(norm=norm, eps=1e-5, glu=True), use_kernel=use_kernel)
            return matvec.matvec(z, weights[1], Extras(add=y), use_kernel=use_kernel)

        return call

    name = f"matvec pair {'bfloat16' if bits is None else f'{bits} bits'}, {width} x {lines}, {count} rows"
    timer.times(name, step(None), step(False), x, (norm, *arrays))


def time_add_norm(timer: Times, width: int, count: int) -> None:
    x, weight = mx.random.normal((count, width)).astype(mx.bfloat16), mx.ones((width,), dtype=mx.bfloat16)
    name = f"add_norm bfloat16, {width}, {count} rows"
    timer.times(
        name,
        lambda y: add_norm.add_norm(x, y, weight, 1e-5)[1],
        lambda y: add_norm.add_norm(x, y, weight, 1e-5, use_kernel=False)[1],
        x,
        (weight,),
    )


def time_all(timer: Times) -> None:
    """Every kernel that has a plain peer, in the shapes of a small model and of a large one."""
    small, large = (Heads(heads=h, kv_heads=k, dim=d, rotated=0) for h, k, d in ((9, 3, 64), (32, 8, 128)))
    for count in (1, 8):
        for heads in (small, large):
            for length in (64, 1024, 4096, 16384):
                time_attention(timer, heads, length, count)
        for width, lines in ((576, 1536), (4096, 12288)):
            time_add_norm(timer, width, count)
            for bits in (None, 4):
                time_matvec(timer, width, lines, count, bits)


def compiled(folder: Path) -> int:
    """Compile what *folder* lacks, on all cores: how many kernels that was."""
    with noted() as launches:
        launch_all()
    with recorded() as timed:
        time_all(Once())
    return disk_cache.fill([*launches.values(), *timed], folder)


def swept(seed: int, seconds: float) -> list[Figure]:
    """Run the sweep: its figures, and how much of it was run."""
    findings, began = Findings(), time.perf_counter()
    done, whole = sweep(findings, seed, seconds)
    click.echo(f"{done} of {whole} cases in {time.perf_counter() - began:.1f} s", err=True)
    figures = [Figure("cases run", done, f"of {whole}", whole, "higher")]
    figures += [Figure("values compared bit by bit", findings.compared, "", None, "higher")]
    for name in sorted(findings.errors | findings.differing):
        if name in findings.errors:
            figures.append(Figure(f"{name}: error against float64", findings.errors[name], "bounds", 1.0, "lower"))
        if name in findings.differing:
            figures.append(Figure(f"{name}: differing values", findings.differing[name], "", 0.0, "lower"))
    return figures


@click.command()
@click.option("--part", type=click.Choice(PARTS), multiple=True, help="All unless one is named.")
@click.option("--seconds", type=float, default=math.inf, help="For the sweep of errors.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the inputs, and of the order.")
@click.option("--copy", type=click.Path(path_type=Path), help="Where a copy of the results goes.")
def main(*, part: tuple[str, ...], seconds: float, seed: int, copy: Path | None) -> None:
    """Check and time every kernel."""
    kind = target()
    if kind is None:
        raise SystemExit("no GPU: the kernels do not run here")
    # MLX looks up where its kernels are once, before it computes anything.
    folder = disk_cache.open_folder(Path(tempfile.gettempdir(), "mtplx-bench"))
    figures: list[Figure] = []
    part = part or PARTS
    if "compile" in part and folder is not None:
        began = time.perf_counter()
        click.echo(f"{compiled(folder)} kernels compiled in {time.perf_counter() - began:.1f} s", err=True)
    if "errors" in part:
        figures += swept(seed, seconds)
    if "speed" in part:
        timed, began = Timed(), time.perf_counter()
        time_all(timed)
        click.echo(f"timed in {time.perf_counter() - began:.1f} s", err=True)
        figures += timed.figures
    if not figures:
        return
    device = f"{mx.device_info()['device_name']} (MLX {mx.__version__}, {kind.upper()})"
    write("kernels", figures, device=device)
    if copy is not None:
        shutil.copy(RESULTS / "kernels.json", copy)
    wrong = [one.name for one in figures if one.met == "no" and one.name != "cases run"]
    if wrong:
        raise SystemExit(f"{len(wrong)} figures miss their goals, the first: {wrong[0]}")


if __name__ == "__main__":
    main()
