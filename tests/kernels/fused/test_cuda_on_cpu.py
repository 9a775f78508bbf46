"""cuda/tiles/forward.cu on the CPU (tests/cuda_shim): the real source and the real plans against dense float64."""

import pytest
import torch
from gradient_cases import attention_with_dropout
from instances import forward_instance, items_of
from launch_variants import BY_BLOCK, BY_TEAM, SPLIT, Variant
from plan_oracle import make_schedule, with_schedule
from poison import poisoned_buffers
from tolerance import edges_of, row_errors

from bench.baselines import REGISTRY
from fused3s import plan_attention
from fused3s.backends.base import Call, InputSpec
from fused3s.fused import backend as fused3s
from fused3s.fused.shapes import DROPOUT
from fused3s.graph.csr import csr_pattern
from fused3s.graph.reorder.row_order import permute_rows
from fused3s.runtime.jit import Element, KernelInstance
from fused3s.terms.dropout import Dropout
from fused3s.terms.edge_data import BoundEdges
from tests.cuda_shim.cuda_on_cpu import MODES, ON_SHIM, cuda_on_cpu
from tests.cuda_shim.oracle import GRAPHS, MULTIGRAPHS, assert_attention, inputs

pytestmark = ON_SHIM

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
# Head dimensions of every swizzle and every number of lanes a row; two warps at the width that takes them. Head groups:
# slices of one head and of two, copies of 4, 8 and 16 bytes, more parts of a row than lanes, odd numbers of heads.
SPECS = [
    forward_instance(HALF, FLOAT, 8, items=4),
    forward_instance(HALF, HALF, 16, items=2),
    forward_instance(BFLOAT, BFLOAT, 40, items=4),
    forward_instance(HALF, FLOAT, 64, items=4),
    forward_instance(HALF, HALF, 72, items=4),
    forward_instance(HALF, HALF, 128, items=4),
    forward_instance(BFLOAT, BFLOAT, 200, items=2),
    forward_instance(HALF, FLOAT, 256, items=2),
    forward_instance(HALF, HALF, 2, items=4),
    forward_instance(HALF, FLOAT, 12, items=2),
    forward_instance(BFLOAT, BFLOAT, 100, items=4),
    forward_instance(HALF, HALF, 64, items=4, heads=2),
    forward_instance(BFLOAT, FLOAT, 32, items=4, heads=4),
    forward_instance(HALF, HALF, 16, items=4, heads=8),
    forward_instance(HALF, FLOAT, 8, items=4, heads=8),
    forward_instance(BFLOAT, BFLOAT, 8, items=2, heads=5),
    forward_instance(HALF, HALF, 10, items=4, heads=8),
    forward_instance(HALF, HALF, 2, items=4, heads=3),
    forward_instance(HALF, HALF, 40, items=2, heads=2),
]
# float32: one warp a head, teams of two and four warps, of which the last may have fewer columns; odd and even numbers
# of slices; head groups as above.
SPECS += [
    forward_instance(FLOAT, FLOAT, dim, warps, heads, one_term=one_term, dim_warps=dim_warps)
    for dim, heads, warps, dim_warps, terms in [
        (2, 1, 4, 1, "1"),
        (8, 1, 2, 1, "3"),
        (12, 1, 4, 1, "3"),
        (16, 1, 4, 1, "1"),
        (40, 1, 2, 1, "3"),
        (64, 1, 4, 1, "13"),
        (72, 1, 2, 2, "3"),
        (128, 1, 2, 2, "13"),
        (128, 1, 4, 1, "3"),
        (200, 1, 1, 4, "3"),
        (250, 1, 2, 4, "1"),
        (256, 1, 1, 4, "3"),
        (2, 3, 4, 1, "3"),
        (8, 5, 2, 1, "1"),
        (8, 8, 4, 1, "3"),
        (10, 4, 4, 1, "3"),
        (12, 3, 4, 1, "1"),
        (16, 4, 4, 1, "13"),
        (32, 2, 2, 1, "3"),
    ]
    for one_term in (False, True)
    if ("1" if one_term else "3") in terms
]
# 16 bits, three TF32 terms, and one in teams of two warps.
OF_EACH_ELEMENT = [SPECS[3], forward_instance(FLOAT, FLOAT, 64), forward_instance(FLOAT, FLOAT, 128, 2, 1, 0, True, 2)]
each_element = pytest.mark.parametrize("spec", OF_EACH_ELEMENT, ids=lambda spec: spec.name)


def has_one_term(spec: KernelInstance) -> bool:
    return spec.arguments.element == Element.TF32


def num_heads_of(variant: Variant, spec: KernelInstance) -> int:
    """Heads of an instance for one head; of a head group one group, or two of which the last lacks a head."""
    heads = spec.arguments.heads
    return variant.heads if heads == 1 else variant.heads * heads - (variant.heads > 1)


