// Inputs of fused3s_backward.cu. Both passes take the same struct, but for the schedule, `row_ids` and scratch memory.
#pragma once
#include "common.cuh"
#include "fused3s_params.cuh"

// What the gradients need of a row of the softmax.
struct RowStats {
  float negative_lse;  // times log2(e); -infinity also for a row without weight, whose exponentials are then 0
  float delta;         // <dO, O>
};

struct BackwardParams {
  const KVTile* kv_tiles;      // of A, or of A^T  [num_tiles + 2]
  const WorkItem* work_items;  // [num_blocks][kTeams]
  const void* query;           // [num_rows][H][kDim]  kIn, any row and head stride, rows aligned to kCopy_bytes
  const void* key;             // [num_cols][H][kDim]  as query
  const void* value;           // [num_cols][H][kDim]  as query
  const void* grad_output;     // [num_rows][H][kDim]  as query
  const void* output;          // [num_rows][H][kDim]  contiguous
  const float* lse;            // [num_rows][H]
  RowStats* row_stats;         // [num_rows][H]  the row pass writes those of rows with an edge
  void* grad_query;            // [num_rows][gradient_heads][kDim]  H heads of each row are written by the row pass
  void* grad_key;              // [num_cols][gradient_heads][kDim]  by the column pass, as above
  void* grad_value;            // [num_cols][gradient_heads][kDim]  by the column pass, as above
  void* partial;               // [num_splits][H] GradientPartial
  int* semaphores;             // [num_splits][H][kWarps]  0 before and after
  const int* row_ids;          // [num_windows][16]  rows of each window; null: 16 w, 16 w + 1, ...
  const i64* seed;             // [1]  of the dropout; null without
  i64 query_head_stride;       // elements
  i64 key_head_stride;
  i64 value_head_stride;
  i64 grad_head_stride;
  int query_row_bytes;
  int key_row_bytes;
  int value_row_bytes;
  int grad_row_bytes;
  int num_rows;
  int num_cols;
  int num_heads;       // H
  int gradient_heads;  // H, or more where the rows of a gradient hold other columns, too
  float scale_log2e;  // scale * log2(e)
  float scale;
  u32 threshold;  // of the dropout, as in dropout.cuh
  float rescale;  // 1 / (1 - rate); 1 without dropout
};
