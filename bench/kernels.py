"""Times of attention kernels on a graph, without a model around them.

    plan     launch        l2     interval
    fixed    back_to_back  warm   up to ten runs in a row, which may overlap: `common.timers.time_kernel`
    fixed    isolated      warm   one run, the GPU idle in front of it: `common.timers.time_isolated`
    fixed    isolated      cold   the same with L2 evicted
    rebuilt  none          none   format, schedule and run at each call, from the CSR arrays on the GPU: a mask that
                                  changes at every call. CUDA events around each call, so that the host counts: it
                                  queues the steps one by one and waits for sizes in between

A row of plan "fixed" contains neither its format nor the binding of edge data to the plan. Inputs and edge data are
normal random numbers. Every row of the output is compared with float64 before a time is kept. With a fixed plan each
case also records its peak memory and the bytes of `bench.traffic`; rates are computed when drawing. Benchmark "codes",
of the authors' codes and ours, records the sum of the durations of a run's kernels alone.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

import fused3s
from bench.baselines import REGISTRY
from bench.baselines.bsb import BSB
from bench.baselines.flex_attention import graph_block_mask
from bench.baselines.fused3s_paper import launch, paper_instance
from bench.checks import checked_columns, float64_attention, largest_row_error
from bench.edge_inputs import EdgeInputs
from bench.gpu_trace import trace_gpu
from bench.rounds import time_rounds
from bench.runner import Case, Context, UnsupportedInputsError
from bench.traffic import gathered_columns
from common.columns import dtype_name
from common.records import NONE, Row
from common.timers import (
    LONG_REPEATS,
    Spread,
    l2_flusher,
    pass_times,
    peak_memory_mib,
    reset_peak_memory,
    time_isolated,
    time_kernel,
    time_passes,
)
from configs.bench import NO_EDGES, REORDERED, SWITCHES, BenchConfig, Shape
from fused3s.graph.csr import CSRPattern
from fused3s.graph.edges import canonical_csr, rows_of_edges
from fused3s.runtime.cuda_graph import CaptureError
from fused3s.runtime.jit import get_kernel

TRACES = 5  # passes whose kernels are summed
REBUILT_MS = 1000.0  # a call that builds its format is repeated for so long, but at least LONG_REPEATS times

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def cases(config: BenchConfig, device: torch.device) -> list[Case]:
    """Ordered by shape, edge data and then type: only the inputs of one type are in memory."""
    as_planned = {"fixed": {}, "rebuilt": {"plan": "rebuilt", "launch": NONE, "l2": NONE}}
    found = []
    for shape in config.head_shapes:
        for edges in config.edges:
            same_inputs = [kernel_case(name, shape, config, edges) for name in config.backends]
            found += sorted(same_inputs, key=lambda case: case.dtype == "float32")
    if config.measure == "codes":
        return [replace(case, metric="kernel_time", launch=NONE, plan=NONE) for case in found]
    return [replace(case, **as_planned[plan]) for case in found for plan in config.plans]


def kernel_case(name: str, shape: Shape, config: BenchConfig, edges: str = NO_EDGES) -> Case:
    """The case of an entry of `backends` with a fixed plan."""
    backend, variant, order = name, NONE, NONE
    if name in SWITCHES:
        backend, variant = "fused3s_paper", name
    elif name == REORDERED:
        backend, order = "fused3s", "auto"
    dtype, out_dtype = dtype_name(REGISTRY[backend].computes_in), config.out_dtype
    out_dtype = dtype if out_dtype == "input" else out_dtype
    options = {"variant": variant, "order": order, "launch": "back_to_back", "plan": "fixed", "l2": "warm"}
    heads = {"heads": shape.heads, "kv_heads": shape.kv_heads}
    return Case(backend, "kernel", shape.dim, dtype, out_dtype, **heads, edges=edges, **options)


def measure(context: Context, case: Case) -> list[Row]:
    refuse_impossible(case, context.device)
    dtype = case.torch_dtype
    problem = context.keep("problem", (case.shape, case.edges), lambda: Problem(context, case.shape, case.edges))
    inputs, expected = problem.inputs(dtype), problem.expected
    graph = context.keep("graph", None, lambda: GraphMeasures(context))  # made before memory is looked at
    on_gpu = context.device.type == "cuda"  # the peak of a CPU is of the whole process
    besides = torch.cuda.memory_allocated(context.device) - sum(tensor.nbytes for tensor in inputs) if on_gpu else 0
    given = (case, context.pattern, context.device, problem.scale)
    attention = replan(*given) if case.plan == "rebuilt" else plan(*given, problem.edges)

    def run() -> torch.Tensor:
        return attention(*inputs)

    error = largest_row_error(run(), expected)  # the first call may compile
    reset_peak_memory(context.device)
    run()
    memory = peak_memory_mib(context.device) - besides / 2**20
    checked = checked_columns(error, dtype)
    if case.plan == "rebuilt":
        return [_rebuilt_time(context, case, run, checked)]
    if case.metric == "kernel_time":
        return [_kernel_time(context, case, run, checked)]
    rows = _fixed_times(context, case, run, checked, graph)
    untimed = replace(case, launch=NONE, plan=NONE)
    note = "inputs, format and one run; torch's allocator"
    peak = Spread.of([memory]).columns()
    rows.append(context.row(untimed, metric="peak_memory", unit="MiB", **peak, **checked, note=note))
    columns = graph.gathered_columns
    if case.kv_heads:
        columns = gathered_columns(context.pattern, case.heads // case.kv_heads)
    of_data = problem.edges.to(dtype).bytes_of_values if problem.edges else 0
    elements, out_dtype = context.pattern.shape[0] * case.shape.width, getattr(torch, case.out_dtype)
    traffic = {
        "gathered_bytes": 2 * columns * case.shape.kv_width * dtype.itemsize,
        "compulsory_bytes": elements * (dtype.itemsize + out_dtype.itemsize) + of_data,
    }
    return rows + [byte_row(context, untimed, metric, size) for metric, size in traffic.items()]


def _kernel_time(context: Context, case: Case, run: Callable[[], torch.Tensor], checked: dict[str, Any]) -> Row:
    """The sum of the durations of the kernels of a run, from a trace: no launch is part of it."""
    named = getattr(REGISTRY[case.backend], "timed_kernels", "")
    traced = Spread.of([trace_gpu(run, named).kernel_ms for _ in range(TRACES)])
    note = f"sum of the durations of a run's kernels; scale {context.config.scale_of(case.dim):g}"
    return context.row(case, **traced.columns(), **checked, note=note)


def byte_row(context: Context, untimed: Case, metric: str, size: int) -> Row:
    return context.row(untimed, metric=metric, unit="B", **Spread.of([size]).columns(), status="unchecked")


def _fixed_times(
    context: Context, case: Case, run: Callable[[], torch.Tensor], checked: dict[str, Any], graph: "GraphMeasures"
) -> list[Row]:
    """Back to back, then isolated with L2 warm and cold."""
    repeats, device = context.config.repeats, context.device
    spread, timer = time_kernel(run, device=device, repeats=repeats)
    scale = f"scale {context.config.scale_of(case.dim):g}"
    rows = [context.row(case, **spread.columns(), **checked, note=f"{timer}; {scale}")]
    options = {"device": device, "repeats": repeats, "expected_ms": spread.median}
    isolated = {l2: replace(case, launch="isolated", l2=l2) for l2 in graph.before}
    try:
        found, timer = time_isolated(run, **options, before=graph.before)
    except (CaptureError, torch.OutOfMemoryError) as error:  # the time back to back stands
        return rows + [context.failed(one, error) for one in isolated.values()]
    note = f"{timer}; an empty kernel takes {graph.empty_ms * 1e3:.1f} us; {scale}"
    return rows + [context.row(isolated[l2], **spread.columns(), **checked, note=note) for l2, spread in found.items()]


def _rebuilt_time(context: Context, case: Case, run: Callable[[], torch.Tensor], checked: dict[str, Any]) -> Row:
    options = {"run": run, "device": context.device}
    once = time_passes(**options, repeats=2).p10
    repeats = min(context.config.repeats, max(LONG_REPEATS, int(REBUILT_MS / once)))
    rounds = time_rounds(lambda: pass_times(**options, repeats=repeats))
    timer = "CUDA events around each call" if context.device.type == "cuda" else "clock"
    notes = [timer, f"scale {context.config.scale_of(case.dim):g}", rounds.warning]
    return context.row(case, **rounds.columns(), **checked, note="; ".join(filter(None, notes)))


class GraphMeasures:
    """State shared by the cases of a graph.

    Attributes:
        before: functions that bring the L2 cache into a state, by the state.
        empty_ms: isolated time of a kernel that adds to one number: the part of every isolated time that is no work.
    """

    def __init__(self, context: Context) -> None:
        device = context.device
        self.gathered_columns = gathered_columns(context.pattern)
        torch.cuda.empty_cache()  # a format would take a part of a free block that a huge graph's output needs
        self.before = {"warm": lambda: None} | ({"cold": l2_flusher(device)} if device.type == "cuda" else {})
        number = torch.zeros(1, device=device)
        options = {"device": device, "repeats": context.config.repeats, "expected_ms": 0.0}
        times, _ = time_isolated(lambda: number.add_(1), **options, before={"warm": lambda: None})
        self.empty_ms = times["warm"].median


class Problem:
    """Inputs of one shape and kind of edge data on a graph, and their correct output.

    All backends get the same numbers. float16 holds them exactly, so that one reference serves all types.

    Attributes:
        scale: factor of the scores. 1 for the authors' codes, whose queries hold it: some take no factor, and a product
            of ours would count as one of their kernels.
    """

    def __init__(self, context: Context, shape: Shape, kind: str) -> None:
        self.context, self.shape, self.kind = context, shape, kind
        self._inputs: tuple[torch.Tensor, ...] = ()
        self.scale = 1.0 if context.config.measure == "codes" else context.config.scale_of(shape.dim)

    def inputs(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """q [N, H, d], k and v [N, H or KV heads, d]. Those of another type are dropped."""
        if not self._inputs:  # also after a conversion that ran out of memory
            self._inputs = tuple(normal_inputs(self.context, self.shape, 3, torch.float16))
            self._inputs[0].mul_(self.context.config.scale_of(self.shape.dim) / self.scale)
        if self._inputs[0].dtype != dtype:
            tensors, self._inputs = list(self._inputs), ()
            for nth in range(len(tensors)):  # one at a time: both types of all three may not fit
                tensors[nth] = tensors[nth].to(dtype)
            self._inputs = tuple(tensors)
        return self._inputs

    @cached_property
    def edges(self) -> EdgeInputs | None:
        """Edge data in the order of the pattern."""
        return EdgeInputs.random(self.kind, self.shape, self.context.pattern)

    @cached_property
    def expected(self) -> torch.Tensor:
        """[N, H, d] float32, computed in float64."""
        pattern = self.context.pattern
        try:
            inputs = of_query_heads(*self._inputs)
            return float64_attention(*inputs, pattern.indptr, pattern.indices, self.scale, self.edges)
        except torch.OutOfMemoryError as error:
            text = str(error).partition("\n")[0]
            raise MemoryError(f"the float64 reference, not the backend, ran out of memory: {text}") from None


def normal_inputs(context: Context, shape: Shape, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and, as a fourth, the gradient of the output: [nodes, heads, d]; equal arguments give the same
    numbers."""
    generator = torch.Generator(context.device).manual_seed(0)
    nodes, (heads, dim, kv_heads) = context.loaded.meta.num_nodes, shape
    of_query, of_key = (nodes, heads, dim), (nodes, kv_heads or heads, dim)
    sizes = (of_query, of_key, of_key, of_query)[:count]
    return [torch.randn(size, generator=generator, device=context.device, dtype=dtype) for size in sizes]


