"""The repository's CUDA sources, compiled by the host's C++ compiler and run on CPU tensors; see README.md."""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest
import torch
from plan_oracle import plan_on_cpu

from bench.baselines import dfgnn, flashsparse, fused3s_paper
from fused3s.backends import cuda
from fused3s.fused import backend as fused3s
from fused3s.fused.edges import added_features, wide_features
from fused3s.fused.edges import backward as fused3s_edges_backward
from fused3s.fused.edges import features as feature_products
from fused3s.fused.edges import forward as fused3s_edges
from fused3s.fused.tiles import backward as fused3s_backward
from fused3s.fused.tiles import forward as fused3s_forward
from fused3s.runtime import gather_rows, semaphores
from fused3s.runtime.device import GPULimits
from fused3s.runtime.jit import KernelInstance, KernelSizes
from fused3s.runtime.params import params_layout
from fused3s.runtime.source import CUDA_FOLDER, EXPRESSION
from fused3s.terms.score_source import expression_source
from models.dense import batch_norm, residual_norm
from models.dense import block as dense_block
from models.dense import block_training as dense_block_training
from parallel import rank_rows

SHIM_FOLDER = Path(__file__).parent
COMPILER = shutil.which("g++") or shutil.which("clang++")
# Marks of tests that run kernels here.
NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler found (g++ or clang++)")
ON_SHIM = [NEEDS_COMPILER, pytest.mark.usefixtures("one_thread")]
# -O1 gives the shortest sum of compiling and running instances. Fibers leave frames by longjmp: no fortification.
FLAGS = ("-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-strict-aliasing", "-fwrapv")
FLAGS += ("-fsanitize=bounds", "-fsanitize-undefined-trap-on-error")  # a trap for an index past an array in registers
FLAGS += ("-U_FORTIFY_SOURCE", "-D_XOPEN_SOURCE=700", "-D_DEFAULT_SOURCE")
# Where the compiler has them: every shared object has its own fibers, no shadow stack, no luck with unset variables.
OPTIONAL_FLAGS = ("-fno-gnu-unique", "-fcf-protection=none", "-ftrivial-auto-var-init=pattern")
ORDERS = ("forward", "backward", "random")
COMPLETIONS = ("late", "early", "any_time")
BACKENDS = (
    *(dfgnn, feature_products, flashsparse, fused3s_forward, fused3s_backward, fused3s_edges, fused3s_edges_backward),
    *(added_features, gather_rows, wide_features),
    *(dense_block, dense_block_training, fused3s_paper, rank_rows, residual_norm),
)
# Kernels that read and write tensors: which.
UPDATED = {"add_features": ("output",), "add_features_float": ("rows",), "relu_backward": ("grad",)}
UPDATED |= {"combine_rows": ("output", "lse")}
UPDATED |= {"batch_norm_statistics": ("running_mean", "running_variance", "num_batches")}
# Kernels that write the edges of a graph, where memory may be zeros behind them (`Fused3SData.new_of_edges`).
UPDATED |= {"gradients_over_rows": ("edge_value_gradients", "edge_weights", "signs")}
UPDATED |= {"fused3s_backward": ("edge_value_gradients",)}
UPDATED |= {"gradients_of_added_features": ("feature_gradient",)}
UPDATED |= {"gradients_of_features": ("gradient",), "feature_gradients": ("gradient",)}
# Those of wide features add to what the columns before made, and turn products into scores.
UPDATED |= {"feature_products": ("products_0", "products_1"), "fused3s_edges": ("edge_scores",)}


class CudaError(AssertionError):
    """A kernel did something undefined on the way: a deadlock, an access out of bounds, a write to an input."""


@dataclass(frozen=True)
class Mode:
    """Order of events in a launch.

    Attributes:
        order: of the blocks, one of ORDERS; "random" also shuffles threads and lets each pause at any instruction.
        completion: of asynchronous copies, one of COMPLETIONS: when they are waited for, when issued, or in between.
        resident: blocks that run at once.
        seed: of what is random.
    """

    order: str = "forward"
    completion: str = "late"
    resident: int = 1
    seed: int = 0


MODES = {
    "late": Mode(),
    "early": Mode("backward", "early"),
    "random": Mode("random", "any_time", resident=3, seed=1),
}


