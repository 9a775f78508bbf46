"""Gradients of every differentiable backend against dense float64 attention, of plans, and what has none; dropout."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from edge_cases import (
    EDGE_LISTS,
    FORMS,
    dense_edge_attention,
    edge_inputs,
    map_tensors,
    qkv,
)

from bench.baselines import REGISTRY, fused3s_paper
from fused3s import AttentionPlan, EdgeData, plan_attention, sparse_attention
from fused3s.backends.base import Gradients
from fused3s.runtime.cuda_graph import capture
from fused3s.terms.dropout import Dropout, kept_edges
from fused3s.terms.edge_data import FLOATS

DOUBLE = torch.float64
AUTOGRAD = ["reference", "dgl", "csr_unfused", "scatter", "pyg"]  # made of torch calls, with edge data
BACKENDS = [*AUTOGRAD, "formula"]
WITH_COMMON_MASK = [name for name in BACKENDS if name != "pyg"]  # of dropout
SCALE = 0.3
pytestmark = pytest.mark.usefixtures("one_thread", "formula")
close = partial(torch.testing.assert_close, rtol=1e-8, atol=1e-9)


def planned(backend: str, graph: Any, **options: Any) -> AttentionPlan:
    return plan_attention(graph, backend=backend, device="cpu", **({"edge_data": True, "backward": True} | options))


def float_tensors(data: EdgeData) -> list[torch.Tensor]:
    return [each for each in vars(data).values() if isinstance(each, torch.Tensor) and each.is_floating_point()]


@pytest.mark.parametrize("backend", AUTOGRAD)
def test_gradients_of_a_large_graph_need_no_dense_matrix(backend):
    num_nodes = 1 << 18  # a dense matrix would have 0.5 TB
    places = torch.tensor([[0, 5, 5, num_nodes - 1], [3, 0, 5, 9]])
    graph = scipy.sparse.coo_array((np.ones(4), tuple(places.numpy())), shape=(num_nodes, num_nodes))
    tensors = [torch.randn(num_nodes, 1, 2, dtype=DOUBLE, requires_grad=True) for _ in range(3)]
    planned(backend, graph, edge_data=False)(*tensors)[places[0]].sum().backward()
    assert [int(tensor.grad.any(-1).sum()) for tensor in tensors] == [1, 2, 4]


def whole_case(dtype: torch.dtype = DOUBLE) -> tuple[Any, list[torch.Tensor], EdgeData]:
    """A graph as COO, and q, k, v, edge data of all kinds that require gradients."""
    graph = EDGE_LISTS["repeated"]()
    made, order = FORMS["scipy_coo"](graph)
    assert torch.equal(order, torch.arange(graph.num_edges))
    data = edge_inputs("all", graph.num_edges, 2, 5, DOUBLE)
    data = map_tensors(data, lambda each: each.requires_grad_() if each.is_floating_point() else each)
    return made, [each.to(dtype).requires_grad_() for each in qkv(graph.shape, 2, 5, DOUBLE)], data


def test_only_the_gradients_that_are_needed_are_computed(formula):
    graph, tensors, data = whole_case()
    plan = planned("formula", graph, backward=True)
    plan(*tensors, edges=data).sum().backward()
    names = ("multiplier", "features", "key_weight")
    frozen = replace(data, **{name: getattr(data, name).detach() for name in names})
    q, k, v = tensors
    plan(q.detach(), k, v.detach(), edges=frozen).sum().backward()
    wanted = {"key", "edge_values", "value_weight", "type_weight"}
    absent = {"key_factor", "row_values", "column_values", "head_values", "additive_weight"}
    assert formula.wanted == [frozenset(Gradients._fields) - absent, wanted]
    with torch.no_grad():
        assert not plan(*tensors, edges=data).requires_grad
    detached = [tensor.detach() for tensor in tensors]
    assert not plan(*detached).requires_grad
    assert plan(*detached, edges=data).requires_grad
    assert len(formula.wanted) == 2


def test_the_backward_pass_without_autograd_is_what_autograd_gets():
    graph, tensors, data = whole_case()
    plan, dropout = planned("formula", graph), Dropout(0.3, 11)
    with torch.no_grad():
        bound = plan.bind_edges(data)
    leaves = dict(zip(("query", "key", "value"), tensors, strict=True))
    leaves |= {name: each.requires_grad_() for name in FLOATS if (each := getattr(bound, name)) is not None}
    output, lse = plan(*tensors, return_lse=True, edges=bound, dropout=dropout)
    assert lse.requires_grad
    grad_output = torch.randn_like(output)
    expected = torch.autograd.grad(output, leaves.values(), grad_output)
    with torch.no_grad():
        found = plan.backward(grad_output, *tensors, output, lse, wanted=leaves, edges=bound, dropout=dropout)
    for name, gradient in zip(leaves, expected, strict=True):
        assert torch.equal(getattr(found, name), gradient), name
    assert {name for name, each in found._asdict().items() if each is not None} == leaves.keys()


@pytest.mark.parametrize("backend", ["reference", "formula"])
def test_weights_that_are_one_tensor_and_weights_of_bound_edges_have_gradients(backend):
    graph, tensors, data = whole_case()
    plan = planned(backend, graph)
    weight = data.key_weight
    shared = replace(data, value_weight=weight)
    apart = replace(data, value_weight=weight.detach().clone().requires_grad_())
    of_key, of_value = torch.autograd.grad(
        plan(*tensors, edges=apart).square().sum(), (apart.key_weight, apart.value_weight)
    )
    bound = replace(plan.bind_edges(replace(data, key_weight=None)), key_weight=weight, value_weight=weight)
    for edges in (shared, bound):
        (found,) = torch.autograd.grad(plan(*tensors, edges=edges).square().sum(), weight)
        close(found, of_key + of_value)


def test_a_call_that_needs_a_backward_pass_names_the_remedy():
    graph, tensors, _ = whole_case()
    plan = planned("formula", graph, backward=False)
    with torch.no_grad():
        plan(*tensors)
    with pytest.raises(ValueError, match=r"requires a gradient .* plan_attention\(\.\.\., backward=True\)"):
        plan(*tensors)


class TestWithoutDerivative:
    def test_a_backend_without_a_backward_pass_says_which_has_one(self, monkeypatch):
        monkeypatch.setattr(REGISTRY["fused3s_paper"], "unavailable", lambda device: None)
        graph, tensors, _ = whole_case(torch.float16)
        plan = plan_attention(graph, backend="fused3s_paper", device="cpu")
        tensors = [torch.zeros(34, 8, dtype=torch.float16) for _ in range(3)]
        tensors[2].requires_grad_()
        with pytest.raises(ValueError, match=r"fused3s_paper computes the forward pass only, .* backend='fused3s'"):
            plan(*tensors)
        with pytest.raises(ValueError, match="fused3s_paper cannot run this: it computes the forward pass only; grad"):
            plan_attention(graph, backend="fused3s_paper", device="cpu", backward=True)
        monkeypatch.setattr(fused3s_paper, "launch", lambda *given: tensors[0])
        with torch.inference_mode():
            plan(*tensors)

    @pytest.mark.parametrize("backend", ["formula", "dgl"])
    def test_second_derivatives(self, backend):
        graph, (q, k, v), data = whole_case()
        plan = planned(backend, graph)
        message = rf"backend {backend} has no second derivatives, .*'reference'"
        output = plan(q, k, v, edges=data)
        of_query, of_weight = torch.autograd.grad(output.sum(), (q, data.key_weight), create_graph=True)
        for first in (of_query, of_weight):
            with pytest.raises(NotImplementedError, match=message):
                torch.autograd.grad(first.square().sum(), v, retain_graph=True)
        with pytest.raises(NotImplementedError, match=message):
            torch.autograd.functional.hessian(lambda q: plan(q, k, v).square().sum(), q)

    FORWARD_MODE = "has no forward-mode derivative: use reverse mode, or backend='reference'"
    NEITHER = r"has neither forward-mode .*'reference'"
    BATCHES = r"cannot be batched by vmap: put the batch into the heads, \[N, H, d\], or into"

    @pytest.mark.parametrize(
        ("backend", "transform", "message"),
        [
            ("formula", lambda call, q: torch.func.jvp(call, (q,), (torch.ones_like(q),)), FORWARD_MODE),
            ("formula", lambda call, q: torch.func.vmap(call)(torch.stack([q, q])), BATCHES),
            ("formula", lambda call, q: torch.func.jacrev(lambda q: call(q)[0, 0])(q), BATCHES),
            ("dgl", lambda call, q: torch.func.grad(lambda q: call(q).sum())(q), NEITHER),
            ("csr_unfused", lambda call, q: torch.func.vmap(call)(torch.stack([q, q])), NEITHER),
            ("scatter", lambda call, q: torch.func.jvp(call, (q,), (torch.ones_like(q),)), NEITHER),
        ],
    )
    def test_transforms(self, backend, transform, message):
        graph, tensors, _ = whole_case()
        plan = planned(backend, graph)
        q, k, v = (tensor.detach() for tensor in tensors)
        with pytest.raises(NotImplementedError, match=f"backend {backend} {message}"):
            transform(lambda q: plan(q, k, v), q)

    def test_a_changed_input_is_noticed(self):
        graph, (q, k, v), _ = whole_case()
        seed = torch.tensor([3])
        output = planned("formula", graph)(q, k, v, dropout=Dropout(0.5, seed))
        seed += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@pytest.mark.parametrize(("backend", "dtype"), [("csr_unfused", torch.bfloat16), ("formula", torch.float16)])
def test_autocast_casts_the_inputs(backend, dtype):
    graph, tensors, whole = whole_case(torch.float32)
    data = EdgeData(bias=whole.bias.detach().float().requires_grad_())
    plan = planned(backend, graph)
    with torch.autocast("cpu", dtype):
        output = plan(*tensors, edges=data)
        bound = plan(*tensors, edges=plan.bind_edges(data))
        at_once = sparse_attention(*tensors, graph, backend=backend, edges=data)
        assert plan(*tensors, out_dtype=torch.float32).dtype == torch.float32
        assert plan(*(tensor.double() for tensor in tensors)).dtype == DOUBLE
    output.sum().backward()
    cast = [tensor.detach().to(dtype) for tensor in tensors]
    expected = plan(*cast, edges=EdgeData(bias=data.bias.detach().to(dtype)))
    for each in (output, bound, at_once):
        assert torch.equal(each, expected)
    assert [tensor.grad.dtype for tensor in (*tensors, data.bias)] == [torch.float32] * 4


class TestDropout:
    RATE, SEED = 0.4, 1234567890123

    @pytest.mark.parametrize("backend", WITH_COMMON_MASK)
    def test_weights_are_dropped_by_the_common_mask(self, backend):
        graph = EDGE_LISTS["empty_rows_and_windows"]()
        made, _ = FORMS["dgl"](graph)
        plan = planned(backend, made, edge_data=False)
        tensors = [tensor.requires_grad_() for tensor in qkv(graph.shape, 3, 5, DOUBLE)]
        num_rows, num_cols = graph.shape
        row, col = torch.ones(num_rows, num_cols).nonzero().T  # all pairs
        kept = kept_edges(Dropout(self.RATE, torch.tensor([self.SEED])), row, col, 3).view(num_rows, num_cols, 3)

        def dense(q, k, v):
            ones = torch.eye(num_cols, dtype=DOUBLE)[:, None].expand(-1, 3, -1)
            weights, _ = dense_edge_attention(q, k, ones, graph.mask(), SCALE)  # [N, H, M]
            return torch.einsum("nhm,nmh,mhd->nhd", weights, kept.double() / (1 - self.RATE), v)

        output = plan(*tensors, scale=SCALE, dropout=Dropout(self.RATE, self.SEED))
        expected = dense(*tensors)
        close(output, expected)
        factors = torch.randn_like(expected)
        found, wanted = (torch.autograd.grad((each * factors).sum(), tensors) for each in (output, expected))
        close(found, wanted)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_with_all_edge_data_every_backend_agrees(self, backend):
        dropout, results = Dropout(self.RATE, self.SEED) if backend in WITH_COMMON_MASK else 0.0, []
        for name in ("reference", backend):
            graph, tensors, data = whole_case()
            output = planned(name, graph)(*tensors, edges=data, dropout=dropout)
            (output * torch.arange(5)).sum().backward()
            results.append([output, *(leaf.grad for leaf in (*tensors, *float_tensors(data)))])
        close(*results)

    def test_seeds_are_ints_tensors_or_drawn(self):
        graph, tensors, _ = whole_case()
        plan = planned("reference", graph, edge_data=False)

        def call(seed):
            return plan(*tensors, dropout=Dropout(self.RATE, seed))

        tensor = torch.tensor([self.SEED])
        assert torch.equal(call(self.SEED), call(tensor))
        assert torch.equal(
            call(self.SEED),
            sparse_attention(*tensors, graph, backend="reference", dropout=Dropout(self.RATE, tensor)),
        )
        before = call(tensor)
        tensor += 1
        assert not torch.equal(call(tensor), before)
        assert torch.equal(call(tensor), call(self.SEED + 1))
        assert torch.isfinite(call(-(1 << 63))).all()
        torch.manual_seed(3)
        first, second = call(None), call(None)
        torch.manual_seed(3)
        assert torch.equal(call(None), first)
        assert not torch.equal(first, second)

    def test_masks_of_all_seeds_rows_and_heads_are_pairwise_independent(self):
        """Small seeds, as `seed=step` gives, negative ones, and those that differ in their high words."""
        seeds = [*range(64), *range(-16, 0), *(k << 32 for k in range(1, 17)), *((k << 32) + k for k in range(1, 17))]
        seeds += [2**63 - 1, -(2**63)]
        num_rows, num_cols = 32, 256
        row, col = torch.ones(num_rows, num_cols).nonzero().T
        kept = torch.stack([kept_edges(Dropout(0.5, torch.tensor([seed])), row, col, 2) for seed in seeds])
        signs = (2 * kept.float() - 1).view(len(seeds), num_rows, num_cols, 2).movedim(2, 3).flatten(0, 2)
        # A sum of n independent signs has the mean 0, the variance n, and passes 7 sqrt(n) once in 4e11 pairs.
        sums = (signs @ signs.T)[tuple(torch.triu_indices(len(signs), len(signs), 1))]
        assert sums.abs().max() < 7 * num_cols**0.5
        assert abs(sums.square().mean() / num_cols - 1) < 0.01
        assert signs.sum().abs() < 7 * signs.numel() ** 0.5
        assert kept_edges(Dropout(0.1, torch.tensor([3])), row, col, 2).float().mean() == pytest.approx(0.9, abs=0.01)

    def test_a_backend_without_dropout_is_named(self):
        graph, tensors, _ = whole_case()
        with pytest.raises(
            ValueError, match=r"dropout: got 0.5; backend sdpa_padded has no dropout, these have: fused3s"
        ):
            planned("sdpa_padded", graph, edge_data=False)(*tensors, dropout=0.5)


@pytest.mark.gpu
def test_gpu_a_captured_step_draws_a_mask_at_each_replay():
    graph = EDGE_LISTS["hub"]()
    made, _ = FORMS["dgl"](graph)
    plan = plan_attention(made, backend="fused3s", device="cuda", backward=True)
    tensors = [tensor.cuda().half().requires_grad_() for tensor in qkv(graph.shape, 2, 16)]
    seed = torch.tensor([5], device="cuda")

    def step() -> list[torch.Tensor]:
        output = plan(*tensors, dropout=Dropout(0.4, seed))
        return [output, *torch.autograd.grad(output.float().square().sum(), tensors)]

    captured = capture(step, torch.device("cuda", 0))
    outputs = []
    for _ in range(2):
        seed += 1
        replayed = [tensor.clone() for tensor in captured.replay()]
        torch.testing.assert_close(replayed, step(), rtol=1e-2, atol=1e-3)
        outputs.append(replayed[0])
    assert not torch.equal(*outputs)
