"""Who computes what in `cuda/fused3s.cu`: the chunks of every warp, made once a graph, on the graph's device.

A chunk is 16 gathered keys of a 16-row window (a 16 x 16 block of BSB). Windows fall in three tiers:

    light   up to `Balance.light` chunks: a warp takes several consecutive windows, about `Balance.target` in all
    medium  up to `Balance.piece` chunks: the warps of one block share the window's chunks
    heavy   more: cut in pieces of at most `Balance.piece` chunks, a block each, whose parts a second kernel adds up

Blocks with medium windows and pieces come first, the longest ones leading, so that none starts late; light windows
follow in their natural order, which keeps neighbours together. Every piece has a fixed slot for its part: no atomics,
the same bits on every run.
"""

from dataclasses import dataclass

import torch

from kernels.bsb import BSB

OWN_WINDOWS, SHARED_WINDOW = -2, -1  # kOwnWindows and kSharedWindow in cuda/fused3s.cu
WARPS_PER_SM = 12  # resident at d = 128: three blocks of four warps


@dataclass(frozen=True)
class Balance:
    """Sizes of the tiers, in chunks.

    Attributes:
        light: most chunks of a window that one warp handles alone.
        target: chunks, plus one for each window, that a warp with light windows is given.
        piece: most chunks of a block that shares a window.
    """

    light: int
    target: int
    piece: int

    @classmethod
    def of(cls, num_chunks: int, num_sms: int) -> "Balance":
        """The rule that fits the measurements: small jobs where the warps have few chunks each, else larger ones."""
        share = num_chunks / (num_sms * WARPS_PER_SM)
        target = 1 if share < 3 else 4 if share < 32 else 8
        return cls(light=2 * target, target=target, piece=128)


@dataclass(frozen=True, eq=False)
class Schedule:
    """The arrays that the kernel walks by, all int32 on the graph's device.

    Attributes:
        chunk_window: [num_chunks] row window of each chunk.
        warp_range: [num_blocks, warps, 4] first chunk, end chunk, first window, end window (the last two say which
            windows' empty rows the warp writes).
        block_slot: [num_blocks] OWN_WINDOWS, SHARED_WINDOW, or the slot of the block's part of a cut window.
        cut_window: [num_cut_windows] windows that are cut between blocks.
        cut_slot: [num_cut_windows + 1] first slot of each of them.
        num_slots: parts in all.
    """

    chunk_window: torch.Tensor
    warp_range: torch.Tensor
    block_slot: torch.Tensor
    cut_window: torch.Tensor
    cut_slot: torch.Tensor
    num_slots: int

    @property
    def num_blocks(self) -> int:
        return self.block_slot.numel()


def make_schedule(bsb: BSB, warps: int, balance: Balance) -> Schedule:
    """Schedule of a BSB with 16 x 16 blocks for blocks of `warps` warps."""
    device = bsb.device
    offset = bsb.tcb_row_offset.long()
    counts = offset.diff()
    window = torch.arange(bsb.num_row_windows, device=device)
    is_light = counts <= balance.light

    # Light windows: runs of neighbours, cut where the running weight passes a multiple of the target.
    light = window[is_light]
    weight = torch.cumsum(counts[light] + 1, 0)
    bucket = (weight - 1) // (balance.target + 1)
    starts = torch.ones_like(light, dtype=torch.bool)
    starts[1:] = (light.diff() != 1) | (bucket.diff() != 0)
    first = light[starts]
    last = light[torch.roll(starts, -1)]  # a run ends where the next one starts
    own = torch.stack([offset[first], offset[last + 1], first, last + 1], 1)
    own = torch.nn.functional.pad(own, (0, 0, 0, -len(own) % warps)).view(-1, warps, 4)

    # Medium windows and pieces of heavy ones: each a block, longest first in powers of two, else in natural order.
    shared = window[~is_light]
    pieces = -(-counts[shared] // balance.piece)
    piece_window = torch.repeat_interleave(shared, pieces)
    first_piece = torch.cumsum(pieces, 0) - pieces
    index = torch.arange(len(piece_window), device=device) - torch.repeat_interleave(first_piece, pieces)
    parts = torch.repeat_interleave(pieces, pieces)
    total = counts[piece_window]
    begin, end = total * index // parts, total * (index + 1) // parts
    steps = torch.arange(warps + 1, device=device)
    # Rounded up, so that the first warp has a chunk whatever the size.
    cuts = offset[piece_window, None] + begin[:, None] + -(-(end - begin)[:, None] * steps // warps)
    nothing = torch.zeros_like(cuts[:, 1:])
    split = torch.stack([cuts[:, :-1], cuts[:, 1:], nothing, nothing], 2)
    is_cut = parts > 1
    slot = torch.where(is_cut, torch.cumsum(is_cut, 0) - 1, SHARED_WINDOW)
    by_size = torch.argsort(torch.log2((end - begin).double()).floor(), descending=True, stable=True)

    cut = pieces > 1
    return Schedule(
        chunk_window=torch.repeat_interleave(window, counts).int(),
        warp_range=torch.cat([split[by_size], own]).int().contiguous(),
        block_slot=torch.cat([slot[by_size], slot.new_full((len(own),), OWN_WINDOWS)]).int(),
        cut_window=shared[cut].int(),
        cut_slot=torch.nn.functional.pad(torch.cumsum(pieces[cut], 0), (1, 0)).int(),
        num_slots=int(pieces[cut].sum()),
    )
