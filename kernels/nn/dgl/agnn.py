"""Drop-in replacement for `dgl.nn.AGNNConv`: same arguments, same state dict, same numbers."""

from typing import Any

from torch import Tensor, nn

from .. import agnn
from .graph_inputs import Ends, inputs_of


class AGNNConv(agnn.AGNNConv):
    """DGL's AGNNConv with fused sparse attention.

    Args:
        init_beta: beta at the start.
        learn_beta: whether beta is trained.
        allow_zero_in_degree: whether nodes without in-edges are accepted; the output is 0 for them.
        backend: attention backend, see `fused3s.list_backends`.
    """

    init_beta = 1.0

    def __init__(
        self,
        init_beta: float = 1.0,
        learn_beta: bool = True,
        allow_zero_in_degree: bool = False,
        *,
        backend: str = "auto",
    ) -> None:
        super().__init__(learn_beta, add_self_loops=False, backend=backend)
        self.init_beta, self._allow_zero_in_degree = init_beta, allow_zero_in_degree
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.beta, self.init_beta)

    def set_allow_zero_in_degree(self, set_value: bool) -> None:
        self._allow_zero_in_degree = set_value

    def forward(self, graph: Any, feat: Tensor | Ends) -> Tensor:
        """[N, F], N counts destinations; a row of zeros has similarity 0 to all rows.

        Args:
            graph: a DGLGraph of one edge type (`graph[etype]`), or a block.
            feat: [N, F], of a block those of the sources; or a pair of the same width, of sources and of destinations.

        Raises:
            dgl.DGLError: a node has no in-edge, and the layer was made with allow_zero_in_degree=False.
            TypeError, ValueError: an argument is wrong, or the graph has several edge types.
            RuntimeError: a gradient is needed, and the backend has no backward pass.
        """
        ends, edge_index = inputs_of(graph, feat, self._allow_zero_in_degree)
        return self.attend(*ends, edge_index)
