"""Every instance compiles without a GPU and stays within its recorded budget of registers, shared memory, spills."""

import pytest
import torch

from kernels import KernelCompileError, jit
from kernels.backends.fused3s_paper import PaperKernelSpec
from kernels.jit import compile_ptxas

pytest.importorskip("cupy", reason="CuPy, which brings NVRTC's interface, is not installed")

# Most registers of any instance with dimensions up to the key; 64 leave room for four blocks of 8 warps an SM.
REGISTER_BUDGET = {128: 64, 256: 72}
PLAIN_REGISTER_BUDGET = {128: 64, 256: 80}


def budget(spec: PaperKernelSpec) -> int:
    limits = REGISTER_BUDGET if spec.permuted else PLAIN_REGISTER_BUDGET
    return next(registers for dim, registers in limits.items() if spec.dim <= dim)


def shared_bytes(dim: int, warps: int) -> int:
    """The plan in the head of fused3s_paper.cu."""
    pairs, out_blocks = -(-dim // 32), -(-dim // 16)
    return pairs * 2 * 32 * 16 + warps * 2 * 32 * 4 + out_blocks * 8 * 32 * 4 + 16 * warps * 4


def instances() -> list[PaperKernelSpec]:
    types = [
        (torch.float16, torch.float32),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ]
    every_dim = [PaperKernelSpec(*pair, dim) for pair in types for dim in range(8, 257, 8)]
    switches = [
        PaperKernelSpec(torch.float16, torch.float32, dim, reordered=reordered, permuted=permuted)
        for dim in (64, 128, 256)
        for reordered, permuted in ((False, True), (True, False), (False, False))
    ]
    return every_dim + switches


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90"])
def test_every_instance_is_within_its_budget(arch):
    specs = instances()
    reports = compile_ptxas(specs, arch)
    assert len(reports) == len(specs)
    for spec, report in reports.items():
        assert 16 <= report.registers <= budget(spec), (arch, spec.name, report)
        assert report.shared_bytes == shared_bytes(spec.dim, spec.warps), (arch, spec.name, report)
        assert report.spill_bytes == 0, (arch, spec.name, report)


def test_compile_error_names_instance_log_and_saved_source(monkeypatch, tmp_path):
    monkeypatch.setattr(jit.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(jit, "read_source", lambda name: "this is not CUDA")
    with pytest.raises(KernelCompileError) as caught:
        compile_ptxas([PaperKernelSpec(torch.float16, torch.float32, 64)], "sm_90")
    (saved,) = tmp_path.glob("*.cu")
    assert saved.read_text() == "this is not CUDA"
    for part in ("fused3s_paper<Element::kHalf, Element::kFloat, 64", "sm_90", str(saved), "error"):
        assert part in str(caught.value)


def test_headers_are_pasted_into_the_source():
    source = jit.read_source("fused3s_paper.cu")
    assert "#include" not in source
    assert "mma.sync.aligned.m16n8k16" in source
