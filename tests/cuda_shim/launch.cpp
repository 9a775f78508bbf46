#include "launch.h"

#include <signal.h>
#include <sys/time.h>

#include <algorithm>
#include <utility>

namespace shim {

static sigjmp_buf fault_context;

static void on_fault(int signal, siginfo_t* info, void*) {
  if (signal == SIGVTALRM) {
    message = format("not done after %u seconds, in ", launch.cpu_seconds);
  } else {
    const char* const what = signal == SIGFPE   ? "integer division by 0"
                             : signal == SIGILL ? "index out of an array's bounds"  // -fsanitize=bounds traps
                                                : "memory fault";
    message = format("%s at %p in ", what, info->si_addr);
  }
  message += name_of(current) + (current->waits_for ? ", after " + name_of(current->site) : "");
  siglongjmp(fault_context, 1);
}

// Faults, and the time limit, become messages while a launch runs.
struct FaultHandler {
  static constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGVTALRM};
  static constexpr int kCount = sizeof kSignals / sizeof *kSignals;
  struct sigaction old[kCount];
  stack_t old_stack;
  FaultHandler() {
    static char memory[64 << 10];
    stack_t stack = {};
    stack.ss_sp = memory;
    stack.ss_size = sizeof memory;
    sigaltstack(&stack, &old_stack);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < kCount; ++i) sigaction(kSignals[i], &action, &old[i]);
    set_timer(launch.cpu_seconds);
  }
  ~FaultHandler() {
    set_timer(0);
    for (int i = 0; i < kCount; ++i) sigaction(kSignals[i], &old[i], nullptr);
    sigaltstack(&old_stack, nullptr);
  }
  static void set_timer(long seconds) {
    itimerval timer = {};
    timer.it_value.tv_sec = seconds;
    setitimer(ITIMER_VIRTUAL, &timer, nullptr);
  }
};

static Index index_of(unsigned linear) {
  return {linear % launch.grid[0], linear / launch.grid[0] % launch.grid[1], linear / launch.grid[0] / launch.grid[1]};
}

static void start_block(unsigned slot, unsigned linear) {
  Block& block = blocks[slot];
  make_arena(block);
  block.index = index_of(linear);
  block.rank = slot % launch.cluster;
  block.first = slot - block.rank;
  block.live = launch.threads;
  block.waited_for_grid = false;
  block.warps.assign(launch.threads / 32, Warp());
  block.barriers.assign(16, Barrier());
  block.threads.assign(threads.begin() + slot * launch.threads, threads.begin() + (slot + 1) * launch.threads);
  poison_shared_memory(block);
  for (unsigned i = 0; i < launch.threads; ++i) {
    Thread& thread = *block.threads[i];
    thread.block = &block;
    thread.warp = &block.warps[i / 32];
    thread.warp->lanes[i % 32] = &thread;
    thread.index = {i, 0, 0};
    thread.lane = i % 32;
    thread.done = thread.waited_for_grid = false;
    thread.waits_for = nullptr;
    thread.shared_loads.clear();
    ready.push_back(&thread);
  }
}

// Runs the started blocks to their end; false after an error.
static bool run_resident() {
  if (sigsetjmp(fault_context, 1)) return false;
  const int reason = _setjmp(main_context);
  if (reason == 0) run_fiber(next_fiber());
  return reason == 2;
}

static uint64_t bank_conflicts, word_conflicts;  // of the loads of 8 and 16 bytes, and of 4 bytes, of the launch

