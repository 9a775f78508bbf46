"""Expressions of scores compile for GPUs in every kernel that computes scores, within a budget of spills."""

import pytest
import torch
from compiled import ARCHS, check

from fused3s.fused.edges.backward import edge_backward_instances
from fused3s.fused.edges.forward import edge_instance
from fused3s.fused.shapes import TERM_BITS
from fused3s.fused.tiles.backward import backward_instance
from fused3s.fused.tiles.forward import fused_instance
from fused3s.runtime.jit import Element, KernelInstance

pytest.importorskip("cupy", reason="CuPy, which brings NVRTC's interface, is not installed")

HALF, FLOAT, EXPRESSION = torch.float16, torch.float32, TERM_BITS["expression"]
# GAT; positions in three dimensions; a soft cap of an edge's value.
EXPRESSIONS = (
    "leaky_relu(row0 + column0, 0.2)",
    "s - ((row0 - column0)**2 + (row1 - column1)**2 + (row2 - column2)**2) / (2 * head0**2)",
    "s + column0",
    "number0 * tanh((s + edge0 * head0) / number0)",
)
BIAS = "s + edge0"


def instances(score: str) -> list[KernelInstance]:
    found = [edge_instance(dtype, dtype, dim, heads, EXPRESSION, score) for dtype in (HALF, FLOAT)
             for heads, dim in ((8, 8), (1, 64))]  # fmt: skip
    for dtype, dim, heads in ((HALF, 8, 8), (FLOAT, 64, 1)):
        found += edge_backward_instances(dtype, dtype, dim, heads, EXPRESSION, score)
    if "s" in score.split("(")[0].split():
        found += [fused_instance(Element.HALF, HALF, dim, 4, terms=EXPRESSION, score=score) for dim in (64, 128)]
    if score == BIAS:
        shapes = (4, 16), (3, 10), (8, 6), (2, 32)
        found += [fused_instance(Element.HALF, HALF, dim, 4, heads, EXPRESSION, score=score) for heads, dim in shapes]
    if "s" in score.split("(")[0].split():
        shapes = [(dim, columns) for dim in (64, 128, 256) for columns in (False, True)]
        found += [backward_instance(Element.HALF, dim, columns, 2, EXPRESSION, score) for dim, columns in shapes]
    return found


@pytest.mark.parametrize(
    ("score", "arch"), [*zip(EXPRESSIONS * 2, ARCHS, strict=True), *((BIAS, arch) for arch in ARCHS[::2])]
)
def test_expressions_compile_without_spills(score, arch):
    def spill_bytes(instance):
        # The column pass of 128 columns a warp has all 255 registers without a term.
        return 32 if instance.function == "fused3s_backward" and instance.arguments.dim >= 128 else 0

    check(instances(score), arch, 255, spill_bytes=spill_bytes)
