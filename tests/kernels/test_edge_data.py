"""Edge data: every backend that takes it against dense float64 attention, gradients, plans, and wrong arguments."""

import copy
import re
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from edge_cases import (
    EDGE_LISTS,
    FORMS,
    KINDS,
    RANK,
    TYPES,
    EdgeList,
    edge_inputs,
    expected_attention,
    in_order,
    map_tensors,
    qkv,
)

from baselines import REGISTRY
from kernels import AttentionPlan, BoundEdges, EdgeData, plan_attention, sparse_attention
from kernels import attention as attention_module
from kernels.backends import reference
from kernels.backends.base import InputSpec
from kernels.backends.reference import Edges, ReferenceBackend
from kernels.runtime.cuda_graph import capture

DOUBLE = torch.float64
BACKENDS = ["reference", "dgl", "csr_unfused", "scatter", "pyg"]
SCALE = 0.3
pytestmark = pytest.mark.usefixtures("one_thread")
close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-10)


def skip_if_missing(backend: str) -> None:
    if reason := REGISTRY[backend].unavailable(torch.device("cpu")):
        pytest.skip(f"{backend}: {reason}")


@cache
def case(name: str, kind: str, heads: int, dim: int, dtype: torch.dtype = DOUBLE):
    """(graph, [q, k, v], edge data, output, log-sum-exp) in float64, of a graph with edge data of a kind."""
    graph = EDGE_LISTS[name]()
    tensors = qkv(graph.shape, heads, dim, dtype)
    inputs = edge_inputs(kind, graph.num_edges, heads, dim, dtype)
    return graph, tensors, inputs, *expected_attention(graph, *tensors, inputs, SCALE)


def planned(backend: str, graph, **options) -> AttentionPlan:
    return plan_attention(graph, backend=backend, device="cpu", edge_data=True, **options)


