"""Bytes of a cell, counted anew from the graph."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from attention_cases import EDGE_CASES

from bench.traffic import gathered_columns
from fused3s.graph.csr import CSRPattern, csr_pattern


@pytest.mark.parametrize("name", EDGE_CASES)
def test_columns_of_a_window_count_once(name):
    graph = EDGE_CASES[name]().tocsr()
    windows = [
        graph.indices[graph.indptr[i] : graph.indptr[min(i + 16, graph.shape[0])]] for i in range(0, graph.shape[0], 16)
    ]
    assert gathered_columns(csr_pattern(graph)) == sum(len(np.unique(window)) for window in windows)


@pytest.mark.parametrize("group", [2, 5, 16])
def test_a_row_of_a_group_is_several_rows_of_a_window(group):
    graph = EDGE_CASES["hub"]().tocsr()
    indptr, indices = torch.from_numpy(graph.indptr).long(), torch.from_numpy(graph.indices)
    rows = np.repeat(np.arange(graph.shape[0]), group)
    windows = [{j for i in rows[first : first + 16] for j in graph[[i]].indices} for first in range(0, len(rows), 16)]
    assert gathered_columns(CSRPattern(indptr, indices, graph.shape), group) == sum(map(len, windows))


def test_a_column_counts_again_in_the_next_window():
    star = sp.csr_array((np.ones(100), np.full(100, 99), np.arange(101)))  # every row has the last column alone
    assert gathered_columns(csr_pattern(star)) == 7
