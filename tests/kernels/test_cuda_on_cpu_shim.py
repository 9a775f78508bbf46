"""A launch on the CPU finds faults: each of cuda_shim/faults.cu ends it with its message."""

import re
import subprocess
import sys

import pytest
import torch
from poison import poisoned_buffers

from fused3s import plan_attention
from fused3s.runtime.jit import KernelInstance
from tests.cuda_shim import cuda_on_cpu
from tests.cuda_shim.cuda_on_cpu import COMPILER, MODES, NEEDS_COMPILER, SHIM_FOLDER, CpuGpu, CudaError, Mode
from tests.cuda_shim.oracle import GRAPHS, inputs

pytestmark = NEEDS_COMPILER
NEEDS_GCC = pytest.mark.skipif("g++" not in (COMPILER or ""), reason="needs options of GCC")

BLOCKS, THREADS = 3, 64
SOURCE = (SHIM_FOLDER / "faults.cu").read_text(encoding="utf-8")
FAULTS = re.findall(r"^  (k\w+),", SOURCE.split("enum Fault")[1].split("}")[0], re.MULTILINE)
NO_WAIT = r"race: reads shared address .*, which thread \d+ has written at faults\.cu:\d+ by a cp\.async that no wait"
MESSAGES = {
    "kNoWait": NO_WAIT,
    "kPendingGroup": NO_WAIT,
    "kNoBarrier": r"faults\.cu:\d+, .*: race: .* at faults\.cu:\d+, and no barrier orders the two",
    "kShuffle": r"race: reads shared address .*, which thread \d+ has written at faults\.cu:\d+, and no barrier",
    "kOverwrites": r"race: writes shared address .*, which thread \d+ has read at faults\.cu:\d+, and no barrier",
    "kSharedBounds": r"faults\.cu:\d+, block \(0, 0, 0\), thread \d+: 16 bytes at shared address .* are out of bounds",
    "kSharedAlignment": r"faults\.cu:\d+, .*is not aligned to 16 bytes",
    "kSharedStore": r"memory fault at .* in block \(0, 0, 0\), thread",
    "kStaticStore": r"written outside of shared memory",
    "kLocalBounds": r"index out of an array's bounds at .* in block",
    "kGlobalBounds": r"faults\.cu:\d+, .*in no tensor of the launch",
    "kGlobalLoad": r"memory fault",
    "kWritesInput": r"tensor input \[192, 4\] was changed",
    "kKeepsSemaphore": r"tensor semaphore \[1\] was changed",
    "kHalfWarp": r"returned while other lanes|deadlock\n.*16 threads",
    "kTwoCollectives": r"faults\.cu:\d+, .*other lanes of the warp are in another collective, at faults\.cu:\d+",
    "kDeadlock": r"deadlock(\n.*)*48 threads wait at faults\.cu:\d+ for __syncthreads",
    "kBeforePreviousGrid": r"faults\.cu:\d+, .*tensor 0 is used before griddepcontrol\.wait",
    "kIgnoresPreviousGrid": r"no thread of a block executed griddepcontrol\.wait",
    "kEndless": r"not done after 1 seconds",
}


def run(fault: str, mode: Mode) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, expected) of a launch."""
    gpu = CpuGpu(mode, SHIM_FOLDER, cpu_seconds=1)
    kernel = gpu.get_kernel(KernelInstance(SHIM_FOLDER / "faults.cu", "faults"), None)
    source = torch.arange(4.0 * BLOCKS * THREADS).view(-1, 4)
    output = torch.full_like(source, torch.nan)
    semaphore = torch.zeros(1, dtype=torch.int32)
    gpu.launch_kernel(
        kernel,
        (BLOCKS,),
        THREADS,
        {"input": source, "output": output, "semaphore": semaphore},
        kernel.scalars(fault=FAULTS.index(fault)),
        shared_bytes=16 * THREADS,
        overlaps=True,
    )
    return output, source.view(-1, 2, 4).flip(1).reshape(-1, 4)


@pytest.mark.parametrize("mode", MODES)
def test_a_right_kernel_passes(mode):
    output, expected = run("kNone", MODES[mode])
    assert torch.equal(output, expected)


@pytest.mark.parametrize("mode", ["late", "random"])
@pytest.mark.parametrize("fault", MESSAGES)
def test_faults_end_the_launch_with_their_message(fault, mode):
    with pytest.raises(CudaError, match=MESSAGES[fault]):
        run(fault, MODES[mode])
    output, expected = run("kNone", MODES[mode])
    assert torch.equal(output, expected), "a launch after one that failed"


@pytest.fixture
def plain_accesses(monkeypatch):
    """Kernels are compiled with a call at every access, so that races of plain accesses are seen (races.h)."""
    version, flags = cuda_on_cpu._compiler()
    libraries = ["-nodefaultlibs", "-Wl,--no-as-needed", "-lstdc++", "-lm", "-lc", "-lgcc_s"]
    flags = [*flags, "-g1", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", *libraries]
    cuda_on_cpu.build.cache_clear()
    monkeypatch.setattr(cuda_on_cpu, "_compiler", lambda: (version, flags))
    yield
    cuda_on_cpu.build.cache_clear()


@NEEDS_GCC
@pytest.mark.parametrize("mode", MODES)
def test_a_race_of_plain_accesses(plain_accesses, mode):
    with pytest.raises(CudaError, match=r"faults\.cu:\d+, .*: race: writes .* has read at faults\.cu:\d+"):
        run("kPlainOverwrites", MODES[mode])
    output, expected = run("kNone", MODES[mode])
    assert torch.equal(output, expected)


@NEEDS_GCC
@pytest.mark.parametrize("mode", ["late", "random"])
@pytest.mark.parametrize(
    ("backend", "dtype", "dim"),
    [
        ("fused3s", torch.float16, 64),
        ("fused3s_paper", torch.float16, 64),
        ("dfgnn_tiling", torch.float32, 40),
        ("dfgnn_hyper", torch.float32, 64),
    ],
)
def test_no_access_of_the_kernels_races(monkeypatch, plain_accesses, backend, dtype, dim, mode):
    graph = GRAPHS["wide"]()
    # Many SMs: fused3s splits windows.
    with cuda_on_cpu.cuda_on_cpu(MODES[mode], num_sms=132), poisoned_buffers(monkeypatch):
        plan = plan_attention(graph, backend=backend, device="cpu", dtype=dtype, head_dim=dim)
        plan(*inputs(graph, 1, dim, dtype))


def test_every_fault_is_tested():
    assert {"kNone", "kPlainOverwrites", *MESSAGES} == set(FAULTS)


def test_one_call_runs_from_any_folder():
    command = [sys.executable, SHIM_FOLDER / "one_call.py", "one_edge_repeated", "--dim", "16"]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *_, kernel, verdict = done.stdout.splitlines()
    assert "<Element::kHalf, 16, " in kernel
    assert verdict == "one_edge_repeated: within the bounds of float64"
