"""Features of more than 16 columns on the CPU (tests/cuda_shim): cuda/features/wide_features.cu around both passes of
the edge-by-edge kernels, against float64."""

import pytest
import torch
from edge_calls import EdgeCall
from edge_cases import EDGE_LISTS

from tests.cuda_shim.cuda_on_cpu import ON_SHIM

pytestmark = ON_SHIM

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
# heads, columns of a head, types of inputs and output, kinds of edge data, dropout, features: 8, 16 and 32 lanes a row,
# some without columns, and two launches; head groups of 1, 2, 4 and 8, with idle heads, and several.
CASES = {
    "one column more than narrow ones": (8, 16, FLOAT, FLOAT, ("features",), None, 17),
    "32, one head": (1, 24, FLOAT, FLOAT, ("features", "key_features", "value_features"), 0.4, 32),
    "48, two heads": (2, 64, BFLOAT, BFLOAT, ("features", "bias_per_head"), None, 48),
    "64, packed heads": (4, 12, HALF, FLOAT, ("features", "value_features"), 0.4, 64),
    "100, idle heads": (3, 10, FLOAT, FLOAT, ("all",), 0.4, 100),
    "100, 16 bits": (8, 16, BFLOAT, BFLOAT, ("features", "key_features"), None, 100),
    "128, all terms": (8, 8, HALF, HALF, ("all",), 0.4, 128),
    "144, a second launch of 16": (2, 36, FLOAT, FLOAT, ("features",), 0.4, 144),
    "200, three groups of heads": (12, 8, HALF, HALF, ("features",), None, 200),
    "256, wide heads": (1, 256, BFLOAT, BFLOAT, ("features",), None, 256),
    "256, many heads": (20, 4, FLOAT, FLOAT, ("value_features",), None, 256),
    "factors alone": (2, 24, FLOAT, FLOAT, ("key_factor",), None, 40),
    "factors and features": (4, 16, BFLOAT, BFLOAT, ("key_factor_and_features",), None, 33),
}
GRAPHS = ("repeated", "hub", "one_node_self_loop", "empty_rows_and_windows", "wide", "tall", "no_edges")


@pytest.mark.parametrize("case", CASES)
def test_results_match_float64(monkeypatch, case):
    heads, dim, dtype, out_dtype, kinds, rate, features = CASES[case]
    for kind in kinds:
        for name in GRAPHS:
            for part_edges, mode, reordered, scale in ((1000, "late", False, 0.4), (5, "random", True, -0.3)):
                shape = (EDGE_LISTS[name](), heads, dim, dtype)
                call = EdgeCall.make(*shape, kind, rate, part_edges, reordered, scale, out_dtype, rank=features)
                call.check(call.run(monkeypatch, mode), f"{name}, {kind}, parts of {part_edges} edges")
