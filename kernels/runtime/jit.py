"""Compilation of the CUDA sources: a `KernelInstance` names one template instance, which NVRTC compiles once.

CuPy keeps compiled modules on disk (CUPY_CACHE_DIR, ~/.cupy/kernel_cache). Its key is the source text, so project
headers are inlined into the text.
"""

import ctypes
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import KernelCompileError
from . import debug
from .kernel_cache import import_cupy
from .params import ParamsLayout, params_layout
from .source import read_source

logger = logging.getLogger(__name__)

OPTIONS = ("--std=c++17",)
RESERVED_BYTES = 1024  # shared memory that the system takes per block


class Element(Enum):
    """Element types of cuda/common.cuh: the type in memory, and for float32 inputs the TF32 terms of a product.

    Attributes:
        cpp: name in C++.
        dtype: type in memory.
    """

    HALF = "kHalf", torch.float16
    BFLOAT16 = "kBFloat16", torch.bfloat16
    FLOAT = "kFloat", torch.float32
    TF32 = "kTF32", torch.float32

    def __init__(self, cpp: str, dtype: torch.dtype) -> None:
        self.cpp, self.dtype = cpp, dtype


ELEMENTS = {element.dtype: element for element in (Element.HALF, Element.BFLOAT16, Element.FLOAT)}


def input_element(dtype: torch.dtype) -> Element:
    """The element type for inputs of `dtype`. float32 follows torch.get_float32_matmul_precision(): three TF32 terms
    for "highest", one for "high"."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() == "high":
        return Element.TF32
    return ELEMENTS[dtype]


@dataclass(frozen=True)
class KernelInstance:
    """One instance of a kernel template.

    Attributes:
        source: name of the CUDA source in kernels/cuda, or the path of one elsewhere.
        function: name of the kernel.
        arguments: template arguments in the order of the source; a NamedTuple if the host reads them by name.
        arch: such as "sm_90a", for architecture-specific instructions; None: the GPU's architecture.
        score: normalised expression of its score term (kernels/terms/score_term.py).
    """

    source: str | Path
    function: str
    arguments: tuple[Element | torch.dtype | bool | int, ...] = ()
    arch: str | None = None
    score: str | None = None

    def __post_init__(self) -> None:
        # Cached, since every launch looks up its instance: hashing all fields takes a fifth of a launch.
        fields = self.source, self.function, self.arguments, self.arch, self.score
        object.__setattr__(self, "_hash", hash(fields))

    def __hash__(self) -> int:
        return self._hash

    @property
    def name(self) -> str:
        """C++ name: `function<Element::kHalf, 128, true>`."""
        return cpp_name(self.function, *self.arguments) if self.arguments else self.function

    @property
    def sizes_name(self) -> str:
        """C++ name of the address of its `KernelSizes`, a variable template with the kernel's parameters."""
        return "&" + cpp_name(f"{self.function}_sizes", *self.arguments)

    @property
    def exports_sizes(self) -> bool:
        return f" {self.function}_sizes = {{" in read_source(self.source)


