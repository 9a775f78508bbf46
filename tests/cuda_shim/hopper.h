// Parts that several Hopper instructions of ptx/ are made of.
#pragma once
#include "memory.h"

namespace shim {

// State of an instruction that belongs to a block, beside its shared memory: new for each block that starts.
template <typename State>
SHIM_UNSEEN State& block_state(const char* name) {
  static std::deque<State> states;
  struct Handle {
    uint32_t magic, index;
  };
  constexpr uint32_t kMagic = 0x57a7e000;
  Handle& handle = static_shared<Handle>(name, 0);  // poisoned when a block starts
  if (handle.magic != kMagic) {
    states.emplace_back();
    handle = {kMagic, static_cast<uint32_t>(states.size() - 1)};
  }
  return states[handle.index];
}

inline void post_chain(bool* over, unsigned events) {
  post([=] { events ? post_chain(over, events - 1) : void(*over = true); });
}

// A pause; one in `calls` is so long that other warps run as far ahead as barriers let them.
inline void linger(Site site, uint32_t calls = 512) {
  if (!is_random() || !one_in(calls)) return pause(site);
  bool over = false;
  post_chain(&over, 1u << random_number() % 13);
  wait_until("its turn, after a long pause", site, [&] { return over; });
}

}  // namespace shim
