"""Configurations of scripts/bench_kernels.py: what ships loads, what is wrong is named."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

import data
from configs import ConfigError, load_config
from configs.bench_schema import EDGE_PARALLEL, VARIANTS, BenchConfig
from kernels.backends.fused3s_paper import PaperKernelSpec

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
    specs = [PaperKernelSpec(torch.float16, torch.float32, 64, **switches) for switches in VARIANTS.values()]
    assert len({spec.name for spec in specs}) == 4
    assert specs[-1] == PaperKernelSpec(torch.float16, torch.float32, 64)


def test_the_other_configurations_load():
    others = {path.stem: load(path.stem) for path in FOLDER.iterdir()}
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


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("data.names=[coar]", ["'coar' is not known, did you mean 'cora'?", "allowed are cora, citeseer"]),
        ("data.names=[cora, cora]", ["'cora' is given twice"]),
        ("data.names=[]", ["data.names", "at least 1 item"]),
        ("data.names=cora", ["data.names = 'cora'", "valid tuple"]),
        ("kernel.backends=[fused3s_papr]", ["did you mean 'fused3s_paper'?", "F3S_splitC"]),
        ("kernel.backends=[F3S_splitX]", ["'F3S_splitX' is not known, did you mean 'F3S_split"]),
        ("kernel.out_dtype=bfloat16", ["kernel.out_dtype = 'bfloat16'", "'float32' or 'float16'"]),
        ("kernel.plans=[fresh]", ["kernel.plans.0 = 'fresh'", "'fixed' or 'rebuilt'"]),
        ("kernel.plans=[fixed, fixed]", ["kernel.plans = ['fixed', 'fixed']", "allowed once"]),
        ("measure.l2=cold", ["measure.l2", "repeats, scale"]),
        ("kernel.dims=[64, 60]", ["kernel.dims = [64, 60]: 60", "multiples of 8 up to 256"]),
        ("kernel.dims=[big]", ["kernel.dims.0 = 'big'", "valid integer"]),
        ("measure.repeats=3", ["measure.repeats = 3", "greater than or equal to 30"]),
        ("measure.scale=.inf", ["measure.scale", "finite"]),
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
