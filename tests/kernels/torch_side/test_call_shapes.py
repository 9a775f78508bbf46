"""Grouped queries, batches and values of another width, by every backend of the CPU against dense float64 attention."""

from functools import partial

import pytest
import torch
from edge_cases import EDGE_LISTS, FORMS, KINDS, edge_inputs, in_order, map_tensors
from shape_cases import SHAPES, head_options, shaped, shaped_attention

from bench.baselines import REGISTRY
from fused3s import Dropout, EdgeData, ScoreTerm, plan_attention, sparse_attention
from fused3s.torch_side.call_shapes import CallShape

HALF, DOUBLE, SCALE = torch.float16, torch.float64, 0.3
AUTOGRAD = ["reference", "csr_unfused", "scatter", "dgl", "pyg"]
BACKENDS = [*AUTOGRAD, "formula"]
pytestmark = pytest.mark.usefixtures("one_thread", "formula")
close = partial(torch.testing.assert_close, rtol=1e-8, atol=1e-9)


def planned(graph, sizes, backend="reference", **options):
    options = head_options(sizes) | {"device": "cpu", "backward": True} | options
    return plan_attention(graph, backend=backend, **options)


def edge_data(kind, num_edges, sizes) -> EdgeData:
    """Biases and multipliers of all query heads, weights of the KV heads and of d and d_v columns."""
    heads, kv_heads, dim, value_dim, _ = sizes
    data = edge_inputs(kind, num_edges, heads, dim, DOUBLE)
    wide = edge_inputs(kind, num_edges, heads, value_dim, DOUBLE).value_weight
    parts = {"key_weight": data.key_weight, "value_weight": wide}
    parts = {name: each[:kv_heads] for name, each in parts.items() if each is not None}
    if data.additive_weight is not None:
        parts["additive_weight"] = data.additive_weight[:kv_heads]
    for name in ("type_weight", "key_factor"):
        if (each := getattr(data, name)) is not None:
            parts[name] = each[:, :kv_heads]
    return EdgeData(**(vars(data) | parts))


def leaves_of(tensors, data, device="cpu", dtype=DOUBLE):
    def leaf(each):
        each = each.to(device, copy=True)
        return each.to(dtype).requires_grad_() if each.is_floating_point() else each

    return [leaf(each) for each in tensors], map_tensors(data, leaf)


def results_of(function, tensors, data, device="cpu", dtype=DOUBLE):
    """Output, and the gradients of a random sum by all float tensors."""
    tensors, data = leaves_of(tensors, data, device, dtype)
    output = function(*tensors, data)
    factors = torch.randn(output.shape, generator=torch.Generator().manual_seed(5), dtype=DOUBLE).to(output)
    leaves = [each for each in (*tensors, *vars(data).values()) if isinstance(each, torch.Tensor)]
    leaves = [each for each in leaves if each.requires_grad]
    found = torch.autograd.grad((output * factors).sum(), leaves, allow_unused=True)
    return output, *(torch.zeros_like(leaf) if each is None else each for leaf, each in zip(leaves, found, strict=True))


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", EDGE_LISTS)
def test_output_and_lse_are_those_of_dense_attention(name, sizes):
    graph = EDGE_LISTS[name]()
    for form in ("torch_coo", "scipy_csr", "scipy_csc", "dgl"):
        plan = planned(FORMS[form](graph)[0], sizes)
        tensors = shaped(graph.shape, sizes)
        output, lse = plan(*tensors, scale=SCALE, return_lse=True)
        expected, expected_lse = shaped_attention(graph, *tensors, EdgeData(), SCALE)
        assert (output.shape, lse.shape, lse.dtype) == (expected.shape, expected_lse.shape, torch.float32)
        close(output, expected, msg=lambda text, form=form: f"{form}: {text}")
        torch.testing.assert_close(lse, expected_lse.float())
        assert plan.shape == graph.shape


