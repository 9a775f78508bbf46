"""Constants of the kernels of `fused3s`."""

TILE = (16, 16)
COMMON_DIM = 128  # head dimension of a schedule made before it is known
RESERVED_BYTES = 1024  # of an SM's shared memory, for each block
SLICE = 16  # columns of two n-tiles
# Bits of enum EdgeTerm, as in cuda/score_terms.cuh:
BIAS, MULTIPLIER, TYPES, CLAMP, KEY_FEATURES, VALUE_FEATURES, DROPOUT = 1, 2, 4, 8, 16, 32, 64
# As in cuda/fused3s_params.cuh:
STAGES = 2
RECORDS = 4
SLOT_BYTES = 128
