"""cuda/tiles/forward.cu on the CPU (tests/cuda_shim) and on a GPU: the real source and plans against dense float64."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from attention_cases import REAL_GRAPHS, load_real_graph
from devices import both_devices, kernels_of, on_cpu, on_gpu
from edge_calls import plain_attention
from instances import forward_instance, items_of
from launch_variants import BY_BLOCK, BY_TEAM, SPLIT, Variant
from plan_oracle import make_schedule, with_schedule
from poison import poisoned_buffers
from tolerance import assert_within_bound, edges_of, row_errors

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
from tests.cuda_shim.cuda_on_cpu import MODES
from tests.cuda_shim.oracle import GRAPHS, MULTIGRAPHS, assert_attention, inputs

pytestmark = pytest.mark.usefixtures("one_thread")

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


TYPES = [(HALF, FLOAT), (HALF, HALF), (BFLOAT, FLOAT), (BFLOAT, BFLOAT)]
GPU_SPECS = [*SPECS, *(forward_instance(*types, dim) for dim in range(8, 257, 8) for types in TYPES)]


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
    Variant(BY_TEAM, "late", 1, 1e-30),
    Variant(SPLIT, "late", 1, -1e-30, reordered=True),
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
    with kernels_of(q.device.type, variant.mode) as gpu:
        # KV tiles, whatever the heads are
        data = REGISTRY["fused3s"].build(pattern, q.device, InputSpec(), perm).arrays
        schedule = make_schedule(data.kv_tiles, data.tile_offset, items_of(spec), variant.split)
        with poisoned_buffers(monkeypatch):
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if variant.with_lse else None
            call = Call(q, k, v, variant.scale, spec.arguments.out_dtype, lse)
            output = fused3s.launch(spec, with_schedule(data, schedule), call)
    conflicts = gpu and (gpu.bank_conflicts, gpu.word_conflicts)
    assert conflicts in (None, (0, 0)), "the swizzles of K and V spread the rows of a load over all banks"
    return output, lse


@pytest.mark.parametrize(
    ("device", "spec"),
    [*(on_cpu(spec, id=spec.name) for spec in SPECS), *(on_gpu(spec, id=f"cuda-{spec.name}") for spec in GPU_SPECS)],
)
def test_every_case_matches_float64(monkeypatch, device, spec):
    """Every pair of an instance, a graph and a variant."""
    for number, (name, make_graph) in enumerate(MULTIGRAPHS.items(), GPU_SPECS.index(spec)):
        graph, variant = make_graph(), VARIANTS[number % len(VARIANTS)]
        heads, element = num_heads_of(variant, spec), spec.arguments.element
        tensors = inputs(graph, heads, spec.arguments.dim, element.dtype, variant.strided, device)
        output, lse = run(monkeypatch, spec, graph, tensors, variant)
        assert output.dtype == spec.arguments.out_dtype
        label = f"{name}, {variant}"
        assert_attention(output, tensors, graph, variant.scale, label, lse=lse, one_term=has_one_term(spec))


SCORES = {
    "far_negative": lambda q, k: (q.abs(), -k.abs()),  # the published kernel gives zeros here
    "all_zero": lambda q, k: (torch.zeros_like(q), k),
    "one_huge": lambda q, k: (q, torch.where(torch.arange(len(k), device=k.device)[:, None, None] == 5, 60 * k, k)),
    "arange": lambda q, k: (torch.arange(q.numel(), device=q.device).view_as(q).to(q.dtype) % 17 / 8, k),
}


@both_devices
@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
def test_unusual_scores(monkeypatch, device, kind, dtype):
    graph = GRAPHS["n_one_short_of_16"]()
    q, k, v = inputs(graph, 2, 64, dtype, device=device)
    tensors = [*SCORES[kind](q, k), v]
    for split in (BY_TEAM, SPLIT):
        output, _ = run(monkeypatch, forward_instance(dtype, FLOAT, 64), graph, tensors, Variant(split, "late", 2, 1.0))
        assert_attention(output, tensors, graph, 1.0, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL_GRAPHS)
@pytest.mark.parametrize("scale", [1.0, 128**-0.5], ids=["unscaled", "scaled"])
def test_real_graphs(monkeypatch, real_graph_dir, name, scale):
    """With the schedule of the plan, and with many splits."""
    graph = load_real_graph(real_graph_dir, name)
    tensors = inputs(graph, 1, 128, HALF, device="cuda")
    by_plan = plan_attention(graph, backend="fused3s")(*tensors, scale=scale, out_dtype=FLOAT)
    variant = Variant(SPLIT, "late", 1, scale)
    split, _ = run(monkeypatch, forward_instance(HALF, FLOAT, 128), graph, tensors, variant)
    for output in (by_plan, split):
        assert assert_within_bound(output, *tensors, *edges_of(graph, "cuda"), scale, name) < 2e-3


@each_element
@pytest.mark.parametrize("mode", MODES)
def test_the_bits_do_not_depend_on_the_order_of_events(monkeypatch, mode, spec):
    graph = GRAPHS["wide"]()
    tensors = inputs(graph, 2, spec.arguments.dim, spec.arguments.element.dtype)
    results = [run(monkeypatch, spec, graph, tensors, Variant(SPLIT, each, 2, 0.2))[0] for each in ("late", mode)]
    assert torch.equal(*results)


def hubs() -> sp.csr_array:
    """Three rows with most columns, the others with a few."""
    rng, num_cols = np.random.default_rng(5), 100_003
    mask = [rng.choice(num_cols, num_cols * 9 // 10 if row in (0, 17, 500) else 5, replace=False) for row in range(501)]
    indptr = np.cumsum([0, *map(len, mask)])
    return sp.csr_array((np.ones(indptr[-1], np.int8), np.concatenate(mask), indptr), shape=(501, num_cols))


COUNTED = {"hubs": hubs} | {name: GRAPHS[name] for name in ("hub", "wide", "n_one_past_16")}


@each_element
@pytest.mark.parametrize("split", [BY_TEAM, BY_BLOCK, SPLIT], ids=["by_team", "by_block", "split"])
@pytest.mark.parametrize(
    ("device", "name"), [*map(on_cpu, ("hub", "wide", "n_one_past_16")), on_gpu("hubs"), on_gpu("wide")]
)
def test_every_edge_counts_once(monkeypatch, device, name, split, spec):
    """With q = 0 and v = one-hot of key mod d, the output times the degree is the number of such keys. One edge among
    100,000 is within any tolerance."""
    graph, dim = COUNTED[name](), spec.arguments.dim
    q, k, v = (torch.zeros_like(each) for each in inputs(graph, 1, dim, spec.arguments.element.dtype, device=device))
    keys = torch.arange(graph.shape[1])
    v[keys, 0, keys % dim] = 1
    output, _ = run(monkeypatch, spec, graph, [q, k, v], Variant(split, "late", 1, 1.0))
    row, col = edges_of(graph)
    counts = torch.bincount(row * dim + col % dim, minlength=graph.shape[0] * dim).view(-1, dim).double()
    found = output[:, 0].double().cpu() * counts.sum(1, keepdim=True)
    torch.testing.assert_close(found, counts, rtol=0, atol=1e-2 if name == "hubs" else 1e-3)


@both_devices
@each_element
@pytest.mark.parametrize("split", [BY_TEAM, SPLIT], ids=["by_team", "split"])
@pytest.mark.parametrize("name", ["n_one_past_16", "wide", "empty_rows_and_windows"])
@pytest.mark.parametrize(("value", "in_all"), [(torch.nan, False), (torch.nan, True), (torch.inf, True)])
def test_numbers_that_are_not_finite_reach_the_rows_that_use_them(
    monkeypatch, device, name, split, spec, value, in_all
):
    """In a row of K or Q they make NaN in exactly the rows with an edge to it (infinities are multiplied by numbers of
    both signs), in V at least in those, and in no window that does not gather it."""
    graph, dim, dtype = GRAPHS[name](), spec.arguments.dim, spec.arguments.element.dtype
    uses = torch.from_numpy(graph.toarray() != 0)
    key, query = int(uses.sum(0).argmax()), int(uses.sum(1).argmax())
    assert 0 < uses[:, key].sum() < len(uses)
    variant = Variant(split, "late", 1, 0.2)
    for place, row in ((0, query), (1, key), (2, key)):
        tensors = inputs(graph, 1, dim, dtype, device=device)
        tensors[place][row, 0, slice(None) if in_all or place == 2 else dim // 2] = value
        output, _ = run(monkeypatch, spec, graph, tensors, variant)
        if place < 2:
            assert_attention(output, tensors, graph, variant.scale, name, one_term=has_one_term(spec))
            continue
        is_finite = output[:, 0].cpu().isfinite()
        assert not is_finite[uses[:, key]].any()
        gathers = torch.cat([rows[:, key].any().expand(len(rows)) for rows in uses.split(16)])
        assert is_finite[~gathers].all()


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
    with kernels_of("cpu", num_sms=num_sms) as gpu:
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
    with kernels_of("cpu", num_sms=num_sms) as gpu:
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
        with kernels_of("cpu", "random"):
            data = REGISTRY["fused3s"].build(csr_pattern(graph), torch.device("cpu"), InputSpec(FLOAT, dim, 2)).arrays
            schedule = make_schedule(data.kv_tiles, data.tile_offset, warps, split)
            call = Call(*tensors, 0.2, FLOAT, edges=BoundEdges(dropout=dropout))
            with poisoned_buffers(monkeypatch):
                output = fused3s.launch(spec, with_schedule(data, schedule), call)
        exact = (each.double() for each in tensors)
        expected, _ = plain_attention(*exact, *edges_of(graph), 0.2, BoundEdges(dropout=dropout))
        error = row_errors(output, expected)
        assert error.max() <= (2e-3 if one_term else 4e-6)
