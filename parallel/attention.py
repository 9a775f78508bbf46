"""Attention of one rank's rows over the whole graph: a callable for models, exact and differentiable.

All ranks must call it in the same order, in forward and backward passes, including ranks without rows or edges. The
same inputs give the same bits on every run. How: `parallel.passes`.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fused3s import Dropout, plan_attention
from fused3s.backends import REGISTRY
from fused3s.graph.csr import CSRPattern
from parallel.group import Group
from parallel.partition import Part
from parallel.passes import Call, HaloExchange, JoinedPasses, SplitPasses


@dataclass(frozen=True, eq=False)
class PartAttention:
    """Attention of the rows of one part; built by `plan_part_attention`, called like a plan.

    Attributes:
        backend: name of the attention backend.
        num_rows: n, rows of q, k, v and the output.
        trains: whether calls may be differentiated.
    """

    backend: str
    num_rows: int
    passes: SplitPasses | JoinedPasses
    trains: bool

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        out_dtype: torch.dtype | None = None,
        dropout: Dropout | float = 0.0,
    ) -> Tensor:
        """softmax(scale q k^T masked by A) v of this rank's rows, [n, H, d].

        Args:
            q: [n, H, d] of this rank's rows; H, d and type are the same on all ranks.
            k: as q.
            v: as q.
            scale: default 1/sqrt(d).
            out_dtype: default: q's type.
            dropout: `Dropout(rate, seed)` with the same seed on all ranks, or 0. The mask depends on the partition.

        Raises:
            ValueError: shapes disagree with the part, a seed is missing, or gradients were not planned. A rank that
                raises ends the others (`parallel.group`).
        """
        if q.dim() != 3 or q.shape != k.shape or q.shape != v.shape or len(q) != self.num_rows:
            raise ValueError(
                f"q, k, v: got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}; [{self.num_rows}, H, d] is needed, "
                "the rows of this part"
            )
        if dropout != 0 and getattr(dropout, "seed", None) is None:
            raise ValueError(
                f"dropout: got {dropout} without a seed; a Dropout(rate, seed) is needed, the same on all ranks"
            )
        differentiated = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        if differentiated and not self.trains:
            raise ValueError("q, k, v: a gradient is needed; plan with plan_part_attention(..., backward=True)")
        if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(q.device.type)
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
        call = Call(scale, out_dtype or q.dtype, dropout if isinstance(dropout, Dropout) else None)
        with torch.autocast(q.device.type, enabled=False):
            return self.passes.attend(q, k, v, call)


def plan_part_attention(
    part: Part,
    group: Group,
    *,
    backend: str = "auto",
    dtype: torch.dtype,
    head_dim: int,
    num_heads: int = 1,
    backward: bool = False,
) -> PartAttention:
    """Plan the attention of a part on the group's device; all ranks call it with the same arguments.

    Args:
        backend: as in `fused3s.plan_attention`.
        dtype: type of q, k and v.
        head_dim: columns of a head.
        num_heads: number of heads.
        backward: whether calls are differentiated.

    Raises:
        ValueError: unknown backend.
        BackendUnavailableError: the backend cannot run on this device.
    """
    options = {"device": group.device, "dtype": dtype, "head_dim": head_dim, "num_heads": num_heads}
    options["backward"] = backward
    one_row = CSRPattern(np.zeros(2, np.int64), np.empty(0, np.int64), (1, 1))
    backend = plan_attention(one_row, backend=backend, **options).backend
    options["backend"] = backend
    matrix, num_rows, first, exchange = part.matrix, part.num_rows, part.num_interior, HaloExchange(part, group)
    if REGISTRY[backend].writes_lse and (REGISTRY[backend].has_backward or not backward):
        own = plan_attention(matrix[:, :num_rows], **options) if num_rows else None
        halo = plan_attention(matrix[first:, num_rows:], **options) if first < num_rows else None
        passes = SplitPasses(own, halo, first, exchange, group.rank)
    else:
        passes = JoinedPasses(plan_attention(matrix, **options), exchange, group.rank)
    return PartAttention(backend, num_rows, passes, backward)
