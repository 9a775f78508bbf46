"""Compilation without a GPU: instances stay within their budget of registers, shared memory and spills.

Compiling all instances for all architectures takes many minutes. Here each head dimension of each kernel is compiled
once, with the architectures and element types in turn.
"""

from collections.abc import Iterable
from itertools import cycle, product

import pytest
import torch
from instances import forward_instance, items_of

from baselines.dfgnn import DFGNNHyperBackend, DFGNNTilingBackend
from baselines.flashsparse import Kernels
from baselines.fused3s_paper import SOURCE as PAPER_SOURCE
from baselines.fused3s_paper import paper_instance
from kernels import KernelCompileError
from kernels.backends import feature_products
from kernels.backends.feature_products import product_instance
from kernels.backends.fused3s import choose_instance, heads_of_group
from kernels.backends.fused3s_backward import backward_instance
from kernels.backends.fused3s_edges import edge_instance
from kernels.backends.fused3s_edges_backward import edge_backward_instances
from kernels.backends.fused3s_shapes import BIAS, CLAMP, DROPOUT, KEY_FEATURES, MULTIPLIER, VALUE_FEATURES
from kernels.backends.fused3s_shapes import TYPES as EDGE_TYPES
from kernels.runtime import jit
from kernels.runtime.jit import Element, KernelInstance, PtxasReport, compile_ptxas
from kernels.tuning import SM90

pytest.importorskip("cupy", reason="CuPy, which brings NVRTC's interface, is not installed")

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
TYPES = [(HALF, FLOAT), (BFLOAT, BFLOAT), (HALF, HALF), (BFLOAT, FLOAT)]
ARCHS = ["sm_80", "sm_86", "sm_89", "sm_90"]
NARROWING = 2361  # NVRTC's number of "invalid narrowing conversion"
DIMS = range(8, 257, 8)
# Head groups of every second head dimension up to 64, and widths of one head that are no multiple of 8.
GROUPS = sorted(
    {(dim, heads_of_group(heads, dim)) for dim in (*range(2, 64, 4), 8, 16, 32, 64) for heads in range(1, 65)}
)
OTHER_DIMS = [dim for dim in range(66, 257, 10) if dim % 8]
TERMS = [BIAS, MULTIPLIER, BIAS | MULTIPLIER, CLAMP, BIAS | CLAMP, MULTIPLIER | CLAMP, BIAS | MULTIPLIER | CLAMP]
# Loads of 4, 8 and 16 bytes, and every number of lanes a head.
LANE_DIMS = [2, 8, 12, 24, 64, 130, 128, 256]
FEATURES = KEY_FEATURES | VALUE_FEATURES
LANE_TERMS = [0, BIAS, BIAS | MULTIPLIER, EDGE_TYPES, KEY_FEATURES, VALUE_FEATURES, FEATURES, 63]

every_arch = pytest.mark.parametrize("arch", ARCHS)


@pytest.fixture(autouse=True)
def narrowing_is_an_error(monkeypatch):
    monkeypatch.setattr(jit, "OPTIONS", (*jit.OPTIONS, f"--diag-error={NARROWING}"))


