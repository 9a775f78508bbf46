"""The cache of edge data in slot order; stand-ins replace the streams and captures of a GPU."""

import weakref

import pytest
import torch

from fused3s.fused.edges import slot_order
from fused3s.fused.edges.slot_order import in_slot_order

SLOTS = torch.tensor([2, 0, 1], dtype=torch.int32)


@pytest.fixture
def gpu(monkeypatch):
    """The stream of the next calls, and whether it is captured."""
    state = {"stream": 1, "captures": False}
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(slot_order, "stream_handle", lambda index: state["stream"])
    monkeypatch.setattr(slot_order, "is_capturing", lambda device: state["captures"])
    return state


def rows() -> torch.Tensor:
    return torch.arange(6.0).view(3, 2)


def test_a_result_serves_all_calls_of_its_stream(gpu):
    values = rows()
    first = in_slot_order(values, SLOTS)
    assert torch.equal(first, values[SLOTS.long()])
    assert in_slot_order(values, SLOTS) is first
    gpu["stream"] = 2  # which has not waited for the first one
    other = in_slot_order(values, SLOTS)
    assert other.data_ptr() != first.data_ptr()
    assert torch.equal(other, first)
    gpu["stream"] = 1
    assert in_slot_order(values, SLOTS) is first
    assert in_slot_order(values, SLOTS.clone()) is not first


def test_a_changed_tensor_updates_the_memory_that_a_captured_graph_may_read(gpu):
    values = rows()
    first = in_slot_order(values, SLOTS)
    values.mul_(2)
    assert in_slot_order(values, SLOTS) is first
    assert torch.equal(first, values[SLOTS.long()])


def test_a_capture_reads_a_result_and_keeps_none(gpu):
    values = rows()
    gpu["captures"] = True
    assert in_slot_order(values, SLOTS) is not in_slot_order(values, SLOTS)
    gpu["captures"] = False
    first = in_slot_order(values, SLOTS)
    gpu |= {"captures": True, "stream": 3}
    assert in_slot_order(values, SLOTS) is first
    values.add_(1)
    found = in_slot_order(values, SLOTS)
    assert torch.equal(found, values[SLOTS.long()])
    assert not torch.equal(found, first)


def test_inference_tensors_have_no_version(gpu):
    with torch.inference_mode():
        values = rows()
        assert in_slot_order(values, SLOTS) is not in_slot_order(values, SLOTS)


def test_both_passes_keep_a_result_with_one_head_after_the_other(gpu):
    values, slots = rows().view(3, 2, 1), {False: SLOTS, True: SLOTS.flip(0)}
    found = {side: in_slot_order(values, slots[side], dim=1, of_columns=side) for side in slots}
    for side, result in found.items():
        assert torch.equal(result, torch.stack([values[slots[side].long(), head] for head in range(2)]))
        assert result.is_contiguous()
        assert in_slot_order(values, slots[side], dim=1, of_columns=side) is result


def test_results_go_with_their_tensor(gpu):
    values = rows()
    kept = [weakref.ref(in_slot_order(values, SLOTS, of_columns=of_columns)) for of_columns in (False, True)]
    assert all(each() is not None for each in kept)
    del values
    assert not any(each() is not None for each in kept)
