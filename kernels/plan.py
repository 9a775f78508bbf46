"""A plan: sparse attention over one graph as data, ready to be called, moved, saved and printed."""

import math
import os
import pickle
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .backends import REGISTRY
from .backends.base import InputSpec
from .errors import BackendUnavailableError
from .formats.row_order import RowOrder
from .tensor_record import from_dict, map_tensors, num_bytes, to_dict

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FILE_VERSION = 1
# Attention as a graph break: torch.compile cannot trace a launch.
_OUTSIDE_GRAPH = {
    name: torch.compiler.disable(backend.attend) for name, backend in REGISTRY.items() if not backend.traceable
}


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """Sparse attention over one graph: its format and schedule are built and lie on `device`. Call it with q, k and v.

    A plan is made for `inputs`. It takes others too, with a schedule that was not made for them: see `for_inputs`.

    Attributes:
        backend: name of the backend, never "auto".
        shape: (num_rows, num_cols) of A: queries and keys.
        device: where q, k and v must be.
        inputs: dtype, head dimension, heads and output type that the schedule was made for.
        data: format and schedule, a frozen record of the backend's own type.
        order: the order of the rows, what it saves and what it cost; None if none was asked for.
    """

    backend: str
    shape: tuple[int, int]
    device: torch.device
    inputs: InputSpec
    data: Any
    order: RowOrder | None = None

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        out_dtype: torch.dtype | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention on torch's current stream, without waiting for it; see `sparse_attention`.

        Args:
            return_lse: return (output, lse): lse is float32, q's shape without d, the natural logarithm of the sum of
                exp(scale * score) over each row's edges, -inf for a row without one. For backends with `writes_lse`.
        """
        backend = REGISTRY[self.backend]
        _check_tensors(q, k, v, self.shape, self.device)
        reason = backend.unsupported(q.dtype, q.shape[-1])
        if reason:
            raise ValueError(f"q, k, v: backend {self.backend} cannot run them: {reason}")
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
        if not math.isfinite(scale):
            raise ValueError(f"scale: got {scale}; a finite number is needed")
        out_dtype = q.dtype if out_dtype is None else out_dtype
        if out_dtype not in DTYPES:
            raise ValueError(f"out_dtype: got {out_dtype}; allowed are {', '.join(map(str, DTYPES))}")
        lse = None
        if return_lse:
            if not backend.writes_lse:
                able = ", ".join(name for name, backend in REGISTRY.items() if backend.writes_lse)
                raise ValueError(f"return_lse: backend {self.backend} has no log-sum-exp; these have: {able}")
            lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        attend = backend.attend
        if torch.compiler.is_compiling() and not backend.traceable:
            attend = _OUTSIDE_GRAPH[self.backend]
        if q.dim() == 2:
            heads_lse = None if lse is None else lse.unsqueeze(1)
            one_head = (tensor.unsqueeze(1) for tensor in (q, k, v))
            output = attend(self.data, *one_head, scale, out_dtype, heads_lse).squeeze(1)
        else:
            output = attend(self.data, q, k, v, scale, out_dtype, lse)
        return (output, lse) if return_lse else output

    def for_inputs(
        self,
        *,
        dtype: torch.dtype | None = None,
        head_dim: int | None = None,
        num_heads: int = 1,
        out_dtype: torch.dtype | None = None,
    ) -> "AttentionPlan":
        """The plan with a schedule for other inputs; what does not depend on them is shared with this plan."""
        inputs = InputSpec(dtype, head_dim, num_heads, out_dtype)
        return replace(self, inputs=inputs, data=REGISTRY[self.backend].rebuild(self.data, self.device, inputs))

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of `data`; a TypeError where they belong to another library."""
        self._require_data("measured")
        return num_bytes(self.data)

    def to(self, device: torch.device | str) -> "AttentionPlan":
        """The plan on another device, complete there when this returns; itself if it is there already.

        Raises:
            TypeError: the backend's format holds objects of another library.
        """
        device = resolve_device(device)
        if device == self.device:
            return self
        self._require_data("moved")
        data = map_tensors(self.data, lambda tensor: tensor.to(device))
        for one in {self.device, device}:
            if one.type == "cuda":  # kernels read a plan before griddepcontrol.wait: queued is not enough
                torch.cuda.synchronize(one)
        return replace(self, device=device, data=data)

    def save(self, path: str | os.PathLike) -> None:
        """Write the plan to a file, which is complete or not there at all.

        Raises:
            TypeError: the backend's format holds objects of another library.
        """
        self._require_data("saved")
        cpu = self.to("cpu")
        content = {
            "version": FILE_VERSION,
            "backend": self.backend,
            "shape": self.shape,
            "inputs": asdict(self.inputs),
            "data": to_dict(cpu.data),
            "order": None if self.order is None else to_dict(self.order),
        }
        path = Path(path)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            torch.save(content, unfinished)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike, device: torch.device | str | None = None) -> "AttentionPlan":
        """A plan that `save` wrote, on `device` (default: the GPU where there is one). No code of the file is run.

        Raises:
            BackendUnavailableError: its backend cannot run on `device`.
            ValueError: the file is no plan, or was written by another version.
        """
        device = resolve_device(device)
        with open(path, "rb") as file:
            try:
                content = torch.load(file, map_location="cpu", weights_only=True)
            except (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError):
                content = None
        version = content.get("version") if isinstance(content, dict) else None
        if version != FILE_VERSION or content.get("backend") not in REGISTRY:
            raise ValueError(f"{path}: no plan of version {FILE_VERSION}; build the plan anew with plan_attention")
        backend = REGISTRY[content["backend"]]
        if reason := backend.unavailable(device):
            raise BackendUnavailableError(f"backend {backend.name} cannot run: {reason}")
        order = content["order"]
        plan = cls(
            backend=backend.name,
            shape=tuple(content["shape"]),
            device=torch.device("cpu"),
            inputs=InputSpec(**content["inputs"]),
            data=from_dict(backend.data_type, content["data"]),
            order=None if order is None else from_dict(RowOrder, order),
        )
        return plan.to(device)

    def __repr__(self) -> str:
        spec = self.inputs
        dtype = "any type" if spec.dtype is None else str(spec.dtype).removeprefix("torch.")
        out = "" if spec.out_dtype in (None, spec.dtype) else f" -> {str(spec.out_dtype).removeprefix('torch.')}"
        heads = f"{spec.num_heads} x {spec.head_dim or 'any'}"
        size = f"{self.nbytes / 2**20:.1f} MiB" if REGISTRY[self.backend].data_type else "format of another library"
        lines = [
            f"AttentionPlan({self.backend!r}, {self.shape[0]} x {self.shape[1]}, {self.device}, {dtype}, {heads}{out})",
            f"{size}" + (f"; rows in order {self.order.method!r}" if self.order else ""),
        ]
        if described := REGISTRY[self.backend].describe(self.data):
            lines.append(described)
        return "\n  ".join(lines)

    def _require_data(self, verb: str) -> None:
        if REGISTRY[self.backend].data_type is None:
            raise TypeError(
                f"a plan of backend {self.backend} cannot be {verb}: it holds objects of another library; "
                "build it anew with plan_attention"
            )


