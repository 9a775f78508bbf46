// mma.sync.aligned.m16n8k16 and m16n8k8, by the fragment layouts of the PTX ISA manual ("Matrix fragments for
// mma.m16n8k16"; those of m16n8k8 are its first halves).
#pragma once
#include "common.cuh"
#include "ptx/cvt.cuh"

namespace shim {

constexpr int kMmaOp = 10;

// Element i of the lane's fragment: where it lies in the matrix.
inline int mma_a_row(int lane, int i) { return (i < 2 || (i >= 4 && i < 6)) ? lane >> 2 : (lane >> 2) + 8; }
inline int mma_a_column(int lane, int i) { return i < 4 ? (lane % 4) * 2 + (i & 1) : (lane % 4) * 2 + (i & 1) + 8; }
inline int mma_b_row(int lane, int i) { return i < 2 ? (lane % 4) * 2 + (i & 1) : (lane % 4) * 2 + (i & 1) + 8; }
inline int mma_b_column(int lane, int) { return lane >> 2; }
inline int mma_c_row(int lane, int i) { return i < 2 ? lane >> 2 : (lane >> 2) + 8; }
inline int mma_c_column(int lane, int i) { return (lane % 4) * 2 + (i & 1); }

typedef float Eight __attribute__((vector_size(32)));

}  // namespace shim

template <Element kElement>
inline void mma_m16n8k16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1,
                         shim::Site site = shim::Site::here()) {
  struct Operands {
    float* c;
    u32 a[4], b[2];
  } own{c, {a0, a1, a2, a3}, {b0, b1}};
  shim::warp_collective("mma.m16n8k16", shim::kMmaOp + static_cast<int>(kElement), kFullWarp, own, site,
                        [](Operands** lanes) {
    float a[16][16];
    alignas(32) float b[16][8], c[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const Operands& x = *lanes[lane];
      for (int i = 0; i < 8; ++i) {
        a[shim::mma_a_row(lane, i)][shim::mma_a_column(lane, i)] = shim::to_float<kElement>(x.a[i / 2] >> 16 * (i % 2));
      }
      for (int i = 0; i < 4; ++i) {
        b[shim::mma_b_row(lane, i)][shim::mma_b_column(lane, i)] = shim::to_float<kElement>(x.b[i / 2] >> 16 * (i % 2));
        c[shim::mma_c_row(lane, i)][shim::mma_c_column(lane, i)] = x.c[i];
      }
    }
    const auto* const b_rows = reinterpret_cast<const shim::Eight*>(b);
    auto* const c_rows = reinterpret_cast<shim::Eight*>(c);
    for (int m = 0; m < 16; ++m) {
      for (int k = 0; k < 16; ++k) c_rows[m] += a[m][k] * b_rows[k];
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) lanes[lane]->c[i] = c[shim::mma_c_row(lane, i)][shim::mma_c_column(lane, i)];
    }
  });
}

template <Element kElement>
inline void mma_m16n8k8(float (&c)[4], u32 a0, u32 a1, u32 b0, shim::Site site = shim::Site::here()) {
  mma_m16n8k16<kElement>(c, a0, a1, 0, 0, b0, 0, site);
}
