"""`scripts/bench_layers.py` on small graphs and the CPU, in place of the GPU that it asks for."""

import pytest
import torch
from scripts_as_modules import load_script
from typer.testing import CliRunner

from bench.records import read_rows

CONFIG = """
data:
  source: synthetic
  batch_size: 20
  workloads:
    cora: {graph: cora}
    molecules: {graph: ogbg-molhiv, batch: 4, captured: true}
    sampled: {graph: cora, seeds: 20, fan_out: [3, 2], edge_dim: 2}
model: {shape: 2x4, layers: 2}
run: {precisions: [float32, bfloat16]}
measure: {pool: 2, steps: 1, repeats: 1}
"""

pytest.importorskip("torch_geometric.nn", reason="torch_geometric is not installed")


@pytest.mark.usefixtures("one_thread")
def test_workloads_are_measured_by_name_and_once(monkeypatch, tmp_path):
    script, path, config = load_script("bench_layers"), tmp_path / "layers.csv", tmp_path / "my.yaml"
    config.write_text(CONFIG)
    monkeypatch.setattr(script.runner, "gpu", lambda purpose: torch.device("cpu"))

    def call(*arguments: str):
        return CliRunner().invoke(script.app, ["--config", str(config), "--results", str(path), *arguments])

    done = call("--set", "data.only=[molecules]")
    assert done.exit_code == 0, done.output
    rows = read_rows(path)
    assert {row.variant for row in rows} == {"molecules"}
    assert {(row.dtype, row.backend, row.launch) for row in rows} == {
        (dtype, *layer)
        for dtype in ("float32", "bfloat16")
        for layer in (("auto", "eager"), ("pyg", "eager"), ("auto", "cuda_graph"))
    }
    assert "PyG / ours" in done.output
    done = call()
    assert done.exit_code == 0, done.output
    assert "skipped      2" in done.output
    added = read_rows(path)[len(rows) :]
    assert {row.variant for row in added} == {"cora", "sampled"}


def test_without_pyg_there_is_an_error_before_anything_is_loaded(monkeypatch, tmp_path):
    script = load_script("bench_layers")
    monkeypatch.setattr(script.runner, "gpu", lambda purpose: torch.device("cpu"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = tmp_path / "my.yaml"
    config.write_text(CONFIG)
    done = CliRunner().invoke(script.app, ["--config", str(config), "--results", str(tmp_path / "r.csv")])
    assert done.exit_code == 2
    assert "error: the package torch_geometric is not installed" in done.stderr
    assert not (tmp_path / "r.csv").exists()
