"""Every kernel's Metal text compiles and runs over the stand-in, and keeps the rules that a C++ compiler does not see."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from kernels import standin
from kernels.oracle import draw

import worker.kernels
from worker.kernels import (
    add_norm,
    attention_combine,
    attention_fma,
    attention_mma,
    matvec,
    matvec_mma,
    move_rows,
    read_pages,
    rope_write,
    rows,
    swiglu,
)
from worker.kernels.dialect import Launch
from worker.kernels.rope_write import Heads

MODULES = [path.stem for path in sorted(Path(worker.kernels.__path__[0]).glob("*.py"))]
KERNELS = [name for name in MODULES if hasattr(import_module(f"worker.kernels.{name}"), "launch")]
HEADS = Heads(heads=4, kv_heads=1, dim=128, rotated=128, norm_eps=1e-6)
META = mx.array([3, 1, 0, 0, 0, 0, 0, 0], dtype=mx.int32)
LIMIT = 32 * 1024
SIZES = {"QUAD": 16, "float": 4, "int": 4, "unsigned": 4}
IN_PLACE = {"rope_write", "attention_fma", "attention_mma", "move_rows"}


def random() -> np.random.Generator:
    return np.random.default_rng(0)


def some(*shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return draw(random(), shape, dtype)


def turn(tree: mx.array | None) -> Launch:
    table = rope_write.constants(HEADS, mx.ones((64,)), some(128), some(128))
    return rope_write.launch(some(8, 6 * 128), table, some(2, 1, 64, 128), META, HEADS, tree)


def attend(dim: int, count: int, tree: mx.array | None) -> Launch:
    heads = Heads(heads=4, kv_heads=1, dim=dim, rotated=dim, norm_eps=1e-6)
    table = rope_write.constants(heads, mx.ones((dim // 2,)), some(dim), some(dim))
    return attention_fma.launch(some(count, 6 * dim), table, some(2, 1, 64, dim), META, heads, tree)


def attend_mma(dim: int, count: int, tree: mx.array | None) -> Launch:
    heads = Heads(heads=4, kv_heads=1, dim=dim, rotated=dim, norm_eps=1e-6)
    table = rope_write.constants(heads, mx.ones((dim // 2,)), some(dim), some(dim))
    return attention_mma.launch(some(count, 6 * dim), table, some(2, 1, 64, dim), META, heads, tree)


def join(tree: mx.array | None) -> Launch:
    size = rows.SPLITS * 8 * 4 * 130
    return attention_combine.launch(mx.ones((size,)), META, (8, 4, 128), mx.bfloat16, tree)


def affine(bits: int, launch: Callable[..., Launch] = matvec.launch) -> Launch:
    words, scales, biases = mx.quantize(some(64, 1024), group_size=64, bits=bits)
    weight = matvec.Affine(words, scales, biases, 64, bits)
    return launch(some(2, 1024), weight, matvec.Extras(norm=some(1024), glu=True))


TREE = rows.tree_array([-1, 0, 0, 1, 1, 2, 3, 6])
# At least one launch of each kernel, by its module: the largest tiles among them.
EXAMPLES: dict[str, list[Callable[[], Launch]]] = {
    "add_norm": [lambda: add_norm.launch(some(2, 4096), some(2, 4096), some(4096), 1e-5)],
    "swiglu": [lambda: swiglu.launch(some(2, 256))],
    "rope_write": [lambda: turn(None), lambda: turn(TREE)],
    "attention_fma": [
        lambda: attend(128, 16, None),
        lambda: attend(128, 8, TREE),
        lambda: attend(256, 16, None),
        lambda: attend(80, 8, None),
    ],
    "attention_mma": [
        lambda: attend_mma(128, 16, None),
        lambda: attend_mma(128, 8, TREE),
        lambda: attend_mma(80, 1, None),
    ],
    "attention_combine": [lambda: join(None), lambda: join(TREE)],
    "read_pages": [lambda: read_pages.launch(some(2, 1, 64, 128), META, 20, some(1))],
    "move_rows": [lambda: move_rows.launch(some(2, 1, 64, 128), mx.array([[1, 2], [3, 4]], dtype=mx.int32))],
    "matvec": [lambda: matvec.launch(some(16, 64), some(64, 64)), lambda: affine(4), lambda: affine(8)],
    "matvec_mma": [
        lambda: matvec_mma.launch(some(16, 64), some(64, 64)),
        lambda: affine(4, matvec_mma.launch),
        lambda: affine(8, matvec_mma.launch),
    ],
}


def test_every_kernel_has_a_run() -> None:
    assert KERNELS, "kernels were found"
    assert set(KERNELS) == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_text_compiles_runs_and_keeps_the_rules(name: str) -> None:
    for example in EXAMPLES[name]:
        launch = example()
        standin.run(launch, written="pool" if name in IN_PLACE else None)
        text = standin.metal_text(launch)
        bare = subprocess.run(
            ["c++", "-E", "-P", "-x", "c++", "-"], input=text.source, capture_output=True, text=True, check=True
        ).stdout
        pointers_name_their_address_space(bare)
        threadgroup_memory_fits(bare, launch)
        assert launch.threads <= 256
        assert launch.threads % 32 == 0
        assert sum("device" in one and "const" not in one for one in text.parameters) == 1, "one output"


def pointers_name_their_address_space(bare: str) -> None:
    kinds = "float|half|bfloat16_t|bf16|f16|T|uint|unsigned|int|uint2|uint4|float2|float4|half2|uint32_t|int32_t"
    found = list(re.finditer(rf"(?:(\w+)\s+)?\b({kinds})\s*\*", bare))
    assert found
    for one in found:
        assert one[1] in ("device", "constant", "thread"), f"a pointer without an address space: {one[0]!r}"


def threadgroup_memory_fits(bare: str, launch: Launch) -> None:
    names = {name: value for name, value in launch.template if isinstance(value, int)}
    total = 0
    for kind, size in re.findall(r"threadgroup (\w+) \w+\[([^\]]*)\]", bare):
        total += SIZES[kind] * int(eval(size.replace("/", "//"), {}, names))
    # Metal does not launch what has a matrix unit in mind; an SM of CUDA has 227 KiB.
    assert total <= (227 * 1024 if launch.kernel.matrix else LIMIT)


def test_a_kernel_is_known_by_its_text_as_mlx_finds_it_by_name() -> None:
    one = add_norm.launch(some(1, 64), some(1, 64), some(64), 1e-5).kernel
    other = add_norm.launch(some(1, 64), some(1, 64), some(64), 1e-6).kernel
    assert one.label != other.label


def test_a_short_meta_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 8 numbers"):
        rope_write.launch(
            some(1, 768), mx.ones((320,)), some(2, 1, 64, 128), mx.array([3, 1], dtype=mx.int32), HEADS
        )
