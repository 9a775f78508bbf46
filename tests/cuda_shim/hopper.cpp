#include "hopper.h"

namespace shim {

static void post_chain(bool* over, unsigned events) {
  post([=] { events ? post_chain(over, events - 1) : void(*over = true); });
}

void linger(Site site, uint32_t calls) {
  if (!is_random() || !one_in(calls)) return pause(site);
  bool over = false;
  post_chain(&over, 1u << random_number() % 13);
  wait_until("its turn, after a long pause", site, [&] { return over; });
}

GenericWrites& generic_writes() { return block_state<GenericWrites>("fence.proxy.async"); }

}  // namespace shim