def of_query_heads(query: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    """The query, and k and v with its number of heads: query head h reads KV head h // (heads / KV heads)."""
    group = query.shape[1] // others[0].shape[1]
    return [query, *(tensor.repeat_interleave(group, 1) if group > 1 else tensor for tensor in others)]


def refuse_impossible(case: Case, device: torch.device) -> None:
    """Raise a BackendUnavailableError or UnsupportedInputsError if the backend cannot run the case on the device."""
    backend = REGISTRY[case.backend]
    if reason := backend.unavailable(device):
        raise fused3s.BackendUnavailableError(reason)
    if reason := backend.unsupported(case.torch_dtype, case.dim):
        raise UnsupportedInputsError(reason)
    if case.out_dtype not in ("float32", case.dtype):
        raise UnsupportedInputsError(f"it computes in {case.dtype}, and out_dtype is {case.out_dtype}")
    if case.kv_heads and case.variant != "none":
        raise UnsupportedInputsError("it takes as many heads of k and v as of q")
    if case.edges != NO_EDGES:
        if case.variant != "none" or not backend.takes_edges:
            raise UnsupportedInputsError("it takes no edge data")
        if case.plan == "rebuilt":
            raise UnsupportedInputsError("edge data is bound to a plan that is kept")
    if case.plan == "rebuilt" and case.order != "none":
        raise UnsupportedInputsError("rows are ordered once per graph, on the CPU: too slow for each call")


def plan(
    case: Case, pattern: CSRPattern, device: torch.device, scale: float, edges: EdgeInputs | None = None
) -> Attention:
    """The kernel of a case with its sparse format built and edge data bound to it. The first call may compile.

    Raises:
        UnsupportedGraphError: the backend does not take this graph.
    """
    out_dtype = getattr(torch, case.out_dtype)
    if case.variant != "none":
        bsb = BSB.from_graph(pattern, device=device)
        instance = paper_instance(case.torch_dtype, out_dtype, case.dim, **SWITCHES[case.variant])
        get_kernel(instance, device.index)
        return lambda q, k, v: launch(instance, bsb, q, k, v, scale)
    inputs = {"dtype": case.torch_dtype, "head_dim": case.dim, "num_heads": case.heads, "out_dtype": out_dtype}
    inputs |= {"edge_data": True} if edges and edges.is_of_edges else {}
    inputs |= {"num_kv_heads": case.kv_heads} if case.kv_heads else {}
    planned = fused3s.plan_attention(pattern, backend=case.backend, device=device, reorder=case.order, **inputs)
    bound = edges.to(case.torch_dtype).bind(planned) if edges else {}
    return lambda q, k, v: planned(q, k, v, scale=scale, out_dtype=out_dtype, **bound)


def replan(case: Case, pattern: CSRPattern, device: torch.device, scale: float) -> Attention:
    """The kernel of a case with the format and the schedule built anew at each call; without edge data.

    `flex_attention` builds its block mask anew; its compiled kernel, which takes any mask of this shape, stays.
    """
    if case.backend != "flex_attention":
        return lambda q, k, v: plan(case, pattern, device, scale)(q, k, v)
    out_dtype = getattr(torch, case.out_dtype)
    planned = fused3s.plan_attention(pattern, backend=case.backend, device=device)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        indptr, col = canonical_csr(pattern, device)
        mask = graph_block_mask(rows_of_edges(indptr), col.long(), pattern.shape)
        return replace(planned, data=replace(planned.data, block_mask=mask))(q, k, v, scale=scale, out_dtype=out_dtype)

    return attend
