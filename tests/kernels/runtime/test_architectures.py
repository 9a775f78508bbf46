"""Some instances of each family on every architecture: registers within the launch bounds, and no spills.

The lists of all shapes are in test_jit.py, those of the dense block in tests/dense.
"""

import pytest
from compiled import ARCHS, BFLOAT, FLOAT, HALF, check

from fused3s.fused.edges.backward import edge_backward_instances, features_instance
from fused3s.fused.edges.features import PACK_PAIR_FEATURES, product_instance
from fused3s.fused.edges.forward import edge_instance
from fused3s.fused.planning.gpu_plan import PLAN_EDGES, PLAN_ITEMS, PLAN_SCHEDULE, WRITE_TILES
from fused3s.fused.planning.gpu_row_items import PLAN_PARTS, PLAN_WHOLE_ROWS
from fused3s.fused.shapes import DROPOUT, EXPRESSION, KEY_FEATURES, VALUE_FEATURES
from fused3s.fused.tiles.backward import backward_instance
from fused3s.fused.tiles.forward import PACK_FEATURES, choose_instance, fused_instance
from fused3s.fused.tuning import SM90
from fused3s.runtime.jit import Element, KernelInstance
from models.dense.batch_norm import batch_norm_instance
from models.dense.residual_norm import rows_instance as norm_instance
from parallel.rank_rows import rows_instance as rank_instance

pytest.importorskip("cupy", reason="CuPy, which brings NVRTC's interface, is not installed")

FEATURES = KEY_FEATURES | VALUE_FEATURES
SCORE = "s * edge0 + edge1"
COMMON = ((64, SM90.warps), (128, SM90.warps), (256, SM90.few_warps))  # columns of a head, work items per block
CSR = (
    ("plan_count", (True, True)),
    ("plan_offsets", (True,)),
    ("plan_place", (True,)),
    ("plan_sort", (True, True, False)),
    ("plan_sort", (False, False, True)),
)
REGISTERS = {64: 128, 128: 168, 256: 255}
every_arch = pytest.mark.parametrize("arch", ARCHS)


@every_arch
def test_forward_pass_over_tiles(arch):
    """One head, features of edges, a score term at most columns, and a head group; of common columns two thirds."""
    turn = ARCHS.index(arch)
    element, dtype = ((Element.HALF, HALF), (Element.BFLOAT16, BFLOAT))[turn % 2]
    shapes = [each for i, each in enumerate(COMMON) if i != turn % 3]
    specs = [choose_instance(element, FLOAT, dim, items) for dim, items in shapes]
    specs += [fused_instance(element, dtype, dim, items, terms=FEATURES) for dim, items in COMMON[1:]]
    specs.append(fused_instance(element, dtype, 256, SM90.few_warps, terms=EXPRESSION, score=SCORE))
    check(specs, arch, lambda spec: REGISTERS[spec.arguments.dim])
    check([choose_instance(element, dtype, 8, SM90.warps, num_heads=8)], arch, 128)


@every_arch
def test_backward_pass_over_tiles(arch):
    element, terms = ((Element.HALF, 0), (Element.BFLOAT16, DROPOUT))[ARCHS.index(arch) % 2]
    shapes = [(128, SM90.teams, False), (256, SM90.few_teams, True)]
    check([backward_instance(element, dim, side, teams, terms) for dim, teams, side in shapes], arch, 255)


@every_arch
def test_edge_by_edge(arch):
    """Both passes; the registers leave room for six blocks of four warps on an SM, with features for five and three."""
    check([edge_instance(HALF, HALF, 16, 8, 0)], arch, 80)
    check([edge_instance(HALF, HALF, 16, 8, FEATURES), edge_instance(HALF, HALF, 10, 8, 0)], arch, 96)
    for terms in (0, FEATURES):
        check(edge_backward_instances(HALF, HALF, 16, 8, terms), arch, 168)
    check([features_instance(HALF)], arch, 64)


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
