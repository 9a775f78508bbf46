"""Who computes what in `cuda/fused3s.cu`: the chunks of a graph and each warp's share of them, made once a graph, on
the graph's device.

A chunk is 16 gathered keys of a 16-row window (a 16 x 16 block of BSB). A warp takes chunks of one window, in one of
three ways:

    light   up to `Balance.light` chunks: a warp takes the whole window
    medium  up to `Balance.piece` chunks: the warps of one block share the window's chunks
    heavy   more: cut in pieces of at most `Balance.piece` chunks, a block each, and the last to be done adds them up

Blocks whose warps have more than `Balance.light` chunks each come first, longest first; those with light windows
follow, and the other medium windows, quick as they are, fill the gaps at the end. Light windows are in their natural
order, which keeps neighbours together, but sorted by size among a few: a block holds its SM until its longest warp is
done, and windows of mixed sizes would leave a fifth of the warps' time unused. Where they are few and all under way at
once neither matters, and each block gets large and small ones, so that all SMs have the same to do. Every piece has a
fixed slot for its result, and they are added up in the order of the slots: the same bits on every run.
"""

from dataclasses import dataclass

import torch

from ..runtime.semaphores import ZeroedCounters
from .bsb import BSB

SHARED, DONE = -2, -1  # kShared and kDone in cuda/fused3s.cu
CHUNK_KEYS = 16
# Words of struct Chunk.
KEYS, BITMAP = slice(0, 16), slice(16, 24)
CHUNK_WORDS = 24
# Words of struct WarpJob: what to do, between the first two chunks.
FIRST, SECOND = slice(0, 24), slice(32, 56)
BEGIN, COUNT, WINDOW, NUM_KEYS, FINISH, CUT = 24, 25, 26, 27, 28, slice(29, 31)
JOB_WORDS = 56
SEGMENT = 32  # of sorted windows: long enough for blocks of equals, short enough to keep neighbours together
MANY_BLOCKS = 4096  # with shared windows, eight waves: neighbours matter more than the last of them


