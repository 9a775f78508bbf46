"""The dense block against float64, within twice torch's error in the same type: cuda/dense_block.cu on the CPU
(tests/cuda_shim), with the real packing and launch, and on a GPU."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from dense_cases import PLACES, UNUSUAL, assert_block, on, parameters, unusual_rows
from poison import poisoned_buffers

import models.dense.block as dense
from fused3s.runtime.source import CUDA_FOLDER
from models.dense.block import SOURCE, dense_block_unavailable
from models.dense.weights import BLOCK_ROWS, DIMS, SHAPES
from tests.cuda_shim.cuda_on_cpu import NEEDS_COMPILER, CpuGpu, CpuKernel, CudaError, Mode

pytestmark = pytest.mark.usefixtures("one_thread")

HALF, BFLOAT = torch.float16, torch.bfloat16
NUM_SMS = 2  # on the CPU: two blocks, or one cluster of two
LATE, EARLY = Mode(), Mode("backward", "early", resident=2)
RANDOM = [Mode("random", "any_time", resident=2, seed=seed) for seed in range(8)]


@pytest.fixture(autouse=True)
def available(request) -> None:
    if request.node.get_closest_marker("gpu") and (reason := dense_block_unavailable(torch.device("cuda"), HALF, 128)):
        pytest.skip(reason)


def run(
    p: dict,
    attn_out: torch.Tensor,
    h: torch.Tensor,
    mode: Mode = LATE,
    folder: Path = CUDA_FOLDER,
    missing_bytes: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`dense_block`; of CPU tensors with the kernel of `folder`, as on a GPU of NUM_SMS multiprocessors.

    `missing_bytes` are taken from the shared memory of the launch.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not h.is_cuda:
            gpu = CpuGpu(mode, folder)

            def launch(kernel: CpuKernel, *arguments, **options) -> None:
                shared_bytes = kernel.sizes.shared_bytes - missing_bytes
                cluster = kernel.instance.arguments.cluster
                gpu.launch_kernel(kernel, *arguments, cluster=cluster, shared_bytes=shared_bytes, **options)

            patch.setattr(dense, "get_kernel", gpu.get_kernel)
            patch.setattr(dense, "launch_kernel", launch)
            patch.setattr(torch.Tensor, "is_cuda", True)
            patch.setattr(dense, "gpu_limits", lambda device: SimpleNamespace(num_sms=NUM_SMS))
        packed = dense.pack_block(**p)
        with poisoned_buffers(patch):
            return dense.dense_block(packed, attn_out, h)


def inputs(rows: int, dim: int, dtype: torch.dtype, place: str) -> list[torch.Tensor]:
    generator = torch.Generator(place).manual_seed(rows + dim)
    return [torch.randn(rows, dim, generator=generator, device=place).to(dtype) for _ in range(2)]


def rows_of_three_rounds(dim: int) -> int:
    """Two full rounds of both blocks, and a third in which most consumers have no rows."""
    return 2 * NUM_SMS * SHAPES[dim].consumers * BLOCK_ROWS + BLOCK_ROWS + 1


@pytest.mark.parametrize(
    ("place", "has_next", "dtype"),
    [
        *(on("cpu", has_next, dtype) for has_next, dtype in ((True, HALF), (False, BFLOAT))),
        *(on("cuda", has_next, dtype) for has_next in (True, False) for dtype in (HALF, BFLOAT)),
    ],
)
@pytest.mark.parametrize("dim", DIMS)
def test_every_row(dim, place, has_next, dtype):
    cases = [(rows, LATE) for rows in (1, 63, 64, 65, 1000, 169343)]
    if place == "cpu":
        many = rows_of_three_rounds(dim)
        few = ((1, LATE), (63, EARLY), (64, RANDOM[0]), (65, LATE))[(DIMS.index(dim) + has_next) % 4]
        cases = [few, (many, EARLY), (many, RANDOM[1])]
    for rows, mode in cases:
        p, tensors = parameters(dim, has_next, dtype, place), inputs(rows, dim, dtype, place)
        assert_block(run(p, *tensors, mode), p, *tensors, f"{rows} rows, d = {dim}, {mode}")


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("place", "dtype"), [on("cpu", HALF), on("cuda", HALF), on("cuda", BFLOAT)])
def test_unusual_rows(place, dim, kind, dtype):
    p, tensors = parameters(dim, True, dtype, place), inputs(100, dim, dtype, place)
    unusual_rows(kind, p, *tensors)
    assert_block(run(p, *tensors), p, *tensors, f"{kind}, d = {dim}")


@pytest.mark.parametrize(("dim", "has_next"), [(DIMS[0], True), (DIMS[-1], False)])
@pytest.mark.parametrize("place", PLACES)
def test_no_rows(place, dim, has_next):
    h_next, qkv = run(parameters(dim, has_next, HALF, place), *inputs(0, dim, HALF, place))
    assert h_next.shape == (0, dim)
    assert qkv.shape == (0, 3 * dim) if has_next else qkv is None


@pytest.mark.gpu
@pytest.mark.parametrize("dim", DIMS)
def test_a_row_depends_on_itself_alone_and_not_on_its_stride(dim):
    packed = dense.pack_block(**parameters(dim, True, HALF, "cuda"))
    attn_out, h = inputs(40000, dim, HALF, "cuda")
    order = torch.randperm(len(h), device="cuda")
    in_order, permuted = (dense.dense_block(packed, *both) for both in ((attn_out, h), (attn_out[order], h[order])))
    assert all(torch.equal(expected[order], output) for expected, output in zip(in_order, permuted, strict=True))
    wide = torch.randn(50, 2, dim + 1, device="cuda").half()
    strided = wide[:, 0, 1:], wide[:, 1, :dim]
    of_copies = dense.dense_block(packed, *(each.clone() for each in strided))
    assert all(map(torch.equal, dense.dense_block(packed, *strided), of_copies))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", DIMS)
def test_results_are_the_same_bits_every_time(dim):
    packed = dense.pack_block(**parameters(dim, True, HALF, "cuda"))
    tensors = inputs(169343, dim, HALF, "cuda")
    first = dense.dense_block(packed, *tensors)
    for _ in range(20):
        assert all(map(torch.equal, first, dense.dense_block(packed, *tensors)))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", DIMS)
def test_cuda_graph_capture_and_replay(dim):
    packed = dense.pack_block(**parameters(dim, True, BFLOAT, "cuda"))
    attn_out, h = inputs(5000, dim, BFLOAT, "cuda")
    dense.dense_block(packed, attn_out, h)
    cuda_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(cuda_graph):
        outputs = dense.dense_block(packed, attn_out, h)
    for seed in range(2):
        torch.manual_seed(seed)
        attn_out.copy_(torch.randn_like(attn_out))
        h.copy_(torch.randn_like(h))
        cuda_graph.replay()
        assert all(map(torch.equal, outputs, dense.dense_block(packed, attn_out, h)))


@pytest.mark.parametrize(("place", "dim"), [on("cpu", dim) for dim in DIMS])
def test_shared_memory_is_no_more_than_the_kernel_uses(place, dim):
    with pytest.raises(CudaError, match="out of bounds"):
        run(parameters(dim, True), *inputs(1, dim, HALF, place), missing_bytes=8)


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


@NEEDS_COMPILER
@pytest.mark.parametrize(("file", "line", "replacement", "dim", "shows_as"), FAULTS, ids=lambda each: str(each)[:30])
def test_faults_are_found(tmp_path, file, line, replacement, dim, shows_as):
    folder = tmp_path / "cuda"
    shutil.copytree(SOURCE.parent, folder)
    source = (folder / file).read_text(encoding="utf-8")
    assert line in source
    (folder / file).write_text(source.replace(line, replacement), encoding="utf-8")
    p, tensors = parameters(dim, True), inputs(rows_of_three_rounds(dim), dim, HALF, "cpu")

    def run_in_every_mode() -> None:
        for mode in (LATE, EARLY, *RANDOM):
            assert_block(run(p, *tensors, mode, folder), p, *tensors, line)

    with pytest.raises((CudaError, AssertionError), match=shows_as):
        run_in_every_mode()
