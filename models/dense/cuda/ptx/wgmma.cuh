// wgmma.mma_async: D[64, kN] (fp32) = A[64, 16] * B[16, kN] (+ D), by the four warps of a warpgroup. sm_90a only.
//
// Warp w holds rows 16w to 16w + 15 of D as C fragments of mma.m16n8k16 (mma.cuh): d[4j + i] is Ci of n-tile j. A comes
// from registers (rs, A fragments of the same instruction) or from shared memory (ss), B from shared memory. desc_a and
// desc_b are matrix descriptors, K-major.
//
// The instruction is asynchronous: D, and A in registers, belong to the tensor core until wgmma_wait_group.
#pragma once
#include "common.cuh"

// The kN / 2 registers of D: their numbers in the text, and the operands. Each list continues the one before.
#define WGMMA_REGS_64                                                                             \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25" \
  ",%26,%27,%28,%29,%30,%31"
#define WGMMA_REGS_80 WGMMA_REGS_64 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define WGMMA_REGS_96 WGMMA_REGS_80 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_REGS_128 WGMMA_REGS_96 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_REGS_160 WGMMA_REGS_128 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define WGMMA_REGS_192 WGMMA_REGS_160 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_REGS_256 WGMMA_REGS_192                                            \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA_D_4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define WGMMA_D_8(i) WGMMA_D_4(i), WGMMA_D_4((i) + 4)
#define WGMMA_D_16(i) WGMMA_D_8(i), WGMMA_D_8((i) + 8)
#define WGMMA_OPERANDS_64 WGMMA_D_16(0), WGMMA_D_16(16)
#define WGMMA_OPERANDS_80 WGMMA_OPERANDS_64, WGMMA_D_8(32)
#define WGMMA_OPERANDS_96 WGMMA_OPERANDS_80, WGMMA_D_8(40)
#define WGMMA_OPERANDS_128 WGMMA_OPERANDS_96, WGMMA_D_16(48)
#define WGMMA_OPERANDS_160 WGMMA_OPERANDS_128, WGMMA_D_16(64)
#define WGMMA_OPERANDS_192 WGMMA_OPERANDS_160, WGMMA_D_16(80)
#define WGMMA_OPERANDS_256 WGMMA_OPERANDS_192, WGMMA_D_16(96), WGMMA_D_16(112)

#define WGMMA_RS(n, type, a_regs, desc_b_reg, scale_d_reg)                                                       \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " scale_d_reg ", 0;\n"                                             \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" WGMMA_REGS_##n "}, {" a_regs \
               "}, " desc_b_reg ", p, 1, 1, 0;}"                                                                 \
               : WGMMA_OPERANDS_##n                                                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b), "r"(static_cast<int>(scale_d)))
#define WGMMA_RS_64(type) WGMMA_RS(64, type, "%32,%33,%34,%35", "%36", "%37")
#define WGMMA_RS_80(type) WGMMA_RS(80, type, "%40,%41,%42,%43", "%44", "%45")
#define WGMMA_RS_96(type) WGMMA_RS(96, type, "%48,%49,%50,%51", "%52", "%53")
#define WGMMA_RS_128(type) WGMMA_RS(128, type, "%64,%65,%66,%67", "%68", "%69")
#define WGMMA_RS_160(type) WGMMA_RS(160, type, "%80,%81,%82,%83", "%84", "%85")
#define WGMMA_RS_192(type) WGMMA_RS(192, type, "%96,%97,%98,%99", "%100", "%101")
#define WGMMA_RS_256(type) WGMMA_RS(256, type, "%128,%129,%130,%131", "%132", "%133")
#define WGMMA_SS(n, type, desc_a_reg, desc_b_reg, scale_d_reg)                                           \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " scale_d_reg ", 0;\n"                                     \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" WGMMA_REGS_##n "}, " \
               desc_a_reg ", " desc_b_reg ", p, 1, 1, 0, 0;}"                                            \
               : WGMMA_OPERANDS_##n                                                                      \
               : "l"(desc_a), "l"(desc_b), "r"(static_cast<int>(scale_d)))
#define WGMMA_SS_64(type) WGMMA_SS(64, type, "%32", "%33", "%34")
#define WGMMA_SS_80(type) WGMMA_SS(80, type, "%40", "%41", "%42")

// A in registers; without scale_d, D is overwritten.
template <Element kElement, int kN>
__device__ __forceinline__ void wgmma_m64nNk16_rs(float (&d)[kN / 2], const u32* a, u64 desc_b, bool scale_d) {
  static_assert(kN == 64 || kN == 80 || kN == 96 || kN == 128 || kN == 160 || kN == 192 || kN == 256,
                "the shapes written out above");
  if constexpr (kElement == Element::kHalf) {
    if constexpr (kN == 64) WGMMA_RS_64("f16");
    if constexpr (kN == 80) WGMMA_RS_80("f16");
    if constexpr (kN == 96) WGMMA_RS_96("f16");
    if constexpr (kN == 128) WGMMA_RS_128("f16");
    if constexpr (kN == 160) WGMMA_RS_160("f16");
    if constexpr (kN == 192) WGMMA_RS_192("f16");
    if constexpr (kN == 256) WGMMA_RS_256("f16");
  } else {
    if constexpr (kN == 64) WGMMA_RS_64("bf16");
    if constexpr (kN == 80) WGMMA_RS_80("bf16");
    if constexpr (kN == 96) WGMMA_RS_96("bf16");
    if constexpr (kN == 128) WGMMA_RS_128("bf16");
    if constexpr (kN == 160) WGMMA_RS_160("bf16");
    if constexpr (kN == 192) WGMMA_RS_192("bf16");
    if constexpr (kN == 256) WGMMA_RS_256("bf16");
  }
}

// A in shared memory.
template <Element kElement, int kN>
__device__ __forceinline__ void wgmma_m64nNk16_ss(float (&d)[kN / 2], u64 desc_a, u64 desc_b, bool scale_d) {
  static_assert(kN == 64 || kN == 80, "the shapes written out above");
  if constexpr (kElement == Element::kHalf) {
    if constexpr (kN == 64) WGMMA_SS_64("f16");
    if constexpr (kN == 80) WGMMA_SS_80("f16");
  } else {
    if constexpr (kN == 64) WGMMA_SS_64("bf16");
    if constexpr (kN == 80) WGMMA_SS_80("bf16");
  }
}

// Orders this warpgroup's register writes before the wgmma instructions that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending of the latest groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Compiler fence (CUTLASS's name): no read or write of these registers moves across it.
template <int kCount>
__device__ __forceinline__ void warpgroup_fence_operand(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void warpgroup_fence_operand(u32 (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}
