"""Times of a training step of the Graph Transformer: forward pass, backward pass and optimiser.

Features are random where a graph has none, labels always; every node has one. The gradients of all projections to q, k
and v in the first step, which come through the attention, are compared with those of float32 with a slow attention.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import kernels
from baselines import REGISTRY
from bench.models import cast
from bench.records import Bench, Row
from bench.runner import FLOAT32, Cell, GraphBench, UnsupportedInputsError
from bench.timers import Spread, pass_times, peak_memory_mib, reset_peak_memory, time_rounds
from configs.schema import TrainingConfig
from configs.training_bench_schema import TrainingBenchConfig
from models import GraphInputs, GraphTransformer
from models.fast import training_forward
from training.optimiser import make_optimiser
from training.precision import WorkingCopy
from training.step import CapturedStep, Step
from training.tasks import Batch

EXPECTED_BACKEND = "csr_unfused"
CLASSES = 7
# Norm of the difference over the norm of the gradients: 16-bit layers against float32.
ALLOWED = {"float16": 0.05, "bfloat16": 0.2, "float32": 1e-3}


class TrainingBench(GraphBench):
    """Every backend in every mode, with every number of heads."""

    bench: Bench = "training"

    @property
    def blocks(self) -> int:
        return self.config.model.blocks

    @staticmethod
    def cells(config: TrainingBenchConfig) -> list[Cell]:
        model = config.model
        found = []
        for heads in model.heads:
            for backend, modes in config.run.modes.items():
                for mode in modes:
                    dense, _, graph = mode.partition("+")
                    options = {"dense": dense, "launch": "cuda_graph" if graph else "eager", "region": "step"}
                    precision = model.precision
                    found.append(Cell(model.dim, backend, precision, precision, "model", heads=heads, **options))
        return found

    def measure_cell(self, cell: Cell) -> list[Row]:
        backend = REGISTRY[cell.backend]
        if reason := backend.unavailable(self.device):
            raise kernels.BackendUnavailableError(reason)
        if not backend.trains:
            raise UnsupportedInputsError("it has no backward pass")
        expected = self.expected(cell.heads)
        reset_peak_memory(self.device)
        step, batch = self._step(cell, cell.torch_dtype, cell.backend)
        run = CapturedStep(step, batch) if cell.launch == "cuda_graph" else step
        run(batch)
        found = _gradients(step)
        error = ((found - expected).norm() / expected.norm()).item()
        memory = peak_memory_mib(self.device)
        first = pass_times(lambda: run(batch), device=self.device, repeats=1)
        measure = self.config.measure
        passes = max(1, min(measure.repeats, int(measure.budget_ms / first[0])))
        rounds = time_rounds(lambda: pass_times(lambda: run(batch), device=self.device, repeats=passes))
        checked: dict[str, Any] = {"status": "ok", "relative_error": error}
        if not error <= ALLOWED[cell.dtype]:  # NaN is wrong too
            reason = f"relative error {error:.1e} of gradients, allowed {ALLOWED[cell.dtype]:.1e}"
            checked |= {"status": "wrong", "reason": reason}
        note = f"error: of the gradients of the QKV projections in the first step{rounds.warning}"
        contents = "weights, optimiser, inputs, format and a step; torch's allocator"
        return [
            self.row(cell, **rounds.columns(), **checked, note=note),
            self.row(cell, metric="peak_memory", unit="MiB", **Spread.of([memory]).columns(), **checked, note=contents),
        ]

    @cached_property
    def _expected(self) -> dict[int, Tensor]:
        return {}

    def expected(self, heads: int) -> Tensor:
        """Gradients in float32."""
        if heads not in self._expected:
            options = {"heads": heads, "dense": "plain"}
            cell = Cell(self.config.model.dim, EXPECTED_BACKEND, "float32", "float32", "model", **options)
            step, batch = self._step(cell, torch.float32, EXPECTED_BACKEND)
            step(batch)
            self._expected[heads] = _gradients(step)
        return self._expected[heads]

    def _step(self, cell: Cell, precision: torch.dtype, backend: str) -> tuple[Step, Batch]:
        config, meta = self.config, self.loaded.meta
        torch.manual_seed(config.measure.seed)
        model = GraphTransformer(
            in_features=meta.feature_cardinalities or meta.feature_dim,
            num_classes=CLASSES,
            dim=cell.dim,
            heads=cell.heads,
            blocks=config.model.blocks,
        ).to(self.device)
        dtype = torch.float32 if backend in FLOAT32 and backend != "pyg" else precision
        plan = kernels.plan_attention(
            self.pattern,
            backend=backend,
            device=self.device,
            dtype=dtype,
            head_dim=cell.dim // cell.heads,
            num_heads=cell.heads,
            backward=True,
        )
        working = WorkingCopy(model, precision)
        attention = plan if dtype == precision else cast(plan, dtype)
        inputs: GraphInputs = working.model.prepare(self.loaded.graph, attention)
        optimiser = make_optimiser(working.vectors, TrainingConfig(), self.device)
        forward = training_forward(working.model, cell.dense)
        return Step(model, working, forward, optimiser, 1.0), Batch(inputs, self.labels)

    @cached_property
    def labels(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(CLASSES, (self.loaded.meta.num_nodes,), generator=generator).to(self.device)


def _gradients(step: Step) -> Tensor:
    """Gradients of the QKV projections of all blocks after the last step, clipped."""
    return torch.cat([block.qkv.weight.grad.flatten() for block in step.model.blocks])
