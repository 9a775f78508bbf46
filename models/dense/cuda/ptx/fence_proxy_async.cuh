#pragma once
#include "common.cuh"

// Orders this thread's writes to shared memory (generic proxy) before accesses by wgmma and bulk copies (async proxy)
// that threads issue after the next barrier with this one.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
