#pragma once
#include "common.cuh"

inline int smid() { return shim::current->block->rank; }