@dataclass(frozen=True)
class Balance:
    """Sizes of the tiers, in chunks.

    Attributes:
        light: most chunks of a window that one warp handles alone.
        piece: most chunks of a block that shares a window.
        segment: neighbouring light windows that are sorted by size among themselves; None: all are sorted, and dealt
            to the blocks like cards.
    """

    light: int
    piece: int
    segment: int | None

    @classmethod
    def of(cls, counts: torch.Tensor, warps: int, resident_warps: int) -> "Balance":
        """The rule that fits the measurements (kernels/NOTES.md).

        A warp alone takes windows up to a third larger than the seven-eighths quantile, if that is not too much beside
        its share of all chunks: it may be more where all windows run at once, and is less where they take turns. A
        graph that cannot fill the GPU shares even small windows. A block of a cut window gets half more than its share.

        Args:
            counts: [num_row_windows] chunks of each window.
            warps: of a block.
            resident_warps: that the GPU runs at once.
        """
        if not len(counts):
            return cls(light=1, piece=1, segment=SEGMENT)
        chunks, most = torch.stack([counts.sum(), counts.max()]).tolist()
        share = chunks / resident_warps
        light = 3
        if share >= 2:
            quantile = int(counts.kthvalue(-(-len(counts) * 7 // 8)).values)
            waves = len(counts) / resident_warps
            part = 1.4 if waves <= 1 else 0.9 if waves <= 1.4 else 0.7
            light = max(2, min(round(1.3 * quantile), int(max(7, min(part * share, 22)))))
        at_once = most <= light * warps and int((counts <= light).sum()) <= resident_warps
        return cls(
            light=light,
            piece=int(max(32, min(1.5 * share * warps, 256))),
            segment=None if at_once and share < 8 else SEGMENT,
        )


@dataclass(frozen=True, eq=False)
class Schedule:
    """The arrays that the kernel walks by, all int32 on the graph's device.

    Attributes:
        chunks: [num_tcbs + 2, 24] struct Chunk in the order of BSB, and two without keys.
        warp_jobs: [num_blocks, warps, 56] struct WarpJob: the first of a warp's chunks and their number, the window and
            the keys of the last chunk; what becomes of the result: DONE, SHARED, or the slot of a piece of a cut
            window, with the first slot of the window's pieces and their number; and the first two chunks. Window -1:
            the warp has nothing to do.
        num_slots: pieces of cut windows.
        arrived: what counts those that are done.
    """

    chunks: torch.Tensor
    warp_jobs: torch.Tensor
    num_slots: int
    arrived: ZeroedCounters

    @property
    def num_blocks(self) -> int:
        return self.warp_jobs.shape[0]


def make_schedule(bsb: BSB, warps: int, balance: Balance) -> Schedule:
    """Schedule of a BSB with 16 x 16 blocks for blocks of `warps` warps."""
    begin = bsb.tcb_row_offset.long()
    count = begin.diff(append=begin[-1:])  # and none of window -1, which stands for no window
    is_light = count[:-1] <= balance.light
    shared, num_leading, num_slots = _shared_jobs(torch.nonzero(~is_light)[:, 0], begin, count, balance, warps)
    own = _own_jobs(torch.nonzero(is_light)[:, 0], begin, count, balance, warps)
    chunks = _chunks(bsb)
    jobs = torch.cat([shared[:, : num_leading * warps], own, shared[:, num_leading * warps :]], 1)
    return Schedule(
        chunks=chunks,
        warp_jobs=_warp_jobs(chunks, jobs).view(-1, warps, JOB_WORDS),
        # The wait for this number is one for the arrays, too: a kernel that overlaps reads them before its turn.
        num_slots=int(num_slots),
        arrived=ZeroedCounters(bsb.device),
    )


def _shared_jobs(
    heavy: torch.Tensor, begin: torch.Tensor, count: torch.Tensor, balance: Balance, warps: int
) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Jobs of the windows that blocks share, as `_warp_jobs` wants them: a block for each piece, longest first, which
    among many blocks goes by powers of two; how many of the blocks have more than `light` chunks a warp; and the number
    of pieces of cut windows.
    """
    total = count[heavy]
    pieces = (total + (balance.piece - 1)) // balance.piece
    of_window = torch.stack([heavy, begin[heavy], total, pieces, pieces.cumsum(0) - pieces])
    window, start, total, num_pieces, first_piece = torch.repeat_interleave(of_window, pieces, dim=1)
    index = torch.arange(len(window), device=begin.device) - first_piece
    offset = total * index // num_pieces
    size = total * (index + 1) // num_pieces - offset
    is_cut = num_pieces > 1
    slot = is_cut.cumsum(0) - 1
    finish = torch.where(is_cut, slot, SHARED)
    leads = size > balance.light * warps
    order = size if len(size) <= MANY_BLOCKS else leads * 64 + torch.log2(size.double()).floor()
    by_size = torch.argsort(order, descending=True, stable=True)
    blocks = torch.stack([start + offset, size, window, finish, (slot - index) * is_cut, num_pieces * is_cut])
    start, size, *rest = blocks[:, by_size, None]

    steps = torch.arange(warps + 1, device=begin.device)
    cuts = start + (size * steps + (warps - 1)) // warps
    jobs = torch.stack([each.expand(-1, warps) for each in (cuts[:, :-1], cuts.diff(dim=1), *rest)])
    return jobs.flatten(1), int(leads.sum()), is_cut.sum()


def _own_jobs(
    light: torch.Tensor, begin: torch.Tensor, count: torch.Tensor, balance: Balance, warps: int
) -> torch.Tensor:
    """Jobs of the light windows, as `_warp_jobs` wants them, for whole blocks."""
    segment = torch.arange(len(light), device=begin.device) // (balance.segment or max(1, len(light)))
    by_size = torch.argsort(segment * (balance.light + 1) - count[light], stable=True)
    window = light.new_full((-(-len(light) // warps), warps), -1)
    window.view(-1)[: len(light)] = light[by_size]
    if balance.segment is None:  # dealt to the blocks like cards, there and back
        rounds = window.view(warps, -1)
        rounds[:-1:2] = rounds[:-1:2].flip(1)  # only the last blocks have fewer
        window = rounds.T
    window = window.flatten()
    none = torch.zeros_like(window)
    return torch.stack([begin[window], count[window], window, none + DONE, none, none])


def _chunks(bsb: BSB) -> torch.Tensor:
    """[num_tcbs + 2, 24] struct Chunk of all blocks, and two without keys, for jobs without chunks to begin with."""
    keys = bsb.col_sparse_to_dense.view(-1, CHUNK_KEYS).clone()
    keys[:, 1:].masked_fill_(keys.diff(dim=1) == 0, -1)  # padding repeats the key before it
    # Row g of the bitmap in the lower half of a word, row g + 8 in the upper one.
    row_pairs = bsb.bitmap.view(-1, 2, 8, 2).transpose(1, 2).reshape(-1, 32).view(torch.int32)
    return torch.nn.functional.pad(torch.cat([keys, row_pairs], 1), (0, 0, 0, 2), value=-1)


def _warp_jobs(chunks: torch.Tensor, jobs: torch.Tensor) -> torch.Tensor:
    """[num_warps, 56] struct WarpJob.

    Args:
        jobs: [6, num_warps] int64: first chunk, number of chunks, window, finish, first slot and number of pieces.
    """
    begin, count, window, *result = jobs
    first, second, last = chunks[torch.stack([begin, begin + 1, begin + count - 1])]
    num_keys = (last[:, KEYS] >= 0).sum(1)
    words = torch.stack([begin, count, window, num_keys, *result, torch.zeros_like(begin)], 1).int()
    return torch.cat([first, words, second], 1)
