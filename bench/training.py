"""Times of a training step of the Graph Transformer: forward pass, backward pass and optimiser.

Features are random where a graph has none, labels always; every node has one. The gradients of all projections to q, k
and v in the first step, which come through the attention, are compared with those of float32 with a slow attention.

`dtype` is the precision of the layers. Attention computes in it, too, if its backend takes it without a conversion.
Variant `float32_attention`, of a mode of "pyg+float32": PyG's attention computes in float32, as the paper's baseline.
"""

from dataclasses import replace

import torch
from torch import Tensor

import fused3s
from bench.baselines import REGISTRY
from bench.checks import checked_columns
from bench.models import ANY_TYPE, cast
from bench.runner import Case, Context, UnsupportedInputsError
from common.records import NONE, Row
from common.timers import Spread, pass_times, peak_memory_mib, reset_peak_memory, time_rounds
from configs.bench import WITH_FLOAT32, BenchConfig
from configs.schema import TrainingConfig
from models import GraphInputs, GraphTransformer
from models.fast import training_forward
from models.training.losses import cross_entropy
from models.training.optimiser import make_optimiser
from models.training.precision import WorkingCopy
from models.training.step import CapturedStep, Step
from models.training.tasks import Batch

EXPECTED_BACKEND = "csr_unfused"
CLASSES = 7
# Norm of the difference over the norm of the gradients: 16-bit layers against float32.
ALLOWED = {"float16": 0.05, "bfloat16": 0.2, "float32": 1e-3}


def cases(config: BenchConfig, device: torch.device) -> list[Case]:
    found = []
    for precision in config.precisions:
        for shape in config.head_shapes:
            case = Case("", "model", shape.width, precision, precision, heads=shape.heads, blocks=config.blocks)
            for name, modes in config.modes.items():
                backend = name.removesuffix(WITH_FLOAT32)
                variant = NONE if backend == name else "float32_attention"
                for dense, _, graph in (mode.partition("+") for mode in modes):
                    options = {"dense": dense, "launch": "cuda_graph" if graph else "eager", "region": "step"}
                    found.append(replace(case, backend=backend, variant=variant, **options))
    return found


def measure(context: Context, case: Case) -> list[Row]:
    backend, device, config = REGISTRY[case.backend], context.device, context.config
    if reason := backend.unavailable(device):
        raise fused3s.BackendUnavailableError(reason)
    if not backend.trains:
        raise UnsupportedInputsError("it has no backward pass")
    expected = context.keep("expected", (case.heads, case.dim), lambda: expected_gradients(context, case))
    reset_peak_memory(device)
    step, batch = make_step(context, case)
    run = CapturedStep(step, batch) if case.launch == "cuda_graph" else step
    run(batch)
    error = ((gradients(step) - expected).norm() / expected.norm()).item()
    memory = Spread.of([peak_memory_mib(device)])
    first = pass_times(lambda: run(batch), device=device, repeats=1)
    passes = max(1, min(config.repeats, int(config.budget_ms / first[0])))
    rounds = time_rounds(lambda: pass_times(lambda: run(batch), device=device, repeats=passes))
    checked = checked_columns(error, case.torch_dtype, ALLOWED[case.dtype])
    note = f"error: of the gradients of the QKV projections in the first step{rounds.warning}"
    contents = "weights, optimiser, inputs, format and a step; torch's allocator"
    return [
        context.row(case, **rounds.columns(), **checked, note=note),
        context.row(case, metric="peak_memory", unit="MiB", **memory.columns(), **checked, note=contents),
    ]


def expected_gradients(context: Context, case: Case) -> Tensor:
    """Gradients in float32."""
    exact = replace(case, backend=EXPECTED_BACKEND, dtype="float32", dense="plain", launch="eager", variant=NONE)
    step, batch = make_step(context, exact)
    step(batch)
    return gradients(step)


def make_step(context: Context, case: Case) -> tuple[Step, Batch]:
    config, meta, device, precision = context.config, context.loaded.meta, context.device, case.torch_dtype
    torch.manual_seed(config.seed)
    model = GraphTransformer(
        in_features=meta.feature_cardinalities or meta.feature_dim,
        num_classes=CLASSES,
        dim=case.dim,
        heads=case.heads,
        blocks=config.blocks,
    ).to(device)
    own = REGISTRY[case.backend].computes_in
    takes_any = own != torch.float32 or case.backend in ANY_TYPE
    dtype = precision if takes_any and case.variant == NONE else torch.float32
    inputs = {"dtype": dtype, "head_dim": case.dim // case.heads, "num_heads": case.heads, "backward": True}
    plan = fused3s.plan_attention(context.pattern, backend=case.backend, device=device, **inputs)
    working = WorkingCopy(model, precision)
    attention = plan if dtype == precision else cast(plan, dtype, precision)
    prepared: GraphInputs = working.model.prepare(context.loaded.graph, attention)
    optimiser = make_optimiser(working.vectors, TrainingConfig(), device)
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (meta.num_nodes,), generator=generator).to(device)
    forward = training_forward(working.model, case.dense)
    return Step(model, working, forward, optimiser, 1.0, cross_entropy), Batch(prepared, labels)


def gradients(step: Step) -> Tensor:
    """Gradients of the QKV projections of all blocks after the last step, clipped."""
    return torch.cat([block.qkv.weight.grad.flatten() for block in step.model.blocks])
