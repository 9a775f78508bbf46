"""Times of the backward pass of attention kernels, beside those of the forward pass that keeps the LSE.

Rows differ in `region`: forward, or backward, which is all kernels from the gradient of the output to those of q, k and
v. Launched back to back with the L2 cache warm, as in `bench.kernels`, both passes by turns, so that their ratio is of
one clock; the format of both passes is built once. Inputs and the gradient of the output are normal random numbers. The
gradients of every row are compared with float64 before a time is kept: twice the error of plain torch in the same type
is allowed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

import kernels
from baselines import REGISTRY
from bench.gradients import Gradients, float64_gradients, largest_gradient_error, torch_gradients
from bench.kernels import make_cell, refuse_impossible
from bench.records import Row
from bench.runner import Cell, GraphBench, UnsupportedInputsError
from bench.timers import Spread, peak_memory_mib, reset_peak_memory, time_kernels_by_turns
from bench.traffic import gathered_bytes, gathered_columns
from configs.bench_schema import BenchConfig, Shape
from kernels.formats.csr import as_tensor, csr_from_edges
from kernels.formats.edge_list import EdgeList
from kernels.formats.edges import canonical_csr, rows_of_edges

GRADIENTS = frozenset(("query", "key", "value"))
ALLOWED_OVER_TORCH = 2.0  # error over that of plain torch


@dataclass(frozen=True, eq=False)
class Problem:
    """Inputs of one shape, the correct gradients, and the error of plain torch in the inputs' type."""

    shape: Shape
    inputs: tuple[torch.Tensor, ...]  # q, k, v and the gradient of the output: [N, H, d] float16
    expected: Gradients
    torch_error: float


class BackwardBench(GraphBench):
    """Both passes of every backend with every shape of heads."""

    bench = "backward"

    @staticmethod
    def cells(config: BenchConfig) -> list[Cell]:
        kernel = config.kernel
        alone = [make_cell(name, shape, "none", config) for shape in kernel.head_shapes for name in kernel.backends]
        return [replace(cell, region=one) for cell in alone for one in ("forward", "backward")]

    @cached_property
    def _problems(self) -> dict[Shape, Problem]:
        return {}

    def problem(self, shape: Shape) -> Problem:
        """Problem of a shape; the problems of other shapes are freed."""
        if shape not in self._problems:
            self._problems.clear()
            generator = torch.Generator(self.device).manual_seed(0)
            size = (self.pattern.shape[0], *shape)
            inputs = tuple(torch.randn(size, generator=generator, device=self.device).half() for _ in range(4))
            scale = self.config.measure.scale_of(shape.dim)
            expected = float64_gradients(*inputs, self.pattern, scale)
            error = largest_gradient_error(torch_gradients(*inputs, self.pattern, scale), expected)
            self._problems[shape] = Problem(shape, inputs, expected, error)
        return self._problems[shape]

    def measure_cell(self, cell: Cell) -> list[Row]:
        refuse_impossible(cell, self.device)
        backend = REGISTRY[cell.backend]
        if not backend.has_backward:
            raise UnsupportedInputsError("it has no backward pass of its own")
        problem = self.problem(Shape(cell.heads, cell.dim))
        query, key, value, grad_output = problem.inputs
        scale = self.config.measure.scale_of(cell.dim)
        plan = kernels.plan_attention(
            self.pattern,
            backend=cell.backend,
            device=self.device,
            dtype=query.dtype,
            head_dim=cell.dim,
            num_heads=cell.heads,
            backward=True,
        )

        def forward() -> tuple[torch.Tensor, torch.Tensor]:
            return plan(query, key, value, scale=scale, return_lse=True)

        output, lse = forward()

        def backward() -> Gradients:
            found = plan.backward(grad_output, query, key, value, output, lse, scale=scale)
            return found.query, found.key, found.value

        error = largest_gradient_error(backward(), problem.expected)
        runs: dict[str, Callable] = {"forward": forward, "backward": backward}
        reset_peak_memory(self.device)
        before = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        runs[cell.region]()
        memory = peak_memory_mib(self.device) - before / 2**20
        spreads, timer = time_kernels_by_turns(runs, device=self.device, repeats=self.config.measure.repeats)
        allowed = ALLOWED_OVER_TORCH * problem.torch_error
        checked = {"status": "ok", "relative_error": error}
        if not error <= allowed:  # NaN is wrong too
            reason = f"error {error:.1e} of a row's gradient, allowed {allowed:.1e}"
            checked = {"status": "wrong", "reason": reason, "relative_error": error}
        note = f"{timer}; scale {scale:g}; plain torch's gradients have an error of {problem.torch_error:.1e}"
        rows = [self.row(cell, **spreads[cell.region].columns(), **checked, note=note)]
        untimed = replace(cell, launch="none", plan="none")
        note = "one run, without inputs and format; torch's allocator"
        memory_row = Spread.of([memory]).columns()
        rows.append(self.row(untimed, metric="peak_memory", unit="MiB", **memory_row, **checked, note=note))
        for metric, size in self._traffic(cell).items():
            rows.append(self.row(untimed, metric=metric, unit="B", **Spread.of([size]).columns(), status="unchecked"))
        return rows

    def _traffic(self, cell: Cell) -> dict[str, int]:
        """Bytes of a pass by the model of `bench.traffic`. Backward: over A, K and V are gathered for dQ; over its
        transpose Q and dO, for dK and dV; besides, rows of eight tensors, with O for the row sums of dO * O."""
        dtype, width, num_rows = cell.torch_dtype, cell.heads * cell.dim, self.pattern.shape[0]
        columns, tensors = self.gathered_columns[0], 2
        if cell.region == "backward":
            columns, tensors = sum(self.gathered_columns), 8
        return {
            "gathered_bytes": gathered_bytes(columns, width, dtype),
            "compulsory_bytes": tensors * num_rows * width * dtype.itemsize,
        }

    @cached_property
    def gathered_columns(self) -> tuple[int, int]:
        """Of A, and of its transpose."""
        pattern = self.pattern
        indptr, indices = canonical_csr(pattern, as_tensor(pattern.indices).device)
        reversed_edges = torch.stack([rows_of_edges(indptr), indices.long()])
        back = csr_from_edges(EdgeList(reversed_edges, pattern.shape[::-1]))
        return gathered_columns(pattern), gathered_columns(back)
