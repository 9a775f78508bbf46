// Parts of rows that are copied as bytes: 2, 4, 8 or 16 of them, in one load or store.
#pragma once
#include "common.cuh"

template <int kBytes>
struct ChunkOf;
template <>
struct ChunkOf<16> {
  using Type = uint4;
};
template <>
struct ChunkOf<8> {
  using Type = uint2;
};
template <>
struct ChunkOf<4> {
  using Type = u32;
};
template <>
struct ChunkOf<2> {
  using Type = u16;
};

template <int kBytes>
using Chunk = typename ChunkOf<kBytes>::Type;
