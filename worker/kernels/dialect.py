"""One kernel text for Metal and CUDA.

A body is written in the words below; each target has a header that defines them and a prologue line that names the
thread. A simdgroup is a warp: 32 lanes. The words:

- `GLOBAL(T)`, `OUT(T)`, `LOCAL(T)`: pointer to const device memory, to device memory, to the thread's own
  arrays.
- `SHARED(T, name, n)`: an array of the threadgroup. It is used by name only: no pointer to it is ever taken.
- `LARGE(T, name, n)`: the one such array that may pass 48 KiB; its bytes stand in the Kernel too, as `large`.
- `BARRIER()`, `XOR(v, m)`, `SUM32(v)`, `MAX32(v)`: the threadgroup's barrier; exchange, sum, maximum of 32
  lanes. `DEVICE_BARRIER()`: after it a threadgroup also reads what it wrote to device memory before.
- `QUAD`: 16 bytes to keep in a SHARED array, as `f` (float4), `u` (uint4), `s[4]` (float) or `h[8]` (ushort).
- `FMA(a, b, c)`, `MUL(a, b)`: one rounding each, and never joined with a neighbour by the compiler. Every
  product that is added to something is written with them, so that a row's bits do not depend on how a kernel
  was unrolled.
- `load2/4/8(p, o)`, `words1/2/4(p, o)`: consecutive elements of any float type, to float32, and of unsigned;
  each run of them aligned to its size.
- `tid`, `lane`, `sg`, `bx`, `by`, `bz`: thread in the group, lane in the simdgroup, simdgroup, group in the
  grid.

A kernel with `matrix` has more words. T is a 16-bit type, of which an unsigned word holds two values.

- `MMA(T, c, a0, a1, a2, a3, b0, b1)`: c += A B for a simdgroup, sums in float32. Lane 4 g + t holds rows g (a0,
  a2) and g + 8 (a1, a3) of A [16, 16], columns 2 t, 2 t + 1 (a0, a1) and 8 more (a2, a3); of B [16, 8] rows 2 t,
  2 t + 1 (b0) and 8 more (b1), column g; of c [16, 8] rows g (c[0], c[1]) and g + 8, columns 2 t, 2 t + 1.
  A matrix unit on CUDA; on Metal the same, spelled out and slow.
- `RAW(v)`, `PAIR(T, a, b)`: a value of T as ushort; a word of two float32 rounded to T.
- `UNPAIR(T, u, o)`, `PAIR_MUL(T, u, v)`: the values of a word to float32; products of two words, rounded to T.
- `LOWS(u, v)`, `HIGHS(u, v)`, `PART(u, m, c)`, `FROM(u, l)`: the first values of two words, the second ones;
  (u & m) | c; lane l's word.
- `COPY16(when, array, i, p)`, `COPIED()`, `ARRIVED(n)`, `TAKE1/2/4(array, i, o)`: four words from device memory
  into a threadgroup's array of unsigned, if *when*, while the simdgroup goes on; the end of a group of copies; a
  wait of the simdgroup until all groups but the last n are there; consecutive words of the array.

Values change type by casts only, `(float)v` and `(T)v`; sums are float32. A kernel has one output: a second one
costs the host as much as a second kernel.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx

from worker.kernels.text import compact, in_file, needed

PAGE: Final = 32
"""Positions of a page; also the keys of an attention tile."""

MAX_ROWS: Final = 16
"""The most rows of one forward."""

_CUDA_HEADER: Final = r"""
#define GLOBAL(T) const T*
#define OUT(T) T*
#define LOCAL(T) T*
#define SHARED(T, name, n) __shared__ T name[n]
#define LARGE(T, name, n) extern __shared__ __align__(16) T name[]
#define BARRIER() __syncthreads()
#define DEVICE_BARRIER() __syncthreads()
#define XOR(v, m) __shfl_xor_sync(0xffffffffu, (v), (m))
#define AS_FLOAT(u) __uint_as_float(u)
#define FN static __device__ __forceinline__
#define FMA(a, b, c) __fmaf_rn((a), (b), (c))
#define MUL(a, b) __fmul_rn((a), (b))
#define EXP2(x) exp2f(x)
#define EXP(x) expf(x)
#define RSQRT(x) rsqrtf(x)
#define SINCOS(x, s, c) sincosf((x), &(s), &(c));
#define MAX(a, b) fmaxf((a), (b))
#define UNROLL _Pragma("unroll")
#define ROLL _Pragma("unroll 1")
typedef unsigned short ushort;
typedef __nv_bfloat16 bf16;
typedef __half f16;
FN float SUM32(float v) { for (int m = 16; m; m >>= 1) v += XOR(v, m); return v; }
FN float MAX32(float v) { for (int m = 16; m; m >>= 1) v = MAX(v, XOR(v, m)); return v; }
FN void two_f16(unsigned u, float* o) {
  const float2 a = __half22float2(*(const __half2*)&u); o[0] = a.x; o[1] = a.y; }
