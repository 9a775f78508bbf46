"""Drop-in replacement for `torch_geometric.nn.AGNNConv` (Thekumparampil et al. 2018, "Attention-based Graph Neural
Network for Semi-supervised Learning"; Equation 3 of the Fused3S paper): same arguments, same state dict, same numbers.

    conv = AGNNConv()
    out = conv(x, edge_index)

The output is softmax(beta cos(X, X^T) masked by A) X. A cosine is a dot product of rows of length 1, so that every
attention backend computes it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import AttentionPlan
from ..arguments import check_matrix
from ..graph.edge_list import with_memory
from ..torch_side.autocast import input_type
from ..torch_side.torch_private import is_traced
from .base import Layer
from .cached.edge_attention import NO_LOOPS, attend_edges
from .cached.planned_edges import plan_edge_index, require_gradients
from .cached.self_loops import check_graph, edges_with_self_loops


class AGNNConv(Layer):
    """AGNNConv with fused sparse attention.

    Args:
        requires_grad: whether beta is trained.
        add_self_loops: replace the self-loops of the graph by one for each node.
        backend: attention backend, see `fused3s.list_backends`.
        cache: whether `forward` caches the plan of an edge_index tensor; False: it plans at every call.
    """

    def __init__(
        self, requires_grad: bool = True, add_self_loops: bool = True, *, backend: str = "auto", cache: bool = True
    ) -> None:
        super().__init__()
        self.requires_grad, self.aggr = requires_grad, "add"
        self.add_self_loops = add_self_loops
        self.backend = backend
        self.cache = cache
        if requires_grad:
            self.beta = nn.Parameter(torch.empty(1))
        else:
            self.register_buffer("beta", torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.beta)

    def forward(self, x: Tensor, edge_index: Tensor | AttentionPlan) -> Tensor:
        """[N, F] -> [N, F]; a row of zeros has similarity 0 to all rows.

        Args:
            edge_index: [2, E] int32 or int64, sources and targets; or a torch.sparse tensor [targets, sources]. Plans
                are cached per tensor, see `TransformerConv.forward`. Or a plan, to whose graph no loops are added.

        Raises:
            TypeError, ValueError: an argument is wrong.
            RuntimeError: a gradient is needed, and the backend has no backward pass.
        """
        check_matrix("x", x)
        return self.attend(x, x, with_memory(edge_index))

    def attend(self, source: Tensor, target: Tensor, edge_index: Tensor | AttentionPlan) -> Tensor:
        """[targets, F] for sources [sources, F] and targets [targets, F]; self-loops only if they are one tensor."""
        unit = _unit_rows(source)
        of_target = unit if target is source else _unit_rows(target)
        query, key, value = (each[:, None] for each in ((self.beta * of_target).to(target.dtype), unit, source))
        return self._attend(query, key, value, edge_index)[:, 0]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, edge_index: Tensor | AttentionPlan) -> Tensor:
        """[targets, 1, F]."""
        plan, shape = edge_index, (query.shape[0], key.shape[0])
        recorded = key if key.requires_grad else query
        if not isinstance(plan, AttentionPlan):
            check_graph(edge_index, shape)
            if is_traced(query):
                num_loops = shape[0] if self.add_self_loops else NO_LOOPS
                options = {"backend": self.backend, "cache": self.cache, "scale": 1.0}
                return attend_edges(query, key, value, edge_index, num_loops=num_loops, **options)
            if self.add_self_loops:
                edge_index = edges_with_self_loops(edge_index, shape[0], cache=self.cache, allows_padding=True)
            plan = plan_edge_index(
                edge_index,
                shape,
                backend=self.backend,
                dtype=input_type(query.dtype, query.device.type),
                head_dim=query.shape[2],
                num_heads=1,
                backward=torch.is_grad_enabled() and recorded.requires_grad,
                cache=self.cache,
                has_loops=self.add_self_loops,
            )
        out = plan(query, key, value, scale=1.0)
        require_gradients(out, recorded, plan.backend)
        return out


def _unit_rows(x: Tensor) -> Tensor:
    return F.normalize(x, dim=1, eps=max(1e-12, torch.finfo(x.dtype).tiny))  # PyG's 1e-12 is 0 in float16
