"""Runs a kernel's Metal text on the CPU.

The text is MLX's own: a graph that holds the kernel is exported to a file, for which MLX generates what it would hand
to Metal, signature and instantiation included. It is compiled by the machine's C++ compiler with `metal_stdlib.hpp`.
Each buffer lies between guards of NaN bytes, outputs are NaN at first, and runs alternate between two orders of the
threads, so that a missing barrier has a chance to show. No threadgroup sees what another one writes.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np

from worker.kernels.dialect import Launch

STDLIB = Path(__file__).with_name("metal_stdlib.hpp")
CACHE = Path(tempfile.gettempdir()) / f"mtplx-standin-{os.getuid()}"
COMPILER = (
    "c++",
    "-std=c++17",
    "-O1",
    "-march=native",
    "-ffp-contract=off",
    "-U_FORTIFY_SOURCE",
    "-fPIC",
    "-shared",
    "-w",
)
GUARD = 256
FAILURES = {
    1: "lanes asked different things",
    2: "the lanes of a simdgroup parted",
    3: "some threads missed a barrier",
    4: "threadgroups wrote different bits to the same place",
}


@dataclass(frozen=True)
class Text:
    """What MLX hands to Metal for one instance of a kernel."""

    name: str
    source: str

    @property
    def parameters(self) -> list[str]:
        signature = re.search(
            r"\[\[kernel\]\] void " + re.escape(self.name) + r"\(\n(.*?)\) \{\n", self.source, re.DOTALL
        )
        assert signature, "MLX generates a signature"
        return [line.strip() for line in signature[1].split(",\n")]


_TEXTS: dict[tuple, Text] = {}


def metal_text(launch: Launch) -> Text:
    """The text for *launch*, from MLX; asked for once where nothing that it depends on differs."""
    operands = tuple((str(array.dtype), array.ndim, array.size < 8) for array in launch.arrays)
    key = (launch.kernel, str(launch.template), operands, str(launch.dtype))
    if key not in _TEXTS:
        _TEXTS[key] = _exported(launch)
    return _TEXTS[key]


def _exported(launch: Launch) -> Text:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/graph"

        def graph(*arrays: mx.array) -> mx.array:
            return replace(launch, arrays=arrays).run("metal")

        mx.export_function(path, graph, *launch.arrays)
        data = Path(path).read_bytes()
    name, rest = _string(data[data.index(b"CustomKernel") + len("CustomKernel") :])
    source, rest = _string(rest)
    x, y, z = launch.groups
    assert struct.unpack("<6i", rest[:24]) == (x * launch.threads, y, z, launch.threads, 1, 1)
    return Text(name, source)


def _string(data: bytes) -> tuple[str, bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return data[8 : 8 + length].decode(), data[8 + length :]


@cache
def _library(text: Text) -> ctypes.CDLL:
    arguments, index = [], 0
    for parameter in text.parameters:
        if "[[buffer(" in parameter:
            kind = parameter.split(" [[")[0].rsplit(" ", 1)[0]
            arguments.append(f"({kind})buffers[{index}]")
            index += 1
        else:
            arguments.append(parameter.split("[[")[1].split("]]")[0] + "_VALUE")
    instance = re.search(r"\]\] decltype\((.*?)\) ", text.source)
    called = instance[1] if instance else text.name
    driver = (
        f'#include "{STDLIB}"\n{text.source}\n'
        "static void** buffers;\n"
        f"static void call() {{ {called}({', '.join(arguments)}); }}\n"
        'extern "C" int run(void** with, const unsigned* groups, int threads, int backwards, standin::Place* place) {\n'
        "  buffers = with; standin::entry = call;\n"
        "  return standin::run_grid(groups[0], groups[1], groups[2], threads, backwards, *place);\n}\n"
    )
    digest = hashlib.sha256((driver + STDLIB.read_text() + " ".join(COMPILER)).encode()).hexdigest()[:24]
    made = CACHE / f"{digest}.so"
    if not made.exists():
        CACHE.mkdir(mode=0o700, exist_ok=True)
        assert CACHE.stat().st_uid == os.getuid(), "nobody else's programs are run"
        with (CACHE / f"{digest}.lock").open("a") as lock:
            # Another process may be at the same text.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                _compile(text.name, driver, made)
    return ctypes.CDLL(str(made))


def _compile(name: str, driver: str, made: Path) -> None:
    building = made.with_suffix(f".{os.getpid()}")
    command = [*COMPILER, "-o", building, "-x", "c++", "-"]
    done = subprocess.run(command, input=driver, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{name} does not compile:\n{done.stderr[:4000]}"
    building.rename(made)


class Buffer:
    """Bytes between two guards."""

    def __init__(self, content: np.ndarray | int) -> None:
        size = content if isinstance(content, int) else content.nbytes
        self.whole = np.full(size + 2 * GUARD + 64, 0xFF, np.uint8)
        self.start = GUARD + -(self.whole.ctypes.data + GUARD) % 64
        self.bytes = self.whole[self.start : self.start + size]
        if not isinstance(content, int):
            self.bytes[:] = np.ascontiguousarray(content).reshape(-1).view(np.uint8)

    @property
    def address(self) -> int:
        return self.whole.ctypes.data + self.start

    def check(self, name: str) -> None:
        end = self.start + self.bytes.size
        assert (self.whole[: self.start] == 0xFF).all(), f"{name} was written before its beginning"
        assert (self.whole[end:] == 0xFF).all(), f"{name} was written beyond its end"


def bits(array: mx.array) -> np.ndarray:
    """The array as NumPy, bfloat16 as its bits."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _array(content: np.ndarray, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    kinds = {mx.float32: np.float32, mx.float16: np.float16, mx.bfloat16: np.uint16, mx.int32: np.int32}
    made = mx.array(content.view(kinds[dtype]).reshape(shape))
    return made.view(mx.bfloat16) if dtype == mx.bfloat16 else made


