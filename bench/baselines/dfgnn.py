"""`dfgnn_tiling` and `dfgnn_hyper`: the fused float32 kernels of DF-GNN on CUDA cores, baselines of the paper.

Method: Liu et al., "DF-GNN: Dynamic Fusion Framework for Attention Graph Neural Networks on GPUs" (LoG 2024), and the
paper's section on baselines; re-implemented from these descriptions. See cuda/dfgnn_tiling.cu and cuda/dfgnn_hyper.cu.

As published, both compute in float32 with a softmax that subtracts the maximum. Differences from the published
code:

* All head dimensions up to 256 are correct. The published tiling kernel leaves some scores of a tile unwritten for 65
  to 96 and 129 to 224 dimensions, and reads past the rows if 32 does not divide the dimension.
* Several edges per warp are in flight (published: one), partial sums of several edges are reduced together, and each
  exponential is computed once per warp instead of once per thread.
* hyper allocates shared memory for the eight rows with the most edges and refuses a graph that needs more than a block
  has; the published one allocates for eight times the largest degree and writes out of bounds beyond that.
* Offsets are 64 bits wide.

16-bit inputs are cast to float32 at each call, and the output back. The published code takes float32 only, so
measure these backends with float32 inputs.
"""

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fused3s.backends.base import Call, InputSpec
from fused3s.backends.cuda import HALF_TYPES, LOG2E, MAX_DIM, CudaBackend, aligned_rows, refuse_gradients
from fused3s.errors import UnsupportedGraphError
from fused3s.graph.edges import canonical_csr, rows_of_edges
from fused3s.runtime.device import WARP_SIZE
from fused3s.runtime.jit import KernelInstance, get_kernel
from fused3s.runtime.launch import launch_kernel

HYPER_ROWS = 8  # rows, and warps, of a block
HYPER_SHARED_BYTES = 48 * 1024  # what a block gets without opting in to more; the published code does not opt in

CUDA = Path(__file__).parent / "cuda"


@dataclass(frozen=True, eq=False)
class DFGNNData:
    """A: indptr [num_rows + 1] int64, indices [nnz] int32; of hyper edge_row [nnz] int32 and bytes of a block."""

    indptr: torch.Tensor
    indices: torch.Tensor
    edge_row: torch.Tensor | None = None
    shared_bytes: int | None = None


class _DFGNNBackend(CudaBackend):
    """The base of both: float32 in and out, CSR in 64-bit offsets."""

    computes_in = torch.float32
    data_type = DFGNNData

    def unsupported(self, dtype: torch.dtype, head_dim: int) -> str | None:
        if dtype != torch.float32 and dtype not in HALF_TYPES:
            return f"it takes torch.float32, and torch.float16 and torch.bfloat16 by conversion, got {dtype}"
        if not 1 <= head_dim <= MAX_DIM:
            return f"it takes a head dimension up to {MAX_DIM}, got {head_dim}"
        return None

    @abstractmethod
    def instance(self, head_dim: int) -> KernelInstance:
        """The kernel for a head dimension."""

    def format(self, indptr: torch.Tensor, indices: torch.Tensor) -> DFGNNData:
        return DFGNNData(indptr, indices)

    @abstractmethod
    def launch(self, num_rows: int, instance: KernelInstance) -> tuple[int, int, int, dict[str, int]]:
        """Blocks of a head, warps of a block, bytes that a lane loads at once, and scalars of its own."""

    def build(self, graph: Any, device: torch.device, inputs: InputSpec, perm: torch.Tensor | None = None) -> DFGNNData:
        data = self.format(*canonical_csr(graph, device))
        if inputs.head_dim is not None:
            get_kernel(self.instance(inputs.head_dim), device.index)
        return data

    def attend(self, data: DFGNNData, call: Call) -> torch.Tensor:
        refuse_gradients(self.name, *call[:3])
        num_rows, num_heads, dim = call.query.shape
        instance = self.instance(dim)
        blocks, warps, load_bytes, own = self.launch(num_rows, instance)
        query, key, value = aligned_rows([tensor.float() for tensor in call[:3]], load_bytes)
        tensors = {"row_offset": data.indptr, "column": data.indices, "query": query, "key": key, "value": value}
        tensors |= {} if data.edge_row is None else {"edge_row": data.edge_row}
        output = tensors["output"] = torch.empty(query.shape, dtype=torch.float32, device=query.device)
        if output.numel():
            kernel = get_kernel(instance, query.device.index)
            strides = _strides(query=query, key=key, value=value)
            scalars = kernel.scalars(dim=dim, scale_log2e=call.scale * LOG2E, **strides, **own)
            grid, threads = (blocks, num_heads), WARP_SIZE * warps
            launch_kernel(kernel, grid, threads, tensors, scalars, shared_bytes=data.shared_bytes)
        return output.to(call.out_dtype)


