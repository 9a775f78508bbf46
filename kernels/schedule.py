"""Who computes what in `cuda/fused3s.cu`: the stream of chunks and each warp's part of it, made once a graph, on the
graph's device.

A chunk is 16 gathered keys of a 16-row window (a 16 x 16 block of BSB). Windows fall in three tiers:

    light   up to `Balance.light` chunks: a warp takes one window, or several small ones, about `Balance.target` chunks
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
from typing import NamedTuple

import torch

from kernels.bsb import BSB
from kernels.counters import ZeroedCounters

SHARED, CONTINUES, DONE = -3, -2, -1  # kShared, kContinues and kDone in cuda/fused3s.cu
CHUNK_KEYS = 16
# Words of struct Chunk.
KEYS, BITMAP, WINDOW, NUM_KEYS, FINISH, STARTS = slice(0, 16), slice(16, 24), 24, 25, 26, 27
CHUNK_WORDS = 28
# Words of struct WarpJob: two chunks with the place of all of them and that of the pieces' results in between.
FIRST, PLACE, CUT, SECOND = slice(0, 28), slice(28, 30), slice(30, 32), slice(32, 60)
JOB_WORDS = 60
SEGMENT = 32  # of sorted windows: long enough for blocks of equals, short enough to keep neighbours together
MANY_BLOCKS = 4096  # with shared windows, eight waves: neighbours matter more than the last of them


@dataclass(frozen=True)
class Balance:
    """Sizes of the tiers, in chunks.

    Attributes:
        light: most chunks of a window that one warp handles alone.
        target: chunks, plus one for each window, that a warp with light windows is given.
        piece: most chunks of a block that shares a window.
        segment: neighbouring light windows that are sorted by size among themselves; None: all are sorted, and dealt
            to the blocks like cards.
    """

    light: int
    target: int
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
            return cls(light=1, target=1, piece=1, segment=SEGMENT)
        chunks, most = torch.stack([counts.sum(), counts.max()]).tolist()
        share = chunks / resident_warps
        light = 3
        if share >= 2:
            quantile = int(counts.kthvalue(-(-len(counts) * 7 // 8)).values)
            part = 1.4 if len(counts) <= resident_warps else 0.7
            light = max(2, min(round(1.3 * quantile), int(max(7, min(part * share, 22)))))
        at_once = most <= light * warps and int((counts <= light).sum()) <= resident_warps
        return cls(
            light=light,
            target=1,
            piece=int(max(32, min(1.5 * share * warps, 256))),
            segment=None if at_once and share < 8 else SEGMENT,
        )


@dataclass(frozen=True, eq=False)
class Schedule:
    """The arrays that the kernel walks by, all int32 on the graph's device.

    Attributes:
        chunks: [num_chunks, 28] struct Chunk, those of a warp one after the other. Empty windows, and a warp's share
            of a shared window that has fewer chunks than warps, have one without keys.
        warp_jobs: [num_blocks, warps, 60] struct WarpJob: each warp's first chunk and their number, and the first two;
            where it shares a piece of a cut window, the first slot of the window's pieces and their number.
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


class _Jobs(NamedTuple):
    """Consecutive chunks [begin, end) of a window for one warp, in the order of the stream: rows of one int64 tensor
    [7, num_jobs].

    `finish` is the last chunk's FINISH; `first_slot` and `num_pieces` are those of a cut window, 0 of others.
    """

    warp: torch.Tensor
    window: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor
    finish: torch.Tensor
    first_slot: torch.Tensor
    num_pieces: torch.Tensor


def make_schedule(bsb: BSB, warps: int, balance: Balance) -> Schedule:
    """Schedule of a BSB with 16 x 16 blocks for blocks of `warps` warps."""
    offset = bsb.tcb_row_offset.long()
    counts = offset.diff()
    window = torch.arange(bsb.num_row_windows, device=bsb.device)
    is_light = counts <= balance.light

    shared, num_leading, num_slots = _shared_jobs(window[~is_light], counts, offset, balance, warps)
    own, num_own = _own_jobs(window[is_light], counts, offset, balance, warps)
    cut = num_leading * warps  # in the shared jobs, of which every warp has one
    _Jobs(*own).warp.add_(cut)
    _Jobs(*shared).warp[cut:] += num_own * warps
    job = _Jobs(*torch.cat([shared[:, :cut], own, shared[:, cut:]], 1))

    length = (job.end - job.begin).clamp(min=1)
    of_warp = torch.zeros(shared.shape[1] + num_own * warps, dtype=torch.int64, device=bsb.device)
    of_warp.index_add_(0, job.warp, length)
    chunks = _stream(bsb, job, length)
    return Schedule(
        chunks=chunks,
        warp_jobs=_warp_jobs(chunks, of_warp, job).view(-1, warps, JOB_WORDS),
        # The wait for this number is one for the arrays, too: a kernel that overlaps reads them before its turn.
        num_slots=int(num_slots),
        arrived=ZeroedCounters(bsb.device),
    )


