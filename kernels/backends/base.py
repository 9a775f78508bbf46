"""What an attention back end is."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from ..formats.csr import CSRPattern

# (query [num_rows, H, d], key and value [num_cols, H, d], scale, out_dtype) -> output [num_rows, H, d]; that of a back
# end that writes it also takes lse=, [num_rows, H] float32 to fill with the log-sum-exp of each row's scaled scores.
AttentionFunction = Callable[..., torch.Tensor]


class Backend(ABC):
    """One way to compute sparse attention.

    Attributes:
        name: the key in the registry, in configs and in results.
        summary: one line for a user.
        in_auto: whether "auto" may take it; the baselines of the benchmarks run only where they are named.
        writes_lse: whether its function takes `lse`.
    """

    name: str
    summary: str
    in_auto: bool = True
    writes_lse: bool = False

    @abstractmethod
    def unavailable(self, device: torch.device) -> str | None:
        """Why the back end cannot run on `device`; None when it can."""

    def unsupported(self, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why the back end cannot take such inputs; None when it can."""
        return None

    @abstractmethod
    def prepare(
        self, graph: Any, device: torch.device, dtype: torch.dtype | None, head_dim: int | None
    ) -> AttentionFunction:
        """Build the sparse format of `graph` on `device`, once, and return the function that runs on it.

        `graph` is a BSB or a `CSRPattern`: whatever a caller has is converted before, once. `dtype` and
        `head_dim`, where known, let the back end compile its kernel now instead of at the first call. The function
        gets checked arguments: see `kernels.attention.AttentionPlan`.

        Raises:
            UnsupportedGraphError: the back end cannot run this graph on `device`.
        """


class ReorderingBackend(Backend):
    """One that can work on any rows together, and so takes a row order (see `kernels.formats.row_order`)."""

    @abstractmethod
    def prepare_reordered(
        self,
        graph: CSRPattern,
        perm: torch.Tensor,
        device: torch.device,
        dtype: torch.dtype | None,
        head_dim: int | None,
    ) -> AttentionFunction:
        """`prepare` for a graph whose row i is row perm[i] of the caller's; perm is [num_rows] int32 on the CPU."""
