"""Compiles, on a machine with nvcc and no GPU, the CUDA kernels that the GPU benches need, for MLX to find.

    python bench/precompile.py --mlx SITE --out FOLDER

The forwards of every model run with kernels that are noted instead of launched, those over trees too. Beside them:
MLX's own quantised matrix products, each of which takes a minute to compile; SITE is where MLX's CUDA build lies
unpacked, with its headers, and with their text in its library. What is in FOLDER already stays. The names of
kernels depend on FOLDER, which their texts name: it has the same path where they run. For the bench of
speculation: --models smol-bf16,smol-real-4bit, and --tiles 64: it has prompts alone computed by these products.
For the bench of the kernels: --sweep, which has no models.
"""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import click
import mlx.core as mx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import kernels
import models
import rig
import sweep
from cuda_text import Module, recording

from worker.engine.dense_in_place import DenseInPlace
from worker.engine.forward import MAX_ROWS
from worker.engine.verify_bank import SIZES, TREE_SIZES
from worker.kernels import dialect, nvrtc
from worker.kernels.move_rows import MOST, move_rows
from worker.kernels.rows import tree_array
from worker.kv.prefix import Opened

PROMPT = 1024
DEVICE = "mlx/backend/cuda/device"
FLAGS = ("-std=c++17", "-cubin", "-O3", "--expt-relaxed-constexpr", "-w")
# Rows of a tile of MLX's quantised product: up to 16 rows of a forward, and those of a prompt.
TILES = (16, 64)


def ours(shape: models.Shape) -> dict[str, Module]:
    """The kernels of the bench's lanes over *shape*: one layer has all of them."""
    single = shape.with_layers(1)
    one = rig.rig_of(single, models.make(single, evaluated=False), PROMPT)
    with recording() as found:
        for lane in (one.kernels, one.products):
            with one.sequence(0, PROMPT + MAX_ROWS) as table:
                meta = mx.array([0, *table], mx.int32)
                for rows in SIZES:
                    lane.bank.run(mx.zeros((rows,), mx.uint32), meta, one.pool.arrays)
                for rows in TREE_SIZES:
                    tree = tree_array([-1, *[0] * (rows - 1)])
                    lane.bank.run(mx.zeros((rows,), mx.uint32), meta, one.pool.arrays, tree)
            read(one, lane)
        # Of a kept branch, and of pages that are parted.
        for moves in (MAX_ROWS, MOST):
            move_rows(one.pool.arrays[0], mx.zeros((2, moves), mx.int32))
        return dict(found)


def swept() -> dict[str, Module]:
    """The kernels of the sweep, and of what is timed; with them MLX's product that a timed one stands beside."""
    with recording() as found:
        sweep.launch_all()
        kernels.time_all(kernels.Once())
    return found | {one.name: one for one in products(models.GROUP, models.BITS, TILES[:1])}


def read(one: rig.Rig, lane: DenseInPlace) -> None:
    """Build the forwards of a prompt, each as if it were the last: that one is not computed by itself.

    The lane is not ended, which would compute the last one.
    """
    sequence = one.pages.reserve(PROMPT)
    lane.begin(Opened(sequence, (), b"", False, (), 0, True))
    for _ in range(0, PROMPT, lane.prefill_rows):
        lane.read((0,) * lane.prefill_rows, last=True)
    sequence.release()


def products(group: int, bits: int, tiles: Sequence[int]) -> Iterator[Module]:
    """MLX's quantised products of bfloat16 for outputs in multiples of 128, and for others. tiles: their rows.

    Names are those of mlx/backend/cuda/quantized/qmm of MLX 0.32.
    """
    number = "cutlass::bfloat16_t"
    for rows in tiles:
        tile = f"cute::Shape<cute::Int<{rows}>, cute::Int<128>, cute::Int<64>>"
        rest = f"{number}, cutlass::uint{bits}b_t, {number}, {tile}>"
        end = f"bfloat16_m{rows}_b{bits}_g{group}_affine"
        yield Module(
            f"qmm_sm80_tn_{end}",
            f'#include "{DEVICE}/qmm_sm80.cuh"\n',
            (f"mlx::core::cu::qmm_sm80_kernel<{group}, {rest}",),
            forced=True,
        )
        yield Module(
            f"qmm_naive_tn_aligned_{end}",
            f'#include "{DEVICE}/qmm_naive.cuh"\n',
            (f"mlx::core::cu::qmm_naive_kernel<{group}, true, false, true, {rest}",),
            forced=True,
        )


