"""Codes of other authors, run as their own benchmarks run them, where the user has built their packages.

    published_fused3s             F3S, of HPCForge/Fused3S
    published_flashsparse_naive,  FS_Block, FS_SDDMM, FS_SpMM of ParCIS/FlashSparse, in the steps of the benchmark of
    published_flashsparse_stable  the Fused3S authors: exp of every stored entry; a softmax, whose result it drops
    published_dfgnn_tiling,       fused_gtconv, of paoxiaode/DF-GNN
    published_dfgnn_hyper
    turbo_gnn                     turbo_gnn, of Abusagit/Turbo-GNN, with its default parameters

A `source` names the commit that a backend is written for. All take square graphs; Turbo-GNN alone has gradients. All
but Turbo-GNN launch on CUDA's default stream, and F3S waits for the GPU in every call: sums of kernel durations compare
them with others. A wrong output is the code's own, and the benchmark marks it.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from bench.baselines.transposed import transposed
from fused3s.backends.base import Backend, Call, InputSpec
from fused3s.backends.cuda import refuse_gradients
from fused3s.errors import UnsupportedGraphError
from fused3s.graph.edges import canonical_csr, rows_of_edges
from fused3s.runtime.device import NO_GPU

WIDTHS = (64, 128, 256)
HYPER_BYTES = 48 * 1024  # of shared memory that a launch may take without more ado
WARPS = 8  # of a block, as all benchmarks of the authors set it


@dataclass(frozen=True, eq=False)
class PublishedFormat:
    """The sparse format of a code: its arguments, in order."""

    parts: Any


class PublishedBackend(Backend):
    """A code of other authors: one head; no gradients, but for `autograd`.

    Attributes:
        packages: modules that it imports.
        source: the repository that builds them.
        on_default_stream: whether it launches on CUDA's default stream, which cannot be captured in a CUDA graph.
        timed_kernels: part of the names of the kernels that its own timer counts; all, if empty.
    """

    packages: tuple[str, ...]
    source: str
    on_default_stream = True
    timed_kernels = ""
    autograd = False
    traceable = False

    def unavailable(self, device: torch.device) -> str | None:
        try:
            for name in self.packages:
                import_module(name)
        except (ImportError, OSError) as error:
            return f"its authors' package cannot be imported ({error}); build it from {self.source}"
        return None if torch.cuda.is_available() and device.type == "cuda" else NO_GPU

    def unsupported(self, dtype: torch.dtype, head_dim: int) -> str | None:
        if dtype != self.computes_in or head_dim not in WIDTHS:
            return f"it takes {self.computes_in} and heads of 64, 128 or 256 columns, got {dtype} and {head_dim}"
        return None

    def build(self, graph: Any, device: torch.device, inputs: InputSpec, perm: torch.Tensor | None = None) -> Any:
        if graph.shape[0] != graph.shape[1]:
            raise UnsupportedGraphError(
                f"unsupported: a square graph is needed, got {graph.shape[0]} x {graph.shape[1]}"
            )
        indptr, indices = canonical_csr(graph, device)
        return PublishedFormat(self.prepare(indptr.int(), indices))

    def attend(self, data: Any, call: Call) -> torch.Tensor:
        if not self.autograd:
            refuse_gradients(self.name, *call[:3])
        if self.on_default_stream and call.query.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"backend {self.name} cannot be captured: it launches on CUDA's default stream")
        if call.query.shape[1] != 1:
            raise ValueError(f"q: got {call.query.shape[1]} heads; backend {self.name} takes one")
        output = self.run(data.parts, *(tensor[:, 0].contiguous() for tensor in call[:3]), call.scale)
        return output.reshape(call.query.shape).to(call.out_dtype)

    def prepare(self, indptr: torch.Tensor, indices: torch.Tensor) -> Any:
        """The format of a CSR pattern: indptr [N + 1], indices [nnz], both int32."""
        raise NotImplementedError

    def run(self, data: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """[N, d] of q, k and v [N, d]."""
        raise NotImplementedError


class PublishedFused3SBackend(PublishedBackend):
    name = "published_fused3s"
    summary = "the Fused3S authors' own kernel (F3S, scheduled and permuted); NVIDIA GPU"
    packages = ("F3S",)
    timed_kernels = "f3sKernel"  # not torch.zeros of its output, nor the padding below
    source = "github.com/HPCForge/Fused3S, commit 3480ef4"

    def prepare(self, indptr: torch.Tensor, indices: torch.Tensor) -> Any:
        nodes, edges = len(indptr) - 1, len(indices)
        # It counts the edges after the 32nd of a row to the first row of the window on graphs of more than 1,024 nodes
        # (fill_edgeToRow steps by gridDim.x), unless the rows are filled in here.
        rows = rows_of_edges(indptr.long(), edges).int()
        scratch = [indices.new_zeros(-(-nodes // 16)), indices.new_zeros(edges), rows]
        offsets, order, _, _, _, columns, bitmaps, _ = import_module("F3S").preprocess_gpu(
            indices, indptr, nodes, 16, 16, *scratch
        )
        return offsets, order, columns, bitmaps

    def run(self, data: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        nodes = len(query)
        query = torch.nn.functional.pad(query, (0, 0, 0, -nodes % 16))  # it reads whole windows of 16 rows
        attend = import_module("F3S").f3s_1tb1rw_scheduled_permuteV_scaleQK
        return attend(*data, nodes, query, key, value, 1 / scale, WARPS)[1]  # it divides the scores


class PublishedFlashSparseBackend(PublishedBackend):
    summary = "the FlashSparse authors' own kernels; NVIDIA GPU"
    packages = ("FS_Block", "FS_SDDMM", "FS_SpMM", "torch_geometric.utils")
    source = "github.com/ParCIS/FlashSparse, commit 1687646"

    def __init__(self, stable: bool) -> None:
        self.name, self._stable = f"published_flashsparse_{'stable' if stable else 'naive'}", stable

    def prepare(self, indptr: torch.Tensor, indices: torch.Tensor) -> Any:
        nodes = len(indptr) - 1
        padded = torch.nn.functional.pad(indptr, (0, -nodes % 16), value=len(indices))
        build = import_module("FS_Block").blockProcess_sddmm_balance_gnn
        rows, *rest = (part.to(indptr.device) for part in build(padded.cpu(), indices.cpu(), 8, 16, 32))
        blocks = -(-int(rows.diff().max()) // 16)
        return rows, *rest, -(-blocks // 4) * 4, len(padded) - 1, indptr

    def run(self, data: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        rows, columns, stored, windows, atomic, blocks, padded, indptr = data
        spmm, query = import_module("FS_SpMM"), query * scale if scale != 1 else query
        # Each call returns its output last; some builds put the time in front.
        weight = import_module("FS_SDDMM").forward_gen_fp16_gnn(
            query.shape[1], rows, columns, stored, windows, query, key, blocks
        )[-1]
        where, sizes = (rows, columns), (padded, value.shape[1], len(value))
        if self._stable:
            import_module("torch_geometric.utils").softmax(weight[: int(indptr[-1])], ptr=indptr.long(), dim=0)
            return spmm.forward_fp16_gnn(*where, weight, windows, atomic, value, *sizes)[-1]
        weight, ones = weight.exp(), value.new_ones(len(value), 1)
        total = spmm.forward_fp16_gnn_ones(*where, weight, windows, atomic, ones, padded, 1, len(value))[-1]
        return spmm.forward_fp16_gnn(*where, weight, windows, atomic, value, *sizes)[-1] / total


class PublishedDFGNNBackend(PublishedBackend):
    summary = "the DF-GNN authors' own kernel; NVIDIA GPU"
    packages = ("fused_gtconv",)
    source = "github.com/paoxiaode/DF-GNN, commit ca6cf42"
    computes_in = torch.float32

    def __init__(self, kind: str) -> None:
        self.name, self._kind = f"published_dfgnn_{kind}", kind

    def prepare(self, indptr: torch.Tensor, indices: torch.Tensor) -> Any:
        ones = torch.ones(len(indices), device=indices.device)
        if self._kind == "tiling":
            return indptr, indices, ones, 128
        floats = WARPS * int(indptr.diff().max())  # the scores of the rows of a block
        if 4 * floats > HYPER_BYTES:
            raise UnsupportedGraphError(
                f"unsupported: the longest row takes {4 * floats} bytes of shared memory a block"
            )
        return indptr, indices, rows_of_edges(indptr.long()).int(), ones, floats

    def run(self, data: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        attend = getattr(import_module("fused_gtconv"), f"gt_{self._kind}_inference")
        query = query * scale if scale != 1 else query
        return attend(*data, *(tensor.unsqueeze(1) for tensor in (query, key, value)))[0]


class TurboGNNBackend(PublishedBackend):
    name = "turbo_gnn"
    summary = "Turbo-GNN's graph attention; NVIDIA GPU"
    packages = ("turbo_gnn",)
    source = "github.com/Abusagit/Turbo-GNN, commit 5a883d2"
    on_default_stream = False
    autograd = True

    def prepare(self, indptr: torch.Tensor, indices: torch.Tensor) -> Any:
        back = transposed(indptr, indices, 2 * (len(indptr) - 1,))
        graph = import_module("turbo_gnn").AdjacencyForwardBackwardWithNodeBuckets
        return graph.from_csr(indptr, indices, back.indptr.int(), back.indices.int())

    def run(self, data: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        # In its convention a row has a key and gathers the queries of its neighbours.
        rows, gathered, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        return import_module("turbo_gnn").graph_transformer_aggr(data, rows, Q=gathered, K=rows, V=value, scale=scale)


BACKENDS = (
    PublishedFused3SBackend(),
    PublishedFlashSparseBackend(stable=False),
    PublishedFlashSparseBackend(stable=True),
    PublishedDFGNNBackend("tiling"),
    PublishedDFGNNBackend("hyper"),
    TurboGNNBackend(),
)
