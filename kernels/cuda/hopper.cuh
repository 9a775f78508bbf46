// What compute capability 9.0 adds: matrix products of a warpgroup, bulk copies and the barriers they arrive at.
// For sm_90a. After mma.cuh.
//
// D[64, kN] (fp32) += A[64, 16] * B[16, kN], kN = 64, 128, 256. Warp w of the warpgroup holds rows 16w to 16w + 15 of A
// and D, in registers as m16n8k16 has them (mma.cuh): A as it stands, D n-tile by n-tile, d[4j + i] = Ci of tile j. So
// the tiles 2k and 2k + 1 of D, rounded and packed, are A of the k-th step of the next product.
//
// B lies in shared memory, K-major, in panels of 64 k: row n has 128 bytes, its 16-byte piece i at i ^ (n % 8) (the
// 128-byte swizzle); a panel starts on 1024 bytes. A may lie there in the same way, row by row.
#pragma once

typedef unsigned long long u64;

constexpr int kGroupWarps = 4;
constexpr int kGroupSize = kGroupWarps * kWarpSize;  // threads of a warpgroup
constexpr int kGroupM = kGroupWarps * kTileM;        // rows of A and D
constexpr int kPanelK = 64;
constexpr int kPanelPitch_bytes = 2 * kPanelK;
constexpr int kStep_bytes = 2 * kTileK;  // from a k-step to the next in a panel

// Where a panel is: address / 16 in bits 0-13, the distance of groups of eight rows / 16 in bits 32-45, the 128-byte
// swizzle in bits 62-63; with it bits 16-29 do not count. Steps through a panel and through memory add to the lower word.
constexpr u32 kPanelUnit_bytes = 16;
__device__ __forceinline__ u32 panel_word(u32 address) { return address / kPanelUnit_bytes | 1u << 16; }
__device__ __forceinline__ u64 panel_descriptor(u32 word) {
  return static_cast<u64>(1u << 30 | 8 * kPanelPitch_bytes / kPanelUnit_bytes) << 32 | word;
}

#define NAMES_0_31                                                                                         \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27," \
  "%28,%29,%30,%31"
#define NAMES_32_63                                                                                          \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57," \
  "%58,%59,%60,%61,%62,%63"
#define NAMES_64_127                                                                                         \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89," \
  "%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"     \
  "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define FLOATS_4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define FLOATS_16(i) FLOATS_4(i), FLOATS_4((i) + 4), FLOATS_4((i) + 8), FLOATS_4((i) + 12)
#define FLOATS_64(i) FLOATS_16(i), FLOATS_16((i) + 16), FLOATS_16((i) + 32), FLOATS_16((i) + 48)
#define WGMMA(n, type, d_names, a_names, b_name, add_name, ...)                                                     \
  asm volatile("{.reg .pred add; setp.ne.b32 add, " add_name ", 0;\n"                                               \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" d_names "}, {" a_names "}, "     \
               b_name ", add, 1, 1, 0;}"                                                                            \
               : __VA_ARGS__                                                                                        \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)))
#define WGMMA_64(type) \
  WGMMA("64", type, NAMES_0_31, "%32,%33,%34,%35", "%36", "%37", FLOATS_16(0), FLOATS_16(16))
#define WGMMA_128(type) \
  WGMMA("128", type, NAMES_0_31 "," NAMES_32_63, "%64,%65,%66,%67", "%68", "%69", FLOATS_64(0))
#define WGMMA_256(type)                                                                                          \
  WGMMA("256", type, NAMES_0_31 "," NAMES_32_63 "," NAMES_64_127, "%128,%129,%130,%131", "%132", "%133", FLOATS_64(0), \
        FLOATS_64(64))
#define WGMMA_64_SHARED(type)                                                                       \
  asm volatile("{.reg .pred add; setp.ne.b32 add, %34, 0;\n"                                        \
               "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" NAMES_0_31 "}, %32, " \
               "%33, add, 1, 1, 0, 0;}"                                                             \
               : FLOATS_16(0), FLOATS_16(16)                                                        \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)))

// Starts D += A * B, or D = A * B if not `add`; the registers are the tensor core's until wait_products.
template <Element kElement, int kN>
__device__ __forceinline__ void start_product(float (&d)[kN / 2], const u32* a, u64 b, bool add) {
  static_assert(kN == 64 || kN == 128 || kN == 256, "the shapes written out above");
  if constexpr (kElement == Element::kHalf) {
    if constexpr (kN == 64) WGMMA_64("f16");
    if constexpr (kN == 128) WGMMA_128("f16");
    if constexpr (kN == 256) WGMMA_256("f16");
  } else {
    if constexpr (kN == 64) WGMMA_64("bf16");
    if constexpr (kN == 128) WGMMA_128("bf16");
    if constexpr (kN == 256) WGMMA_256("bf16");
  }
}
// The same with A in shared memory.
template <Element kElement>
__device__ __forceinline__ void start_product(float (&d)[32], u64 a, u64 b, bool add) {
  if constexpr (kElement == Element::kHalf) {
    WGMMA_64_SHARED("f16");
  } else {
    WGMMA_64_SHARED("bf16");
  }
}
// Registers written by other instructions become visible to the products that follow.
__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kPending groups are running.
template <int kPending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving reads and writes of registers across: after wait_products, before fence_products.
template <int kCount>
__device__ __forceinline__ void pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(u32 (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// Four 8 x 8 matrices as m16n8k16 has them in registers; lanes 8i to 8i + 7 give the rows of matrix i.
__device__ __forceinline__ void store_matrices(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}
// Makes what this thread wrote to shared memory known to products and bulk copies, once it has met their threads.
__device__ __forceinline__ void fence_shared_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Until all threads of the warpgroup are here; barrier 0 is __syncthreads.
__device__ __forceinline__ void sync_group(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kGroupSize) : "memory");
}

__device__ __forceinline__ void init_barrier(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers known to bulk copies.
__device__ __forceinline__ void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  fence_shared_writes();
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// At the barrier that lies at the same place in another block of the cluster.
__device__ __forceinline__ void arrive_at(u32 barrier, int block) {
  asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
               "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(barrier),
               "r"(block)
               : "memory");
}
// Until the phase of this parity is over; a new barrier is in phase 0, and the phase before it, of parity 1, is over.
__device__ __forceinline__ void wait_barrier(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{.reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2; selp.u32 %0, 1, 0, done;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (!done);
}
// One arrival, and the phase ends only after `bytes` bytes were copied.
__device__ __forceinline__ void arrive_expecting(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Copies from global to shared memory, with `bytes` bytes at the barrier; everything on 16 bytes.
__device__ __forceinline__ void copy_bulk(u32 target, const void* source, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}
// The same to this place, and with its bytes at this barrier, in each block of the cluster whose bit is set.
__device__ __forceinline__ void copy_bulk_to_blocks(u32 target, const void* source, u32 bytes, u32 barrier,
                                                    u16 blocks) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1], %2, [%3], %4;" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier), "h"(blocks)
               : "memory");
}
__device__ __forceinline__ void store_global(uint4* address, uint4 words) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(address), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}
// Brings global memory into L2; nothing waits for it.
__device__ __forceinline__ void prefetch_bulk(const void* source, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes));
}

// Moves registers between the warpgroups of a block; every thread of the warpgroup takes part.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Number of this block in its cluster.
__device__ __forceinline__ int block_of_cluster() {
  int block;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
  return block;
}
// Until all threads of the cluster are here.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
