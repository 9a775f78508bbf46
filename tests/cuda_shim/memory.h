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
constexpr size_t kDynamicMost = 256 << 10, kStaticMost = 64 << 10, kCanaryBytes = 64;
constexpr uint16_t kPoison = 0x7fff;

SHIM_UNSEEN inline void poison(unsigned char* start, const unsigned char* end) {
  for (; start < end; start += 2) memcpy(start, &kPoison, 2);
}
SHIM_UNSEEN inline bool is_poison(const unsigned char* start, const unsigned char* end) {
  for (; start < end; ++start) {
    if (*start != reinterpret_cast<const unsigned char*>(&kPoison)[reinterpret_cast<uintptr_t>(start) % 2]) return false;
  }
  return true;
}

inline void make_arena(Block& block) {
  if (block.region) return;
  const size_t page = sysconf(_SC_PAGESIZE);
  void* const memory = mmap(nullptr, kStaticMost + kDynamicMost + page, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  block.statics = static_cast<unsigned char*>(memory);
  block.region = block.statics + kStaticMost + kDynamicMost;
  mprotect(block.region, page, PROT_NONE);
  block.words = static_cast<Word*>(mmap(nullptr, (kStaticMost + kDynamicMost) / kWordBytes * sizeof(Word),
                                        PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
}

inline size_t rounded_to_16(size_t bytes) { return (bytes + 15) / 16 * 16; }

inline void poison_shared_memory(Block& block) {
  if (launch.shared_bytes > kDynamicMost) end_launch(format("%u bytes of dynamic shared memory", launch.shared_bytes));
  block.dynamic = block.region - rounded_to_16(launch.shared_bytes);
  poison(block.dynamic - kCanaryBytes, block.region);
  poison(block.statics, block.statics + kStaticMost);
  block.variables.clear();
  start_clocks(block);
}

inline void check_canaries(const Block& block) {
  const char* what = nullptr;
  if (!is_poison(block.dynamic - kCanaryBytes, block.dynamic)) what = "before dynamic shared memory";
  if (!is_poison(block.dynamic + launch.shared_bytes, block.region)) what = "past dynamic shared memory";
  size_t end = kCanaryBytes;
  for (const Static& variable : block.variables) {
    if (!is_poison(block.statics + end - kCanaryBytes, block.statics + variable.offset)) what = variable.name;
    end = variable.offset + rounded_to_16(variable.bytes) + kCanaryBytes;
  }
  if (!is_poison(block.statics + end - kCanaryBytes, block.statics + end)) what = "past the last __shared__ variable";
  if (what) {
    const Index b = block.index;
    end_launch(format("block (%u, %u, %u): written outside of shared memory, near %s", b.x, b.y, b.z, what));
  }
}

// `__shared__ T name[...]` in a kernel: the same memory for all threads of a block.
template <typename T>
T& static_shared(const char* name, int line) {
  Block& block = *current->block;
  for (const Static& variable : block.variables) {
    if (variable.line == line && !strcmp(variable.name, name)) return *reinterpret_cast<T*>(block.statics + variable.offset);
  }
  size_t offset = kCanaryBytes;
  if (!block.variables.empty()) {
    offset = block.variables.back().offset + rounded_to_16(block.variables.back().bytes) + kCanaryBytes;
  }
  if (offset + sizeof(T) + kCanaryBytes > kStaticMost) fail(Site{name, line}, "too much static shared memory");
  block.variables.push_back({name, line, offset, sizeof(T)});
  return *reinterpret_cast<T*>(block.statics + offset);
}

// `extern __shared__ T name[]`.
template <typename T>
struct DynamicShared {
  operator T*() const { return reinterpret_cast<T*>(current->block->dynamic); }
};

inline uint32_t shared_address_of(const void* pointer) {
  const Block& block = *current->block;
  const auto* byte = static_cast<const unsigned char*>(pointer);
  if (byte >= block.dynamic && byte <= block.region) return kDynamicBase + (byte - block.dynamic);
  if (byte >= block.statics && byte < block.statics + kStaticMost) return kStaticBase + (byte - block.statics);
  fail(current->site, "__cvta_generic_to_shared of a pointer that is not to shared memory");
}

// Host pointer for `bytes` bytes at a shared address, aligned to `alignment`.
inline unsigned char* shared_pointer(uint32_t address, uint32_t bytes, uint32_t alignment, Site site) {
  const Block* block = current->block;
  if (const uint32_t rank = address >> kRankShift) {
    if (rank > launch.cluster) fail(site, "shared address %08x of a block outside of the cluster", address);
    block = &blocks[block->first + rank - 1];
  }
  const uint32_t local = address & ((1u << kRankShift) - 1);
  if (local % alignment) fail(site, "shared address %08x is not aligned to %u bytes", address, alignment);
  if (local >= kDynamicBase && local + bytes <= kDynamicBase + launch.shared_bytes) {
    return block->dynamic + (local - kDynamicBase);
  }
  for (const Static& variable : block->variables) {
    const uint32_t start = kStaticBase + variable.offset;
    if (local >= start && local + bytes <= start + variable.bytes) return block->statics + (local - kStaticBase);
  }
  fail(site, "%u bytes at shared address %08x are out of bounds; dynamic shared memory is %08x to %08x", bytes, address,
       kDynamicBase, kDynamicBase + launch.shared_bytes);
}

// 16-byte loads of a warp are done for eight lanes at a time, which should find their words in different banks: how many
// of them wait for another one. The lanes' n-th loads belong together.
inline void count_bank_conflicts(const Warp& warp) {
  for (int first = 0; first < 32; first += 8) {
    for (size_t n = 0; n < warp.lanes[first]->shared_loads.size(); ++n) {
      for (int lane = first; lane < first + 8; ++lane) {
        if (n >= warp.lanes[lane]->shared_loads.size()) continue;
        const uint32_t address = warp.lanes[lane]->shared_loads[n];
        for (int other = first; other < lane; ++other) {
          if (n >= warp.lanes[other]->shared_loads.size()) continue;
          const uint32_t before = warp.lanes[other]->shared_loads[n];
          if (address != before && address / 16 % 8 == before / 16 % 8) {
            ++bank_conflicts;
            break;
          }
        }
      }
    }
  }
}

// A global access through a wrapper: inside a tensor, aligned, and if another kernel may be writing it, after
// griddepcontrol.wait.
inline void check_global(const void* pointer, uint32_t bytes, Site site) {
  const auto address = reinterpret_cast<uint64_t>(pointer);
  if (address % bytes) fail(site, "global address %p is not aligned to %u bytes", pointer, bytes);
  for (uint32_t i = 0; i < launch.num_ranges; ++i) {
    const Range& range = launch.ranges[i];
    if (address < range.start || address + bytes > range.start + range.bytes) continue;
    if (launch.overlaps && range.dependent && !current->waited_for_grid) {
      fail(site, "tensor %u is used before griddepcontrol.wait", i);
    }
    return;
  }
  fail(site, "%u bytes at global address %p are in no tensor of the launch", bytes, pointer);
}

// Memory for a tensor that ends (to 16 bytes) at an unmapped page, with another one before it.
inline void* allocate_guarded(size_t bytes) {
  const size_t page = sysconf(_SC_PAGESIZE);
  const size_t body = (rounded_to_16(bytes) + page - 1) / page * page;
  auto* const memory = static_cast<unsigned char*>(
      mmap(nullptr, body + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (body) mprotect(memory + page, body, PROT_READ | PROT_WRITE);
  return memory + page + body - rounded_to_16(bytes);
}
inline void free_guarded(void* pointer, size_t bytes) {
  const size_t page = sysconf(_SC_PAGESIZE);
  const size_t body = (rounded_to_16(bytes) + page - 1) / page * page;
  munmap(static_cast<unsigned char*>(pointer) + rounded_to_16(bytes) - body - page, body + 2 * page);
}

}  // namespace shim
