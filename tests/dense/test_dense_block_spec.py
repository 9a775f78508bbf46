"""The dense block without running it: what its instances need, and which weights and inputs are refused."""

import dataclasses
import re

import pytest
import torch
from dense_cases import SPECS, parameters

from dense.block import DenseBlockSpec, dense_block, dense_block_unavailable, pack_block
from dense.block_training import (
    TRAINING_DIMS,
    DenseBackwardSpec,
    TrainingPacking,
    training_block_unavailable,
)
from dense.weights import BLOCK_SHARED_BYTES, DIMS, dimension_of_column, swizzle_tile
from kernels.runtime.jit import compile_ptxas
from kernels.runtime.source import CUDA_FOLDER


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_instances_keep_everything_in_registers(dtype):
    pytest.importorskip("cupy", reason="CuPy, which brings NVRTC's interface, is not installed")
    # Each dimension in one of the types: the compiler takes seconds for each, and registers do not depend on the type.
    turn = (torch.float16, torch.bfloat16).index(dtype)
    shapes = [spec for spec in SPECS if DIMS.index(spec.dim) % 2 == turn]
    specs = [DenseBlockSpec(dtype, spec.dim, spec.has_next) for spec in shapes]
    of_training = [spec for spec in specs if spec.dim in TRAINING_DIMS]
    specs += [dataclasses.replace(spec, keep=True) for spec in of_training]
    backward = [DenseBackwardSpec(dtype, spec.dim, spec.has_next) for spec in of_training]
    reports = compile_ptxas(specs, DenseBlockSpec.arch) | compile_ptxas(backward, DenseBackwardSpec.arch)
    for spec, report in reports.items():
        assert report.registers == 65536 // spec.threads // 8 * 8, (spec.name, report)  # before they are moved
        assert report.spill_bytes == 0, (spec.name, report)
        assert not report.serialized, (spec.name, report)
        assert report.shared_bytes == 0, (spec.name, report)  # all of it is dynamic


@pytest.mark.parametrize(("kind", "dims"), [(DenseBlockSpec, DIMS), (DenseBackwardSpec, TRAINING_DIMS)])
def test_the_table_of_instances_in_the_source_is_true(kind, dims):
    source = (CUDA_FOLDER / kind.source).read_text(encoding="utf-8")

    def row(name: str) -> list[list[int]]:
        (line,) = re.findall(rf"^//   {re.escape(name)}  +(.*\d)$", source, re.MULTILINE)
        return [[int(number.replace(",", "")) for number in cell.split(" x ")] for cell in re.split(" {2,}", line)]

    specs = [kind(torch.float16, dim, True) for dim in dims]
    assert row("kDim") == [[spec.dim] for spec in specs]
    assert row("kSlice") == [[spec.shape.slice] for spec in specs]
    assert row("kConsumers") == [[spec.shape.consumers] for spec in specs]
    if kind is DenseBlockSpec:
        assert row("k of a panel") == [[spec.panel_k] for spec in specs]
        assert row("kCluster") == [[spec.shape.cluster] for spec in specs]
    for name in ("resident", "stages"):
        counts = [getattr(spec, name) for spec in specs]
        expected = [[n, spec.tile_bytes] if n else [0] for n, spec in zip(counts, specs, strict=True)]
        assert row("resident tiles" if name == "resident" else name) == expected
    assert row("total") == [[spec.shared_bytes] for spec in specs]


BACKWARD_SPECS = [DenseBackwardSpec(torch.float16, dim, after) for dim in TRAINING_DIMS for after in (True, False)]


@pytest.mark.parametrize("spec", [*SPECS, *BACKWARD_SPECS], ids=lambda spec: spec.name)
def test_buffers_fit_and_are_as_many_as_a_round_needs(spec):
    """The weights of a block without padding; what does not stay comes through a ring that ends where it began."""
    assert spec.tiles * spec.tile_bytes == (8 if spec.has_next else 5) * spec.dim**2 * 2
    assert spec.shared_bytes <= BLOCK_SHARED_BYTES
    assert 0 <= spec.resident <= spec.tiles
    streamed = spec.tiles - spec.resident
    assert streamed % spec.stages == 0 if spec.stages else streamed == 0


@pytest.mark.parametrize("size", sorted({*DIMS, *(spec.shape.slice for spec in SPECS), 16, 48}))
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
    for of_pass, block in zip(packed, blocks, strict=True):
        of_inference = pack_block(**block)
        assert torch.equal(of_pass.weights, of_inference.weights.flatten())
        assert torch.equal(of_pass.vectors, of_inference.vectors)
        assert torch.equal(of_pass.transposed.sort().values, of_pass.weights.sort().values)


def test_widths_of_training(monkeypatch):
    monkeypatch.setattr("dense.block_training.dense_block_unavailable", lambda *_: None)
    reasons = {dim: training_block_unavailable(torch.device("cuda"), torch.float16, dim) for dim in DIMS}
    assert [dim for dim, reason in reasons.items() if reason is None] == list(TRAINING_DIMS)
    assert "it takes d = 64, 96, 128, and the model has 256" in reasons[256]
