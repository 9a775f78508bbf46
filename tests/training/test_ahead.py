"""Items that are made beside the work on the items before."""

import pytest
import torch

from training.ahead import SideStream


def test_all_items_in_order_and_the_error_of_one():
    def items():
        yield 1
        yield 2
        raise ValueError("the third")

    found = SideStream(torch.device("cpu")).made(items())
    assert [next(found), next(found)] == [1, 2]
    with pytest.raises(ValueError, match="the third"):
        next(found)


@pytest.mark.gpu
def test_gpu_items_keep_their_memory_until_the_work_on_them_is_done():
    """Work that begins late: with memory that is used again too early, a later item would be read."""
    device = torch.device("cuda", torch.cuda.current_device())
    side, sums = SideStream(device), []
    for _ in range(2):  # epochs
        for item in side.made(torch.full((1 << 22,), i, device=device, dtype=torch.float64) for i in range(8)):
            torch.cuda._sleep(20_000_000)  # about 10 ms
            sums.append(item.mean())
            del item
    assert torch.stack(sums).tolist() == [*range(8)] * 2


@pytest.mark.gpu
def test_gpu_an_item_is_made_while_the_work_before_it_runs():
    device = torch.device("cuda", torch.cuda.current_device())
    side, waited = SideStream(device), []
    for item in side.made(torch.arange(5, device=device).cumsum(0) for _ in range(3)):
        waited.append(torch.cuda.current_stream().query())  # what was queued before is done
        torch.cuda._sleep(200_000_000)
        del item
    assert waited == [True, False, False]
