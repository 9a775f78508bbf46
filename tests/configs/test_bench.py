"""Configurations of scripts/bench_kernels.py: what ships loads, what is wrong is named."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

import data
from baselines.fused3s_paper import paper_instance
from configs import ConfigError, load_config
from configs.bench_schema import EDGE_PARALLEL, NUMBERED_EDGES, VARIANTS, BenchConfig
from kernels.edge_data import MAX_FEATURES, MAX_TYPES

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "bench"


def load(name: str, *overrides: str) -> BenchConfig:
    return load_config(FOLDER / f"{name}.yaml", overrides, BenchConfig)


def test_the_papers_graphs_ship_smallest_first():
    single, batched, ablation = (load(name) for name in ("single", "batched", "ablation"))
    assert (len(single.data.names), len(batched.data.names)) == (15, 9)
    assert ablation.data.names == single.data.names + batched.data.names
    for config, groups in ((single, {None}), (batched, {1024})):
        entries = [data.info(name) for name in config.data.names]
        assert {entry.num_graphs for entry in entries} == groups
        assert [entry.nnz for entry in entries] == sorted(entry.nnz for entry in entries)


def test_the_papers_back_ends_and_variants_ship():
    papers = {"fused3s_paper", "dfgnn_tiling", "dfgnn_hyper", "flashsparse_naive", "flashsparse_stable", "pyg"}
    for name in ("single", "batched"):
        assert papers <= {*load(name).kernel.backends}
        assert load(name).kernel.dims == (64, 128, 256)
    assert load("ablation").kernel.backends == (*VARIANTS, *EDGE_PARALLEL)
    assert load("ablation").kernel.dims == (64, 128, 256)


def test_each_variant_is_one_switch_from_the_one_before():
    for before, after in pairwise(VARIANTS.values()):
        assert sum(before[switch] != after[switch] for switch in before) == 1
    specs = [paper_instance(torch.float16, torch.float32, 64, **switches) for switches in VARIANTS.values()]
    assert len({spec.name for spec in specs}) == 4
    assert specs[-1] == paper_instance(torch.float16, torch.float32, 64)


def test_the_other_configurations_load():
    others = {path.stem: load(path.stem) for path in FOLDER.iterdir() if path.stem != "layers"}  # of its own schema
    assert {name for name, config in others.items() if config.kernel.bench != "kernels"} == {
        "backward",
        "edges",
        "float32",
        "heads",
    }
    papers = {*others["single"].data.names, *others["batched"].data.names}
    assert not {*others["more"].data.names} & papers
    assert {"fused3s", "fused3s+reorder", "fused3s_paper"} < {*others["smoke"].kernel.backends}
    assert {*others["smoke"].data.names} < papers
    assert others["masks"].kernel.plans == ("fixed", "rebuilt")
    assert {config.kernel.plans for name, config in others.items() if name != "masks"} == {("fixed",)}


def test_the_hash_is_of_what_every_cell_shares():
    sha = load("single").measure.sha()
    assert load("batched", "kernel.dims=[8]", "data.names=[zinc]").measure.sha() == sha
    assert load("single", "measure.scale=0.5").measure.sha() != sha


def test_shapes_stand_in_place_of_dims():
    assert load("single").kernel.head_shapes == ((1, 64), (1, 128), (1, 256))
    shapes = load("heads", "kernel.shapes=[8x16, 4x13]").kernel.head_shapes
    assert shapes == ((8, 16), (4, 13))
    assert [(str(shape), shape.width) for shape in shapes] == [("8x16", 128), ("4x13", 52)]
    with pytest.raises(ConfigError, match=r"kernel.dims = \[64\] and kernel.shapes = .*one of the two"):
        load("heads", "kernel.dims=[64]")


def test_heads_and_edges_have_a_file_of_their_own_and_the_same_graphs():
    heads, edges = load("heads"), load("edges")
    assert heads.data.names == edges.data.names
    assert len(heads.data.names) == 8  # and a surrogate from a file
    assert (heads.kernel.bench, edges.kernel.bench, load("single").kernel.bench) == ("heads", "edges", "kernels")
    assert load("heads", "kernel.edges=[bias]").kernel.bench == "edges"
    assert heads.measure.sha() == edges.measure.sha() != load("single").measure.sha()
    assert (heads.measure.scale_of(64), load("single").measure.scale_of(64)) == (0.125, 1.0)
    one_head = {shape.width for shape in heads.kernel.head_shapes if shape.heads == 1}
    assert {shape.width for shape in heads.kernel.head_shapes if shape.width <= 256} == one_head


def test_limits_of_edge_data_are_those_of_the_kernels():
    assert NUMBERED_EDGES == {"low_rank": MAX_FEATURES, "types": MAX_TYPES}


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("data.names=[coar]", ["'coar' is not known, did you mean 'cora'?", "allowed are cora, citeseer"]),
        ("data.names=[cora, cora]", ["'cora' is given twice"]),
        ("data.names=[]", ["data.names", "at least 1 item"]),
        ("data.names=cora", ["data.names = 'cora'", "valid tuple"]),
        ("kernel.backends=[fused3s_papr]", ["did you mean 'fused3s_paper'?", "F3S_splitC"]),
        ("kernel.backends=[F3S_splitX]", ["'F3S_splitX' is not known, did you mean 'F3S_split"]),
        ("kernel.out_dtype=bfloat16", ["kernel.out_dtype = 'bfloat16'", "'float32', 'float16' or 'input'"]),
        ("kernel.plans=[fresh]", ["kernel.plans.0 = 'fresh'", "'fixed' or 'rebuilt'"]),
        ("kernel.plans=[fixed, fixed]", ["kernel.plans = ['fixed', 'fixed']", "'fixed' is given twice"]),
        ("measure.l2=cold", ["measure.l2", "repeats, scale"]),
        ("kernel.dims=[64, 257]", ["kernel.dims = [64, 257]: got 257", "1 to 256 is allowed"]),
        ("kernel.dims=[0]", ["kernel.dims = [0]: got 0"]),
        ("kernel.shapes=[8x16, 128]", ["kernel.shapes", "valid string"]),
        ("kernel.shapes=[8x16, x16]", ["kernel.shapes = ['8x16', 'x16']: got 'x16'", "such as 8x16"]),
        ("kernel.shapes=['0x16']", ["heads x head dimension is needed"]),
        ("kernel.shapes=[2x257]", ["got '2x257'", "up to 256"]),
        ("kernel.shapes=[2x8, 2x8]", ["'2x8' is given twice"]),
        ("kernel.shapes=[]", ["kernel.shapes", "at least 1 item"]),
        ("kernel.edges=[biass]", ["got 'biass'", "none, bias, bias_per_head, low_rank_1 to low_rank_16"]),
        ("kernel.edges=[low_rank]", ["got 'low_rank'"]),
        ("kernel.edges=[low_rank_17]", ["got 'low_rank_17'"]),
        ("kernel.edges=[types_257]", ["got 'types_257'", "types_1 to types_256"]),
        ("kernel.edges=[bias, bias]", ["'bias' is given twice"]),
        ("kernel.dims=[big]", ["kernel.dims.0 = 'big'", "valid integer"]),
        ("measure.repeats=3", ["measure.repeats = 3", "greater than or equal to 30"]),
        ("measure.scale=.inf", ["measure.scale", "finite"]),
        ("measure.scale=sqrt", ["measure.scale", "rsqrt_dim"]),
        ("kernels.dims=[64]", ["kernels", "did you mean 'kernel'?", "data, kernel, measure"]),
        ("dims=64", ["section.key=value", "data, kernel, measure"]),
    ],
)
def test_wrong_value_is_named_with_what_is_allowed(override, parts):
    with pytest.raises(ConfigError) as caught:
        load("single", override)
    for part in ("single.yaml", f"--set {override}", *parts):
        assert part in str(caught.value)


def test_a_file_of_ones_own_is_fine(tmp_path):
    (tmp_path / "mine.npz").touch()
    assert load("single", "data.names=[mine, cora]", f"data.root={tmp_path}").data.names == ("mine", "cora")
    assert load("single", "data.names=[mine]", "data.source=file").data.names == ("mine",)