def in_turn(dims: Iterable[int], arch: str, shift: int = 0) -> list[tuple[int, tuple[torch.dtype, torch.dtype]]]:
    """Head dimensions to compile for `arch`, each with types of inputs and output; all lengths of a tail occur."""
    turns = [(dim, index + index // 4 + shift, index // 4 + shift) for index, dim in enumerate(dims)]
    return [(dim, TYPES[types % len(TYPES)]) for dim, turn, types in turns if ARCHS[turn % len(ARCHS)] == arch]


def check(spec, report: PtxasReport, arch: str, registers: int, static_bytes: int = 0, spill_bytes: int = 0) -> None:
    assert 16 <= report.registers <= registers, (arch, spec.name, report)
    assert report.shared_bytes == static_bytes, (arch, spec.name, report)
    assert report.spill_bytes <= spill_bytes, (arch, spec.name, report)


def fused3s_instances(arch: str) -> list[KernelInstance]:
    """Four warps at every head dimension, two at the wide ones, where large graphs take them, and at some others; on
    sm_90 also all types at the common dimensions."""
    specs = {forward_instance(*types, dim, SM90.warps) for dim, types in in_turn(DIMS, arch)}
    few = [dim for dim in DIMS if dim > SM90.wide_dim or dim % 32 == 8]
    specs |= {forward_instance(*types, dim, SM90.few_warps) for dim, types in in_turn(few, arch, shift=1)}
    if arch == "sm_90":
        common = ((64, SM90.warps), (128, SM90.warps), (256, SM90.few_warps))
        specs |= {forward_instance(*types, dim, warps) for types, (dim, warps) in product(TYPES, common)}
    return sorted(specs, key=lambda spec: spec.name)


def registers_of(spec: KernelInstance) -> int:
    """Three blocks of four warps fit an SM with 170 registers a thread, four with 128."""
    _, _, dim, heads, *_ = spec.arguments
    columns = 8 * -(-dim // 8) * heads if heads > 1 and dim <= 8 else heads * 16 * -(-dim // 16)
    columns = 16 * -(-columns // 16)
    return 128 if columns <= 64 else 170 if columns <= 128 else 255


@every_arch
def test_fused3s(arch):
    for spec, report in compile_ptxas(fused3s_instances(arch), arch).items():
        check(spec, report, arch, registers_of(spec))


# float32, dimension and heads of a tensor: common shapes, and heads of every number of slices and warps, with copies of
# 8 and 16 bytes.
FLOAT_SHAPES = [(64, 1), (128, 1), (256, 1), (8, 8), (16, 8), (32, 4)]
OTHER_FLOAT_SHAPES = [(dim, 1) for dim in (2, 8, 16, 24, 36, 40, 50, 72, 96, 112, 144, 160, 200, 250)]
OTHER_FLOAT_SHAPES += [(2, 3), (4, 8), (6, 8), (8, 5), (10, 4), (12, 3), (16, 2), (16, 3), (24, 2), (30, 2)]
FLOAT_ARCHS = [*ARCHS, "sm_100", "sm_120"]


@pytest.mark.parametrize("arch", FLOAT_ARCHS)
def test_float32_of_fused3s(arch):
    """No spills in the common shapes; in others a few words around the loop."""
    turn = FLOAT_ARCHS.index(arch)
    others = [shape for place, shape in enumerate(OTHER_FLOAT_SHAPES) if place % len(FLOAT_ARCHS) == turn]
    elements = (jit.Element.FLOAT, jit.Element.TF32)
    specs = [
        choose_instance(element, FLOAT, dim, 1 if dim > 128 else 2, heads)
        for (dim, heads), element in product(FLOAT_SHAPES + others, elements)
    ]
    specs.append(choose_instance(elements[turn % 2], FLOAT, (64, 128, 256)[turn % 3], 1, terms=DROPOUT))
    for spec, report in compile_ptxas(specs, arch).items():
        _, _, dim, heads, _, _, dim_warps = spec.arguments
        slices = -(-heads * 8 // 16) if heads > 1 and dim <= 8 else heads * -(-dim // 16)
        columns = 16 * -(-slices // dim_warps)
        registers = 128 if columns <= 32 else 168 if arch in ("sm_90", "sm_100") else 255
        is_common = dim in (8, 16, 32, 64, 128, 256) and heads in (1, 2, 4, 8)
        check(spec, report, arch, registers, spill_bytes=0 if is_common else 72)


def shapes_in_turn(shapes: list, arch: str) -> list[tuple]:
    """A share of `shapes` for `arch`, so that all architectures together compile each of them; with element types."""
    return [(shapes[index], types) for index, types in in_turn(range(len(shapes)), arch)]


@every_arch
def test_head_groups_of_fused3s(arch):
    shapes = [*GROUPS, *((dim, 1) for dim in OTHER_DIMS)]
    specs = [forward_instance(*types, dim, SM90.warps, heads) for (dim, heads), types in shapes_in_turn(shapes, arch)]
    for spec, report in compile_ptxas(specs, arch).items():
        check(spec, report, arch, registers_of(spec))


@every_arch
def test_edge_terms_of_fused3s(arch):
    shapes = list(product((12, 64, 72, 128, 200), TERMS))
    specs = [
        forward_instance(*types, dim, SM90.few_warps if dim > SM90.wide_dim else SM90.warps, terms=terms)
        for (dim, terms), types in shapes_in_turn(shapes, arch)
    ]
    for spec, report in compile_ptxas(specs, arch).items():
        check(spec, report, arch, registers_of(spec))


def test_gradients():
    """Both forms of the backward pass, and low-rank features in the tile kernel."""
    wide = [
        backward_instance(Element.HALF, dim, columns, SM90.teams)
        for dim, columns in product((64, 128, 256), (False, True))
    ]
    wide.append(backward_instance(Element.BFLOAT16, 128, True, SM90.teams, DROPOUT))
    narrow = [each for terms in (0, DROPOUT) for each in edge_backward_instances(HALF, HALF, 16, 8, terms)]
    features = [forward_instance(HALF, HALF, dim, terms=FEATURES) for dim in (64, 128)]
    for specs in (wide, narrow, features):
        for spec, report in compile_ptxas(specs, "sm_90").items():
            check(spec, report, "sm_90", registers=255)


@every_arch
def test_gradients_in_float32(arch):
    """Both numbers of TF32 terms; one, two and four warps a team."""
    shapes = list(product((16, 48, 64, 128, 256), (Element.FLOAT, Element.TF32), (False, True), (0, DROPOUT)))
    specs = [
        backward_instance(element, dim, columns, SM90.few_teams, terms)
        for (dim, element, columns, terms), _ in shapes_in_turn(shapes, arch)
    ]
    for spec, report in compile_ptxas(specs, arch).items():
        check(spec, report, arch, registers=255)


@every_arch
def test_fused3s_edges(arch):
    shapes = list(product(LANE_DIMS, (1, 16), LANE_TERMS))
    specs = {edge_instance(*types, dim, heads, terms) for (dim, heads, terms), types in shapes_in_turn(shapes, arch)}
    # The most registers of the instances with the smallest budget.
    specs |= {edge_instance(HALF, HALF, dim, 16, BIAS | MULTIPLIER) for dim in (8, 34, 66, 130)}
    for spec, report in compile_ptxas(sorted(specs, key=lambda spec: spec.name), arch).items():
        check(spec, report, arch, registers=255 if spec.arguments[-1] & (EDGE_TYPES | FEATURES) else 96)


@every_arch
def test_float32_edge_by_edge(arch):
    shapes = [
        (dim, heads, terms)
        for (dim, heads, terms), _ in shapes_in_turn(list(product(LANE_DIMS, (1, 16), LANE_TERMS)), arch)
    ]
    forward = list(dict.fromkeys(edge_instance(FLOAT, FLOAT, *shape) for shape in shapes))
    for spec, report in compile_ptxas(forward, arch).items():
        check(spec, report, arch, registers=255 if spec.arguments[-1] & (EDGE_TYPES | FEATURES) else 128)
    backward = [edge_backward_instances(FLOAT, FLOAT, *shape)[i] for shape, i in zip(shapes[::2], cycle((0, 1)))]
    for spec, report in compile_ptxas(list(dict.fromkeys(backward)), arch).items():
        *_, dim, _, terms = spec.arguments
        many = terms & FEATURES and dim <= 8  # 16 features a lane
        check(spec, report, arch, registers=255, spill_bytes=512 if many else 0)
    products = [
        product_instance(function, FLOAT, dim) for dim in LANE_DIMS for function in ("project_query", "add_features")
    ]
    for spec, report in compile_ptxas(products, arch).items():
        check(spec, report, arch, registers=128, static_bytes=report.shared_bytes)


@pytest.mark.parametrize("arch", FLOAT_ARCHS)
def test_gradients_of_feature_weights(arch):
    """Registers for the blocks of an SM that the grid has: three, or two of float32."""
    dtype = (HALF, BFLOAT)[FLOAT_ARCHS.index(arch) % 2]
    for each, registers in ((dtype, 80), (FLOAT, 128)):
        specs = [product_instance("weight_gradient", each, dim) for dim in (2, 10, 16, 24, 34, 36, 64, 256)]
        for spec, report in compile_ptxas(specs, arch).items():
            dim = spec.arguments[-1]
            slice_dims = 16 if dim <= 16 else 32 if dim <= 32 else 64
            static_bytes = feature_products.WARPS * feature_products.FEATURES * slice_dims * 4 + 4
            check(spec, report, arch, registers, static_bytes)


def test_every_head_dimension_is_compiled_for_some_architecture():
    specs = [spec for arch in ARCHS for spec in fused3s_instances(arch)]
    assert {spec.arguments.dim for spec in specs if items_of(spec) == SM90.warps} == set(DIMS)
    assert {spec.arguments.dim for spec in specs if items_of(spec) == SM90.few_warps} >= {
        dim for dim in DIMS if dim > SM90.wide_dim
    }
    for arch in ARCHS:
        here = fused3s_instances(arch)
        assert {spec.arguments.dim % 32 for spec in here} == {0, 8, 16, 24}
        assert {(spec.arguments.element.dtype, spec.arguments.out_dtype) for spec in here} == set(TYPES)
    widest = dict(GROUPS)  # the last is the largest
    assert [widest[dim] for dim in (2, 8, 10, 16, 18, 32, 34, 64)] == [8, 8, 4, 4, 2, 2, 1, 1]
    paper = [spec.arguments for arch in ARCHS for spec in fused3s_paper_instances(arch)]
    for split_rows in (False, True):
        assert {spec.dim for spec in paper if spec.split_rows == split_rows} == set(DIMS)
    assert {spec.dim for spec in paper if spec.edge_parallel} == set(DIMS[1::3])


def fused3s_paper_instances(arch: str) -> list[KernelInstance]:
    """The default and split rows at every head dimension, edge-parallel at every third, and each setting of the other
    switches."""
    specs = [paper_instance(*types, dim) for dim, types in in_turn(DIMS, arch)]
    specs += [
        paper_instance(*types, dim, permuted=False, split_rows=True, clocked=dim % 16 == 0)
        for dim, types in in_turn(DIMS, arch, shift=1)
    ]
    specs += [
        paper_instance(*types, dim, reordered=False, edge_parallel=True, clocked=dim % 16 == 0)
        for dim, types in in_turn(DIMS[1::3], arch, shift=2)
    ]
    switches = list(product((False, True), (False, True), (False, True)))
    dim = dict(zip(ARCHS, (256, 64, 128, 256), strict=True))[arch]
    specs += [
        paper_instance(HALF, FLOAT, dim, reordered=reordered, permuted=permuted, clocked=clocked)
        for reordered, permuted, clocked in switches
    ]
    return sorted(set(specs), key=lambda spec: spec.name)


def fused3s_paper_static_bytes(spec: KernelInstance) -> int:
    """The shared-memory plan at the head of fused3s_paper.cu; split rows keep Q in registers."""
    query = 0 if spec.arguments.split_rows else -(-spec.arguments.dim // 32) * 2 * 32 * 16
    return (
        query
        + spec.arguments.warps * 2 * 32 * 4
        + -(-spec.arguments.dim // 16) * 8 * 32 * 4
        + 2 * 16 * spec.arguments.warps * 4
    )


@every_arch
def test_fused3s_paper(arch):
    for spec, report in compile_ptxas(fused3s_paper_instances(arch), arch).items():
        # 64 registers leave room for four blocks of 8 warps an SM, 80 for three.
        registers = (
            80 if spec.arguments.dim > 128 and (spec.arguments.edge_parallel or not spec.arguments.permuted) else 64
        )
        spill_bytes = 48 if spec.arguments.clocked else 0  # clocked instances give no times
        check(spec, report, arch, registers, fused3s_paper_static_bytes(spec), spill_bytes)
        dynamic_bytes = 8 * 8 * 512 if spec.arguments.split_rows else 0  # at most
        assert report.shared_bytes + dynamic_bytes <= 99 * 1024, (arch, spec.name)  # a block's limit on sm_86


# Most registers of any instance of a baseline. 256 threads of dfgnn_hyper with 104 still put two blocks on an SM, and
# only head dimensions above 160 that 64 does not divide need more than 80.
BASELINE_REGISTERS = {
    "dfgnn_tiling": 80,
    "dfgnn_hyper": 104,
    "flashsparse_sddmm": 80,
    "flashsparse_statistics": 40,
    "flashsparse_normalise": 40,
    "flashsparse_spmm": 56,
    "flashsparse_merge": 40,
}
BASELINE_STATIC_BYTES = {"dfgnn_tiling": 2 * 32 * 4}  # dfgnn_hyper's are dynamic, the others have none


def baseline_instances(source: str, arch: str) -> set[KernelInstance]:
    """All of DF-GNN's instances for each architecture, of which there are few; FlashSparse's in turn."""
    if source.startswith("dfgnn"):
        backend = DFGNNTilingBackend() if source == "dfgnn_tiling.cu" else DFGNNHyperBackend()
        return {backend.instance(dim) for dim in range(1, 257)}
    return {
        instance
        for dim, types in in_turn(DIMS, arch)
        for instance in Kernels.of(*types, dim, stable=dim % 16 == 0).all()
    }


@every_arch
@pytest.mark.parametrize("source", ["dfgnn_tiling.cu", "dfgnn_hyper.cu", "flashsparse.cu"])
def test_baselines(source, arch):
    specs = sorted(baseline_instances(source, arch), key=lambda spec: spec.name)
    for spec, report in compile_ptxas(specs, arch).items():
        static_bytes = BASELINE_STATIC_BYTES.get(spec.function, 0)
        check(spec, report, arch, BASELINE_REGISTERS[spec.function], static_bytes)


def test_compile_error_names_instance_log_and_saved_source(monkeypatch, tmp_path):
    monkeypatch.setattr(jit.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(jit, "read_source", lambda name: "this is not CUDA")
    with pytest.raises(KernelCompileError) as caught:
        compile_ptxas([paper_instance(torch.float16, torch.float32, 64)], "sm_90")
    (saved,) = tmp_path.glob("*.cu")
    assert saved.read_text() == "this is not CUDA"
    for part in ("fused3s_paper<Element::kHalf, Element::kFloat, 64", "sm_90", str(saved), "error"):
        assert part in str(caught.value)


def test_narrowing_conversions_do_not_compile(monkeypatch, tmp_path):
    monkeypatch.setattr(jit.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(jit, "read_source", lambda name: "__device__ void f(int g) { const unsigned a[1] = {g}; }")
    with pytest.raises(KernelCompileError, match="narrowing"):
        compile_ptxas([paper_instance(torch.float16, torch.float32, 64)], "sm_90")


def test_headers_are_pasted_once():
    source = jit.read_source(PAPER_SOURCE)
    assert "#include" not in source
    assert "#pragma once" not in source
    assert source.count("void mma_m16n8k16(") == 1
    assert source.count("enum class Element") == 1