// Loads of a warp are done 128 bytes at a time: eight lanes of 16 bytes, sixteen of 8, all of 4, which should find their
// words in different banks: how many of them wait for another one. The lanes' n-th loads belong together.
static void count_bank_conflicts(const Warp& warp) {
  const auto load_of = [&](int lane, size_t n) {
    const auto& loads = warp.lanes[lane]->shared_loads;
    return n < loads.size() ? &loads[n] : nullptr;
  };
  for (size_t n = 0; n < warp.lanes[0]->shared_loads.size(); ++n) {
    const uint32_t bytes = warp.lanes[0]->shared_loads[n].bytes;
    for (unsigned lane = 0; lane < 32; ++lane) {
      const SharedLoad* const own = load_of(lane, n);
      for (unsigned other = lane / (128 / bytes) * (128 / bytes); own && other < lane; ++other) {
        const SharedLoad* const before = load_of(other, n);
        if (before && own->address != before->address && own->address / bytes % (128 / bytes) ==
                                                             before->address / bytes % (128 / bytes)) {
          ++(bytes == 4 ? word_conflicts : bank_conflicts);
          break;
        }
      }
    }
  }
}

static void check_block(const Block& block) {
  check_canaries(block);
  for (const Warp& warp : block.warps) count_bank_conflicts(warp);
  if (launch.overlaps && !block.waited_for_grid) end_launch("no thread of a block executed griddepcontrol.wait");
  for (const Barrier& barrier : block.barriers) {
    if (!barrier.waiting.empty()) end_launch("a block ended while threads waited at a barrier");
  }
}

static bool run_launch() {
  const unsigned total = launch.grid[0] * launch.grid[1] * launch.grid[2], clusters = total / launch.cluster;
  std::vector<unsigned> order(clusters);
  for (unsigned i = 0; i < clusters; ++i) order[i] = launch.order == kBackward ? clusters - 1 - i : i;
  if (launch.order == kRandom) {
    for (unsigned i = clusters; i > 1; --i) std::swap(order[i - 1], order[random_number() % i]);
  }
  const unsigned at_once = launch.resident / launch.cluster;
  if (blocks.size() < launch.resident) blocks.resize(launch.resident);
  cluster_barriers.assign(launch.resident, Barrier());
  make_fibers(launch.resident * launch.threads);
  for (unsigned next = 0; next < clusters; next += at_once) {
    const unsigned running = std::min(at_once, clusters - next) * launch.cluster;
    unfinished = running * launch.threads;
    for (unsigned slot = 0; slot < running; ++slot) {
      start_block(slot, order[next + slot / launch.cluster] * launch.cluster + slot % launch.cluster);
    }
    if (!run_resident()) return false;
    if (_setjmp(main_context)) return false;
    for (unsigned slot = 0; slot < running; ++slot) check_block(blocks[slot]);
    if (!events.empty()) end_launch("a block ended while copies were in flight");
  }
  return true;
}

const char* run(const Launch& given, size_t params_bytes, void (*body)(const char*)) {
  launch = given;
  grid_size = {launch.grid[0], launch.grid[1], launch.grid[2]};
  random_state = launch.seed * 2 + 1;
  kernel_body = body;
  message.clear();
  bank_conflicts = word_conflicts = 0;
  reset_fibers();
  if (launch.params_bytes != params_bytes) {
    message = format("struct Params: %u bytes given, the kernel takes %zu", launch.params_bytes, params_bytes);
    return message.c_str();
  }
  if (launch.threads % 32 || !launch.cluster || launch.grid[0] % launch.cluster || launch.resident % launch.cluster) {
    message = "bad launch configuration";
    return message.c_str();
  }
  const FaultHandler handler;
  if (run_launch()) return nullptr;
  for (Thread* thread : threads) thread->started = false;
  return message.c_str();
}

}  // namespace shim

#define SHIM_FOR_PYTHON extern "C" __attribute__((visibility("default")))
SHIM_FOR_PYTHON uint64_t shim_bank_conflicts() { return shim::bank_conflicts; }
SHIM_FOR_PYTHON uint64_t shim_word_conflicts() { return shim::word_conflicts; }
SHIM_FOR_PYTHON void* shim_allocate(size_t bytes) { return shim::allocate_guarded(bytes); }
SHIM_FOR_PYTHON void shim_free(void* pointer, size_t bytes) { shim::free_guarded(pointer, bytes); }
