"""Compilation of the CUDA sources: a frozen spec names one template instance, NVRTC builds it once.

CuPy keeps compiled modules on disk (CUPY_CACHE_DIR, ~/.cupy/kernel_cache). Its key is the source text, so project
headers are pasted into the text. `compile_ptxas` builds for any architecture without a GPU and returns the report of
ptxas, for tests and for readers who count registers.
"""

import logging
import re
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from ..errors import KernelCompileError

logger = logging.getLogger(__name__)

CUDA_FOLDER = Path(__file__).parents[1] / "cuda"
OPTIONS = ("--std=c++17",)


class Element(Enum):
    """As in cuda/common.cuh: a type in memory, and of float32 inputs the number of TF32 terms of a product."""

    HALF = "kHalf"
    BFLOAT16 = "kBFloat16"
    FLOAT = "kFloat"
    TF32 = "kTF32"

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self]


DTYPES = {
    Element.HALF: torch.float16,
    Element.BFLOAT16: torch.bfloat16,
    Element.FLOAT: torch.float32,
    Element.TF32: torch.float32,
}
ELEMENTS = {torch.float16: Element.HALF, torch.bfloat16: Element.BFLOAT16, torch.float32: Element.FLOAT}


def input_element(dtype: torch.dtype) -> Element:
    """How tensor cores take inputs of a type: float32 by torch.get_float32_matmul_precision(), in three TF32 terms for
    "highest", in one for "high"."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() == "high":
        return Element.TF32
    return ELEMENTS[dtype]


class KernelSpec(Protocol):
    """One template instance: a frozen, hashable description of the compile-time choices.

    Attributes:
        source: name of the CUDA source in kernels/cuda, or the path of one elsewhere.
        name: the C++ name of the instance, template arguments included.

    Optional attributes: `shared_bytes`, the dynamic shared memory of a block; `arch`, such as "sm_90a", for kernels
    with instructions of that architecture alone (the others are compiled for the GPU at hand).
    """

    @property
    def source(self) -> str | Path: ...

    @property
    def name(self) -> str: ...


def cpp_name(function: str, *arguments: Element | torch.dtype | bool | int) -> str:
    """C++ name of a template instance: `function<Element::kHalf, 128, true>`."""

    def cpp(argument: Element | torch.dtype | bool | int) -> str:
        if isinstance(argument, torch.dtype):
            argument = ELEMENTS[argument]
        if isinstance(argument, Element):
            return f"Element::{argument.value}"
        return str(argument).lower()

    return f"{function}<{', '.join(map(cpp, arguments))}>"


@dataclass(frozen=True)
class PtxasReport:
    """Resources of one instance: registers of a thread, static shared memory of a block, spilled bytes.

    `serialized` says that ptxas waits after every wgmma.
    """

    registers: int
    shared_bytes: int
    spill_bytes: int
    serialized: bool


@cache
def read_source(source: str | Path) -> str:
    """Text of a CUDA source with its headers (`#include "..."`, beside it or in kernels/cuda) pasted in, each once."""
    pasted: set[str] = set()
    source = CUDA_FOLDER / source

    def paste(name: str) -> str:
        if name in pasted:
            return ""
        pasted.add(name)
        path = next(each / name for each in (source.parent, CUDA_FOLDER) if (each / name).exists())
        text = path.read_text(encoding="utf-8").replace("#pragma once\n", "")
        return re.sub(r'^#include "(.+)"$', lambda include: paste(include[1]), text, flags=re.MULTILINE)

    return paste(source.name)


@dataclass(frozen=True, eq=False)
class Kernel:
    """An instance on a GPU.

    Attributes:
        address: its CUfunction.
        function: its CuPy function, which keeps the module loaded.
    """

    address: int
    function: Any


_lock = threading.Lock()
_kernels: dict[tuple[KernelSpec, int], Kernel] = {}


def get_kernel(spec: KernelSpec, device_index: int) -> Kernel:
    """An instance on a GPU, compiled and loaded on first use.

    Raises:
        KernelCompileError: NVRTC refused the source.
    """
    kernel = _kernels.get((spec, device_index))
    if kernel is None:
        with _lock:
            kernel = _kernels.get((spec, device_index))
            if kernel is None:
                kernel = _kernels[spec, device_index] = _load(spec, device_index)
    return kernel


def _load(spec: KernelSpec, device_index: int) -> Kernel:
    import cupy

    logger.info("compiling %s (on first use; CuPy keeps the result on disk)", spec.name)
    start = time.perf_counter()
    source = read_source(spec.source)
    # CuPy adds the plain architecture of the GPU; NVRTC takes the more specific of the two.
    arch = getattr(spec, "arch", None)
    options = (*OPTIONS, f"--gpu-architecture={arch}") if arch else OPTIONS
    try:
        with cupy.cuda.Device(device_index):
            module = cupy.RawModule(code=source, options=options, name_expressions=[spec.name])
            function = module.get_function(spec.name)
            if shared_bytes := getattr(spec, "shared_bytes", 0):
                _allow_shared_memory(function, spec, shared_bytes, device_index)
            address = function.kernel.ptr
    except (cupy.cuda.compiler.CompileException, cupy.cuda.nvrtc.NVRTCError) as error:
        raise _compile_error(spec.name, source, str(error)) from error
    logger.info("compiled %s in %.1f s", spec.name, time.perf_counter() - start)
    return Kernel(address, function)


def _allow_shared_memory(function: Any, spec: KernelSpec, shared_bytes: int, device_index: int) -> None:
    """Opt in to more dynamic shared memory than the 48 KiB that every kernel may use."""
    offered = torch.cuda.get_device_properties(device_index).shared_memory_per_block_optin
    if shared_bytes > offered:
        raise ValueError(f"{spec.name} needs {shared_bytes} bytes of shared memory a block; this GPU offers {offered}")
    function.max_dynamic_shared_size_bytes = shared_bytes


def compile_ptxas(specs: Sequence[KernelSpec], arch: str) -> dict[KernelSpec, PtxasReport]:
    """Compile instances of one source for `arch` ("sm_80", "sm_90", ...) and read ptxas's report. Needs no GPU.

    Raises:
        KernelCompileError: NVRTC refused the source.
    """
    from cupy.cuda import nvrtc

    source = read_source(specs[0].source)
    program = nvrtc.createProgram(source, Path(specs[0].source).name, [], [])
    try:
        for spec in specs:
            nvrtc.addNameExpression(program, spec.name)
        options = [*OPTIONS, f"--gpu-architecture={arch}", "--ptxas-options=-v"]
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise _compile_error(f"{specs[0].name} and others for {arch}", source, log) from error
        log = nvrtc.getProgramLog(program)
        return {spec: _parse_report(log, nvrtc.getLoweredName(program, spec.name)) for spec in specs}
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


def _compile_error(name: str, source: str, log: str) -> KernelCompileError:
    with tempfile.NamedTemporaryFile("w", suffix=".cu", prefix="fused3s-", delete=False) as file:
        file.write(source)
    return KernelCompileError(f"NVRTC could not compile {name}; the source is saved as {file.name}\n{log}")
