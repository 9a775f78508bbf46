"""The kernels of a dense block of training on a GPU: every row and column sum against autograd in float64."""

import pytest
import torch
from dense_training_cases import assert_training_block, make_case, packed_block, run
from poison import poisoned_buffers

from models.dense.block_training import (
    TRAINING_DIMS,
    dense_block_backward,
    dense_block_forward,
    training_block_unavailable,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def available() -> None:
    if reason := training_block_unavailable(torch.device("cuda"), torch.float16, 128):
        pytest.skip(reason)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 1000, 169343])
@pytest.mark.parametrize("has_next", [True, False])
@pytest.mark.parametrize("dim", TRAINING_DIMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_row(monkeypatch, rows, has_next, dim, dtype):
    case = make_case(rows, dim, has_next, dtype, "cuda", rate=0.25 if rows == 1000 else 0.0)
    with poisoned_buffers(monkeypatch):
        found = run(case)
    assert_training_block(found, case, f"{rows} rows, d = {dim}")


def test_no_rows():
    found = run(make_case(0, 128, True, torch.float16, "cuda"))
    assert not found["d up_b"].any()


@pytest.mark.parametrize("dim", TRAINING_DIMS)
def test_results_are_the_same_bits_every_time(dim):
    case = make_case(169343, dim, True, torch.bfloat16, "cuda")
    first = run(case)
    for _ in range(20):
        found = run(case)
        assert all(torch.equal(first[name], found[name]) for name in first)


def test_cuda_graph_capture_and_replay():
    case = make_case(5000, 128, True, torch.bfloat16, "cuda", rate=0.5)
    packed = packed_block(case)

    def both() -> tuple[torch.Tensor, ...]:
        h_next, qkv, kept = dense_block_forward(packed, case.attn_out, case.h, case.dropout, True)
        grads, sums = dense_block_backward(packed, kept, case.grad, case.qkv_grad, case.dropout)
        return h_next, qkv, *grads, *sums.total()

    both()
    cuda_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(cuda_graph):
        outputs = both()
    for seed in range(2):
        case.dropout.seed.fill_(seed)  # a replay draws another mask
        case.h.copy_(torch.randn_like(case.h))
        cuda_graph.replay()
        assert all(map(torch.equal, outputs, both()))
