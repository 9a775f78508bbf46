// setmaxnreg: a pool of registers per block. At the launch every thread has as many as fit; inc waits until the pool
// has enough.
#pragma once
#include <hopper.h>

#include "common.cuh"

namespace shim {

inline int registers_at_launch() { return 65536 / launch.threads / 8 * 8; }

struct RegisterPool {
  int free = 0;
};

inline void set_max_registers(const char* name, int op, int registers, bool more, Site site) {
  int none = 0;
  linger(site);
  const int change = (registers - registers_at_launch()) * 32;
  if (registers % 8 || registers < 24 || registers > 256) fail(site, "%s %d", name, registers);
  if (more ? change < 0 : change > 0) fail(site, "%s %d, from %d", name, registers, registers_at_launch());
  RegisterPool& pool = block_state<RegisterPool>("setmaxnreg");
  warp_collective(name, op, kFullWarp, none, site, [&](int**) {
    if (!more) pool.free -= change;
  });
  if (!more) return;
  wait_until("free registers", site, [&] { return pool.free >= change; });
  warp_collective(name, op, kFullWarp, none, site, [&](int**) { pool.free -= change; });
}

}  // namespace shim

template <int kRegisters>
inline void setmaxnreg_dec(shim::Site site = shim::Site::here()) {
  shim::set_max_registers("setmaxnreg.dec", 40, kRegisters, false, site);
}
template <int kRegisters>
inline void setmaxnreg_inc(shim::Site site = shim::Site::here()) {
  shim::set_max_registers("setmaxnreg.inc", 41, kRegisters, true, site);
}
