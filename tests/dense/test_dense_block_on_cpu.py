"""cuda/dense_block.cu on the CPU (tests/cuda_shim): the real source, packing and launch against float64."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from dense_cases import UNUSUAL, assert_block, parameters, unusual_rows
from poison import poisoned_buffers

import dense.block as dense
from dense.block import SOURCE
from dense.weights import BLOCK_ROWS, DIMS, SHAPES
from kernels.runtime.source import CUDA_FOLDER
from tests.cuda_shim.cuda_on_cpu import COMPILER, CpuGpu, CpuKernel, CudaError, Mode

DENSE_FOLDER = SOURCE.parent

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler found (g++ or clang++)"),
    pytest.mark.usefixtures("one_thread"),
]

NUM_SMS = 2  # two blocks, or one cluster of two
LATE, EARLY = Mode(), Mode("backward", "early", resident=2)
RANDOM = [Mode("random", "any_time", resident=2, seed=seed) for seed in range(8)]


def run(
    p: dict, attn_out: torch.Tensor, h: torch.Tensor, mode: Mode, folder: Path = CUDA_FOLDER, missing_bytes: int = 0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`dense_block` with the kernel of `folder` on CPU tensors, as on a GPU of NUM_SMS multiprocessors.

    `missing_bytes` are taken from the shared memory of the launch.
    """
    gpu = CpuGpu(mode, folder)
    limits = SimpleNamespace(num_sms=NUM_SMS)

    def launch(kernel: CpuKernel, *arguments, **options) -> None:
        shared_bytes = kernel.sizes.shared_bytes - missing_bytes
        cluster = kernel.instance.arguments.cluster
        gpu.launch_kernel(kernel, *arguments, cluster=cluster, shared_bytes=shared_bytes, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "get_kernel", gpu.get_kernel)
        patch.setattr(dense, "launch_kernel", launch)
        patch.setattr(torch.Tensor, "is_cuda", True)
        patch.setattr(dense, "gpu_limits", lambda device: limits)
        packed = dense.pack_block(**p)
        with poisoned_buffers(patch):
            return dense.dense_block(packed, attn_out, h)


def inputs(rows: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + dim)
    return [torch.randn(rows, dim, generator=generator).to(dtype) for _ in range(2)]


def rows_of_three_rounds(dim: int) -> int:
    """Two full rounds of both blocks, and a third in which most consumers have no rows."""
    return 2 * NUM_SMS * SHAPES[dim].consumers * BLOCK_ROWS + BLOCK_ROWS + 1


@pytest.mark.parametrize(("has_next", "dtype"), [(True, torch.float16), (False, torch.bfloat16)])
@pytest.mark.parametrize("dim", DIMS)
def test_every_row(dim, has_next, dtype):
    many = rows_of_three_rounds(dim)
    few = ((1, LATE), (63, EARLY), (64, RANDOM[0]), (65, LATE))[(DIMS.index(dim) + has_next) % 4]
    for rows, mode in (few, (many, EARLY), (many, RANDOM[1])):
        p, tensors = parameters(dim, has_next, dtype), inputs(rows, dim, dtype)
        assert_block(run(p, *tensors, mode), p, *tensors, f"{rows} rows, d = {dim}, {mode}")


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize("dim", DIMS)
def test_unusual_rows(dim, kind):
    dtype = torch.float16
    p, tensors = parameters(dim, True, dtype), inputs(100, dim, dtype)
    unusual_rows(kind, p, *tensors)
    assert_block(run(p, *tensors, LATE), p, *tensors, f"{kind}, d = {dim}")


@pytest.mark.parametrize(("dim", "has_next"), [(DIMS[0], True), (DIMS[-1], False)])
def test_no_rows(dim, has_next):
    h_next, qkv = run(parameters(dim, has_next), *inputs(0, dim, torch.float16), LATE)
    assert h_next.shape == (0, dim)
    assert qkv.shape == (0, 3 * dim) if has_next else qkv is None


