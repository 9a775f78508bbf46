"""Times of whole forward passes on a graph: widths, attention backends, and ways to run the model around them.

All layers outside attention have the precision of the configuration, whatever the backend; "tf32" is float32 under
torch.set_float32_matmul_precision("high"), in rows out_dtype tf32. The projection writes q, k and v in the type that
the backend reads (`bench.projection`); an output of another type than the layers' is cast, in the time of attention.

A time of at least 1.1 times that in which a traced pass keeps the GPU busy is set by the host, and marked as disturbed.
All cases of a width have the same weights. Logits are compared with those of a slow backend in float32 before a time
is kept.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from math import inf
from typing import Any

import torch
from torch import Tensor

import fused3s
from bench.baselines import REGISTRY
from bench.gpu_trace import trace_gpu
from bench.precision import matmul_precision
from bench.projection import with_compiled_blocks, with_projection
from bench.rounds import Rounds, time_rounds
from bench.runner import Case, Context, UnsupportedInputsError, classify
from common.records import HOST_BOUND, Row
from common.timers import Spread, pass_times, times_inside
from configs.bench import LAUNCHES, BenchConfig, Shape
from models import Attention, Execution, GraphInputs, GraphTransformer, prepare_execution
from models.inference.agreement import compare
from models.inference.attention_time import time_attention

TF32 = "tf32"
ANY_TYPE = ("pyg",)  # of the backends that compute in float32: it takes 16 bits without a conversion
# With more multiplications per block the float64 backend takes seconds a pass; float32 also checks float16.
REFERENCE_ELEMENTS = 2**31
FEW = 3  # replays of one block's attention at least; they take a fraction of a pass
FAST_REFERENCES = ("csr_unfused", "dfgnn_tiling")  # the first that is not the backend to check


def cases(config: BenchConfig, device: torch.device) -> list[Case]:
    found = []
    for precision in config.precisions:
        dtype = "float32" if precision == TF32 else precision
        for shape in config.head_shapes:
            case = Case("", "model", shape.width, dtype, precision, heads=shape.heads, blocks=config.blocks)
            for backend, modes in config.modes.items():
                for dense, _, launch in (mode.partition("+") for mode in modes):
                    found.append(replace(case, backend=backend, dense=dense, launch=LAUNCHES[launch]))
    return found


def measure(context: Context, case: Case) -> list[Row]:
    shape = Shape(case.heads, case.dim // case.heads)
    width = context.keep("width", shape, lambda: Width(context, shape))
    identity = (shape, case.backend, case.dtype)  # planned when its first case is measured, once the last plan is freed
    planned = context.keep("planned", identity, lambda: cache(partial(attention_of, width, case)))
    try:
        with torch.inference_mode():
            width.expected(case.backend)  # in float32, not in TF32, and before a CUDA graph takes its memory
            with matmul_precision("high" if is_tf32(case) else "highest"):
                return _rows(context, case, width, planned())
    finally:
        if "compiled" in (case.dense, case.launch):
            torch.compiler.reset()  # torch keeps a few versions of what it compiled; no case needs an older one


def _rows(context: Context, case: Case, width: "Width", attention: Attention) -> list[Row]:
    captured, device, config = case.launch == "cuda_graph", context.device, context.config
    dtype = computed_dtype(case)
    model = width.model(case.torch_dtype, dtype)
    if case.launch == "compiled":
        with torch.inference_mode(False):  # as for `Width.model`
            model = with_compiled_blocks(model)
    inputs = width.inputs(model, attention)
    expected, checked_by = width.expected(case.backend)
    execution = prepare_execution(model, inputs, backend=case.backend, dense=case.dense, cuda_graph=captured)
    outputs: list[Tensor] = []
    first = pass_times(lambda: outputs.append(execution.run()), device=device, repeats=1)
    logits = outputs.pop().clone()
    rounded = [torch.float16] if is_tf32(case) else []  # TF32 has as many digits
    agreement = compare(logits, expected, model.dtype, dtype, *rounded)
    checked: dict[str, Any] = {"status": "ok", "relative_error": agreement.relative}
    if not agreement.passed:
        checked |= {"status": "wrong", "reason": agreement.describe()}

    def row(note: str, measured: dict[str, Any], **columns: str) -> Row:
        return context.row(case, **(checked | {"note": note} | measured | columns))

    if not captured:  # the first pass may have compiled; a capture has run the pass before
        first = pass_times(execution.run, device=device, repeats=1)
    passes = max(1, min(config.repeats, int(config.budget_ms / first[0])))
    first_round = first if passes == 1 else None
    set_by_host: dict[str, Any] = {}
    how, inside = "", {}
    if case.launch == "eager":
        forward, of_attention = time_eager(execution, device=device, repeats=passes, first=first_round)
        how, inside = f"CUDA events around each call{of_attention.warning}", of_attention.columns()
    else:
        forward = time_rounds(lambda: pass_times(execution.run, device=device, repeats=passes), first_round)
    if captured:
        how, inside = "replays of one block's, times the blocks", _replays(execution, device, max(FEW, passes))
    elif forward.spread.median >= HOST_BOUND * busy_ms(execution.run, device):
        set_by_host = {"disturbed": "yes"}
    rows = [row(f"checked against {checked_by}{forward.warning}", forward.columns() | set_by_host)]
    if inside:  # inside compiled code there are no marks
        rows.append(row(how, inside | set_by_host, scope="attention"))
    return rows


def busy_ms(run: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of a pass in which the GPU computes; infinite on a CPU, where the host sets every time."""
    return trace_gpu(run).busy_ms if device.type == "cuda" else inf


