#include "scheduler.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>

#include "races.h"

namespace shim {

Launch launch;
Index grid_size;
Thread* current;
std::vector<Block> blocks;
std::vector<Barrier> cluster_barriers;
std::vector<Thread*> threads;
static std::vector<Thread*> polling;  // those in wait_until
std::deque<Thread*> ready;
std::vector<std::function<void()>> events;
unsigned unfinished;
jmp_buf main_context;
std::string message;
uint64_t random_state;
void (*kernel_body)(const char* params);

// ---- messages

std::string format(const char* text, ...) {
  char line[512];
  va_list arguments;
  va_start(arguments, text);
  vsnprintf(line, sizeof line, text, arguments);
  va_end(arguments);
  return line;
}

std::string name_of(const Thread* thread) {
  const Index b = thread->block->index;
  return format("block (%u, %u, %u), thread %u", b.x, b.y, b.z, thread->index.x);
}

static const char* base_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}
std::string name_of(Site site) { return format("%s:%d", base_name(site.file), site.line); }

void end_launch(const std::string& text) {
  message = text;
  _longjmp(main_context, 1);
}

void fail(Site site, const char* text, ...) {
  char line[512];
  va_list arguments;
  va_start(arguments, text);
  vsnprintf(line, sizeof line, text, arguments);
  va_end(arguments);
  end_launch(name_of(site) + ", " + name_of(current) + ": " + line);
}

[[noreturn]] static void report_deadlock() {
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

static Thread* take_ready() {
  if (is_random()) std::swap(ready.front(), ready[random_number() % ready.size()]);
  Thread* const next = ready.front();
  ready.pop_front();
  return next;
}

static void look_at_conditions() {
  for (size_t i = 0; i < polling.size();) {
    if (polling[i]->condition(polling[i]->condition_data)) {
      ready.push_back(polling[i]);
      polling.erase(polling.begin() + i);
    } else {
      ++i;
    }
  }
}

static void happen(size_t place) {
  const std::function<void()> event = events[place];
  events.erase(events.begin() + place);
  event();
}

Thread* next_fiber() {
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

static void fiber_main();

// Switches by longjmp, which unlike swapcontext makes no system call; only the first entry needs a context.
void run_fiber(Thread* next) {
  current = next;
  if (next->started) _longjmp(next->context, 1);
  next->started = true;
  makecontext(&next->entry, fiber_main, 0);
  setcontext(&next->entry);
  abort();
}

static void switch_away() {
  Thread* const self = current;
  Thread* const next = next_fiber();
  if (next == self) return;
  if (_setjmp(self->context) == 0) run_fiber(next);
}

static void wait(const char* what, Site site) {
  current->waits_for = what;
  current->site = site;
  switch_away();
}

void take_turns(Site site) {
  if (!one_in(8)) return;
  ready.push_back(current);
  wait("its turn", site);
}

// ---- waiting

void meet(Barrier& barrier, unsigned size, const char* what, Site site) {
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

void wait_until(const char* what, Site site, bool (*condition)(void*), void* data) {
  pause(site);
  if (condition(data)) return;
  current->condition = condition;
  current->condition_data = data;
  polling.push_back(current);
  wait(what, site);
}

void post(std::function<void()> event) { events.push_back(std::move(event)); }

bool arrive_at_collective(const char* op, int op_number, uint32_t mask, void* operands, Site site) {
  if (mask != 0xffffffffu) fail(site, "%s with mask %08x; only whole warps are supported", op, mask);
  Warp& warp = *current->warp;
  if (warp.arrived && warp.op != op_number) {
    fail(site, "%s, but other lanes of the warp are in another collective, at %s", op, name_of(warp.site).c_str());
  }
  warp.op = op_number;
  warp.site = site;
  warp.operands[current->lane] = operands;
  if (++warp.arrived < 32) {
    wait(op, site);
    return false;
  }
  warp.arrived = 0;
  return true;
}

void leave_collective(Site site) {
  for (Thread* lane : current->warp->lanes) {
    if (lane != current) ready.push_back(lane);
  }
  pause(site);
}

// ---- one launch

static void thread_returns() {
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
static void fiber_main() {
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

void make_fibers(size_t count) {
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

void reset_fibers() {
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
