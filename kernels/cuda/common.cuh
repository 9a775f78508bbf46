// Types and constants of all kernels. No CUDA header: NVRTC has none.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int kArch = __CUDA_ARCH__;  // architecture that is compiled for: 900 is sm_90

constexpr int kWarpSize = 32;
constexpr u32 kFullWarp = 0xffffffffu;  // mask of all lanes, for warp collectives
constexpr float kLog2e = 1.44269504088896f, kLn2 = 0.693147180559945f;

// Extents of mma.m16n8k16 (ptx/mma.cuh).
constexpr int kTileM = 16;  // rows of A and C: queries of a row window
constexpr int kTileN = 8;   // columns of B and C: keys of a TCB in SDDMM, output dimensions in SpMM
constexpr int kTileK = 16;  // columns of A, rows of B: dimensions in SDDMM, keys in SpMM

// Element types in memory and on tensor cores. Inputs: kFloat is float32 in three TF32 terms, kTF32 is float32 in one
// (tf32.cuh). Outputs are kHalf, kBFloat16 or kFloat.
enum class Element { kHalf, kBFloat16, kFloat, kTF32 };
template <Element kElement>
constexpr bool kIsWide = kElement == Element::kFloat || kElement == Element::kTF32;
template <Element kElement>
constexpr int kElement_bytes = kIsWide<kElement> ? 4 : 2;

// Sizes of an instance, read by the host (kernels/runtime/jit.py); 0: it has none. A source defines, for a kernel f,
//   template <parameters of f> __device__ KernelSizes f_sizes = {...};
struct KernelSizes {
  int shared_bytes;    // dynamic shared memory of a block
  int partial_floats;  // floats of a partial result
  int blocks_per_sm;   // resident blocks per SM, as in the launch bounds
  int block_items;     // work units per block: items, heads, columns or rows; the unit depends on the kernel
};

__device__ constexpr int divide_up(int x, int y) { return (x + y - 1) / y; }

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }

// 32-bit address in the shared state space, as PTX instructions take it.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// One word of the lower (upper) half-words of two words, `first` in the lower half.
__device__ __forceinline__ u32 low_halves(u32 first, u32 second) { return __byte_perm(first, second, 0x5410); }
__device__ __forceinline__ u32 high_halves(u32 first, u32 second) { return __byte_perm(first, second, 0x7632); }
