"""Sizes that Python computes for the structs of the .cu files, asserted by the host's C++ compiler."""

import subprocess

import pytest
import torch

from kernels.backends.fused3s import FEW_WARPS, WARPS, FusedKernelSpec
from kernels.backends.fused3s_paper import PaperKernelSpec
from kernels.formats.schedule import (
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
from tests.cuda_shim.cuda_on_cpu import COMPILER, FLAGS, SHIM_FOLDER, paste_source

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler found (g++ or clang++)")

DIMS = range(8, 257, 8)


def assert_compiles(source: str, equations: list[tuple[str, int]]) -> None:
    checks = "\n".join(f'static_assert({left} == {right}, "{left} is {right}");' for left, right in equations)
    text = f'#include <cstddef>\n#include "launch.h"\n{paste_source(source)}\n{checks}\n'
    command = [COMPILER, *FLAGS, f"-I{SHIM_FOLDER}", "-fsyntax-only", "-x", "c++", "-"]
    result = subprocess.run(command, input=text, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]


def test_fused3s():
    equations = []
    for dim in DIMS:
        for warps in (FEW_WARPS, WARPS):
            spec = FusedKernelSpec(torch.float16, torch.float32, dim, warps)
            equations.append((f"sizeof(SharedMemory<{dim}, {warps}>)", spec.shared_bytes))
        equations.append((f"sizeof(Partial<{dim}>)", 4 * spec.partial_floats))
    words = {"begin": BEGIN, "count": COUNT, "window": WINDOW, "num_keys": NUM_KEYS, "split": SPLIT}
    words |= {"first_split": SPLITS.start, "num_splits": SPLITS.start + 1, "second": SECOND.start}
    equations += [(f"offsetof(WorkItem, {name})", 4 * word) for name, word in words.items()]
    equations += [("offsetof(KVTile, bitmap)", 4 * BITMAP.start)]
    equations += [("sizeof(KVTile)", 4 * TILE_WORDS), ("sizeof(WorkItem)", 4 * ITEM_WORDS)]
    assert_compiles("fused3s.cu", equations)


def test_fused3s_paper():
    equations = []
    for dim in DIMS:
        spec = PaperKernelSpec(torch.float16, torch.float32, dim, permuted=False, split_rows=True)
        partial_scores = f"{spec.warps} * RowSplit<{dim}, {spec.warps}>::kSplits * kWarpSize * sizeof(float4)"
        equations.append((partial_scores, spec.shared_bytes))
    assert_compiles("fused3s_paper.cu", equations)