"""

_METAL_HEADER: Final = r"""
#define GLOBAL(T) const device T*
#define OUT(T) device T*
#define LOCAL(T) thread T*
#define SHARED(T, name, n) threadgroup T name[n]
#define LARGE(T, name, n) threadgroup T name[n]
#define BARRIER() threadgroup_barrier(mem_flags::mem_threadgroup)
#define DEVICE_BARRIER() threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device)
#define XOR(v, m) simd_shuffle_xor((v), (ushort)(m))
#define AS_FLOAT(u) as_type<float>(u)
#define FN static inline
#define FMA(a, b, c) metal::fma((a), (b), (c))
#define MUL(a, b) metal::fma((a), (b), -0.0f)
#define EXP2(x) metal::precise::exp2(x)
#define EXP(x) metal::precise::exp(x)
#define RSQRT(x) metal::precise::rsqrt(x)
#define SINCOS(x, s, c) { s = metal::precise::sin(x); c = metal::precise::cos(x); }
#define MAX(a, b) metal::max((a), (b))
#define UNROLL _Pragma("clang loop unroll(full)")
#define ROLL _Pragma("clang loop unroll(disable)")
#define SUM32(v) simd_sum(v)
#define MAX32(v) simd_max(v)
typedef bfloat16_t bf16;
typedef half f16;
FN void two_f16(unsigned u, LOCAL(float) o) {
  const half2 a = as_type<half2>(u); o[0] = (float)a.x; o[1] = (float)a.y; }
"""

# The words of kernels with a matrix: after the loads.
_MATRIX: Final = r"""
#define PAIR(T, a, b) pair((T)0.0f, (a), (b))
#define UNPAIR(T, u, o) unpair((T)0.0f, (u), (o))
#define PAIR_MUL(T, u, v) pair_mul((T)0.0f, (u), (v))
FN void unpair(bf16, unsigned u, LOCAL(float) o) { two_bf16(u, o); }
FN void unpair(f16, unsigned u, LOCAL(float) o) { two_f16(u, o); }
"""

_CUDA_MATRIX: Final = r"""
FN unsigned pair_mul(bf16, unsigned u, unsigned v) {
  const __nv_bfloat162 p = __hmul2_rn(*(const __nv_bfloat162*)&u, *(const __nv_bfloat162*)&v);
  return *(const unsigned*)&p; }
FN unsigned pair_mul(f16, unsigned u, unsigned v) {
  const __half2 p = __hmul2_rn(*(const __half2*)&u, *(const __half2*)&v);
  return *(const unsigned*)&p; }
