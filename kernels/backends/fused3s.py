"""`fused3s`: the fast fused kernel; see cuda/fused3s.cu and formats/schedule.py."""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn import functional

from ..edge_data import EdgeTerms
from ..formats.gpu_csr import MOST_EDGES
from ..formats.schedule import ScheduleForm
from ..fragments import WARP_SIZE
from ..runtime.device import GPULimits, gpu_limits
from ..runtime.jit import ELEMENTS, Element, cpp_name, get_kernel, input_element
from ..runtime.launch import launch_kernel, pack_scalars
from ..runtime.semaphores import semaphores
from ..tuning import GROUP_WIDTH, tuning_for
from .base import Gradients, InputSpec, Memory
from .cuda import LOAD_BYTES, MAX_DIM, CudaBackend, check_out_dtype, checked_inputs, product_type
from .fused3s_data import Fused3SData
from .fused3s_edges import (
    compile_edge_kernel,
    contiguous,
    dropout_scalars,
    edges_scalars,
    launch_edge_kernel,
    pad_weights,
    terms_of,
    whole_rows,
)
from .fused3s_gradients import compile_gradients, launch_gradients
from .fused3s_planning import MadePlan, check_size, make_room, plan_graph
from .fused3s_shapes import (
    BIAS,
    COMMON_DIM,
    DROPOUT,
    KEY_FEATURES,
    MULTIPLIER,
    RECORDS,
    RESERVED_BYTES,
    SLICE,
    SLOT_BYTES,
    STAGES,
    VALUE_FEATURES,
)
from .kernel_choice import GraphSize, takes_edges

WARP_COLUMNS = 64  # of one float32 head: wider ones go to teams of warps, or few warps' rings would fill an SM
LEAST_SCALE = 2.0**-120  # in place of 0, which times -infinity is NaN; any score times it has the exponential 1
# As in cuda/tile_features.cuh and cuda/pack_features.cu:
FEATURE_BUFFER_BYTES = 1024
SCRATCH_BYTES = 2048
PACK_THREADS = 256


