#pragma once
#include "common.cuh"

inline void griddepcontrol_wait() { shim::current->waited_for_grid = shim::current->block->waited_for_grid = true; }
inline void griddepcontrol_launch_dependents() {}
