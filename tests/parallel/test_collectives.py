"""Collectives against what one process computes from all ranks' tensors."""

import numpy as np
import parallel_jobs
import scipy.sparse as sp
import torch
from rank_pool import run_alone

from parallel import partition_graph

NODES = 50


def test_gathered_rows_are_in_the_order_of_the_graph(pool):
    """Parts of rows at random, the last of four empty."""
    owner = np.random.default_rng(0).integers(3, size=NODES)
    parts = partition_graph(sp.csr_array((NODES, NODES)), 4, "contiguous", owner)
    joined, *others = pool.run(parallel_jobs.gather, 4, parts, 3)
    assert others == [None] * 3
    assert torch.equal(joined, torch.arange(NODES)[:, None].expand(-1, 3))


def test_each_rank_gets_its_value(pool):
    values = [{"rank": 0}, np.arange(5), None, "x" * 10**6]
    found = pool.run(parallel_jobs.scattered, 4, values)
    assert found[:1] + found[2:] == values[:1] + values[2:]
    assert (found[1] == values[1]).all()


def test_sums_and_uneven_rows_are_the_same_bits_on_all_ranks(pool):
    generator = torch.Generator().manual_seed(0)
    sizes = [3, 0, 5]
    tensors = [
        [torch.randn(size, 2, generator=generator), torch.randn(7, generator=generator), torch.ones(2, 1) * rank]
        for rank, size in enumerate(sizes)
    ]
    for rows, (vector, ranks) in pool.run(parallel_jobs.collect, 3, tensors):
        assert torch.equal(rows, torch.cat([of_rank[0] for of_rank in tensors]))
        assert torch.equal(vector, tensors[0][1] + tensors[1][1] + tensors[2][1])  # in this order
        assert torch.equal(ranks, torch.full((2, 1), 3.0))


def test_work_that_fails_ends_those_who_wait():
    own, *others = run_alone(parallel_jobs.fail_first, 3, [])
    assert own.startswith("ZeroDivisionError")
    for rank, text in enumerate(others, 1):
        assert text.startswith(f"RankError: rank {rank} stops, since rank 0 failed: ZeroDivisionError")
