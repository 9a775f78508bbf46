"""Benchmarks on the CPU with small graphs."""

from pathlib import Path

import pytest
import torch
from formula_backend import FormulaBackend

from bench.baselines import REGISTRY
from bench.measures import MEASURES
from bench.runner import Context, run_bench
from common.provenance import provenance
from common.records import Row, read_rows
from configs import load_config
from configs.bench import BenchConfig
from data import Dataset, registry

CPU = torch.device("cpu")
CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "bench"


def config(name: str, *overrides: str) -> BenchConfig:
    """A configuration of the repository, on the synthetic cora unless `overrides` say otherwise."""
    graphs = [] if name in ("peak_rates", "stability", "layers", "doors") else ["graphs=[cora]"]
    return load_config(CONFIGS / f"{name}.yaml", ["source=synthetic", *graphs, *overrides], schema=BenchConfig)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend with a backward pass that runs on the CPU, in place of fused3s."""
    monkeypatch.setattr(FormulaBackend, "name", "fused3s")
    monkeypatch.setattr(FormulaBackend, "computes_in", torch.float16)
    monkeypatch.setitem(REGISTRY, "fused3s", FormulaBackend())


def run(config: BenchConfig, path: Path, **options) -> tuple[int, list[Row]]:
    """Exit status, and the rows that were added to the file; on the CPU unless `device` is another."""
    before = len(read_rows(path)) if path.exists() else 0
    options = {"device": CPU} | options
    status = run_bench(MEASURES[config.measure], config, Path("c.yaml"), path, **options)
    return status, read_rows(path)[before:] if path.exists() else []


def context(config: BenchConfig) -> Context:
    (name, *_) = config.names
    loaded = config.load(config.graph_of(name), features=False)
    return Context(config, Path("c.yaml"), provenance(CPU), CPU, name, loaded)


def add_dataset(monkeypatch: pytest.MonkeyPatch, entry: Dataset) -> None:
    """Register a data set under its name."""
    known = registry._known
    monkeypatch.setitem(registry._table(), entry.name, {})
    monkeypatch.setattr(registry, "_known", lambda name: entry if name == entry.name else known(name))