_turn = 0


def run(launch: Launch, written: str | None = None) -> tuple[mx.array, mx.array | None]:
    """The output of *launch*, and the operand named *written* after the kernel wrote it in place."""
    global _turn  # noqa: PLW0603 - the order of the threads alternates
    _turn += 1
    text = metal_text(launch)
    library = _library(text)
    named = dict(zip(launch.kernel.inputs, launch.arrays, strict=True))
    buffers: dict[str, Buffer] = {}
    for parameter in text.parameters:
        name = parameter.split(" [[")[0].rsplit(" ", 1)[1]
        if "[[buffer(" not in parameter:
            continue
        if name in named:
            buffers[name] = Buffer(bits(named[name]))
        elif name == launch.kernel.output:
            buffers[name] = Buffer(int(np.prod(launch.shape)) * launch.dtype.size)
        else:
            buffers[name] = Buffer(np.array(named[name.removesuffix("_shape")].shape, np.int32))
    before = {name: buffer.bytes.copy() for name, buffer in buffers.items()}
    pointers = (ctypes.c_void_p * len(buffers))(*[buffer.address for buffer in buffers.values()])
    shared = buffers[written].bytes if written else np.zeros(0, np.uint8)
    copies = (shared, shared.copy(), shared.copy())
    place = (ctypes.c_size_t * 4)(*[one.ctypes.data for one in copies], shared.size)
    code = library.run(pointers, (ctypes.c_uint * 3)(*launch.groups), launch.threads, _turn % 2, place)
    assert code == 0, f"{text.name}: {FAILURES[code]}"
    for name, buffer in buffers.items():
        buffer.check(name)
        if name not in (launch.kernel.output, written):
            assert (buffer.bytes == before[name]).all(), f"{name} is an operand and was written"
    output = _array(buffers[launch.kernel.output].bytes, launch.shape, launch.dtype)
    if written is None:
        return output, None
    return output, _array(buffers[written].bytes, named[written].shape, named[written].dtype)
