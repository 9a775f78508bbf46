#include "mma.h"

namespace shim {

void mma_m16n8k16(bool is_half, MmaOperands own, Site site) {
  const auto to_float = [=](u16 bits) { return is_half ? half_to_float(bits) : bfloat_to_float(bits); };
  warp_collective("mma.m16n8k16", is_half ? 10 : 11, 0xffffffffu, own, site, [=](MmaOperands** lanes) {
    float a[16][16];
    alignas(32) float b[16][8], c[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const MmaOperands& x = *lanes[lane];
      for (int i = 0; i < 8; ++i) {
        a[mma_a_row(lane, i)][mma_a_column(lane, i)] = to_float(x.a[i / 2] >> 16 * (i % 2));
      }
      for (int i = 0; i < 4; ++i) {
        b[mma_b_row(lane, i)][mma_b_column(lane, i)] = to_float(x.b[i / 2] >> 16 * (i % 2));
        c[mma_c_row(lane, i)][mma_c_column(lane, i)] = x.c[i];
      }
    }
    const auto* const b_rows = reinterpret_cast<const Eight*>(b);
    auto* const c_rows = reinterpret_cast<Eight*>(c);
    for (int m = 0; m < 16; ++m) {
      for (int k = 0; k < 16; ++k) c_rows[m] += a[m][k] * b_rows[k];
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) lanes[lane]->c[i] = c[mma_c_row(lane, i)][mma_c_column(lane, i)];
    }
  });
}

void mma_m16n8k8_tf32(MmaOperands own, Site site) {
  warp_collective("mma.m16n8k8.tf32", 12, 0xffffffffu, own, site, [=](MmaOperands** lanes) {
    const auto to_tf32 = [](u32 bits) { return __uint_as_float(bits & 0xffffe000u); };
    float a[16][8];
    alignas(32) float b[8][8], c[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const MmaOperands& x = *lanes[lane];
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 4; ++i) a[g + 8 * (i % 2)][t + 4 * (i / 2)] = to_tf32(x.a[i]);
      for (int i = 0; i < 2; ++i) b[t + 4 * i][g] = to_tf32(x.b[i]);
      for (int i = 0; i < 4; ++i) c[mma_c_row(lane, i)][mma_c_column(lane, i)] = x.c[i];
    }
    const auto* const b_rows = reinterpret_cast<const Eight*>(b);
    auto* const c_rows = reinterpret_cast<Eight*>(c);
    for (int m = 0; m < 16; ++m) {
      for (int k = 0; k < 8; ++k) c_rows[m] += a[m][k] * b_rows[k];
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) lanes[lane]->c[i] = c[mma_c_row(lane, i)][mma_c_column(lane, i)];
    }
  });
}

void load_matrices(bool is_transposed, u32* r, u32 address, Site site) {
  struct Operands {
    u32* r;
    u32 address;
  } own{r, address};
  pause(site);
  current->shared_loads.push_back({address, 16});
  const char* const name = is_transposed ? "ldmatrix.x4.trans" : "ldmatrix.x4";
  warp_collective(name, is_transposed ? 20 : 22, 0xffffffffu, own, site, [=](Operands** lanes) SHIM_UNSEEN {
    for (int matrix = 0; matrix < 4; ++matrix) {
      u16 element[8][8];
      for (int row = 0; row < 8; ++row) {
        const void* const place = shared_pointer(lanes[8 * matrix + row]->address, 16, 16, site);
        shared_read(place, 16, kAllLanes, site);
        memcpy(element[row], place, 16);
      }
      for (int thread = 0; thread < 32; ++thread) {
        const int row = thread / 4, column = 2 * (thread % 4);
        lanes[thread]->r[matrix] = is_transposed
                                       ? element[column][row] | static_cast<u32>(element[column + 1][row]) << 16
                                       : element[row][column] | static_cast<u32>(element[row][column + 1]) << 16;
      }
    }
  });
}

u32 transpose_matrix(u32 word, Site site) {
  struct Operands {
    u32 word, result;
  } own{word, 0};
  warp_collective("movmatrix.trans", 24, 0xffffffffu, own, site, [](Operands** lanes) SHIM_UNSEEN {
    const auto element = [&](int row, int column) {
      return lanes[4 * row + column / 2]->word >> 16 * (column % 2) & 0xffff;
    };
    for (int thread = 0; thread < 32; ++thread) {
      const int row = thread / 4, column = 2 * (thread % 4);
      lanes[thread]->result = element(column, row) | element(column + 1, row) << 16;
    }
  });
  return own.result;
}

}  // namespace shim
