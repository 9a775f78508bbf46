"""Gradients of plans of `fused3s`, on the CPU (tests/cuda_shim) and on a GPU: forward and backward kernels together, as
the plan chooses them. The kernels one by one: test_backward_tiles_on_cpu.py, test_edge_by_edge.py.
"""

import pytest
import torch
from attention_cases import EDGE_CASES, REPEATED, load_real_graph
from devices import both_devices, kernels_of
from edge_cases import EDGE_LISTS, FORMS, EdgeList, edge_inputs, in_order, map_tensors, qkv
from gpu_calls import assert_streams_agree
from poison import poisoned_buffers

from bench.gradients import float64_gradients, largest_gradient_error, torch_gradients
from bench.precision import matmul_precision
from fused3s import Dropout, EdgeData, ScoreTerm, plan_attention, split_qkv
from fused3s.graph.csr import CSRPattern
from fused3s.graph.edges import canonical_csr
from fused3s.terms.edge_data import cast_floats

pytestmark = pytest.mark.usefixtures("one_thread")
GPU = torch.device("cuda", 0)
HALF, BFLOAT, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
ERROR = {HALF: 2e-3, FLOAT: 3e-6}  # relative, of a whole gradient: a few roundings


def hub() -> EdgeList:
    """A row and a column with all nodes, and an empty row."""
    mask = EDGE_LISTS["hub"]().mask()
    mask[3] = False
    row, col = mask.nonzero().T
    return EdgeList(row, col, tuple(mask.shape))


class Case:
    """Calls with edge data of a kind, whose tensors require gradients; also through the log-sum-exp."""

    def __init__(self, heads: int, dim: int, kind: str | None) -> None:
        self.graph, self.heads, self.dim, self.kind = hub(), heads, dim, kind
        self.made, self.order = FORMS["scipy_coo"](self.graph)
        generator = torch.Generator().manual_seed(1)
        self.grads = [torch.randn(self.graph.shape[0], heads, *size, generator=generator) for size in ((dim,), ())]

    def plan(self, backend: str, dtype: torch.dtype, device: str = "cpu", dim: int | None = 0, **options):
        options |= {
            "dtype": dtype,
            "head_dim": self.dim if dim == 0 else dim,
            "num_heads": self.heads,
            "backward": True,
        }
        return plan_attention(self.made, backend=backend, device=device, edge_data=self.kind is not None, **options)

    def data(self, dtype: torch.dtype) -> EdgeData | None:
        if self.kind is None:
            return None
        if self.kind == "cap":
            return EdgeData(score=ScoreTerm("cap * tanh(s / cap)", cap=1.5))
        data = in_order(edge_inputs(self.kind, self.graph.num_edges, self.heads, self.dim, HALF), self.order)
        return cast_floats(data, dtype)

    def run(self, plan, dtype: torch.dtype, **options) -> list[torch.Tensor]:
        """The output, and the gradients of query, key and value and of the floats of the edge data, on the CPU."""

        def leaf(each: torch.Tensor) -> torch.Tensor:
            each = each.to(plan.device)
            return each.to(dtype).requires_grad_() if each.is_floating_point() else each

        leaves, bound = [leaf(each) for each in qkv(self.graph.shape, self.heads, self.dim, HALF)], None
        if (data := self.data(dtype)) is not None:
            data = map_tensors(data, leaf)
            leaves += [each for each in vars(data).values() if isinstance(each, torch.Tensor) and each.requires_grad]
            bound = plan.bind_edges(data)
        options |= {"scale": 0.3, "edges": bound, "dropout": Dropout(0.2, 7), "return_lse": True}
        results = plan(*leaves[:3], **options)
        grads = [grad.to(result) for grad, result in zip(self.grads, results, strict=True)]
        found = [results[0].detach(), *torch.autograd.grad(results, leaves, grads)]
        return [each.cpu() for each in found]