@pytest.mark.parametrize("dim", DIMS)
def test_shared_memory_is_no_more_than_the_kernel_uses(dim):
    with pytest.raises(CudaError, match="out of bounds"):
        run(parameters(dim, True), *inputs(1, dim, torch.float16), LATE, missing_bytes=8)


@dataclass(frozen=True)
class Fault:
    """A line of a source, its replacement, the d of an instance that it breaks, and how that shows."""

    file: str
    line: str
    replacement: str
    dim: int
    shows_as: str


CHANGED = "an operand of wgmma in shared memory changed"
FAULTS = {  # most of them give right results in most runs on a GPU
    "early release": Fault(
        "dense_block.cu",
        "wgmma_wait_group<1>();\n          release(wide_tiles[i % 2]);",
        "release(wide_tiles[i % 2]);\n          wgmma_wait_group<1>();",
        256,
        CHANGED,
    ),
    "early wait": Fault("dense_block.cu", "wgmma_wait_group<2>();", "wgmma_wait_group<3>();", 128, CHANGED),
    "no proxy fence": Fault(
        "dense_block.cu", "fence_proxy_async_shared();  // [9]", "", 256, "without fence.proxy.async"
    ),
    "no barrier before h1 is overwritten": Fault(
        "dense_block.cu", "if (kSharedH1) bar_sync<kWarpgroupSize>(1 + warpgroup);  // [10]", "", 256, CHANGED
    ),
    "no wgmma fence": Fault(
        "dense_block.cu",
        "acquire(Traits::hidden_wide(i));\n    wgmma_fence();",
        "acquire(Traits::hidden_wide(i));",
        64,
        "wgmma without wgmma.fence",
    ),
    "parity": Fault(
        "dense_tiles.cuh", "Traits::parity(tile, round) ^ 1", "Traits::parity(tile, round)", 128, "deadlock"
    ),
    "swizzle": Fault("dense_tiles.cuh", "row / (8 / kChunks) % kChunks", "row / (8 / kChunks) % 4", 256, "is off"),
    "swizzle of short rows": Fault("dense_tiles.cuh", "row / (8 / kChunks) % kChunks", "row % kChunks", 160, "is off"),
    "panels of h1": Fault(
        "dense_block.cu", "step_desc<kWarpgroupM>(h1_desc", "step_desc<kSlice>(h1_desc", 160, "race: reads"
    ),
    "group in two tiles": Fault(
        "dense_block.cu",
        "2 * divide_up(i * kSlice, kPermuteGroup)",
        "i * kSlice / 16",
        160,
        "registers of A were written",
    ),
    "last 16 dimensions": Fault("dense_rows.cuh", "four[2 * w + b]", "four[w + 2 * b]", 80, "is off"),
    "load of the last 16 dimensions": Fault(
        "dense_rows.cuh", "loaded[8 * s + 2 * r + 1] = two.y;", "loaded[8 * s + 2 * r + 1] = two.x;", 80, "is off"
    ),
    "no cluster barrier at the end": Fault(
        "dense_consumer.cuh", "if (kCluster > 1) barrier_cluster_sync();  // [13]", "", 256, "has exited"
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name, tmp_path):
    fault = FAULTS[name]
    folder = tmp_path / "cuda"
    shutil.copytree(DENSE_FOLDER, folder)
    source = (folder / fault.file).read_text(encoding="utf-8")
    assert fault.line in source
    (folder / fault.file).write_text(source.replace(fault.line, fault.replacement), encoding="utf-8")
    p = parameters(fault.dim, True, torch.float16)
    tensors = inputs(rows_of_three_rounds(fault.dim), fault.dim, torch.float16)

    def run_in_every_mode() -> None:
        for mode in (LATE, EARLY, *RANDOM):
            assert_block(run(p, *tensors, mode, folder), p, *tensors, name)

    with pytest.raises((CudaError, AssertionError), match=fault.shows_as):
        run_in_every_mode()
