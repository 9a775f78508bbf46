#include "races.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>

#include <algorithm>

#include "memory.h"

namespace shim {

constexpr int kUnfinished = INT_MAX;  // epoch of a cp.async before its wait_group

// ---- lines

static std::vector<const char*> source_files;
constexpr int kLineBits = 24;

static uint64_t packed(Site site) {
  size_t file = 0;
  while (file < source_files.size() && source_files[file] != site.file) ++file;
  if (file == source_files.size()) source_files.push_back(site.file);
  return file << kLineBits | site.line;
}

// A packed line, or the line of an instruction's address.
static std::string name_of_line(uint64_t where) {
  if (where >> kLineBits < source_files.size()) {
    return name_of(Site{source_files[where >> kLineBits], static_cast<int>(where & ((1 << kLineBits) - 1))});
  }
  Dl_info info = {};
  dladdr(reinterpret_cast<void*>(where), &info);
  const auto offset = static_cast<unsigned long>(where - reinterpret_cast<uint64_t>(info.dli_fbase)) - 1;
  std::string line = format("instruction %lx", offset);
  char text[512];
  if (FILE* const tool = popen(format("addr2line -e %s %lx", info.dli_fname, offset).c_str(), "r")) {
    if (fgets(text, sizeof text, tool) && text[0] != '?') {
      text[strcspn(text, " \n")] = 0;
      const char* const slash = strrchr(text, '/');
      line = slash ? slash + 1 : text;
    }
    pclose(tool);
  }
  return line;
}

// ---- clocks

static int last_epoch;  // of all warps so far

// Latest epochs that are known, by thread of the cluster. Vector extensions: loops may not be vectorised.
typedef int FourClocks __attribute__((vector_size(16), aligned(4)));

static void join(std::vector<int>& clocks, const std::vector<int>& others) {
  if (clocks.empty()) {
    clocks = others;
    return;
  }
  for (size_t i = 0; i < others.size(); i += 4) {
    auto& own = *reinterpret_cast<FourClocks*>(&clocks[i]);
    const auto& other = *reinterpret_cast<const FourClocks*>(&others[i]);
    own = own > other ? own : other;
  }
}

static unsigned id_of(const Thread& thread) { return thread.warp->number * 32 + thread.lane; }

static void next_epoch(Warp& warp) { last_epoch = std::max(last_epoch, ++warp.epoch); }

// Per warp, the oldest of its lanes' known epochs: a quick test for accesses of any lane.
static void note_oldest(Warp& warp) {
  for (size_t i = 0; i < warp.known_of_warps.size(); ++i) {
    warp.known_of_warps[i] = *std::min_element(&warp.known[32 * i], &warp.known[32 * i] + 32);
  }
}

void start_clocks(Block& block) {
  const size_t threads = launch.cluster * launch.threads;
  const int before = last_epoch++;
  for (size_t i = 0; i < block.warps.size(); ++i) {
    Warp& warp = block.warps[i];
    warp.number = block.rank * block.warps.size() + i;
    warp.epoch = last_epoch;
    warp.known.assign(threads, before);
    warp.known_of_warps.assign(threads / 32, before);
  }
  for (Thread* thread : block.threads) thread->learnt.clear();
}

void order_warp(Warp& warp) {
  bool learnt = false;
  for (Thread* lane : warp.lanes) {
    if (lane->learnt.empty()) continue;
    join(warp.known, lane->learnt);
    lane->learnt.clear();
    learnt = true;
  }
  std::fill_n(&warp.known[32 * warp.number], 32, warp.epoch);
  if (learnt) {
    note_oldest(warp);
  } else {
    warp.known_of_warps[warp.number] = warp.epoch;
  }
  next_epoch(warp);
}

void order(const std::vector<Thread*>& participants) {
  static std::vector<int> joined;
  static std::vector<Warp*> warps;
  joined.clear();
  warps.clear();
  for (Thread* thread : participants) {
    Warp& warp = *thread->warp;
    if (!warp.meeting++) {
      warps.push_back(&warp);
      join(joined, warp.known);
    }
    if (!thread->learnt.empty()) join(joined, thread->learnt);
  }
  for (Thread* thread : participants) joined[id_of(*thread)] = thread->warp->epoch;
  const Warp* whole = nullptr;
  for (Warp* warp : warps) {
    unsigned live = 0;
    for (const Thread* lane : warp->lanes) live += !lane->done;
    if (warp->meeting == live) {
      for (Thread* lane : warp->lanes) lane->learnt.clear();
      warp->known = joined;
      if (whole) {
        warp->known_of_warps = whole->known_of_warps;
      } else {
        note_oldest(*warp);
        whole = warp;
      }
      warp->meeting = 0;
    }
  }
  for (Thread* thread : participants) {
    if (thread->warp->meeting) thread->learnt = joined;
  }
  for (Warp* warp : warps) {
    warp->meeting = 0;
    next_epoch(*warp);
  }
}

void release(std::vector<int>& clocks) {
  Warp& warp = *current->warp;
  join(clocks, warp.known);
  if (!current->learnt.empty()) join(clocks, current->learnt);
  clocks[id_of(*current)] = warp.epoch;
  next_epoch(warp);
}

void acquire(const std::vector<int>& clocks) {
  if (!clocks.empty()) join(current->learnt, clocks);
}

static bool is_known(const Thread& thread, const Access& access) {
  const Warp& warp = *thread.warp;
  if (access.epoch <= warp.known_of_warps[access.warp]) return true;
  if (access.epoch == kUnfinished) return false;
  for (uint32_t lanes = access.lanes; lanes; lanes &= lanes - 1) {
    const unsigned id = access.warp * 32 + __builtin_ctz(lanes);
    if (id == id_of(thread) || access.epoch <= warp.known[id]) continue;
    if (thread.learnt.empty() || access.epoch > thread.learnt[id]) return false;
  }
  return true;
}

static bool is_known(uint32_t lanes, const Access& access) {
  if (access.epoch <= current->warp->known_of_warps[access.warp]) return true;
  for (; lanes; lanes &= lanes - 1) {
    if (!is_known(*current->warp->lanes[__builtin_ctz(lanes)], access)) return false;
  }
  return true;
}

// ---- accesses

static bool in_hook;  // the shim's own accesses while it looks at a plain one

[[noreturn]] static void report_race(const Word* word, const Access& access, bool writes, const Access& other,
                                     bool other_writes) {
  const auto lanes_of = [](const Access& each) {
    const unsigned first = each.warp * 32 % launch.threads;
    return each.lanes == ~0u ? format("warp %u", first / 32) : format("thread %u", first + __builtin_ctz(each.lanes));
  };
  const Index b = current->block->index;
  std::string text = format("%s, block (%u, %u, %u), %s: ", name_of_line(access.where).c_str(), b.x, b.y, b.z,
                            lanes_of(access).c_str());
  const unsigned char* const place = current->block->statics + (word - current->block->words) * kWordBytes;
  in_hook = false;
  text += format("race: %s shared address %08x, which %s %s at %s", writes ? "writes" : "reads",
                 shared_address_of(place), lanes_of(other).c_str(), other_writes ? "has written" : "has read",
                 name_of_line(other.where).c_str());
  end_launch(text + (other.epoch == kUnfinished ? " by a cp.async that no wait_group covers yet"
                                                : ", and no barrier orders the two"));
}

static void note_read(Word& word, const Access& access) {
  if (!is_known(access.lanes, word.write)) report_race(&word, access, false, word.write, true);
  if (word.read.epoch == access.epoch && word.read.warp == access.warp && word.read.lanes) {
    word.read.lanes |= access.lanes;
    return;
  }
  // Reads that this one is ordered after need not be kept.
  if (word.more_reads) {
    std::vector<Access>& more = *word.more_reads;
    for (size_t i = 0; i < more.size();) {
      if (more[i].epoch == access.epoch && more[i].warp == access.warp) {
        more[i].lanes |= access.lanes;
        return;
      }
      if (is_known(*current, more[i])) {
        more[i] = more.back();
        more.pop_back();
      } else {
        ++i;
      }
    }
  }
  if (is_known(*current, word.read)) {
    word.read = access;
    return;
  }
  if (!word.more_reads) word.more_reads = new std::vector<Access>;
  word.more_reads->push_back(access);
}

static void note_write(Word& word, const Access& access) {
  if (!is_known(access.lanes, word.write)) report_race(&word, access, true, word.write, true);
  if (!is_known(access.lanes, word.read)) report_race(&word, access, true, word.read, false);
  if (word.more_reads) {
    for (const Access& read : *word.more_reads) {
      if (!is_known(access.lanes, read)) report_race(&word, access, true, read, false);
    }
    word.more_reads->clear();
  }
  word.read = Access();
  word.write = access;
}

// Words of the own block's shared memory; null elsewhere.
static Word* words_at(const void* pointer) {
  const Block& block = *current->block;
  const auto* const byte = static_cast<const unsigned char*>(pointer);
  return byte >= block.statics && byte < block.region ? block.words + (byte - block.statics) / kWordBytes : nullptr;
}

static Access own_access(uint32_t lanes, uint64_t where) {
  Access access;
  access.epoch = current->warp->epoch;
  access.lanes = lanes;
  access.where = where;
  access.warp = current->warp->number;
  return access;
}

void shared_read(const void* pointer, size_t bytes, uint32_t lanes, Site site) {
  Word* const words = words_at(pointer);
  if (!words) return;
  const Access access = own_access(lanes, packed(site));
  for (size_t i = 0; i < bytes / kWordBytes; ++i) note_read(words[i], access);
}

void shared_write(const void* pointer, size_t bytes, uint32_t lanes, Site site) {
  Word* const words = words_at(pointer);
  if (!words) return;
  const Access access = own_access(lanes, packed(site));
  for (size_t i = 0; i < bytes / kWordBytes; ++i) note_write(words[i], access);
}

void check_is_written(const void* pointer, size_t bytes, Site site) {
  Word* const words = words_at(pointer);
  if (!words) return;
  const Access access = own_access(kAllLanes, packed(site));
  for (size_t i = 0; i < bytes / kWordBytes; ++i) {
    if (!is_known(kAllLanes, words[i].write)) report_race(&words[i], access, false, words[i].write, true);
  }
}

void start_copy(const Copy& copy, Site site) {
  Access access = own_access(own_lane(), packed(site));
  access.epoch = kUnfinished;
  for (int i = 0; i < copy.bytes / 4; ++i) note_write(words_at(copy.target)[i], access);
}

void finish_copy(const Thread& thread, const Copy& copy) {
  const size_t offset = static_cast<unsigned char*>(copy.target) - thread.block->statics;
  Word* const words = thread.block->words + offset / kWordBytes;
  for (int i = 0; i < copy.bytes / 4; ++i) words[i].write.epoch = thread.warp->epoch;
}

void abandon_copies(Thread& thread) {
  for (const Copy& copy : thread.copies) finish_copy(thread, copy);
  thread.copies.clear();
  thread.group_ends.clear();
}

}  // namespace shim

