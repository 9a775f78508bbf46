"""cuda/tiles/backward.cu on the CPU (tests/cuda_shim): the real source and plans against float64 autograd."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from gradient_cases import GradientCase, assert_gradients, gradient_case
from instances import plan_for
from launch_variants import BY_BLOCK, BY_TEAM, SPLIT, Variant
from plan_oracle import make_schedule, with_pass_schedules
from poison import poisoned_buffers
from tolerance import edges_of

from bench.baselines import REGISTRY
from bench.precision import matmul_precision
from fused3s.backends.base import QKV, BackwardCall, Call, InputSpec
from fused3s.backends.reference import edge_softmax_attention
from fused3s.fused import backend as fused3s
from fused3s.fused.edges import forward as fused3s_edges
from fused3s.fused.gradients import launch_gradients
from fused3s.fused.planning import plan as fused3s_planning
from fused3s.fused.tiles import backward as fused3s_backward
from fused3s.fused.tiles import forward as fused3s_forward
from fused3s.fused.tiles.backward import backward_instance, pass_schedules, warps_of_team
from fused3s.fused.tuning import SM90
from fused3s.graph.csr import csr_pattern
from fused3s.graph.reorder.row_order import permute_rows
from fused3s.runtime.device import GPULimits
from fused3s.runtime.jit import Element, input_element
from fused3s.terms.dropout import Dropout
from fused3s.terms.edge_data import VALUES, BoundEdges
from tests.cuda_shim.cuda_on_cpu import MODES, ON_SHIM, cuda_on_cpu, sizes_alone
from tests.cuda_shim.oracle import GRAPHS, MULTIGRAPHS, inputs

pytestmark = ON_SHIM

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
# Copies of 4, 8 and 16 bytes, padding columns, one, two and four warps a team, dropout. An instance takes seconds to
# compile.
SHAPES = [
    *[(2, HALF, 0.0), (76, HALF, 0.0), (40, BFLOAT, 0.3), (128, HALF, 0.0), (130, BFLOAT, 0.3)],
    *[(2, FLOAT, 0.0), (8, FLOAT, 0.0), (12, FLOAT, 0.3), (40, FLOAT, 0.0), (64, FLOAT, 0.0), (72, FLOAT, 0.3)],
    (200, FLOAT, 0.0),
]


VARIANTS = [
    Variant(BY_TEAM, "late", 1, 0.3, reordered=True),
    Variant(BY_BLOCK, "early", 3, 0.2, strided=True),
    Variant(SPLIT, "random", 1, -0.2, reordered=True),
    Variant(SPLIT, "late", 1, 0.2, strided=True),
]


def make_case(graph, dim, dtype, variant: Variant, rate=0.0) -> GradientCase:
    tensors = inputs(graph, variant.heads, dim, dtype, variant.strided)
    dropout = Dropout(rate, torch.tensor([2**40 + 7])) if rate else None
    return gradient_case(*edges_of(graph), *tensors, variant.scale, dropout)


def permutation(graph) -> torch.Tensor:
    return torch.randperm(graph.shape[0], generator=torch.Generator().manual_seed(3)).int()


def build(graph, heads, dim, reordered=False, edge_data=False):
    """A plan with both passes over KV tiles."""
    pattern, perm, device = csr_pattern(graph), None, torch.device("cpu")
    if reordered:
        perm = permutation(graph)
        pattern = permute_rows(pattern, perm)
    by_tile = replace(SM90, forward=(), backward=(), backward_with_values=())
    with pytest.MonkeyPatch.context() as patch:
        for module in (fused3s, fused3s_forward, fused3s_backward, fused3s_edges, fused3s_planning):
            patch.setattr(module, "tuning_for", lambda gpu: by_tile)
        inputs = InputSpec(None, dim, heads, backward=True, edge_data=edge_data)
        return REGISTRY["fused3s"].build(pattern, device, inputs, perm).arrays


def run(monkeypatch, graph, case: GradientCase, variant: Variant, wanted=QKV, edges=None):
    """Gradients by a schedule of the variant's own; of query, key and value without `edges`."""
    if case.dropout is not None:
        edges = BoundEdges(dropout=case.dropout)
    call = Call(case.query, case.key, case.value, case.scale, case.output.dtype, case.lse, edges)
    team = warps_of_team(input_element(case.query.dtype), case.query.shape[2])
    teams = SM90.teams if team == 1 else SM90.few_teams
    with cuda_on_cpu(MODES[variant.mode]) as gpu:
        of_edges = edges is not None and edges.edge_values is not None
        data = build(graph, *case.query.shape[1:], variant.reordered, of_edges)
        data = with_pass_schedules(
            data,
            make_schedule(data.kv_tiles, data.tile_offset, teams, variant.split),
            make_schedule(data.column_tiles, data.column_tile_offset, teams, variant.split),
        )
        with poisoned_buffers(monkeypatch):
            grads = launch_gradients(data, BackwardCall(call, case.output, case.grad_output, wanted))
    assert gpu.bank_conflicts == 0, "the swizzle spreads eight rows over all banks"
    if edges is not None and edges.score is not None:
        assert all(name.startswith("fused3s_backward<") for name in gpu.launched), "over KV tiles"
        return grads
    assert grads[3:] == (None,) * len(grads[3:])
    return grads[:3]


