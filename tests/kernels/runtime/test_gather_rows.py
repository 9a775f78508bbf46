"""Rows in another order: bytes and gradients of torch.index_select and a pad."""

import pytest
import torch
from compiled import ARCHS, check
from poison import poisoned_buffers
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fused3s.runtime.gather_rows import gather_instance, gather_rows, launch_gather
from tests.cuda_shim.cuda_on_cpu import MODES, NEEDS_COMPILER, cuda_on_cpu

# Type, shape of rows, columns with zeros; chunks of 16, 8, 4 and 2 bytes, rows of more chunks than a block has threads.
FORMS = [
    (torch.bfloat16, (16,), None),
    (torch.float16, (8,), 16),
    (torch.float16, (3,), 16),
    (torch.float32, (8,), 16),
    (torch.float32, (6,), 6),
    (torch.float32, (5, 3), None),
    (torch.float32, (2100,), 2101),
    (torch.float64, (1,), 16),
]
COUNTS = [(1, 1), (33, 700), (700, 33)]  # rows, and places


def case(dtype, shape, counts, device):
    torch.manual_seed(0)
    rows = torch.randn(counts[0], *shape, dtype=dtype, device=device)
    return rows, torch.randint(max(1, counts[0]), counts[1:], dtype=torch.int32, device=device)


def expected_rows(rows, places, columns):
    found = rows[places.long()]
    return found if columns is None else torch.nn.functional.pad(found, (0, columns - rows.shape[1]))


@pytest.mark.usefixtures("one_thread")
@NEEDS_COMPILER
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("dtype", "shape", "columns"), FORMS)
def test_kernel_on_cpu(monkeypatch, dtype, shape, columns, counts):
    rows, places = case(dtype, shape, counts, "cpu")
    given = (rows, places), (rows, places.long()), (torch.cat([rows, rows], 1)[:, : rows.shape[1]], places)
    for mode, each in zip(("late", "early", "random"), given, strict=True):
        with cuda_on_cpu(MODES[mode]), poisoned_buffers(monkeypatch):
            assert torch.equal(launch_gather(*each, columns), expected_rows(*each, columns))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "shape", "columns"), FORMS)
def test_gpu_rows_and_gradients(dtype, shape, columns):
    for counts in (*COUNTS, (0, 0), (5, 0)):
        rows, places = case(dtype, shape, counts, "cuda")
        rows.requires_grad_()
        out, expected = gather_rows(rows, places, columns), expected_rows(rows, places, columns)
        assert torch.equal(out, expected)
        cotangent = torch.randn_like(expected)
        (found,) = torch.autograd.grad(out, rows, cotangent)
        kept = cotangent[:, : rows.shape[1]].double()
        exact, size = (torch.zeros_like(rows, dtype=torch.float64) for _ in range(2))
        exact.index_add_(0, places, kept)
        size.index_add_(0, places, kept.abs())
        # Additions in any order: each rounds a partial sum, which is at most the sum of all sizes.
        copies = torch.bincount(places, minlength=len(rows)).view(-1, *[1] * (rows.dim() - 1))
        assert ((found.double() - exact).abs() <= copies * torch.finfo(dtype).eps / 2 * size).all()


def test_tensors_without_memory_or_known_sizes():
    """Device cuda, as on a GPU: fake tensors, with a number of rows that data decide."""
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        rows, mask = torch.empty(7, 8, device="cuda"), torch.empty(7, dtype=torch.bool, device="cuda")
        chosen = mask.nonzero().squeeze(1)
        found = gather_rows(rows, chosen)
        assert (found.shape[0], found.shape[1]) == (chosen.shape[0], 8)


@pytest.mark.parametrize("arch", ARCHS)
def test_instances(arch):
    pytest.importorskip("cupy", reason="CuPy, which brings NVRTC's interface, is not installed")
    check([gather_instance(size, is_long) for size in (2, 4, 8, 16) for is_long in (False, True)], arch, 64)
