// prmt.b32 in its default mode, by the PTX ISA manual.
#pragma once
#include "common.cuh"

template <u32 kSelector>
inline u32 prmt_b32(u32 low, u32 high) {
  const u64 bytes = static_cast<u64>(high) << 32 | low;
  u32 result = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 nibble = kSelector >> 4 * i & 0xf;
    const u32 byte = bytes >> 8 * (nibble & 7) & 0xff;
    result |= (nibble & 8 ? (byte & 0x80 ? 0xff : 0) : byte) << 8 * i;
  }
  return result;
}
