// Inputs of forward.cu: the schedule's records (fused/planning/schedule.py) and struct Params.
#pragma once
#include "common.cuh"
#include "dropout.cuh"

constexpr int kStages = 2;
constexpr int kRecords = 2 * kStages;
constexpr int kTileKeys = 16;
constexpr int kChunk_bytes = 16;

struct __align__(16) KVTile {
  int key[kTileKeys];      // -1 past the last one
  u32 bitmap[kTileM / 2];  // word g: row g in the lower half, row g + 8 in the upper half; bit j: key j
};

// Work item: the consecutive KV tiles of one window that one warp processes. Copied to the records as it is: `first`
// and the fields to record 0, `second` to record 1.
struct __align__(16) WorkItem {
  KVTile first;     // KV tile `begin`; with `second`, no second wait before the first gather
  int begin;        // first KV tile
  int count;        // KV tiles; 0 in an empty window, and if a block has more warps than the window has KV tiles
  int window;       // -1: no work
  int num_keys;     // keys of the last KV tile
  int split;        // kWarp, kBlock, or the split
  int first_split;  // first split of the window
  int num_splits;   // splits of the window
  int unused;
  KVTile second;
};

// Offsets in a KV tile, in a work item and in record 0.
constexpr u32 kBitmap = sizeof(KVTile::key);
constexpr u32 kRange = sizeof(KVTile);          // begin, count, window, num_keys
constexpr u32 kSplit = kRange + sizeof(uint4);  // split, first_split, num_splits
constexpr u32 kRecord_bytes = 128;
static_assert(sizeof(KVTile) == 96 && sizeof(WorkItem) == 224, "TILE_WORDS and ITEM_WORDS in schedule.py");
static_assert(sizeof(WorkItem) == kRecord_bytes + sizeof(KVTile), "`second` in record 1");

// H: heads of the tensors. blockIdx.y is the head group: kHeads heads, fewer in the last group.
struct Params {
  const KVTile* kv_tiles;      // [num_tiles + 2]
  const WorkItem* work_items;  // [num_blocks][kWarps]
  const void* query;           // [num_rows][H][kDim] kIn  any row and head stride, rows aligned to kCopy_bytes
  const void* key;             // [num_cols][H][kDim] kIn  as query
  const void* value;           // [num_cols][H][kDim] kIn  as query
  void* output;                // [num_rows][H][kDim]  contiguous; every element is written
  float* lse;                  // [num_rows][H]  log of the sum of exp(scores), -infinity without an edge; may be null
  void* partial;               // [num_splits][num_groups] Partial<kDim, kHeads>
  int* semaphores;             // [num_splits][num_groups][kWarps]  0 before and after
  const int* row_ids;          // [num_row_windows][16]  rows of Q and O of each window; null: 16 w, 16 w + 1, ...
  const int* tile_slots;       // [num_tiles + 3]  first slot of each KV tile; null without edge data
  const u8* slot_places;       // [nnz]  16 * row + key in the KV tile
  const u16* features;         // [nnz][16]  of each slot; rows aligned to 16 bytes, zero past the last feature
  const uint4* feature_weights;  // [H]  PackedWeights (tile_features.cuh)
  // Values of edges: [1 or H][num_slots][n], one per slot.
#include "score/score_term_pointers.cuh"
  DropoutParams dropout;
  i64 query_head_stride;       // elements
  i64 key_head_stride;
  i64 value_head_stride;
  int query_row_bytes;
  int key_row_bytes;
  int value_row_bytes;
  int num_rows;
  int num_slots;
  int num_heads;
  u32 sign_bits;         // sign bits of a word of Q where the scale is negative, else 0: changes the signs in Q
  float product_scale;   // |scale| * log2(e); |scale| with a score term
#include "score/score_term_params.cuh"
};

// Bits of an element, for pointers to tensors.
template <int kBytes>
struct ElementBits {
  using Type = u16;
};
template <>
struct ElementBits<4> {
  using Type = u32;
};
