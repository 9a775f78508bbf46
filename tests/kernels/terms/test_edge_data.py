"""Edge data: every backend that takes it against dense float64 attention, gradients, plans, and wrong arguments."""

import re
from contextlib import nullcontext
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
    WITHOUT_SHAPE,
    edge_inputs,
    expected_attention,
    in_order,
    map_tensors,
    qkv,
)

from fused3s import AttentionPlan, BoundEdges, EdgeData, ScoreTerm, plan_attention, sparse_attention
from fused3s.backends import reference
from fused3s.backends.base import InputSpec
from fused3s.runtime.cuda_graph import capture
from tests.cuda_shim.cuda_on_cpu import NEEDS_COMPILER, cuda_on_cpu

DOUBLE = torch.float64
BACKENDS = ["reference", "dgl", "csr_unfused", "scatter", "pyg"]
SCALE = 0.3
pytestmark = pytest.mark.usefixtures("one_thread")
close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-10)


@cache
def case(name: str, kind: str, heads: int, dim: int, dtype: torch.dtype = DOUBLE):
    """(graph, [q, k, v], edge data, output, log-sum-exp) in float64, of a graph with edge data of a kind."""
    graph = EDGE_LISTS[name]()
    tensors = qkv(graph.shape, heads, dim, dtype)
    inputs = edge_inputs(kind, graph.num_edges, heads, dim, dtype)
    return graph, tensors, inputs, *expected_attention(graph, *tensors, inputs, SCALE)


def planned(backend: str, graph, **options) -> AttentionPlan:
    return plan_attention(graph, backend=backend, device="cpu", edge_data=True, **options)