def headers(library: Path, folder: Path) -> None:
    """Write the device code that MLX's *library* holds as text."""
    data = library.read_bytes()
    (offset,), (count,) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<H", data, 56)
    loads = [struct.unpack_from("<IIQQQQ", data, offset + 56 * place) for place in range(count)]
    listed = subprocess.run(["nm", "-S", library], capture_output=True, text=True, check=True).stdout
    for address, size, name in re.findall(r"^(\w+) (\w+) r \w*?jit_source_(\w+?)E?$", listed, re.MULTILINE):
        place, length = int(address, 16), int(size, 16)
        start = next(
            at + place - base for kind, _, at, base, _, held in loads if kind == 1 and 0 <= place - base < held
        )
        path = folder / DEVICE / (name + (".h" if name == "config" else ".cuh"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data[start : start + length].rstrip(b"\0"))


def light(folder: Path) -> None:
    """Write what stands for MLX's headers in a kernel of ours."""
    for name, text in nvrtc.HEADERS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def compiled(module: Module, out: Path, includes: list[str], arch: str) -> str:
    """Compile *module* into *out*; empty if it is there, else what there is to tell."""
    path = module.path(out)
    if path.with_name(path.name + ".ptx").exists():
        return ""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        text, cubin = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
        uses = "".join(f"  (void*)&{name},\n" for name in module.functions)
        text.write_text(module.source + (f"void* used[] = {{\n{uses}}};\n" if module.forced else ""))
        command = ["nvcc", *FLAGS, f"-arch={arch}", "-Xptxas", "-v", *includes, "-o", cubin, text]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{module.name} does not compile:\n{done.stderr[:4000]}")
        lowered = re.findall(r"Compiling entry function '(\w+)'", done.stderr)
        assert len(lowered) == len(module.functions) == 1, "a module here has one function"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(path.name + ".txt").write_text(f"{module.functions[0]}\t{lowered[0]}\n")
        path.with_name(path.name + ".ptx").write_bytes(cubin.read_bytes())
    registers = re.findall(r"Used (\d+) registers", done.stderr)
    spilled = re.findall(r"([1-9]\d*) bytes spill stores", done.stderr)
    words = f"{registers[0]} registers" + (f", {spilled[0]} bytes spilled" if spilled else "")
    return f"{module.name}: {words}, {time.perf_counter() - began:.0f} s"


def compile_all(modules: list[Module], site: Path, out: Path, arch: str) -> None:
    """Compile what is missing in *out*, two at a time."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        few, full = Path(folder, "few"), Path(folder, "full")
        light(few)
        headers(site / "mlx/lib/libmlx.so", full)
        for forced, includes in (
            (True, [full, site / "mlx/include", site / "mlx/include/cccl"]),
            (False, [few]),
        ):
            run = partial(compiled, out=out, includes=[f"-I{one}" for one in includes], arch=arch)
            for told in pool.map(run, [module for module in modules if module.forced == forced]):
                if told:
                    click.echo(told)


@click.command()
@click.option("--mlx", "site", type=click.Path(path_type=Path, exists=True), required=True, help="Site folder.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="What MLX_PTX_CACHE_DIR will be.")
@click.option("--arch", default="sm_90a", show_default=True, help="Of the device; MLX adds the a from sm_90 on.")
@click.option("--models", "names", default=",".join(models.SHAPES), help="Which, by comma.")
@click.option("--tiles", default=",".join(map(str, TILES)), show_default=True, help="Of MLX's products, by comma.")
@click.option("--sweep", "sweeping", is_flag=True, help="What the bench of the kernels needs, and no models.")
def main(*, site: Path, out: Path, arch: str, names: str, tiles: str, sweeping: bool) -> None:
    """Compile for a GPU that is elsewhere."""
    # Lanes ask what they would launch on.
    dialect.target = lambda: "cuda"
    out.mkdir(parents=True, exist_ok=True)
    dialect.keep_texts(out)
    modules: dict[str, Module] = swept() if sweeping else {}
    for name in () if sweeping else names.split(","):
        before, shape = len(modules), (models.SHAPES | models.REAL)[name]
        modules |= ours(shape)
        click.echo(f"{name}: {len(modules) - before} kernels")
        if shape.quantised:
            rows = [int(one) for one in tiles.split(",") if one]
            modules |= {one.name: one for one in products(shape.group, models.BITS, rows)}
    compile_all(list(modules.values()), site, out, arch)
    click.echo(f"{len(modules)} kernels in {out}")


if __name__ == "__main__":
    main()