class DFGNNTilingBackend(_DFGNNBackend):
    name = "dfgnn_tiling"
    summary = "DF-GNN's node-parallel float32 kernel on CUDA cores; NVIDIA GPU"

    def instance(self, head_dim: int) -> KernelInstance:
        return KernelInstance(CUDA / "dfgnn_tiling.cu", "dfgnn_tiling", (-(-head_dim // WARP_SIZE),))

    def launch(self, num_rows: int, instance: KernelInstance) -> tuple[int, int, int, dict[str, int]]:
        return num_rows, instance.arguments[0], 4, {}


class DFGNNHyperBackend(_DFGNNBackend):
    name = "dfgnn_hyper"
    summary = "DF-GNN's edge- and node-parallel float32 kernel on CUDA cores; NVIDIA GPU, no high-degree graphs"

    def instance(self, head_dim: int) -> KernelInstance:
        vector = 4 if head_dim % (4 * WARP_SIZE) == 0 else 2 if head_dim % (2 * WARP_SIZE) == 0 else 1
        return KernelInstance(CUDA / "dfgnn_hyper.cu", "dfgnn_hyper", (vector, -(-head_dim // (vector * WARP_SIZE))))

    def format(self, indptr: torch.Tensor, indices: torch.Tensor) -> DFGNNData:
        return DFGNNData(indptr, indices, rows_of_edges(indptr).int(), hyper_shared_bytes(indptr))

    def launch(self, num_rows: int, instance: KernelInstance) -> tuple[int, int, int, dict[str, int]]:
        return -(-num_rows // HYPER_ROWS), HYPER_ROWS, 4 * instance.arguments[0], {"num_rows": num_rows}


def hyper_shared_bytes(indptr: torch.Tensor) -> int:
    """Shared memory of a block of the hyper kernel: a float32 score for each edge of its eight rows.

    Raises:
        UnsupportedGraphError: a block would need more than it gets.
    """
    num_rows = indptr.numel() - 1
    if num_rows == 0:
        return 0
    bounds = torch.arange(0, num_rows + HYPER_ROWS, HYPER_ROWS, device=indptr.device).clamp(max=num_rows)
    edges = indptr[bounds].diff()
    needed = 4 * int(edges.max())
    if needed > HYPER_SHARED_BYTES:
        first = HYPER_ROWS * int(edges.argmax())
        raise UnsupportedGraphError(
            f"unsupported: needs {needed / 1024:.0f} KB of shared memory, this GPU offers "
            f"{HYPER_SHARED_BYTES // 1024} KB to a block that does not opt in to more; dfgnn_hyper keeps a score for "
            f"each edge of 8 rows there, and rows {first} to {first + HYPER_ROWS - 1} have {needed // 4} edges "
            "(dfgnn_tiling has no such limit)"
        )
    return needed


def _strides(**tensors: torch.Tensor) -> dict[str, int]:
    """Members of struct Params."""
    strides = {}
    for name, tensor in tensors.items():
        strides[f"{name}_row_stride"], strides[f"{name}_head_stride"] = tensor.stride()[:2]
    return strides


BACKENDS = (DFGNNTilingBackend(), DFGNNHyperBackend())
