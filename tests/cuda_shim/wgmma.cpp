// wgmma.mma_async, by the PTX ISA manual ("Register fragments and shared memory matrix layouts" of m64nNk16).
//
// Each warp issues, commits and waits on its own. Its share of a product is computed at the issue (kEarly), at the wait
// that covers it (kLate) or in between; until that wait its accumulator registers hold NaN. From the first warp's issue
// to the last warp's wait, operands in shared memory may not change, nor may registers of A: the hardware may read them
// at any moment. Stricter than the manual: wgmma_fence is due after every commit_group and wait_group, since a thread's
// register accesses are not seen here.
#include "hopper.h"

#include <algorithm>

#include "mma.h"

namespace shim {

struct Chunk {  // 8 elements of a row of an operand
  u16 element[8];
};

// [rows][16] in shared memory: K-major, in rows of the 128-, 64- or 32-byte swizzle.
struct SmemOperand {
  u64 desc = 0;
  int rows = 0;
  std::vector<Chunk> at_issue;

  // `take` gets the row, the half of its 16 elements and their 16 bytes in shared memory.
  template <typename Take>
  void each_chunk(Site site, Take take) const {
    if (!(desc >> 62) || (desc >> 49 & 7)) fail(site, "matrix descriptor %016llx: not a swizzle at offset 0", desc);
    if ((desc & 0xc000) || (desc >> 46 & 7)) fail(site, "matrix descriptor %016llx: reserved bits are set", desc);
    const u32 row_bytes = 256 >> (desc >> 62);
    const u32 start = (desc & 0x3fff) << 4, group_stride = (desc >> 32 & 0x3fff) << 4;
    for (int row = 0; row < rows; ++row) {
      for (int half = 0; half < 2; ++half) {
        u32 address = start + row / 8 * group_stride + row % 8 * row_bytes + half * 16;
        address ^= (address >> 7 & (row_bytes / 16 - 1)) << 4;
        take(row, half, address, shared_pointer(address, 16, 16, site));
      }
    }
  }
  void read(std::vector<Chunk>& chunks, Site site) const {
    GenericWrites& writes = generic_writes();
    chunks.resize(2 * rows);
    each_chunk(site, [&](int row, int half, u32 address, const void* place) SHIM_UNSEEN {
      memcpy(&chunks[2 * row + half], place, 16);
      if (const Thread* writer = unfenced_writer(writes, address)) {
        fail(site, "wgmma reads shared address %08x; thread %u wrote it without fence.proxy.async", address,
             writer->index.x);
      }
    });
  }
  void check_writes(Site site) const {
    each_chunk(site, [&](int, int, u32, const void* place) { check_is_written(place, 16, site); });
  }
  void check_unchanged(Site site) const {
    static std::vector<Chunk> now;
    read(now, site);
    if (memcmp(now.data(), at_issue.data(), now.size() * sizeof(Chunk))) {
      fail(site, "an operand of wgmma in shared memory changed while the product was in flight");
    }
  }
};

// A product of a warpgroup.
struct Wgmma {
  bool is_half;
  SmemOperand a, b;  // a.rows is 0 where A comes from registers
  bool scale_d;
  Site site;
  int warps_done = 0;
  std::vector<float> b_values;  // [16][n]

  bool same_as(const Wgmma& other) const {
    return is_half == other.is_half && a.desc == other.a.desc && a.rows == other.a.rows && b.desc == other.b.desc &&
           b.rows == other.b.rows && scale_d == other.scale_d;
  }
};

// Accumulator registers of a warp that belong to products in flight.
struct Accumulators {
  float* registers[32];       // of each lane
  int count;                  // of a lane
  int in_flight = 0;          // products
  std::vector<float> values;  // [16][2 count]
};

constexpr u32 kInFlight = 0x7fffdead;  // in accumulator registers: NaN

// A warp's share of a product.
struct Share {
  size_t product;  // number in the warpgroup
  Accumulators* accumulators;
  const u32* a[32];
  u32 a_at_issue[32][4];
  bool computed = false;
};

struct WgmmaWarp {
  size_t issued = 0;  // products
  bool fenced = false;
  std::deque<Share> in_flight;
  std::deque<size_t> groups;  // committed: numbers of products up to their ends
  std::deque<Accumulators> accumulators;
};

struct WgmmaState {
  std::deque<Wgmma> products[32];  // of each warpgroup, of which `gone` are over
  size_t gone[32] = {};
  WgmmaWarp warps[128];