#define MMA(T, c, ...) mma((T)0.0f, (c), __VA_ARGS__)
#define MMA_OF(T, name) \
FN void mma(T, float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) { \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 " \
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)); }
MMA_OF(bf16, "bf16")
MMA_OF(f16, "f16")
FN ushort RAW(bf16 v) { return __bfloat16_as_ushort(v); }
FN ushort RAW(f16 v) { return __half_as_ushort(v); }
FN unsigned pair(bf16, float a, float b) {
  const __nv_bfloat162 p = __floats2bfloat162_rn(a, b); return *(const unsigned*)&p; }
FN unsigned pair(f16, float a, float b) {
  const __half2 p = __floats2half2_rn(a, b); return *(const unsigned*)&p; }
#define FROM(u, l) __shfl_sync(0xffffffffu, (u), (l))
#define LOWS(u, v) __byte_perm((u), (v), 0x5410)
#define HIGHS(u, v) __byte_perm((u), (v), 0x7632)
FN unsigned PART(unsigned u, unsigned m, unsigned c) {
  unsigned o; asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(o) : "r"(u), "r"(m), "r"(c)); return o; }
#define COPY16(when, array, i, p) copy16((when), (unsigned)__cvta_generic_to_shared(&(array)[i]), (p))
FN void copy16(bool when, unsigned to, const unsigned* p) {
  asm volatile("{ .reg .pred on; setp.ne.b32 on, %2, 0; @on cp.async.cg.shared.global.L2::128B [%0], [%1], 16; }"
               :: "r"(to), "l"(p), "r"((int)when) : "memory"); }
#define COPIED() asm volatile("cp.async.commit_group;" ::: "memory")
#define ARRIVED(n) { asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory"); __syncwarp(); }
#define TAKE1(array, i, o) { *(o) = (array)[i]; }
#define TAKE2(array, i, o) { const uint2 u = *(const uint2*)&(array)[i]; (o)[0] = u.x; (o)[1] = u.y; }
#define TAKE4(array, i, o) { const uint4 u = *(const uint4*)&(array)[i]; \
  (o)[0] = u.x; (o)[1] = u.y; (o)[2] = u.z; (o)[3] = u.w; }
"""

# MLX writes the signature of a kernel: this is the one place where a word can be added to it.
_CUDA_BOUND: Final = """
#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__({})
"""

# What CUDA has instructions for, spelled out.
_METAL_MATRIX: Final = r"""
#define RAW(v) as_type<ushort>(v)
FN unsigned pair(bf16, float a, float b) { return (unsigned)RAW((bf16)a) | (unsigned)RAW((bf16)b) << 16; }
FN unsigned pair(f16, float a, float b) { return (unsigned)RAW((f16)a) | (unsigned)RAW((f16)b) << 16; }
#define FROM(u, l) simd_shuffle((u), (ushort)(l))
#define LOWS(u, v) (((u) & 0xffffu) | ((v) << 16))
#define HIGHS(u, v) (((u) >> 16) | ((v) & 0xffff0000u))
#define PART(u, m, c) (((u) & (m)) | (c))
#define COPY16(when, array, i, p) \
  if (when) { for (int word = 0; word < 4; word++) (array)[(i) + word] = (p)[word]; }
#define COPIED()
#define ARRIVED(n) simdgroup_barrier(mem_flags::mem_threadgroup)
#define TAKE1(array, i, o) { *(o) = (array)[i]; }
#define TAKE2(array, i, o) { (o)[0] = (array)[i]; (o)[1] = (array)[(i) + 1]; }
#define TAKE4(array, i, o) { TAKE2(array, i, o) TAKE2(array, (i) + 2, (o) + 2) }
#define MMA(T, c, ...) mma((T)0.0f, lane, (c), __VA_ARGS__)
#define MATRIX_OF(T) \
FN unsigned pair_mul(T kind, unsigned u, unsigned v) { \
  float a[2], b[2]; unpair(kind, u, a); unpair(kind, v, b); \
  return (unsigned)as_type<ushort>((T)MUL(a[0], b[0])) | (unsigned)as_type<ushort>((T)MUL(a[1], b[1])) << 16; } \
