// A stand-in for Metal's standard library: enough of it to compile the text that MLX hands to Metal with a C++
// compiler, and to run it. Each thread of a threadgroup is a fiber; threadgroups run one after another.
//
// Stricter than Metal where that finds mistakes: half and bfloat convert by explicit casts only; a barrier or an
// exchange that some threads of the group miss ends the run with a word about it.
#pragma once
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700
#endif
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

// ---- address spaces. `threadgroup` stands before arrays only; a group's memory is one copy, as one group runs at a time.
#define device
#define constant
#define thread
#define threadgroup static __attribute__((aligned(16)))

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;

// ---- vectors
struct alignas(8) uint2 { uint x, y; };
struct alignas(16) uint3 { uint x, y, z; };
struct alignas(16) uint4 { uint x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };

template <class To, class From>
static inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// ---- 16-bit floats, rounded to nearest even
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  explicit bfloat(float f) {
    uint32_t u = as_type<uint32_t>(f);
    bits = (u & 0x7fffffffu) > 0x7f800000u ? (uint16_t)((u >> 16) | 0x40u) : (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  explicit operator float() const { return as_type<float>((uint32_t)bits << 16); }
};
struct half {
  uint16_t bits;
  half() = default;
  explicit half(float f) {
    uint32_t u = as_type<uint32_t>(f), sign = (u >> 16) & 0x8000u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) bits = (uint16_t)(sign | 0x7e00u);
    else if (u >= 0x477ff000u) bits = (uint16_t)(sign | 0x7c00u);
    else if (u < 0x38800000u) bits = (uint16_t)(sign | (uint32_t)nearbyint((double)as_type<float>(u) * 16777216.0));
    else { u -= 0x38000000u; bits = (uint16_t)(sign | ((u + 0xfffu + ((u >> 13) & 1u)) >> 13)); }
  }
  explicit operator float() const {
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, e = (bits >> 10) & 31u, m = bits & 1023u;
    if (e == 31u) return as_type<float>(sign | 0x7f800000u | (m << 13));
    if (e == 0u) { float v = (float)m * 5.9604644775390625e-8f; return sign ? -v : v; }
    return as_type<float>(sign | ((e + 112u) << 23) | (m << 13));
  }
};
struct alignas(4) half2 { half x, y; };
typedef bfloat bfloat16_t;
typedef half float16_t;