@pytest.mark.parametrize(("dim", "dtype", "rate"), SHAPES)
def test_gradients_match_float64(monkeypatch, dim, dtype, rate):
    for number, (name, make_graph) in enumerate(MULTIGRAPHS.items()):
        graph = make_graph()
        variant = VARIANTS[(number + dim // 2) % len(VARIANTS)]
        case = make_case(graph, dim, dtype, variant, rate)
        assert_gradients(run(monkeypatch, graph, case, variant), case, f"{name}, {variant}")


@pytest.mark.parametrize("dim", [16, 130, 256])
def test_one_tf32_term(monkeypatch, dim):
    with matmul_precision("high"):
        for number, name in enumerate(("hub", "wide", "tall", "empty_rows_and_windows")):
            graph, variant = GRAPHS[name](), VARIANTS[(number + dim // 2) % len(VARIANTS)]
            case = make_case(graph, dim, FLOAT, variant)
            assert_gradients(run(monkeypatch, graph, case, variant), case, f"{name}, {variant}")


@pytest.mark.parametrize("mode", ["early", "random"])
@pytest.mark.parametrize(("dim", "dtype"), [(128, HALF), (72, FLOAT), (200, FLOAT)])
def test_the_bits_do_not_depend_on_the_order_of_events(monkeypatch, mode, dim, dtype):
    graph = GRAPHS["wide"]()
    case = make_case(graph, dim, dtype, VARIANTS[3])
    first, second = (run(monkeypatch, graph, case, replace(VARIANTS[3], mode=each)) for each in ("late", mode))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize(("dim", "dtype"), [(128, HALF), (64, FLOAT)])
def test_a_row_without_weight_has_no_gradient(monkeypatch, dim, dtype):
    """LSE -infinity: the row's edges count for nothing, and its values reach no gradient."""
    graph = GRAPHS["n_one_past_16"]()
    kept = graph.copy()
    kept.data[kept.indptr[20] : kept.indptr[21]] = 0
    kept.eliminate_zeros()
    variant = VARIANTS[0]
    case = make_case(kept, dim, dtype, variant)
    assert case.lse[20] == -torch.inf
    grads = run(monkeypatch, graph, case, variant)
    assert not grads[0][20].any()
    assert_gradients(grads, case, "row 20")


def test_nan_stays_in_its_head_and_window(monkeypatch):
    """A NaN in a float32 query reaches the gradients of its own row, and of columns in the windows that gather it."""
    graph = GRAPHS["n_one_past_16"]()
    case = make_case(graph, 40, FLOAT, replace(VARIANTS[1], strided=False))
    clean = run(monkeypatch, graph, case, VARIANTS[1])
    query = case.query.clone()
    query[20, 1, 3] = torch.nan
    grads = run(monkeypatch, graph, replace(case, query=query), VARIANTS[1])
    assert grads[0][20, 1].isnan().all()
    assert grads[0].isnan().any(-1).nonzero().tolist() == [[20, 1]]
    keys = graph[[20]].indices
    for got, without in zip(grads[1:], clean[1:], strict=True):
        assert got[keys, 1].isnan().any(-1).all()
        assert torch.equal(got[:, [0, 2]], without[:, [0, 2]])


def test_only_what_is_wanted_runs(monkeypatch):
    graph = GRAPHS["n_one_past_16"]()
    case = make_case(graph, 128, HALF, VARIANTS[0])
    query, key, value = run(monkeypatch, graph, case, VARIANTS[0], wanted={"query"})
    assert torch.equal(query, run(monkeypatch, graph, case, VARIANTS[0])[0])
    assert key is None
    assert value is None


def test_the_transpose_of_a_symmetric_graph_has_its_tiles_whatever_the_order_of_rows(monkeypatch):
    graph = GRAPHS["n_one_past_16"]()
    symmetric = graph + graph.T
    with cuda_on_cpu():
        plain, reordered = build(symmetric, 1, 64), build(symmetric, 1, 64, reordered=True)
        wide = build(symmetric, 4, 256)
    assert torch.equal(plain.column_tiles, plain.kv_tiles)
    assert torch.equal(reordered.column_tiles, plain.column_tiles)
    assert (plain.row_work_items.shape[1], wide.row_work_items.shape[1]) == (SM90.teams, SM90.few_teams)


@pytest.mark.parametrize("block_kb", [227, 163, 99])  # H100, A100, RTX 4090
@pytest.mark.parametrize(("dtype", "head_dim"), [(HALF, None), (FLOAT, 256), (None, 64), (None, None)])
def test_blocks_fit_all_inputs_that_a_plan_leaves_open(monkeypatch, block_kb, dtype, head_dim):
    limits = GPULimits(108, sm_shared_bytes=(block_kb + 1) * 1024, block_shared_bytes=block_kb * 1024)
    plan_for(monkeypatch, limits)
    elements = [Element.HALF, Element.FLOAT] if dtype is None else [input_element(dtype)]
    dims = [64, 128, 256] if head_dim is None else [head_dim]
    for columns, form in enumerate(pass_schedules(torch.device("cpu"), 1, head_dim, dtype)):
        instances = [
            backward_instance(element, dim, bool(columns), form.warps) for element, dim in product(elements, dims)
        ]
        for instance, sizes in zip(instances, sizes_alone(tuple(instances)), strict=True):
            assert sizes.shared_bytes <= block_kb * 1024, instance.name


# One, two and four warps a team; the largest number of sums, and one.
@pytest.mark.parametrize("dim", [40, 128, 200, 256])
def test_gradients_of_score_terms_in_every_schedule(monkeypatch, dim):
    """Sums over the windows of one team, of a block and of several blocks; rows without an edge have gradients of 0."""
    text = "s + row0 * column0 + head0 - row1 * tanh(s) + head1 * column1"
    for number, name in enumerate(("hub", "repeated", "wide", "empty_rows_and_windows")):
        graph, generator = MULTIGRAPHS[name](), torch.Generator().manual_seed(dim)
        variant = VARIANTS[(number + dim // 40) % len(VARIANTS)]
        (num_rows, num_cols), heads = graph.shape, variant.heads

        def values(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        edges = BoundEdges(
            score=f"clamp({text}, -number0, number0)",
            score_numbers=(3.0,),
            row_values=values(num_rows, 1, 2),
            column_values=values(num_cols, heads, 2),
            head_values=values(1, heads, 2),
        )
        tensors = inputs(graph, heads, dim, HALF, variant.strided)
        grad_output = values(*tensors[0].shape).half()
        check_term(monkeypatch, graph, variant, tensors, edges, grad_output, None, name)


def check_term(monkeypatch, graph, variant, tensors, edges, grad_output, order, label) -> None:
    """Gradients of q, k, v and the values of `edges`; `order`: the edges of `graph` in the order of the plan."""
    names = ("query", "key", "value", *(each for each in VALUES if getattr(edges, each) is not None))
    given = (*tensors, *(getattr(edges, each) for each in names[3:]))
    leaves = dict(zip(names, (each.double().requires_grad_() for each in given), strict=True))
    terms, ends = replace(edges, **{each: leaves[each] for each in names[3:]}), edges_of(graph)
    output, lse = edge_softmax_attention(*(leaves[each] for each in names[:3]), *ends, variant.scale, terms)
    expected = dict(zip(names, torch.autograd.grad(output, leaves.values(), grad_output.double()), strict=True))
    output = output.detach().half()
    case = GradientCase(*ends, *tensors, grad_output, output, lse.detach().float(), variant.scale)
    if edges.edge_values is not None:
        expected["edge_values"] = expected["edge_values"][order]
        edges = replace(edges, edge_values=edges.edge_values[order])
    found = run(monkeypatch, graph, case, variant, frozenset(names), edges)
    for each, wanted in expected.items():
        got = getattr(found, each)
        terms_of_sum = graph.shape[0] if each == "head_values" else 1
        error, size = (got.double() - wanted).abs().max(), wanted.abs().max() + terms_of_sum
        assert error <= 8 * torch.finfo(HALF).eps * size, f"{label}, {variant}, {each}: {error:.2e} of {size:.2e}"


@pytest.mark.parametrize("dim", [16, 128, 200])
def test_gradients_of_values_of_edges_in_every_schedule(monkeypatch, dim):
    """One value of an edge, for all heads or for each, on KV tiles of one edge up to 256."""
    for number, name in enumerate(("hub", "wide", "tall", "empty_rows_and_windows", "n_one_past_16", "dense")):
        graph = sp.csr_array(np.ones((20, 40))) if name == "dense" else GRAPHS[name]()
        variant, generator = VARIANTS[(number + dim // 100) % len(VARIANTS)], torch.Generator().manual_seed(dim)
        (row, _), heads = edges_of(graph), variant.heads
        per_head = number % 3 > 0
        values = torch.randn((len(row), heads if per_head else 1, 1), generator=generator).half()
        edges = BoundEdges(score="clamp(s + edge0, -number0, number0)", score_numbers=(2.0,), edge_values=values)
        order = torch.arange(len(row))
        if variant.reordered:
            order = torch.sort(permutation(graph).long().argsort()[row], stable=True).indices
        tensors = inputs(graph, heads, dim, HALF, variant.strided)
        grad_output = torch.randn(tensors[0].shape, generator=generator).half()
        check_term(monkeypatch, graph, variant, tensors, edges, grad_output, order, f"{name}, per head: {per_head}")
