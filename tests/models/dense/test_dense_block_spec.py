"""The dense block without running it: what its instances need, and which weights and inputs are refused."""

from itertools import chain

import pytest
import torch
from dense_cases import parameters
from ptxas import compile_ptxas

from models.dense.block import block_instance, pack_block
from models.dense.block_training import TRAINING_DIMS, TrainingPacking, backward_instance
from models.dense.weights import (
    ARCH,
    DIMS,
    backward_layout,
    block_threads,
    forward_layout,
)


@pytest.mark.parametrize("dim", DIMS)  # the compiler takes seconds for each
def test_instances_keep_everything_in_registers(dim):
    pytest.importorskip("cupy", reason="CuPy, which brings NVRTC's interface, is not installed")
    dtype = (torch.float16, torch.bfloat16)[DIMS.index(dim) % 2]  # registers do not depend on the type
    shapes = [(dim, after) for after in (True, False)]
    of_training = shapes if dim in TRAINING_DIMS else []
    specs = [block_instance(dtype, *shape) for shape in shapes]
    specs += [block_instance(dtype, *shape, keep=True) for shape in of_training]
    backward = [backward_instance(dtype, *shape) for shape in of_training]
    reports = [compile_ptxas(instances, ARCH) for instances in (specs, backward) if instances]
    for spec, report in chain.from_iterable(each.items() for each in reports):
        threads = block_threads(spec.arguments[3])  # consumers
        assert report.registers == 65536 // threads // 8 * 8, (spec.name, report)  # before they are moved
        assert report.spill_bytes == 0, (spec.name, report)
        assert not report.serialized, (spec.name, report)
        assert report.shared_bytes == 0, (spec.name, report)  # all of it is dynamic


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


@pytest.mark.parametrize("name", ["out_b", "norm1_w", "up_w", "up_b", "down_w", "norm2_b", "next_qkv_w"])
def test_weights_that_do_not_fit_are_named(name):
    p = parameters(64, has_next=True)
    with pytest.raises(ValueError, match=name):
        pack_block(**p | {name: p[name][:-1]})
    with pytest.raises(ValueError, match=name):
        pack_block(**p | {name: p[name].float()})


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
