#pragma once
#include "common.cuh"

template <typename T>
inline const T* opaque_pointer(const T* pointer) {
  return pointer;
}