PLAIN = (
    ("repeated", "torch_csr", (2, 2, 5, 5, 0)),
    ("hub", "dgl", (1, 1, 5, 5, 0)),
    ("empty_rows_and_windows", "dgl", (3, 3, 5, 5, 0)),
)
GRAPHS = (
    *PLAIN,
    ("repeated", "torch_csr", SHAPES["groups"]),
    ("empty_rows_and_windows", "dgl", SHAPES["all"]),
    ("wide", "scipy_csc", SHAPES["wide values"]),
    ("hub", "torch_csr", SHAPES["one KV head"]),
    ("tall", "torch_coo", SHAPES["a batch"]),
)
# Device, type and relative error of a gradient.
ON_BOTH = [pytest.param(name, "cpu", DOUBLE, 1e-8, id=name) for name in BACKENDS]
ON_BOTH += [
    pytest.param(name, "cuda", dtype, error, marks=pytest.mark.gpu, id=f"{name} on a GPU")
    for name, dtype, error in (
        *((name, DOUBLE, 1e-8) for name in ("reference", "scatter", "pyg")),
        ("fused3s", HALF, 5e-3),
    )
]


@pytest.mark.parametrize("kind", ["none", *KINDS])
@pytest.mark.parametrize(("backend", "device", "dtype", "error"), ON_BOTH)
def test_gradients_are_those_of_dense_attention(backend, device, dtype, error, kind):
    if reason := REGISTRY[backend].unavailable(torch.device(device)):
        pytest.skip(f"{backend}: {reason}")
    for name, form, sizes in PLAIN if device == "cuda" else GRAPHS:
        graph = EDGE_LISTS[name]()
        made, order = FORMS[form](graph)
        plan = planned(made, sizes, backend, edge_data=kind != "none", device=device)
        data = EdgeData() if kind == "none" else edge_data(kind, graph.num_edges, sizes)
        rounded = [each.to(dtype).to(DOUBLE) for each in shaped(graph.shape, sizes)]
        data = map_tensors(data, lambda each: each.to(dtype).to(DOUBLE) if each.is_floating_point() else each)

        def sparse(q, k, v, given, plan=plan, order=order):
            edges = None if kind == "none" else in_order(given, order.to(device))
            return plan(q, k, v, scale=SCALE, edges=edges)

        def dense(q, k, v, given, graph=graph):
            return shaped_attention(graph, q, k, v, given, SCALE)[0]

        found, expected = results_of(sparse, rounded, data, device, dtype), results_of(dense, rounded, data)
        for left, right in zip(found, expected, strict=True):
            off = (left.double().cpu() - right).norm()
            assert off <= error * right.norm() + error / 10, f"{name}: {off:.2e} of {right.norm():.2e}"


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("backend", ["reference", "formula"])
def test_the_log_sum_exp_has_a_gradient(backend, sizes):
    for name in ("hub", "repeated", "wide", "tall", "one_node_self_loop"):
        graph = EDGE_LISTS[name]()
        plan = planned(FORMS["torch_coo"](graph)[0], sizes, backend)
        leaves, _ = leaves_of(shaped(graph.shape, sizes), EdgeData())
        results = plan(*leaves, scale=SCALE, return_lse=True), shaped_attention(graph, *leaves, EdgeData(), SCALE)
        factors = [torch.randn_like(each) for each in results[1]]
        found, expected = (
            torch.autograd.grad(sum((x * y).sum() for x, y in zip(of, factors, strict=True)), leaves, retain_graph=True)
            for of in results
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # the log-sum-exp is float32
        alone = torch.autograd.grad(results[0][1].sum(), leaves, allow_unused=True)
        assert alone[2] is None or not alone[2].any(), "the log-sum-exp does not depend on v"


@pytest.mark.parametrize("backend", BACKENDS)
def test_score_terms_of_grouped_queries(backend):
    """Values of query heads, of rows with and without heads, of KV heads for columns, and of edges."""
    graph, (heads, kv_heads, batch) = EDGE_LISTS["repeated"](), (6, 2, 2)
    made, order = FORMS["scipy_csc"](graph)
    generator = torch.Generator().manual_seed(0)
    (rows, cols), num_edges = graph.shape, graph.num_edges

    def value(*size):
        return torch.randn(*size, generator=generator, dtype=DOUBLE)

    slope, row, rows_of_heads, col, edge = value(heads), value(rows), value(rows, heads), value(cols, kv_heads), None
    edge = value(num_edges, heads)

    def term(slope, row, row_heads, col, edge):
        values = {"row": {"r": row, "rh": row_heads}, "col": {"c": col}, "edge": {"e": edge}, "head": {"m": slope}}
        return EdgeData(score=ScoreTerm("s * rh + m * e + tanh(r + c)", **values))

    def called(size, *values):
        sizes = (heads, heads // size, 5, 5, batch)
        q, k, v = shaped(graph.shape, (heads, kv_heads, 5, 5, batch))
        if size == 1:
            k, v = (each.repeat_interleave(heads // kv_heads, 2) for each in (k, v))
        plan = planned(made, sizes, backend, edge_data=True)
        leaves = [each.clone().requires_grad_() for each in values]
        given = [*leaves[:3], leaves[3] if size > 1 else leaves[3].repeat_interleave(3, 1), leaves[4][order]]
        output = plan(q, k, v, edges=term(*given))
        factors = torch.randn(output.shape, generator=torch.Generator().manual_seed(5), dtype=DOUBLE)
        return output, torch.autograd.grad((output * factors).sum(), leaves)

    (output, found), (expected, gradients) = (
        called(size, slope, row, rows_of_heads, col, edge) for size in (heads // kv_heads, 1)
    )
    close(output, expected)
    close(found, gradients)


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
def test_sparse_attention_reads_the_shapes(sizes):
    graph = EDGE_LISTS["hub"]()
    tensors = shaped(graph.shape, sizes)
    made, _ = FORMS["torch_coo"](graph)
    expected, _ = shaped_attention(graph, *tensors, EdgeData(), sizes[2] ** -0.5)
    close(sparse_attention(*tensors, made), expected)
    half = sparse_attention(*tensors, made, out_dtype=torch.float32)
    assert half.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        cast = sparse_attention(*(each.float() for each in tensors), made)
    assert (cast.dtype, cast.shape) == (torch.bfloat16, expected.shape)
    assert (cast.double() - expected).abs().max() < 0.05


def test_two_dimensions_with_values_of_another_width():
    graph = EDGE_LISTS["hub"]()
    q, k, v = (each[:, 0] for each in shaped(graph.shape, SHAPES["narrow values"]))
    plan = plan_attention(FORMS["torch_coo"](graph)[0], backend="reference", device="cpu")
    output, lse = plan(q, k, v, return_lse=True)
    expected, expected_lse = shaped_attention(graph, q, k, v, EdgeData(), 7**-0.5)
    close(output, expected)
    torch.testing.assert_close(lse, expected_lse.float())
    assert output.is_contiguous()


def test_any_number_of_heads_of_the_same_groups():
    graph = EDGE_LISTS["directed"]()
    plan = planned(FORMS["torch_coo"](graph)[0], (6, 2, 5, 5, 0))
    for sizes in ((3, 1, 4, 4, 0), (9, 3, 2, 5, 2)):
        tensors = shaped(graph.shape, sizes)
        close(plan(*tensors, scale=SCALE), shaped_attention(graph, *tensors, EdgeData(), SCALE)[0])


@pytest.mark.parametrize("sizes", [(2, 2, 5, 5, 3), (4, 1, 5, 5, 0)], ids=["a batch of heads first", "one KV head"])
def test_views_are_not_copied(sizes):
    """[B, H, N, d] in memory, as in torch's scaled_dot_product_attention; query heads as rows."""
    graph = EDGE_LISTS["directed"]()
    plan, tensors = planned(FORMS["torch_coo"](graph)[0], sizes), shaped(graph.shape, sizes)
    if sizes[4]:
        tensors = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in tensors]
    call = plan.call(*tensors, shape=CallShape.of(*tensors, plan.groups))
    assert [each.data_ptr() for each in call[:3]] == [each.data_ptr() for each in tensors]
    assert sizes[4] or call.query.shape == (4 * graph.shape[0], 1, 5)


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
def test_the_backward_pass_without_autograd(sizes):
    """And dropout, whose mask backends share."""
    graph = EDGE_LISTS["repeated"]()
    made, dropped = FORMS["torch_coo"](graph)[0], {"dropout": Dropout(0.4, 3)}
    plan = planned(made, sizes, "formula")
    masked = [planned(made, sizes, name)(*shaped(graph.shape, sizes), **dropped) for name in BACKENDS if name != "pyg"]
    for each in masked[1:]:
        close(each, masked[0])
    leaves, _ = leaves_of(shaped(graph.shape, sizes), EdgeData())
    output, lse = plan(*leaves, scale=SCALE, return_lse=True)
    gradient = torch.randn_like(output)
    expected = torch.autograd.grad(output, leaves, gradient)
    given = [each.detach() for each in leaves]
    found = plan.backward(gradient, *given, output.detach(), lse, scale=SCALE)[:3]
    for left, right, leaf in zip(found, expected, leaves, strict=True):
        assert left.shape == leaf.shape
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)  # the log-sum-exp is float32
    for wrong in ("bias", "edge_values"):
        with pytest.raises(ValueError, match=rf"wanted: got {wrong}; key, query, value are allowed; with"):
            plan.backward(gradient, *given, output.detach(), lse, wanted=("query", wrong))
    results = {"grad_output": gradient, "output": output.detach(), "lse": lse}
    for name, tensor in results.items():
        for wrong in (tensor[..., :-1], tensor.long(), tensor.to("meta")):
            with pytest.raises(ValueError, match=rf"{name}: got shape .* is needed"):
                plan.backward(**dict(zip("qkv", given, strict=True)) | results | {name: wrong})
    with pytest.raises(ValueError, match=r"q: got shape .* but the graph has"):
        plan.backward(gradient, given[0][..., 1:, :, :], *given[1:], output.detach(), lse)


@pytest.mark.parametrize("backend", ["formula", "scatter"])
@pytest.mark.parametrize("name", ["groups", "all"])
def test_compiled_calls(backend, name):
    graph, sizes = EDGE_LISTS["repeated"](), SHAPES[name]
    plan = planned(FORMS["torch_coo"](graph)[0], sizes, backend, edge_data=True)
    tensors, data = leaves_of(shaped(graph.shape, sizes), edge_data("all", graph.num_edges, sizes))
    edges = plan.bind_edges(data)

    def function(q, k, v):
        return plan(q, k, v, scale=SCALE, edges=edges) * 2

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected, output = function(*tensors), compiled(*tensors)
    close(output, expected)
    factors = torch.randn_like(expected)
    found, right = (torch.autograd.grad(each, tensors, factors, retain_graph=True) for each in (output, expected))
    close(found, right)
    torch.compiler.reset()


EDGES = torch.stack([torch.arange(33) % 20, torch.arange(33) % 7])


def plan_of(graph=EDGES, **options):
    return plan_attention(graph, shape=(20, 20), backend="reference", device="cpu", **options)


def tensors_for(**changes):
    """q, k, v of 4 heads, 2 KV heads of 5 columns, and a batch of 2, over 20 nodes."""
    shapes = {"q": (2, 20, 4, 5), "k": (2, 20, 2, 5), "v": (2, 20, 2, 5)} | changes
    return [torch.randn(*shapes[name], dtype=DOUBLE) for name in "qkv"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": (2, 20, 4, 5), "v": (2, 20, 4, 5)}, "k: got .* 2 query heads of each KV head; make it .*num_kv_heads=4"),
        ({"k": (2, 20, 3, 5), "v": (2, 20, 3, 5)}, "k: got .* 2 query heads of each KV head"),
        ({"v": (2, 20, 4, 5)}, r"v: got shape \(2, 20, 4, 5\), but k has .* heads must agree"),
        ({"k": (1, 20, 2, 5)}, "k: got .* dimensions, batch and d must agree"),
        ({"k": (20, 2, 5)}, "k: got .* dimensions, batch and d must agree"),
        ({"k": (2, 20, 2, 6)}, "k: got .* dimensions, batch and d must agree"),
        ({"k": (2, 19, 2, 5)}, "k: got .* but the graph has 20 columns"),
        ({"v": (2, 20, 2, 0)}, "v: got .* d must be at least 1"),
        ({"q": (0, 20, 4, 5), "k": (0, 20, 2, 5), "v": (0, 20, 2, 5)}, "q: got .* a batch of at least 1 is needed"),
        ({"q": (1, 2, 20, 4, 5)}, r"q: got .* \[B, N, H, d\] is needed"),
        ({"q": (20, 5), "k": (20, 5), "v": (20, 5)}, "k: got .* 2 query heads of each KV head"),
    ],
)
def test_shapes_that_do_not_fit(changes, message):
    plan = planned(FORMS["torch_coo"](EDGE_LISTS["no_edges"]())[0], (4, 2, 5, 5, 2))
    with pytest.raises(ValueError, match=message):
        plan(*tensors_for(**changes))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_heads": 6, "num_kv_heads": 4}, ValueError, "num_kv_heads: got 4, but num_heads is 6; a divisor"),
        ({"num_heads": 6, "num_kv_heads": 0}, ValueError, "num_kv_heads: got 0; 1 to"),
        ({"num_heads": 6, "num_kv_heads": 2.0}, TypeError, r"num_kv_heads: got 2\.0; an integer"),
        ({"num_heads": True, "num_kv_heads": 1}, TypeError, "num_heads: got True"),
    ],
)
def test_numbers_of_heads_that_cannot_be(options, error, message):
    with pytest.raises(error, match=message):
        plan_attention(torch.zeros((2, 1), dtype=torch.int64), shape=(1, 1), device="cpu", **options)


