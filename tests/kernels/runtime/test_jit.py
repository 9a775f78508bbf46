"""Compilation without a GPU: instances stay within their budget of registers, and spill nothing.

Compiling all instances for all architectures takes many minutes: most shapes are compiled once, with the architectures
and element types in turn, and some of each family for all. The dense block: tests/models/dense.
"""

from itertools import cycle, product

import ptxas
import pytest
import torch
from compiled import ARCHS, BFLOAT, FLOAT, HALF, check, in_turn
from instances import forward_instance
from ptxas import compile_ptxas

from bench.baselines.dfgnn import DFGNNHyperBackend, DFGNNTilingBackend
from bench.baselines.flashsparse import Kernels
from bench.baselines.fused3s_paper import paper_instance
from fused3s import KernelCompileError
from fused3s.fused.edges.added_features import added_instance
from fused3s.fused.edges.backward import edge_backward_instances, features_instance
from fused3s.fused.edges.features import PACK_PAIR_FEATURES, float_instance, product_instance
from fused3s.fused.edges.forward import edge_instance, is_packed
from fused3s.fused.edges.wide_features import wide_instance
from fused3s.fused.planning.gpu_plan import PLAN_EDGES, PLAN_ITEMS, PLAN_SCHEDULE, WRITE_TILES
from fused3s.fused.planning.gpu_row_items import PLAN_PARTS, PLAN_WHOLE_ROWS
from fused3s.fused.shapes import (
    ADDITIVE,
    DROPOUT,
    EXPRESSION,
    KEY_FACTOR,
    KEY_FEATURES,
    VALUE_FEATURES,
    WIDE_FACTORS,
    WIDE_KEYS,
    WIDE_VALUES,
)
from fused3s.fused.shapes import TYPES as EDGE_TYPES
from fused3s.fused.tiles.backward import backward_instance
from fused3s.fused.tiles.forward import PACK_FEATURES, choose_instance, fused_instance, heads_of_group
from fused3s.fused.tuning import SM90
from fused3s.runtime import jit
from fused3s.runtime.jit import Element, KernelInstance
from models.dense.batch_norm import batch_norm_instance
from models.dense.residual_norm import rows_instance as norm_instance
from parallel.rank_rows import rows_instance as rank_instance

pytest.importorskip("cupy", reason="CuPy, which brings NVRTC's interface, is not installed")

FLOAT_PRODUCTS = ("project_query_float", "add_features_float")
NARROWING = 2361  # NVRTC's number of "invalid narrowing conversion"
DIMS = [8, 24, 40, 64, 72, 96, 112, 128, 136, 192, 200, 256]
# Head groups of every second head dimension up to 64, and widths of one head that are no multiple of 8.
GROUPS = sorted({(dim, heads_of_group(heads, dim)) for dim in (2, 8, 10, 16, 26, 32, 64) for heads in range(1, 65)})
OTHER_DIMS = [66, 86, 126, 166]
SCORES = ["s + edge0", "s * edge0 + edge1", "clamp(s, -number0, number0)"]
# Loads of 4, 8 and 16 bytes, and every number of lanes a head.
LANE_DIMS = [2, 12, 24, 64, 130, 256]
FEATURES = KEY_FEATURES | VALUE_FEATURES
LANE_TERMS = [0, EDGE_TYPES, KEY_FACTOR, FEATURES, KEY_FACTOR | FEATURES, EDGE_TYPES | FEATURES | DROPOUT | EXPRESSION]
ADDED_FEATURES = ADDITIVE | KEY_FACTOR
COMMON = ((64, SM90.warps), (128, SM90.warps), (256, SM90.few_warps))  # columns of a head, work items per block
CSR = (
    ("plan_count", (True, True)),
    ("plan_offsets", (True,)),
    ("plan_place", (True,)),
    ("plan_sort", (True, True, False)),
    ("plan_sort", (False, False, True)),
)

every_arch = pytest.mark.parametrize("arch", ARCHS)


@pytest.fixture(autouse=True)
def narrowing_is_an_error(monkeypatch):
    monkeypatch.setattr(jit, "OPTIONS", (*jit.OPTIONS, f"--diag-error={NARROWING}"))