# Over KV tiles with one and two warps a window; edge by edge; odd columns, padded for features and for an odd number of
# heads, else not; a plan for other columns; float32 with narrow and odd columns.
CASES = [
    *((1, 64, None, HALF), (1, 136, None, HALF), (1, 64, "cap", HALF), (1, 1, None, HALF), (4, 8, None, HALF)),
    *((2, 13, "features", HALF), (3, 13, None, HALF), (4, 13, None, HALF), (4, 8, "bias_per_head", HALF)),
    *((4, 13, "all", FLOAT), (1, 136, "features", FLOAT), (2, 40, "bias", FLOAT), (8, 8, "bias_per_head", FLOAT)),
    *((1, 1, "key_features", FLOAT), (16, 3, "bias_minus_infinity_clamped", FLOAT), (1, 255, "value_features", FLOAT)),
    (2, 24, None, FLOAT),
]


@both_devices
@pytest.mark.parametrize(("heads", "dim", "kind", "dtype"), CASES)
def test_gradients_of_a_plan(monkeypatch, device, heads, dim, kind, dtype):
    case = Case(heads, dim, kind)
    exact = case.run(case.plan("reference", DOUBLE), DOUBLE)
    options = {"reorder": "communities"} if dtype == HALF and kind == "features" else {}
    options |= {"dim": None} if kind == "bias_per_head" else {}
    is_high = device == "cpu" and dtype == FLOAT and kind in ("features", "value_features")  # GPU: GEMMs in TF32
    precision = "high" if is_high else "highest"
    with matmul_precision(precision), kernels_of(device) as gpu:
        plan = case.plan("fused3s", dtype, device, **options)
        with poisoned_buffers(monkeypatch):
            found = case.run(plan, dtype)
    for got, right in zip(found, exact, strict=True):
        assert got.dtype == dtype
        assert (got.double() - right).norm() <= ERROR[dtype] * right.norm()
    assert torch.equal(found[1][3], torch.zeros(heads, dim, dtype=dtype))  # the empty row
    if dtype == FLOAT and kind and gpu is not None:
        assert {name.split("<")[0] for name in gpu.launched} >= {"fused3s_edges", "gradients_over_rows"}


# Over KV tiles; edge by edge, with edge data and padded columns.
@both_devices
@pytest.mark.parametrize(
    ("heads", "dim", "kind"), [(1, 64, None), (4, 13, "features"), (1, 40, "bias"), (4, 13, "types")]
)
def test_medium_is_bfloat16_with_float32_around_it(monkeypatch, device, heads, dim, kind):
    case = Case(heads, dim, kind)
    with matmul_precision("medium"), kernels_of(device) as gpu:
        plan = case.plan("fused3s", FLOAT, device)
        with poisoned_buffers(monkeypatch):
            found = case.run(plan, FLOAT)
            launched = [] if gpu is None else gpu.launched.copy()
            rounded = case.run(plan, BFLOAT, out_dtype=FLOAT)
    assert not any("kFloat" in name.split(",")[0] for name in launched)
    for index, (got, right) in enumerate(zip(found, rounded, strict=True)):
        assert got.dtype == FLOAT
        assert torch.equal(got, right.float()), index


@both_devices
@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (4, 8), (4, 13)])
def test_the_gradient_of_a_joint_projection_is_not_copied(monkeypatch, device, heads, dim):
    """Bits as of three tensors, in one tensor that the kernels wrote."""
    graph, generator, copied = hub(), torch.Generator().manual_seed(2), []
    nodes = graph.shape[0]
    qkv = torch.randn((nodes, 3 * heads * dim), generator=generator).half().to(device).requires_grad_()
    grad_output = torch.randn((nodes, heads, dim), generator=generator).half().to(device)
    options = {"dtype": HALF, "head_dim": dim, "num_heads": heads, "backward": True}
    with kernels_of(device):
        plan = plan_attention(FORMS["scipy_coo"](graph)[0], backend="fused3s", device=device, **options)
        with poisoned_buffers(monkeypatch):
            leaves = [part.detach().requires_grad_() for part in split_qkv(qkv, heads)]
            apart = torch.autograd.grad(plan(*leaves, dropout=Dropout(0.2, 7)), leaves, grad_output)
            output = plan(*split_qkv(qkv, heads), dropout=Dropout(0.2, 7))
            stack = torch.stack
            monkeypatch.setattr(torch, "stack", lambda *args: copied.append(args) or stack(*args))
            (joint,) = torch.autograd.grad(output, qkv, grad_output)
    assert torch.equal(joint, torch.cat([part.flatten(1) for part in apart], 1))
    assert not copied


