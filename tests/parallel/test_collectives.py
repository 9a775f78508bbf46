"""Collectives against what one process computes from all ranks' tensors."""

import numpy as np
import parallel_jobs
import pytest
import torch
from rank_pool import run_alone

from parallel import builder, partition_graph, source_from_csr

NODES = 50


@pytest.fixture
def shuffled(tmp_path, monkeypatch):
    """Parts of rows at random, the last of four empty."""
    parts = np.random.default_rng(0).integers(3, size=NODES).astype(np.int32)
    monkeypatch.setattr(builder, "_assign", lambda *_: parts)
    partition_graph(source_from_csr(np.zeros(NODES + 1, np.int64), np.empty(0, np.int64)), tmp_path, 4, "contiguous")
    return str(tmp_path)


@pytest.mark.parametrize("rows_per_block", [7, NODES, 1000])
def test_gathered_rows_are_in_the_order_of_the_graph(pool, shuffled, rows_per_block):
    blocks, *others = pool.run(parallel_jobs.gather, 4, shuffled, 3, rows_per_block)
    assert others == [[], [], []]
    assert [len(block) for block in blocks[:-1]] == [rows_per_block] * (len(blocks) - 1)
    assert torch.equal(torch.cat(blocks), torch.arange(NODES)[:, None].expand(-1, 3))


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
