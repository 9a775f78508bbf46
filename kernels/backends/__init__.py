"""Attention back ends. `REGISTRY` is the only list of them; "auto" takes the first that can run, so fastest first."""

from kernels.backends.base import Backend
from kernels.backends.dgl import DGLBackend
from kernels.backends.fused3s_paper import Fused3SPaperBackend
from kernels.backends.reference import ReferenceBackend

REGISTRY: dict[str, Backend] = {
    backend.name: backend for backend in (Fused3SPaperBackend(), DGLBackend(), ReferenceBackend())
}
