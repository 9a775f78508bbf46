"""What Python and the .cu files both write down, asserted by the host's C++ compiler: words of records, lanes."""

import subprocess
from itertools import product

import plan_oracle
import torch

from fused3s.fused.edges import forward as fused3s_edges
from fused3s.fused.edges.features import FEATURES
from fused3s.fused.planning import schedule
from fused3s.runtime.jit import KernelSizes
from fused3s.runtime.params import struct_members
from fused3s.runtime.source import read_source
from tests.cuda_shim.cuda_on_cpu import COMPILER, FLAGS, NEEDS_COMPILER, SHIM_FOLDER, paste_source


def assert_compiles(source: str, equations: dict[str, int]) -> None:
    checks = "\n".join(f'static_assert({left} == {right}, "{left} is {right}");' for left, right in equations.items())
    text = f'#include <cstddef>\n#include "launch.h"\n{paste_source(source)}\n{checks}\n'
    command = [COMPILER, *FLAGS, f"-I{SHIM_FOLDER}", "-fsyntax-only", "-x", "c++", "-"]
    result = subprocess.run(command, input=text, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]


@NEEDS_COMPILER
def test_records_and_lanes():
    words = {
        "begin": plan_oracle.BEGIN,
        "count": plan_oracle.COUNT,
        "window": plan_oracle.WINDOW,
        "num_keys": plan_oracle.NUM_KEYS,
        "split": plan_oracle.SPLIT,
        "first_split": plan_oracle.SPLITS.start,
        "num_splits": plan_oracle.SPLITS.start + 1,
        "second": plan_oracle.SECOND.start,
    }
    equations = {f"offsetof(WorkItem, {name})": 4 * word for name, word in words.items()}
    equations |= {"sizeof(WorkItem)": 4 * schedule.ITEM_WORDS, "sizeof(KVTile)": 4 * schedule.TILE_WORDS}
    assert_compiles("tiles/forward.cu", equations | {"offsetof(KVTile, bitmap)": 4 * plan_oracle.BITMAP.start})
    wide_lanes = "LaneGroup<Element::kFloat, 128, 1, true>::kLaneDims"
    equations = {"kWarps": fused3s_edges.WARPS, wide_lanes: fused3s_edges.LANE_DIMS, "kFeatures": FEATURES}
    for dim, (element, dtype) in product(range(1, 257), (("kHalf", torch.float16), ("kFloat", torch.float32))):
        if dim % 2 == 0 or fused3s_edges.is_packed(dim, dtype):
            group = f"LaneGroup<Element::{element}, {dim}, {1 + dim % 2}, true>"
            equations[f"{group}::kHeadLanes"] = fused3s_edges.lanes_of_head(dim, dtype)
            equations[f"{group}::kIsPacked"] = int(fused3s_edges.is_packed(dim, dtype))
    assert_compiles("edges/forward.cu", equations | {"sizeof(Item)": 4 * 4})


def test_names_of_the_sizes():
    members = dict(struct_members(read_source("tiles/forward.cu"), "KernelSizes"))
    assert tuple(members) == KernelSizes._fields
    assert set(members.values()) == {"i"}
