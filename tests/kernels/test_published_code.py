"""What the README says of the published Fused3S code (commit 3480ef4), emulated from its description."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from attention_cases import load_real_graph

from kernels import sparse_attention

BLOCK = 32  # threads of the published preprocessing kernel, one block a row


def edges_in_a_wrong_row(graph: sp.csr_array) -> float:
    """Share of edges in a wrong row: threads step by the grid (N blocks) and not by the block, rows of the edges that
    they leave out stay 0, and those edges fall into the first of their window's 16 rows."""
    num_nodes = graph.shape[0]
    row = np.repeat(np.arange(num_nodes), np.diff(graph.indptr))
    position = np.arange(graph.nnz) - graph.indptr[row]
    return np.mean((position % num_nodes >= BLOCK) & (row % 16 != 0))


@pytest.mark.parametrize(("name", "share"), [("cora", 0.028), ("pubmed", 0.037), ("musae-github", 0.351)])
def test_edges_past_position_32_lose_their_row(name, share, real_graph_dir):
    assert edges_in_a_wrong_row(load_real_graph(real_graph_dir, name)) == pytest.approx(share, abs=0.001)


def test_the_bug_is_hidden_where_the_published_accuracy_test_looks():
    # 1000 nodes make 32 blocks in its launch: grid and block are equal, and no position is left out.
    position = np.arange(1000)
    thread_of_position = position % 32
    assert set(thread_of_position) == set(range(BLOCK))


def published_row(scores: np.ndarray, values: np.ndarray) -> np.ndarray:
    """A row of the published kernel: the maximum starts at 0, E is rounded to fp16 for SpMM but not for its sum."""
    shifted = np.exp(scores - max(0.0, scores.max()))
    return (shifted.astype(np.float16).astype(np.float64) @ values) / shifted.sum()


def test_a_maximum_that_starts_at_zero_loses_rows_with_low_scores():
    values = np.ones((3, 8))
    graph = sp.csr_array(np.ones((1, 3)))
    for score, expected in ((-5.0, 1.0), (-20.0, 0.0)):
        assert published_row(np.full(3, score), values) == pytest.approx(expected, abs=1e-2)
        q, k = torch.full((1, 8), score / 8), torch.ones(3, 8)
        ours = sparse_attention(q, k, torch.ones(3, 8), graph, scale=1.0, backend="reference")
        assert ours.numpy() == pytest.approx(1.0)
