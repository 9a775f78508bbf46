"""`flex_attention`: torch.nn.attention.flex_attention with a block mask from the graph, compiled for the GPU.

FlexAttention skips 128 x 128 blocks of S without an edge and calls a function for each element of the others. The
function looks the element up in a bit mask of its block, 2 KiB a block with an edge. The blocks are those of A as it
stands, without gathered columns, so in a graph without a dense diagonal most blocks with an edge have few.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from fused3s.backends.base import Backend, Call, InputSpec
from fused3s.errors import UnsupportedGraphError
from fused3s.graph.edges import canonical_csr, is_distinct, rows_of_edges

BLOCK = 128  # FlexAttention's own default
WORD = 32  # bits of a word of the mask
WORDS_PER_BLOCK = BLOCK * BLOCK // WORD
MAX_MASK_BYTES = 16 << 30
MIN_DIM = 16


@dataclass(frozen=True, eq=False)
class FlexData:
    """The block mask, None without edges, and FlexAttention compiled for this graph alone."""

    block_mask: BlockMask | None
    compiled: Callable[..., torch.Tensor]


class FlexAttentionBackend(Backend):
    name = "flex_attention"
    summary = "torch's FlexAttention, compiled, with a block mask from the graph; NVIDIA GPU"

    def unavailable(self, device: torch.device) -> str | None:
        if not torch.cuda.is_available():
            return "no NVIDIA GPU found, or this PyTorch has no CUDA"
        if device.type != "cuda":
            return f"FlexAttention is dense where it is not compiled for a GPU, and these tensors are on {device}"
        return None

    def unsupported(self, dtype: torch.dtype, head_dim: int) -> str | None:
        if dtype == torch.float64:
            return f"it takes torch.float16, torch.bfloat16 and torch.float32, got {dtype}"
        if head_dim < MIN_DIM:
            return f"it takes a head dimension of at least {MIN_DIM}, got {head_dim}"
        return None

    def build(self, graph: Any, device: torch.device, inputs: InputSpec, perm: torch.Tensor | None = None) -> FlexData:
        indptr, col = canonical_csr(graph, device)
        if col.numel() and not is_distinct(indptr, col, graph.shape):
            raise UnsupportedGraphError(
                "unsupported: the graph repeats edges, and the block mask has one bit for a row and a column; merge "
                "them (torch_geometric.utils.coalesce, dgl.to_simple), or take another backend, which counts them"
            )
        row, col = rows_of_edges(indptr), col.long()
        block_mask = graph_block_mask(row, col, graph.shape) if col.numel() else None
        # fullgraph: where torch gives up compiling it must say so, not fall back to dense attention.
        return FlexData(block_mask, torch.compile(_own_code(_attend), fullgraph=True, dynamic=False))

    def attend(self, data: FlexData, call: Call) -> torch.Tensor:
        query, key, value, scale, out_dtype, *_ = call
        if data.block_mask is None:
            nothing = torch.ones_like(query, dtype=torch.bool)
            return query.masked_fill(nothing, 0).to(out_dtype)  # keeps a gradient, of zeros
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        output = data.compiled(q, k, v, data.block_mask, scale)
        return output[0].transpose(0, 1).to(out_dtype, memory_format=torch.contiguous_format)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, scale: float) -> torch.Tensor:
    return flex_attention(query, key, value, block_mask=mask, scale=scale)


def _own_code(function: FunctionType) -> FunctionType:
    """The function with a code object of its own: torch counts recompilations for each code object, and its limit
    would otherwise be used up by the plans of a few graphs."""
    return FunctionType(function.__code__.replace(), function.__globals__)


def graph_block_mask(row: torch.Tensor, col: torch.Tensor, shape: tuple[int, int]) -> BlockMask:
    """The block mask of the edges (row, col) [nnz] int64, none repeated, at least one, of a matrix of `shape`.

    Raises:
        UnsupportedGraphError: its tables would be too large.
    """
    num_row_blocks, num_col_blocks = (-(-size // BLOCK) for size in shape)
    block_of_edge = row // BLOCK * num_col_blocks + col // BLOCK
    blocks, nth_block = torch.unique(block_of_edge, return_inverse=True)
    # FlexAttention keeps four tables over all pairs of blocks, we one; all of them int32.
    needed = 5 * 4 * num_row_blocks * num_col_blocks + 4 * WORDS_PER_BLOCK * (len(blocks) + 1)
    if needed > MAX_MASK_BYTES:
        raise UnsupportedGraphError(
            f"unsupported: needs {needed / 2**30:.1f} GiB for its block mask, {MAX_MASK_BYTES >> 30} GiB are allowed; "
            f"{len(blocks)} of {num_row_blocks * num_col_blocks} blocks of {BLOCK} x {BLOCK} have an edge"
        )

    # Bits of the blocks with an edge, after one block without any, which the table names for all others.
    words = torch.zeros((len(blocks) + 1) * WORDS_PER_BLOCK, dtype=torch.int32, device=row.device)
    word = (nth_block + 1) * WORDS_PER_BLOCK + row % BLOCK * (BLOCK // WORD) + col % BLOCK // WORD
    words.index_add_(0, word, (1 << (col % WORD)).int())  # edges are distinct, so that a sum of bits is their union
    block_table = torch.zeros(num_row_blocks * num_col_blocks, dtype=torch.int32, device=row.device)
    block_table[blocks] = torch.arange(1, len(blocks) + 1, dtype=torch.int32, device=row.device)
    block_table = block_table.view(num_row_blocks, num_col_blocks)

    def is_edge(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        block = block_table[query // BLOCK, key // BLOCK]
        at = block * WORDS_PER_BLOCK + query % BLOCK * (BLOCK // WORD) + key % BLOCK // WORD
        return ((words[at] >> (key % WORD)) & 1) == 1

    # For each block row: how many column blocks have an edge, and their numbers first.
    occupied = block_table > 0
    counts = occupied.sum(1, dtype=torch.int32)
    indices = torch.argsort(occupied.to(torch.int8), dim=1, descending=True, stable=True).int()
    return BlockMask.from_kv_blocks(
        counts[None, None], indices[None, None], BLOCK_SIZE=BLOCK, mask_mod=is_edge, seq_lengths=shape
    )


BACKENDS = (FlexAttentionBackend(),)
