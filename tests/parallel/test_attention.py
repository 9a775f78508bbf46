"""Attention over 1 to 4 ranks against dense attention of the whole graph in float64."""

from functools import cache

import numpy as np
import parallel_jobs
import pytest
import scipy.sparse as sp
import torch
from edge_cases import EDGE_LISTS, dense_edge_attention, qkv
from rank_pool import GPUS, run_alone

from parallel import Part, partition_graph
from tests.cuda_shim.cuda_on_cpu import NEEDS_COMPILER

HEADS, DIM = 4, 6


def _components() -> np.ndarray:
    """Four components of 32 rows: contiguous parts have no halo."""
    block = np.random.default_rng(1).random((32, 32)) < 0.2
    return np.kron(np.eye(4, dtype=bool), block)


def _only_halo() -> np.ndarray:
    """Rows of each half use columns of the other half alone."""
    block = np.random.default_rng(2).random((32, 32)) < 0.2
    return np.kron(np.array([[0, 1], [1, 0]], bool), block)


MASKS = {"components": _components, "only_halo": _only_halo, "one_window": lambda: np.eye(9, k=1, dtype=bool)}
NAMES = [*EDGE_LISTS, *MASKS]


def graph(name: str) -> sp.csr_array:
    """A square matrix; a wide or tall one gets empty rows or columns. Repeated edges stay."""
    if name in MASKS:
        return sp.csr_array(MASKS[name]())
    edges = EDGE_LISTS[name]()
    size = max(edges.shape)
    order = np.argsort(edges.row.numpy(), kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(edges.row.numpy(), minlength=size))])
    return sp.csr_array((np.ones(edges.num_edges), edges.col.numpy()[order], indptr), shape=(size, size))


def case(name: str) -> tuple[sp.csr_array, list[torch.Tensor], torch.Tensor]:
    """The matrix, q, k and v of all rows, and a gradient of the output."""
    matrix = graph(name)
    tensors = qkv(matrix.shape, HEADS, DIM, torch.float64)
    return matrix, tensors, torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(3)).double()


@cache
def expected(name: str) -> list[torch.Tensor]:
    """Output and gradients of q, k and v of dense attention."""
    matrix, tensors, grad_output = case(name)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    output, _ = dense_edge_attention(*leaves, torch.from_numpy(matrix.toarray() != 0), DIM**-0.5)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad_output)]


@cache
def parts_of(name: str, size: int, method: str) -> list[Part]:
    """Contiguous parts, or rows at random, so that halos are large and some parts are empty."""
    matrix, owner = graph(name), None
    if method == "random":
        owner = np.random.default_rng(len(name)).integers(max(1, size - 1), size=matrix.shape[0])
    return partition_graph(matrix, size, "contiguous", owner)


@pytest.mark.parametrize(("size", "method"), [(1, "contiguous"), (2, "contiguous"), (3, "random"), (4, "contiguous")])
@pytest.mark.parametrize("backend", ["reference", "csr_unfused", "split"])
def test_ranks_compute_what_one_computes(pool, size, method, backend):
    cases = [(parts_of(name, size, method), *case(name)[1:]) for name in NAMES]
    found = pool.run(parallel_jobs.attend, size, cases, backend, {})
    # The log-sum-exp of two parts of a row is float32.
    assert_as_expected(found, 2e-6 if backend == "split" else 1e-12)


def half_cases(size: int, method: str) -> list[tuple[list[Part], list[torch.Tensor], torch.Tensor]]:
    """All graphs with inputs in float16."""
    cases = []
    for name in NAMES:
        _, tensors, grad_output = case(name)
        cases.append((parts_of(name, size, method), [tensor.half() for tensor in tensors], grad_output.half()))
    return cases


@NEEDS_COMPILER
@pytest.mark.parametrize(("size", "method"), [(3, "random"), (4, "contiguous")])
def test_kernels_of_fused3s_on_parts(pool, size, method):
    """By the CUDA kernels, run on the CPU (tests/cuda_shim)."""
    assert_as_expected(pool.run(parallel_jobs.attend_by_fused3s, size, half_cases(size, method), {}), 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("size", GPUS)
def test_ranks_on_gpus_compute_what_one_computes(size):
    """Two ranks share a GPU through gloo where there is one. With NCCL a CUDA graph gives the same bits."""
    cases = half_cases(size, "contiguous")
    assert_as_expected(run_alone(parallel_jobs.attend_on_gpus, size, [cases], seconds=300), 2e-2)


def assert_as_expected(found: list[list[list[torch.Tensor]]], tolerance: float) -> None:
    """Output and gradients of all graphs [rank][graph]: the rows of all ranks are those of dense attention."""
    for name, of_ranks in zip(NAMES, zip(*found, strict=True), strict=True):
        rows, *joined = (torch.cat(tensors) for tensors in zip(*of_ranks, strict=True))
        assert sorted(rows.tolist()) == list(range(len(rows))), name
        for what, computed, wanted in zip(("output", "dq", "dk", "dv"), joined, expected(name), strict=True):
            difference = (computed.double() - wanted[rows]).abs() - tolerance * (1 + wanted[rows].abs())
            assert (difference <= 0).all(), f"{name} {what}: off by {difference.max():.1e} more than allowed"


@pytest.mark.parametrize("backend", ["reference", "csr_unfused", "split"])
def test_gradients_with_dropout_are_those_of_the_same_masks(pool, backend):
    """The derivative of the loss by the gradients against differences: a mask of the backward pass that is not that of
    the forward pass shows. A mask that drops nothing, or differs from run to run, shows too."""
    name = "components"  # in parts at random: rows with own and halo columns
    _, tensors, grad_output = case(name)
    generator = torch.Generator().manual_seed(4)
    directions = [torch.randn(tensor.shape, generator=generator).double() for tensor in tensors]
    parts, step = parts_of(name, 3, "random"), 5e-3
    arguments = (parts, backend, tensors, directions, grad_output, step)
    found = pool.run(parallel_jobs.loss_along, 3, *arguments)
    below, above, slope = (sum(values) for values in zip(*found, strict=True))
    assert (above - below) / (2 * step) == pytest.approx(slope, rel=2e-3)  # the lse is float32
    without = (expected(name)[0] * grad_output).sum()
    assert abs((above + below) / 2 - without) > 0.01 * abs(without)
    assert pool.run(parallel_jobs.loss_along, 3, *arguments) == found
