#pragma once
#include "common.cuh"

inline int popc(u32 word) { return __builtin_popcount(word); }
inline int bfind(u32 word) { return word ? 31 - __builtin_clz(word) : -1; }
