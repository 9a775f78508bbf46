"""Times of training steps as people run them: a layer of PyG, and ours in its place with nothing else changed.

A step is forward pass, loss, backward pass and fused AdamW of a few layers with LayerNorm and ReLU between them, the
host included: rows of steps between two synchronisations, of both layers by turns. Batches are drawn before timing and
are on the GPU; every step of a workload with new graphs gets its edge_index as a tensor of its own, cloned before the
row of steps begins, for both layers. A step of inference (`region` "forward") is a forward pass of the model in
evaluation mode, without gradients. A captured loop (`bench.captured_loop`) copies each batch and plans it within the
timed steps.

    backend  layer
    auto     ours, such as fused3s.nn.TransformerConv; the note names the attention backend that ran
    pyg      PyG's, such as torch_geometric.nn.TransformerConv

    launch           step
    eager            as it stands
    compiled         after torch.compile(model), with dynamic=True where each step has another graph
    reduce_overhead  the same with mode="reduce-overhead"; only of a graph that stays
    cuda_graph       the loop captured; only ours, where each step has another graph

`dtype` is the type of parameters and features, `out_dtype` that of q, k and v: bfloat16 over float32 under autocast;
tf32 under torch.set_float32_matmul_precision("high"). `nodes` and `nnz` are rows of x and edges of all blocks of a
step, the mean over the batches. `peak_memory` is that of torch's allocator in the first steps, with parameters,
optimiser and a batch.

Of an eager layer, the output and the gradients of its weights on the first block are compared with PyG's layer in
float64; of other launches the output of the whole model, on two batches. A time counts only if they agree. PyG's own
error is recorded in the same way: its time stays the baseline where it is large, since the work is the same.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

import fused3s.nn
from bench.baselines import REGISTRY
from bench.captured_loop import captured_loop
from bench.checks import checked_columns, largest_row_error
from bench.gpu_trace import trace_gpu
from bench.layer_batches import LayerBatch, draw_batches
from bench.layer_model import (
    TYPES,
    InferenceStep,
    LayerErrors,
    LayerModel,
    TrainingStep,
    Types,
    first_layer_errors,
    run_in_parts,
)
from bench.precision import matmul_precision
from bench.rounds import time_rounds_by_turns
from bench.runner import Case, Context
from common.columns import dtype_name
from common.records import NONE, Row
from common.timers import Spread, peak_memory_mib, reset_peak_memory
from configs.bench import BenchConfig
from fused3s import BackendUnavailableError, plan_attention

LAYERS = {  # names of PyG's layers, and ours
    "transformer": ("TransformerConv", fused3s.nn.TransformerConv),
    "gat": ("GATConv", fused3s.nn.GATConv),
    "gatv2": ("GATv2Conv", fused3s.nn.GATv2Conv),
}
Name = tuple[str, str]  # backend and launch
MODES = {"compiled": None, "reduce_overhead": "reduce-overhead"}  # of torch.compile, by launch
FEWEST_STEPS = 4  # in a row: the host of a slow step runs ahead of the GPU as in a loop
CHECKED_BATCHES = 2  # of a whole model: the one it was captured for, and another
# Largest error of a row, and of all gradients: of one layer, by type of q, k and v. float32: of
# torch.get_float32_matmul_precision() "highest".
ALLOWED = {"float32": LayerErrors(1e-4, 1e-4), "tf32": LayerErrors(0.01, 0.02), "bfloat16": LayerErrors(0.05, 0.1)}
ALLOWED_MODEL = {"float32": 1e-3, "tf32": 0.05, "bfloat16": 0.15}  # of a row of the whole model


def cases(config: BenchConfig, device: torch.device) -> list[Case]:
    """One for each precision; it has the rows of all layers."""
    shape = config.head_shapes[0]
    case = Case("auto", "model", shape.width, heads=shape.heads, region="step", launch=config.launches[0])
    return [
        replace(case, dtype=dtype, out_dtype=out_dtype)
        for dtype, out_dtype in (dtype_names(TYPES[precision]) for precision in config.precisions)
    ]


def begin(context: Context) -> None:
    workload = context.config.workloads[context.name]
    pyg_layer(workload.layer)  # an error before anything is measured
    batches = batches_of(context)
    context.extra = {
        "variant": context.name,
        "blocks": num_layers(context),
        "edges": f"features_{workload.edge_dim}" if workload.edge_dim else NONE,
        "plan": "rebuilt" if workload.is_new else "fixed",
        "nodes": round(sum(len(batch.x) for batch in batches) / len(batches)),
        "nnz": round(sum(batch.num_edges for batch in batches) / len(batches)),
        "graphs": workload.batch or 1,
        "region": "forward" if workload.inference else "step",
    }


def num_layers(context: Context) -> int:
    return len(context.config.workloads[context.name].fan_out) or context.config.blocks


def batches_of(context: Context) -> list[LayerBatch]:
    """On the CPU, in float32."""
    config = context.config
    options = {"layers": num_layers(context), "columns": config.head_shapes[0].width}
    options |= {"count": config.pool, "seed": config.seed}
    workload = config.workloads[context.name]
    return context.keep("batches", None, lambda: draw_batches(context.loaded, workload, **options))


@dataclass(frozen=True, eq=False)
class Side:
    """One way to run steps.

    Attributes:
        run: a step; the output of the model before it.
        check: gives columns status, reason and relative_error, and a note of what was checked and what ran.
    """

    run: Callable[[LayerBatch], Tensor]
    check: Callable[[], tuple[dict[str, Any], str]]


def measure(context: Context, case: Case) -> list[Row]:
    (types,) = (one for one in TYPES.values() if dtype_names(one) == (case.dtype, case.out_dtype))
    torch.compiler.reset()  # models of other cases count against its limit of recompilations
    with matmul_precision(types.matmul):
        return measured_sides(context, case, types)


def sides_of(context: Context) -> list[Name]:
    workload = context.config.workloads[context.name]
    launches = [one for one in context.config.launches if not (one == "reduce_overhead" and workload.is_new)]
    return [(backend, launch) for backend in ("auto", "pyg") for launch in launches] + (
        [("auto", "cuda_graph")] if workload.captured else []
    )


def measured_sides(context: Context, case: Case, types: Types) -> list[Row]:
    device = context.device
    batches = [batch.to(device, types.parameters) for batch in batches_of(context)]
    models = Models(context, num_layers(context))
    sides: dict[Name, Side] = {}
    rows: dict[Name, list[Row]] = {}
    checked: dict[Name, tuple[dict[str, Any], str]] = {}
    for name in sides_of(context):
        on_gpu = device.type == "cuda"
        besides = torch.cuda.memory_allocated(device) if on_gpu else 0
        reset_peak_memory(device)
        try:
            side = make_side(context, models, batches, types, name)
            for batch in batches:  # compiles kernels and fills torch's cache of memory
                side.run(renewed(context, batch))
            memory = peak_memory_mib(device) + (batches[0].nbytes - besides) / 2**20
            checked[name] = columns, note = side.check()
            sides[name], rows[name] = side, []
            if on_gpu:
                peak = Spread.of([memory]).columns() | {"metric": "peak_memory", "unit": "MiB"}
                rows[name].append(context.row(of_side(case, name), **peak, **columns, note=note))
        except Exception as error:  # the others are still timed
            side = None  # its memory is needed
            rows[name] = [context.failed(of_side(case, name), error)]
            gc.collect()
            torch.cuda.empty_cache()
    timed = time_sides(context, sides, batches) if sides else {}
    for name, side in sides.items():
        rounds, steps = timed[name]
        own, (columns, note) = of_side(case, name), checked[name]
        note = f"{note}; {steps} steps in a row, by turns{rounds.warning}"
        rows[name].insert(0, context.row(own, **rounds.columns(), **columns, note=note))
        if device.type == "cuda":
            try:
                rows[name].append(busy_row(context, own, side, columns, batches))
            except Exception as error:  # the times stay
                rows[name].append(context.failed(own, error, metric="gpu_busy"))
    return [row for found in rows.values() for row in found]


def dtype_names(types: Types) -> tuple[str, str]:
    return dtype_name(types.parameters), "tf32" if types.matmul == "high" else dtype_name(types.inputs)


def of_side(case: Case, name: Name) -> Case:
    return replace(case, backend=name[0], launch=name[1])


def renewed(context: Context, batch: LayerBatch) -> LayerBatch:
    return batch.with_new_edges() if context.config.workloads[context.name].is_new else batch


def time_sides(context: Context, sides: dict[Name, Side], batches: list[LayerBatch]) -> dict:
    """Rounds and steps in a row, by side."""
    turns, config = {name: cycle(batches) for name in sides}, context.config

    def wait() -> None:
        if context.device.type == "cuda":
            torch.cuda.synchronize(context.device)

    def row_of_steps(name: Name, steps: int) -> float:
        """Milliseconds of a step."""
        own = [renewed(context, next(turns[name])) for _ in range(steps)]
        run = sides[name].run
        wait()
        start = time.perf_counter()
        for batch in own:
            run(batch)
        wait()
        return (time.perf_counter() - start) * 1e3 / steps

    fewest = min(FEWEST_STEPS, config.steps)
    steps = {name: max(fewest, min(config.steps, int(config.budget_ms / row_of_steps(name, fewest)))) for name in sides}

    def time_round() -> dict[Name, list[float]]:
        times: dict[Name, list[float]] = {name: [] for name in sides}
        for _ in range(config.repeats):
            for name, found in times.items():
                found.append(row_of_steps(name, steps[name]))
        return times

    gc.collect()
    return {name: (rounds, steps[name]) for name, rounds in time_rounds_by_turns(time_round).items()}


def busy_row(context: Context, case: Case, side: Side, checked: dict[str, Any], batches: list[LayerBatch]) -> Row:
    """How long a step keeps the GPU busy, the mean over all batches."""
    steps = max(FEWEST_STEPS, len(batches))
    own = [renewed(context, batches[nth % len(batches)]) for nth in range(steps)]
    busy = Spread.of([trace_gpu(lambda: [side.run(batch) for batch in own]).busy_ms / steps])
    return context.row(case, metric="gpu_busy", **busy.columns(), **checked, note=f"trace of {steps} steps")


def make_side(context: Context, models: "Models", batches: list[LayerBatch], types: Types, name: Name) -> Side:
    backend, launch = name
    layer = LAYERS[models.layer][1] if backend == "auto" else pyg_layer(models.layer)
    model = models.of(layer, types.parameters)
    workload = context.config.workloads[context.name]
    if workload.inference:
        step = InferenceStep(model, types)
    else:
        step = TrainingStep(model, types, capturable=launch == "cuda_graph")

    def check_layer() -> tuple[dict[str, Any], str]:
        if backend == "pyg":
            note = f"{layer.__name__} of torch_geometric {metadata.version('torch_geometric')}"
        else:
            note = f"{layer.__name__}, attention by {attention_backend(context, batches[0], types)}"
        errors = first_layer_errors(model.layers[0], models.exact.layers[0], batches[0], types)
        note = f"{note}; error: of the first layer's output, of its gradients {errors.gradients:.1e}"
        return checked(errors, types), note

    if launch == "eager":
        return Side(step, check_layer)
    if launch == "cuda_graph":
        run = captured_loop(step, batches)
    else:
        model.compile(mode=MODES[launch], dynamic=workload.is_new or None)

        def run(batch: LayerBatch) -> Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            return step(batch)

    def check_model() -> tuple[dict[str, Any], str]:
        errors = []
        for batch in batches[:CHECKED_BATCHES]:
            model.load_state_dict(models.exact.state_dict())  # in place: every step changes them
            models.exact.load_state_dict(model.state_dict())
            output = run(batch).float()
            with torch.no_grad():
                exact = models.exact(batch.to(context.device, torch.float64), run_in_parts)
            errors.append(largest_row_error(output, exact))
        error = max(errors, key=lambda one: (one != one, one))
        columns = checked_columns(error, types.inputs, ALLOWED_MODEL[dtype_names(types)[1]])
        return columns, "error: of the whole model's output"

    return Side(run, check_model)


def checked(errors: LayerErrors, types: Types) -> dict[str, Any]:
    """Columns status, reason and relative_error of a layer."""
    allowed = ALLOWED[dtype_names(types)[1]]
    columns: dict[str, Any] = {"status": "ok", "relative_error": errors.output}
    if not (errors.output <= allowed.output and errors.gradients <= allowed.gradients):  # NaN is wrong too
        reason = (
            f"relative error {errors.output:.1e} of a row, {errors.gradients:.1e} of the gradients; allowed "
            f"{allowed.output:.1e} and {allowed.gradients:.1e}"
        )
        columns |= {"status": "wrong", "reason": reason}
    return columns


class Models:
    """Models with the same weights.

    Attributes:
        layer: a key of LAYERS.
        exact: PyG's in float64.
    """

    def __init__(self, context: Context, layers: int) -> None:
        config, device = context.config, context.device
        workload = config.workloads[context.name]
        self.layer = workload.layer
        self._arguments = (config.head_shapes[0], layers, workload.edge_dim)
        self._device = device
        torch.manual_seed(config.seed)
        self.exact = LayerModel(pyg_layer(self.layer), *self._arguments).to(device, torch.float64)
        self._weights = {name: weight.clone() for name, weight in self.exact.state_dict().items()}

    def of(self, layer: type[nn.Module], dtype: torch.dtype) -> LayerModel:
        model = LayerModel(layer, *self._arguments).to(self._device, dtype)
        model.load_state_dict(self._weights)
        return model


def pyg_layer(name: str) -> type[nn.Module]:
    """PyG's layer for a key of LAYERS.

    Raises:
        BackendUnavailableError: PyG is not installed.
    """
    if reason := REGISTRY["pyg"].unavailable(torch.device("cpu")):
        raise BackendUnavailableError(reason)
    from torch_geometric import nn as layers

    return getattr(layers, LAYERS[name][0])


def attention_backend(context: Context, batch: LayerBatch, types: Types) -> str:
    """Attention backend that our first layer takes for a batch."""
    block, (shape, *_) = batch.blocks[0], context.config.head_shapes
    workload = context.config.workloads[context.name]
    plan = plan_attention(
        block.edge_index,
        shape=(block.num_targets, block.num_sources),
        device=batch.x.device,
        dtype=types.inputs,
        head_dim=shape.dim,
        num_heads=shape.heads,
        edge_data=workload.edge_dim is not None or workload.layer != "transformer",
        backward=True,
    )
    return plan.backend
