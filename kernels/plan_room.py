"""A plan whose arrays have room, so that one CUDA graph runs for many graphs: it reads the same addresses at each
replay, and `refill_` puts the next graph's plan there.

    kv_tiles     | KV tiles of the graph | unused                        |   num_tiles + 2
    work_items   | blocks of the graph   | blocks that have nothing to do |   num_blocks

All graphs have the same number of rows, as a batch padded with empty rows has.
"""

from dataclasses import replace
from functools import cache

import torch

from .backends.fused3s_planning import Fused3SData
from .formats.schedule import BEGIN, COUNT, ITEM_WORDS, KWARP, NUM_KEYS, SPLIT, SPLITS, WINDOW
from .plan import AttentionPlan


def with_room(plan: AttentionPlan, num_tiles: int, num_blocks: int) -> AttentionPlan:
    """A plan of the same graph, with room for graphs of up to `num_tiles` KV tiles and `num_blocks` blocks.

    Raises:
        ValueError: the plan holds more than that, or arrays that have no room: of another backend than fused3s, of rows
            in another order, of edge data, of passes edge by edge, or of a backward pass.
    """
    if refused := _without_room(plan):
        raise ValueError(f"plan: {refused}; a plan with room is of fused3s, with KV tiles and work items alone")
    data = plan.data
    if num_tiles < data.num_tiles or num_blocks < data.schedule.num_blocks:
        raise ValueError(
            f"num_tiles, num_blocks: got {num_tiles} and {num_blocks}; the plan has {data.num_tiles} and "
            f"{data.schedule.num_blocks}"
        )
    kv_tiles = data.kv_tiles.new_full((num_tiles + 2, data.kv_tiles.shape[1]), -1)
    work_items = data.kv_tiles.new_empty((num_blocks, data.schedule.warps, ITEM_WORDS))
    roomy = replace(data, kv_tiles=kv_tiles, schedule=replace(data.schedule, work_items=work_items))
    found = replace(plan, data=roomy)
    refill_(found, plan)
    return found


def refill_(room: AttentionPlan, plan: AttentionPlan) -> bool:
    """Put another graph's plan into a plan of `with_room`; False, and no change, if it does not fit.

    The copies are queued on torch's current stream. Of the tile offsets, which no kernel reads, the first graph's stay:
    a plan with room can be run, and neither planned anew nor turned into a matrix.

    Args:
        plan: for the same inputs on the same device, of a graph with as many rows and columns.

    Raises:
        ValueError: it is not.
    """
    if (plan.shape, plan.device, plan.inputs) != (room.shape, room.device, room.inputs):
        raise ValueError(
            f"plan: got {plan.shape} on {plan.device} for {plan.inputs}; the plan with room is {room.shape} on "
            f"{room.device} for {room.inputs}"
        )
    if _without_room(plan) or not _fits(room.data, plan.data):
        return False
    target, source = room.data.schedule.work_items, plan.data.schedule.work_items
    room.data.kv_tiles[: len(plan.data.kv_tiles)].copy_(plan.data.kv_tiles)
    target[: len(source)].copy_(source)
    if len(source) < len(target):
        target[len(source) :].copy_(_idle_item(target.device))
    return True


def _without_room(plan: AttentionPlan) -> str | None:
    """Why a plan holds arrays that have no room; None if it does not."""
    data = plan.data
    if not isinstance(data, Fused3SData):
        return f"of backend {plan.backend}"
    parts = {
        "rows in an order of their own": data.row_ids,
        "passes edge by edge": data.by_edge,
        "edge data": data.slots,
        "a backward pass": data.backward,
        "windows that several blocks share": data.schedule.num_splits or None,
    }
    return ", ".join(name for name, part in parts.items() if part is not None) or None


def _fits(room: Fused3SData, data: Fused3SData) -> bool:
    return (
        len(data.kv_tiles) <= len(room.kv_tiles)
        and data.schedule.num_blocks <= room.schedule.num_blocks
        and data.schedule.warps == room.schedule.warps
    )


@cache
def _idle_item(device: torch.device) -> torch.Tensor:
    """[56] int32: a warp without a window."""
    item = torch.full((ITEM_WORDS,), -1, dtype=torch.int32)  # KV tiles without keys
    item[[BEGIN, COUNT, NUM_KEYS]] = 0
    item[SPLITS] = 0
    item[WINDOW], item[SPLIT] = -1, KWARP
    return item.to(device)