class KernelSizes(NamedTuple):
    """Sizes that a source computes for an instance (struct KernelSizes of cuda/common.cuh); 0 if it has none.

    Attributes:
        shared_bytes: dynamic shared memory of a block.
        partial_floats: floats of a partial result.
        blocks_per_sm: minimum blocks per SM of the launch bounds.
        block_items: work items, heads, columns or rows per block.
    """

    shared_bytes: int = 0
    partial_floats: int = 0
    blocks_per_sm: int = 0
    block_items: int = 0

    def resident_blocks(self, sm_shared_bytes: int) -> int:
        """Blocks resident on an SM, limited by launch bounds and shared memory."""
        return max(1, min(sm_shared_bytes // (self.shared_bytes + RESERVED_BYTES), self.blocks_per_sm))


def cpp_name(function: str, *arguments: Element | torch.dtype | bool | int) -> str:
    """C++ name of a template instance: `function<Element::kHalf, 128, true>`."""

    def cpp(argument: Element | torch.dtype | bool | int) -> str:
        if isinstance(argument, torch.dtype):
            argument = ELEMENTS[argument]
        if isinstance(argument, Element):
            return f"Element::{argument.cpp}"
        return str(argument).lower()

    return f"{function}<{', '.join(map(cpp, arguments))}>"


@dataclass(frozen=True, eq=False)
class Kernel:
    """An instance on a GPU.

    Attributes:
        name: C++ name of the instance.
        address: its CUfunction.
        sizes: sizes computed by its source; zeros if it exports none.
        params: layout of its struct Params.
        scalars: `params.pack_scalars`.
        function: its CuPy function, which keeps the module loaded.
    """

    name: str
    address: int
    sizes: KernelSizes
    params: ParamsLayout
    scalars: Callable[..., bytes]
    function: Any


_Key = tuple[KernelInstance, int]
# Key: instance, GPU. No bound, as long as the process: kernels are never unloaded, since launches in flight and CUDA
# graphs use them. `ScoreTerm` warns before they get many.
_kernels: dict[_Key, Kernel] = {}
_compilations: dict[_Key, Future[Kernel]] = {}  # running; failed ones until `get_kernel` raises the error
_lock = threading.Lock()  # guards both; not held while compiling


def get_kernel(instance: KernelInstance, device_index: int) -> Kernel:
    """An instance on a GPU, compiled and loaded on first use, or by `compile_ahead`, which it waits for.

    Raises:
        KernelCompileError: NVRTC refused the source.
        ValueError: it needs more shared memory than the GPU has.
    """
    key = instance, device_index
    kernel = _kernels.get(key)
    if kernel is None:
        try:
            kernel = _compilation(key).result()
        except BaseException:
            with _lock:  # the next call tries again
                _compilations.pop(key, None)
            raise
    return kernel


def compile_ahead(instances: Iterable[KernelInstance], device_index: int) -> None:
    """Begin to compile instances side by side, in this order, and return at once. `get_kernel` raises their errors."""
    keys = [(each, device_index) for each in dict.fromkeys(instances)]
    keys = [key for key in keys if key not in _kernels and key not in _compilations]
    if keys:
        import_cupy()
        pool = ThreadPoolExecutor(min(len(keys), os.cpu_count() or 1), "fused3s-compile")
        for key in keys:
            pool.submit(_compile_in_thread, key)
        pool.shutdown(wait=False)  # its threads end after the last instance


def _compile_in_thread(key: _Key) -> None:
    from cupy.cuda import runtime

    runtime.setDevice(key[1])  # creates the thread's context
    _compilation(key)


def _compilation(key: _Key) -> Future[Kernel]:
    """The compilation of an instance, done by this thread unless another one has begun it."""
    with _lock:
        future = _compilations.get(key)
        if future is not None:
            return future
        future = Future()
        if key in _kernels:
            future.set_result(_kernels[key])
            return future
        _compilations[key] = future
    try:
        kernel = _load(*key)
    except BaseException as error:  # also Ctrl-C: other threads wait
        future.set_exception(error)
        return future
    with _lock:
        _kernels[key] = kernel
        _compilations.pop(key, None)
    future.set_result(kernel)
    return future


@lru_cache
def instance_sizes(instances: tuple[KernelInstance, ...], device_index: int | None) -> tuple[KernelSizes, ...]:
    """Sizes of instances of one source on a GPU (None: the current one), without compiling the kernels; for plans.

    Raises:
        KernelCompileError: NVRTC refused the source.
    """
    names = [instance.sizes_name for instance in instances]
    with _device(device_index):
        module = _compile(instances[0], names, f"the sizes of {instances[0].name}")
        return tuple(_read_sizes(module, name) for name in names)


def _load(instance: KernelInstance, device_index: int) -> Kernel:
    logger.info("compiling %s (on first use; CuPy keeps the result on disk)", instance.name)
    start = time.perf_counter()
    exported = [instance.sizes_name] if instance.exports_sizes else []
    with _device(device_index):
        module = _compile(instance, [instance.name, *exported], instance.name)
        sizes = _read_sizes(module, exported[0]) if exported else KernelSizes()
        function = module.get_function(instance.name)
        if sizes.shared_bytes:
            _allow_shared_memory(function, instance, sizes.shared_bytes, device_index)
        address = function.kernel.ptr
    logger.info("compiled %s in %.1f s", instance.name, time.perf_counter() - start)
    if debug.ENABLED:
        debug.report(
            f"loaded {instance.name}: {function.num_regs} registers, {function.local_size_bytes} bytes of local memory "
            f"a thread, {sizes}"
        )
    params = params_layout(instance.source, instance.function)
    return Kernel(instance.name, address, sizes, params, params.pack_scalars, function)


def _device(device_index: int | None) -> Any:
    return import_cupy().cuda.Device(device_index)


def _compile(instance: KernelInstance, names: Sequence[str], what: str) -> Any:
    """CuPy module with `names` from the instance's source, loaded on the current GPU."""
    cupy, source = import_cupy(), read_source(instance.source, instance.score)
    # CuPy also passes the GPU's plain architecture; NVRTC uses the more specific one.
    options = (*OPTIONS, f"--gpu-architecture={instance.arch}") if instance.arch else OPTIONS
    try:
        module = cupy.RawModule(code=source, options=options, name_expressions=names)
        module.compile()
        return module
    except (cupy.cuda.compiler.CompileException, cupy.cuda.nvrtc.NVRTCError) as error:
        raise compile_error(what, source, str(error)) from error


def _read_sizes(module: Any, name: str) -> KernelSizes:
    """The value of a variable of a loaded module."""
    from cupy.cuda import driver, runtime

    loaded = module.module
    sizes = (ctypes.c_int * len(KernelSizes._fields))()
    address = driver.moduleGetGlobal(loaded.ptr, loaded.mapping[name])
    runtime.memcpy(ctypes.addressof(sizes), address, ctypes.sizeof(sizes), runtime.memcpyDeviceToHost)
    return KernelSizes(*sizes)


def _allow_shared_memory(function: Any, instance: KernelInstance, shared_bytes: int, device_index: int) -> None:
    """Opt in to more than 48 KiB of dynamic shared memory."""
    offered = torch.cuda.get_device_properties(device_index).shared_memory_per_block_optin
    if shared_bytes > offered:
        raise ValueError(
            f"{instance.name} needs {shared_bytes} bytes of shared memory a block; this GPU offers {offered}"
        )
    function.max_dynamic_shared_size_bytes = shared_bytes


def compile_error(name: str, source: str, log: str) -> KernelCompileError:
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".cu", prefix="fused3s-", delete=False) as file:
        file.write(source)
    return KernelCompileError(f"NVRTC could not compile {name}; the source is saved as {file.name}\n{log}")
