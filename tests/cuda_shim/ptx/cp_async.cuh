// cp.async: a copy is done at the wait_group that covers it (kLate), at once (kEarly), or at any time between.
#pragma once
#include "common.cuh"

namespace shim {

SHIM_UNSEEN inline void complete(Copy& copy) {
  if (!copy.done) memcpy(copy.target, copy.source, copy.bytes);
  copy.done = true;
}

// The thread's oldest `count` copies, which are waited for.
inline void complete_copies(Thread& thread, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    complete(thread.copies[i]);
    finish_copy(thread, thread.copies[i]);
  }
  thread.copies.erase(thread.copies.begin(), thread.copies.begin() + count);
}

inline void issue_copy(void* target, const void* source, int bytes, Site site) {
  Copy copy{target, source, bytes, false};
  start_copy(copy, site);
  const bool now = launch.completion == kEarly || (launch.completion == kAnyTime && one_in(3));
  if (now) complete(copy);
  current->copies.push_back(copy);
}

}  // namespace shim

template <int kBytes>
inline void cp_async(u32 target, const void* source, int index, shim::Site site = shim::Site::here()) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "sizes of cp.async");
  shim::pause(site);
  if (index < 0) return;
  shim::check_global(source, kBytes, site);
  shim::issue_copy(shim::shared_pointer(target, kBytes, kBytes, site), source, kBytes, site);
}

template <int kBytes>
inline void cp_async_or_zero(u32 target, const void* source, int index, int skip,
                             shim::Site site = shim::Site::here()) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "sizes of cp.async");
  static const char zeros[kBytes] = {};
  shim::pause(site);
  if (skip < 0) return;
  if (index >= 0) shim::check_global(source, kBytes, site);
  shim::issue_copy(shim::shared_pointer(target, kBytes, kBytes, site), index < 0 ? zeros : source, kBytes, site);
}

inline void cp_async_commit_group() {
  shim::Thread& thread = *shim::current;
  if (shim::launch.completion == shim::kAnyTime) {  // some of those in flight arrive, in any order
    for (shim::Copy& copy : thread.copies) {
      if (!copy.done && shim::one_in(4)) shim::complete(copy);
    }
  }
  thread.group_ends.push_back(thread.copies.size());
}

template <int kPending>
inline void cp_async_wait_group(shim::Site site = shim::Site::here()) {
  shim::pause(site);
  shim::Thread& thread = *shim::current;
  if (thread.group_ends.size() <= kPending) return;
  const size_t groups = thread.group_ends.size() - kPending, copies = thread.group_ends[groups - 1];
  shim::complete_copies(thread, copies);
  thread.group_ends.erase(thread.group_ends.begin(), thread.group_ends.begin() + groups);
  for (size_t& end : thread.group_ends) end -= copies;
}
