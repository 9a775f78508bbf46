"""The dense block without running it: what its instances need, and which weights and inputs are refused."""

import re

import pytest
import torch
from dense_cases import parameters

import dense.block as forward
import dense.block_training as training
from dense.block import block_instance, dense_block, dense_block_unavailable, pack_block
from dense.block_training import TRAINING_DIMS, TrainingPacking, backward_instance, training_block_unavailable
from dense.weights import (
    ARCH,
    BLOCK_SHARED_BYTES,
    DIMS,
    backward_layout,
    block_threads,
    dimension_of_column,
    forward_layout,
    swizzle_tile,
)
from kernels.runtime.jit import compile_ptxas
from tests.cuda_shim.cuda_on_cpu import COMPILER, sizes_alone

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler found (g++ or clang++)")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_instances_keep_everything_in_registers(dtype):
    pytest.importorskip("cupy", reason="CuPy, which brings NVRTC's interface, is not installed")
    # Each dimension in one of the types: the compiler takes seconds for each, and registers do not depend on the type.
    turn = (torch.float16, torch.bfloat16).index(dtype)
    shapes = [(dim, after) for dim in DIMS[turn::2] for after in (True, False)]
    of_training = [(dim, after) for dim, after in shapes if dim in TRAINING_DIMS]
    specs = [block_instance(dtype, *shape) for shape in shapes]
    specs += [block_instance(dtype, *shape, keep=True) for shape in of_training]
    backward = [backward_instance(dtype, *shape) for shape in of_training]
    for spec, report in (compile_ptxas(specs, ARCH) | compile_ptxas(backward, ARCH)).items():
        threads = block_threads(spec.arguments[3])  # consumers
        assert report.registers == 65536 // threads // 8 * 8, (spec.name, report)  # before they are moved
        assert report.spill_bytes == 0, (spec.name, report)
        assert not report.serialized, (spec.name, report)
        assert report.shared_bytes == 0, (spec.name, report)  # all of it is dynamic


@needs_compiler
@pytest.mark.parametrize(
    ("source", "make_layout", "make_instance", "dims"),
    [
        (forward.SOURCE, forward_layout, block_instance, DIMS),
        (training.SOURCE, backward_layout, backward_instance, TRAINING_DIMS),
    ],
    ids=["forward", "backward"],
)
def test_the_table_of_instances_in_the_source_is_true(source, make_layout, make_instance, dims):
    text = source.read_text(encoding="utf-8")

    def row(name: str) -> list[list[int]]:
        (line,) = re.findall(rf"^//   {re.escape(name)}  +(.*\d)$", text, re.MULTILINE)
        return [[int(number.replace(",", "")) for number in cell.split(" x ")] for cell in re.split(" {2,}", line)]

    layouts = [make_layout(dim, True) for dim in dims]
    assert row("kDim") == [[layout.dim] for layout in layouts]
    assert row("kSlice") == [[layout.shape.slice] for layout in layouts]
    assert row("kConsumers") == [[layout.shape.consumers] for layout in layouts]
    if make_layout is forward_layout:
        assert row("k of a panel") == [[layout.panel_k] for layout in layouts]
        assert row("kCluster") == [[layout.shape.cluster] for layout in layouts]
    for name in ("resident", "stages"):
        counts = [getattr(layout, name) for layout in layouts]
        expected = [[n, layout.tile_bytes] if n else [0] for n, layout in zip(counts, layouts, strict=True)]
        assert row("resident tiles" if name == "resident" else name) == expected
    sizes = sizes_alone(tuple(make_instance(torch.float16, dim, True) for dim in dims))
    assert row("total") == [[each.shared_bytes] for each in sizes]
    assert max(each.shared_bytes for each in sizes) <= BLOCK_SHARED_BYTES