def _shared_jobs(
    heavy: torch.Tensor, counts: torch.Tensor, offset: torch.Tensor, balance: Balance, warps: int
) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Jobs of the windows that blocks share, a block for each piece, longest first, which among many blocks goes by
    powers of two; how many of the blocks have more than `light` chunks a warp; and the number of pieces of cut windows.
    """
    chunks = counts[heavy]
    pieces = (chunks + (balance.piece - 1)) // balance.piece
    of_window = torch.stack([heavy, offset[heavy], chunks, pieces, pieces.cumsum(0) - pieces])
    window, start, total, num_pieces, first_piece = torch.repeat_interleave(of_window, pieces, dim=1)
    index = torch.arange(len(window), device=offset.device) - first_piece
    begin = total * index // num_pieces
    size = total * (index + 1) // num_pieces - begin
    is_cut = num_pieces > 1
    slot = is_cut.cumsum(0) - 1
    finish = torch.where(is_cut, slot, SHARED)
    leads = size > balance.light * warps
    order = size if len(size) <= MANY_BLOCKS else leads * 64 + torch.log2(size.double()).floor()
    by_size = torch.argsort(order, descending=True, stable=True)
    blocks = torch.stack([window, start + begin, size, finish, (slot - index) * is_cut, num_pieces * is_cut])
    window, begin, size, *rest = blocks[:, by_size, None]

    steps = torch.arange(warps + 1, device=offset.device)
    cuts = begin + (size * steps + (warps - 1)) // warps
    warp = torch.arange(len(window) * warps, device=offset.device).view(-1, warps)
    jobs = torch.stack([each.expand(-1, warps) for each in (warp, window, cuts[:, :-1], cuts[:, 1:], *rest)])
    return jobs.flatten(1), int(leads.sum()), is_cut.sum()


def _own_jobs(
    light: torch.Tensor, counts: torch.Tensor, offset: torch.Tensor, balance: Balance, warps: int
) -> tuple[torch.Tensor, int]:
    """Jobs of the light windows, given to warps where their running weight passes a multiple of the target; and the
    number of blocks."""
    segment = torch.arange(len(light), device=offset.device) // (balance.segment or max(1, len(light)))
    light = light[torch.argsort(segment * (balance.light + 1) - counts[light], stable=True)]
    if balance.segment is None:
        light = _dealt(light, warps)
    begin, size = offset[light], counts[light]
    bucket = (torch.cumsum(size + 1, 0) - 1) // (balance.target + 1)
    _, warp = torch.unique_consecutive(bucket, return_inverse=True)
    num_warps = int(warp[-1]) + 1 if len(warp) else 0
    none = torch.zeros_like(light)
    return torch.stack([warp, light, begin, begin + size, none + DONE, none, none]), -(-num_warps // warps)


def _dealt(sorted_windows: torch.Tensor, warps: int) -> torch.Tensor:
    """Windows in the order of blocks of `warps`, dealt there and back, so that only the last blocks have fewer."""
    blocks = -(-len(sorted_windows) // warps)
    rounds = sorted_windows.new_full((warps * blocks,), -1)
    rounds[: len(sorted_windows)] = sorted_windows
    rounds = rounds.view(warps, blocks)
    rounds[:-1:2] = rounds[:-1:2].flip(1)
    windows = rounds.T.flatten()
    return windows[windows >= 0]


def _stream(bsb: BSB, job: _Jobs, length: torch.Tensor) -> torch.Tensor:
    """[num_chunks, 28] struct Chunk of all jobs."""
    end = length.cumsum(0)
    first = end - length
    of_job = torch.stack([first, end - 1, job.begin - first, job.end - job.begin, job.window, job.finish])
    first, last, ahead, num_chunks, window, finish = torch.repeat_interleave(of_job, length, dim=1)
    place = torch.arange(len(first), device=bsb.device)
    filled = torch.nonzero(num_chunks)[:, 0]
    source = (place + ahead)[filled]
    keys = bsb.col_sparse_to_dense.view(-1, CHUNK_KEYS)[source]
    keys[:, 1:].masked_fill_(keys.diff(dim=1) == 0, -1)  # padding repeats the key before it
    # Row g of the bitmap in the lower half of a word, row g + 8 in the upper one.
    row_pairs = bsb.bitmap.view(-1, 2, 8, 2).transpose(1, 2).reshape(-1, 32).view(torch.int32)

    chunks = torch.full((len(place), CHUNK_WORDS), -1, dtype=torch.int32, device=bsb.device)
    chunks[:, BITMAP] = 0
    chunks[filled, : BITMAP.stop] = torch.cat([keys, row_pairs[source]], 1)
    num_keys = (chunks[:, KEYS] >= 0).sum(1)
    finish = torch.where(place == last, finish, CONTINUES)
    starts = torch.where((place == first) & (num_chunks > 0), window, -1)
    chunks[:, WINDOW:] = torch.stack([window, num_keys, finish, starts], 1)
    return chunks


def _warp_jobs(chunks: torch.Tensor, of_warp: torch.Tensor, job: _Jobs) -> torch.Tensor:
    """[num_warps, 60] struct WarpJob of warps with so many chunks."""
    end = of_warp.cumsum(0)[:, None]
    begin = end - of_warp[:, None]
    place = begin + torch.arange(2, device=chunks.device)
    first_two = chunks[place.clamp(max=len(chunks) - 1)].masked_fill_((place >= end)[..., None], 0)
    jobs = chunks.new_zeros((len(of_warp), JOB_WORDS))
    jobs[:, FIRST], jobs[:, SECOND] = first_two.unbind(1)
    jobs[:, PLACE] = torch.cat([begin, of_warp[:, None]], 1)
    jobs[job.warp, CUT] = torch.stack([job.first_slot, job.num_pieces], 1).int()
    return jobs
