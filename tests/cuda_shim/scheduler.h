// Scheduler: every CUDA thread of the resident blocks is a fiber of one host thread.
//
// A fiber runs until it waits: in a warp collective (32 lanes), at a Barrier over any set of threads, or in wait_until
// for a condition. The next fiber is the first in line, or a random one (Order::kRandom). If no fiber can run, the oldest
// pending event happens; without an event the launch ends with a list of the waiting threads and their lines (deadlock).
//
// To add an instruction: a function in ptx/ that takes a `Site site = Site::here()` as its last argument, so that errors
// name the line of the kernel, and is built from
//   warp_collective(op, operands, all)  32 lanes leave their operands, the last computes for all
//   meet(barrier, size, what, site)     any number of threads: __syncthreads, bar.sync, warpgroups, clusters
//   wait_until(what, site, condition)   mbarriers; the condition is tested again after other fibers have run
//   post(event)                         copies and wgmma that complete later: at a random moment, or when all wait
//   fail(site, ...)                     ends the launch, with a message
#pragma once
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <string>
#include <vector>

namespace shim {

// A line of a kernel.
struct Site {
  const char* file = "";
  int line = 0;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

enum Order { kForward, kBackward, kRandom };
enum Completion { kLate, kEarly, kAnyTime };  // of asynchronous copies: when waited for, when issued, or in between

// A tensor of the launch. `dependent`: the kernel in front on the stream may have written it.
struct Range {
  uint64_t start, bytes;
  uint32_t dependent, unused;
};

struct Launch {
  uint32_t grid[3];
  uint32_t threads;        // of a block
  uint32_t shared_bytes;   // dynamic shared memory of a block
  uint32_t order;          // Order of blocks; kRandom also shuffles the threads and lets them pause anywhere
  uint32_t completion;     // Completion
  uint32_t resident;       // blocks that run at once, a multiple of `cluster`
  uint32_t cluster;        // blocks of a cluster, neighbours in x
  uint32_t overlaps;       // whether it is launched with programmatic stream serialization
  uint32_t num_ranges;
  uint32_t params_bytes;
  uint32_t cpu_seconds;    // limit of the launch
  uint32_t unused;
  uint64_t seed;
  const Range* ranges;
  const char* params;
};

struct Block;

struct Warp {
  int epoch = 0;                    // races.h
  unsigned number = 0, meeting = 0;
  std::vector<int> known, known_of_warps;
  int arrived = 0;
  int op = 0;
  Site site;
  void* operands[32];
  struct Thread* lanes[32];
};

struct Copy {
  void* target;
  const void* source;
  int bytes;  // 4, 8 or 16
  bool done;
};

struct Thread {
  jmp_buf context;
  bool started = false;  // the fiber has its stack
  ucontext_t entry;
  Block* block = nullptr;
  Warp* warp = nullptr;
  Index index;
  int lane = 0;
  bool done = true;
  bool waited_for_grid = false;  // griddepcontrol.wait
  const char* waits_for = nullptr;
  Site site;
  std::vector<int> learnt;  // epochs that its warp does not know (races.h)
  bool (*condition)(void*) = nullptr;
  void* condition_data = nullptr;
  std::vector<Copy> copies;            // cp.async, oldest first, up to their wait_group
  std::vector<size_t> group_ends;      // of the committed groups among them
  std::vector<uint32_t> shared_loads;  // addresses of its 16-byte loads, for bank conflicts
};

// A set of threads that meet. Every arrival gives its size, since threads of the block may have returned.
struct Barrier {
  std::vector<Thread*> waiting;
  unsigned size = 0;
};

struct Static {
  const char* name;
  int line;
  size_t offset, bytes;
};

struct Block {
  Index index;
  unsigned rank = 0;     // in its cluster
  unsigned first = 0;    // slot of the cluster's first block among the resident ones
  unsigned live = 0;     // threads that have not returned
  bool waited_for_grid = false;
  std::vector<Warp> warps;
  std::vector<Thread*> threads;
  std::vector<Barrier> barriers;  // 0 is __syncthreads, as for bar.sync
  unsigned char* region = nullptr;    // all of the arena's memory, up to the guard page
  unsigned char* dynamic = nullptr;   // dynamic shared memory
  unsigned char* statics = nullptr;   // memory of `__shared__` variables
  std::vector<Static> variables;
  struct Word* words = nullptr;  // of `statics` and on (races.h)
};

inline Launch launch;
inline Index grid_size;
inline Thread* current = nullptr;
inline std::vector<Block> blocks;  // the resident ones
inline std::vector<Barrier> cluster_barriers;  // by the cluster's first block, Block::first
inline std::vector<Thread*> threads, polling;
inline std::deque<Thread*> ready;
inline std::vector<std::function<void()>> events;
inline unsigned unfinished;
inline jmp_buf main_context;
inline sigjmp_buf fault_context;
inline std::string message;
inline uint64_t random_state;
inline uint64_t bank_conflicts;  // of the 16-byte loads of the launch

inline uint32_t random_number() {  // xorshift64*
  random_state ^= random_state >> 12;
  random_state ^= random_state << 25;
  random_state ^= random_state >> 27;
  return static_cast<uint32_t>(random_state * 0x2545f4914f6cdd1dull >> 32);
}
inline bool one_in(uint32_t n) { return random_number() % n == 0; }
inline bool is_random() { return launch.order == kRandom; }

inline std::string format(const char* text, ...) {
  char line[512];
  va_list arguments;
  va_start(arguments, text);
  vsnprintf(line, sizeof line, text, arguments);
  va_end(arguments);
  return line;
}

inline std::string name_of(const Thread* thread) {
  const Index b = thread->block->index;
  return format("block (%u, %u, %u), thread %u", b.x, b.y, b.z, thread->index.x);
}
inline const char* base_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}
inline std::string name_of(Site site) { return format("%s:%d", base_name(site.file), site.line); }

[[noreturn]] inline void end_launch(const std::string& text) {
  message = text;
  _longjmp(main_context, 1);
}

template <typename... Arguments>
[[noreturn]] void fail(Site site, const char* text, Arguments... arguments) {
  end_launch(name_of(site) + ", " + name_of(current) + ": " + format(text, arguments...));
}

[[noreturn]] inline void report_deadlock() {
  std::vector<std::pair<std::string, unsigned>> groups;
  for (const Thread* thread : threads) {
    const Index b = thread->block->index;
    const std::string what = thread->done ? "have returned" : format("wait at %s for %s", name_of(thread->site).c_str(), thread->waits_for);
    const std::string text = format("block (%u, %u, %u): ", b.x, b.y, b.z) + "%u threads " + what;
    bool found = false;
    for (auto& group : groups) {
      if (group.first == text) ++group.second, found = true;
    }
    if (!found) groups.push_back({text, 1});
  }
  std::string text = "deadlock";
  for (auto& group : groups) text += "\n  " + format(group.first.c_str(), group.second);
  end_launch(text);
}

// ---- the next fiber

inline void fiber_main();

inline Thread* take_ready() {
  if (is_random()) std::swap(ready.front(), ready[random_number() % ready.size()]);
  Thread* const next = ready.front();
  ready.pop_front();
  return next;
}

inline void look_at_conditions() {
  for (size_t i = 0; i < polling.size();) {
    if (polling[i]->condition(polling[i]->condition_data)) {
      ready.push_back(polling[i]);
      polling.erase(polling.begin() + i);
    } else {
      ++i;
    }
  }
}

inline void happen(size_t place) {
  const std::function<void()> event = events[place];
  events.erase(events.begin() + place);
  event();
}

// The fiber to run; ends the launch if all fibers wait.
inline Thread* next_fiber() {
  if (is_random()) {
    if (!events.empty() && one_in(8)) happen(random_number() % events.size());
    if (!polling.empty() && one_in(4)) look_at_conditions();
  }
  while (ready.empty()) {
    look_at_conditions();
    if (!ready.empty()) break;
    if (events.empty()) report_deadlock();
    happen(is_random() ? random_number() % events.size() : 0);
  }
  return take_ready();
}

// Switches by longjmp, which unlike swapcontext makes no system call; only the first entry needs a context.
[[noreturn]] inline void run_fiber(Thread* next) {
  current = next;
  if (next->started) _longjmp(next->context, 1);
  next->started = true;
  makecontext(&next->entry, fiber_main, 0);
  setcontext(&next->entry);
  abort();
}

inline void switch_away() {
  Thread* const self = current;
  Thread* const next = next_fiber();
  if (next == self) return;
  if (_setjmp(self->context) == 0) run_fiber(next);
}

inline void wait(const char* what, Site site) {
  current->waits_for = what;
  current->site = site;
  switch_away();
}

// A point at which other threads may run first, in random order.
inline void pause(Site site) {
  if (!is_random() || !one_in(8)) return;
  ready.push_back(current);
  wait("its turn", site);
}

// ---- waiting

inline void order(const std::vector<Thread*>& participants);
inline void abandon_copies(Thread& thread);

inline void meet(Barrier& barrier, unsigned size, const char* what, Site site) {
  barrier.size = size;
  barrier.waiting.push_back(current);
  if (barrier.waiting.size() < size) {
    wait(what, site);
    return;
  }
  order(barrier.waiting);
  barrier.waiting.pop_back();
  for (Thread* thread : barrier.waiting) ready.push_back(thread);
  barrier.waiting.clear();
  pause(site);
}

inline void wait_until(const char* what, Site site, bool (*condition)(void*), void* data) {
  pause(site);
  if (condition(data)) return;
  current->condition = condition;
  current->condition_data = data;
  polling.push_back(current);
  wait(what, site);
}
template <typename Condition>
void wait_until(const char* what, Site site, Condition condition) {
  wait_until(what, site, [](void* data) { return (*static_cast<Condition*>(data))(); }, &condition);
}

inline void post(std::function<void()> event) { events.push_back(std::move(event)); }

// Every lane brings `operands`; the last one runs `all` on the table of the 32.
template <typename Operands, typename All>
void warp_collective(const char* op, int op_number, uint32_t mask, Operands& operands, Site site, All all) {
  if (mask != 0xffffffffu) fail(site, "%s with mask %08x; only whole warps are supported", op, mask);
  Warp& warp = *current->warp;
  if (warp.arrived && warp.op != op_number) {
    fail(site, "%s, but other lanes of the warp are in another collective, at %s", op, name_of(warp.site).c_str());
  }
  warp.op = op_number;
  warp.site = site;
  warp.operands[current->lane] = &operands;
  if (++warp.arrived < 32) {
    wait(op, site);
    return;
  }
  warp.arrived = 0;
  Operands* table[32];
  for (int lane = 0; lane < 32; ++lane) table[lane] = static_cast<Operands*>(warp.operands[lane]);
  all(table);
  for (int lane = 0; lane < 32; ++lane) {
    if (lane != current->lane) ready.push_back(warp.lanes[lane]);
  }
  pause(site);
}

// ---- one launch

inline void (*kernel_body)(const char* params);

inline void thread_returns() {
  Block& block = *current->block;
  current->done = true;
  abandon_copies(*current);
  --block.live;
  --unfinished;
  if (current->warp->arrived) {
    fail(current->site, "returned while other lanes of its warp are in a collective at %s",
         name_of(current->warp->site).c_str());
  }
  // __syncthreads is for the threads that are left.
  Barrier& all = block.barriers[0];
  if (!all.waiting.empty() && all.waiting.size() == block.live) {
    order(all.waiting);
    for (Thread* thread : all.waiting) ready.push_back(thread);
    all.waiting.clear();
  }
}

// A fiber outlives its thread: it is used for the next block.
inline void fiber_main() {
  for (;;) {
    kernel_body(launch.params);
    thread_returns();
    if (_setjmp(current->context) == 0) {
      if (!unfinished) _longjmp(main_context, 2);
      run_fiber(next_fiber());
    }
  }
}

constexpr size_t kStackBytes = 192 << 10;

inline void make_fibers(size_t count) {
  while (threads.size() < count) {
    Thread* const thread = new Thread;
    void* const stack =
        mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    getcontext(&thread->entry);
    thread->entry.uc_stack = {};
    thread->entry.uc_stack.ss_sp = stack;
    thread->entry.uc_stack.ss_size = kStackBytes;
    thread->entry.uc_link = nullptr;
    threads.push_back(thread);
  }
}

// After an error the fibers are somewhere in the kernel: they start anew.
inline void reset_fibers() {
  for (Thread* thread : threads) {
    thread->started = false;
    thread->done = true;
    abandon_copies(*thread);
  }
  ready.clear();
  polling.clear();
  events.clear();
}

}  // namespace shim
