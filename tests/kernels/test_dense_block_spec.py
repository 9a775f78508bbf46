"""The dense block without running it: what its instances need, and which weights and inputs are refused."""

import pytest
import torch
from dense_cases import SPECS, parameters

from kernels.dense_block import DenseBlockSpec, dense_block, dense_block_unavailable, pack_block
from kernels.runtime.jit import compile_ptxas


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_instances_keep_everything_in_registers(dtype):
    pytest.importorskip("cupy", reason="CuPy, which brings NVRTC's interface, is not installed")
    specs = [DenseBlockSpec(dtype, spec.dim, spec.has_next) for spec in SPECS]
    for spec, report in compile_ptxas(specs, DenseBlockSpec.arch).items():
        assert report.registers == 65536 // spec.threads // 8 * 8, (spec.name, report)  # before they are moved
        assert report.spill_bytes == 0, (spec.name, report)
        assert not report.serialized, (spec.name, report)
        assert report.shared_bytes == 0, (spec.name, report)  # all of it is dynamic


@pytest.mark.parametrize(
    ("dtype", "dim", "reason"),
    [(torch.float32, 128, "torch.float32"), (torch.float16, 96, "96"), (torch.float16, 128, "cpu")],
)
def test_reasons_not_to_run(dtype, dim, reason):
    if reason == "cpu" and not torch.cuda.is_available():
        reason = "no NVIDIA GPU"
    assert reason in dense_block_unavailable(torch.device("cpu"), dtype, dim)


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