@dataclass(frozen=True)
class FusedKernelSpec:
    """One instance of cuda/fused3s.cu.

    Attributes:
        dtype: torch.float16, torch.bfloat16 or torch.float32, of query, key and value.
        out_dtype: torch.float32 or `dtype`.
        dim: dimensions of a head, an even number up to 256.
        warps: work items of a thread block: warps, or teams of `dim_warps` warps.
        heads: heads of a head group, which a block computes together (cuda/head_group.cuh).
        terms: bits of enum EdgeTerm (cuda/score_terms.cuh), only with one head a group; float32: dropout alone.
        one_term: float32: products in one TF32 term in place of three.
        dim_warps: warps that share the columns of a float32 head.
    """

    dtype: torch.dtype
    out_dtype: torch.dtype
    dim: int
    warps: int = 4
    heads: int = 1
    terms: int = 0
    one_term: bool = False
    dim_warps: int = 1

    source: ClassVar[str] = "fused3s.cu"

    @property
    def element(self) -> Element:
        return Element.TF32 if self.one_term else ELEMENTS[self.dtype]

    @property
    def name(self) -> str:
        team = (self.dim_warps,) if self.dim_warps > 1 else ()
        sizes = (self.dim, self.heads, self.block_warps, self.terms, *team)
        return cpp_name("fused3s", self.element, self.out_dtype, *sizes)

    @cached_property
    def block_warps(self) -> int:
        return self.warps * self.dim_warps

    @cached_property
    def copy_bytes(self) -> int:
        """Bytes of a cp.async, which each row of a head must be aligned to."""
        return math.gcd(self.dtype.itemsize * self.dim, LOAD_BYTES)

    @property
    def shares_slices(self) -> bool:
        """Whether two heads share a slice."""
        return self.heads > 1 and self.dim <= SLICE // 2

    @property
    def slices(self) -> int:
        """Slices of 16 columns of a head group in shared memory."""
        step = SLICE // 2 if self.shares_slices else SLICE
        return -(-self.heads * step * -(-self.dim // step) // SLICE)

    @property
    def warp_slices(self) -> int:
        """Slices of a warp."""
        return -(-self.slices // self.dim_warps)

    @cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the warps' rings, as struct Stage has them."""
        if self.dtype == torch.float32:
            value_pitch = 128 * -(-self.warp_slices // 2)
            key_pitch = value_pitch if self.shares_slices else 64 * self.warp_slices
            parts = 2048 if self.dim_warps > 1 else 0
            return self.block_warps * (STAGES * 16 * (key_pitch + value_pitch) + RECORDS * SLOT_BYTES + parts)
        value_pitch = 2 * SLICE * self.slices
        key_pitch = value_pitch if self.heads > 1 else 64 * -(-self.dim // 32)
        stage = 16 * (key_pitch + value_pitch)
        matrices = sum(1024 if self.terms & term else 16 for term in (BIAS, MULTIPLIER)) if self.terms else 0
        features = 0
        if self.terms & (KEY_FEATURES | VALUE_FEATURES):
            # The scratch lies in K where that has no padding.
            in_key = self.dim % 32 == 0 and 16 * key_pitch >= SCRATCH_BYTES
            in_registers = self.dim == 128
            features = 2 * FEATURE_BUFFER_BYTES + (16 if in_registers else 1024) + 128 + 16
            features += 16 if in_key else SCRATCH_BYTES
        return self.warps * (STAGES * stage + RECORDS * SLOT_BYTES + matrices + features)

    @cached_property
    def partial_floats(self) -> int:
        """Floats of struct Partial: of each slice O, and the maxima and sums of its heads."""
        return self.slices * 16 * (SLICE + 2 * (2 if self.shares_slices else 1))

    @property
    def packed_words(self) -> tuple[int, int]:
        """32-bit words of a head's packed weights of features, of W and of W' (cuda/pack_features.cu)."""
        key_words = 256 * -(-self.dim // 32) if self.terms & KEY_FEATURES else 0
        return key_words, 128 * self.slices if self.terms & VALUE_FEATURES else 0

    def blocks_per_sm(self, sm_shared_bytes: int) -> int:
        """Blocks that run on an SM at once; the registers are those that the kernel's launch bounds leave."""
        width = SLICE * self.warp_slices
        if self.dtype == torch.float32:
            max_warps = 16 if width <= 32 else 12 if width <= 64 else 8
        else:
            max_warps = 16 if width <= 64 else 12 if width <= 128 else 8
        return max(1, min(sm_shared_bytes // (self.shared_bytes + RESERVED_BYTES), max_warps // self.block_warps))


@dataclass(frozen=True)
class PackFeaturesSpec:
    """cuda/pack_features.cu."""

    source: ClassVar[str] = "pack_features.cu"
    name: ClassVar[str] = "pack_features"


class Fused3SBackend(CudaBackend):
    name = "fused3s"
    summary = "the fast fused kernel; NVIDIA GPU of compute capability 8.0 or higher, fp16, bf16 and float32"
    data_type = Fused3SData
    writes_lse = True
    reorders = True
    takes_edge_lists = True
    takes_edges = True
    takes_dropout = True
    has_backward = True

    def unsupported(self, dtype: torch.dtype, head_dim: int) -> str | None:
        if dtype in ELEMENTS and 1 <= head_dim <= MAX_DIM:
            return None
        types = ", ".join(map(str, ELEMENTS))
        return f"it takes {types}, and 1 to {MAX_DIM} columns a head; got {dtype}, {head_dim}"

    def most_edges(self, inputs: InputSpec) -> int | None:
        return MOST_EDGES  # numbered by the planning kernels

    def build(
        self, graph: Any, device: torch.device, inputs: InputSpec, perm: torch.Tensor | None = None
    ) -> Fused3SData:
        data = plan_graph(graph, device, inputs, partial(forward_schedule, gpu_limits(device), inputs), perm)
        _compile(data, device, inputs)
        return data

    def make_room(self, shape: tuple[int, int], num_edges: int, device: torch.device, inputs: InputSpec) -> MadePlan:
        """A plan with room for `num_edges` edges, to be filled."""
        check_size(shape, num_edges, inputs.backward)
        forward = partial(forward_schedule, gpu_limits(device), inputs)
        made = make_room(GraphSize(*shape, num_edges), device, inputs, forward)
        _compile(made.bounded, device, inputs)
        return made

    def raise_graph_errors(self, data: Fused3SData) -> None:
        if data.progress is not None:
            data.progress.raise_errors()

    def sorted_edges(self, data: Fused3SData) -> torch.Tensor | None:
        return data.edge_ids

    def describe(self, data: Fused3SData) -> str:
        data, lines = data if data.progress is None else data.progress.exact_plan(), []
        if data.windows:
            by_warp, by_block, split, warp_tiles, split_tiles, segment = data.windows
            num_blocks, warps, _ = data.work_items.shape
            lines = [
                f"{data.tile_offset.numel() - 1} row windows, {len(data.kv_tiles) - 2} KV tiles of 16 keys",
                f"windows by one warp {by_warp}, by one block {by_block}, by several blocks {split} "
                f"({data.num_splits} splits)",
                f"{num_blocks} blocks of {warps} warps a head; warp_tiles {warp_tiles}, split_tiles {split_tiles}, "
                f"sort_segment {segment or 'all'}",
            ]
        elif data.work_items is not None:
            lines = [f"room for {len(data.kv_tiles) - 2} KV tiles of 16 keys, {len(data.work_items)} blocks a head"]
        if data.row_items is not None:
            lines.append(f"edge by edge: {len(data.row_items)} items")
        return "\n  ".join(lines)

    def attend(
        self,
        data: Fused3SData,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        out_dtype: torch.dtype,
        lse: torch.Tensor | None = None,
        edges: EdgeTerms | None = None,
    ) -> torch.Tensor:
        data = data.ready()
        if (dtype := product_type(query.dtype)) != query.dtype:
            check_out_dtype(out_dtype, query.dtype)
            query, key, value = (each.to(dtype) for each in (query, key, value))
            edges = None if edges is None else edges.to(dtype)
        num_heads, dim = query.shape[1:]
        if dim % 2:  # rows of pairs of elements are what the kernel can copy
            padded = (functional.pad(each, (0, -dim % 8)) for each in (query, key, value))
            edges = None if edges is None else pad_weights(edges, -dim % 8)
            return self.attend(data, *padded, scale, out_dtype, lse, edges)[..., :dim].contiguous()
        if _takes_edge_kernel(data, query.device, query.dtype, num_heads, dim, edges):
            return launch_edge_kernel(data, query, key, value, scale, out_dtype, lse, edges)
        terms = terms_of(edges)
        element = input_element(query.dtype)
        spec = kernel_spec(element, out_dtype, dim, data.work_items.shape[1], num_heads, terms)
        return launch(spec, data, query, key, value, scale, lse, edges)

    def attend_backward(
        self,
        data: Fused3SData,
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
        edges: EdgeTerms | None,
        wanted: frozenset[str],
        into: Memory | None = None,
    ) -> Gradients:
        data = data.ready(is_forward=False)
        if (dtype := product_type(query.dtype)) != query.dtype:
            tensors = (*(each.to(dtype) for each in (grad_output, query, key, value)), output, lse)
            edges = None if edges is None else edges.to(dtype)
            found = launch_gradients(data, *tensors, scale, edges, wanted)
            return Gradients(*[None if gradient is None else gradient.to(query.dtype) for gradient in found])
        tensors = (grad_output, query, key, value, output, lse)
        return launch_gradients(data, *tensors, scale, edges, wanted, into)


def _takes_edge_kernel(
    data: Fused3SData,
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    dim: int,
    edges: EdgeTerms | None,
) -> bool:
    """Whether a call runs cuda/fused3s_edges.cu."""
    if data.row_items is None or data.work_items is None:
        return data.row_items is not None
    terms = terms_of(edges)
    if dtype == torch.float32 and terms & ~DROPOUT:
        return True  # the other kernel has none of these terms in float32
    return takes_edges(tuning_for(gpu_limits(device)), data.size, num_heads, dim, terms) is not False


def heads_of_group(num_heads: int, dim: int) -> int:
    """Heads of a head group: the fewest groups of at most GROUP_WIDTH columns, of equal size but for the last."""
    width = SLICE // 2 if dim <= SLICE // 2 else SLICE * -(-dim // SLICE)
    num_groups = -(-num_heads // max(1, GROUP_WIDTH // width))
    return -(-num_heads // num_groups)


@lru_cache  # on small graphs a call takes as long as its launch: no spec is made twice
def kernel_spec(
    element: Element, out_dtype: torch.dtype, dim: int, warps: int, num_heads: int = 1, terms: int = 0
) -> FusedKernelSpec:
    heads = 1 if terms else heads_of_group(num_heads, dim)
    spec = FusedKernelSpec(element.dtype, out_dtype, dim, warps, heads, terms, one_term=element == Element.TF32)
    if element.dtype == torch.float32 and heads == 1:
        spec = replace(spec, dim_warps=-(-spec.slices * SLICE // WARP_COLUMNS))
    return spec


def forward_schedule(gpu: GPULimits, inputs: InputSpec, most_tiles: int) -> ScheduleForm:
    """Schedule of the forward pass of a graph with up to `most_tiles` KV tiles: the host knows no other number."""
    small, large = _forward_schedules(gpu, inputs)
    return small if small.num_groups * most_tiles < gpu.num_sms * tuning_for(gpu).small_tiles_per_sm else large


@lru_cache  # of a plan on a small graph these sizes would take a tenth of the time
def _forward_schedules(gpu: GPULimits, inputs: InputSpec) -> tuple[ScheduleForm, ScheduleForm]:
    """For a small graph, and for another."""
    tuning = tuning_for(gpu)
    dim = _even(inputs.head_dim or COMMON_DIM)
    dtype = inputs.dtype or torch.float16
    element, num_heads = input_element(dtype), inputs.num_heads
    num_groups = -(-num_heads // heads_of_group(num_heads, dim))

    def fits(warps: int) -> bool:
        """Whether blocks of so many work items run with all inputs that the plan leaves open."""
        widest = dim if inputs.head_dim else MAX_DIM
        specs = [kernel_spec(input_element(dtype), dtype, widest, warps, num_heads)]
        if inputs.dtype is None:
            specs.append(kernel_spec(Element.FLOAT, torch.float32, widest, warps, num_heads))
        if inputs.edge_data and dtype != torch.float32:  # the edge-by-edge kernel takes those of float32
            all_terms = BIAS | MULTIPLIER | KEY_FEATURES | VALUE_FEATURES
            specs.append(FusedKernelSpec(dtype, dtype, widest, warps, terms=all_terms))
        return all(spec.shared_bytes <= gpu.block_shared_bytes for spec in specs)

    def form_of(warps: int) -> ScheduleForm:
        while warps > 1 and not fits(warps):
            warps //= 2
        spec = kernel_spec(element, inputs.out_dtype or dtype, dim, warps, num_heads)
        return ScheduleForm(num_groups, warps, gpu.num_sms * spec.blocks_per_sm(gpu.sm_shared_bytes) * warps)

    large = tuning.few_warps if dim > tuning.wide_dim else tuning.warps
    if dtype == torch.float32:
        large = max(1, tuning.warps // kernel_spec(element, dtype, dim, 1, num_heads).dim_warps)
    return form_of(tuning.warps), form_of(large)


def _even(dim: int) -> int:
    """Columns of a head as `attend` pads them."""
    return dim + (-dim % 8 if dim % 2 else 0)


def _compile(data: Fused3SData, device: torch.device, inputs: InputSpec) -> None:
    """Compile the kernels of `inputs` without edge data, where their type is known."""
    dtype, num_heads = inputs.dtype, inputs.num_heads
    if dtype is None or inputs.head_dim is None:
        return
    dim, out_dtype = _even(inputs.head_dim), inputs.out_dtype or dtype
    check_out_dtype(out_dtype, dtype)
    if inputs.backward:
        compile_gradients(data, device, inputs)
    dtype = product_type(dtype)
    if _takes_edge_kernel(data, device, dtype, num_heads, dim, None):
        compile_edge_kernel(dtype, out_dtype, dim, num_heads, device)
    else:
        get_kernel(kernel_spec(input_element(dtype), out_dtype, dim, data.work_items.shape[1], num_heads), device.index)


def launch(
    spec: FusedKernelSpec,
    data: Fused3SData,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    lse: torch.Tensor | None = None,
    edges: EdgeTerms | None = None,
) -> torch.Tensor:
    """Run the kernel on torch's current stream, without waiting for it.

    The kernel reads `data` before griddepcontrol.wait: its arrays must be complete on the device, not only queued.

    Args:
        spec: the instance; its dimension, types and warps must be those of the tensors and of the schedule.
        data: A, on the tensors' GPU.
        query: [num_rows, H, d] fp16, bf16 or float32, any row and head strides.
        key, value: [num_cols, H, d], likewise.
        scale: factor of the scores.
        lse: [num_rows, H] float32 contiguous, filled with the log of each row's sum of exp(scale * score), -inf for a
            row without an edge; None: not wanted.
        edges: terms other than types, in CSR order; those of `spec.terms`.

    Returns:
        [num_rows, H, d] contiguous, of spec.out_dtype.

    Raises:
        ValueError: the instance does not fit the tensors or the schedule, or gradients are asked for.
    """
    num_blocks, warps, _ = data.work_items.shape
    if (spec.warps, spec.dim, spec.dtype) != (warps, query.shape[2], query.dtype):
        raise ValueError(
            f"spec: got {spec.dtype}, d = {spec.dim}, {spec.warps} warps; the tensors have {query.dtype}, "
            f"d = {query.shape[2]}, and the schedule {warps} warps"
        )
    query, key, value = checked_inputs("fused3s", spec.out_dtype, query, key, value, row_bytes=spec.copy_bytes)
    num_rows, num_heads = query.shape[:2]
    num_groups = -(-num_heads // spec.heads)
    output = torch.empty_like(query, dtype=spec.out_dtype, memory_format=torch.contiguous_format)
    if output.numel() == 0:
        return output
    packed = None if edges is None or edges.features is None else pack_features(spec, edges, num_heads)
    partial = arrived = None
    if num_partials := data.num_splits * num_groups:
        # Scratch memory of this call alone: plans may run on several streams.
        partial = query.new_empty(num_partials * spec.partial_floats, dtype=torch.float32)
        arrived = semaphores(num_partials * spec.block_warps, query.device)
    launch_kernel(
        get_kernel(spec, query.device.index),
        (num_blocks, num_groups),
        WARP_SIZE * spec.block_warps,
        (
            *(data.kv_tiles, data.work_items, query, key, value, output, lse, partial, arrived, data.row_ids),
            *_edge_tensors(data, edges, packed),
        ),
        _scalars(
            num_rows,
            num_heads,
            edges_scalars(edges),
            dropout_scalars(None if edges is None else edges.dropout),
            scale,
            query.itemsize,
            query.stride(),
            key.stride(),
            value.stride(),
        ),
        shared_bytes=spec.shared_bytes,
        overlaps=True,
    )
    return output


def _edge_tensors(
    data: Fused3SData, edges: EdgeTerms | None, packed: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    if edges is None:
        return (None,) * 8
    features = None if packed is None else whole_rows(edges.features)
    seed = None if edges.dropout is None else edges.dropout.seed
    return (
        data.tile_slots,
        data.slot_edges,
        data.slot_places,
        *contiguous(edges.bias, edges.multiplier),
        features,
        packed,
        seed,
    )


def pack_features(spec: FusedKernelSpec, edges: EdgeTerms, num_heads: int) -> torch.Tensor:
    """[H, 2 words] 16-bit: the weights of features as an instance reads them, queued on torch's current stream."""
    key_words, value_words = spec.packed_words
    packed = edges.features.new_empty((num_heads, 2 * (key_words + value_words)))
    weights = (None if each is None else each.contiguous() for each in (edges.key_weight, edges.value_weight))
    launch_kernel(
        get_kernel(PackFeaturesSpec(), packed.device.index),
        (-(-(key_words + value_words) // PACK_THREADS), num_heads),
        PACK_THREADS,
        (packed, *weights),
        _pack_scalars(spec.dim, edges.features.shape[1], key_words, value_words),
        overlaps=True,
    )
    return packed


@lru_cache
def _pack_scalars(*numbers: int) -> bytes:
    return pack_scalars(*map(np.int32, numbers))


@lru_cache  # a model calls with the same ones again and again, and packing them takes as long as half a launch
def _scalars(
    num_rows: int,
    num_heads: int,
    edges: tuple[int, int, float],
    dropout: tuple[int, float],
    scale: float,
    itemsize: int,
    *strides: tuple[int, int, int],
) -> bytes:
    bias_heads, multiplier_heads, clamp = edges
    threshold, rescale = dropout
    return pack_scalars(
        *(np.uint32(threshold), np.float32(rescale)),
        *(np.int64(head) for _, head, _ in strides),
        *(np.int32(row * itemsize) for row, _, _ in strides),
        np.int32(num_rows),
        *(np.int32(number) for number in (num_heads, bias_heads, multiplier_heads)),
        np.uint32((0x80008000 if itemsize == 2 else 0x80000000) if scale < 0 else 0),
        np.float32(max(abs(scale) * math.log2(math.e), LEAST_SCALE)),
        np.float32(clamp * math.log2(math.e)),
    )
