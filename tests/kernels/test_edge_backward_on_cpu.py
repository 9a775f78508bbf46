"""cuda/fused3s_edges_backward.cu on the CPU (tests/cuda_shim): the real source against autograd in float64."""

from dataclasses import replace

import pytest
import torch
from edge_cases import EDGE_LISTS, EdgeList, bound_edges, qkv
from plan_oracle import data_by_edge
from poison import poisoned_buffers
from tolerance import FLOOR

from kernels.backends.base import Call, Gradients
from kernels.backends.fused3s_edges_backward import launch_edge_backward
from kernels.backends.reference import edge_softmax_attention
from kernels.dropout import Dropout
from kernels.formats.csr import CSRPattern
from kernels.formats.edges import canonical_csr, rows_of_edges
from kernels.formats.row_order import permute_rows
from tests.cuda_shim.cuda_on_cpu import COMPILER, MODES, cuda_on_cpu

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler found (g++ or clang++)"),
    pytest.mark.usefixtures("one_thread"),
]

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
ROWS = ("query", "key", "value")
SEED = 2**40 + 12345
# heads, dimensions, types of inputs and output, kinds of edge data, dropout: loads of 4, 8 and 16 bytes, idle lanes and
# heads, one lane to a whole warp a head. Kinds of a shape share an instance.
CASES = {
    "plain": (1, 2, HALF, FLOAT, (None,), None),
    "all terms, a lane a head": (8, 8, HALF, HALF, ("all",), 0.4),
    "bias": (3, 10, HALF, HALF, ("bias", "bias_per_head", "bias_minus_infinity"), None),
    "value features": (4, 16, BFLOAT, BFLOAT, ("value_features",), None),
    "multiplier": (5, 24, HALF, FLOAT, ("multiplier", "multiplier_per_head"), 0.2),
    "all terms": (2, 64, HALF, HALF, ("all",), 0.4),
    "types": (1, 128, BFLOAT, FLOAT, ("types",), None),
    "clamp": (1, 256, HALF, HALF, ("bias_minus_infinity_clamped",), 0.5),
}
GRAPHS = ("repeated", "hub", "one_node_self_loop", "empty_rows_and_windows", "wide", "no_edges")


class GradientCall:
    """Inputs on a graph with items of at most `part_edges` edges, and the gradients that autograd finds."""

    def __init__(
        self,
        graph: EdgeList,
        heads: int,
        dim: int,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        kind: str | None = None,
        rate: float | None = None,
        part_edges: int = 1000,
        reordered: bool = False,
        scale: float = 0.4,
    ) -> None:
        order, perm = graph.csr_order(), None
        indptr = torch.nn.functional.pad(torch.bincount(graph.row, minlength=graph.shape[0]).cumsum(0), (1, 0))
        pattern = CSRPattern(indptr, graph.col[order], graph.shape, order)
        if reordered:
            perm = torch.randperm(graph.shape[0], generator=torch.Generator().manual_seed(3)).int()
            pattern = permute_rows(pattern, perm)
        device = torch.device("cpu")
        indptr, indices = canonical_csr(pattern, device)
        self.data = data_by_edge(indptr, indices, graph.shape, perm, part_edges)

        row, self.col = rows_of_edges(indptr), indices.long()  # in the order of edge data
        self.row = row if perm is None else perm.long()[row]
        self.edges = replace(
            bound_edges(graph, kind, pattern.edge_ids, heads, dim, dtype),
            dropout=None if rate is None else Dropout(rate, torch.tensor([SEED])),
        )
        self.scale = scale
        self.tensors = dict(zip(ROWS, qkv(graph.shape, heads, dim, dtype), strict=True))
        generator = torch.Generator().manual_seed(dim)
        self.grad_output = torch.randn(self.tensors["query"].shape, generator=generator).to(dtype).to(out_dtype)

        names = [name for name in Gradients._fields if name not in ROWS]
        inputs = self.tensors | {name: getattr(self.edges, name) for name in names}
        leaves = {name: each.double().requires_grad_() for name, each in inputs.items() if each is not None}
        terms = replace(self.edges, **{name: leaf for name, leaf in leaves.items() if name not in ROWS})
        output, lse = edge_softmax_attention(*(leaves[name] for name in ROWS), self.row, self.col, scale, terms)
        self.output, self.lse = output.detach().to(out_dtype), lse.detach().float()
        grad = self.grad_output.double()
        gradients = torch.autograd.grad(output, leaves.values(), grad, retain_graph=True)
        self.expected = dict(zip(leaves, gradients, strict=True))
        # What the rounding of O changes: delta, and ds by p times that, as the gradient of lse does.
        delta_error = (grad * (self.output - output.detach())).sum(-1)
        changes = torch.autograd.grad(lse, leaves.values(), delta_error, allow_unused=True)
        self.change = {
            name: torch.zeros(1) if change is None else change.nan_to_num()
            for name, change in zip(leaves, changes, strict=True)
        }

    def run(self, monkeypatch, mode: str = "late", wanted: set[str] | None = None, **changed) -> Gradients:
        tensors = {"grad_output": self.grad_output} | self.tensors | changed
        rows = [tensors[name] for name in ROWS]
        call = Call(*rows, self.scale, self.output.dtype, self.lse, self.edges)
        wanted = frozenset(self.expected if wanted is None else wanted)
        with cuda_on_cpu(MODES[mode]), poisoned_buffers(monkeypatch):
            return launch_edge_backward(self.data, call, self.output, tensors["grad_output"], wanted)

    def check(self, gradients: Gradients, label: str) -> None:
        """No row is off by more than two units in the last place of the largest row; rows without an edge are 0."""
        for name, expected in self.expected.items():
            got = getattr(gradients, name)
            dtype = self.tensors["query"].dtype
            assert (got.dtype, got.shape) == (dtype, expected.shape), f"{label}: {name}"
            assert torch.isfinite(got).all(), f"{label}: {name} is not finite"
            if not expected.numel():
                continue
            error = (got.double() - expected).norm(dim=-1).max()
            size, change = (each.norm(dim=-1).max() for each in (expected, self.change[name]))
            allowed = 2 * torch.finfo(dtype).eps * size + 2 * change + FLOOR
            assert error <= allowed, f"{label}: {name} is off by {error:.2e}, allowed {allowed:.2e}, size {size:.2e}"
        for name, ends in (("query", self.row), ("key", self.col), ("value", self.col)):
            alone = torch.ones(len(self.tensors[name]), dtype=torch.bool).index_fill_(0, ends, False)
            assert (getattr(gradients, name)[alone] == 0).all(), f"{label}: {name} of a row without an edge"