FN void mma(T kind, int lane, LOCAL(float) c, \
            unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) { \
  for (int k = 0; k < 4; k++) { \
    const int row = (lane & ~3) + k, column = (lane & 3) * 8 + k; \
    float x[4], y[4], p[4], q[4]; \
    unpair(kind, FROM(a0, row), x); unpair(kind, FROM(a2, row), x + 2); \
    unpair(kind, FROM(a1, row), y); unpair(kind, FROM(a3, row), y + 2); \
    unpair(kind, FROM(b0, column), p); unpair(kind, FROM(b1, column), p + 2); \
    unpair(kind, FROM(b0, column + 4), q); unpair(kind, FROM(b1, column + 4), q + 2); \
    for (int i = 0; i < 4; i++) { \
      c[0] = FMA(x[i], p[i], c[0]); c[1] = FMA(x[i], q[i], c[1]); \
      c[2] = FMA(y[i], p[i], c[2]); c[3] = FMA(y[i], q[i], c[3]); } } }
MATRIX_OF(bf16)
MATRIX_OF(f16)
"""

_LOADS: Final = r"""
typedef union { float4 f; uint4 u; float s[4]; ushort h[8]; } QUAD;
FN void two_bf16(unsigned u, LOCAL(float) o) { o[0] = AS_FLOAT(u << 16); o[1] = AS_FLOAT(u & 0xffff0000u); }
FN void load2(GLOBAL(float) p, LOCAL(float) o) { const float2 a = *(GLOBAL(float2))p; o[0] = a.x; o[1] = a.y; }
FN void load4(GLOBAL(float) p, LOCAL(float) o) {
  const float4 a = *(GLOBAL(float4))p; o[0] = a.x; o[1] = a.y; o[2] = a.z; o[3] = a.w; }
