"""Sizes that Python computes for the structs of the .cu files, asserted by the host's C++ compiler."""

import subprocess
from itertools import product

import pytest
import torch
from plan_oracle import (
    BEGIN,
    BITMAP,
    COUNT,
    ITEM_WORDS,
    NUM_KEYS,
    SECOND,
    SPLIT,
    SPLITS,
    TILE_WORDS,
    WINDOW,
)

from baselines.fused3s_paper import PaperKernelSpec
from kernels.backends.fused3s import FusedKernelSpec
from kernels.backends.fused3s_backward import BackwardKernelSpec
from kernels.backends.fused3s_edges import (
    BIAS,
    CLAMP,
    FEATURES,
    KEY_FEATURES,
    LANE_DIMS,
    MULTIPLIER,
    TYPES,
    VALUE_FEATURES,
    EdgeKernelSpec,
    heads_of_lane_group,
)
from kernels.backends.fused3s_edges import WARPS as WARPS_OF_EDGES
from kernels.runtime.jit import Element
from kernels.tuning import SM90
from tests.cuda_shim.cuda_on_cpu import COMPILER, FLAGS, SHIM_FOLDER, paste_source

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler found (g++ or clang++)")

DIMS = range(8, 257, 8)
EVEN_DIMS = range(2, 257, 2)
TERMS = (BIAS, MULTIPLIER, CLAMP, BIAS | MULTIPLIER | CLAMP)  # of fused3s.cu


def assert_compiles(source: str, equations: list[tuple[str, int]]) -> None:
    checks = "\n".join(f'static_assert({left} == {right}, "{left} is {right}");' for left, right in equations)
    text = f'#include <cstddef>\n#include "launch.h"\n{paste_source(source)}\n{checks}\n'
    command = [COMPILER, *FLAGS, f"-I{SHIM_FOLDER}", "-fsyntax-only", "-x", "c++", "-"]
    result = subprocess.run(command, input=text, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]