// ---- plain C++ accesses, by the names that -fsanitize=thread calls
#ifdef __SANITIZE_THREAD__
namespace shim {

static void note_plain_access(Word* first, size_t start, size_t bytes, bool writes, const void* caller) {
  const Access access = own_access(own_lane(), reinterpret_cast<uint64_t>(caller));
  for (size_t i = 0; i <= (start % kWordBytes + bytes - 1) / kWordBytes; ++i) {
    writes ? note_write(first[i], access) : note_read(first[i], access);
  }
}

SHIM_UNSEEN static void plain_access(const void* pointer, size_t bytes, bool writes, const void* caller) {
  if (!current || current->done || in_hook) return;
  const Block& block = *current->block;
  const auto* const byte = static_cast<const unsigned char*>(pointer);
  if (byte < block.statics || byte >= block.region) return;
  const size_t start = byte - block.statics;
  in_hook = true;
  note_plain_access(block.words + start / kWordBytes, start, bytes, writes, caller);
  in_hook = false;
}

}  // namespace shim

#define SHIM_HOOK(name, bytes, writes)                                                          \
  extern "C" __attribute__((used, visibility("hidden"))) SHIM_UNSEEN void name(const void* p) { \
    shim::plain_access(p, bytes, writes, __builtin_return_address(0));                          \
  }
