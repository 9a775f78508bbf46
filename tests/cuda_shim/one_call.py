"""One call of a plan through the CUDA kernels on the CPU, both passes compared with float64.

    .venv/bin/python tests/cuda_shim/one_call.py [GRAPH] [--heads 2] [--dim 64] [--dtype float16] [--backend fused3s]

GRAPH is an edge case of tests/support/attention_cases.py. Prints the kernels as they are launched. Exit status: 0, or a
traceback that names the fault.
"""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "support")]

import clone  # noqa: E402, F401
import pytest  # noqa: E402
import torch  # noqa: E402
import typer  # noqa: E402
from gradient_cases import assert_gradients, gradient_case  # noqa: E402
from poison import poisoned_buffers  # noqa: E402
from tolerance import edges_of  # noqa: E402

import bench.baselines  # noqa: E402, F401
from fused3s import plan_attention  # noqa: E402
from tests.cuda_shim.cuda_on_cpu import MODES, cuda_on_cpu  # noqa: E402
from tests.cuda_shim.oracle import MULTIGRAPHS, assert_attention, inputs  # noqa: E402

Graph = StrEnum("Graph", [*MULTIGRAPHS])
Mode = StrEnum("Mode", [*MODES])


def main(
    graph: Annotated[Graph, typer.Argument()] = Graph.repeated,
    heads: int = 2,
    dim: int = 64,
    dtype: Literal["float16", "bfloat16", "float32"] = "float16",
    backend: str = "fused3s",
    forward: Annotated[bool, typer.Option("--forward", help="Leave the backward pass out.")] = False,
    mode: Mode = Mode.late,
) -> None:
    """Run one call of a plan on the CPU and compare it with float64."""
    matrix, type_ = MULTIGRAPHS[graph](), getattr(torch, dtype)
    qkv = inputs(matrix, heads, dim, type_)
    case = gradient_case(*edges_of(matrix), *qkv, dim**-0.5)
    with cuda_on_cpu(MODES[mode]) as gpu:
        spec = {"dtype": type_, "head_dim": dim, "num_heads": heads, "backward": not forward}
        plan = plan_attention(matrix, device="cpu", backend=backend, **spec)
        print(plan)
        planned = len(gpu.launched)
        with poisoned_buffers(pytest.MonkeyPatch()):
            query, key, value = (tensor.requires_grad_(not forward) for tensor in qkv)
            out = plan(query, key, value)
            gradients = None if forward else torch.autograd.grad(out, (query, key, value), case.grad_output)
    print(*gpu.launched[planned:], sep="\n")
    tensors = [tensor.detach() for tensor in qkv]
    assert_attention(out.detach(), tensors, matrix, dim**-0.5, graph)
    if gradients:
        assert_gradients(gradients, case, graph)
    print(f"{graph}: within the bounds of float64")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
