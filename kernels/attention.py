"""The public call: `sparse_attention(q, k, v, graph)`, and `plan_attention(graph)` for a graph that is used often.

O = softmax(scale * Q K^T masked by A) V for a sparse binary A (paper, equation 1). What every back end agrees on:

* Non-edges are minus infinity; a score of exactly 0 on an edge counts as any other.
* A row without an edge gives zeros, as does a row whose scores are all -inf (`dgl` and `pyg` give NaN for the latter).
* A NaN, or an infinity that makes one, in Q or K reaches the rows whose edges use it. In V it reaches every row with an
  edge to it, and where a tensor core multiplies it by 0 also others: those of the 16-row windows that gather it with
  `fused3s` and `fused3s_paper`, of the 8-row windows with `flashsparse_*`, of 128 x 128 blocks with `flex_attention`.
  `sdpa_padded` is dense inside the groups of diagonal blocks that it packs: there a NaN reaches the whole group.
* `flashsparse_naive` subtracts no maximum, as its name says: a score above 88 makes its row NaN (0 where only the sum
  overflows), and a row whose scores are all below -87 is 0.
* `scale=None` is 1/sqrt(d), as in torch's scaled_dot_product_attention; the paper's formula is `scale=1.0`.
"""

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch

from .backends import REGISTRY, reordering_backends
from .backends.base import AttentionFunction, Backend
from .errors import BackendUnavailableError
from .formats.bsb import BSB
from .formats.csr import CSRPattern, csr_pattern
from .formats.row_order import RowOrder, check_method, find_row_order, permute_rows

logger = logging.getLogger(__name__)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class BackendInfo:
    """A back end as a user sees it; `unavailable` is the reason why it cannot run on the device, else None."""

    name: str
    summary: str
    unavailable: str | None


def list_backends(device: torch.device | str | None = None) -> dict[str, BackendInfo]:
    """All back ends and why one cannot run on `device` (default: the GPU where there is one): first those that "auto"
    chooses among, fastest first, then the baselines of the benchmarks."""
    device = _device(device)
    return {name: BackendInfo(name, backend.summary, backend.unavailable(device)) for name, backend in REGISTRY.items()}


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """Sparse attention over one graph: its format is built and lies on `device`. Call it with q, k and v.

    Attributes:
        backend: name of the back end, never "auto".
        shape: (num_rows, num_cols) of A: queries and keys.
        device: where the inputs must be.
        order: the order of the rows, what it saves and what it cost; None if none was asked for.
    """

    backend: str
    shape: tuple[int, int]
    device: torch.device
    function: AttentionFunction
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
        """See `sparse_attention`.

        Args:
            return_lse: return (output, lse): lse is float32, q's shape without d, the natural logarithm of the sum of
                exp(scale * score) over each row's edges, -inf for a row without one. For back ends with `writes_lse`.
        """
        _check_tensors(q, k, v, self.shape, self.device)
        reason = REGISTRY[self.backend].unsupported(q.dtype, q.shape[-1])
        if reason:
            raise ValueError(f"q, k, v: back end {self.backend} cannot run them: {reason}")
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
        if not math.isfinite(scale):
            raise ValueError(f"scale: got {scale}; a finite number is needed")
        out_dtype = q.dtype if out_dtype is None else out_dtype
        if out_dtype not in DTYPES:
            raise ValueError(f"out_dtype: got {out_dtype}; allowed are {', '.join(map(str, DTYPES))}")
        into = {}
        if return_lse:
            if not REGISTRY[self.backend].writes_lse:
                able = ", ".join(name for name, backend in REGISTRY.items() if backend.writes_lse)
                raise ValueError(f"return_lse: back end {self.backend} has no log-sum-exp; these have: {able}")
            into["lse"] = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        if q.dim() == 2:
            output = self.function(q[:, None], k[:, None], v[:, None], scale, out_dtype, **into)[:, 0]
        else:
            output = self.function(q, k, v, scale, out_dtype, **into)
        return (output, into["lse"]) if return_lse else output