// ---- fibers
namespace standin {
enum State { READY, EXCHANGE, AT_BARRIER, DONE };
enum Kind { SUM, MAXIMUM, SHUFFLE, LANE };
struct Fiber { jmp_buf at; ucontext_t first; State state; bool born; char* stack; };
struct Request { Kind kind; uint argument; float value; };
static Fiber fibers[1024];
static Request requests[1024];
static float answers[1024];
static jmp_buf scheduler;
static ucontext_t scheduler_context;
static int current, count;
static uint3 group;
static void (*entry)();

// _setjmp and _longjmp leave the signal mask alone: a switch costs nanoseconds. ucontext only makes the stacks.
static inline void give_way(State state) {
  fibers[current].state = state;
  if (!_setjmp(fibers[current].at)) _longjmp(scheduler, 1);
}
static void life() {
  for (;;) { entry(); give_way(DONE); }
}
static inline void resume(int which) {
  current = which;
  if (_setjmp(scheduler)) return;
  if (fibers[which].born) _longjmp(fibers[which].at, 1);
  fibers[which].born = true;
  swapcontext(&scheduler_context, &fibers[which].first);
}
static inline float exchange(Kind kind, uint argument, float value) {
  requests[current] = {kind, argument, value};
  give_way(EXCHANGE);
  return answers[current];
}
static void prepare(int threads) {
  count = threads;
  for (int i = 0; i < threads; i++) {
    Fiber& fiber = fibers[i];
    if (fiber.stack) continue;
    fiber.stack = (char*)malloc(1 << 18);
    getcontext(&fiber.first);
    fiber.first.uc_stack.ss_sp = fiber.stack;
    fiber.first.uc_stack.ss_size = 1 << 18;
    fiber.first.uc_link = nullptr;
    makecontext(&fiber.first, life, 0);
  }
}
// A library for each instance of a kernel stays loaded: its stacks must not.
static void release() {
  for (Fiber& fiber : fibers) {
    free(fiber.stack);
    fiber.stack = nullptr;
    fiber.born = false;
  }
}
// All 32 lanes ask the same question; the answer is the butterfly's, as on a warp. Only a lane may be each one's own.
static bool answer(int base) {
  const Request asked = requests[base];
  float v[32], n[32];
  for (int l = 0; l < 32; l++) {
    if (requests[base + l].kind != asked.kind) return false;
    if (asked.kind != LANE && requests[base + l].argument != asked.argument) return false;
    v[l] = requests[base + l].value;
  }
  if (asked.kind == LANE) {
    for (int l = 0; l < 32; l++) n[l] = v[requests[base + l].argument & 31u];
    memcpy(v, n, sizeof v);
  } else if (asked.kind == SHUFFLE) { for (int l = 0; l < 32; l++) n[l] = v[l ^ asked.argument]; memcpy(v, n, sizeof v); }
  else for (int m = 16; m; m >>= 1) {
    for (int l = 0; l < 32; l++) n[l] = asked.kind == SUM ? v[l] + v[l ^ m] : fmaxf(v[l], v[l ^ m]);
    memcpy(v, n, sizeof v);
  }
  for (int l = 0; l < 32; l++) { answers[base + l] = v[l]; fibers[base + l].state = READY; }
  return true;
}
static bool all(int from, int to, State state) {
  for (int i = from; i < to; i++) if (fibers[i].state != state) return false;
  return true;
}
// One simdgroup until all of its lanes are at a barrier or done. Backwards runs the lanes from the last to the first.
static int run_simdgroup(int base, bool backwards) {
  for (;;) {
    for (int l = 0; l < 32; l++) {
      const int i = base + (backwards ? 31 - l : l);
      if (fibers[i].state == READY) resume(i);
    }
    if (all(base, base + 32, EXCHANGE)) { if (!answer(base)) return 1; }
    else if (all(base, base + 32, AT_BARRIER) || all(base, base + 32, DONE)) return 0;
    else return 2;
  }
}
// 0, or why the group could not run: 1 lanes asked different things, 2 lanes of a simdgroup parted, 3 barrier missed.
static int run_group(bool backwards) {
  for (int i = 0; i < count; i++) fibers[i].state = READY;
  const int simdgroups = count / 32;
  for (;;) {
    for (int s = 0; s < simdgroups; s++) {
      const int code = run_simdgroup(32 * (backwards ? simdgroups - 1 - s : s), backwards);
      if (code) return code;
    }
    if (all(0, count, DONE)) return 0;
    if (!all(0, count, AT_BARRIER)) return 3;
    for (int i = 0; i < count; i++) fibers[i].state = READY;
  }
}
// An operand that is written in place: every group starts from it as it was before the launch, as if all ran at
// once, and what they write is gathered. Groups may write the same place if they write the same bits.
struct Place { uchar* bytes; uchar* before; uchar* after; size_t size; };
static bool gather(const Place& place) {
  if (!memcmp(place.bytes, place.before, place.size)) return true;
  for (size_t i = 0; i < place.size; i++) if (place.bytes[i] != place.before[i]) {
    if (place.after[i] != place.before[i] && place.after[i] != place.bytes[i]) return false;
    place.after[i] = place.bytes[i];
  }
  memcpy(place.bytes, place.before, place.size);
  return true;
}
static int run_grid(uint x, uint y, uint z, int threads, bool backwards, const Place& place) {
  prepare(threads);
  const uint total = x * y * z;
  int code = 0;
  for (uint i = 0; i < total && !code; i++) {
    const uint g = backwards ? total - 1 - i : i;
    group = {g % x, g / x % y, g / x / y};
    code = run_group(backwards);
    if (!code && !gather(place)) code = 4;
  }
  if (!code) memcpy(place.bytes, place.after, place.size);
  release();
  return code;
}
}  // namespace standin

#define thread_position_in_threadgroup_VALUE (uint3{(uint)standin::current, 0u, 0u})
#define thread_index_in_simdgroup_VALUE ((uint)standin::current & 31u)
#define simdgroup_index_in_threadgroup_VALUE ((uint)standin::current >> 5)
#define threadgroup_position_in_grid_VALUE (standin::group)

// ---- namespace metal
namespace metal {
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
static inline mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((int)a | (int)b); }
static inline void threadgroup_barrier(mem_flags) { standin::give_way(standin::AT_BARRIER); }
static inline void simdgroup_barrier(mem_flags) { standin::exchange(standin::SHUFFLE, 0, 0.0f); }
static inline float simd_sum(float v) { return standin::exchange(standin::SUM, 0, v); }
static inline float simd_max(float v) { return standin::exchange(standin::MAXIMUM, 0, v); }
static inline float simd_shuffle_xor(float v, ushort m) { return standin::exchange(standin::SHUFFLE, m, v); }
static inline uint simd_shuffle(uint v, ushort l) { return as_type<uint>(standin::exchange(standin::LANE, l, as_type<float>(v))); }
static inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline float max(float a, float b) { return fmaxf(a, b); }
namespace precise {
static inline float exp2(float x) { return exp2f(x); }
static inline float exp(float x) { return expf(x); }
static inline float rsqrt(float x) { return 1.0f / sqrtf(x); }
static inline float cos(float x) { return cosf(x); }
static inline float sin(float x) { return sinf(x); }
}  // namespace precise
}  // namespace metal
using namespace metal;
