"""The dense block on a GPU: every row against float64, within twice torch's error in the same type."""

import pytest
import torch
from dense_cases import UNUSUAL, assert_block, parameters, unusual_rows
from poison import poisoned_buffers

from models.dense.block import dense_block, dense_block_unavailable, pack_block
from models.dense.weights import DIMS

pytestmark = pytest.mark.gpu

TYPES = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def available() -> None:
    if reason := dense_block_unavailable(torch.device("cuda"), torch.float16, 128):
        pytest.skip(reason)


def inputs(rows: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(rows + dim)
    return [torch.randn(rows, dim, generator=generator, device="cuda").to(dtype) for _ in range(2)]


def check(monkeypatch, p: dict, attn_out: torch.Tensor, h: torch.Tensor, label: str) -> None:
    packed = pack_block(**p)
    with poisoned_buffers(monkeypatch):
        outputs = dense_block(packed, attn_out, h)
    assert_block(outputs, p, attn_out, h, label)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 1000, 169343])
@pytest.mark.parametrize("has_next", [True, False])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_row(monkeypatch, rows, has_next, dim, dtype):
    check(monkeypatch, parameters(dim, has_next, dtype, "cuda"), *inputs(rows, dim, dtype), f"{rows} rows, d = {dim}")


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_unusual_rows(monkeypatch, kind, dim, dtype):
    p, (attn_out, h) = parameters(dim, True, dtype, "cuda"), inputs(100, dim, dtype)
    unusual_rows(kind, p, attn_out, h)
    check(monkeypatch, p, attn_out, h, f"{kind}, d = {dim}")


@pytest.mark.parametrize("dim", DIMS)
def test_a_row_depends_on_itself_alone(dim):
    packed = pack_block(**parameters(dim, True, torch.float16, "cuda"))
    attn_out, h = inputs(40000, dim, torch.float16)
    order = torch.randperm(len(h), device="cuda")
    in_order, permuted = dense_block(packed, attn_out, h), dense_block(packed, attn_out[order], h[order])
    for expected, output in zip(in_order, permuted, strict=True):
        assert torch.equal(expected[order], output)


@pytest.mark.parametrize("dim", DIMS)
def test_results_are_the_same_bits_every_time(dim):
    packed = pack_block(**parameters(dim, True, torch.float16, "cuda"))
    tensors = inputs(169343, dim, torch.float16)
    first = dense_block(packed, *tensors)
    for _ in range(20):
        assert all(map(torch.equal, first, dense_block(packed, *tensors)))


@pytest.mark.parametrize("dim", DIMS)
def test_no_rows_and_strided_rows(dim):
    packed = pack_block(**parameters(dim, True, torch.float16, "cuda"))
    h, qkv = dense_block(packed, *inputs(0, dim, torch.float16))
    assert h.shape == (0, dim)
    assert qkv.shape == (0, 3 * dim)
    wide = torch.randn(50, 2, dim + 1, device="cuda").half()
    attn_out, h = wide[:, 0, 1:], wide[:, 1, :dim]
    for output, expected in zip(
        dense_block(packed, attn_out, h), dense_block(packed, attn_out.clone(), h.clone()), strict=True
    ):
        assert torch.equal(output, expected)


@pytest.mark.parametrize("dim", DIMS)
def test_cuda_graph_capture_and_replay(dim):
    packed = pack_block(**parameters(dim, True, torch.bfloat16, "cuda"))
    attn_out, h = inputs(5000, dim, torch.bfloat16)
    dense_block(packed, attn_out, h)
    cuda_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(cuda_graph):
        outputs = dense_block(packed, attn_out, h)
    for seed in range(2):
        torch.manual_seed(seed)
        attn_out.copy_(torch.randn_like(attn_out))
        h.copy_(torch.randn_like(h))
        cuda_graph.replay()
        for output, expected in zip(outputs, dense_block(packed, attn_out, h), strict=True):
            assert torch.equal(output, expected)
