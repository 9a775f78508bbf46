"""cuda/dense_block.cu on the CPU (tests/cuda_shim): the real source, packing and launch against float64."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from dense_cases import UNUSUAL, assert_block, parameters, unusual_rows
from poison import poisoned_buffers

import models.dense.block as dense
from fused3s.runtime.source import CUDA_FOLDER
from models.dense.block import SOURCE
from models.dense.weights import BLOCK_ROWS, DIMS, SHAPES
from tests.cuda_shim.cuda_on_cpu import ON_SHIM, CpuGpu, CpuKernel, CudaError, Mode

DENSE_FOLDER = SOURCE.parent

pytestmark = ON_SHIM

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


# A line of a source, its replacement, the d of an instance that it breaks, and how that shows: most of these give
# right results in most runs on a GPU.
CHANGED = "an operand of wgmma in shared memory changed"
FENCE, LAST = "fence_proxy_async_shared();  // [9]", "if (kCluster > 1) barrier_cluster_sync();  // [13]"
WAIT, ACQUIRE = "wgmma_wait_group<1>();\n          release(wide_tiles[i % 2]);", "acquire(Traits::hidden_wide(i));"
FAULTS = [
    ("dense_block.cu", WAIT, "release(wide_tiles[i % 2]);\n          wgmma_wait_group<1>();", 256, CHANGED),
    ("dense_block.cu", FENCE, "", 256, "without fence.proxy.async"),
    ("dense_block.cu", f"{ACQUIRE}\n    wgmma_fence();", ACQUIRE, 64, "wgmma without wgmma.fence"),
    ("dense_tiles.cuh", "Traits::parity(tile, round) ^ 1", "Traits::parity(tile, round)", 128, "deadlock"),
    ("dense_block.cu", "step_desc<kWarpgroupM>(h1_desc", "step_desc<kSlice>(h1_desc", 160, "race: reads"),
    ("dense_consumer.cuh", LAST, "", 256, "has exited"),
]


@pytest.mark.parametrize(("file", "line", "replacement", "dim", "shows_as"), FAULTS, ids=lambda each: str(each)[:30])
def test_faults_are_found(tmp_path, file, line, replacement, dim, shows_as):
    folder = tmp_path / "cuda"
    shutil.copytree(DENSE_FOLDER, folder)
    source = (folder / file).read_text(encoding="utf-8")
    assert line in source
    (folder / file).write_text(source.replace(line, replacement), encoding="utf-8")
    p, tensors = parameters(dim, True), inputs(rows_of_three_rounds(dim), dim, torch.float16)

    def run_in_every_mode() -> None:
        for mode in (LATE, EARLY, *RANDOM):
            assert_block(run(p, *tensors, mode, folder), p, *tensors, line)

    with pytest.raises((CudaError, AssertionError), match=shows_as):
        run_in_every_mode()
