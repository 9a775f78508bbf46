// Inputs of backward.cu. Both passes take the same struct; schedule, `row_ids` and scratch memory differ.
#pragma once
#include "common.cuh"
#include "tiles/forward_params.cuh"

// Statistics of a row of the softmax.
struct RowStats {
  float negative_lse;  // -LSE * log2(e); -infinity for a row without weight, so that its exponentials are 0
  float delta;         // <dO, O>, less the gradient of the LSE
};

struct BackwardParams {
  const KVTile* kv_tiles;      // KV tiles of A, or of A^T  [num_tiles + 2]
  const WorkItem* work_items;  // [num_blocks][kTeams]
  const void* query;           // [num_rows][H][kDim]  kIn, any row and head stride, rows aligned to kCopy_bytes
  const void* key;             // [num_cols][H][kDim]  as query
  const void* value;           // [num_cols][H][kDim]  as query
  const void* grad_output;     // [num_rows][H][kDim]  as query
  const void* output;          // [num_rows][H][kDim]  contiguous
  const float* lse;            // [num_rows][H]
  const float* lse_gradient;   // [num_rows][H]  null for 0
  RowStats* row_stats;         // [num_rows][H]  written by the row pass for rows with an edge
  void* grad_query;            // [num_rows][gradient_heads][kDim]  the row pass writes H heads of each row
  void* grad_key;              // [num_cols][gradient_heads][kDim]  the column pass writes H heads of each row
  void* grad_value;            // [num_cols][gradient_heads][kDim]  as grad_key
  void* partial;               // [num_splits][H] GradientPartial
  int* semaphores;             // [num_splits][H][kWarps]  0 before and after
  const int* row_ids;          // [num_windows][16]  rows of each window; null: 16 w, 16 w + 1, ...
  const i64* seed;             // [1]  dropout seed; null without dropout
  const int* tile_slots;       // as in forward.cu, of A or of A^T; null without values of edges
  const int* slot_edges;       // [num_slots]  edge of A of each slot
  const u8* slot_places;       // [num_slots]  16 * own row + gathered row in the KV tile
  // Values of edges: [1 or H][num_slots][n], one per slot.
#include "score/score_term_pointers.cuh"
  // Gradients of the values of a score term (values of heads: per row); null: not wanted.
  float* row_value_gradients;     // [num_rows][H][n]  row pass
  float* head_value_gradients;    // [num_rows][H][n]  row pass
  float* column_value_gradients;  // [num_cols][H][n]  column pass
  float* edge_value_gradients;    // [H][num_slots][n]  row pass; edges of A, not slots
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
  int gradient_heads;  // H, or more if the rows of a gradient also hold other columns
  float scale_log2e;  // scale * log2(e)
  float scale;
  u32 threshold;  // as in DropoutParams
  float rescale;  // 1 / (1 - rate); 1 without dropout
#include "score/score_term_params.cuh"
  int num_slots;
};
