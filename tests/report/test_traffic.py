"""Bytes of a cell, counted anew from the graph."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from attention_cases import EDGE_CASES

from kernels.formats.csr import csr_pattern
from report.traffic import compulsory_bytes, flop, gathered_bytes, gathered_columns


@pytest.mark.parametrize("name", EDGE_CASES)
def test_columns_of_a_window_count_once(name):
    graph = EDGE_CASES[name]().tocsr()
    windows = [
        graph.indices[graph.indptr[i] : graph.indptr[min(i + 16, graph.shape[0])]] for i in range(0, graph.shape[0], 16)
    ]
    assert gathered_columns(csr_pattern(graph)) == sum(len(np.unique(window)) for window in windows)


def test_a_column_counts_again_in_the_next_window():
    star = sp.csr_array((np.ones(100), np.full(100, 99), np.arange(101)))  # every row has the last column alone
    assert gathered_columns(csr_pattern(star)) == 7


def test_bytes_and_flop():
    assert gathered_bytes(10, 64, torch.float16) == 10 * (64 * 2 + 64 * 2)
    assert compulsory_bytes(5, 64, torch.float16, torch.float32) == 5 * 64 * (2 + 4)
    assert flop(7, 64) == 7 * (2 * 64 + 2 * 64)
    assert flop(7, 16, heads=8) == 2 * flop(7, 32, heads=2)