def test_heads_that_do_not_fit_a_plan_for_others_or_none():
    plan = plan_of()
    with pytest.raises(ValueError, match=r"k: got .*plan_attention\(\.\.\., num_heads=4, num_kv_heads=2\)"):
        plan(*tensors_for())
    q, k, v = tensors_for(k=(2, 20, 3, 5), v=(2, 20, 3, 5))
    with pytest.raises(ValueError, match=r"k: got .* as many heads as q, or a divisor"):
        sparse_attention(q, k, v, torch.zeros((2, 1), dtype=torch.int64), shape=(20, 20))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"bias": (30,)}, "bias: got .* but the graph has 33 edges"),
        ({"bias": (33, 3)}, r"edges: got 3 heads; one head is needed, or .* a multiple of 2"),
        ({"bias": (33, 2)}, "edges: got 2 heads, but the call has 4; those of one head or of 4"),
        ({"bias": (33, 2), "multiplier": (33, 4)}, "bias: got 2 heads, but another value has 4"),
        ({"features": (33, 2), "key_weight": (4, 5, 2)}, "key_weight: got .* belong to the KV heads, and there are 2"),
        ({"features": (33, 2), "value_weight": (2, 6, 2)}, r"value_weight: got .* \[2, 5, 2\] is needed"),
        ({"additive_weight": (4, 5)}, "additive_weight: got .* belong to the KV heads"),
    ],
)
def test_edge_data_that_does_not_fit(data, message):
    plan = plan_of(num_heads=4, num_kv_heads=2, edge_data=True)
    data = EdgeData(**{name: torch.zeros(size, dtype=DOUBLE) for name, size in data.items()})
    with pytest.raises(ValueError, match=message):
        plan(*tensors_for(), edges=data)


