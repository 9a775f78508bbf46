"""The dense block: everything between two attentions of a Graph Transformer in one kernel; see cuda/dense_block.cu.

packed = pack_block(...)                    # once, when the weights are there
h, qkv = dense_block(packed, attn_out, h)   # any number of times
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from .backends.cuda import HALF_TYPES, aligned_rows, cuda_unavailable, refuse_gradients
from .runtime.jit import cpp_name, get_kernel
from .runtime.launch import launch_kernel, pack_scalars

CAPABILITY = (9, 0)  # sm_90a: wgmma
BLOCK_ROWS = 64  # rows of a consumer warpgroup in a round
BLOCK_SHARED_BYTES = 227 * 1024  # of compute capability 9.0
BARRIER_BYTES = 512  # upper bound for every instance


class Shape(NamedTuple):
    """Shape of the blocks of an instance.

    Attributes:
        slice: output columns of a tall tile, k of a wide tile; a divisor of d.
        consumers: consumer warpgroups, 64 rows each at a time.
        stages: most stages of the ring for streamed tiles.
        shared_h1: whether h1 goes to the up projection through shared memory instead of registers.
        cluster: blocks of a cluster, which share every copy of a tile.
    """

    slice: int
    consumers: int
    stages: int
    shared_h1: bool
    cluster: int


SHAPES = {
    64: Shape(64, 3, 0, False, 1),
    80: Shape(80, 2, 0, False, 1),
    96: Shape(96, 2, 0, False, 1),
    128: Shape(64, 2, 3, False, 1),
    160: Shape(80, 2, 5, True, 2),
    192: Shape(64, 2, 6, True, 2),
    256: Shape(64, 2, 4, True, 2),
}
DIMS = tuple(SHAPES)
WIDTHS = ", ".join(map(str, DIMS))  # for messages


@dataclass(frozen=True)
class DenseBlockSpec:
    """One instance of cuda/dense_block.cu.

    Attributes:
        dtype: torch.float16 or torch.bfloat16, of all tensors but the float32 vectors.
        dim: d, one of `DIMS`.
        has_next: whether the projection of a next block follows.
    """

    dtype: torch.dtype
    dim: int
    has_next: bool

    source: ClassVar[str] = "dense_block.cu"
    arch: ClassVar[str] = "sm_90a"

    @property
    def name(self) -> str:
        shape = self.shape
        return cpp_name(
            "dense_block",
            self.dtype,
            self.dim,
            shape.slice,
            shape.consumers,
            shape.shared_h1,
            shape.cluster,
            self.resident,
            self.stages,
            self.has_next,
        )

    @property
    def shape(self) -> Shape:
        return SHAPES[self.dim]

    @property
    def threads(self) -> int:
        return 128 * (self.shape.consumers + 1)

    def grid(self, num_rows: int, sms: int) -> int:
        """Blocks: whole clusters, at most one block an SM and one a tile of rows."""
        cluster = self.shape.cluster
        return min(sms // cluster, -(-num_rows // (BLOCK_ROWS * cluster))) * cluster

    @property
    def tile_bytes(self) -> int:
        return 2 * self.dim * self.shape.slice

    @property
    def tiles(self) -> int:
        return (8 if self.has_next else 5) * self.dim // self.shape.slice

    @property
    def panel_k(self) -> int:
        """k of a panel of a tile, the length of a swizzled row."""
        return math.gcd(self.dim, self.shape.slice, 64)

    @property
    def other_bytes(self) -> int:
        """Shared memory of h1 and the vectors, beside tiles and barriers."""
        h1 = self.shape.consumers * BLOCK_ROWS * self.dim * 2 if self.shape.shared_h1 else 0
        return h1 + 8 * self.dim * 4

    @cached_property
    def stages(self) -> int:
        """Stages of the ring: the shape's, or as many less as whole laps need."""
        return max(stages for stages in range(self.shape.stages + 1) if self._resident_beside(stages) >= 0)

    @cached_property
    def resident(self) -> int:
        """Resident tiles: all, or as many as fit such that the ring makes whole laps a round."""
        return self._resident_beside(self.stages)

    def _resident_beside(self, stages: int) -> int:
        """Resident tiles beside a ring of `stages`; negative if a whole number of laps is more than all tiles."""
        if stages == 0:
            return self.tiles
        places = (BLOCK_SHARED_BYTES - self.other_bytes - BARRIER_BYTES) // self.tile_bytes
        laps = -(-max(0, self.tiles - (places - stages)) // stages)
        return self.tiles - laps * stages

    @cached_property
    def shared_bytes(self) -> int:
        places = self.resident + self.stages
        return places * self.tile_bytes + self.other_bytes + 8 * (places + self.stages)


@dataclass(frozen=True, eq=False)
class PackedBlock:
    """Weights of a block in the kernel's layout, copies of the model's.

    Attributes:
        spec: the instance that reads them.
        weights: [tiles, d * slice] of spec.dtype, tiles in the order of use, swizzled as in shared memory.
        vectors: [8 d] float32: biases and norms.
        eps: of both norms.
    """

    spec: DenseBlockSpec
    weights: torch.Tensor
    vectors: torch.Tensor
    eps: float


def dense_block_unavailable(device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
    """Why the kernel cannot run with such a model on `device`; None when it can."""
    if reason := cuda_unavailable(device):
        return reason
    if dtype not in HALF_TYPES:
        return f"it takes float16 and bfloat16, and the model has {dtype}"
    if dim not in DIMS:
        return f"it takes d = {WIDTHS}, and the model has {dim}"
    capability = torch.cuda.get_device_capability(device)
    if capability != CAPABILITY:
        found = f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}"
        return f"{found}; it is written for {CAPABILITY[0]}.{CAPABILITY[1]} (H100, H200)"
    return None


def pack_block(
    out_w: torch.Tensor,
    out_b: torch.Tensor,
    norm1_w: torch.Tensor,
    norm1_b: torch.Tensor,
    up_w: torch.Tensor,
    up_b: torch.Tensor,
    down_w: torch.Tensor,
    down_b: torch.Tensor,
    norm2_w: torch.Tensor,
    norm2_b: torch.Tensor,
    next_qkv_w: torch.Tensor | None,
    eps: float,
) -> PackedBlock:
    """Pack a block's weights, laid out as torch.nn.Linear has them, and compile the kernel if they are on a GPU.

    Args:
        out_w, out_b: [d, d], [d]: output projection of the attention.
        norm1_w, norm1_b: [d]: LayerNorm after the attention.
        up_w, up_b: [2d, d], [2d]: first layer of the FFN.
        down_w, down_b: [d, 2d], [d]: second layer of the FFN.
        norm2_w, norm2_b: [d]: LayerNorm after the FFN.
        next_qkv_w: [3d, d]: projections of the next block, None after the last.
        eps: of both norms.

    Raises:
        ValueError: a shape, type or device does not fit the others, or `DIMS` and float16 or bfloat16.
    """
    dim = out_w.shape[0]
    if dim not in DIMS or out_w.dtype not in HALF_TYPES:
        raise ValueError(
            f"out_w: got {out_w.dtype} with d = {dim}; the kernel takes float16 and bfloat16, d = {WIDTHS}: "
            "ask dense_block_unavailable first"
        )
    weights = {"out_w": (out_w, (dim, dim)), "up_w": (up_w, (2 * dim, dim)), "down_w": (down_w, (dim, 2 * dim))}
    if next_qkv_w is not None:
        weights["next_qkv_w"] = (next_qkv_w, (3 * dim, dim))
    vectors = {"out_b": out_b, "norm1_w": norm1_w, "norm1_b": norm1_b, "up_b": up_b, "down_b": down_b}
    vectors |= {"norm2_w": norm2_w, "norm2_b": norm2_b}
    shapes = weights | {name: (vector, ((2 if name == "up_b" else 1) * dim,)) for name, vector in vectors.items()}
    for name, (tensor, shape) in shapes.items():
        if tensor.shape != shape or tensor.dtype != out_w.dtype or tensor.device != out_w.device:
            raise ValueError(
                f"{name}: got {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}; "
                f"with this out_w it must be {shape}, {out_w.dtype} on {out_w.device}"
            )
    spec = DenseBlockSpec(out_w.dtype, dim, next_qkv_w is not None)
    packed = PackedBlock(
        spec,
        torch.stack([swizzle_tile(tile, spec.panel_k) for tile in tiles_of(spec, out_w, up_w, down_w, next_qkv_w)]),
        torch.cat(list(vectors.values())).float(),
        eps,
    )
    if out_w.device.type == "cuda":
        get_kernel(spec, out_w.device.index)
        # The kernel reads weights before griddepcontrol.wait: queued is not enough.
        torch.cuda.current_stream(out_w.device).synchronize()
    return packed


def tiles_of(
    spec: DenseBlockSpec,
    out_w: torch.Tensor,
    up_w: torch.Tensor,
    down_w: torch.Tensor,
    next_qkv_w: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Wide tiles [d, slice] and tall tiles [slice, d] of the weights in the order of use, dimensions permuted.

    The d inputs and outputs of the block are permuted in groups of the whole row, hidden units and q, k, v in groups of
    their slice, which is a tile's.
    """
    dim, size = spec.dim, spec.shape.slice
    out = permute_dims(out_w, dim, dim).split(size, 1)
    up, down = permute_dims(up_w, size, dim).split(size), permute_dims(down_w, dim, size).split(size, 1)
    ffn = [tile for pair in zip(up, down, strict=True) for tile in pair]
    if not spec.shape.shared_h1:  # two slices are in flight: up i + 1 is issued before down i
        ffn = [up[0], *(tile for pair in zip(up[1:], down[:-1], strict=True) for tile in pair), down[-1]]
    if next_qkv_w is None:
        return [*out, *ffn]
    return [*out, *ffn, *permute_dims(next_qkv_w, size, dim).split(size)]


def permute_dims(weight: torch.Tensor, row_block: int, column_block: int) -> torch.Tensor:
    """Rows and columns in the order of the kernel's wgmma columns, each block of them on its own."""
    rows, columns = (
        (torch.arange(0, size, block)[:, None] + dimension_of_column(block)).flatten().to(weight.device)
        for size, block in zip(weight.shape, (row_block, column_block), strict=True)
    )
    return weight[rows][:, columns]


def dimension_of_column(size: int) -> torch.Tensor:
    """[size] int64: wgmma column 32s + 8w + 2t + b holds dimension 32s + 8t + 2w + b.

    In 16 columns left at the end, w < 2, it holds 32s + 4t + 2w + b.
    """
    groups = torch.arange(size).split(32)
    return torch.cat([group.view(4, -1, 2).transpose(0, 1).flatten() for group in groups])


def swizzle_tile(tile: torch.Tensor, panel_k: int) -> torch.Tensor:
    """[rows, k] -> [rows * k]: panels of `panel_k` k with wgmma's swizzle for rows of this length.

    A row has c = panel_k / 8 chunks of 16 bytes; chunk i of row n lies at i ^ (n // (8 / c) % c).
    """
    chunks = panel_k // 8
    rows = torch.arange(tile.shape[0], device=tile.device)[:, None]
    order = torch.arange(chunks, device=tile.device) ^ rows // (8 // chunks) % chunks
    return tile.unflatten(1, (-1, chunks, 8)).transpose(0, 1)[:, rows, order].flatten()


def dense_block(
    packed: PackedBlock, attn_out: torch.Tensor, h: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the kernel on torch's current stream, without waiting for it.

    Products and norms accumulate in float32, biases and residuals are added in float32. The operands of the next
    product and the results are rounded to the inputs' type.

    Args:
        packed: weights on the tensors' GPU.
        attn_out: [N, d], output of the attention, in the type of the weights.
        h: [N, d], input of the block.

    Returns:
        Output of the block [N, d], and q, k, v of the next block [N, 3d], None after the last block.

    Raises:
        ValueError: shape, type or device do not fit the weights, or gradients are asked for.
    """
    spec, device = packed.spec, packed.weights.device
    shape = (*h.shape[:1], spec.dim)
    for name, tensor in {"attn_out": attn_out, "h": h}.items():
        if tensor.shape != shape or tensor.dtype != spec.dtype or tensor.device != device or not tensor.is_cuda:
            raise ValueError(
                f"{name}: got {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}; these weights need "
                f"{shape}, {spec.dtype} on {device}, which must be a GPU"
            )
    refuse_gradients("dense_block", attn_out, h)
    num_rows = shape[0]
    h_next = torch.empty_like(h, memory_format=torch.contiguous_format)
    qkv = h.new_empty((num_rows, 3 * spec.dim)) if spec.has_next else None
    if num_rows:
        inputs = [aligned_rows(tensor.contiguous(), 16) for tensor in (attn_out, h)]
        sms = torch.cuda.get_device_properties(device.index).multi_processor_count
        launch_kernel(
            get_kernel(spec, device.index),
            (spec.grid(num_rows, sms),),
            spec.threads,
            [*inputs, packed.weights, packed.vectors, h_next, qkv],
            _scalars(num_rows, packed.eps),
            shared_bytes=spec.shared_bytes,
            overlaps=True,
        )
    return h_next, qkv


@lru_cache  # equal for all blocks of a model
def _scalars(num_rows: int, eps: float) -> bytes:
    return pack_scalars(np.int32(num_rows), np.float32(eps))
