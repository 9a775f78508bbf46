"""Bytes of the cost model against those that the ranks exchange, and the choice of the scheme."""

import numpy as np
import parallel_jobs
import pytest
import scipy.sparse as sp

from parallel import Partition, load_partition, partition_graph, source_from_csr
from parallel.cost_model import LINKS, NVLINK, choose_scheme, traffic


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


@pytest.mark.parametrize(
    ("scheme", "message"),
    [("heads", "scheme: got 'heads' with 3 heads on 4 ranks"), ("ring", "scheme: got 'ring'; allowed are auto, halo")],
)
def test_impossible_schemes_are_refused(scheme, message):
    with pytest.raises(ValueError, match=message):
        choose_scheme(scheme, partition(1), 3, 64, 2, "gloo")
