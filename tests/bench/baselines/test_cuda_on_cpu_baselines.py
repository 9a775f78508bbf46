"""The paper's kernel and the baselines' kernels on the CPU (tests/cuda_shim), against dense float64."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from attention_cases import Csr
from poison import poisoned_buffers

from bench.baselines import fused3s_paper
from bench.baselines.bsb import BSB
from bench.baselines.fused3s_paper import paper_instance
from fused3s import plan_attention
from tests.cuda_shim.cuda_on_cpu import MODES, ON_SHIM, cuda_on_cpu
from tests.cuda_shim.oracle import GRAPHS, MULTIGRAPHS, assert_attention, inputs

pytestmark = ON_SHIM

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
PLAIN = {"permuted": False}
SPLIT_ROWS = {"permuted": False, "split_rows": True}
EDGE_PARALLEL = {"reordered": False, "edge_parallel": True}
PAPER_SPECS = [
    paper_instance(HALF, FLOAT, 64),
    paper_instance(BFLOAT, BFLOAT, 72, reordered=False),
    paper_instance(HALF, HALF, 256, warps=4),
    paper_instance(BFLOAT, FLOAT, 136),  # two 16-column blocks a warp, and most warps have one
    paper_instance(HALF, FLOAT, 24, warps=2, **PLAIN),
    paper_instance(BFLOAT, BFLOAT, 128, reordered=False, **PLAIN),
    paper_instance(HALF, FLOAT, 200, **PLAIN),
    paper_instance(BFLOAT, FLOAT, 8, **SPLIT_ROWS),  # one k-step: one warp works
    paper_instance(HALF, HALF, 72, warps=4, **SPLIT_ROWS),  # the last warp has one k-step of two
    paper_instance(HALF, FLOAT, 128, reordered=False, **SPLIT_ROWS),
    paper_instance(HALF, FLOAT, 64, **EDGE_PARALLEL),
    paper_instance(BFLOAT, BFLOAT, 136, warps=4, permuted=False, **EDGE_PARALLEL),
    paper_instance(HALF, HALF, 256, reordered=False, edge_parallel=True, **SPLIT_ROWS),
    paper_instance(HALF, FLOAT, 8, **EDGE_PARALLEL),  # one 16-column block: one warp combines
]
# Mode, heads, scale, strided inputs.
LAUNCHES = [("late", 2, 0.3, True), ("early", 1, -0.2, False), ("random", 2, 0.0, False)]


@pytest.mark.parametrize("spec", PAPER_SPECS, ids=lambda spec: spec.name)
def test_the_papers_kernel(monkeypatch, spec):
    for number, (name, make_graph) in enumerate(MULTIGRAPHS.items(), PAPER_SPECS.index(spec)):
        graph = make_graph()
        bsb = BSB.from_graph(graph)
        mode, heads, scale, strided = LAUNCHES[number % 3]
        tensors = inputs(graph, heads, spec.arguments.dim, spec.arguments.dtype, strided)
        with cuda_on_cpu(MODES[mode]), poisoned_buffers(monkeypatch):
            output = fused3s_paper.launch(spec, bsb, *tensors, scale)
        assert output.dtype == spec.arguments.out_dtype
        assert_attention(output, tensors, graph, scale, f"{name}, {mode}")


@pytest.mark.parametrize(("least_tcbs", "most_blocks"), [(1, 4096), (3, 4096), (1, 2)])
@pytest.mark.parametrize(
    "spec", [spec for spec in PAPER_SPECS if spec.arguments.edge_parallel], ids=lambda spec: spec.name
)
def test_windows_split_over_edge_parallel_blocks(monkeypatch, spec, least_tcbs, most_blocks):
    """Blocks of one TCB, of parts of two windows, and of many windows: the same bits in any order of the blocks."""
    monkeypatch.setattr(fused3s_paper, "LEAST_TCBS", least_tcbs)
    monkeypatch.setattr(fused3s_paper, "MOST_BLOCKS", most_blocks)
    for name in ("n_one_past_16", "empty_rows_and_windows", "wide"):
        graph = GRAPHS[name]()
        bsb = BSB.from_graph(graph)
        tensors = inputs(graph, 2, spec.arguments.dim, spec.arguments.dtype)
        outputs = []
        for mode in ("late", "early", "random"):
            with cuda_on_cpu(MODES[mode]), poisoned_buffers(monkeypatch):
                outputs.append(fused3s_paper.launch(spec, bsb, *tensors, 0.3))
        assert_attention(outputs[0], tensors, graph, 0.3, f"{name}, {spec.arguments.num_blocks(bsb)} blocks")
        assert torch.equal(outputs[0], outputs[1])
        assert torch.equal(outputs[0], outputs[2])


def test_clocks_of_the_papers_kernel(monkeypatch):
    """Every block notes its SM, and a clock that runs."""
    graph = GRAPHS["n_one_past_16"]()
    spec = paper_instance(HALF, FLOAT, 64, clocked=True)
    bsb = BSB.from_graph(graph)
    clocks = torch.full((2, bsb.num_row_windows, 3), -1)
    tensors = inputs(graph, 2, spec.arguments.dim, spec.arguments.dtype)
    with cuda_on_cpu(), poisoned_buffers(monkeypatch):
        output = fused3s_paper.launch(spec, bsb, *tensors, 0.2, clocks)
    assert_attention(output, tensors, graph, 0.2, spec.name)
    assert (clocks[..., 0] == 0).all()
    assert (clocks[..., 2] > clocks[..., 1]).all()
    assert clocks[..., 1:].unique().numel() == 2 * clocks[..., 0].numel()


def check_backend(monkeypatch, backend: str, dtype, out_dtype, dim: int, graphs: dict, normalised: bool) -> list[str]:
    """A backend as a user calls it, on all graphs; names of the instances that ran."""
    launched = []
    for number, (name, make_graph) in enumerate(graphs.items()):
        graph = make_graph()
        mode, heads, scale, strided = LAUNCHES[(number + dim // 8) % 3]
        with cuda_on_cpu(MODES[mode]) as gpu:
            plan = plan_attention(graph, backend=backend, device="cpu", dtype=dtype, head_dim=dim)
            tensors = inputs(graph, heads, dim, dtype, strided)
            with poisoned_buffers(monkeypatch):
                output = plan(*tensors, scale=scale, out_dtype=out_dtype)
        assert output.dtype == out_dtype
        assert_attention(output, tensors, graph, scale, f"{name}, {mode}", normalised=normalised)
        launched += gpu.launched
    return launched


@pytest.mark.parametrize(
    ("backend", "dtype", "out_dtype", "dim"),
    [
        ("flashsparse_stable", HALF, FLOAT, 64),
        ("flashsparse_stable", BFLOAT, BFLOAT, 72),
        ("flashsparse_naive", HALF, FLOAT, 64),
    ],
)
def test_flashsparse(monkeypatch, backend, dtype, out_dtype, dim):
    launched = check_backend(monkeypatch, backend, dtype, out_dtype, dim, MULTIGRAPHS | {"long": long_rows}, True)
    kernels = {name.split("<")[0].removeprefix("flashsparse_") for name in launched}
    assert kernels == {"sddmm", "statistics", "normalise", "spmm", "merge"}


def long_rows() -> Csr:
    """20 rows, 700 columns, full: windows of 44 TCBs, more than a part has."""
    return sp.csr_array(np.ones((20, 700), np.int8))


@pytest.mark.parametrize(
    ("backend", "dim"),
    [
        ("dfgnn_tiling", 1),
        ("dfgnn_tiling", 136),
        ("dfgnn_hyper", 1),
        ("dfgnn_hyper", 64),
        ("dfgnn_hyper", 256),
    ],
)
def test_dfgnn(monkeypatch, backend, dim):
    # A block a row: the graphs with many rows are for few warps.
    many_rows = {"hub", "tall"} if backend == "dfgnn_tiling" and dim > 64 else set()
    graphs = {name: MULTIGRAPHS[name] for name in MULTIGRAPHS.keys() - many_rows}
    launched = check_backend(monkeypatch, backend, FLOAT, FLOAT, dim, graphs, False)
    assert len(set(launched)) == 1


# Instances that the tests above have compiled.
BACKENDS = [
    ("fused3s_paper", HALF, 64),
    ("flashsparse_stable", HALF, 64),
    ("dfgnn_tiling", FLOAT, 40),
    ("dfgnn_hyper", FLOAT, 64),
]


def attend(monkeypatch, backend: str, graph: Csr, tensors: list[torch.Tensor], scale: float) -> torch.Tensor:
    with cuda_on_cpu():
        plan = plan_attention(graph, backend=backend, device="cpu")
        with poisoned_buffers(monkeypatch):
            return plan(*tensors, scale=scale, out_dtype=FLOAT)


@pytest.mark.parametrize("name", ["hub", "wide", "n_one_past_16"])
@pytest.mark.parametrize(("backend", "dtype", "dim"), BACKENDS)
def test_every_edge_counts_once(monkeypatch, backend, dtype, dim, name):
    """With q = 0 and v = one-hot of key mod d, the output times the degree is the number of such keys."""
    graph = GRAPHS[name]()
    q, k, v = (torch.zeros_like(each) for each in inputs(graph, 1, dim, dtype))
    keys = torch.arange(graph.shape[1])
    v[keys, 0, keys % dim] = 1
    output = attend(monkeypatch, backend, graph, [q, k, v], 1.0)
    adjacency = torch.from_numpy(graph.toarray()).double()
    found = output[:, 0].double() * adjacency.sum(1, keepdim=True)
    # FlashSparse rounds 1 / degree to 16 bits, which is off by less than half an edge.
    assert torch.equal(found.round(), adjacency @ v[:, 0].double())


@pytest.mark.parametrize(("backend", "dtype", "dim"), BACKENDS)
def test_nan_reaches_exactly_the_rows_that_use_it(monkeypatch, backend, dtype, dim):
    graph = GRAPHS["n_one_past_16"]()
    for place in (0, 1):  # a row of Q, a row of K
        tensors = inputs(graph, 1, dim, dtype)
        tensors[place][7, 0, dim // 2] = torch.nan
        output = attend(monkeypatch, backend, graph, tensors, 0.2)
        assert_attention(output, tensors, graph, 0.2, backend, normalised=backend.startswith("flashsparse"))
