// Shared and global memory of a launch: exact sizes, poison before the first write, checks in every wrapper.
//
// Shared addresses are 32 bits wide, as on a GPU, so that kernels may do arithmetic on them:
//   0x000400  dynamic shared memory        0x080000  `__shared__` variables
//   bits 24 and up: 0 for the own block, else 1 + rank of another block of the cluster
//
// Dynamic shared memory has exactly the bytes of the launch and ends at an unmapped page. It is filled with 0x7fff
// before each block: NaN as fp16, bf16 and fp32, far out of range as an int.
#pragma once
#include "races.h"

namespace shim {

constexpr uint32_t kDynamicBase = 0x400, kStaticBase = 0x80000, kRankShift = 24;
constexpr size_t kDynamicMost = 256 << 10;
constexpr uint16_t kPoison = 0x7fff;

SHIM_UNSEEN void poison(unsigned char* start, const unsigned char* end);

// Of a block that starts, and of one that has ended.
void make_arena(Block& block);
void poison_shared_memory(Block& block);
void check_canaries(const Block& block);

// `__shared__ T name[...]` in a kernel: the same memory for all threads of a block.
void* static_memory(const char* name, int line, size_t bytes);
template <typename T>
T& static_shared(const char* name, int line) {
  return *static_cast<T*>(static_memory(name, line, sizeof(T)));
}

// `extern __shared__ T name[]`.
template <typename T>
struct DynamicShared {
  operator T*() const { return reinterpret_cast<T*>(current->block->dynamic); }
};

uint32_t shared_address_of(const void* pointer);

// Host pointer for `bytes` bytes at a shared address, aligned to `alignment`.
unsigned char* shared_pointer(uint32_t address, uint32_t bytes, uint32_t alignment, Site site);

// A global access through a wrapper: inside a tensor, aligned, and if another kernel may be writing it, after
// griddepcontrol.wait.
void check_global(const void* pointer, uint32_t bytes, Site site);

// Memory for a tensor that ends (to 16 bytes) at an unmapped page, with another one before it.
void* allocate_guarded(size_t bytes);
void free_guarded(void* pointer, size_t bytes);

}  // namespace shim