# On a GPU: tiles at every width with one and two warps a window; edge by edge; odd columns.
SHAPES = [(1, 2), (1, 16), (3, 40), (1, 64), (2, 96), (1, 127), (1, 128), (1, 130), (1, 192), (1, 256), (16, 64)]
SHAPES += [(8, 8), (8, 16), (4, 13), (8, 10), (32, 8), (4, 32)]
OVER_TORCH = 2.0  # error over that of plain torch in the same type
LEAST_ERROR = {HALF: 2e-3, BFLOAT: 1.6e-2}  # two roundings: plain torch may have none


def assert_gradients(graph, heads: int, dim: int, dtype: torch.dtype, label: str, **options) -> None:
    indptr, indices = canonical_csr(graph, GPU)
    pattern = CSRPattern(indptr, indices, tuple(graph.shape))
    generator = torch.Generator(GPU).manual_seed(dim)

    def normal(rows):
        return torch.randn((rows, heads, dim), generator=generator, device=GPU).to(dtype)

    num_rows, num_cols = pattern.shape
    inputs = (normal(num_rows), normal(num_cols), normal(num_cols))
    grad_output, scale = normal(num_rows), dim**-0.5
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    options |= {"dtype": dtype, "head_dim": dim, "num_heads": heads}
    plan = plan_attention(graph, backend="fused3s", device=GPU, backward=True, **options)
    twice = [torch.autograd.grad(plan(*leaves, scale=scale), leaves, grad_output) for _ in range(2)]
    assert all(torch.equal(*pair) for pair in zip(*twice, strict=True)), f"{label}: other bits the second time"
    if not len(indices):
        assert all(not gradient.any() for gradient in twice[0]), label
        return
    expected = float64_gradients(*inputs, grad_output, pattern, scale)
    allowed = largest_gradient_error(torch_gradients(*inputs, grad_output, pattern, scale), expected)
    error = largest_gradient_error(twice[0], expected)
    assert error <= max(OVER_TORCH * allowed, LEAST_ERROR[dtype]), f"{label}: {error:.1e}, plain torch {allowed:.1e}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=str)
@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_every_edge_case_matches_float64(heads, dim, dtype):
    for name, make_graph in (EDGE_CASES | REPEATED).items():
        assert_gradients(make_graph(), heads, dim, dtype, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cora", "ogbg-molhiv", "musae-github"])
@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (1, 128), (1, 256), (8, 16), (16, 64)])
def test_real_graphs_match_float64(real_graph_dir, name, heads, dim):
    graph = load_real_graph(real_graph_dir, name)
    for reorder in ("none", "auto"):
        assert_gradients(graph, heads, dim, HALF, f"{name}, rows in order {reorder}", reorder=reorder)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, "bias_per_head", "all"])
@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (8, 8)])
def test_streams_that_share_a_plan_do_not_disturb_each_other(kind, heads, dim):
    """Parts of the hub's row and column: partials belong to a call, semaphores to a stream."""
    graph, options = EDGE_CASES["hub"](), {"device": GPU, "dtype": HALF, "head_dim": dim, "num_heads": heads}
    plan = plan_attention(graph, backend="fused3s", backward=True, edge_data=kind is not None, **options)
    if plan.data.arrays.row_items is not None:
        assert plan.data.arrays.row_parts.shape[0] > 1
    bound = None
    if kind is not None:
        data = edge_inputs(kind, graph.nnz, heads, dim, HALF)
        bound = plan.bind_edges(map_tensors(data, lambda each: each.to(GPU)))

    def inputs():
        rows = [graph.shape[0], graph.shape[1], graph.shape[1], graph.shape[0]]
        *leaves, grad = (torch.randn(size, heads, dim, device=GPU).half() for size in rows)
        return [leaf.requires_grad_() for leaf in leaves], grad

    def both_passes(leaves, grad):
        output = plan(*leaves, edges=bound)
        return [output, *torch.autograd.grad(output, leaves, grad)]

    assert_streams_agree(both_passes, [inputs() for _ in range(4)])
