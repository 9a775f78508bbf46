"""Products with the weights of edge features, before and after the kernel of `fused3s`, and the weights packed
for the kernels that compute these products.

cuda/features/pack_features.cu          weights as B fragments
cuda/features/feature_products.cu       16-bit tensors
cuda/features/feature_products_float.cu  float32, heads of up to 32 columns; others: GEMMs
cuda/features/weight_gradient_float.cu  gradients of the weights in float32
cuda/features/weight_gradient.cuh       shared part of the gradients of the weights
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch.nn import functional

from ...backends.cuda import split_scratch
from ...runtime.device import WARP_SIZE, gpu_limits
from ...runtime.jit import Kernel, KernelInstance, get_kernel
from ...runtime.launch import launch_kernel
from ...terms.edge_data import FEATURE_STEP, BoundEdges
from ..score_values import contiguous

# As in cuda/features/feature_rows.cuh:
WARPS = 8
ROWS_PER_TILE = 16
FEATURES = FEATURE_STEP
PACK_THREADS = 256  # as in cuda/features/pack_features.cu
PACK_PAIR_FEATURES = KernelInstance("features/pack_features.cu", "pack_pair_features")
PAIR_WORDS = 128  # int32 words of a packed weight, per head
# As in cuda/features/feature_products_float.cu:
FLOAT_THREADS, PASSES = 256, 8
MOST_WEIGHT_BYTES = 32 * 1024  # of the weights of a block; several blocks fit an SM
MOST_FLOAT_DIM = 32  # wider heads read more of the weights than of the rows, and a GEMM is faster


def pack_features(
    instance: KernelInstance, edges: BoundEdges, num_heads: int, key_words: int, value_words: int
) -> torch.Tensor:
    """[H, 2 words] 16-bit: the weights of features as a kernel reads them, queued on torch's current stream.

    Args:
        instance: a kernel of cuda/features/pack_features.cu.
        key_words, value_words: words of each weight of a head.
    """
    weights = contiguous(edges, "key_weight", "value_weight")
    key_words, value_words = (
        0 if weight is None else words for weight, words in zip(weights.values(), (key_words, value_words), strict=True)
    )
    dim = next(weight.shape[1] for weight in weights.values() if weight is not None)
    packed = edges.padded_features.new_empty((num_heads, 2 * (key_words + value_words)))
    kernel = get_kernel(instance, packed.device.index)
    launch_kernel(
        kernel,
        (-(-(key_words + value_words) // PACK_THREADS), num_heads),
        PACK_THREADS,
        {"packed": packed, **weights},
        kernel.scalars(dim=dim, num_features=edges.num_features, key_words=key_words, value_words=value_words),
        overlaps=True,
    )
    return packed


@lru_cache  # a model repeats the same arguments at every call
def product_instance(
    function: str, dtype: torch.dtype, dim: int, out_dtype: torch.dtype | None = None
) -> KernelInstance:
    """An instance of "project_query", "add_features" or "weight_gradient".

    Args:
        dtype: torch.float16 or torch.bfloat16, and torch.float32 of "weight_gradient"; all tensors have it except
            float32 results.
        dim: dimensions of a head, an even number up to 256.
        out_dtype: output type of "add_features", torch.float32 or `dtype`.
    """
    if dtype == torch.float32:
        return KernelInstance("features/weight_gradient_float.cu", f"{function}_float", (dim,))
    types = (dtype,) if out_dtype is None else (dtype, out_dtype)
    return KernelInstance("features/feature_products.cu", function, (*types, dim))


def add_product(output: torch.Tensor, sums: torch.Tensor, weight: torch.Tensor) -> None:
    """output[n, h, d] += sum_c weight[h, d, c] sums[h, n, c], a GEMM in the output's type; `sums` has columns behind
    those of `weight`, which count for nothing."""
    sums, weight = (each.to(output.dtype) for each in (sums[..., : weight.shape[2]], weight))
    output.transpose(0, 1).baddbmm_(sums, weight.transpose(1, 2))  # in place, which autocast leaves alone


def project_query(query: torch.Tensor, weight: torch.Tensor, columns: int = FEATURES) -> torch.Tensor:
    """u[h, n, c] = sum_d query[n, h, d] weight[h, d, c], queued on torch's current stream.

    Args:
        query: [N, H, d] fp16, bf16 or float32, any row and head strides, d even up to 256; rows aligned to 16 bytes,
            or to 4 where their size is no multiple of 16.
        weight: [H, d, r] of query's type, contiguous, or columns of a contiguous tensor.
        columns: r and fewer than 16 more, a multiple of 16.

    Returns:
        [H, N, columns] float32, zero from column r on.
    """
    num_rows, num_heads, dim = query.shape
    projected = query.new_empty((num_heads, num_rows, columns), dtype=torch.float32)
    if projected.numel() == 0:
        return projected
    if query.dtype == torch.float32:
        if columns == FEATURES and dim <= MOST_FLOAT_DIM:
            _launch_float("project_query_float", query, projected, weight.contiguous(), FLOAT_THREADS * 4 // FEATURES)
            return projected
        if missing := columns - weight.shape[2]:  # a pad of nothing copies
            weight = functional.pad(weight, (0, missing))
        return torch.bmm(query.transpose(0, 1), weight, out=projected)  # by `out`, which autocast leaves alone
    kernel = get_kernel(product_instance("project_query", query.dtype, dim), query.device.index)
    groups, (row_stride, head_stride, _) = -(-num_heads // kernel.sizes.block_items), query.stride()
    steps = columns // FEATURES
    launch_kernel(
        kernel,
        (groups, _row_blocks(num_rows, groups * steps, kernel, query.device), steps),
        WARPS * WARP_SIZE,
        {"query": query, "weight": weight, "projected": projected},
        kernel.scalars(
            query_head_stride=head_stride,
            query_row_bytes=row_stride * query.itemsize,
            num_rows=num_rows,
            num_heads=num_heads,
            weight_columns=weight.stride(1),
            num_features=weight.shape[2],
            columns=columns,
        ),
        overlaps=True,
    )
    return projected


def add_features(output: torch.Tensor, feature_sums: torch.Tensor, weight: torch.Tensor) -> None:
    """output[n, h, d] += sum_c weight[h, d, c] feature_sums[h, n, c], queued on torch's current stream.

    The sum is in float32 and rounded once.

    Args:
        output: [N, H, d] contiguous, float32 or of `weight`'s type, d even up to 256; updated in place. With a float32
            weight any row and head strides, rows aligned as those of `project_query`.
        feature_sums: [H, N, 16] fp16, bf16 or float32, contiguous, finite; columns from r on are ignored.
        weight: [H, d, r] of the same type, contiguous, r <= 16.
    """
    num_rows, num_heads, dim = output.shape
    if output.numel() == 0:
        return
    if weight.dtype == torch.float32 and dim > MOST_FLOAT_DIM:
        add_product(output, feature_sums, weight)
        return
    if weight.dtype == torch.float32:
        lanes = dim // _vector(dim)
        _launch_float("add_features_float", output, feature_sums, weight, FLOAT_THREADS // lanes)
        return
    kernel = get_kernel(product_instance("add_features", weight.dtype, dim, output.dtype), output.device.index)
    groups = -(-num_heads // kernel.sizes.block_items)
    launch_kernel(
        kernel,
        (groups, _row_blocks(num_rows, groups, kernel, output.device)),
        WARPS * WARP_SIZE,
        {"output": output, "feature_sums": feature_sums, "weight": weight},
        kernel.scalars(num_rows=num_rows, num_heads=num_heads, num_features=weight.shape[2]),
        overlaps=True,
    )


def weight_gradients(products: Sequence[tuple[torch.Tensor, torch.Tensor]], num_features: int) -> list[torch.Tensor]:
    """sum_n rows[n, h, d] feature_sums[h, n, c] of one or two products, queued as one launch on torch's current stream.

    The sums are in float32 and rounded once; the same inputs give the same bits.

    Args:
        products: pairs of the same shapes and type:
            rows [N, H, d] fp16, bf16 or float32, any row and head strides, d even up to 256; rows of a head aligned to
            16 bytes, or to the largest power of two that divides their size.
            feature_sums [H, N, C] of the same type, contiguous, C = 16, 32, ..; columns from r on are ignored.
        num_features: r, C - 15 to C.

    Returns:
        [H, d, r] of each product, of its type, contiguous.
    """
    rows, sums = products[0]
    (num_rows, num_heads, dim), columns = rows.shape, sums.shape[2]
    shape = (num_heads, dim, num_features)
    if num_rows == 0:
        return [rows.new_zeros(shape) for _ in products]
    gradients = [rows.new_empty(shape) for _ in products]
    kernel = get_kernel(product_instance("weight_gradient", rows.dtype, dim), rows.device.index)
    groups = num_heads * -(-dim // kernel.sizes.block_items) * (columns // FEATURES)
    num_sums = groups * len(products)
    row_blocks = _row_blocks(num_rows, num_sums, kernel, rows.device)
    num_partials = num_sums * row_blocks if row_blocks > 1 else 0
    tensors: dict[str, torch.Tensor | None] = {}
    scalars = {"head_stride_1": 0, "row_bytes_1": 0}
    for i, ((rows, feature_sums), gradient) in enumerate(zip(products, gradients, strict=True)):
        tensors |= {f"rows_{i}": rows, f"feature_sums_{i}": feature_sums, f"gradient_{i}": gradient}
        row_stride, scalars[f"head_stride_{i}"], _ = rows.stride()
        scalars[f"row_bytes_{i}"] = row_stride * rows.itemsize
    launch_kernel(
        kernel,
        (groups, row_blocks, len(products)),
        WARPS * WARP_SIZE,
        {**tensors, **split_scratch(kernel, num_partials, num_sums, rows)},
        kernel.scalars(num_rows=num_rows, sum_columns=columns, num_features=num_features, **scalars),
        overlaps=True,
    )
    return gradients


def _vector(dim: int) -> int:
    """Floats of a load."""
    return 4 if dim % 4 == 0 else 1


def _launch_float(
    function: str, rows: torch.Tensor, products: torch.Tensor, weight: torch.Tensor, block_items: int
) -> None:
    """Queue a kernel of cuda/features/feature_products_float.cu.

    Args:
        block_items: heads of rows that a block processes in a pass.
    """
    num_rows, num_heads, dim = rows.shape
    row_stride, head_stride, _ = rows.stride()
    head_bytes = (dim + 1) * FEATURES * rows.itemsize
    block_heads = min(num_heads, max(1, MOST_WEIGHT_BYTES // head_bytes))
    kernel = get_kernel(float_instance(function, _vector(dim)), rows.device.index)
    launch_kernel(
        kernel,
        (-(-num_rows * block_heads // (block_items * PASSES)), -(-num_heads // block_heads)),
        FLOAT_THREADS,
        {"rows": rows, "products": products, "weight": weight},
        kernel.scalars(
            row_stride=row_stride,
            head_stride=head_stride,
            num_rows=num_rows,
            num_heads=num_heads,
            dim=dim,
            num_features=weight.shape[2],
            block_heads=block_heads,
            block_items=block_items,
        ),
        shared_bytes=block_heads * head_bytes,
        overlaps=True,
    )


@lru_cache
def float_instance(function: str, vector: int) -> KernelInstance:
    """ "project_query_float" or "add_features_float", for rows read in vectors of 4 floats or of 1."""
    return KernelInstance("features/feature_products_float.cu", function, (vector,))


@lru_cache(1024)
def _row_blocks(num_rows: int, groups: int, kernel: Kernel, device: torch.device) -> int:
    """Blocks per group that share its rows: at most as many as are resident at once, and as have rows."""
    resident = max(1, gpu_limits(device).num_sms * kernel.sizes.blocks_per_sm // groups)
    return min(-(-num_rows // (WARPS * ROWS_PER_TILE)), resident)
