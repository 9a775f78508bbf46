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
//
// What kernels need is declared in the headers, which are precompiled. The functions are in the files *.cpp, compiled
// once for all kernels.
#pragma once
#include <setjmp.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

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

struct SharedLoad {
  uint32_t address, bytes;
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
  std::vector<SharedLoad> shared_loads;  // for bank conflicts
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

extern Launch launch;
extern Index grid_size;
extern Thread* current;
extern std::vector<Block> blocks;              // the resident ones
extern std::vector<Barrier> cluster_barriers;  // by the cluster's first block, Block::first
extern std::vector<Thread*> threads;
extern std::deque<Thread*> ready;
extern std::vector<std::function<void()>> events;
extern unsigned unfinished;
extern jmp_buf main_context;
extern std::string message;
extern uint64_t random_state;
extern void (*kernel_body)(const char* params);

inline uint32_t random_number() {  // xorshift64*
  random_state ^= random_state >> 12;
  random_state ^= random_state << 25;
  random_state ^= random_state >> 27;
  return static_cast<uint32_t>(random_state * 0x2545f4914f6cdd1dull >> 32);
}
inline bool one_in(uint32_t n) { return random_number() % n == 0; }
inline bool is_random() { return launch.order == kRandom; }

std::string format(const char* text, ...);
std::string name_of(const Thread* thread);
std::string name_of(Site site);

[[noreturn]] void end_launch(const std::string& text);
[[noreturn]] void fail(Site site, const char* text, ...);

// ---- the next fiber

// The fiber to run; ends the launch if all fibers wait.
Thread* next_fiber();
[[noreturn]] void run_fiber(Thread* next);

// A point at which other threads may run first, in random order.
void take_turns(Site site);
inline void pause(Site site) {
  if (is_random()) take_turns(site);
}

// ---- waiting

void meet(Barrier& barrier, unsigned size, const char* what, Site site);

void wait_until(const char* what, Site site, bool (*condition)(void*), void* data);
template <typename Condition>
void wait_until(const char* what, Site site, Condition condition) {
  wait_until(what, site, [](void* data) { return (*static_cast<Condition*>(data))(); }, &condition);
}

void post(std::function<void()> event);

// A lane arrives with its operands: true for the last one, which computes for all, and then lets them go.
bool arrive_at_collective(const char* op, int op_number, uint32_t mask, void* operands, Site site);
void leave_collective(Site site);

// Every lane brings `operands`; the last one runs `all` on the table of the 32.
template <typename Operands, typename All>
void warp_collective(const char* op, int op_number, uint32_t mask, Operands& operands, Site site, All all) {
  if (!arrive_at_collective(op, op_number, mask, &operands, site)) return;
  all(reinterpret_cast<Operands**>(current->warp->operands));
  leave_collective(site);
}

// ---- one launch

void make_fibers(size_t count);
// After an error the fibers are somewhere in the kernel: they start anew.
void reset_fibers();

}  // namespace shim
