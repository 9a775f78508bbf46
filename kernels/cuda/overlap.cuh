// Launches that overlap (programmatic dependent launch, compute capability 9.0 and higher): a kernel that is launched
// with `overlaps` (kernels/launch.py) may be started before the one in front of it on the stream is done. What neither
// reads nor writes memory of that one comes before wait_for_previous(). Without the attribute both do nothing.
#pragma once

// Until the kernel before is done and what it wrote can be read; then lets the one after start.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