def test_fused3s():
    equations = []
    for dim in EVEN_DIMS:
        for heads, warps in product((1, 2, 3, 5, 8, 16) if dim <= 64 else (1,), (SM90.few_warps, SM90.warps)):
            spec = FusedKernelSpec(torch.float16, torch.float32, dim, warps, heads)
            equations.append((f"sizeof(SharedMemory<{dim}, {heads}, {warps}>)", spec.shared_bytes))
        for warps, terms in product((SM90.few_warps, SM90.warps), TERMS):
            spec = FusedKernelSpec(torch.float16, torch.float32, dim, warps, terms=terms)
            equations.append((f"sizeof(SharedMemoryOfTerms<{dim}, 1, {warps}, {terms}>)", spec.shared_bytes))
    for dim, heads in product(EVEN_DIMS, range(1, 17)):
        spec = FusedKernelSpec(torch.float16, torch.float32, dim, heads=heads)
        equations.append((f"sizeof(Partial<{dim}, {heads}>)", 4 * spec.partial_floats))
        equations.append((f"HeadGroup<{dim}, {heads}>::kSlices", spec.slices))
    for dim in EVEN_DIMS:
        for heads, dim_warps in product((1, 2, 3, 5, 8) if dim <= 64 else (1,), (1, 2, 3, 4)):
            columns = 16 * -(-dim // (16 * dim_warps)) if dim_warps > 1 else dim
            if dim_warps > 1 and (heads > 1 or columns * (dim_warps - 1) >= dim):
                continue
            spec = FusedKernelSpec(torch.float32, torch.float32, dim, SM90.few_warps, heads, dim_warps=dim_warps)
            memory = f"SharedMemory<{columns}, {heads}, {spec.block_warps}, 4>"
            if dim_warps > 1:
                memory = f"SharedMemoryOfTeams<{columns}, {spec.block_warps}, {dim_warps}>"
            equations.append((f"sizeof({memory})", spec.shared_bytes))
    words = {"begin": BEGIN, "count": COUNT, "window": WINDOW, "num_keys": NUM_KEYS, "split": SPLIT}
    words |= {"first_split": SPLITS.start, "num_splits": SPLITS.start + 1, "second": SECOND.start}
    equations += [(f"offsetof(WorkItem, {name})", 4 * word) for name, word in words.items()]
    equations += [("offsetof(KVTile, bitmap)", 4 * BITMAP.start)]
    equations += [("sizeof(KVTile)", 4 * TILE_WORDS), ("sizeof(WorkItem)", 4 * ITEM_WORDS)]
    assert_compiles("fused3s.cu", equations)


def test_fused3s_backward():
    equations = []
    elements = (Element.HALF, Element.FLOAT)
    for element, dim, columns, teams in product(elements, EVEN_DIMS, (False, True), (1, SM90.few_teams, SM90.teams)):
        spec = BackwardKernelSpec(element, dim, columns, teams)
        memory = f"sizeof(BackwardMemory<{spec.itemsize}, {dim}, {spec.dim_warps}, {spec.warps}>)"
        if spec.dim_warps > 1:
            memory += f" + {teams} * sizeof(TeamMemory<{spec.dim_warps}>)"
        equations.append((memory, spec.shared_bytes))
        partial = f"GradientPartial<{dim}, {str(columns).lower()}, {spec.dim_warps}>"
        equations.append((f"sizeof({partial})", 4 * spec.partial_floats))
    assert_compiles("fused3s_backward.cu", equations)


def test_fused3s_with_features():
    equations = []
    for dim, warps, terms in product(
        EVEN_DIMS, (SM90.few_warps, SM90.warps), (KEY_FEATURES, KEY_FEATURES | VALUE_FEATURES, 59)
    ):
        spec = FusedKernelSpec(torch.float16, torch.float32, dim, warps, terms=terms)
        equations.append((f"sizeof(SharedMemoryOfFeatures<{dim}, 1, {warps}, {terms}>)", spec.shared_bytes))
    assert_compiles("fused3s.cu", equations)


def test_fused3s_edges():
    equations = [("sizeof(Item)", 4 * 4), ("kWarps", WARPS_OF_EDGES), ("kFeatures", FEATURES)]
    equations += [("kLaneDims", LANE_DIMS)]
    bits = {"kBias": BIAS, "kMultiplier": MULTIPLIER, "kTypes": TYPES, "kClamp": CLAMP}
    bits |= {"kKeyFeatures": KEY_FEATURES, "kValueFeatures": VALUE_FEATURES}
    equations += bits.items()
    for dim, num_heads, terms in product(EVEN_DIMS, (1, 4, 16), (0, BIAS, VALUE_FEATURES, 63)):
        dtype, element = ((torch.float16, "kHalf"), (torch.float32, "kFloat"))[(dim // 2 + num_heads) % 2]
        spec = EdgeKernelSpec(dtype, dtype, dim, heads_of_lane_group(num_heads, dim), terms)
        group = f"ForwardGroup<Element::{element}, {dim}, {spec.heads}, {terms}>"
        equations.append((f"{group}::kPartial", spec.partial_floats))
        equations.append((f"{group}::kLanes", spec.lanes))
        equations.append((f"kWarps * {group}::kGroups", spec.groups_per_block))
        equations.append((f"{group}::kLoad_bytes", spec.copy_bytes))
    assert_compiles("fused3s_edges.cu", equations)


def test_fused3s_paper():
    equations = []
    for dim in DIMS:
        spec = PaperKernelSpec(torch.float16, torch.float32, dim, permuted=False, split_rows=True)
        partial_scores = f"{spec.warps} * RowSplit<{dim}, {spec.warps}>::kSplits * kWarpSize * sizeof(float4)"
        equations.append((partial_scores, spec.shared_bytes))
    assert_compiles(PaperKernelSpec.source, equations)
