"""Configurations of `scripts/bench_end_to_end.py`."""

from pathlib import Path

import pytest

from bench.models import ModelBench
from configs import ConfigError, load_config
from configs.end_to_end_schema import EndToEndConfig

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "end_to_end"


def load(name: str, *overrides: str) -> EndToEndConfig:
    return load_config(FOLDER / f"{name}.yaml", overrides, EndToEndConfig)


@pytest.mark.parametrize("name", ["single", "batched", "single_fp32", "batched_fp32", "smoke"])
def test_shipped_config_loads(name):
    config = load(name)
    assert (config.model.heads, config.model.blocks) == (1, 10)
    assert config.model.dtype == ("float32" if name.endswith("_fp32") else "float16")
    assert all({"plain", "plain+graph"} <= {*modes} for modes in config.run.modes.values())  # launches like for like


def test_the_sets_and_widths_of_the_paper():
    single, batched = load("single"), load("batched")
    assert {"musae-github", "igb-small", "reddit", "ogbn-products", "amazon-products"} <= {*single.data.names}
    published = {"zinc", "peptides-struct", "peptides-func", "pascalvoc-sp", "coco-sp"}
    assert {*batched.data.names} == published | {"ogbg-molhiv", "ogbg-ppa"}
    assert single.model.dims == batched.model.dims == (64, 128, 256)
    assert single.run == batched.run


@pytest.mark.parametrize("name", ["single", "batched"])
def test_both_precisions_run_the_same_graphs_and_backends(name):
    half, single = load(name), load(f"{name}_fp32")
    assert half.data == single.data
    assert list(half.run.modes) == list(single.run.modes)
    assert half.measure.sha() == single.measure.sha()
    assert {mode for modes in single.run.modes.values() for mode in modes} == {"plain", "plain+graph"}
    assert (single.run.regions, single.run.accuracy) == ((), ())


def test_every_step_from_the_float32_baseline_to_the_fused_model_is_a_cell():
    cells = {
        (cell.dtype, cell.backend, cell.dense, cell.launch)
        for name in ("single", "single_fp32")
        for cell in ModelBench.cells(load(name))
    }
    assert {
        ("float32", "csr_unfused", "plain", "eager"),
        ("float16", "csr_unfused", "plain", "eager"),
        ("float16", "fused3s", "plain", "eager"),
        ("float16", "fused3s", "plain", "cuda_graph"),
        ("float16", "fused3s", "fused", "cuda_graph"),
    } <= cells


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("run.modes={fused3: [plain]}", ["run.modes = 'fused3'", "did you mean 'fused3s'", "csr_unfused"]),
        ("run.modes={fused3s: [plane]}", ["run.modes.fused3s.0 = 'plane'", "did you mean 'plain'", "'fused+graph'"]),
        ("run.modes={fused3s: []}", ["run.modes.fused3s", "at least 1 item"]),
        ("run.regions=[fused3]", ["run.regions = 'fused3'", "did you mean 'fused3s'"]),
        ("run.accuracy=[fused3]", ["run.accuracy = 'fused3'", "did you mean 'fused3s'"]),
        ("model.dtype=fp16", ["model.dtype = 'fp16'", "'float16', 'bfloat16' or 'float32'"]),
        ("run.modes={}", ["run.modes", "at least 1 item"]),
        ("model.dims=[300]", ["model.dim = 300", "300 columns; allowed are 1 to 256"]),
        ("model.dim=64", ["model.dim = 64: no such key", "did you mean 'dims'"]),
        ("data.names=[coar]", ["did you mean 'cora'"]),
        ("measure.budget_ms=0", ["measure.budget_ms = 0", "greater than 0"]),
    ],
)
def test_wrong_value_is_named_with_what_is_allowed(override, parts):
    with pytest.raises(ConfigError) as caught:
        load("smoke", override)
    for part in parts:
        assert part in str(caught.value)


def test_sha_tells_ways_of_measuring_apart_and_nothing_that_a_row_says():
    sha = load("smoke").measure.sha()
    assert load("smoke", "model.dims=[128]", "run.modes={dgl: [plain]}").measure.sha() == sha
    assert load("smoke", "measure.seed=1").measure.sha() != sha