  Wgmma& product(int warpgroup, size_t number) { return products[warpgroup][number - gone[warpgroup]]; }
};

static WgmmaState& wgmma_state() { return block_state<WgmmaState>("wgmma"); }
static int warp_number() { return current->index.x / 32; }

static void check_operands(const Wgmma& product, const Share& share) {
  product.b.check_unchanged(product.site);
  if (product.a.rows) {
    product.a.check_unchanged(product.site);
  } else {
    for (int lane = 0; lane < 32; ++lane) {
      if (memcmp(share.a[lane], share.a_at_issue[lane], 16)) {
        fail(product.site, "registers of A were written while wgmma was in flight");
      }
    }
  }
}

static float wgmma_to_float(bool is_half, u16 bits) {
  return is_half ? half_to_float(bits) : bfloat_to_float(bits);
}

static void compute(WgmmaState& state, Share& share) {
  const int warpgroup = warp_number() / 4, warp = warp_number() % 4;
  Wgmma& product = state.product(warpgroup, share.product);
  check_operands(product, share);
  const int n = product.b.rows;
  if (product.b_values.empty()) {
    product.b_values.resize(16 * n);
    for (int column = 0; column < n; ++column) {
      for (int k = 0; k < 16; ++k) {
        const u16 element = product.b.at_issue[2 * column + k / 8].element[k % 8];
        product.b_values[k * n + column] = wgmma_to_float(product.is_half, element);
      }
    }
  }
  float a[16][16];
  if (product.a.rows) {
    for (int row = 0; row < 16; ++row) {
      for (int k = 0; k < 16; ++k) {
        const u16 element = product.a.at_issue[2 * (16 * warp + row) + k / 8].element[k % 8];
        a[row][k] = wgmma_to_float(product.is_half, element);
      }
    }
  } else {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 8; ++i) {
        a[mma_a_row(lane, i)][mma_a_column(lane, i)] =
            wgmma_to_float(product.is_half, share.a_at_issue[lane][i / 2] >> 16 * (i % 2));
      }
    }
  }
  std::vector<float>& d = share.accumulators->values;
  if (!product.scale_d) std::fill(d.begin(), d.end(), 0.0f);
  struct alignas(4) Unaligned {
    typedef float Eight __attribute__((vector_size(32), aligned(4)));
    Eight value;
  };
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < n; column += 16) {
      auto* const out = reinterpret_cast<Unaligned*>(&d[row * n + column]);
      Eight sums[2] = {out[0].value, out[1].value};
      for (int k = 0; k < 16; ++k) {
        const auto* const in = reinterpret_cast<const Unaligned*>(&product.b_values[k * n + column]);
        for (int i = 0; i < 2; ++i) sums[i] += a[row][k] * in[i].value;
      }
      for (int i = 0; i < 2; ++i) out[i].value = sums[i];
    }
  }
  share.computed = true;
}

// Some of the warp's products, in order.
static void compute_some(WgmmaState& state) {
  if (launch.completion == kLate) return;
  for (Share& share : state.warps[warp_number()].in_flight) {
    if (share.computed) continue;
    if (launch.completion == kAnyTime && !one_in(3)) return;
    compute(state, share);
  }
}

static int wgmma_row(int lane, int i) { return lane / 4 + 8 * (i / 2 % 2); }
static int wgmma_column(int lane, int i) { return 8 * (i / 4) + 2 * (lane % 4) + i % 2; }

static void finish(WgmmaState& state, Share& share) {
  const int warpgroup = warp_number() / 4;
  if (!share.computed) compute(state, share);
  Wgmma& product = state.product(warpgroup, share.product);
  check_operands(product, share);
  ++product.warps_done;
  while (!state.products[warpgroup].empty() && state.products[warpgroup].front().warps_done == 4) {
    state.products[warpgroup].pop_front();
    ++state.gone[warpgroup];
  }
  Accumulators& accumulators = *share.accumulators;
  if (--accumulators.in_flight) return;
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < accumulators.count; ++i) {
      float& place = accumulators.registers[lane][i];
      if (__float_as_uint(place) != kInFlight) {
        fail(product.site, "accumulators were written while wgmma was in flight");
      }
      place = accumulators.values[wgmma_row(lane, i) * 2 * accumulators.count + wgmma_column(lane, i)];
    }
  }
}