@pytest.mark.parametrize("case", CASES)
def test_gradients_match_float64(monkeypatch, case):
    heads, dim, dtype, out_dtype, kinds, rate = CASES[case]
    for kind in kinds:
        for name in GRAPHS:
            for part_edges, mode, reordered, scale in ((1000, "late", False, 0.4), (5, "random", True, -0.3)):
                call = GradientCall(
                    EDGE_LISTS[name](), heads, dim, dtype, out_dtype, kind, rate, part_edges, reordered, scale
                )
                call.check(call.run(monkeypatch, mode), f"{name}, {kind}, parts of {part_edges} edges")


def test_split_rows_and_columns_have_the_same_bits_in_every_order(monkeypatch):
    call = GradientCall(EDGE_LISTS["hub"](), 8, 8, HALF, HALF, "all", 0.4, part_edges=4)
    assert call.data.row_parts.shape[0] > 10
    assert call.data.column_parts.shape[0] > 10
    expected = call.run(monkeypatch, "late")
    for mode in ("early", "random"):
        gradients = call.run(monkeypatch, mode)
        for name in call.expected:
            assert torch.equal(getattr(gradients, name), getattr(expected, name)), f"{name}, {mode}"


def test_only_wanted_gradients(monkeypatch):
    call = GradientCall(EDGE_LISTS["directed"](), 8, 8, HALF, HALF, "all", 0.4)
    for name in call.expected:
        gradients = call.run(monkeypatch, wanted={name})
        got = {name for name, gradient in gradients._asdict().items() if gradient is not None}
        assert got == {name}


def test_rows_that_are_not_connected_never_meet(monkeypatch):
    call = GradientCall(EDGE_LISTS["empty_rows_and_windows"](), 1, 2, HALF, FLOAT)
    expected = call.run(monkeypatch)
    no_row = torch.ones(len(call.tensors["query"]), dtype=torch.bool).index_fill_(0, call.row, False)
    no_col = torch.ones(len(call.tensors["key"]), dtype=torch.bool).index_fill_(0, call.col, False)
    assert no_row[0]
    assert no_col.any()
    for value in (torch.nan, torch.inf):
        changed = {
            name: tensor.clone().masked_fill_((no_col if name in ("key", "value") else no_row)[:, None, None], value)
            for name, tensor in (call.tensors | {"grad_output": call.grad_output}).items()
        }
        gradients = call.run(monkeypatch, **changed)
        for name in ROWS:
            assert torch.equal(getattr(gradients, name), getattr(expected, name)), name


def test_key_0_that_is_not_a_number_reaches_its_own_rows_alone(monkeypatch):
    """Edges that do not exist have key 0."""
    call = GradientCall(EDGE_LISTS["n_one_past_16"](), 1, 2, HALF, FLOAT)
    key, value = (call.tensors[name].clone() for name in ("key", "value"))
    key[0], value[0] = torch.nan, torch.inf
    expected, gradients = call.run(monkeypatch), call.run(monkeypatch, key=key, value=value)
    neighbours = call.row[call.col == 0]
    others = torch.ones(len(call.tensors["query"]), dtype=torch.bool).index_fill_(0, neighbours, False)
    assert others.any()
    assert torch.equal(gradients.query[others], expected.query[others])
    assert gradients.query[neighbours].isnan().all()


def test_strided_tensors(monkeypatch):
    call = GradientCall(EDGE_LISTS["wide"](), 1, 2, HALF, FLOAT)
    expected = call.run(monkeypatch)
    strided = {name: torch.stack([torch.full_like(x, torch.nan), x], 1)[:, 1] for name, x in call.tensors.items()}
    strided["grad_output"] = call.grad_output.transpose(0, 2).contiguous().transpose(0, 2)
    gradients = call.run(monkeypatch, **strided)
    for name in ROWS:
        assert torch.equal(getattr(gradients, name), getattr(expected, name)), name
