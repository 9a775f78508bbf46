"""Time to plan attention on a graph, from CSR arrays that are on the device.

    variant        scope      one call
    plan           build      `fused3s.plan_attention`
    plan_backward  build      the same with backward=True: the transpose and the schedules of the backward pass, too
    plan_and_run   attention  `fused3s.plan_attention`, and attention with the plan: a mask that changes at every call

Each call is timed by the wall clock and ends with a synchronisation, so that the host's work and its waits count. The
output of plan_and_run is compared with float64 before its time is kept.
"""

from functools import partial

import torch

import fused3s
from bench.checks import checked_columns, float64_attention, largest_row_error
from bench.format_build import timed
from bench.kernels import normal_inputs
from bench.runner import Case, Context
from common.records import Row
from configs.bench import BenchConfig

VARIANTS = {"plan": "build", "plan_backward": "build", "plan_and_run": "attention"}  # with their scopes


def cases(config: BenchConfig, device: torch.device) -> list[Case]:
    types = {"dtype": "float16", "out_dtype": "float16", "plan": "rebuilt"}
    return [
        Case(backend, scope, shape.dim, heads=shape.heads, variant=variant, **types)
        for backend in config.backends
        for shape in config.head_shapes
        for variant, scope in VARIANTS.items()
    ]


def measure(context: Context, case: Case) -> list[Row]:
    pattern, dtype = context.pattern, case.torch_dtype
    inputs = {"dtype": dtype, "head_dim": case.dim, "num_heads": case.heads}
    inputs["backward"] = case.variant == "plan_backward"
    plan = partial(fused3s.plan_attention, pattern, backend=case.backend, device=context.device, **inputs)
    if case.scope == "build":
        return [timed(context, case, plan, {"status": "unchecked"})]
    qkv = normal_inputs(context, case.shape, 3, dtype)
    expected = float64_attention(*qkv, pattern.indptr, pattern.indices, case.dim**-0.5)
    checked = checked_columns(largest_row_error(plan()(*qkv), expected), dtype)
    del expected
    return [timed(context, case, lambda: plan()(*qkv), checked)]
