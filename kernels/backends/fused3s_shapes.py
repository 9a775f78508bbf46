"""Constants of the kernels of `fused3s` over KV tiles, forward and backward."""

TILE = (16, 16)
COMMON_DIM = 128  # head dimension of a schedule made before it is known
NARROW_DIM = 32  # heads up to this width may go edge by edge
SLICE = 16  # columns of two n-tiles
