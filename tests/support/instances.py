"""Instances of cuda/tiles/forward.cu as tests name them, and plans without a GPU."""

import pytest
import torch
from plan_oracle import plan_on_cpu

from fused3s.fused.tiles import backward, forward
from fused3s.fused.tiles.forward import fused_instance
from fused3s.fused.tuning import SM90
from fused3s.runtime.device import GPULimits
from fused3s.runtime.jit import ELEMENTS, Element, KernelInstance
from tests.cuda_shim.cuda_on_cpu import COMPILER, sizes_alone


def forward_instance(
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    dim: int,
    items: int = SM90.warps,
    heads: int = 1,
    terms: int = 0,
    one_term: bool = False,
    dim_warps: int = 1,
    score: str | None = None,
) -> KernelInstance:
    """`fused_instance` by the inputs' type; `one_term`: float32 with one TF32 term a product."""
    element = Element.TF32 if one_term else ELEMENTS[dtype]
    return fused_instance(element, out_dtype, dim, items, heads, terms, dim_warps, score)


def items_of(instance: KernelInstance) -> int:
    """Work items of a block."""
    return instance.arguments.warps // instance.arguments.dim_warps


def plan_for(patch: pytest.MonkeyPatch, gpu: GPULimits) -> None:
    """Plans of `fused3s` are made by the oracle, for a GPU of these limits; sizes come from the host's compiler."""
    if COMPILER is None:
        pytest.skip("no C++ compiler found (g++ or clang++)")
    plan_on_cpu(patch, gpu)
    for module in (forward, backward):
        patch.setattr(module, "instance_sizes", sizes_alone)
