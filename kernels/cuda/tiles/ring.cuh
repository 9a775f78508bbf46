// The ring of a warp: stages of gathered rows, filled by cp.async, and records of the KV tiles that they belong to.
//
// KV tile i lies in stage i % kStages, and its record in record i % kRecords. A producer (gather.cuh, pair_gather.cuh)
// copies KV tile i to its stage and the record of KV tile i + kStages in one cp.async group; groups complete in order.
// A work item is copied to records 0 and 1 as a whole.
//
//   iteration i    wait       group i is complete, group i + 1 in flight
//                  ...        reads stage i % 2 and record i % 4
//                  advance    group i + 2: rows to stage i % 2, whose keys are in record (i + 2) % 4;
//                             the record of KV tile i + 4 to record i % 4
//
// Rules, and what breaks otherwise
//   [R1] A producer commits a group also where it copies nothing: wait counts groups, and would leave the needed one in
//        flight.
//   [R2] wait, then __syncwarp, then the first read: a lane waits only for its own copies.
//   [R3] __syncwarp between the last read of a stage or record and the copies to it: other lanes may still read.
//   [R4] A KV tile fills 96 of the 128 bytes of a record: the last 32 of record 0 hold the fields of the work item, to
//        the end of the kernel.
#pragma once
#include "common.cuh"
#include "tiles/forward_params.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ld_shared.cuh"

template <u32 kStage_bytes>
struct Ring {
  static_assert(kStages == 2, "the other stage and the other record are found by - and ^");

  const u32 stages, records;  // the first ones
  u32 stage, record;          // buffers of the KV tile of this iteration

  // `records` is aligned to kRecords * kRecord_bytes.
  __device__ __forceinline__ Ring(const void* stages, const void* records)
      : stages(shared_address(stages)), records(shared_address(records)) {}

  __device__ __forceinline__ u32 stage_of(int i) const { return stages + i * kStage_bytes; }
  __device__ __forceinline__ u32 record_of(int i) const { return records + i * kRecord_bytes; }

  // One cp.async group.
  __device__ __forceinline__ void copy_item(const WorkItem* item, int lane) const {
    cp_async<kChunk_bytes>(records + kChunk_bytes * lane, reinterpret_cast<const char*>(item) + kChunk_bytes * lane,
                           lane < static_cast<int>(sizeof(WorkItem)) / kChunk_bytes ? 0 : -1);
    cp_async_commit_group();
  }
  __device__ __forceinline__ void wait_for_item() const {
    cp_async_wait_group<0>();
    __syncwarp();  // [R2]
  }
  // Fields of the work item: begin, count, window, num_keys; split, first_split, num_splits. [R4]
  __device__ __forceinline__ uint4 range() const { return ld_shared_v4_b32(records + kRange); }
  __device__ __forceinline__ uint4 split() const { return ld_shared_v4_b32(records + kSplit); }
  __device__ __forceinline__ int window() const { return ld_shared_b32(records + kRange + 2 * sizeof(int)); }

  __device__ __forceinline__ void start() { record = records, stage = stages; }
  __device__ __forceinline__ void wait() const {
    cp_async_wait_group<kStages - 1>();
    __syncwarp();  // [R2]
  }
  // Ends iteration i: KV tile i + kStages takes the place of KV tile i.
  template <typename Gather>
  __device__ __forceinline__ void advance(Gather& gather, int i) {
    __syncwarp();  // [R3]
    gather(i + kStages, record ^ kStages * kRecord_bytes, stage);
    stage = 2 * stages + kStage_bytes - stage;
    record = next_record();
  }
  // The record of the next iteration's KV tile. Its copy is complete in this iteration.
  __device__ __forceinline__ u32 next_record() const {
    constexpr u32 kMask = kRecords * kRecord_bytes - 1;
    return (record & ~kMask) | ((record + kRecord_bytes) & kMask);
  }
};
