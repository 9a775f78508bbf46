// Builtins of CUDA C++ that the kernels use: qualifiers, thread indices, vector types, barriers, shuffles, arithmetic.
#pragma once
#include <math.h>

#include <type_traits>

#include "memory.h"

#define __global__ static
#define __device__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __CUDA_ARCH__ 900

#define threadIdx (shim::current->index)
#define blockIdx (shim::current->block->index)
#define gridDim (shim::grid_size)
#define blockDim (shim::Index{shim::launch.threads, 1, 1})

struct __align__(8) int2 { int x, y; };
struct __align__(8) uint2 { unsigned x, y; };
struct __align__(16) int4 { int x, y, z, w; };
struct __align__(16) uint4 { unsigned x, y, z, w; };
struct __align__(8) float2 { float x, y; };
struct __align__(16) float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }

template <typename To, typename From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline float __int_as_float(int x) { return bit_cast<float>(x); }
inline int __float_as_int(float x) { return bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return bit_cast<unsigned>(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(1ull * a * b >> 32); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __log2f(float x) { return log2f(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline long long clock64() {
  static long long cycles = 0;
  return ++cycles;
}

template <typename T>
inline T __ldg(const T* pointer, shim::Site site = shim::Site::here()) {
  shim::check_global(pointer, sizeof(T), site);
  return *pointer;
}

inline size_t __cvta_generic_to_shared(const void* pointer) { return shim::shared_address_of(pointer); }

inline void __syncthreads(shim::Site site = shim::Site::here()) {
  shim::Block& block = *shim::current->block;
  shim::meet(block.barriers[0], block.live, "__syncthreads", site);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, shim::Site site = shim::Site::here()) {
  int none = 0;
  shim::warp_collective("__syncwarp", 1, mask, none, site, [](int**) { shim::order_warp(*shim::current->warp); });
}

// Each lane brings a value and the lane to read from.
template <typename T>
inline T shuffle(const char* name, int op, unsigned mask, T value, int source, shim::Site site) {
  struct Operands {
    T value, result;
    int source;
  } own{value, value, source};
  shim::warp_collective(name, op, mask, own, site, [](Operands** lanes) {
    for (int lane = 0; lane < 32; ++lane) lanes[lane]->result = lanes[lanes[lane]->source & 31]->value;
  });
  return own.result;
}
template <typename T>
inline T __shfl_sync(unsigned mask, T value, int source, shim::Site site = shim::Site::here()) {
  return shuffle("__shfl_sync", 2, mask, value, source, site);
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int distance, shim::Site site = shim::Site::here()) {
  return shuffle("__shfl_xor_sync", 3, mask, value, shim::current->lane ^ distance, site);
}
inline int __any_sync(unsigned mask, int predicate, shim::Site site = shim::Site::here()) {
  struct Operands {
    int predicate, result;
  } own{predicate, 0};
  shim::warp_collective("__any_sync", 4, mask, own, site, [](Operands** lanes) {
    int any = 0;
    for (int lane = 0; lane < 32; ++lane) any |= lanes[lane]->predicate != 0;
    for (int lane = 0; lane < 32; ++lane) lanes[lane]->result = any;
  });
  return own.result;
}