LAYOUTS = [forward_layout(dim, after) for dim in DIMS for after in (True, False)]
LAYOUTS += [backward_layout(dim, after) for dim in TRAINING_DIMS for after in (True, False)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_buffers_are_as_many_as_a_round_needs(layout):
    """The weights of a block without padding; what does not stay comes through a ring that ends where it began."""
    has_next = layout.first + layout.last == 4
    assert layout.tiles * layout.tile_bytes == (8 if has_next else 5) * layout.dim**2 * 2
    assert 0 <= layout.resident <= layout.tiles
    streamed = layout.tiles - layout.resident
    assert streamed % layout.stages == 0 if layout.stages else streamed == 0


@pytest.mark.parametrize("size", sorted({*DIMS, *(layout.shape.slice for layout in LAYOUTS), 16, 48}))
def test_a_lane_has_neighbours_in_memory(size):
    """All dimensions once; the columns of a lane in 32 (or the last 16) are one aligned access to memory."""
    dimensions = dimension_of_column(size)
    assert torch.equal(dimensions.sort().values, torch.arange(size))
    for group in dimensions.split(32):
        lanes = group.view(-1, 4, 2).transpose(0, 1).flatten(1)  # columns 8w + 2t + b of lane t
        elements = lanes.shape[1]
        assert torch.equal(lanes, lanes[:, :1] + torch.arange(elements))
        assert not (lanes[:, 0] % elements).any()


@pytest.mark.parametrize("panel_k", [16, 32, 64])
def test_swizzle_is_that_of_wgmma_and_free_of_bank_conflicts(panel_k):
    """The manual: address bits 4 and up, as many as a row has chunks, are XORed with the bits from 7 up."""
    rows, k = 80, 2 * panel_k
    tile = torch.arange(rows * k).view(rows, k)
    swizzled = swizzle_tile(tile, panel_k)
    n, column = torch.meshgrid(torch.arange(rows), torch.arange(k), indexing="ij")
    address = 2 * (column // panel_k * rows * panel_k + n * panel_k + column % panel_k)
    address ^= (address >> 7 & panel_k // 8 - 1) << 4
    assert torch.equal(swizzled[address // 2], tile)
    banks = address[:, ::8].view(-1, 8, k // 8) // 16 % 8  # of a 16-byte chunk of 8 rows
    assert torch.equal(banks.sort(1).values, torch.arange(8)[:, None].expand_as(banks))


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 128), (torch.float16, 52), (torch.float16, 128)])
def test_without_a_gpu_that_is_the_reason_whatever_the_model(dtype, dim):
    reason = "cpu" if torch.cuda.is_available() else "no NVIDIA GPU"
    assert reason in dense_block_unavailable(torch.device("cpu"), dtype, dim)


@pytest.mark.parametrize(
    ("dtype", "dim", "reason"),
    [
        (torch.float32, 128, "torch.float32"),
        (torch.float16, 52, "it takes d = 64, 80, 96, 128, 160, 192, 256, and the model has 52"),
    ],
)
def test_reasons_not_to_run_on_a_gpu(monkeypatch, dtype, dim, reason):
    monkeypatch.setattr("dense.block.cuda_unavailable", lambda device: None)
    assert reason in dense_block_unavailable(torch.device("cuda"), dtype, dim)


def test_widths_that_do_not_tile_are_refused_with_those_that_do():
    with pytest.raises(ValueError, match=r"d = 112; .* d = 64, 80, 96, 128, 160, 192, 256"):
        pack_block(**parameters(112, has_next=False))


@pytest.mark.parametrize("name", ["out_b", "norm1_w", "up_w", "up_b", "down_w", "norm2_b", "next_qkv_w"])
def test_weights_that_do_not_fit_are_named(name):
    p = parameters(64, has_next=True)
    with pytest.raises(ValueError, match=name):
        pack_block(**p | {name: p[name][:-1]})
    with pytest.raises(ValueError, match=name):
        pack_block(**p | {name: p[name].float()})


def test_inputs_that_do_not_fit_are_named():
    packed = pack_block(**parameters(64, has_next=False))
    rows = torch.zeros(3, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="GPU"):
        dense_block(packed, rows, rows)
    with pytest.raises(ValueError, match="attn_out"):
        dense_block(packed, rows[:2], rows)


@pytest.mark.parametrize("dim", TRAINING_DIMS)
def test_packing_for_training_is_that_of_inference(dim):
    blocks = [parameters(dim, has_next) for has_next in (True, False)]
    matrices = [[block[name] for name in ("out_w", "up_w", "down_w")] for block in blocks]
    matrices[0].append(blocks[0]["next_qkv_w"])
    names = ("out_b", "norm1_w", "norm1_b", "up_b", "down_b", "norm2_w", "norm2_b")
    packing = TrainingPacking(dim, torch.float16, 2, 1e-5, torch.device("cpu"))
    packed = packing.pack(matrices, [[block[name] for name in names] for block in blocks])
    for of_pass, arguments in zip(packed, blocks, strict=True):
        of_inference = pack_block(**arguments)
        assert torch.equal(of_pass.weights, of_inference.weights.flatten())
        assert torch.equal(of_pass.vectors, of_inference.vectors)
        assert torch.equal(of_pass.transposed.sort().values, of_pass.weights.sort().values)


def test_widths_of_training(monkeypatch):
    monkeypatch.setattr("dense.block_training.dense_block_unavailable", lambda *_: None)
    reasons = {dim: training_block_unavailable(torch.device("cuda"), torch.float16, dim) for dim in DIMS}
    assert [dim for dim, reason in reasons.items() if reason is None] == list(TRAINING_DIMS)
    assert "it takes d = 64, 96, 128, and the model has 256" in reasons[256]