void issue_wgmma(bool is_half, int n, WgmmaOperands own, Site site) {
  linger(site);
  const auto all = [=](WgmmaOperands** lanes) {
    WgmmaState& state = wgmma_state();
    const int warpgroup = warp_number() / 4;
    WgmmaWarp& warp = state.warps[warp_number()];
    if (!warp.fenced) fail(site, "wgmma without wgmma.fence since the last commit_group or wait_group");
    const WgmmaOperands& first = *lanes[0];
    for (int lane = 0; lane < 32; ++lane) {
      if (lanes[lane]->desc_a != first.desc_a || lanes[lane]->desc_b != first.desc_b ||
          lanes[lane]->scale_d != first.scale_d) {
        fail(site, "lanes of a warp issue different wgmma");
      }
    }
    Wgmma product = {is_half};
    product.a.desc = first.desc_a;
    product.a.rows = first.a ? 0 : 64;
    product.b.desc = first.desc_b;
    product.b.rows = n;
    product.scale_d = first.scale_d;
    product.site = site;
    const size_t number = warp.issued++;
    if (number == state.gone[warpgroup] + state.products[warpgroup].size()) {
      if (product.a.rows) product.a.check_writes(site);
      product.b.read(product.b.at_issue, site);
      if (product.a.rows) product.a.read(product.a.at_issue, site);
      state.products[warpgroup].push_back(product);
    } else if (!product.same_as(state.product(warpgroup, number))) {
      fail(site, "warps of a warpgroup issue different wgmma");
    }

    Accumulators* accumulators = nullptr;
    for (Accumulators& each : warp.accumulators) {
      if (each.in_flight && each.registers[0] == first.d) accumulators = &each;
    }
    if (!accumulators) {
      while (!warp.accumulators.empty() && !warp.accumulators.front().in_flight) warp.accumulators.pop_front();
      warp.accumulators.emplace_back();
      accumulators = &warp.accumulators.back();
      accumulators->count = n / 2;
      accumulators->values.resize(16 * n);
      for (int lane = 0; lane < 32; ++lane) {
        accumulators->registers[lane] = lanes[lane]->d;
        for (int i = 0; i < n / 2; ++i) {
          accumulators->values[wgmma_row(lane, i) * n + wgmma_column(lane, i)] = lanes[lane]->d[i];
          lanes[lane]->d[i] = __uint_as_float(kInFlight);
        }
      }
    }
    ++accumulators->in_flight;
    Share share{number, accumulators};
    for (int lane = 0; lane < 32; ++lane) {
      share.a[lane] = lanes[lane]->a;
      if (first.a) memcpy(share.a_at_issue[lane], lanes[lane]->a, 16);
    }
    warp.in_flight.push_back(share);
    compute_some(state);
  };
  warp_collective("wgmma", 30, 0xffffffffu, own, site, all);
}

// wgmma.fence, commit_group, wait_group: `all` on the state of the warp.
template <typename All>
static void wgmma_control(const char* name, int op, Site site, All all) {
  int none = 0;
  linger(site);
  warp_collective(name, op, 0xffffffffu, none, site, [all](int**) {
    WgmmaState& state = wgmma_state();
    all(state, state.warps[warp_number()]);
  });
}

void wgmma_fence(Site site) {
  wgmma_control("wgmma.fence", 31, site, [](WgmmaState&, WgmmaWarp& warp) { warp.fenced = true; });
}

void wgmma_commit_group(Site site) {
  wgmma_control("wgmma.commit_group", 32, site, [](WgmmaState& state, WgmmaWarp& warp) {
    warp.groups.push_back(warp.issued);
    warp.fenced = false;
    compute_some(state);
  });
}

void wgmma_wait_group(size_t pending, Site site) {
  wgmma_control("wgmma.wait_group", 33, site, [pending](WgmmaState& state, WgmmaWarp& warp) {
    warp.fenced = false;
    for (; warp.groups.size() > pending; warp.groups.pop_front()) {
      while (!warp.in_flight.empty() && warp.in_flight.front().product < warp.groups.front()) {
        finish(state, warp.in_flight.front());
        warp.in_flight.pop_front();
      }
    }
    compute_some(state);
  });
}

}  // namespace shim
