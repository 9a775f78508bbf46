"""`split_qkv` against plain views, with gradients of every kind."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from fused3s import split_qkv
from fused3s.torch_side.side_by_side import lie_side_by_side


@pytest.fixture
def qkv():
    return torch.randn((5, 24), dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()


def test_parts_are_the_columns(qkv):
    parts = split_qkv(qkv, 2)
    assert torch.equal(torch.cat([part.flatten(1) for part in parts], 1), qkv)
    assert [part.shape for part in parts] == [(5, 2, 4)] * 3
    assert all(part.data_ptr() == qkv.data_ptr() + 8 * 8 * i for i, part in enumerate(parts))


def test_gradients(qkv):
    def products(qkv):
        query, key, value = split_qkv(qkv, 2)
        return query * key, key * value.exp()

    assert gradcheck(products, qkv, check_forward_ad=True)
    assert gradgradcheck(products, qkv)


def test_parts_lie_side_by_side_in_their_order_only(qkv):
    query, key, value = split_qkv(qkv, 2)
    assert lie_side_by_side(query, key, value)
    assert not lie_side_by_side(query, value, key)
    assert not lie_side_by_side(query, key, value.clone())
    assert not lie_side_by_side(*(part.contiguous() for part in (query, key, value)))
    assert not lie_side_by_side(*(part[:, :1] for part in (query, key, value)))


def test_columns_that_are_no_multiple():
    with pytest.raises(ValueError, match=r"qkv: got \[5, 24\] with num_heads = 5"):
        split_qkv(torch.zeros(5, 24), 5)