def resolve_device(device: torch.device | str | None) -> torch.device:
    """The device with its index; None means the GPU where there is one."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _check_tensors(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, graph_shape: tuple[int, int], device: torch.device
) -> None:
    """Raise for the first disagreement among q, k, v and the graph."""
    for name, tensor, rows, what in (("q", q, graph_shape[0], "rows"), ("k", k, graph_shape[1], "columns")):
        if tensor.dim() not in (2, 3):
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}; [N, d] or [N, H, d] is needed")
        if tensor.shape[0] != rows:
            raise ValueError(
                f"{name}: got shape {tuple(tensor.shape)}, but the graph has {rows} {what}; they must agree"
            )
    if k.shape[1:] != q.shape[1:]:
        raise ValueError(f"k: got shape {tuple(k.shape)}, but q has {tuple(q.shape)}; heads and d must agree")
    if v.shape != k.shape:
        raise ValueError(f"v: got shape {tuple(v.shape)}, but k has {tuple(k.shape)}; they must agree")
    if q.shape[-1] == 0:
        raise ValueError(f"q: got shape {tuple(q.shape)}; d must be at least 1")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.device != device:
            raise ValueError(
                f"{name}: on {tensor.device}, but the graph was planned for {device}; q, k, v and plan must share it"
            )
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name}: got {tensor.dtype}, but q is {q.dtype}; q, k and v must have one type")
    if q.dtype not in DTYPES:
        raise ValueError(f"q: got {q.dtype}; allowed are {', '.join(map(str, DTYPES))}")
