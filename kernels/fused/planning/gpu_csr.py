"""CSR of a matrix and of its transpose, from an edge list or a CSR, by the kernels of cuda/plan/plan_csr.cu.

Edges are in CSR order (`graph.edge_order`). The host never waits: sizes are upper bounds that it knows, and what only
the GPU knows is in `numbers` (`PlanNumber`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from ...runtime.device import WARP_SIZE
from ...runtime.jit import KernelInstance, get_kernel
from ...runtime.launch import Launch, address_of
from ...runtime.semaphores import is_capturing
from ..tuning import COUNTED_EDGES

WINDOW_ROWS = 16
MOST_EDGES = 2**31 - 1
MOST_IDS = 1 << 28  # a sort key packs two ids
MOST_ROWS = 1 << 30
# As in cuda/plan/plan_csr.cu and cuda/plan/plan_data.cuh:
EDGE_THREADS, BLOCK_EDGES = 256, 1024
SCAN_THREADS, SCAN_CHUNK, SCAN_BLOCKS = 1024, 4096, 128
SORT_WARPS, WARP_EDGES = 8, 512  # warps per block; most edges of a window that one warp sorts
BLOCK_KEYS = 4096  # most edges of a window that a block sorts in shared memory


class PlanNumber(IntEnum):
    """Indices of the int64 numbers of a plan; as in cuda/plan/plan_data.cuh."""

    BAD_OFFSET = 0
    BAD_EDGE = 1
    SCHEDULES = 8
    ROW_ITEMS = 56
    COUNTS = 64


COUNTS = int(PlanNumber.COUNTS)


_instances = {
    (function, *arguments): KernelInstance("plan/plan_csr.cu", function, tuple(arguments))
    for function, count in (("plan_count", 2), ("plan_offsets", 1), ("plan_place", 1), ("plan_sort", 3))
    for arguments in ([bool(number >> bit & 1) for bit in range(count)] for number in range(1 << count))
}


def csr_instances(wide: bool, is_csr: bool, transposes: bool) -> list[KernelInstance]:
    """The kernels of a source of int64 (`wide`) or int32 ids, an edge list or a CSR."""
    names = [("plan_sort", wide, is_csr, False), ("plan_offsets", is_csr), ("plan_count", wide, is_csr)]
    names += [] if is_csr else [("plan_place", wide)]
    names += [("plan_sort", False, False, True)] if transposes else []
    return [_instances[name] for name in names]


@dataclass(frozen=True, eq=False)
class EdgeSource:
    """The edges of a graph as given by the caller, on a GPU.

    Attributes:
        ids: [2, E] int32 or int64, any row stride: columns of A, then rows of A; or [E], the columns of a CSR.
        offsets: [num_rows + 1] int64 of a CSR; None for an edge list.
        has_padding: whether pairs of -1 in an edge list are padding, and a CSR may have fewer than E edges.
    """

    ids: torch.Tensor
    offsets: torch.Tensor | None = None
    has_padding: bool = False

    @property
    def num_edges(self) -> int:
        return self.ids.shape[-1]


class GPUCSR:
    """Memory of the CSR of a matrix A and of its transpose, and the kernels that fill it.

    Attributes:
        offsets: [num_rows + 1] int64 of A, and [num_cols + 1] of A^T if wanted: first edge of each row.
        indices: [most_edges] int32 of A, column of each edge; 0 after the last.
        edges: [most_edges] int32 of A, index of each edge in the source; None if not wanted.
        column_indices, column_edges: [most_edges] int32 of A^T: row of A of each edge, its index in the CSR of A; None
            if not wanted.
        zeros: (address, number of 32-bit words) that must be 0 before `launches`: PlanNumbers, then counts of edges.
        address_of_...: of these arrays, 0 for None.
    """

    @staticmethod
    def sizes(most_edges: int, transposes: bool, wants_edges: bool) -> tuple[int, ...]:
        """32-bit words of each array in the shared memory block."""
        return (most_edges,) * (1 + wants_edges + 2 * transposes)

    @staticmethod
    def _first_offset(shape: tuple[int, int]) -> int:
        return COUNTS + (sum(shape) + 1) // 2  # the counts are int32

    @staticmethod
    def wide_size(shape: tuple[int, int], transposes: bool) -> int:
        """Length of the memory of the int64 arrays."""
        return GPUCSR._first_offset(shape) + shape[0] + 1 + (shape[1] + 1 if transposes else 0)

    def __init__(
        self,
        device: torch.device,
        take: Callable[[], int],
        view: Callable[[], torch.Tensor],
        shape: tuple[int, int],
        most_edges: int,
        transposes: bool,
        wants_edges: bool,
        wide: torch.Tensor | None = None,
    ) -> None:
        """
        Args:
            take: returns the address of the next array (`sizes`) in shared int32 memory. The int64 arrays have
                separate memory: torch.export cannot save memory that is viewed as two types.
            view: returns the next array.
            shape: (num_rows, num_cols), at least 1; num_rows up to MOST_IDS with a transpose, num_cols in any case.
            most_edges: up to MOST_EDGES.
            wide: [wide_size(...)] int64, memory for the int64 arrays; None: it is allocated.
        """
        self._shape, self._most_edges = shape, most_edges
        num_rows, num_cols = shape
        first = self._first_offset(shape)
        if wide is None:
            wide = torch.empty(self.wide_size(shape, transposes), dtype=torch.int64, device=device)
        self._wide = wide
        self.address_of_numbers = address_of(wide)
        self.zeros = self.address_of_numbers, 2 * first
        offsets = self.address_of_numbers + 8 * first
        self.address_of_offsets = (offsets, offsets + 8 * (num_rows + 1))
        self.offsets = [wide.as_strided((num_rows + 1,), (1,), first)]
        self.address_of_indices = take()
        self.indices = view()
        self.address_of_edges, self.edges = 0, None
        if wants_edges:
            self.address_of_edges, self.edges = take(), view()
        self.address_of_column_indices = self.address_of_column_edges = 0
        self.column_indices = self.column_edges = None
        if transposes:
            self.offsets.append(wide.as_strided((num_cols + 1,), (1,), first + num_rows + 1))
            self.address_of_column_indices, self.address_of_column_edges = take(), take()
            self.column_indices, self.column_edges = view(), view()

    @property
    def numbers(self) -> torch.Tensor:
        """[PlanNumber.COUNTS] int64."""
        return self._wide[:COUNTS]

    def launches(self, source: EdgeSource, keys: Sequence[int], row_ids: int, device_index: int | None) -> list[Launch]:
        """The launches that fill the arrays.

        Args:
            source: up to `most_edges` edges.
            keys: addresses [num_keys(...)] int64, scratch: two, and a third with a transpose.
            row_ids: address [num_rows] int32, row id that the transpose stores for each row; 0: the row itself.
        """
        (num_rows, num_cols), most_edges, num_edges = self._shape, self._most_edges, source.num_edges
        wide, is_csr, transposes = source.ids.dtype == torch.int64, source.offsets is not None, len(keys) == 3
        # All kernels of the source take the same struct.
        params = get_kernel(_instances["plan_offsets", is_csr], device_index).params
        pointers = params.pack_pointers(
            {
                "columns": address_of(source.ids),
                "row_offsets": address_of(source.offsets),
                "numbers": self.address_of_numbers,
                "offsets": self.address_of_offsets[0],
                "keys": keys[0],
                "spare_keys": keys[1],
                "column_keys": keys[2] if transposes else 0,
                "indices": self.address_of_indices,
                "edges": self.address_of_edges,
                "column_indices": self.address_of_column_indices,
                "column_edges": self.address_of_column_edges,
                "row_ids": row_ids,
            }
        )

        def scalars(num_edges: int, block_windows: int = 0) -> bytes:
            return params.pack_scalars(
                num_edges=num_edges,
                row_stride=0 if is_csr else source.ids.stride(0),
                num_rows=num_rows,
                num_cols=num_cols,
                block_windows=block_windows,
                has_padding=source.has_padding,
            )

        of_source = scalars(num_edges)
        launches = []
        if num_edges or is_csr:
            kernel = get_kernel(_instances["plan_count", wide, is_csr], device_index)
            grid_of_edges = (blocks_of(max(num_edges, num_rows + 1) if is_csr else num_edges, BLOCK_EDGES), 1, 1)
            launches.append((kernel, grid_of_edges, EDGE_THREADS, pointers, of_source))
        most = max(num_rows, num_cols) if transposes else num_rows
        grid = (min(SCAN_BLOCKS, most // SCAN_CHUNK + 1), 1 + transposes, 1)
        kernel = get_kernel(_instances["plan_offsets", is_csr], device_index)
        launches.append((kernel, grid, SCAN_THREADS, pointers, of_source))
        if num_edges and not is_csr:
            kernel = get_kernel(_instances["plan_place", wide], device_index)
            launches.append((kernel, grid_of_edges, EDGE_THREADS, pointers, of_source))
        sorts = [(num_rows, _instances["plan_sort", wide, is_csr, False])]
        if transposes:  # reads keys, not the source: one instance for all sources
            sorts.append((num_cols, _instances["plan_sort", False, False, True]))
        for rows, instance in sorts if most_edges else ():
            num_windows = -(-rows // WINDOW_ROWS)
            windows = SORT_WARPS if most_edges <= WARP_EDGES * num_windows else 1
            grid, threads = (blocks_of(num_windows, windows), 1, 1), SORT_WARPS * WARP_SIZE
            launches.append((get_kernel(instance, device_index), grid, threads, pointers, scalars(most_edges, windows)))
        return launches


def num_keys(source: EdgeSource, most_edges: int, transposes: bool) -> int:
    """Length of the `keys` of `GPUCSR.launches`: the number of edges.

    For the plan of a CSR without a transpose, the edges of windows of more than BLOCK_KEYS suffice. The host waits for
    their number from COUNTED_EDGES on.
    """
    offsets = source.offsets
    if offsets is None or transposes or source.has_padding or source.num_edges < COUNTED_EDGES:
        return most_edges
    if is_capturing(offsets.device):
        return most_edges
    counts = torch.diff(offsets[::WINDOW_ROWS], append=offsets[-1:])
    found = int(counts[counts > BLOCK_KEYS].sum())  # offsets are unchecked here; any value in range is safe
    return min(max(0, found), most_edges)


def allocate(
    sizes: Sequence[int], device: torch.device, memory: torch.Tensor | None = None
) -> tuple[torch.Tensor, list[int]]:
    """Memory for consecutive arrays of the given sizes in 32-bit words, and the address of each; in `memory`, or new.

    Raises:
        ValueError: `memory` is too short.
    """
    if memory is None:
        memory = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    elif len(memory) < sum(sizes):
        raise ValueError(f"memory: got {len(memory)} words for arrays of {sum(sizes)} words")
    memory = memory[: sum(sizes)]
    address, addresses = memory.data_ptr(), []
    for size in sizes:
        addresses.append(address)
        address += 4 * size
    return memory, addresses


def blocks_of(count: int, per_block: int) -> int:
    return -(-count // per_block)