VARIANTS = [
    Variant(BY_TEAM, "late", 2, 0.3, strided=True),
    Variant(BY_TEAM, "random", 1, 0.0, reordered=True),
    Variant(BY_BLOCK, "late", 1, -0.3, strided=True, reordered=True),
    Variant(BY_BLOCK, "early", 2, 0.2, with_lse=False),
    Variant(SPLIT, "late", 2, 0.2, reordered=True),
    Variant(SPLIT, "early", 1, 0.3, strided=True, with_lse=False),
    Variant(SPLIT, "random", 2, -0.2),
]


def run(
    monkeypatch: pytest.MonkeyPatch, spec: KernelInstance, graph, tensors: list[torch.Tensor], variant: Variant
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and lse of a launch with a schedule of the variant's own."""
    pattern, perm = csr_pattern(graph), None
    if variant.reordered:
        perm = torch.randperm(graph.shape[0], generator=torch.Generator().manual_seed(3)).int()
        pattern = permute_rows(pattern, perm)
    q, k, v = tensors
    with cuda_on_cpu(MODES[variant.mode]) as gpu:
        # KV tiles, whatever the heads are
        data = REGISTRY["fused3s"].build(pattern, q.device, InputSpec(), perm).arrays
        schedule = make_schedule(data.kv_tiles, data.tile_offset, items_of(spec), variant.split)
        with poisoned_buffers(monkeypatch):
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if variant.with_lse else None
            call = Call(q, k, v, variant.scale, spec.arguments.out_dtype, lse)
            output = fused3s.launch(spec, with_schedule(data, schedule), call)
    conflicts = gpu.bank_conflicts, gpu.word_conflicts
    assert conflicts == (0, 0), "the swizzles of K and V spread the rows of a load over all banks"
    return output, lse


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_case_matches_float64(monkeypatch, spec):
    """Every pair of an instance, a graph and a variant."""
    for number, (name, make_graph) in enumerate(MULTIGRAPHS.items(), SPECS.index(spec)):
        graph, variant = make_graph(), VARIANTS[number % len(VARIANTS)]
        heads, element = num_heads_of(variant, spec), spec.arguments.element
        tensors = inputs(graph, heads, spec.arguments.dim, element.dtype, variant.strided)
        output, lse = run(monkeypatch, spec, graph, tensors, variant)
        assert output.dtype == spec.arguments.out_dtype
        label = f"{name}, {variant}"
        assert_attention(output, tensors, graph, variant.scale, label, lse=lse, one_term=has_one_term(spec))


@each_element
@pytest.mark.parametrize("mode", MODES)
def test_the_bits_do_not_depend_on_the_order_of_events(monkeypatch, mode, spec):
    graph = GRAPHS["wide"]()
    tensors = inputs(graph, 2, spec.arguments.dim, spec.arguments.element.dtype)
    results = [run(monkeypatch, spec, graph, tensors, Variant(SPLIT, each, 2, 0.2))[0] for each in ("late", mode)]
    assert torch.equal(*results)


@each_element
@pytest.mark.parametrize("split", [BY_TEAM, BY_BLOCK, SPLIT], ids=["by_team", "by_block", "split"])
@pytest.mark.parametrize("name", ["hub", "wide", "n_one_past_16"])
def test_every_edge_counts_once(monkeypatch, name, split, spec):
    """With q = 0 and v = one-hot of key mod d, the output times the degree is the number of such keys."""
    graph = GRAPHS[name]()
    q, k, v = (torch.zeros_like(each) for each in inputs(graph, 1, spec.arguments.dim, spec.arguments.element.dtype))
    keys = torch.arange(graph.shape[1])
    v[keys, 0, keys % spec.arguments.dim] = 1
    output, _ = run(monkeypatch, spec, graph, [q, k, v], Variant(split, "late", 1, 1.0))
    adjacency = torch.from_numpy(graph.toarray()).double()
    counts = adjacency @ v[:, 0].double()
    found = output[:, 0].double() * adjacency.sum(1, keepdim=True)
    torch.testing.assert_close(found, counts, rtol=0, atol=1e-3)


@each_element
@pytest.mark.parametrize("split", [BY_TEAM, SPLIT], ids=["by_team", "split"])
@pytest.mark.parametrize("name", ["n_one_past_16", "wide", "empty_rows_and_windows"])
def test_nan_reaches_the_rows_that_use_it(monkeypatch, name, split, spec):
    """NaN in a row of K or Q reaches exactly the rows with an edge to it, in V at least those."""
    graph = GRAPHS[name]()
    uses = torch.from_numpy(graph.toarray() != 0)
    key, query = int(uses.sum(0).argmax()), int(uses.sum(1).argmax())
    assert 0 < uses[:, key].sum() < len(uses)
    variant = Variant(split, "late", 1, 0.2)

    for place, row in ((0, query), (1, key)):
        tensors = inputs(graph, 1, spec.arguments.dim, spec.arguments.element.dtype)
        tensors[place][row, 0, spec.arguments.dim // 2] = torch.nan
        output, _ = run(monkeypatch, spec, graph, tensors, variant)
        assert_attention(output, tensors, graph, variant.scale, name, one_term=has_one_term(spec))
    tensors = inputs(graph, 1, spec.arguments.dim, spec.arguments.element.dtype)
    tensors[2][key] = torch.nan
    output, _ = run(monkeypatch, spec, graph, tensors, variant)
    assert output[uses[:, key]].isnan().all()


@pytest.mark.parametrize("spec", OF_EACH_ELEMENT[1:], ids=lambda spec: spec.name)
@pytest.mark.parametrize("split", [BY_TEAM, SPLIT], ids=["by_team", "split"])
def test_scores_that_overflow_to_minus_infinity_have_no_weight(monkeypatch, split, spec):
    """Column 0 of q is 1e20, that of one key -1e19: as if its edges were not there; a row with no other edge is 0."""
    graph = GRAPHS["tall"]()
    q, k, v = inputs(graph, 1, spec.arguments.dim, spec.arguments.element.dtype)
    q[..., 0], k[..., 0] = 1e20, 0.0
    mask = graph.toarray() != 0
    key = mask[mask.sum(1) == 1][0].argmax()  # of a row with one edge
    k[key, 0, 0] = -1e19
    output, _ = run(monkeypatch, spec, graph, [q, k, v], Variant(split, "late", 1, 0.2))
    q[..., 0], k[key, 0, 0], mask[:, key] = 0.0, 0.0, False
    assert_attention(output, [q, k, v], type(graph)(mask), 0.2, "without the key", one_term=has_one_term(spec))


@pytest.mark.parametrize(
    ("reorder", "num_sms", "dim"),
    [("none", 1, 64), ("communities", 132, 64), ("none", 132, 256), ("communities", 1, 256)],
)
def test_plans_run_as_a_user_calls_them(monkeypatch, reorder, num_sms, dim):
    """The schedule that a plan makes for itself, for a small GPU and for a large one; two calls with one plan."""
    graph = GRAPHS["hub"]()
    with cuda_on_cpu(num_sms=num_sms) as gpu:
        options = {"dtype": HALF, "head_dim": dim, "num_heads": 2, "out_dtype": FLOAT}
        plan = plan_attention(graph, backend="fused3s", device="cpu", reorder=reorder, **options)
        for strided in (False, True):
            tensors = inputs(graph, 2, dim, HALF, strided)
            with poisoned_buffers(monkeypatch):
                output, lse = plan(*tensors, out_dtype=FLOAT, return_lse=True)
            assert_attention(output, tensors, graph, dim**-0.5, repr(plan), lse=lse)
    assert len(gpu.launched) == 2


@pytest.mark.parametrize(
    ("precision", "num_sms", "heads", "dim"),
    [
        ("highest", 1, 2, 64),
        ("high", 132, 1, 128),
        ("highest", 132, 1, 131),
        ("high", 1, 1, 250),
        ("highest", 132, 1, 250),
    ],
)
def test_float32_follows_the_precision_of_torch(monkeypatch, precision, num_sms, heads, dim):
    """Plans made before the precision is set; an odd head is padded."""
    graph = GRAPHS["hub"]()
    with cuda_on_cpu(num_sms=num_sms) as gpu:
        plan = plan_attention(graph, backend="fused3s", device="cpu", dtype=FLOAT, head_dim=dim, num_heads=heads)
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
        tensors = inputs(graph, heads, dim, FLOAT)
        with poisoned_buffers(monkeypatch):
            output, lse = plan(*tensors, return_lse=True)
    element = "kTF32" if precision == "high" else "kFloat"
    assert [name.split(",")[0] for name in gpu.launched] == [f"fused3s<Element::{element}"]
    assert_attention(output, tensors, graph, dim**-0.5, repr(plan), lse=lse, one_term=precision == "high")


@pytest.mark.parametrize("one_term", [False, True], ids=["highest", "high"])
@pytest.mark.parametrize(("dim", "warps", "dim_warps"), [(64, 4, 1), (128, 2, 2), (200, 1, 4)])
def test_dropout_of_float32(monkeypatch, one_term, dim, warps, dim_warps):
    graph = GRAPHS["wide"]()
    spec = forward_instance(FLOAT, FLOAT, dim, warps, terms=DROPOUT, one_term=one_term, dim_warps=dim_warps)
    tensors = inputs(graph, 2, dim, FLOAT)
    dropout = Dropout(0.3, torch.tensor([1]))
    for split in (BY_TEAM, SPLIT):
        with cuda_on_cpu(MODES["random"]):
            data = REGISTRY["fused3s"].build(csr_pattern(graph), torch.device("cpu"), InputSpec(FLOAT, dim, 2)).arrays
            schedule = make_schedule(data.kv_tiles, data.tile_offset, warps, split)
            call = Call(*tensors, 0.2, FLOAT, edges=BoundEdges(dropout=dropout))
            with poisoned_buffers(monkeypatch):
                output = fused3s.launch(spec, with_schedule(data, schedule), call)
        expected, _ = attention_with_dropout(*(each.double() for each in tensors), *edges_of(graph), 0.2, dropout)
        error = row_errors(output, expected)
        assert error.max() <= (2e-3 if one_term else 4e-6)
