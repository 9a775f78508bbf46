"""Compilation of instances for any architecture, without a GPU: ptxas's report of registers and spills."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fused3s.runtime.jit import OPTIONS, KernelInstance, compile_error
from fused3s.runtime.kernel_cache import import_cupy
from fused3s.runtime.source import read_source


@dataclass(frozen=True)
class PtxasReport:
    """Resources of one instance: registers of a thread, static shared memory of a block, spilled bytes.

    `serialized`: whether ptxas serialises wgmma.
    """

    registers: int
    shared_bytes: int
    spill_bytes: int
    serialized: bool


def compile_ptxas(instances: Sequence[KernelInstance], arch: str) -> dict[KernelInstance, PtxasReport]:
    """Compile instances of one source and score term for `arch` ("sm_80", "sm_90", ...) and read ptxas's report. Needs
    no GPU.

    Raises:
        KernelCompileError: NVRTC refused the source.
    """
    nvrtc, source = import_cupy().cuda.nvrtc, read_source(instances[0].source, instances[0].score)
    program = nvrtc.createProgram(source, Path(instances[0].source).name, [], [])
    try:
        for instance in instances:
            nvrtc.addNameExpression(program, instance.name)
        options = [*OPTIONS, f"--gpu-architecture={arch}", "--ptxas-options=-v"]
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise compile_error(f"{instances[0].name} and others for {arch}", source, log) from error
        log = nvrtc.getProgramLog(program)
        return {instance: _parse_report(log, nvrtc.getLoweredName(program, instance.name)) for instance in instances}
    finally:
        nvrtc.destroyProgram(program)


def _parse_report(log: str, lowered_name: str) -> PtxasReport:
    entry = log.split(f"Compiling entry function '{lowered_name}'", maxsplit=1)[1]
    entry = entry.split("Compiling entry function", maxsplit=1)[0]

    def number(pattern: str) -> int:
        match = re.search(pattern, entry)
        return int(match[1]) if match else 0

    return PtxasReport(
        registers=number(r"Used (\d+) registers"),
        shared_bytes=number(r"(\d+) bytes smem"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        serialized=bool(re.search(rf"wgmma.mma_async instructions are serialized .*'{lowered_name}'", log)),
    )