@pytest.mark.parametrize("dim", [5, 16])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("name", EDGE_LISTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_graph_and_kind_agrees_with_dense_attention(backend, name, heads, dim):
    skip_if_missing(backend)
    made, order = FORMS["dgl"](EDGE_LISTS[name]())
    plan = planned(backend, made)
    for kind in KINDS:
        _, tensors, inputs, expected, _ = case(name, kind, heads, dim)
        output = plan(*tensors, scale=SCALE, edges=in_order(inputs, order))
        close(output, expected, msg=lambda text, kind=kind: f"{kind}: {text}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_form_of_a_graph_keeps_its_edges(backend, form, kind):
    skip_if_missing(backend)
    for name in ("repeated", "tall"):
        graph, tensors, inputs, expected, _ = case(name, kind, 2, 5)
        made, order = FORMS[form](graph)
        output = planned(backend, made)(*tensors, scale=SCALE, edges=in_order(inputs, order))
        close(output, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["reference", "dgl", "csr_unfused"])
def test_narrow_types_are_computed_wider(backend, dtype):
    skip_if_missing(backend)
    made, order = FORMS["dgl"](EDGE_LISTS["self_loops"]())
    plan = planned(backend, made)
    resolution = torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-5
    for kind in KINDS:
        _, tensors, inputs, expected, _ = case("self_loops", kind, 3, 16, dtype)
        output = plan(*tensors, scale=SCALE, edges=in_order(inputs, order))
        assert output.dtype == dtype
        torch.testing.assert_close(output.double(), expected, rtol=resolution, atol=resolution)


def test_reference_takes_edges_in_chunks(monkeypatch):
    graph, tensors, inputs, expected, _ = case("hub", "all", 3, 16)
    made, order = FORMS["dgl"](graph)
    monkeypatch.setattr(reference, "ELEMENTS_PER_CHUNK", 50 * 3 * 16)
    close(planned("reference", made)(*tensors, scale=SCALE, edges=in_order(inputs, order)), expected)


def test_pyg_keeps_the_inputs_type():
    skip_if_missing("pyg")
    graph, tensors, inputs, expected, _ = case("self_loops", "all", 3, 16, torch.bfloat16)
    made, order = FORMS["dgl"](graph)
    output = planned("pyg", made)(*tensors, scale=SCALE, edges=in_order(inputs, order))
    assert output.dtype == torch.bfloat16
    assert (output.double() - expected).norm() < 0.02 * expected.norm()


def test_a_clamped_bias_of_minus_infinity_is_an_edge_again():
    graph = EdgeList(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), (3, 2))
    q, k, v = torch.zeros(3, 1), torch.zeros(2, 1), torch.tensor([[1.0], [2.0]])
    data = EdgeData(bias=torch.tensor([0.0, -torch.inf, -torch.inf]))
    made, _ = FORMS["scipy_coo"](graph)
    for backend in BACKENDS:
        if REGISTRY[backend].unavailable(torch.device("cpu")):
            continue
        hidden = sparse_attention(q, k, v, made, backend=backend, edges=data)
        assert hidden.flatten().tolist() == [1, 0, 0], backend
        clamped = sparse_attention(q, k, v, made, backend=backend, edges=replace(data, clamp=2.0))
        weight = torch.exp(torch.tensor(-2.0))
        torch.testing.assert_close(clamped.flatten(), torch.tensor([(1 + 2 * weight) / (1 + weight), 2.0, 0.0]))


def test_a_nan_in_q_stays_in_its_row():
    graph = EDGE_LISTS["self_loops"]()
    q, k, v = qkv(graph.shape, 2, 5, DOUBLE)
    q[3] = torch.nan
    made, order = FORMS["dgl"](graph)
    inputs = edge_inputs("features", graph.num_edges, 2, 5, DOUBLE)
    for backend in BACKENDS:
        if REGISTRY[backend].unavailable(torch.device("cpu")):
            continue
        output = planned(backend, made)(q, k, v, edges=in_order(inputs, order))
        assert torch.isnan(output[3]).all(), backend
        assert torch.isfinite(output[torch.arange(36) != 3]).all(), backend


@pytest.mark.parametrize("kind", KINDS)
def test_log_sum_exp_has_the_edge_terms(kind):
    graph, tensors, inputs, expected, expected_lse = case("empty_rows_and_windows", kind, 3, 5)
    made, order = FORMS["scipy_coo"](graph)
    output, lse = planned("reference", made)(*tensors, scale=SCALE, return_lse=True, edges=in_order(inputs, order))
    close(output, expected)
    torch.testing.assert_close(lse, expected_lse.float())
    assert (lse[:20] == -torch.inf).all()


class ShuffledReference(ReferenceBackend):
    """`reference` with its edges in an order of its own, and rows in the order it is given."""

    name = "shuffled"
    reorders = True

    def build(self, graph, device, inputs, perm=None):
        edges = super().build(graph, device, inputs)
        self.shuffle = torch.randperm(edges.row.numel(), generator=torch.Generator().manual_seed(1))
        row = edges.row if perm is None else perm.long()[edges.row]
        return Edges(row[self.shuffle], edges.col[self.shuffle])

    def edge_order(self, data):
        return self.shuffle


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reorder", ["none", "communities"])
def test_a_backend_keeps_edges_and_rows_in_its_own_order(monkeypatch, reorder, form):
    monkeypatch.setitem(REGISTRY, "shuffled", ShuffledReference())
    for name in ("repeated", "self_loops"):
        graph = EDGE_LISTS[name]()
        made, order = FORMS[form](graph)
        plan = planned("shuffled", made, reorder=reorder)
        if reorder != "none":
            assert plan.order.perm is not None
        for kind in KINDS:
            _, tensors, inputs, expected, _ = case(name, kind, 2, 5)
            output = plan(*tensors, scale=SCALE, edges=in_order(inputs, order))
            close(output, expected)


def whole_case(heads: int = 2, dim: int = 5):
    """A graph with repeated edges as COO, q, k, v, and all kinds of edge data."""
    graph = EDGE_LISTS["repeated"]()
    made, order = FORMS["scipy_coo"](graph)
    assert torch.equal(order, torch.arange(graph.num_edges))
    return made, qkv(graph.shape, heads, dim, DOUBLE), edge_inputs("all", graph.num_edges, heads, dim, DOUBLE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_ways_to_bring_edge_data_give_the_same(backend):
    skip_if_missing(backend)
    graph, tensors, data = whole_case()
    plan = planned(backend, graph)
    bound = plan.bind_edges(data)
    assert isinstance(bound, BoundEdges)
    output = plan(*tensors, edges=data)
    assert torch.equal(plan(*tensors, edges=bound), output)
    assert torch.equal(sparse_attention(*tensors, graph, backend=backend, edges=data), output)
    one_head = [tensor[:, 0] for tensor in tensors]
    heads_first = {"bias": data.bias[:, :1], "type_weight": data.type_weight[:, :1]}
    heads_first |= {"key_weight": data.key_weight[:1], "value_weight": data.value_weight[:1]}
    torch.testing.assert_close(plan(*one_head, edges=replace(data, **heads_first)), output[:, 0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_bound_edges_take_other_weights_and_another_clamp(backend):
    skip_if_missing(backend)
    graph, tensors, data = whole_case()
    plan = planned(backend, graph)
    bound = plan.bind_edges(data)
    for changed in ({"key_weight": -data.key_weight}, {"value_weight": None, "clamp": 0.5}, {"clamp": None}):
        other = replace(bound, **changed)
        assert other.padded_features is bound.padded_features
        output = plan(*tensors, edges=other)
        assert torch.equal(output, plan(*tensors, edges=replace(data, **changed)))
        assert not torch.equal(output, plan(*tensors, edges=bound))
    with pytest.raises(ValueError, match=r"key_weight: got shape \(2, 11, 5\); \[H, d, r\] = \[2, 5, 11\] is needed"):
        plan(*tensors, edges=replace(bound, key_weight=data.key_weight.transpose(1, 2)))
    with pytest.raises(ValueError, match=r"clamp: got -1\.0; a positive finite number is needed"):
        plan(*tensors, edges=replace(bound, clamp=-1.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_features_of_wider_rows_are_padded_with_zeros(backend):
    """Kernels multiply whole rows of 16 features: what the caller has behind his own does not matter."""
    skip_if_missing(backend)
    graph, tensors, data = whole_case()
    features = data.features
    wide = torch.full((len(features), 16), torch.nan, dtype=features.dtype)
    wide[:, : features.shape[1]] = features
    plan = planned(backend, graph)
    bound = plan.bind_edges(replace(data, features=wide[:, : features.shape[1]]))
    assert bound.features.shape[1] == features.shape[1]
    assert (bound.padded_features[:, features.shape[1] :] == 0).all()
    assert torch.equal(plan(*tensors, edges=bound), plan(*tensors, edges=data))


def test_bound_edges_are_copies():
    graph, tensors, data = whole_case()
    plan = planned("reference", graph)
    bound = plan.bind_edges(data)
    assert bound.types.dtype == torch.uint8
    expected = plan(*tensors, edges=bound)
    for tensor in (data.bias, data.features, data.types):
        tensor.zero_()
    assert torch.equal(plan(*tensors, edges=bound), expected)


def test_torch_compile_traces_a_call_with_bound_edges():
    graph, tensors, data = whole_case()
    plan = planned("reference", graph)
    bound = plan.bind_edges(data)
    compiled = torch.compile(lambda *given: plan(*given, edges=bound), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), plan(*tensors, edges=bound))
    torch.compiler.reset()


@pytest.mark.parametrize("backend", ["reference", "csr_unfused", "pyg"])
def test_a_plan_keeps_its_edge_order_where_it_goes(backend):
    skip_if_missing(backend)
    graph, tensors, data = whole_case()
    plan = planned(backend, graph)
    expected = plan(*tensors, edges=data)
    copied = copy.deepcopy(plan)
    assert copied.inputs == plan.inputs == InputSpec(edge_data=True)
    assert torch.equal(copied(*tensors, edges=data), expected)
    with pytest.raises(ValueError, match="bound by another plan; bind the EdgeData with bind_edges of this one"):
        copied(*tensors, edges=plan.bind_edges(data))

    moved = plan.to("meta")
    assert moved.edge_order.edge_of_csr.device.type == "meta"
    plain = plan_attention(graph, backend=backend, device="cpu")
    assert moved.nbytes == plan.nbytes == plain.nbytes + 8 * plan.edge_order.num_edges
    assert f"; takes data of {graph.nnz} edges" in repr(plan)
    assert "edges" not in repr(plain)


def test_a_plain_plan_costs_nothing_more(monkeypatch):
    graph, tensors, _ = whole_case()
    monkeypatch.setattr(attention_module, "edge_order", lambda *arguments: pytest.fail("an edge order was made"))
    plan = plan_attention(graph, backend="reference", device="cpu")
    assert plan.edge_order is None

    class WithoutEdges(ReferenceBackend):
        name = "without_edges"

        def attend(self, data, call):
            assert call.edges is None
            return super().attend(data, call)

    monkeypatch.setitem(REGISTRY, "without_edges", WithoutEdges())
    other = plan_attention(graph, backend="without_edges", device="cpu")
    assert torch.equal(other(*tensors), plan(*tensors))


def test_auto_passes_over_backends_without_edge_data(caplog):
    graph, tensors, data = whole_case()
    with caplog.at_level("INFO", logger="kernels"):
        output = sparse_attention(*tensors, graph, edges=data)
    assert "attention backend: csr_unfused on cpu" in caplog.text
    torch.testing.assert_close(output, sparse_attention(*tensors, graph, backend="reference", edges=data))


def test_auto_needs_a_backend_with_edge_data(monkeypatch, caplog):
    for name, backend in REGISTRY.items():
        monkeypatch.setattr(backend, "unavailable", lambda device: None)
        monkeypatch.setattr(backend, "takes_edges", name == "csr_unfused")
    with caplog.at_level("INFO", logger="kernels"):
        assert planned("auto", whole_case()[0]).backend == "csr_unfused"
    assert "not fused3s: it takes no edge data, which only csr_unfused do" in caplog.text


def test_the_dgl_backend_makes_no_tensor_of_edges_by_columns():
    """[nnz, H, d] would be the largest tensor by far; the allocations of autograd's saved tensors show it."""
    skip_if_missing("dgl")
    heads, dim = 2, 512
    graph = EDGE_LISTS["hub"]()
    made, order = FORMS["dgl"](graph)
    data = in_order(edge_inputs("all", graph.num_edges, heads, dim, torch.float32), order)
    q, k, v = (tensor.requires_grad_() for tensor in qkv(graph.shape, heads, dim))
    plan = planned("dgl", made)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: sizes.append(tensor.numel()) or tensor, lambda t: t):
        plan(q, k, v, edges=data)
    assert sizes
    assert max(sizes) < plan.edge_order.edge_of_csr.numel() * heads * dim


GRAPH, TENSORS, DATA = whole_case()
E = GRAPH.nnz
LOOPS = int((EDGE_LISTS["repeated"]().row == EDGE_LISTS["repeated"]().col).sum())


def zeros(*shape: int, dtype: torch.dtype = DOUBLE) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def changed(tensor: torch.Tensor, value: float, *places: int) -> torch.Tensor:
    tensor = tensor.clone()
    for place in places:
        tensor[place] = value
    return tensor


LENGTH = f"but the graph has {E} edges"
WRONG_DATA = {
    "length": (EdgeData(bias=zeros(E + 1)), rf"bias: got shape \({E + 1},\), {LENGTH}; {E} entries are needed"),
    "scalar": (EdgeData(bias=zeros()), rf"bias: got shape \(\), {LENGTH}; {E} entries are needed"),
    "self_loops": (
        EdgeData(types=zeros(E - LOOPS, dtype=torch.int64)),
        f"types: .*{LENGTH}; {E} entries are needed, in the graph's edge order, also for self loops",
    ),
    "device": (
        EdgeData(multiplier=zeros(E).to("meta")),
        "multiplier: on meta, but the graph was planned for cpu; they",
    ),
    "integer_bias": (EdgeData(bias=zeros(E, dtype=torch.int64)), r"bias: got torch\.int64; q's floating-point type is"),
    "integer_features": (
        EdgeData(features=zeros(E, 4, dtype=torch.int32)),
        r"features: got torch\.int32; q's floating-point type is needed",
    ),
    "bias_shape": (EdgeData(bias=zeros(E, 2, 1)), rf"bias: got shape \({E}, 2, 1\); \[E\] or \[E, H\] is allowed"),
    "features_shape": (EdgeData(features=zeros(E)), rf"features: got shape \({E},\); \[E, r\] with r from 1 to 16"),
    "no_features": (EdgeData(features=zeros(E, 0)), r"features: .*\[E, r\] with r from 1 to 16 is allowed"),
    "many_features": (EdgeData(features=zeros(E, 17)), r"features: .*\[E, r\] with r from 1 to 16 is allowed"),
    "nan_bias": (
        EdgeData(bias=changed(zeros(E, 2), torch.nan, 9, 7)),
        r"bias: edge 7, column 0 is nan; finite numbers and -inf \(weight 0\) are allowed",
    ),
    "infinite_bias": (EdgeData(bias=changed(zeros(E), torch.inf, 5)), "bias: edge 5 is inf; finite numbers and -inf"),
    "nan_multiplier": (EdgeData(multiplier=changed(zeros(E), torch.nan, 4)), "multiplier: edge 4 is nan; finite"),
    "infinite_multiplier": (
        EdgeData(multiplier=changed(zeros(E), -torch.inf, 4)),
        "multiplier: edge 4 is -inf; finite numbers are allowed",
    ),
    "nan_features": (EdgeData(features=changed(zeros(E, 3), torch.nan, 4)), "features: edge 4, column 0 is nan; fin"),
    "float_types": (EdgeData(types=zeros(E)), r"types: got torch\.float64; integers are needed, one of torch\.uint8"),
    "types_shape": (EdgeData(types=zeros(E, 2, dtype=torch.int64)), r"types: got shape .*; \[E\] is needed, one type"),
    "negative_type": (
        EdgeData(types=changed(zeros(E, dtype=torch.int64), -1, 8, 6)),
        "types: edge 6 is -1; 0 to 255 are allowed",
    ),
    "large_type": (EdgeData(types=changed(zeros(E, dtype=torch.int64), 256, 3)), "types: edge 3 is 256; 0 to 255 are"),
}


@pytest.mark.parametrize("name", WRONG_DATA)
def test_wrong_edge_data_is_named(name):
    data, message = WRONG_DATA[name]
    plan = planned("reference", GRAPH)
    with pytest.raises(ValueError, match=message) as caught:
        plan.bind_edges(data)
    assert "\n" not in str(caught.value)
    if not name.startswith(("nan", "infinite")):
        with pytest.raises(ValueError, match=message):
            plan(*TENSORS, edges=data)


@pytest.mark.parametrize("name", ["bias", "multiplier", "features"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_takes_a_nan_to_the_rows_whose_edges_have_it(backend, name):
    skip_if_missing(backend)
    plan, edge = planned(backend, GRAPH), 9
    data = getattr(DATA, name).clone()
    data[edge] = torch.nan
    is_nan = plan(*TENSORS, edges=replace(DATA, **{name: data}, clamp=None)).isnan().flatten(1)
    assert torch.equal(is_nan.any(1).nonzero().flatten(), torch.tensor([int(GRAPH.tocoo().row[edge])]))
    assert is_nan.any(1).equal(is_nan.all(1))


WRONG_CALLS = {
    "bias_type": (EdgeData(bias=zeros(E).float()), r"bias: got torch\.float32, but q is torch\.float64; they"),
    "features_type": (
        replace(DATA, features=zeros(E, RANK).half()),
        r"features: got torch\.float16, but q is torch\.float64",
    ),
    "heads": (EdgeData(bias=zeros(E, 3)), r"bias: got 3 heads, but q has 2; \[E\] or \[E, 2\] is needed"),
    "multiplier_heads": (EdgeData(multiplier=zeros(E, 5)), "multiplier: got 5 heads, but q has 2"),
    "features_alone": (
        EdgeData(features=DATA.features),
        "features: got without a weight; key_weight or value_weight is needed",
    ),
    "key_weight_alone": (
        EdgeData(bias=DATA.bias, key_weight=DATA.key_weight),
        r"key_weight: got without edge features; EdgeData\(features=\[E, r\]\) is needed",
    ),
    "value_weight_without_edges": (
        EdgeData(value_weight=DATA.value_weight),
        "value_weight: got without edge features",
    ),
    "types_alone": (EdgeData(types=DATA.types), "types: got without a weight; type_weight is needed"),
    "type_weight_alone": (
        EdgeData(type_weight=DATA.type_weight),
        r"type_weight: got without edge types; EdgeData\(types=\[E\]\) is needed",
    ),
    "key_weight_shape": (
        replace(DATA, key_weight=zeros(2, RANK, 5)),
        rf"key_weight: got shape \(2, 11, 5\); \[H, d, r\] = \[2, 5, {RANK}\] is needed",
    ),
    "value_weight_rank": (
        replace(DATA, value_weight=zeros(2, 5, RANK - 1)),
        rf"value_weight: got shape \(2, 5, 10\); \[H, d, r\] = \[2, 5, {RANK}\] is needed",
    ),
    "type_weight_shape": (
        replace(DATA, type_weight=zeros(TYPES, 5)),
        r"type_weight: got shape \(3, 5\); \[T, H, d\] = \[3, 2, 5\] is needed",
    ),
    "few_types": (
        replace(DATA, type_weight=zeros(TYPES - 1, 2, 5)),
        r"type_weight: got 2 types, but the edges have type 2; \[T, H, d\] with T from 3 to 256 is needed",
    ),
    "many_types": (replace(DATA, type_weight=zeros(257, 2, 5)), "type_weight: got 257 types, .* to 256"),
    "weight_type": (
        replace(DATA, key_weight=DATA.key_weight.float()),
        r"key_weight: got torch\.float32, but q is torch\.float64; they must have one type",
    ),
    "weight_device": (
        replace(DATA, key_weight=DATA.key_weight.to("meta")),
        "key_weight: on meta, but q is on cpu; they must share it",
    ),
    "clamp_zero": (EdgeData(clamp=0), "clamp: got 0.0; a positive finite number is needed"),
    "clamp_negative": (EdgeData(clamp=-5.0), "clamp: got -5.0; a positive finite number is needed"),
    "clamp_infinite": (EdgeData(clamp=torch.inf), "clamp: got inf; a positive finite number is needed"),
    "clamp_nan": (EdgeData(clamp=torch.nan), "clamp: got nan; a positive finite number is needed"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_calls_are_named(name):
    data, message = WRONG_CALLS[name]
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        planned("reference", GRAPH)(*TENSORS, edges=data)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=f"^{message}"):
        sparse_attention(*TENSORS, GRAPH, backend="reference", edges=data)


def test_wrong_types_of_arguments_are_named():
    plan = planned("reference", GRAPH)
    with pytest.raises(TypeError, match=r"edges: got Tensor; an EdgeData is needed, or what bind_edges made of one"):
        plan(*TENSORS, edges=DATA.bias)
    with pytest.raises(TypeError, match=r"bias: got ndarray; a torch\.Tensor is needed"):
        plan.bind_edges(EdgeData(bias=DATA.bias.numpy()))
    for name in ("key_weight", "type_weight"):
        with pytest.raises(TypeError, match=rf"^{name}: got list; a torch\.Tensor is needed"):
            plan(*TENSORS, edges=replace(DATA, **{name: [1.0]}))


@pytest.mark.parametrize("data", [DATA, EdgeData(clamp=5.0), EdgeData(key_weight=zeros(2, 5, 3))])
def test_a_plan_without_an_edge_order_takes_no_edge_data(data):
    plan = plan_attention(GRAPH, backend="reference", device="cpu")
    remedy = re.escape("make it with plan_attention(..., edge_data=True)")
    with pytest.raises(ValueError, match=f"edges: this plan takes no edge data, weights for it or a clamp; {remedy}"):
        plan(*TENSORS, edges=data)
    with pytest.raises(ValueError, match=f"edges: this plan keeps no edge order; {remedy}"):
        plan.bind_edges(data)


def test_a_backend_without_edge_data_is_named():
    able = ", ".join(name for name, backend in REGISTRY.items() if backend.takes_edges)
    assert set(BACKENDS) <= set(able.split(", "))
    with pytest.raises(
        ValueError, match=f"backend: sdpa_padded cannot run this: it takes no edge data, .* only {able}"
    ):
        planned("sdpa_padded", GRAPH)


def test_a_capture_of_a_cuda_graph_needs_bound_edges(monkeypatch):
    plan = replace(planned("reference", GRAPH), device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match=r"while a CUDA graph is captured, .* bind it before the capture with plan"):
        plan.bind_edges(DATA)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["reference", "scatter", "pyg"])
def test_gpu_edge_data_agrees_with_dense_attention(backend, form):
    skip_if_missing(backend)
    made, order = FORMS[form](EDGE_LISTS["repeated"]())
    plan = plan_attention(made, backend=backend, device="cuda", edge_data=True)
    for kind in KINDS:
        _, tensors, inputs, expected, _ = case("repeated", kind, 3, 5)
        data = map_tensors(in_order(inputs, order), torch.Tensor.cuda)
        output = plan(*(tensor.cuda() for tensor in tensors), scale=SCALE, edges=data)
        close(output.cpu(), expected)


@pytest.mark.gpu
def test_gpu_capture_binds_edge_data_at_every_replay():
    graph, tensors, whole = whole_case()
    plan = plan_attention(graph, backend="fused3s", device="cuda", dtype=torch.float32, edge_data=True)
    q, k, v = (tensor.float().cuda() for tensor in tensors)
    data = EdgeData(bias=whole.bias.float().cuda())
    captured = capture(lambda: plan(q, k, v, edges=data), torch.device("cuda", 0))
    for _ in range(2):
        data.bias.normal_()
        assert torch.equal(captured.replay(), plan(q, k, v, edges=data))
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.add(q, q)
        with pytest.raises(ValueError, match="bind it before the capture"):
            plan.bind_edges(data)
