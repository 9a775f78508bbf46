// Thread-block clusters: the blocks of a cluster run at once.
#pragma once
#include <hopper.h>

#include "common.cuh"

inline int cluster_ctarank() { return shim::current->block->rank; }

// All threads of the cluster take part; one that has returned is missed.
inline void barrier_cluster_sync(shim::Site site = shim::Site::here()) {
  shim::linger(site);
  shim::meet(shim::cluster_barriers[shim::current->block->first], shim::launch.cluster * shim::launch.threads,
             "barrier.cluster", site);
}
