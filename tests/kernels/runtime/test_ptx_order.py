"""PTX of cuda/tiles/forward.cu: the compiler keeps reads of Q, K and V behind griddepcontrol.wait."""

import re
from pathlib import Path

import pytest
import torch
from instances import forward_instance

from fused3s.runtime.jit import OPTIONS, KernelInstance
from fused3s.runtime.source import read_source

pytest.importorskip("cupy", reason="CuPy, which brings NVRTC's interface, is not installed")

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
SPECS = [
    forward_instance(HALF, FLOAT, 64),
    forward_instance(BFLOAT, BFLOAT, 128),
    forward_instance(HALF, HALF, 72),
    forward_instance(HALF, FLOAT, 256, items=2),
    forward_instance(FLOAT, FLOAT, 64),
    forward_instance(FLOAT, FLOAT, 256, items=1, dim_warps=4),
]
COPY = re.compile(r"cp\.async\.c[ag]")
NON_COHERENT_LOAD = re.compile(r"\bld\.global(\.\w+)*\.nc\b")


def ptx_of(spec: KernelInstance) -> list[str]:
    """Lines of the kernel's PTX for sm_90, without comments and the functions around it."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(read_source(spec.source), Path(spec.source).name, [], [])
    try:
        nvrtc.addNameExpression(program, spec.name)
        nvrtc.compileProgram(program, [*OPTIONS, "--gpu-architecture=compute_90"])
        name, ptx = (
            text if isinstance(text, str) else text.decode()
            for text in (nvrtc.getLoweredName(program, spec.name), nvrtc.getPTX(program))
        )
    finally:
        nvrtc.destroyProgram(program)
    entry = re.split(rf"\.entry {re.escape(name)}\(", ptx)[1]
    return [line.split("//")[0] for line in entry.split("\n}\n")[0].splitlines()]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_inputs_are_read_after_griddepcontrol_wait(spec):
    lines = ptx_of(spec)
    (wait,) = (number for number, line in enumerate(lines) if "griddepcontrol.wait" in line)
    loads = [number for number, line in enumerate(lines) if NON_COHERENT_LOAD.search(line)]
    copies = [number for number, line in enumerate(lines) if COPY.search(line)]
    assert len(loads) >= 2 * -(-spec.arguments.dim // spec.arguments.dim_warps // 32), (
        "Q is read by non-coherent loads, which asm volatile does not order"
    )
    assert min(loads) > wait, lines[min(loads)]
    assert [number < wait for number in copies[:2]] == [True, False], "only the work item is copied before"
