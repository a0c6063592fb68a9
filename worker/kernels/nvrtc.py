"""Compiles one CUDA source with NVRTC: a program of its own, since the library compiles one source at a time.

Its standard input is JSON: `library`, path of libnvrtc; `name`, the kernel's function in the namespace of MLX's
kernels; `source`, as MLX makes it; `architecture`, such as "sm_90a"; `include`, the folder of CUDA's own headers.
Standard output is JSON: `lowered`, the function's name in the machine code, and `cubin`, the machine code in
base64. Where it cannot be compiled the exit code is 1 and the compiler's log is on standard error. No MLX here.
"""

from __future__ import annotations

import base64
import ctypes
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

NAMESPACE: Final = "mlx::core::cu::"

# What stands for the headers that MLX embeds in its library. They bring in the C++ library, which takes twenty
# times longer to compile than a kernel does, and of which a kernel uses two types: ten numbers, passed by value.
# nvcc, which the bench compiles with ahead of time, has names for the integers already.
HEADERS: Final = {
    "mlx/backend/cuda/device/utils.cuh": """#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifdef __CUDACC_RTC__
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <cstdint>
#endif
namespace mlx::core::cu {
template <typename T> struct Ten { T of[10]; __device__ constexpr T operator[](int i) const { return of[i]; } };
using Shape = Ten<int>;
using Strides = Ten<long long>;
}
""",
    "cooperative_groups.h": "#pragma once\nnamespace cooperative_groups {}\n",
}


class CompileError(Exception):
    """NVRTC refused; the message is its log, or names the call that failed."""


def compile_source(job: Mapping[str, str]) -> tuple[str, bytes]:
    """The function's name in the machine code, and the machine code.

    Raises:
        CompileError: with the compiler's log.
        OSError: the library cannot be loaded.
    """
    library = ctypes.CDLL(job["library"])
    name = (NAMESPACE + job["name"]).encode()
    texts = ctypes.c_char_p * len(HEADERS)
    program = ctypes.c_void_p()
    files = texts(*[text.encode() for text in HEADERS.values()])
    names = texts(*[header.encode() for header in HEADERS])
    source, file = job["source"].encode(), f"{job['name']}.cu".encode()
    _call(library.nvrtcCreateProgram, ctypes.byref(program), source, file, len(HEADERS), files, names)
    _call(library.nvrtcAddNameExpression, program, name)
    words = (
        b"--device-as-default-execution-space",
        f"--gpu-architecture={job['architecture']}".encode(),
        f"--include-path={job['include']}".encode(),
    )
    try:
        _call(library.nvrtcCompileProgram, program, len(words), (ctypes.c_char_p * len(words))(*words))
    except CompileError:
        raise CompileError(
            _bytes(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program).decode()
        ) from None
    lowered = ctypes.c_char_p()
    _call(library.nvrtcGetLoweredName, program, name, ctypes.byref(lowered))
    assert lowered.value is not None, "a name that was added has a lowered one"
    return lowered.value.decode(), _bytes(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)


def _call(function: Callable[..., int], *arguments: Any) -> None:
    code = function(*arguments)
    if code != 0:
        raise CompileError(f"NVRTC answered {code}")


def _bytes(size: Callable[..., int], read: Callable[..., int], program: ctypes.c_void_p) -> bytes:
    count = ctypes.c_size_t()
    _call(size, program, ctypes.byref(count))
    room = ctypes.create_string_buffer(count.value)
    _call(read, program, room)
    return room.raw


def main() -> int:
    """Read the job, write the answer; returns the exit code."""
    try:
        lowered, cubin = compile_source(json.load(sys.stdin))
    except (CompileError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    json.dump({"lowered": lowered, "cubin": base64.b64encode(cubin).decode()}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
