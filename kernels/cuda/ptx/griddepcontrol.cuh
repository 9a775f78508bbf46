// griddepcontrol: programmatic dependent launch, compute capability 9.0 and higher.
//
// A kernel launched with the attribute (`overlaps` of launch_kernel) may start before the previous kernel on the stream
// has finished. Before griddepcontrol_wait it must not touch memory that the previous kernel reads or writes. Without
// the attribute both instructions do nothing.
#pragma once
#include "common.cuh"

// Waits until the previous kernel has finished and its writes are visible.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel on the stream start, once every block has called it or has finished.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
