"""Edge data: every backend that takes it against dense float64 attention, gradients, plans, and wrong arguments."""

import copy
import re
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from edge_cases import (
    CLAMP,
    EDGE_LISTS,
    FORMS,
    KINDS,
    RANK,
    TYPES,
    EdgeList,
    edge_inputs,
    expected_attention,
    qkv,
)

from baselines import REGISTRY
from kernels import AttentionPlan, BoundEdges, EdgeData, plan_attention, sparse_attention
from kernels import attention as attention_module
from kernels.backends import reference
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
        output = plan(*tensors, scale=SCALE, **inputs.in_order(order))
        close(output, expected, msg=lambda text, kind=kind: f"{kind}: {text}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_form_of_a_graph_keeps_its_edges(backend, form, kind):
    skip_if_missing(backend)
    for name in ("repeated", "tall"):
        graph, tensors, inputs, expected, _ = case(name, kind, 2, 5)
        made, order = FORMS[form](graph)
        output = planned(backend, made)(*tensors, scale=SCALE, **inputs.in_order(order))
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
        output = plan(*tensors, scale=SCALE, **inputs.in_order(order))
        assert output.dtype == dtype
        torch.testing.assert_close(output.double(), expected, rtol=resolution, atol=resolution)


def test_reference_takes_edges_in_chunks(monkeypatch):
    graph, tensors, inputs, expected, _ = case("hub", "all", 3, 16)
    made, order = FORMS["dgl"](graph)
    monkeypatch.setattr(reference, "ELEMENTS_PER_CHUNK", 50 * 3 * 16)
    close(planned("reference", made)(*tensors, scale=SCALE, **inputs.in_order(order)), expected)


def test_pyg_keeps_the_inputs_type():
    skip_if_missing("pyg")
    graph, tensors, inputs, expected, _ = case("self_loops", "all", 3, 16, torch.bfloat16)
    made, order = FORMS["dgl"](graph)
    output = planned("pyg", made)(*tensors, scale=SCALE, **inputs.in_order(order))
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
        clamped = sparse_attention(q, k, v, made, backend=backend, edges=data, clamp=2.0)
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
        output = planned(backend, made)(q, k, v, **inputs.in_order(order))
        assert torch.isnan(output[3]).all(), backend
        assert torch.isfinite(output[torch.arange(36) != 3]).all(), backend


@pytest.mark.parametrize("kind", KINDS)
def test_log_sum_exp_has_the_edge_terms(kind):
    graph, tensors, inputs, expected, expected_lse = case("empty_rows_and_windows", kind, 3, 5)
    made, order = FORMS["scipy_coo"](graph)
    output, lse = planned("reference", made)(*tensors, scale=SCALE, return_lse=True, **inputs.in_order(order))
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
            output = plan(*tensors, scale=SCALE, **inputs.in_order(order))
            close(output, expected)


def whole_case(heads: int = 2, dim: int = 5):
    """A graph with repeated edges as COO, q, k, v, and all kinds of edge data."""
    graph = EDGE_LISTS["repeated"]()
    made, order = FORMS["scipy_coo"](graph)
    inputs = edge_inputs("all", graph.num_edges, heads, dim, DOUBLE).in_order(order)
    return made, qkv(graph.shape, heads, dim, DOUBLE), inputs


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_ways_to_bring_edge_data_give_the_same(backend):
    skip_if_missing(backend)
    graph, tensors, arguments = whole_case()
    plan = planned(backend, graph)
    weights = {name: value for name, value in arguments.items() if name != "edges"}
    bound = plan.bind_edges(arguments["edges"])
    assert isinstance(bound, BoundEdges)
    output = plan(*tensors, **arguments)
    assert torch.equal(plan(*tensors, edges=bound, **weights), output)
    assert torch.equal(sparse_attention(*tensors, graph, backend=backend, **arguments), output)
    one_head = [tensor[:, 0] for tensor in tensors]
    heads_first = {
        name: weight[:1] for name, weight in weights.items() if name.endswith(("key_weight", "value_weight"))
    }
    heads_first |= {"edge_type_weight": weights["edge_type_weight"][:, :1], "clamp": CLAMP}
    data = replace(arguments["edges"], bias=arguments["edges"].bias[:, :1])
    torch.testing.assert_close(plan(*one_head, edges=data, **heads_first), output[:, 0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_features_of_wider_rows_are_padded_with_zeros(backend):
    """Kernels multiply whole rows of 16 features: what the caller has behind his own does not matter."""
    skip_if_missing(backend)
    graph, tensors, arguments = whole_case()
    features = arguments["edges"].features
    wide = torch.full((len(features), 16), torch.nan, dtype=features.dtype)
    wide[:, : features.shape[1]] = features
    plan = planned(backend, graph)
    bound = plan.bind_edges(replace(arguments["edges"], features=wide[:, : features.shape[1]]))
    assert bound.features.shape[1] == features.shape[1]
    assert (bound.padded_features[:, features.shape[1] :] == 0).all()
    assert torch.equal(plan(*tensors, **(arguments | {"edges": bound})), plan(*tensors, **arguments))


def test_bound_edges_are_copies():
    graph, tensors, arguments = whole_case()
    plan = planned("reference", graph)
    weights = {name: value for name, value in arguments.items() if name != "edges"}
    bound = plan.bind_edges(arguments["edges"])
    assert bound.types.dtype == torch.uint8
    expected = plan(*tensors, edges=bound, **weights)
    for tensor in (arguments["edges"].bias, arguments["edges"].features, arguments["edges"].types):
        tensor.zero_()
    assert torch.equal(plan(*tensors, edges=bound, **weights), expected)


def test_torch_compile_traces_a_call_with_bound_edges():
    graph, tensors, arguments = whole_case()
    plan = planned("reference", graph)
    bound = plan.bind_edges(arguments.pop("edges"))
    compiled = torch.compile(lambda *given: plan(*given, edges=bound, **arguments), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), plan(*tensors, edges=bound, **arguments))
    torch.compiler.reset()


@pytest.mark.parametrize("backend", ["reference", "csr_unfused", "pyg"])
def test_a_plan_keeps_its_edge_order_where_it_goes(backend):
    skip_if_missing(backend)
    graph, tensors, arguments = whole_case()
    plan = planned(backend, graph)
    expected = plan(*tensors, **arguments)
    copied = copy.deepcopy(plan)
    assert torch.equal(copied(*tensors, **arguments), expected)
    with pytest.raises(ValueError, match="bound by another plan; bind the EdgeData with bind_edges of this one"):
        copied(*tensors, **(arguments | {"edges": plan.bind_edges(arguments["edges"])}))

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

        def attend(self, data, query, key, value, scale, out_dtype, lse=None):
            return super().attend(data, query, key, value, scale, out_dtype, lse)

    monkeypatch.setitem(REGISTRY, "without_edges", WithoutEdges())
    other = plan_attention(graph, backend="without_edges", device="cpu")
    assert torch.equal(other(*tensors), plan(*tensors))


def test_auto_passes_over_backends_without_edge_data(caplog):
    graph, tensors, arguments = whole_case()
    with caplog.at_level("INFO", logger="kernels"):
        output = sparse_attention(*tensors, graph, **arguments)
    assert "attention backend: dgl on cpu" in caplog.text
    torch.testing.assert_close(output, sparse_attention(*tensors, graph, backend="reference", **arguments))


def test_auto_needs_a_backend_with_edge_data(monkeypatch, caplog):
    for name, backend in REGISTRY.items():
        monkeypatch.setattr(backend, "unavailable", lambda device: None)
        monkeypatch.setattr(backend, "takes_edges", name == "csr_unfused")
    with caplog.at_level("INFO", logger="kernels"):
        assert planned("auto", whole_case()[0]).backend == "csr_unfused"
    assert "not fused3s_paper: it takes no edge data, which only csr_unfused do" in caplog.text


def test_the_dgl_backend_makes_no_tensor_of_edges_by_columns():
    """[nnz, H, d] would be the largest tensor by far; the allocations of autograd's saved tensors show it."""
    skip_if_missing("dgl")
    heads, dim = 2, 512
    graph = EDGE_LISTS["hub"]()
    made, order = FORMS["dgl"](graph)
    inputs = edge_inputs("all", graph.num_edges, heads, dim, torch.float32).in_order(order)
    q, k, v = (tensor.requires_grad_() for tensor in qkv(graph.shape, heads, dim))
    plan = planned("dgl", made)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: sizes.append(tensor.numel()) or tensor, lambda t: t):
        plan(q, k, v, **inputs)
    assert sizes
    assert max(sizes) < plan.edge_order.edge_of_csr.numel() * heads * dim


GRAPH, TENSORS, ARGUMENTS = whole_case()
E = GRAPH.nnz
DATA = ARGUMENTS["edges"]
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
    arguments = ARGUMENTS | {"edges": replace(DATA, **{name: data}), "clamp": None}
    is_nan = plan(*TENSORS, **arguments).isnan().flatten(1)
    assert torch.equal(is_nan.any(1).nonzero().flatten(), torch.tensor([int(GRAPH.tocoo().row[edge])]))
    assert is_nan.any(1).equal(is_nan.all(1))


WRONG_CALLS = {
    "bias_type": (
        {"edges": EdgeData(bias=zeros(E).float())},
        r"bias: got torch\.float32, but q is torch\.float64; they",
    ),
    "features_type": (
        {**ARGUMENTS, "edges": EdgeData(features=zeros(E, RANK).half())},
        r"features: got torch\.float16, but q is torch\.float64",
    ),
    "heads": (
        {"edges": EdgeData(bias=zeros(E, 3))},
        r"bias: got 3 heads, but q has 2; \[E\] or \[E, 2\] is needed",
    ),
    "multiplier_heads": ({"edges": EdgeData(multiplier=zeros(E, 5))}, "multiplier: got 5 heads, but q has 2"),
    "features_alone": (
        {"edges": EdgeData(features=DATA.features)},
        "features: got without a weight; edge_key_weight or edge_value_weight is needed",
    ),
    "key_weight_alone": (
        {"edges": EdgeData(bias=DATA.bias), "edge_key_weight": ARGUMENTS["edge_key_weight"]},
        r"edge_key_weight: got without edge features; EdgeData\(features=\[E, r\]\) is needed",
    ),
    "value_weight_without_edges": (
        {"edge_value_weight": ARGUMENTS["edge_value_weight"]},
        "edge_value_weight: got without edge features",
    ),
    "types_alone": ({"edges": EdgeData(types=DATA.types)}, "types: got without a weight; edge_type_weight is needed"),
    "type_weight_alone": (
        {"edge_type_weight": ARGUMENTS["edge_type_weight"]},
        r"edge_type_weight: got without edge types; EdgeData\(types=\[E\]\) is needed",
    ),
    "key_weight_shape": (
        {**ARGUMENTS, "edge_key_weight": zeros(2, RANK, 5)},
        rf"edge_key_weight: got shape \(2, 11, 5\); \[H, d, r\] = \[2, 5, {RANK}\] is needed",
    ),
    "value_weight_rank": (
        {**ARGUMENTS, "edge_value_weight": zeros(2, 5, RANK - 1)},
        rf"edge_value_weight: got shape \(2, 5, 10\); \[H, d, r\] = \[2, 5, {RANK}\] is needed",
    ),
    "type_weight_shape": (
        {**ARGUMENTS, "edge_type_weight": zeros(TYPES, 5)},
        r"edge_type_weight: got shape \(3, 5\); \[T, H, d\] = \[3, 2, 5\] is needed",
    ),
    "few_types": (
        {**ARGUMENTS, "edge_type_weight": zeros(TYPES - 1, 2, 5)},
        r"edge_type_weight: got 2 types, but the edges have type 2; \[T, H, d\] with T from 3 to 256 is needed",
    ),
    "many_types": ({**ARGUMENTS, "edge_type_weight": zeros(257, 2, 5)}, "edge_type_weight: got 257 types, .* to 256"),
    "weight_type": (
        {**ARGUMENTS, "edge_key_weight": ARGUMENTS["edge_key_weight"].float()},
        r"edge_key_weight: got torch\.float32, but q is torch\.float64; they must have one type",
    ),
    "weight_device": (
        {**ARGUMENTS, "edge_key_weight": ARGUMENTS["edge_key_weight"].to("meta")},
        "edge_key_weight: on meta, but q is on cpu; they must share it",
    ),
    "clamp_zero": ({"clamp": 0}, "clamp: got 0.0; a positive finite number is needed"),
    "clamp_negative": ({"clamp": -5.0}, "clamp: got -5.0; a positive finite number is needed"),
    "clamp_infinite": ({"clamp": torch.inf}, "clamp: got inf; a positive finite number is needed"),
    "clamp_nan": ({"clamp": torch.nan}, "clamp: got nan; a positive finite number is needed"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_calls_are_named(name):
    arguments, message = WRONG_CALLS[name]
    with pytest.raises(ValueError, match=message) as caught:
        planned("reference", GRAPH)(*TENSORS, **arguments)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=message):
        sparse_attention(*TENSORS, GRAPH, backend="reference", **arguments)


def test_wrong_types_of_arguments_are_named():
    plan = planned("reference", GRAPH)
    with pytest.raises(TypeError, match=r"edges: got Tensor; an EdgeData is needed, or what bind_edges made of one"):
        plan(*TENSORS, edges=DATA.bias)
    with pytest.raises(TypeError, match=r"bias: got ndarray; a torch\.Tensor is needed"):
        plan.bind_edges(EdgeData(bias=DATA.bias.numpy()))
    with pytest.raises(TypeError, match=r"edge_key_weight: got list; a torch\.Tensor is needed"):
        plan(*TENSORS, **(ARGUMENTS | {"edge_key_weight": [1.0]}))
    with pytest.raises(TypeError, match=r"edge_type_weight: got list; a torch\.Tensor is needed"):
        plan(*TENSORS, **(ARGUMENTS | {"edge_type_weight": [1.0]}))


@pytest.mark.parametrize("arguments", [{"edges": DATA}, {"clamp": 5.0}, {"edge_key_weight": zeros(2, 5, 3)}])
def test_a_plan_without_an_edge_order_takes_no_edge_data(arguments):
    plan = plan_attention(GRAPH, backend="reference", device="cpu")
    remedy = re.escape("make it with plan_attention(..., edge_data=True)")
    with pytest.raises(ValueError, match=f"edges: this plan takes no edge data, weights for it or a clamp; {remedy}"):
        plan(*TENSORS, **arguments)
    with pytest.raises(ValueError, match=f"edges: this plan keeps no edge order; {remedy}"):
        plan.bind_edges(DATA)


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
        arguments = inputs.in_order(order)
        if "edges" in arguments:
            data = arguments["edges"]
            arguments["edges"] = EdgeData(
                *(
                    None if tensor is None else tensor.cuda()
                    for tensor in (data.bias, data.multiplier, data.features, data.types)
                )
            )
        arguments |= {name: value.cuda() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        output = plan(*(tensor.cuda() for tensor in tensors), scale=SCALE, **arguments)
        close(output.cpu(), expected)


@pytest.mark.gpu
def test_gpu_capture_binds_edge_data_at_every_replay():
    graph, tensors, arguments = whole_case()
    plan = plan_attention(graph, backend="fused3s", device="cuda", dtype=torch.float32, edge_data=True)
    q, k, v = (tensor.float().cuda() for tensor in tensors)
    data = EdgeData(bias=arguments["edges"].bias.float().cuda())
    captured = capture(lambda: plan(q, k, v, edges=data), torch.device("cuda", 0))
    for _ in range(2):
        data.bias.normal_()
        assert torch.equal(captured.replay(), plan(q, k, v, edges=data))
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.add(q, q)
        with pytest.raises(ValueError, match="bind it before the capture"):
            plan.bind_edges(data)