class _Range(ctypes.Structure):
    _fields_ = (
        ("start", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("dependent", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("order", ctypes.c_uint32),
        ("completion", ctypes.c_uint32),
        ("resident", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32),
        ("overlaps", ctypes.c_uint32),
        ("num_ranges", ctypes.c_uint32),
        ("params_bytes", ctypes.c_uint32),
        ("cpu_seconds", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("ranges", ctypes.POINTER(_Range)),
        ("params", ctypes.c_char_p),
    )


def paste_source(source: str | Path, folder: Path = CUDA_FOLDER, score: str | None = None) -> str:
    """Text of a CUDA source with its headers, ptx/* from here, and `#line`s that name the files.

    Files of `folder` come before those of the repository.

    `__shared__` variables are the only text that is replaced: a block's shared memory is not the host compiler's.
    """
    pasted: set[str] = set()
    source = CUDA_FOLDER / source

    def paste(name: str) -> str:
        if name in pasted:
            return ""
        folders = (SHIM_FOLDER,) if name.startswith("ptx/") else (folder, source.parent, CUDA_FOLDER)
        path = next(each / name for each in folders if (each / name).exists())
        lines = [f'#line 1 "{name}"']
        text = path.read_text(encoding="utf-8") if score is None or name != EXPRESSION else expression_source(score)
        if "#pragma once\n" in text:
            pasted.add(name)
        for number, line in enumerate(text.splitlines(), 1):
            if include := re.fullmatch(r'#include "(.+)"', line):
                lines += [paste(include[1]), f'#line {number + 1} "{name}"']
            else:
                lines.append("" if line == "#pragma once" else _shared_memory(line))
        return "\n".join(lines)

    return paste(source.name)


def _shared_memory(line: str) -> str:
    shared = r"__shared__ (?:__align__\(\d+\) )?([\w ]+) (\w+)"
    line = re.sub(rf"^extern {shared}\[\];", r"static const shim::DynamicShared<\1> \2;", line)
    line = re.sub(rf"^(\s+)extern {shared}\[\];", r"\1\2* const \3 = shim::DynamicShared<\2>();", line)
    static = r'\1auto& \3 = shim::static_shared<\2 \4>("\3", __LINE__);'
    return re.sub(rf"^(\s+){shared}((?:\[.+\])+);", static, line)


@cache
def build(source: str | Path, name: str, folder: Path = CUDA_FOLDER, score: str | None = None) -> ctypes.CDLL:
    """The shared object of one instance; kept by the hash of its text, of the shim and of the compiler's options."""
    text, function = paste_source(source, folder, score), name.partition("<")[0]
    entries = f"SHIM_KERNEL({name})\n"
    if f" {function}_sizes = {{" in text:
        entries += f"SHIM_SIZES(&{name.replace(function, f'{function}_sizes', 1)})\n"
    library = _library(text, entries, name)
    library.shim_launch.restype = ctypes.c_char_p
    library.shim_bank_conflicts.restype = library.shim_word_conflicts.restype = ctypes.c_uint64
    library.shim_allocate.restype = ctypes.c_void_p
    library.shim_allocate.argtypes = (ctypes.c_size_t,)
    library.shim_free.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return library


@cache
def instance_sizes(instances: tuple[KernelInstance, ...], device_index: int | None = None) -> tuple[KernelSizes, ...]:
    """In place of `runtime.jit.instance_sizes`. Those of one instance are in the shared object that launches it."""
    if len(instances) == 1:
        return (_read_sizes(build(instances[0].source, instances[0].name, score=instances[0].score), 0),)
    return sizes_alone(instances)


@cache
def sizes_alone(instances: tuple[KernelInstance, ...], device_index: int | None = None) -> tuple[KernelSizes, ...]:
    """The same for instances that are not launched: their kernels are not compiled."""
    names = ", ".join(instance.sizes_name for instance in instances)
    text = paste_source(instances[0].source, score=instances[0].score)
    library = _library(text, f"SHIM_SIZES({names})\n", f"the sizes of {instances[0].name}")
    return tuple(_read_sizes(library, index) for index in range(len(instances)))


def _library(text: str, entries: str, what: str) -> ctypes.CDLL:
    text, shim = f'#include "launch.h"\n{text}\n{entries}', _compiled_shim()
    path = shim / f"{_hash(text)}.so"
    includes = (f"-I{shim}", f"-I{SHIM_FOLDER}")
    _compile(path, text, *includes, "-x", "c++", "-", "-x", "none", str(shim / "shim.o"), what=what)
    return ctypes.CDLL(str(path))


def _read_sizes(library: ctypes.CDLL, index: int) -> KernelSizes:
    library.shim_sizes.restype = ctypes.POINTER(ctypes.c_int)
    return KernelSizes(*library.shim_sizes(index)[: len(KernelSizes._fields)])


def _compiled_shim() -> Path:
    """Folder for instances of these sources and options: with the headers, precompiled, and all that is in *.cpp."""
    version, flags = _compiler()
    files = sorted((*SHIM_FOLDER.glob("*.h"), *SHIM_FOLDER.glob("*.cpp")))
    key = _hash(*(file.read_text(encoding="utf-8") for file in files), version, *flags)
    folder = Path(tempfile.gettempdir()) / f"fused3s-cuda-shim-{os.getuid()}" / key
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, exist_ok=True)
    headers = ("-x", "c++-header", str(SHIM_FOLDER / "launch.h"))
    _compile(folder / "launch.h.gch", "", f"-I{SHIM_FOLDER}", *headers, what="launch.h")
    text = "".join(f'#include "{file.name}"\n' for file in files if file.suffix == ".cpp")
    # -O2: it is compiled once, and launches spend much of their time in it.
    _compile(folder / "shim.o", text, "-O2", "-c", f"-I{SHIM_FOLDER}", "-x", "c++", "-", what="the shim")
    return folder


def _hash(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:24]


def _compile(path: Path, text: str, *arguments: str, what: str) -> None:
    """Make the file `path` if it does not exist; `text` is given as standard input."""
    if path.exists():
        return
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        built = Path(work) / path.name
        command = [COMPILER, *_compiler()[1], *arguments, "-o", str(built)]
        result = subprocess.run(command, input=text, capture_output=True, text=True)
        if result.returncode:
            raise CudaError(f"{what} does not compile:\n{result.stderr[-8000:]}")
        built.replace(path)


@cache
def _compiler() -> tuple[str, list[str]]:
    """Version of the compiler, and the options that it takes."""
    version = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout

    def takes(flag: str) -> bool:
        command = [COMPILER, "-Werror", flag, "-fsyntax-only", "-x", "c++", "-"]
        return subprocess.run(command, input="", capture_output=True, text=True).returncode == 0

    return version, [*FLAGS, *filter(takes, OPTIONAL_FLAGS)]


class _GuardedTensor:
    """A copy of a tensor for one launch, with unmapped pages around it and NaN in the gaps of its strides."""

    def __init__(self, library: ctypes.CDLL, tensor: torch.Tensor) -> None:
        self.library, self.tensor = library, tensor
        elements = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.bytes = elements * tensor.itemsize if tensor.numel() else 0
        offset = tensor.data_ptr() % 16
        self.allocated = self.bytes + offset
        self.memory = library.shim_allocate(self.allocated)
        self.address = self.memory + offset
        if self.bytes:
            raw = (ctypes.c_char * self.bytes).from_address(self.address)
            self.raw = torch.frombuffer(raw, dtype=torch.uint8)
            self.raw.fill_(255)
            self.view = self.raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
            self.view.copy_(tensor)
            self.before = self.raw.clone()

    def take_back(self, label: str, updated: bool) -> None:
        """Copy the tensor back. Only what was NaN before, or -1 in 64 bits, may have changed, unless `updated`."""
        if not self.bytes or torch.equal(self.raw, self.before):
            return
        changed = (self.raw != self.before).view(-1, self.tensor.itemsize).any(1)
        before = self.before.view(self.tensor.dtype)
        unset = before.isnan() if self.tensor.is_floating_point() else (before == -1) & (before.itemsize == 8)
        if not updated and not unset[changed].all():
            raise CudaError(f"{label} was changed; it is an input, or a semaphore that must be 0 again")
        outside = torch.ones_like(changed)
        outside.as_strided(self.tensor.shape, self.tensor.stride()).zero_()
        if (outside & changed).any():
            raise CudaError(f"{label} was written between its rows")
        self.tensor.copy_(self.view)

    def free(self) -> None:
        self.library.shim_free(self.memory, self.allocated)


class CpuKernel:
    """In place of `runtime.jit.Kernel`; compiled when it is launched, or its sizes are read."""

    def __init__(self, instance: KernelInstance, folder: Path) -> None:
        self.instance, self.name, self.folder = instance, instance.name, folder
        if isinstance(instance, KernelInstance):  # else a planning kernel, whose struct is packed by position
            self.params = params_layout(instance.source, instance.function)
            self.scalars = self.params.pack_scalars

    @cached_property
    def library(self) -> ctypes.CDLL:
        return build(self.instance.source, self.name, self.folder, self.instance.score)

    @cached_property
    def sizes(self) -> KernelSizes:
        return _read_sizes(self.library, 0) if hasattr(self.library, "shim_sizes") else KernelSizes()


class CpuGpu:
    """In place of a GPU: `get_kernel` and `launch_kernel` as the backends call them.

    Attributes:
        mode: of the launches to come.
        launched: names of the instances launched so far.
        cpu_seconds: limit of a launch, for kernels that never end.
        bank_conflicts: of the 8- and 16-byte loads from shared memory in all launches so far.
        word_conflicts: of the 4-byte loads.
    """

    def __init__(self, mode: Mode, folder: Path = CUDA_FOLDER, cpu_seconds: int = 60) -> None:
        self.mode, self.folder, self.cpu_seconds = mode, folder, cpu_seconds
        self.launched: list[str] = []
        self.bank_conflicts = self.word_conflicts = 0

    def get_kernel(self, instance: KernelInstance, device_index: int | None) -> CpuKernel:
        return CpuKernel(instance, self.folder)

    def launch_kernel(
        self,
        kernel: CpuKernel,
        grid: tuple[int, ...],
        block: int,
        tensors: Mapping[str, torch.Tensor | None] | Sequence[torch.Tensor | None],
        scalars: bytes,
        *,
        shared_bytes: int | None = None,
        overlaps: bool = False,
        cluster: int = 1,
    ) -> None:
        """`tensors` by name, or all of them by position."""
        library = kernel.library
        self.launched.append(kernel.name)
        if isinstance(tensors, Mapping):
            kernel.params.check_names(tensors)
            tensors = {name: tensors.get(name) for name in kernel.params.pointers}
        else:
            tensors = dict(enumerate(tensors))
        guarded = {
            name: tensor if tensor is None else _GuardedTensor(library, tensor) for name, tensor in tensors.items()
        }
        kept = [each for each in guarded.values() if each is not None]
        if shared_bytes is None:
            shared_bytes = kernel.sizes.shared_bytes
        try:
            addresses = [0 if each is None else each.address for each in guarded.values()]
            params = b"".join(address.to_bytes(8, "little") for address in addresses) + scalars
            ranges = [_Range(each.address, each.bytes, each.tensor.is_floating_point(), 0) for each in kept]
            message = library.shim_launch(
                ctypes.byref(
                    _Launch(
                        grid=(ctypes.c_uint32 * 3)(*(*grid, 1, 1)[:3]),
                        threads=block,
                        shared_bytes=shared_bytes,
                        order=ORDERS.index(self.mode.order),
                        completion=COMPLETIONS.index(self.mode.completion),
                        resident=max(1, self.mode.resident // cluster) * cluster,
                        cluster=cluster,
                        overlaps=overlaps,
                        num_ranges=len(ranges),
                        params_bytes=len(params),
                        cpu_seconds=self.cpu_seconds,
                        seed=self.mode.seed,
                        ranges=(_Range * len(ranges))(*ranges),
                        params=params,
                    )
                )
            )
            if message:
                raise CudaError(f"{kernel.name}: {message.decode()}")
            self.bank_conflicts += library.shim_bank_conflicts()
            self.word_conflicts += library.shim_word_conflicts()
            for name, each in guarded.items():
                if each is not None:
                    updated = name in UPDATED.get(kernel.name.split("<")[0], ())
                    each.take_back(f"{kernel.name}: tensor {name} {list(each.tensor.shape)}", updated)
        finally:
            for each in kept:
                each.free()


@contextmanager
def cuda_on_cpu(mode: Mode = MODES["late"], *, num_sms: int = 2, folder: Path = CUDA_FOLDER) -> Iterator[CpuGpu]:
    """Inside, the backends with CUDA kernels take CPU tensors and run the kernels of `folder` on them.

    `num_sms` is the number of multiprocessors that schedules are made for.
    """
    gpu = CpuGpu(mode, folder)
    limits = GPULimits(num_sms, sm_shared_bytes=228 * 1024, block_shared_bytes=227 * 1024)
    with pytest.MonkeyPatch.context() as patch:
        for backend in BACKENDS:
            patch.setattr(backend, "get_kernel", gpu.get_kernel, raising=False)  # some take `planned_kernel` alone
            patch.setattr(backend, "launch_kernel", gpu.launch_kernel)
        for module in (cuda, fused3s):
            patch.setattr(module, "get_kernel", gpu.get_kernel)
        patch.setattr(cuda.CudaBackend, "unavailable", lambda backend, device: None)
        patch.setattr("fused3s.backends.cuda_unavailable", lambda device: None)  # of backends that are not imported yet
        patch.setattr(rank_rows, "runs_kernels", lambda device: True)
        for backend in (fused3s_forward, fused3s_backward):
            patch.setattr(backend, "instance_sizes", instance_sizes)
        for backend in (added_features, batch_norm, dense_block, dense_block_training, feature_products, residual_norm):
            patch.setattr(backend, "gpu_limits", lambda device: limits)
        plan_on_cpu(patch, limits)
        patch.setattr(semaphores, "stream_handle", lambda device_index: 0)
        patch.setattr(semaphores, "is_capturing", lambda device: False)
        patch.setattr(semaphores, "_eager", {})
        yield gpu
