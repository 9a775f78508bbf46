// mma.sync.aligned.m16n8k16 and m16n8k8, by the fragment layouts of the PTX ISA manual ("Matrix fragments for
// mma.m16n8k16"; those of m16n8k8 are its first halves).
#pragma once
#include "common.cuh"

template <Element kElement>
inline void mma_m16n8k16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1,
                         shim::Site site = shim::Site::here()) {
  shim::mma_m16n8k16(kElement == Element::kHalf, {c, {a0, a1, a2, a3}, {b0, b1}}, site);
}

template <Element kElement>
inline void mma_m16n8k8(float (&c)[4], u32 a0, u32 a1, u32 b0, shim::Site site = shim::Site::here()) {
  mma_m16n8k16<kElement>(c, a0, a1, 0, 0, b0, 0, site);
}
