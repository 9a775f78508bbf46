// Races in shared memory: a happens-before check by vector clocks, as in FastTrack.
//
// Every 4-byte word of shared memory keeps its last write and the reads since, each with its lanes, its line and the
// epoch of its warp. An access must be ordered after the last write, and a write also after those reads, by program
// order or by an operation that orders memory in the PTX model:
//   __syncwarp                                the lanes of the warp
//   __syncthreads, bar.sync, barrier.cluster  the threads that meet
//   mbarrier                                  arrive before the try_wait that sees its phase complete
// mma, ldmatrix, stmatrix, wgmma, setmaxnreg, shuffles and votes are meetings of the lanes here, but order no memory.
// atom on global memory orders nothing here either; no kernel passes shared memory on by it.
//
// Accesses that are checked, by the wrappers of ptx/:
//   ld.shared  a read by the lane
//   ldmatrix   a read by all lanes of the warp: the load is collective, and a row goes to lanes other than the one that
//              gives its address
//   stmatrix   a write by all lanes, for the same reason
//   cp.async   a write by the lane, ordered before nothing until its wait_group, then before what that orders
//   wgmma      A in shared memory: a read by the first warp that issues; ptx/wgmma.cuh checks that A does not change
// Plain C++ accesses are checked in kernels compiled with -fsanitize=thread, by the calls that GCC inserts; they count
// as whole words, so two lanes may not write halves of one word. cp.async.bulk and global memory are not checked.
//
// Epochs count the synchronisations of a warp. They go on from block to block: accesses of earlier blocks are older
// than every epoch that a new warp knows, so the words need no clearing.
#pragma once
#include "scheduler.h"

#ifdef __SANITIZE_THREAD__
#define SHIM_UNSEEN __attribute__((no_sanitize_thread))
#else
#define SHIM_UNSEEN
#endif

namespace shim {

constexpr size_t kWordBytes = 4;

struct Access {
  int epoch;
  uint32_t lanes;  // of the warp; 0: none
  uint64_t where : 48, warp : 16;
};

struct Word {
  Access write, read;
  std::vector<Access>* more_reads;
};

// ---- clocks

void start_clocks(Block& block);
// All lanes of a warp know each other's accesses so far.
void order_warp(Warp& warp);
// The threads know each other's accesses so far.
void order(const std::vector<Thread*>& participants);
// The running thread leaves what it knows for those that acquire `clocks`.
void release(std::vector<int>& clocks);
void acquire(const std::vector<int>& clocks);

// ---- accesses

inline uint32_t own_lane() { return 1u << current->lane; }
constexpr uint32_t kAllLanes = ~0u;

void shared_read(const void* pointer, size_t bytes, uint32_t lanes, Site site);
void shared_write(const void* pointer, size_t bytes, uint32_t lanes, Site site);

// A read by all lanes of which nothing is remembered.
void check_is_written(const void* pointer, size_t bytes, Site site);

// A cp.async of 16 bytes: from its issue on, and at its wait_group.
void start_copy(const Copy& copy, Site site);
void finish_copy(const Thread& thread, const Copy& copy);

// Of a thread that returns or fails without a wait_group.
void abandon_copies(Thread& thread);

}  // namespace shim