#define SHIM_HOOKS(bytes)                                 \
  SHIM_HOOK(__tsan_read##bytes, bytes, false)             \
  SHIM_HOOK(__tsan_write##bytes, bytes, true)             \
  SHIM_HOOK(__tsan_unaligned_read##bytes, bytes, false)   \
  SHIM_HOOK(__tsan_unaligned_write##bytes, bytes, true)
SHIM_HOOKS(1)
SHIM_HOOKS(2)
SHIM_HOOKS(4)
SHIM_HOOKS(8)
SHIM_HOOKS(16)
#define SHIM_RANGE_HOOK(name, writes)                                                                         \
  extern "C" __attribute__((used, visibility("hidden"))) SHIM_UNSEEN void name(const void* p, size_t bytes) { \
    if (bytes) shim::plain_access(p, bytes, writes, __builtin_return_address(0));                             \
  }
SHIM_RANGE_HOOK(__tsan_read_range, false)
SHIM_RANGE_HOOK(__tsan_write_range, true)
extern "C" __attribute__((used, visibility("hidden"))) void __tsan_init() {}
extern "C" __attribute__((used, visibility("hidden"))) void __tsan_vptr_update(void*, void*) {}
extern "C" __attribute__((used, visibility("hidden"))) void __tsan_vptr_read(void*) {}
extern "C" __attribute__((used, visibility("hidden"))) void __tsan_func_entry(void*) {}
extern "C" __attribute__((used, visibility("hidden"))) void __tsan_func_exit() {}
// Of the guards of static variables.
extern "C" __attribute__((used, visibility("hidden"))) SHIM_UNSEEN char __tsan_atomic8_load(const char* p, int) {
  return *p;
}
#endif
