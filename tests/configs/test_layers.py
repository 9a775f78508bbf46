"""The configuration of scripts/bench_layers.py: what ships, and what is wrong is named."""

from pathlib import Path

import pytest

from configs import ConfigError, load_config
from configs.layers_bench_schema import LayersBenchConfig, Workload

PATH = Path(__file__).resolve().parents[2] / "configs" / "bench" / "layers.yaml"


def load(*overrides: str) -> LayersBenchConfig:
    return load_config(PATH, overrides, LayersBenchConfig)


def test_the_workloads_ship():
    config = load()
    assert config.data.workloads == {
        "cora": Workload(graph="cora"),
        "arxiv": Workload(graph="ogbn-arxiv"),
        "github": Workload(graph="musae-github"),
        "arxiv-edges": Workload(graph="ogbn-arxiv", edge_dim=8),
        "molecules-32": Workload(graph="ogbg-molhiv", batch=32, captured=True),
        "molecules-256-edges": Workload(graph="ogbg-molhiv", batch=256, edge_dim=8, captured=True),
        "molecules-1024": Workload(graph="ogbg-molhiv", batch=1024, captured=True),
        "sampled-1024": Workload(graph="ogbn-arxiv", seeds=1024, fan_out=(15, 10, 5), captured=True),
        "sampled-8192": Workload(graph="ogbn-arxiv", seeds=8192, fan_out=(20, 15), captured=True),
    }
    assert (config.model.head_shape, config.model.layers) == ((8, 16), 3)
    assert config.run.precisions == ("float32", "autocast", "bfloat16")
    assert config.data.source == "official"  # no surrogate unless asked for


def test_a_part_is_chosen_by_name_and_keeps_the_order_of_the_file():
    assert load("data.only=[sampled-1024, cora]").data.names == ("cora", "sampled-1024")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.only=[cora, coar]", ["data.only", "did you mean 'cora'"]),
        ("data.only=[cora, cora]", ["data.only", "'cora' is given twice"]),
        ("data.workloads={a: {graph: coar}}", ["data.workloads", "did you mean 'cora'"]),
        ("data.workloads={a: {graph: cora, seeds: 4}}", ["data.workloads.a", "one needs the other"]),
        ("data.workloads={a: {graph: cora, fan_out: [4]}}", ["data.workloads.a", "one needs the other"]),
        ("data.workloads={a: {graph: zinc, batch: 4, seeds: 4, fan_out: [2]}}", ["data.workloads.a", "one of the two"]),
        ("data.workloads={a: {graph: cora, captured: true}}", ["data.workloads.a.captured", "whole graph"]),
        ("data.workloads={a: {graph: cora, edge_dim: 17}}", ["data.workloads.a.edge_dim", "16"]),
        ("data.batch_size=1000", ["molecules-1024.batch = 1024", "data.batch_size = 1000"]),
        ("model.shape=8x300", ["model.shape", "8x300"]),
        ("run.precisions=[float16]", ["run.precisions", "autocast"]),
    ],
)
def test_what_is_wrong_is_named(override, words):
    with pytest.raises(ConfigError) as error:
        load(override)
    assert all(word in str(error.value) for word in words)
