"""Attention on one GPU, to which bench/parallel.py compares ranks; those run in tests/scripts/test_bench.py."""

from bench_runs import config, run


def test_without_torchrun_the_whole_graph_is_a_row(tmp_path):
    small = ["backends=[reference]", "precisions=[float32]", "shapes=[2x8]", "repeats=2"]
    status, (whole,) = run(config("parallel", *small, f"root={tmp_path}"), tmp_path / "r.csv")
    assert (status, whole.ranks, whole.variant, whole.region, whole.status) == (0, 1, "none", "none", "ok")