def registers_of(spec: KernelInstance) -> int:
    """Three blocks of four warps fit an SM with 170 registers a thread, four with 128."""
    _, _, dim, heads, *_ = spec.arguments
    columns = 8 * -(-dim // 8) * heads if heads > 1 and dim <= 8 else heads * 16 * -(-dim // 16)
    columns = 16 * -(-columns // 16)
    return 128 if columns <= 64 else 170 if columns <= 128 else 255


@every_arch
def test_fused3s(arch):
    """Four warps, two at the wide dimensions, where large graphs take them; head groups; edge terms."""
    specs = [forward_instance(*types, dim, SM90.warps) for dim, types in in_turn(DIMS, arch)]
    few = [dim for dim in DIMS if dim > SM90.wide_dim or dim % 32 == 8]
    specs += [forward_instance(*types, dim, SM90.few_warps) for dim, types in in_turn(few, arch, shift=1)]
    groups = [*GROUPS, *((dim, 1) for dim in OTHER_DIMS)]
    specs += [forward_instance(*types, dim, SM90.warps, heads) for (dim, heads), types in in_turn(groups, arch)]
    specs += [
        forward_instance(
            *types, dim, SM90.few_warps if dim > SM90.wide_dim else SM90.warps, terms=EXPRESSION, score=score
        )
        for (dim, score), types in in_turn(product((12, 64, 128, 200), SCORES), arch)
    ]
    check(specs, arch, registers_of)
    turn = ARCHS.index(arch)
    element, dtype = ((Element.HALF, HALF), (Element.BFLOAT16, BFLOAT))[turn % 2]
    common = [choose_instance(element, FLOAT, *shape) for i, shape in enumerate(COMMON) if i != turn % 3]
    common += [fused_instance(element, dtype, *shape, terms=FEATURES) for shape in COMMON[1:]]
    common.append(fused_instance(element, dtype, 256, SM90.few_warps, terms=EXPRESSION, score=SCORES[1]))
    check(common, arch, lambda spec: {64: 128, 128: 168, 256: 255}[spec.arguments.dim])
    check([choose_instance(element, dtype, 8, SM90.warps, num_heads=8)], arch, 128)


# float32, dimension and heads of a tensor: common shapes, and heads of every number of slices and warps, with copies of
# 8 and 16 bytes.
FLOAT_SHAPES = [(64, 1), (128, 1), (256, 1), (8, 8), (16, 8), (32, 4)]
FLOAT_SHAPES += [(dim, 1) for dim in (2, 16, 36, 50, 72, 112, 160, 250)]
FLOAT_SHAPES += [(2, 3), (6, 8), (8, 5), (12, 3), (16, 2), (30, 2)]


@every_arch
def test_float32_of_fused3s(arch):
    """No spills in the common shapes; in others a few words around the loop."""
    elements = Element.FLOAT, Element.TF32
    specs = [
        choose_instance(element, FLOAT, dim, 1 if dim > 128 else 2, heads)
        for ((dim, heads), element), _ in in_turn(product(FLOAT_SHAPES, elements), arch)
    ]
    dropped = in_turn(product((64, 128, 256), elements), arch, shift=2)
    specs += [choose_instance(element, FLOAT, dim, 1, terms=DROPOUT) for (dim, element), _ in dropped]

    def registers(spec):
        _, _, dim, heads, _, _, dim_warps = spec.arguments
        slices = -(-heads * 8 // 16) if heads > 1 and dim <= 8 else heads * -(-dim // 16)
        large_memory = arch in ("sm_90", "sm_100", "sm_103")  # room for twelve warps
        return 128 if 16 * -(-slices // dim_warps) <= 32 else 168 if large_memory else 255

    def spill_bytes(spec):
        _, _, dim, heads, *_ = spec.arguments
        return 0 if dim in (8, 16, 32, 64, 128, 256) and heads in (1, 2, 4, 8) else 72

    check(specs, arch, registers, spill_bytes=spill_bytes)


@every_arch
def test_gradients_over_tiles(arch):
    """16 bits; float32 with both numbers of TF32 terms; one, two and four warps a team."""
    shapes = product((16, 48, 64, 128, 256), (Element.FLOAT, Element.TF32), (False, True), (0, DROPOUT))
    specs = [
        backward_instance(element, dim, side, SM90.few_teams, terms)
        for (dim, element, side, terms), _ in in_turn(shapes, arch)
    ]
    element, terms = ((Element.HALF, 0), (Element.BFLOAT16, DROPOUT))[ARCHS.index(arch) % 2]
    shapes = [(128, SM90.teams, False), (256, SM90.few_teams, True)]
    specs += [backward_instance(element, dim, side, teams, terms) for dim, teams, side in shapes]
    check(specs, arch, 255)


def of_edges(most: int):
    """Registers of an instance that goes edge by edge."""

    def registers(spec):
        element, _, dim, _, terms = spec.arguments
        return 255 if terms & (EDGE_TYPES | KEY_FACTOR | FEATURES) else 168 if is_packed(dim, element) else most

    return registers


@every_arch
def test_edge_by_edge(arch):
    shapes = in_turn(product(LANE_DIMS, (1, 16), LANE_TERMS), arch)
    specs = [edge_instance(*types, dim, heads, terms) for (dim, heads, terms), types in shapes[::2]]
    # The most registers of the instances with the smallest budget.
    specs += [edge_instance(HALF, HALF, dim, 16, EXPRESSION, SCORES[1]) for dim, _ in in_turn(LANE_DIMS * 3, arch)]
    check(specs, arch, of_edges(96))
    check([edge_instance(FLOAT, FLOAT, *shape) for shape, _ in shapes[1::2]], arch, of_edges(128))
    backward = [edge_backward_instances(FLOAT, FLOAT, *shape)[i] for (shape, _), i in zip(shapes[::4], cycle((0, 1)))]

    def spill_bytes(spec):
        *_, dim, _, terms = spec.arguments
        return 176 if terms & FEATURES and dim <= 8 else 0  # 16 features a lane

    check(backward, arch, 255, spill_bytes=spill_bytes)
    # Room for six blocks of four warps on an SM, with features for five and three.
    check([edge_instance(HALF, HALF, 16, 8, 0)], arch, 80)
    check([edge_instance(HALF, HALF, 16, 8, FEATURES), edge_instance(HALF, HALF, 10, 8, 0)], arch, 96)
    for terms in (0, FEATURES):
        check(edge_backward_instances(HALF, HALF, 16, 8, terms), arch, 168)
    check([features_instance(HALF)], arch, 64)


@every_arch
def test_added_features(arch):
    """Both passes with features inside of additive attention, and the gradients of features and weight."""
    shapes = in_turn(product(((8, 16), (8, 8), (10, 8), (24, 2), (128, 1)), (0, WIDE_FACTORS | DROPOUT)), arch)
    for (dim, heads), terms in (shape for shape, _ in shapes):
        for dtype in (HALF, FLOAT):
            shape = dtype, dtype, dim, heads, ADDED_FEATURES | terms
            check([edge_instance(*shape), *edge_backward_instances(*shape)], arch, 255)
            of_one = [added_instance(dtype, dtype, dim, heads, each, not each) for each in (False, True)]
            check(of_one, arch, 128)
            check([added_instance(dtype, dtype, dim, heads, True, True)], arch, 255)


@every_arch
def test_packed_heads_and_pairs(arch):
    """No spills, and as many blocks an SM as the launch bounds promise."""
    terms = (0, EXPRESSION, EDGE_TYPES)
    packed = in_turn(product(((10, 8), (13, 4), (13, 2), (14, 8)), terms), arch)
    check([edge_instance(*types, *shape, term) for (shape, term), types in packed], arch, of_edges(96))
    for i in (0, 1):
        check([edge_backward_instances(HALF, HALF, *shape, term)[i] for (shape, term), _ in packed], arch, 255)
    pairs = in_turn(product(((16, 8), (16, 4), (10, 8)), (FEATURES, KEY_FEATURES, LANE_TERMS[-1])), arch)
    check([edge_instance(*types, *shape, term) for (shape, term), types in pairs], arch, 255)


@every_arch
def test_feature_products(arch):
    """Registers for the blocks of an SM that the grid has: three, or two of float32."""
    for dtype, registers in ((HALF, 80), (BFLOAT, 80), (FLOAT, 128)):
        dims = in_turn((2, 10, 16, 24, 36, 256), arch, shift=dtype.itemsize)
        check([product_instance("weight_gradient", dtype, dim) for dim, _ in dims], arch, registers)
    check([float_instance(function, vector) for function, vector in product(FLOAT_PRODUCTS, (1, 4))], arch, 64)


@every_arch
def test_wide_features(arch):
    """Every width of a launch, type and number of tiles; both passes with what they take from them."""
    functions = ("feature_products", "feature_gradients", "feature_sums")
    shapes = in_turn(product(functions, (HALF, BFLOAT, FLOAT), (32, 64, 128), (8, 16)), arch)
    check([wide_instance(*shape) for shape, _ in shapes], arch, 168)
    features = WIDE_KEYS | WIDE_VALUES
    terms = (features, features | DROPOUT, features | EXPRESSION, features | EDGE_TYPES | DROPOUT, WIDE_VALUES)
    for ((heads, dim), term), types in in_turn(product(((8, 16), (8, 8), (4, 12), (1, 256)), terms), arch):
        for dtypes in (types, (FLOAT, FLOAT)):
            score = SCORES[1] if term & EXPRESSION else None
            shape = *dtypes, dim, heads, term, score
            check([edge_instance(*shape), *edge_backward_instances(*shape)], arch, 255)


@every_arch
def test_kernels_around_attention(arch):
    """Products with features, norms, and rows of other ranks: registers for three blocks of 256 threads an SM."""
    dtype = (HALF, BFLOAT)[ARCHS.index(arch) % 2]
    products = (("weight_gradient", None), ("project_query", None), ("add_features", dtype))
    check([product_instance(function, dtype, 128, out) for function, out in products], arch, 80)
    check([PACK_FEATURES, PACK_PAIR_FEATURES], arch, 80)
    norms = [norm_instance(function, dtype, 128) for function in ("residual_norm", "residual_norm_backward")]
    check([*norms, norm_instance("relu_backward", dtype, 256)], arch, 80)
    batch_norms = ("batch_norm_statistics", "batch_norm", "batch_norm_sums", "batch_norm_gradient")
    check([batch_norm_instance(function, dtype, 128) for function in batch_norms], arch, 80)
    check([rank_instance("pack_rows", 16), rank_instance("combine_rows", dtype, 16)], arch, 64)


@every_arch
def test_plans(arch):
    """Half of the sources for each architecture. At most 64 registers in blocks of 1,024 threads."""
    if ARCHS.index(arch) % 2:
        check([WRITE_TILES, PLAN_EDGES], arch, 80)
        check([PLAN_PARTS, PLAN_WHOLE_ROWS], arch, 64)
    else:
        check([KernelInstance("plan/plan_csr.cu", *each) for each in CSR], arch, 96)
        check([PLAN_SCHEDULE, PLAN_ITEMS], arch, 64)


# GAT; positions in three dimensions; a soft cap of an edge's value.
EXPRESSIONS = (
    "leaky_relu(row0 + column0, 0.2)",
    "s - ((row0 - column0)**2 + (row1 - column1)**2 + (row2 - column2)**2) / (2 * head0**2)",
    "s + column0",
    "number0 * tanh((s + edge0 * head0) / number0)",
)
BIAS = "s + edge0"


def instances_of(score: str) -> list[KernelInstance]:
    found = [edge_instance(dtype, dtype, dim, heads, EXPRESSION, score) for dtype in (HALF, FLOAT)
             for heads, dim in ((8, 8), (1, 64))]  # fmt: skip
    for dtype, dim, heads in ((HALF, 8, 8), (FLOAT, 64, 1)):
        found += edge_backward_instances(dtype, dtype, dim, heads, EXPRESSION, score)
    if "s" in score.split("(")[0].split():
        found += [fused_instance(Element.HALF, HALF, dim, 4, terms=EXPRESSION, score=score) for dim in (64, 128)]
    if score == BIAS:
        shapes = (4, 16), (3, 10), (8, 6), (2, 32)
        found += [fused_instance(Element.HALF, HALF, dim, 4, heads, EXPRESSION, score=score) for heads, dim in shapes]
    if "s" in score.split("(")[0].split():
        shapes = [(dim, columns) for dim in (64, 128, 256) for columns in (False, True)]
        found += [backward_instance(Element.HALF, dim, columns, 2, EXPRESSION, score) for dim, columns in shapes]
    return found


@pytest.mark.parametrize(
    ("score", "arch"), [*zip(EXPRESSIONS * 2, ARCHS, strict=True), *((BIAS, arch) for arch in ARCHS[::2])]
)
def test_expressions_compile_without_spills(score, arch):
    def spill_bytes(instance):
        # The column pass of 128 columns a warp has all 255 registers without a term.
        return 32 if instance.function == "fused3s_backward" and instance.arguments.dim >= 128 else 0

    check(instances_of(score), arch, 255, spill_bytes=spill_bytes)


@every_arch
def test_fused3s_paper(arch):
    """The default, split rows, edge-parallel blocks, and each setting of the other switches; clocked ones may spill."""
    specs = [paper_instance(*types, dim) for dim, types in in_turn(DIMS, arch)]
    for switches, shift in (
        ({"permuted": False, "split_rows": True}, 1),
        ({"reordered": False, "edge_parallel": True}, 2),
    ):
        specs += [
            paper_instance(*types, dim, **switches, clocked=dim % 16 == 0)
            for dim, types in in_turn(DIMS[shift - 1 :: 2 * shift - 1], arch, shift)
        ]
    names = "reordered", "permuted", "clocked"
    switches = product((64, 128, 256), product((False, True), repeat=len(names)))
    specs += [
        paper_instance(HALF, FLOAT, dim, **dict(zip(names, values, strict=True)))
        for (dim, values), _ in in_turn(switches, arch)
    ]

    def registers(spec):  # 64 leave room for four blocks of 8 warps an SM, 80 for three
        of = spec.arguments
        return 80 if of.dim > 128 and (of.edge_parallel or not of.permuted) else 64

    check(specs, arch, registers, spill_bytes=lambda spec: 48 if spec.arguments.clocked else 0)


@every_arch
def test_baselines(arch):
    dims = range(4 + ARCHS.index(arch), 257, 4 * len(ARCHS))
    check([DFGNNTilingBackend().instance(dim) for dim in dims], arch, registers=80)
    check([DFGNNHyperBackend().instance(dim) for dim in dims], arch, registers=104)  # 256 threads: two blocks an SM
    of_types = [Kernels.of(*types, dim, stable=dim % 16 == 0).all() for dim, types in in_turn(DIMS, arch)]
    check([instance for instances in of_types for instance in instances], arch, registers=80)


def test_compile_error_names_instance_log_and_saved_source(monkeypatch, tmp_path):
    monkeypatch.setattr(jit.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ptxas, "read_source", lambda *_: "this is not CUDA")
    with pytest.raises(KernelCompileError) as caught:
        compile_ptxas([paper_instance(torch.float16, torch.float32, 64)], "sm_90")
    (saved,) = tmp_path.glob("*.cu")
    assert saved.read_text() == "this is not CUDA"
    for part in ("fused3s_paper<Element::kHalf, Element::kFloat, 64", "sm_90", str(saved), "error"):
        assert part in str(caught.value)


def test_narrowing_conversions_do_not_compile(monkeypatch, tmp_path):
    monkeypatch.setattr(jit.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ptxas, "read_source", lambda *_: "__device__ void f(int g) { const unsigned a[1] = {g}; }")
    with pytest.raises(KernelCompileError, match="narrowing"):
        compile_ptxas([paper_instance(torch.float16, torch.float32, 64)], "sm_90")
