// Rows from global to shared memory without registers, and from there into fragments. After mma.cuh.
#pragma once

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory if `index` is not negative: a predicate, where an if would become a branch.
// It goes past L1. A line of 128 bytes should stay one in shared memory, with its 16-byte pieces in any order: torn in two
// it takes two requests, and where the halves of its 32-byte sectors part, each sector is fetched twice.
__device__ __forceinline__ void copy_async(u32 target, const void* source, int index) {
  asm volatile("{.reg .pred p; setp.ge.s32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}" ::"r"(target),
               "l"(source), "r"(index));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8 x 8 matrices, transposed; lanes 8i to 8i + 7 give the rows of matrix i, register i holds it as a B fragment.
__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ __forceinline__ uint4 load_shared(u32 address) {
  uint4 words;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(address));
  return words;
}

__device__ __forceinline__ u32 load_shared_word(u32 address) {
  u32 word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address));
  return word;
}

// kCount ints, a power of two, from an address aligned to as many (16 bytes at most).
template <int kCount>
__device__ __forceinline__ void load_shared(int (&words)[kCount], u32 address) {
  if constexpr (kCount >= 4) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const uint4 four = load_shared(address + sizeof(int) * i);
      words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) words[i] = load_shared_word(address + sizeof(int) * i);
  }
}
