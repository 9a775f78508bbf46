"""Configurations of `scripts/bench_end_to_end.py`."""

from pathlib import Path

import pytest

from configs import ConfigError, load_config
from configs.end_to_end_schema import EndToEndConfig

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "end_to_end"


def load(name: str, *overrides: str) -> EndToEndConfig:
    return load_config(FOLDER / f"{name}.yaml", overrides, EndToEndConfig)


@pytest.mark.parametrize("name", ["single", "batched", "smoke"])
def test_shipped_config_loads(name):
    config = load(name)
    assert (config.model.heads, config.model.blocks) == (1, 10)
    assert "csr_unfused" in config.run.modes
    assert {"plain", "fused+graph"} <= {*config.run.modes["fused3s"]}


def test_the_sets_and_widths_of_the_paper():
    single, batched = load("single"), load("batched")
    assert {"musae-github", "igb-small", "reddit", "ogbn-products", "amazon-products"} <= {*single.data.names}
    assert {*batched.data.names} == {"zinc", "peptides-func", "pascalvoc-sp", "ogbg-molhiv", "ogbg-ppa"}
    assert single.model.dims == batched.model.dims == (64, 128, 256)
    assert single.run == batched.run


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("run.modes={fused3: [plain]}", ["run.modes = 'fused3'", "did you mean 'fused3s'", "csr_unfused"]),
        ("run.modes={fused3s: [plane]}", ["run.modes.fused3s.0 = 'plane'", "did you mean 'plain'", "'fused+graph'"]),
        ("run.modes={fused3s: []}", ["run.modes.fused3s", "at least 1 item"]),
        ("run.modes={}", ["run.modes", "at least 1 item"]),
        ("model.dims=[100]", ["model.dim = 100", "multiples of 8 up to 256"]),
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
