#pragma once
#include "common.cuh"

inline i64 mul_wide_s32(int x, int y) { return static_cast<i64>(x) * y; }
