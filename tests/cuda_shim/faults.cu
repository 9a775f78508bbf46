// A kernel with one fault of each kind that a launch on the CPU must find. Two warps; each thread copies 16 bytes of
// `input` [blocks][64] x 16 B and writes what its neighbour copied to `output`.
#include "common.cuh"
#include "ptx/atom.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ld_shared.cuh"

enum Fault {
  kNone,
  kNoWait,               // reads before its copy is complete
  kNoBarrier,            // reads before its neighbour's copy is complete
  kPendingGroup,         // waits for all groups but the last, which it reads
  kShuffle,              // a shuffle, which orders no memory, in place of the barrier
  kOverwrites,           // copies to what its neighbour has read, after a shuffle
  kPlainOverwrites,      // the same without wrappers
  kSharedBounds,         // a load past dynamic shared memory
  kSharedAlignment,      // a load that is not on 16 bytes
  kSharedStore,          // a plain store past dynamic shared memory
  kStaticStore,          // a plain store past a __shared__ array
  kLocalBounds,          // a store past an array in registers
  kGlobalBounds,         // a copy from past the end of `input`
  kGlobalLoad,           // a plain load from past the end of `input`
  kWritesInput,
  kKeepsSemaphore,       // a semaphore that is not 0 in the end
  kHalfWarp,             // half a warp returns, half meets
  kTwoCollectives,       // lanes of a warp in different collectives
  kDeadlock,             // a warp at __syncthreads, half of the other one in __syncwarp
  kBeforePreviousGrid,   // `input` is read before griddepcontrol.wait
  kIgnoresPreviousGrid,  // no griddepcontrol.wait at all
  kEndless,
};

struct Params {
  const uint4* input;  // [blocks][64]
  uint4* output;       // [blocks][64]
  int* semaphore;
  int fault;
};

__global__ void faults(const __grid_constant__ Params p) {
  const uint4* const input = p.input;
  uint4* const output = p.output;
  const int fault = p.fault;
  extern __shared__ __align__(128) uint4 smem[];
  __shared__ u32 smem_words[64];
  const int lane = threadIdx.x % kWarpSize;
  if (fault != kBeforePreviousGrid && fault != kIgnoresPreviousGrid) griddepcontrol_wait();
  const uint4* source = input + blockIdx.x * blockDim.x + threadIdx.x;
  if (fault == kGlobalBounds) source += gridDim.x * blockDim.x;
  cp_async<16>(shared_address(smem + threadIdx.x), source, fault == kIgnoresPreviousGrid ? -1 : 0);
  cp_async_commit_group();
  if (fault == kPendingGroup) {
    cp_async_wait_group<1>();
  } else if (fault != kNoWait) {
    cp_async_wait_group<0>();
  }
  *(smem_words + threadIdx.x + (fault == kStaticStore)) = threadIdx.x;
  if (fault == kLocalBounds) {
    int local[2] = {};
    local[threadIdx.x] = 1;
    output[0].x = local[0];
  }
  if (fault == kShuffle) {
    __shfl_sync(kFullWarp, lane, 0);
  } else if (fault != kNoBarrier) {
    __syncthreads();
  }

  u32 neighbour = shared_address(smem + (threadIdx.x ^ 1));
  if (fault == kSharedBounds) neighbour += blockDim.x * sizeof(uint4);
  if (fault == kSharedAlignment) neighbour += 8;
  output[blockIdx.x * blockDim.x + threadIdx.x] = ld_shared_v4_b32(neighbour);
  if (fault == kOverwrites) {
    __shfl_sync(kFullWarp, lane, 0);
    cp_async<16>(shared_address(smem + threadIdx.x), source, 0);
    cp_async_commit_group();
    cp_async_wait_group<0>();
  }
  if (fault == kPlainOverwrites) {
    const u32 word = __shfl_sync(kFullWarp, smem_words[threadIdx.x ^ 1], lane);
    smem_words[threadIdx.x] = word;
  }

  if (fault == kSharedStore) smem[blockDim.x + threadIdx.x].x = 0;
  if (fault == kGlobalLoad) output[0] = input[gridDim.x * blockDim.x + threadIdx.x];
  if (fault == kWritesInput) const_cast<uint4*>(input)[0].x = smem_words[1];
  if (lane == 0) atom_inc_acq_rel_gpu(p.semaphore, 2 * gridDim.x - (fault != kKeepsSemaphore));
  while (fault == kEndless) smem_words[lane] += 1;
  if (fault == kHalfWarp) {
    if (lane < kWarpSize / 2) return;
    __syncwarp();
  }
  if (fault == kTwoCollectives) {
    if (lane < kWarpSize / 2) {
      __syncwarp();
    } else {
      __shfl_sync(kFullWarp, lane, 0);
    }
  }
  if (fault == kDeadlock) {
    if (threadIdx.x >= kWarpSize || lane < kWarpSize / 2) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  }
}