def test_errors_name_the_callers_edges():
    plan = plan_of(num_heads=4, num_kv_heads=2, edge_data=True)
    bias = torch.zeros(33, 4, dtype=DOUBLE)
    bias[17, 3] = torch.nan
    with pytest.raises(ValueError, match="bias: edge 17, column 3 is nan"):
        plan.bind_edges(EdgeData(bias=bias))
    edges = EDGES.clone()
    edges[1, 30] = 20
    with pytest.raises(ValueError, match=r"row 1 \(targets\) holds ids from 0 to 20; the graph of shape \(20, 20\)"):
        plan_of(edges, num_heads=4, num_kv_heads=2)
    arrays = torch.arange(21).clamp(max=2), torch.tensor([1, 20])
    with pytest.raises(ValueError, match="indices: row 1 holds column 20; allowed are 0 to 19"):
        plan_of(arrays, num_heads=4, num_kv_heads=2)


def test_data_bound_by_a_plan_of_other_groups():
    """Without values of edges a plan of the same shape may have bound it, if the heads are grouped as here."""
    plans = [plan_of(), plan_of(num_heads=4, num_kv_heads=2), plan_of(num_heads=4, num_kv_heads=1)]
    data = EdgeData(score=ScoreTerm("s + x", row={"x": torch.zeros(20, dtype=DOUBLE)}))
    bound = [plan.bind_edges(data) for plan in plans]
    for wrong in (bound[0], bound[2]):
        with pytest.raises(ValueError, match="edges: bound by another plan"):
            plans[1](*tensors_for(), edges=wrong)
    with pytest.raises(ValueError, match="edges: bound by another plan"):
        plans[0](*tensors_for(k=(2, 20, 4, 5), v=(2, 20, 4, 5)), edges=bound[1])
    tensors = tensors_for()
    close(plans[1](*tensors, edges=bound[1]), plans[1](*tensors))


def test_values_of_another_width_need_weights_of_their_width():
    plan = plan_of(edge_data=True)
    q, k, v = (torch.randn(20, 2, dim, dtype=DOUBLE) for dim in (5, 5, 3))
    data = EdgeData(features=torch.randn(33, 2, dtype=DOUBLE), value_weight=torch.randn(2, 5, 2, dtype=DOUBLE))
    with pytest.raises(ValueError, match=r"value_weight: got .* 3 columns of a head are needed"):
        plan(q, k, v, edges=data)
