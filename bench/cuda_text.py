"""The CUDA text that MLX makes of a custom kernel, and what it calls it: a machine without a GPU cannot ask MLX.

Source: mlx/backend/cuda/custom_kernel.cpp and jit_module.cpp of MLX 0.32. MLX looks for a compiled kernel in the
folder MLX_PTX_CACHE_DIR before it compiles one: MODULE.ptx (a cubin will do) and MODULE.txt, which names its
functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from worker.kernels import dialect
from worker.kernels.disk_cache import string_hash

# Names of types in a kernel's name, and in its text.
NAMES = {
    mx.float32: "float",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.uint8: "uint8_t",
    mx.int64: "int64_t",
    mx.bool_: "bool",
}
TYPES = {**NAMES, mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"}
# A longer module name is cut into folders.
LONGEST = 245


@dataclass(frozen=True, slots=True)
class Module:
    """A text to compile: its name in the cache, and the functions that MLX asks it for.

    forced: functions are templates, which nothing in the text instantiates.
    """

    name: str
    source: str
    functions: tuple[str, ...]
    forced: bool = False

    def path(self, folder: Path) -> Path:
        """Where MLX looks for it, without suffix."""
        name, parts = self.name, []
        while len(name) > LONGEST:
            parts.append(name[:LONGEST])
            name = name[LONGEST:]
        return folder.joinpath(*parts, name)


Template = Sequence[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class Custom:
    """What mx.fast.cuda_kernel was given."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str = ""

    def module(self, inputs: Sequence[mx.array], dtypes: Sequence[mx.Dtype], template: Template) -> Module:
        """The text for one call."""
        name = f"custom_kernel_{self.name}" + "".join(_in_name(value) for _, value in template)
        source = (
            '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
            + self.header
            + "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
            + f"__global__ void {name}(\n"
            + self._parameters(inputs, dtypes)
            + ") {\n"
            + "".join(_constant(word, value) for word, value in template)
            + ("\n" if template else "")
            + self.source
            + "\n}\n\n} // namespace mlx::core::cu\n"
        )
        return Module(f"{name}_{string_hash(source.encode()):x}", source, (f"mlx::core::cu::{name}",))

    def _parameters(self, inputs: Sequence[mx.array], dtypes: Sequence[mx.Dtype]) -> str:
        lines = []
        for name, array in zip(self.input_names, inputs, strict=True):
            lines.append(f"    const {TYPES[array.dtype]}* {name}")
            if array.ndim:
                for kind, what in (("Shape", "shape"), ("Strides", "strides"), ("int", "ndim")):
                    if f"{name}_{what}" in self.source:
                        lines.append(f"    const __grid_constant__ {kind} {name}_{what}")
        lines += [f"    {TYPES[dtype]}* {name}" for name, dtype in zip(self.output_names, dtypes, strict=True)]
        return ",\n".join(lines)


def _in_name(value: Any) -> str:
    if isinstance(value, bool):
        return "_t" if value else "_f"
    return f"_{value}" if isinstance(value, int) else f"_{NAMES[value]}"


def _constant(word: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"  constexpr bool {word} = {str(value).lower()};\n"
    return (
        f"  constexpr int {word} = {value};\n" if isinstance(value, int) else f"  using {word} = {TYPES[value]};\n"
    )


@contextmanager
def recording() -> Iterator[dict[str, Module]]:
    """Custom kernels for CUDA are noted instead of launched, and give zeros; by module name."""
    found: dict[str, Module] = {}

    def make(
        name: str, input_names: Sequence[str], output_names: Sequence[str], **rest: Any
    ) -> Callable[..., Any]:
        custom = Custom(name, tuple(input_names), tuple(output_names), rest["source"], rest.get("header", ""))

        def call(
            *,
            inputs: Sequence[mx.array],
            output_shapes: Sequence[Sequence[int]],
            output_dtypes: Sequence[mx.Dtype],
            template: Template = (),
            **_launch: Any,
        ) -> list[mx.array]:
            module = custom.module(inputs, output_dtypes, template)
            found[module.name] = module
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return call

    real = mx.fast.cuda_kernel
    mx.fast.cuda_kernel = make
    dialect.build.cache_clear()
    try:
        yield found
    finally:
        mx.fast.cuda_kernel = real
        dialect.build.cache_clear()