FN void load8(GLOBAL(float) p, LOCAL(float) o) { load4(p, o); load4(p + 4, o + 4); }
#define LOADS_OF(T) \
FN void load2(GLOBAL(T) p, LOCAL(float) o) { two_##T(*(GLOBAL(unsigned))p, o); } \
FN void load4(GLOBAL(T) p, LOCAL(float) o) { \
  const uint2 u = *(GLOBAL(uint2))p; two_##T(u.x, o); two_##T(u.y, o + 2); } \
FN void load8(GLOBAL(T) p, LOCAL(float) o) { const uint4 u = *(GLOBAL(uint4))p; \
  two_##T(u.x, o); two_##T(u.y, o + 2); two_##T(u.z, o + 4); two_##T(u.w, o + 6); }
LOADS_OF(bf16)
LOADS_OF(f16)
FN void words1(GLOBAL(unsigned) p, LOCAL(unsigned) o) { o[0] = p[0]; }
FN void words2(GLOBAL(unsigned) p, LOCAL(unsigned) o) {
  const uint2 u = *(GLOBAL(uint2))p; o[0] = u.x; o[1] = u.y; }
FN void words4(GLOBAL(unsigned) p, LOCAL(unsigned) o) {
  const uint4 u = *(GLOBAL(uint4))p; o[0] = u.x; o[1] = u.y; o[2] = u.z; o[3] = u.w; }
"""

# Metal declares a thread attribute only where its name stands in the body, so the prologue is part of the body.
_CUDA_PROLOGUE: Final = (
    "const int tid = threadIdx.x, lane = tid & 31, sg = tid >> 5, "
    "bx = blockIdx.x, by = blockIdx.y, bz = blockIdx.z;\n"
)
_METAL_PROLOGUE: Final = (
    "const int tid = thread_position_in_threadgroup.x, lane = thread_index_in_simdgroup, "
    "sg = simdgroup_index_in_threadgroup, bx = threadgroup_position_in_grid.x, "
    "by = threadgroup_position_in_grid.y, bz = threadgroup_position_in_grid.z;\n"
)
_UNUSED: Final = "(void)tid; (void)lane; (void)sg; (void)bx; (void)by; (void)bz;\n"


@dataclass(frozen=True, slots=True)
class Kernel:
    """A computation in the dialect.

    `defines` are preprocessor words of the body and their values: optional operands, and constants that are no
    integers. MLX copies an operand that is not row-contiguous, so one that is written in place has to be.
    `matrix`: the body uses `MMA` and its neighbours, for which CUDA needs a device of compute capability 8.0.
    `threads`: how many a threadgroup has, if the compiler shall give them no more registers than there are.
    """

    name: str
    inputs: tuple[str, ...]
    output: str
    body: str
    defines: tuple[tuple[str, str], ...] = ()
    matrix: bool = False
    threads: int = 0
    large: int = 0

    @property
    def header(self) -> str:
        """The words of this kernel alone, the same on every target."""
        return "".join(f"#define {word} {value}\n" for word, value in self.defines)

    @property
    def label(self) -> str:
        """The kernel's name with a mark of its text: MLX finds a compiled kernel by its name."""
        return f"{self.name}_{zlib.crc32((self.header + self.body).encode()):08x}"


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel and its operands, for `groups` threadgroups of `threads`; `template`: its ints, bools and types."""

    kernel: Kernel
    arrays: tuple[mx.array, ...]
    template: tuple[tuple[str, Any], ...]
    groups: tuple[int, int, int]
    threads: int
    shape: tuple[int, ...]
    dtype: mx.Dtype

    def run(self, target: str, filling: float | None = None) -> mx.array:
        """The output, as a node of the graph, on *target* ("metal" or "cuda"). filling: what its memory held."""
        for launches in _listening:
            launches.append(self)
        x, y, z = self.groups
        return build(self.kernel, target)(
            inputs=list(self.arrays),
            output_shapes=[self.shape],
            output_dtypes=[self.dtype],
            grid=(x * self.threads, y, z),
            threadgroup=(self.threads, 1, 1),
            template=list(self.template),
            init_value=filling,
        )[0]


_listening: list[list[Launch]] = []


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """The launches that become nodes of a graph while this is open; nothing has to be computed for it."""
    launches: list[Launch] = []
    _listening.append(launches)
    try:
        yield launches
    finally:
        _listening.pop()


def target() -> str | None:
    """The kind of GPU that MLX computes on now, "metal" or "cuda"; None where its default device is the CPU."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return None
    if mx.metal.is_available():
        return "metal"
    return "cuda" if mx.cuda.is_available() else None


def header(kernel: Kernel, *, cuda: bool) -> str:
    """What stands before the body of *kernel*."""
    words = (_CUDA_HEADER if cuda else _METAL_HEADER) + _LOADS
    if kernel.matrix:
        words += _MATRIX + (_CUDA_MATRIX if cuda else _METAL_MATRIX)
    own = (_CUDA_BOUND.format(kernel.threads) if kernel.threads and cuda else "") + kernel.header
    return compact(needed(words, own + kernel.body) + own)


def keep_texts(folder: Path) -> None:
    """Put the texts of kernels that are built from now on into files of *folder*, on CUDA."""
    _texts[:] = [folder]


_texts: list[Path] = []


@cache
def build(kernel: Kernel, kind: str) -> Callable[..., list[mx.array]]:
    """MLX's callable for *kernel* on *kind*; made once."""
    cuda = kind == "cuda"
    make: Any = mx.fast.cuda_kernel if cuda else mx.fast.metal_kernel
    before = header(kernel, cuda=cuda)
    source = compact((_CUDA_PROLOGUE if cuda else _METAL_PROLOGUE) + _UNUSED + kernel.body)
    if cuda and _texts:
        before, source = in_file(before, _texts[-1], "h"), in_file(source, _texts[-1], "cu")
    # MLX lifts a threadgroup's limit of 48 KiB in all only for those that ask for more than 48000 bytes here.
    more: dict[str, Any] = {"shared_memory": max(kernel.large, 48_016)} if cuda and kernel.large else {}
    made = make(
        name=kernel.label,
        input_names=list(kernel.inputs),
        output_names=[kernel.output],
        header=before,
        source=source,
        **more,
    )
    return cast("Callable[..., list[mx.array]]", made)


def chosen(use_kernel: bool | None) -> str | None:
    """The target to launch on, None for the reference. `use_kernel` None means: a kernel where there is a GPU."""
    return None if use_kernel is False else target()


def number(value: float) -> str:
    """*value* as a float32 literal of both languages."""
    return f"{value:.9e}f"
