"""Bytes of the cost model against those that the ranks exchange, and the choice of the scheme."""

import numpy as np
import parallel_jobs
import pytest
import scipy.sparse as sp
import torch

from configs import Config
from parallel import Group, Partition, load_partition, partition_graph, source_from_csr
from parallel.cost_model import INFINIBAND, LINKS, NVLINK, choose_scheme, traffic


@pytest.mark.parametrize("scheme", ["halo", "heads", "allgather"])
@pytest.mark.parametrize(("size", "heads"), [(1, 2), (2, 3), (4, 5)])
def test_bytes_are_those_that_the_ranks_exchange(pool, tmp_path, scheme, size, heads):
    matrix = sp.csr_array(np.random.default_rng(0).random((90, 90)) < 0.03)
    partition_graph(source_from_csr(matrix.indptr, matrix.indices), tmp_path, size, "contiguous")
    found = pool.run(parallel_jobs.count_bytes, size, str(tmp_path), scheme, heads, 6)
    partition = load_partition(tmp_path)
    predicted = traffic(scheme, partition.rows, partition.halo, heads, 6 * 4)
    assert [received for received, _, _ in found] == list(predicted.received)
    assert [sent for _, sent, _ in found] == list(predicted.sent)
    assert [calls for _, _, calls in found] == [predicted.collectives] * size


def partition(halo_rows: int) -> Partition:
    """Four parts of 1,000 rows, each with as many halo columns from each other part."""
    halo = tuple(tuple(0 if p == q else halo_rows for q in range(4)) for p in range(4))
    return Partition("", "metis", 4000, 0, (0, 1000, 2000, 3000, 4000), (0,) * 4, (0,) * 4, halo, {})


# Halo moves fewer bytes than heads while f < 2 (P - 1) / P^2 = 0.375, f being the halo's share of all rows.
@pytest.mark.parametrize(
    ("halo_rows", "heads", "chosen"), [(490, 4, "halo"), (510, 4, "heads"), (510, 3, "halo"), (1000, 3, "halo")]
)
def test_auto_takes_the_least_time(monkeypatch, halo_rows, heads, chosen):
    monkeypatch.setitem(LINKS, "nccl", type(NVLINK)("NVLink", 350e9, 0.0))
    found = choose_scheme("auto", partition(halo_rows), heads, 64, 2, "nccl")
    assert found.scheme == chosen
    assert "halo" in found.reason
    assert "NVLink" in found.reason


def test_latency_and_the_kind_of_link_count(monkeypatch):
    few_bytes = traffic("heads", [16, 16], [[0, 1], [1, 0]], 2, 8)
    assert few_bytes.seconds(NVLINK) == pytest.approx(2 * NVLINK.latency, rel=0.01)
    assert INFINIBAND.name in choose_scheme("auto", partition(10), 4, 64, 2, "nccl between machines").reason


def test_groups_name_their_link():
    groups = [Group(0, 8, torch.device("cpu"), backend, machines=n) for backend in ("nccl", "gloo") for n in (1, 2)]
    assert [LINKS[group.link].name for group in groups] == ["NVLink", "InfiniBand", "gloo", "gloo"]


@pytest.mark.parametrize(
    ("scheme", "message"),
    [("heads", "scheme: got 'heads' with 3 heads on 4 ranks"), ("ring", "scheme: got 'ring'; allowed are auto, halo")],
)
def test_impossible_schemes_are_refused(scheme, message):
    with pytest.raises(ValueError, match=message):
        choose_scheme(scheme, partition(1), 3, 64, 2, "gloo")


def test_a_configuration_with_one_head_has_no_heads_to_share_out():
    with pytest.raises(ValueError, match=r"runtime\.partition = 'heads' and model\.heads = 1: each rank needs a head"):
        Config.model_validate({"data": {"name": "cora"}, "runtime": {"partition": "heads"}})
