"""Every instance compiles without a GPU and stays within its recorded budget of registers, shared memory, spills."""

import pytest
import torch

from kernels import KernelCompileError
from kernels.backends.baseline import KernelInstance
from kernels.backends.dfgnn import DFGNNHyperBackend, DFGNNTilingBackend
from kernels.backends.flashsparse import Kernels
from kernels.backends.fused3s import FusedKernelSpec
from kernels.backends.fused3s_paper import PaperKernelSpec
from kernels.runtime import jit
from kernels.runtime.jit import compile_ptxas

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


def fast_instances(arch: str) -> list[FusedKernelSpec]:
    """Every dimension of the fast kernel once, and some with every type."""
    half, bfloat, single = torch.float16, torch.bfloat16, torch.float32
    specs = [FusedKernelSpec(half, single, dim) for dim in range(8, 257, 8 if arch == "sm_90" else 40)]
    for dim in (64, 128, 256):
        specs += [FusedKernelSpec(*types, dim) for types in ((half, half), (bfloat, single), (bfloat, bfloat))]
    return specs


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90"])
def test_the_fast_kernel_is_within_its_budget(arch):
    for spec, report in compile_ptxas(fast_instances(arch), arch).items():
        # Three blocks of four warps fit an SM with 170 registers a thread, four with 128.
        allowed = 128 if spec.dim <= 64 else 170 if spec.dim <= 128 else 255
        assert 16 <= report.registers <= allowed, (arch, spec.name, report)
        assert report.shared_bytes == 0, (arch, spec.name, report)  # all of it is dynamic
        assert report.spill_bytes == 0, (arch, spec.name, report)


# Most registers of any instance of a baseline's kernel. 256 threads of dfgnn_hyper with 104 still put two blocks on an
# SM, and only head dimensions above 160 that 64 does not divide need more than 80.
BASELINE_BUDGET = {
    "dfgnn_tiling": 80,
    "dfgnn_hyper": 104,
    "flashsparse_sddmm": 80,
    "flashsparse_statistics": 40,
    "flashsparse_normalise": 40,
    "flashsparse_spmm": 56,
    "flashsparse_merge": 40,
}
BASELINE_SHARED_BYTES = {"dfgnn_tiling": 2 * 32 * 4}  # static; dfgnn_hyper's is dynamic, the others have none


def baseline_instances() -> dict[str, set[KernelInstance]]:
    """By source: every instance of DF-GNN's kernels; FlashSparse's for dimensions of each kind of tail."""
    flashsparse = set()
    for dtype in (torch.float16, torch.bfloat16):
        for out_dtype in (torch.float32, dtype):
            for dim in (8, 16, 24, 32, 64, 72, 96, 128, 192, 200, 256):
                for stable in (False, True):
                    flashsparse |= set(Kernels.of(dtype, out_dtype, dim, stable).all())
    return {
        "dfgnn_tiling.cu": {DFGNNTilingBackend().instance(dim) for dim in range(1, 257)},
        "dfgnn_hyper.cu": {DFGNNHyperBackend().instance(dim) for dim in range(1, 257)},
        "flashsparse.cu": flashsparse,
    }


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90"])
@pytest.mark.parametrize("source", baseline_instances())
def test_every_baseline_is_within_its_budget(source, arch):
    specs = sorted(baseline_instances()[source], key=lambda spec: spec.name)
    reports = compile_ptxas(specs, arch)
    assert {spec.function for spec in reports} == {spec.function for spec in specs}
    for spec, report in reports.items():
        assert 16 <= report.registers <= BASELINE_BUDGET[spec.function], (arch, spec.name, report)
        assert report.shared_bytes == BASELINE_SHARED_BYTES.get(spec.function, 0), (arch, spec.name, report)
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
