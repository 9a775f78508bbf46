// Rows of a matrix in another order, with zeros behind them.
//
//   out[i] = {rows[places[i]], 0, ..}
//
// torch.index_select has one block for each row of 16 bytes or more, whatever its length: 706 us for 1.2 million rows of
// 32 bytes on an H200, whose bytes take 20.
//
// A row is read and written in chunks of kBytes: 16, or less where sizes or addresses are no multiples of 16.
// Neighbouring threads have neighbouring chunks of `out`. Grid (blocks of block_rows rows); a thread issues the loads of
// kBatch chunks before the first store. Indices inside a block fit 32 bits, places in a tensor need 64.
#include "chunk.cuh"
#include "common.cuh"
#include "ptx/griddepcontrol.cuh"

constexpr int kThreads = 256;
constexpr int kBatch = 4;

struct Params {
  u8* out;            // [num_rows][out_chunks * kBytes]
  const u8* rows;     // rows of row_chunks * kBytes bytes, row_stride apart
  const void* places; // [num_rows]  int, or i64 if kLong
  i64 row_stride;     // bytes
  i64 num_rows;
  u32 row_chunks;
  u32 out_chunks;     // row_chunks or more
  u32 block_rows;
};

template <int kBytes, bool kLong>
__global__ void __launch_bounds__(kThreads) gather_rows(const __grid_constant__ Params p) {
  using Piece = Chunk<kBytes>;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const i64 first_row = static_cast<i64>(blockIdx.x) * p.block_rows, left = p.num_rows - first_row;
  const u32 num_chunks = (left < p.block_rows ? static_cast<u32>(left) : p.block_rows) * p.out_chunks;
  Piece* const out = reinterpret_cast<Piece*>(p.out) + first_row * p.out_chunks;
  for (u32 start = threadIdx.x; start < num_chunks; start += kThreads * kBatch) {
    // The places of the whole batch before its first row: their latencies overlap.
    i64 place[kBatch];
    u32 of_row[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const u32 chunk = start + b * kThreads, row = chunk / p.out_chunks;
      of_row[b] = chunk < num_chunks ? chunk - row * p.out_chunks : p.row_chunks;
      place[b] = 0;
      if (of_row[b] < p.row_chunks) {
        place[b] = kLong ? __ldg(static_cast<const i64*>(p.places) + first_row + row)
                         : __ldg(static_cast<const int*>(p.places) + first_row + row);
      }
    }
    Piece chunks[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      chunks[b] = Piece();
      if (of_row[b] < p.row_chunks) {
        chunks[b] = __ldg(reinterpret_cast<const Piece*>(p.rows + place[b] * p.row_stride) + of_row[b]);
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (start + b * kThreads < num_chunks) out[start + b * kThreads] = chunks[b];
    }
  }
}