@pytest.mark.parametrize("name", EDGE_LISTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_graph_in_every_form_keeps_its_edges(backend, name):
    """Every kind of edge data: torch_side/test_call_shapes.py."""
    graph, tensors, inputs, expected, _ = case(name, "all", 3, 5)
    for form, make in (FORMS | WITHOUT_SHAPE).items():
        made, order = make(graph)
        shape = graph.shape if form in WITHOUT_SHAPE else None
        output = planned(backend, made, shape=shape)(*tensors, scale=SCALE, edges=in_order(inputs, order))
        close(output, expected, msg=lambda text, form=form: f"{form}: {text}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["reference", "dgl", "csr_unfused"])
def test_narrow_types_are_computed_wider(backend, dtype):
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


@pytest.mark.parametrize("kind", KINDS)
def test_log_sum_exp_has_the_edge_terms(kind):
    graph, tensors, inputs, expected, expected_lse = case("empty_rows_and_windows", kind, 3, 5)
    made, order = FORMS["scipy_coo"](graph)
    output, lse = planned("reference", made)(*tensors, scale=SCALE, return_lse=True, edges=in_order(inputs, order))
    close(output, expected)
    torch.testing.assert_close(lse, expected_lse.float())
    assert (lse[:20] == -torch.inf).all()


def whole_case(heads: int = 2, dim: int = 5):
    """A graph with repeated edges as COO, q, k, v, and all kinds of edge data."""
    graph = EDGE_LISTS["repeated"]()
    made, order = FORMS["scipy_coo"](graph)
    assert torch.equal(order, torch.arange(graph.num_edges))
    return made, qkv(graph.shape, heads, dim, DOUBLE), edge_inputs("all", graph.num_edges, heads, dim, DOUBLE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_ways_to_bring_edge_data_give_the_same(backend):
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
def test_bound_edges_take_other_weights(backend):
    graph, tensors, data = whole_case()
    plan = planned(backend, graph)
    bound = plan.bind_edges(data)
    for changed in ({"key_weight": -data.key_weight}, {"value_weight": None}):
        other = replace(bound, **changed)
        assert other.padded_features is bound.padded_features
        output = plan(*tensors, edges=other)
        assert torch.equal(output, plan(*tensors, edges=replace(data, **changed)))
        assert not torch.equal(output, plan(*tensors, edges=bound))
    with pytest.raises(ValueError, match=r"key_weight: got shape \(2, 11, 5\); \[H, d, r\] = \[2, 5, 11\] is needed"):
        plan(*tensors, edges=replace(bound, key_weight=data.key_weight.transpose(1, 2)))


def test_features_of_wider_rows_are_padded_with_zeros():
    """Kernels multiply features in steps of 16: what the caller has behind his own does not matter."""
    graph, tensors, data = whole_case()
    features = data.features
    wide = torch.full((len(features), 16), torch.nan, dtype=features.dtype)
    wide[:, : features.shape[1]] = features
    plan = planned("reference", graph)
    bound = plan.bind_edges(replace(data, features=wide[:, : features.shape[1]]))
    assert bound.features.shape[1] == features.shape[1]
    assert (bound.padded_features[:, features.shape[1] :] == 0).all()
    assert torch.equal(plan(*tensors, edges=bound), plan(*tensors, edges=data))


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        *[
            (name, lambda tensor: tensor[:5], r"got 5 entries on cpu, but \d+ on cpu are needed")
            for name in ("padded_features", "types", "edge_values", "column_values")
        ],
        ("head_values", lambda tensor: tensor[:0], "got 0 entries on cpu, but 1 on cpu are needed"),
        ("column_values", lambda tensor: tensor.to("meta"), r"entries on meta, but \d+ on cpu are needed"),
        ("padded_features", lambda tensor: tensor[:, :11], r"got shape \(\d+, 11\) with .*; \[nnz, 16\] is"),
        ("padded_features", lambda tensor: tensor.repeat(1, 2), r"got shape \(\d+, 32\) with .*; \[nnz, 16\] is"),
        ("types", lambda tensor: tensor + 1, "got others than were bound"),
        ("checked_types", lambda _: None, ""),
        ("edge_values", lambda _: None, ""),
        ("edge_values", lambda tensor: tensor[..., :1], ""),
        ("head_values", lambda tensor: tensor[..., 0], ""),
        ("score", lambda text: f"{text} + edge7", ""),
        ("score_numbers", lambda _: (), ""),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "scatter", pytest.param("fused3s", marks=NEEDS_COMPILER)])
def test_bound_edges_take_no_data_that_kernels_would_read_past(backend, name, change, text):
    graph, tensors, data = whole_case()
    term = ScoreTerm("s + a + b", col={"a": torch.zeros(graph.shape[1])}, head={"b": torch.zeros(2)})
    if backend == "fused3s":  # no kernel may run
        tensors = [each.half() for each in tensors]
        data = map_tensors(data, lambda each: each.half() if each.is_floating_point() else each)
    with cuda_on_cpu() if backend == "fused3s" else nullcontext() as gpu:
        plan = planned(backend, graph)
        bound = plan.bind_edges(replace(data, score=term))
        with pytest.raises(ValueError, match=f"{text}.*; weights alone may be replaced in bound edges"):
            plan(*tensors, edges=replace(bound, **{name: change(getattr(bound, name))}))
        with pytest.raises(ValueError, match=r"got shape \(\d+, 16\) with num_features=17; \[nnz, 32\] is needed"):
            plan(*tensors, edges=replace(bound, num_features=17))
    assert gpu is None or not gpu.launched


def test_a_plan_keeps_its_edge_order_where_it_goes():
    graph, _, _ = whole_case()
    plan = planned("reference", graph)
    assert plan.inputs == InputSpec(edge_data=True)
    moved = plan.to("meta")
    assert moved.edge_order.edge_of_csr.device.type == "meta"
    plain = plan_attention(graph, backend="reference", device="cpu")
    assert moved.nbytes == plan.nbytes == plain.nbytes + 8 * plan.edge_order.num_edges
    assert f"; takes data of {graph.nnz} edges" in repr(plan)
    assert "edges" not in repr(plain)


def test_the_dgl_backend_makes_no_tensor_of_edges_by_columns():
    """[nnz, H, d] would be the largest tensor by far; the allocations of autograd's saved tensors show it."""
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


def with_value(tensor: torch.Tensor, place: int, value: float) -> torch.Tensor:
    return tensor.index_fill_(0, torch.tensor([place]), value)


LENGTH, INTEGERS = f"but the graph has {E} edges", zeros(E, dtype=torch.int64)
WRONG_DATA = [
    ("bias", zeros(E + 1), rf"bias: got shape \({E + 1},\), {LENGTH}; {E} entries are needed"),
    ("bias", zeros(), rf"bias: got shape \(\), {LENGTH}; {E} entries are needed"),
    ("types", INTEGERS[LOOPS:], f"types: .*{LENGTH}; {E} entries are needed, .* also for self loops"),
    ("multiplier", zeros(E).to("meta"), "multiplier: on meta, but the graph was planned for cpu; they"),
    ("features", zeros(E, 4).int(), r"features: got torch\.int32; q's floating-point type is needed"),
    ("bias", zeros(E, 2, 1), rf"bias: got shape \({E}, 2, 1\); \[E\] or \[E, H\] is allowed"),
    ("features", zeros(E, 0), r"features: .*\[E, r\] with r >= 1 is allowed"),
    ("types", zeros(E), r"types: got torch\.float64; integers are needed, one of torch\.uint8"),
    ("types", zeros(E, 2).long(), r"types: got shape .*; \[E\] is needed, one type"),
    ("types", with_value(INTEGERS.clone(), 6, -1), "types: edge 6 is -1; 0 to 255 are allowed"),
    ("types", with_value(INTEGERS.clone(), 3, 256), "types: edge 3 is 256; 0 to 255 are"),
]
# Only binding looks at the numbers: a call would wait for the GPU.
WRONG_NUMBERS = [
    (
        "bias",
        with_value(zeros(E, 2), 7, torch.nan),
        r"bias: edge 7, column 0 is nan; finite numbers and -inf \(weight 0",
    ),
    ("bias", with_value(zeros(E), 5, torch.inf), "bias: edge 5 is inf; finite numbers and -inf"),
    ("multiplier", with_value(zeros(E), 4, -torch.inf), "multiplier: edge 4 is -inf; finite numbers are allowed"),
    ("features", with_value(zeros(E, 3), 4, torch.nan), "features: edge 4, column 0 is nan; fin"),
]


@pytest.mark.parametrize(("name", "tensor", "message"), WRONG_DATA + WRONG_NUMBERS, ids=str)
def test_wrong_edge_data_is_named(name, tensor, message):
    plan, data = planned("reference", GRAPH), EdgeData(**{name: tensor})
    with pytest.raises(ValueError, match=message):
        plan.bind_edges(data)
    if message not in [text for _, _, text in WRONG_NUMBERS]:
        with pytest.raises(ValueError, match=message):
            plan(*TENSORS, edges=data)


@pytest.mark.parametrize("name", ["bias", "multiplier", "features"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_takes_a_nan_to_the_rows_whose_edges_have_it(backend, name):
    plan, edge = planned(backend, GRAPH), 9
    data = getattr(DATA, name).clone()
    data[edge] = torch.nan
    is_nan = plan(*TENSORS, edges=replace(DATA, **{name: data}, clamp=None)).isnan().flatten(1)
    assert torch.equal(is_nan.any(1).nonzero().flatten(), torch.tensor([int(GRAPH.tocoo().row[edge])]))
    assert is_nan.any(1).equal(is_nan.all(1))


NO_FEATURES = {"features": None, "key_weight": None, "value_weight": None}
WRONG_CALLS = [
    (
        {"bias": zeros(E).float(), "multiplier": None},
        r"bias, multiplier or values of edges: got torch\.float32, but q is torch\.float64; they",
    ),
    ({"bias": zeros(E, 3)}, "bias, multiplier or values of edges: got 3 heads, but q has 2; those of one head or of"),
    ({"bias": zeros(E, 3), "multiplier": zeros(E, 2)}, "multiplier: got 2 heads, but another value has 3"),
    ({"key_weight": None, "value_weight": None}, "features: got without a weight; key_weight, value_weight or"),
    (
        NO_FEATURES | {"key_weight": DATA.key_weight},
        r"key_weight: got without edge features; EdgeData\(features=\[E, r\]",
    ),
    ({"type_weight": None}, "types: got without a weight; type_weight is needed"),
    ({"types": None}, r"type_weight: got without edge types; EdgeData\(types=\[E\]\) is needed"),
    (
        {"key_weight": zeros(2, RANK, 5)},
        rf"key_weight: got shape \(2, 11, 5\); \[H, d, r\] = \[2, 5, {RANK}\] is needed",
    ),
    ({"type_weight": zeros(TYPES, 5)}, r"type_weight: got shape \(3, 5\); \[T, H, d\] = \[3, 2, 5\] is needed"),
    ({"type_weight": zeros(TYPES - 1, 2, 5)}, "type_weight: got 2 types, but the edges have type 2; .* T from 3 to"),
    ({"type_weight": zeros(257, 2, 5)}, "type_weight: got 257 types, .* to 256"),
    (
        {"key_weight": DATA.key_weight.float()},
        r"key_weight: got torch\.float32, but q is torch\.float64; they must have",
    ),
    ({"key_weight": DATA.key_weight.to("meta")}, "key_weight: on meta, but q is on cpu; they must share it"),
    ({"key_factor": zeros(RANK, 2, 5)}, "key_factor: got with edge types; make the types features"),
    (NO_FEATURES | {"types": None, "type_weight": None, "key_factor": zeros(RANK, 2, 5)}, "key_factor: got without"),
    (
        {"types": None, "type_weight": None, "key_factor": zeros(2, RANK, 5)},
        rf"key_factor: got shape \(2, {RANK}, 5\); \[r, H, d\] = \[{RANK}, 2, 5\] is needed",
    ),
    ({"clamp": 0}, "clamp: got 0.0; a positive finite number is needed"),
    ({"clamp": -1.0}, "clamp: got -1.0; a positive finite number is needed"),
    ({"clamp": torch.inf}, "clamp: got inf; a finite number is needed"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_CALLS)
def test_wrong_calls_are_named(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        planned("reference", GRAPH)(*TENSORS, edges=replace(DATA, **changes))


@pytest.mark.parametrize(
    "data", [DATA, EdgeData(bias=zeros(E)), EdgeData(score=ScoreTerm("s + b", edge={"b": zeros(E)}))]
)
def test_a_plan_without_an_edge_order_takes_no_data_of_edges(data):
    plan = plan_attention(GRAPH, backend="reference", device="cpu")
    remedy = re.escape("make it with plan_attention(..., edge_data=True)")
    for call in (lambda: plan(*TENSORS, edges=data), lambda: plan.bind_edges(data)):
        with pytest.raises(ValueError, match=f"edges: this plan keeps no edge order, .* data of edges; {remedy}"):
            call()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_without_an_edge_order_takes_all_other_terms(backend):
    num_rows, num_cols = GRAPH.shape
    a, b, weight = (torch.linspace(-1, 2, n, dtype=DOUBLE) for n in (num_rows, 2 * num_cols, 10))
    term = ScoreTerm("s * a + b", row={"a": a}, col={"b": b.view(num_cols, 2)})
    data = EdgeData(score=term, clamp=0.9, additive_weight=weight.view(2, 5))
    plan, with_order = (
        plan_attention(GRAPH, backend=backend, device="cpu", edge_data=edge_data) for edge_data in (False, True)
    )
    bound = plan.bind_edges(data)
    assert plan.edge_order is None
    assert torch.equal(plan(*TENSORS, edges=bound), with_order(*TENSORS, edges=data))
    assert torch.equal(with_order(*TENSORS, edges=bound), plan(*TENSORS, edges=data))  # of any plan of this shape
    other = plan_attention(GRAPH[:, :-1], backend=backend, device="cpu")
    with pytest.raises(ValueError, match="edges: bound by another plan"):
        other(TENSORS[0], *(each[:-1] for each in TENSORS[1:]), edges=bound)


def test_a_backend_without_edge_data_is_named():
    with pytest.raises(
        ValueError, match=r"backend: sdpa_padded cannot run this: it takes no edge data, .* only fused3s,"
    ):
        planned("sdpa_padded", GRAPH)


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
