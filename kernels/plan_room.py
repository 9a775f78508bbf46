"""A plan whose arrays have room, so that one CUDA graph runs for many graphs: it reads the same addresses at each
replay, and `refill_` puts the next graph's plan there.

    kv_tiles          | KV tiles of the graph | unused                         |   num_tiles + 2
    work_items        | blocks of the graph   | blocks that have nothing to do |   num_blocks
    by_edge.indices   | edges of the graph    | unused                         |   num_edges, of narrow heads

All graphs have the same number of rows, as a batch padded with empty rows has: passes edge by edge have an item a row.
"""

import math
from dataclasses import replace
from functools import cache

import torch

from .backends.fused3s_edges import EdgeKernelData
from .backends.fused3s_planning import Fused3SData
from .formats.schedule import BEGIN, COUNT, ITEM_WORDS, KWARP, NUM_KEYS, SPLIT, SPLITS, WINDOW
from .plan import AttentionPlan


def with_room(plan: AttentionPlan, factor: float) -> AttentionPlan:
    """A plan of the same graph, with room for graphs of `factor` times as many KV tiles, blocks and edges.

    Raises:
        ValueError: the factor is below 1; or the plan holds arrays that have no room: of another backend than fused3s,
            of rows in another order, of edge data, of a backward pass, or of row windows or rows so long that several
            blocks or warps share them.
    """
    if refused := _without_room(plan):
        raise ValueError(f"plan: {refused}; a plan with room is of fused3s, without these")
    if not factor >= 1:
        raise ValueError(f"factor: got {factor}; 1 or more is needed")

    def larger(array: torch.Tensor) -> torch.Tensor:
        return array.new_zeros((math.ceil(factor * len(array)), *array.shape[1:]))

    data, by_edge = plan.data, plan.data.by_edge
    if by_edge:
        items = torch.empty_like(by_edge.work.items)
        by_edge = EdgeKernelData(larger(by_edge.indices), replace(by_edge.work, items=items))
    schedule = replace(data.schedule, work_items=larger(data.schedule.work_items))
    found = replace(plan, data=replace(data, kv_tiles=larger(data.kv_tiles), schedule=schedule, by_edge=by_edge))
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
    if room.data.by_edge:
        to, of = room.data.by_edge, plan.data.by_edge
        to.indices[: len(of.indices)].copy_(of.indices)
        to.work.items.copy_(of.work.items)
    return True


def _without_room(plan: AttentionPlan) -> str | None:
    """Why a plan holds arrays that have no room; None if it does not."""
    data = plan.data
    if not isinstance(data, Fused3SData):
        return f"of backend {plan.backend}"
    parts = {
        "rows in an order of their own": data.row_ids is not None,
        "edge data": data.slots is not None,
        "a backward pass": data.backward is not None,
        "row windows that several blocks share": data.schedule.num_splits > 0,
        "rows that several warps share": data.by_edge is not None and len(data.by_edge.work.parts) > 0,
    }
    return ", ".join(name for name, is_there in parts.items() if is_there) or None


def _fits(room: Fused3SData, data: Fused3SData) -> bool:
    if room.by_edge and not (data.by_edge and len(data.by_edge.indices) <= len(room.by_edge.indices)):
        return False
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
