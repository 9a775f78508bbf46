#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

namespace shim {

constexpr size_t kStaticMost = 64 << 10, kCanaryBytes = 64;

static size_t rounded_to_16(size_t bytes) { return (bytes + 15) / 16 * 16; }

SHIM_UNSEEN void poison(unsigned char* start, const unsigned char* end) {
  for (; start < end; start += 2) memcpy(start, &kPoison, 2);
}

SHIM_UNSEEN static bool is_poison(const unsigned char* start, const unsigned char* end) {
  for (; start < end; ++start) {
    if (*start != reinterpret_cast<const unsigned char*>(&kPoison)[reinterpret_cast<uintptr_t>(start) % 2]) return false;
  }
  return true;
}

void make_arena(Block& block) {
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

void poison_shared_memory(Block& block) {
  if (launch.shared_bytes > kDynamicMost) end_launch(format("%u bytes of dynamic shared memory", launch.shared_bytes));
  block.dynamic = block.region - rounded_to_16(launch.shared_bytes);
  poison(block.dynamic - kCanaryBytes, block.region);
  poison(block.statics, block.statics + kStaticMost);
  block.variables.clear();
  start_clocks(block);
}

void check_canaries(const Block& block) {
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

void* static_memory(const char* name, int line, size_t bytes) {
  Block& block = *current->block;
  for (const Static& variable : block.variables) {
    if (variable.line == line && !strcmp(variable.name, name)) return block.statics + variable.offset;
  }
  size_t offset = kCanaryBytes;
  if (!block.variables.empty()) {
    offset = block.variables.back().offset + rounded_to_16(block.variables.back().bytes) + kCanaryBytes;
  }
  if (offset + bytes + kCanaryBytes > kStaticMost) fail(Site{name, line}, "too much static shared memory");
  block.variables.push_back({name, line, offset, bytes});
  return block.statics + offset;
}

uint32_t shared_address_of(const void* pointer) {
  const Block& block = *current->block;
  const auto* byte = static_cast<const unsigned char*>(pointer);
  if (byte >= block.dynamic && byte <= block.region) return kDynamicBase + (byte - block.dynamic);
  if (byte >= block.statics && byte < block.statics + kStaticMost) return kStaticBase + (byte - block.statics);
  fail(current->site, "__cvta_generic_to_shared of a pointer that is not to shared memory");
}

unsigned char* shared_pointer(uint32_t address, uint32_t bytes, uint32_t alignment, Site site) {
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

void check_global(const void* pointer, uint32_t bytes, Site site) {
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

void* allocate_guarded(size_t bytes) {
  const size_t page = sysconf(_SC_PAGESIZE);
  const size_t body = (rounded_to_16(bytes) + page - 1) / page * page;
  auto* const memory = static_cast<unsigned char*>(
      mmap(nullptr, body + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (body) mprotect(memory + page, body, PROT_READ | PROT_WRITE);
  return memory + page + body - rounded_to_16(bytes);
}

void free_guarded(void* pointer, size_t bytes) {
  const size_t page = sysconf(_SC_PAGESIZE);
  const size_t body = (rounded_to_16(bytes) + page - 1) / page * page;
  munmap(static_cast<unsigned char*>(pointer) + rounded_to_16(bytes) - body - page, body + 2 * page);
}

}  // namespace shim
