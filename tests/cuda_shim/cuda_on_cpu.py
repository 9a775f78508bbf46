"""The repository's CUDA sources, compiled by the host's C++ compiler and run on CPU tensors; see README.md."""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_oracle import plan_on_cpu

from baselines import dfgnn, flashsparse, fused3s_paper
from dense import block as dense_block
from dense import block_training as dense_block_training
from dense import residual_norm
from kernels.backends import cuda, feature_products, fused3s, fused3s_backward, fused3s_edges, fused3s_edges_backward
from kernels.runtime import semaphores
from kernels.runtime.device import GPULimits
from kernels.runtime.jit import CUDA_FOLDER
from parallel import rank_rows

SHIM_FOLDER = Path(__file__).parent
COMPILER = shutil.which("g++") or shutil.which("clang++")
# -O1 gives the shortest sum of compiling and running instances. Fibers leave frames by longjmp: no fortification.
FLAGS = ("-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-strict-aliasing", "-fwrapv")
FLAGS += ("-fsanitize=bounds", "-fsanitize-undefined-trap-on-error")  # a trap for an index past an array in registers
FLAGS += ("-U_FORTIFY_SOURCE", "-D_XOPEN_SOURCE=700", "-D_DEFAULT_SOURCE")
# Where the compiler has them: every shared object has its own fibers, no shadow stack, no luck with unset variables.
OPTIONAL_FLAGS = ("-fno-gnu-unique", "-fcf-protection=none", "-ftrivial-auto-var-init=pattern")
ORDERS = ("forward", "backward", "random")
COMPLETIONS = ("late", "early", "any_time")
BACKENDS = (
    *(dfgnn, feature_products, flashsparse, fused3s, fused3s_backward, fused3s_edges, fused3s_edges_backward),
    *(dense_block, dense_block_training, fused3s_paper, rank_rows, residual_norm),
)
# Kernels that read and write tensors: their places.
UPDATED = {"add_features": (0,), "add_features_float": (0,), "relu_backward": (0,), "combine_rows": (0, 1)}


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


def paste_source(source: str | Path, folder: Path = CUDA_FOLDER) -> str:
    """Text of a CUDA source with its headers, ptx/* from here, and `#line`s that name the files.

    Files of `folder` come before those of the repository.

    `__shared__` variables are the only text that is replaced: a block's shared memory is not the host compiler's.
    """
    pasted: set[str] = set()
    source = CUDA_FOLDER / source

    def paste(name: str) -> str:
        if name in pasted:
            return ""
        pasted.add(name)
        folders = (SHIM_FOLDER,) if name.startswith("ptx/") else (folder, source.parent, CUDA_FOLDER)
        path = next(each / name for each in folders if (each / name).exists())
        lines = [f'#line 1 "{name}"']
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
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
def build(source: str | Path, name: str, folder: Path = CUDA_FOLDER) -> ctypes.CDLL:
    """The shared object of one instance; kept by the hash of its text, of the shim and of the compiler's options."""
    text = f'#include "launch.h"\n{paste_source(source, folder)}\nSHIM_KERNEL({name})\n'
    shim = _compiled_shim()
    path = shim / f"{_hash(text)}.so"
    includes = (f"-I{shim}", f"-I{SHIM_FOLDER}")
    _compile(path, text, *includes, "-x", "c++", "-", "-x", "none", str(shim / "shim.o"), what=name)
    library = ctypes.CDLL(str(path))
    library.shim_launch.restype = ctypes.c_char_p
    library.shim_bank_conflicts.restype = library.shim_word_conflicts.restype = ctypes.c_uint64
    library.shim_allocate.restype = ctypes.c_void_p
    library.shim_allocate.argtypes = (ctypes.c_size_t,)
    library.shim_free.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return library


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

    def get_kernel(self, spec: Any, device_index: int | None) -> Any:
        return spec

    def launch_kernel(
        self,
        spec: Any,
        grid: tuple[int, ...],
        block: int,
        tensors: Sequence[torch.Tensor | None],
        scalars: bytes = b"",
        *,
        shared_bytes: int = 0,
        overlaps: bool = False,
        cluster: int = 1,
    ) -> None:
        library = build(spec.source, spec.name, self.folder)
        self.launched.append(spec.name)
        guarded = [tensor if tensor is None else _GuardedTensor(library, tensor) for tensor in tensors]
        kept = [each for each in guarded if each is not None]
        try:
            addresses = [0 if each is None else each.address for each in guarded]
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
                raise CudaError(f"{spec.name}: {message.decode()}")
            self.bank_conflicts += library.shim_bank_conflicts()
            self.word_conflicts += library.shim_word_conflicts()
            for place, each in enumerate(guarded):
                if each is not None:
                    updated = place in UPDATED.get(spec.name.split("<")[0], ())
                    each.take_back(f"{spec.name}: tensor {place} {list(each.tensor.shape)}", updated)
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
            patch.setattr(backend, "get_kernel", gpu.get_kernel)
            patch.setattr(backend, "launch_kernel", gpu.launch_kernel)
        patch.setattr(cuda.CudaBackend, "unavailable", lambda backend, device: None)
        patch.setattr(rank_rows, "runs_kernels", lambda device: True)
        for backend in (dense_block, dense_block_training, feature_products, residual_norm):
            patch.setattr(backend, "gpu_limits", lambda device: limits)
        plan_on_cpu(patch, limits)
        patch.setattr(semaphores, "stream_handle", lambda device_index: 0)
        patch.setattr(semaphores, "is_capturing", lambda device: False)
        patch.setattr(semaphores, "_eager", {})
        yield gpu