def plan_attention(
    graph: Any,
    *,
    backend: str = "auto",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    head_dim: int | None = None,
    reorder: str = "none",
) -> AttentionPlan:
    """Choose a back end and build its sparse format of `graph` on `device`, once for many calls.

    Args:
        graph: a BSB, a DGLGraph (in-edges: destination nodes are the queries), a scipy.sparse matrix or a
            torch.sparse_csr tensor (rows are the queries).
        backend: a name of `list_backends()`, or "auto" for the fastest that can run; the log says which that is.
        device: where q, k and v will be; default the GPU where there is one.
        dtype, head_dim: type and head dimension of q, k and v, where known: "auto" then takes a back end that accepts
            them, and a kernel is compiled now instead of at the first call.
        reorder: "none", "rcm", "communities" or "auto": which rows share a window, see `formats.row_order`.
            q, k, v and the output stay in the caller's order. What it cost and saves is in the plan's `order`.

    Raises:
        BackendUnavailableError: the back end cannot run on this machine or device; the text is the reason.
        ValueError, TypeError: the back end has no such name or cannot take such inputs; the graph is malformed.
    """
    device = _device(device)
    check_method(reorder)
    pattern = graph if isinstance(graph, BSB) else csr_pattern(graph)
    chosen = _choose(backend, device, dtype, head_dim, reorder)
    if reorder == "none":
        return AttentionPlan(chosen.name, pattern.shape, device, chosen.prepare(pattern, device, dtype, head_dim))
    if isinstance(pattern, BSB):
        pattern = CSRPattern(*pattern.to_csr(), pattern.shape)
    order = find_row_order(pattern, reorder)
    if order.perm is None:
        function = chosen.prepare(pattern, device, dtype, head_dim)
    else:
        function = chosen.prepare_reordered(permute_rows(pattern, order.perm), order.perm, device, dtype, head_dim)
    return AttentionPlan(chosen.name, pattern.shape, device, function, order)


def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    graph: Any,
    *,
    scale: float | None = None,
    backend: str = "auto",
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """softmax(scale * q k^T masked by graph) v.

    The sparse format is built anew at each call unless `graph` is a BSB on the inputs' device and the back end reads
    BSB; use `plan_attention` to build it once whatever the back end.

    Args:
        q: [num_rows, d] or [num_rows, H, d]; float16, bfloat16, float32 or float64.
        k, v: [num_cols, d] or [num_cols, H, d], of q's type and device.
        graph: a BSB, a DGLGraph (in-edges: destination nodes are the queries), a scipy.sparse matrix or a
            torch.sparse_csr tensor (rows are the queries).
        scale: factor of the scores; None means 1/sqrt(d).
        backend: a name of `list_backends()`, or "auto" for the fastest that can run.
        out_dtype: type of the result; None means q's type. `fused3s_paper` writes torch.float32 or q's type.

    Returns:
        q's shape, contiguous.

    Raises:
        BackendUnavailableError: the back end cannot run on this machine or on the inputs' device.
        ValueError, TypeError: an argument is wrong; the text names it, what it got and what is allowed.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}; a torch.Tensor is needed")
    if q.dim() not in (2, 3):
        raise ValueError(f"q: got shape {tuple(q.shape)}; [num_rows, d] or [num_rows, H, d] is needed")
    plan = plan_attention(graph, backend=backend, device=q.device, dtype=q.dtype, head_dim=q.shape[-1])
    return plan(q, k, v, scale=scale, out_dtype=out_dtype)


def _choose(
    name: str, device: torch.device, dtype: torch.dtype | None, head_dim: int | None, reorder: str = "none"
) -> Backend:
    def unsupported(backend: Backend) -> str | None:
        if reorder != "none" and backend.name not in (able := reordering_backends()):
            return f"it cannot reorder rows (reorder={reorder!r}), which only {', '.join(able)} can"
        return None if dtype is None or head_dim is None else backend.unsupported(dtype, head_dim)

    if name == "auto":
        passed_over = []
        for backend in (backend for backend in REGISTRY.values() if backend.in_auto):
            reason = backend.unavailable(device) or unsupported(backend)
            if reason is None:
                because = f" ({'; '.join(passed_over)})" if passed_over else ""
                logger.info("attention back end: %s on %s%s", backend.name, device, because)
                return backend
            passed_over.append(f"not {backend.name}: {reason}")
        raise BackendUnavailableError(f"no attention back end can run on {device}: {'; '.join(passed_over)}")
    if name not in REGISTRY:
        raise ValueError(f"backend: got {name!r}; allowed are 'auto', {', '.join(map(repr, REGISTRY))}")
    backend = REGISTRY[name]
    if reason := backend.unavailable(device):
        raise BackendUnavailableError(f"back end {name} cannot run: {reason}")
    if reason := unsupported(backend):
        raise ValueError(f"backend: {name} cannot run this: {reason}")
    return backend


def _device(device: torch.device | str | None) -> torch.device:
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