def time_eager(
    execution: Execution, *, device: torch.device, repeats: int, first: list[float] | None
) -> tuple[Rounds, Rounds]:
    """Milliseconds of an eager pass, and of its attention with launch gaps.

    Args:
        repeats: passes of a round. 1 says that a pass is so long that marks inside cost nothing: one pass then gives
            both times.
        first: milliseconds of a round that was timed before.
    """
    attention = execution.inputs.attention
    if repeats > 1:
        forward = time_rounds(lambda: pass_times(execution.eager, device=device, repeats=repeats), first)
        timing: dict[str, Any] = {"device": device, "repeats": repeats // 2}
        return forward, time_rounds(lambda: times_inside(execution.eager, attention, **timing)[0])
    in_attention = []

    def time_round() -> list[float]:
        inside, whole = times_inside(execution.eager, attention, device=device, repeats=1)
        in_attention.extend(inside)
        return whole

    forward = time_rounds(time_round, first)
    return forward, replace(forward, spread=Spread.of(in_attention))


def _replays(execution: Execution, device: torch.device, repeats: int) -> dict[str, Any]:
    """Columns of the attention beside a CUDA graph, which keeps the memory of a pass: there may be too little."""
    try:
        return time_attention(execution, device=device, repeats=repeats).columns()
    except torch.OutOfMemoryError as error:
        status, reason = classify(error)
        return {"status": status, "reason": reason, "relative_error": None}


class Width:
    """The model of one width in every precision, always with the same weights, and its expected output."""

    def __init__(self, context: Context, shape: Shape) -> None:
        self.context, self.shape = context, shape
        self._models: dict[tuple[torch.dtype, torch.dtype], GraphTransformer] = {}
        self._expected: dict[str, tuple[Tensor, str]] = {}

    @torch.inference_mode(False)  # torch.compile does not take inference tensors as parameters
    def model(self, dtype: torch.dtype, reads: torch.dtype | None = None) -> GraphTransformer:
        """Layers in `dtype`, and q, k and v in the type `reads` (None: in that of the layers)."""
        types = (dtype, reads or dtype)
        if types[0] != types[1] and types not in self._models:
            self._models[types] = with_projection(self.model(dtype), types[1])
        if types not in self._models:
            meta, config = self.context.loaded.meta, self.context.config
            torch.manual_seed(config.seed)
            made = GraphTransformer(
                in_features=meta.feature_cardinalities or meta.feature_dim,
                num_classes=meta.num_classes,
                task=meta.task,
                dim=self.shape.width,
                heads=self.shape.heads,
                blocks=config.blocks,
            )
            self._models[types] = made.to(self.context.device).cast(dtype).eval()
        return self._models[types]

    def inputs(self, model: GraphTransformer, attention: Any) -> GraphInputs:
        """Inputs for a model of any width: the features are put on the device once per precision."""
        loaded = self.context.loaded
        features = self.context.keep(f"{model.dtype}", None, lambda: model.prepare(loaded.graph, attention))
        return replace(features, attention=attention)

    def plan(self, backend: str, dtype: torch.dtype, out_dtype: torch.dtype) -> Attention:
        """Attention that computes in `dtype` and writes `out_dtype`, with its format built.

        Raises:
            BackendUnavailableError, UnsupportedInputsError, UnsupportedGraphError: the backend cannot run.
        """
        context, heads, dim = self.context, self.shape.heads, self.shape.dim
        if reason := REGISTRY[backend].unavailable(context.device):
            raise fused3s.BackendUnavailableError(reason)
        if reason := REGISTRY[backend].unsupported(dtype, dim):
            raise UnsupportedInputsError(reason)
        inputs = {"dtype": dtype, "head_dim": dim, "num_heads": heads, "out_dtype": written_dtype(dtype, out_dtype)}
        return fused3s.plan_attention(context.pattern, backend=backend, device=context.device, **inputs)

    def expected(self, checked_backend: str) -> tuple[Tensor, str]:
        """Logits in float32 by plain modules, with an attention other than `checked_backend`'s, and that backend."""
        small = self.context.loaded.meta.num_edges * self.shape.width <= REFERENCE_ELEMENTS
        slow = [name for name in FAST_REFERENCES if name != checked_backend]
        backend = "reference" if small else slow[0]
        if backend not in self._expected:
            model = self.model(torch.float32)
            try:
                attention = self.plan(backend, torch.float32, torch.float32)
                self._expected[backend] = model(self.inputs(model, attention)), backend
            except torch.OutOfMemoryError as error:
                text = f"the reference {backend}, not {checked_backend}, ran out of memory: {error}"
                raise MemoryError(text) from None
        return self._expected[backend]


def computed_dtype(case: Case) -> torch.dtype:
    """Type that the attention of a case computes in."""
    return case.torch_dtype if case.backend in ANY_TYPE else attention_dtype(case.backend, case.torch_dtype)


def attention_of(width: Width, case: Case) -> Attention:
    dtype, model_dtype = computed_dtype(case), case.torch_dtype
    plan = width.plan(case.backend, dtype, model_dtype)
    return plan if dtype == model_dtype else cast(plan, dtype, model_dtype)


def attention_dtype(backend: str, model_dtype: torch.dtype) -> torch.dtype:
    """Type that a backend computes in: float32 if that is its own, else the model's if that has 16 bits."""
    own = REGISTRY[backend].computes_in
    return own if torch.float32 in (own, model_dtype) else model_dtype


def written_dtype(dtype: torch.dtype, out_dtype: torch.dtype) -> torch.dtype:
    """Type that attention in `dtype` writes for a result in `out_dtype`: kernels write float32 or their own type."""
    return out_dtype if out_dtype == torch.float32 else dtype


def is_tf32(case: Case) -> bool:
    return case.out_dtype == TF32


def cast(attention: Attention, dtype: torch.dtype, model_dtype: torch.dtype) -> Attention:
    """`attention` of q, k and v in `dtype`, with an output in the type of the layers."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, out_dtype: torch.dtype) -> Tensor:
        written = written_dtype(dtype, model_dtype)
        return attention(q, k, v, scale=scale, out_dtype=written).to(model_dtype)

    return attend
