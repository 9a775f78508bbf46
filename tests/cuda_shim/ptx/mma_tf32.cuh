// mma.sync.aligned.m16n8k8 in TF32, by the fragment layouts of the PTX ISA manual ("Matrix fragments for mma.m16n8k8").
#pragma once
#include "common.cuh"

inline void mma_m16n8k8_tf32(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1,
                             shim::Site site = shim::Site::here()) {
  shim::mma_m16n8k8_tf32({c, {a0, a1, a2, a3}, {b0, b1}}, site);
}
