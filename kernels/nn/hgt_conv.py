"""Drop-in replacement for `torch_geometric.nn.HGTConv` (Hu et al. 2020, "Heterogeneous Graph Transformer"): same
arguments, same state dict, same numbers.

    conv = HGTConv(64, 128, data.metadata(), heads=8)   # in place of HGTConv(64, 128, data.metadata(), heads=8)
    out = conv(x_dict, edge_index_dict)

A softmax of HGT runs over the edges of all relations into a node. With a copy of the sources for each relation this is
sparse attention on one bipartite graph: q_i W_r k_j p_r = <q_i, k_rj> with k_rj = p_r W_r k_j, which is computed once
for each node and relation, and no tensor [E, H, D] is materialised.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..arguments import MOST_COLUMNS, check_integer
from ..graph.edge_list import with_memory
from ..torch_side.autocast import input_type
from ..torch_side.torch_private import is_traced
from .base import Layer, MessagePassing
from .cached.edge_attention import attend_edges
from .cached.merged_edges import Relation, merge_edges
from .cached.planned_edges import plan_edge_index, require_gradients
from .joint.parameters import is_plain

HAS_PYG = MessagePassing is not nn.Module
if HAS_PYG:
    from torch_geometric.nn import HeteroLinear
    from torch_geometric.nn import HGTConv as Base
else:
    Base = nn.Module

Kind = tuple[str, str, str]  # of edges: source, relation, target


class HGTConv(Layer, Base):
    """HGTConv with fused sparse attention. It needs PyTorch Geometric.

    Args:
        in_channels: columns of x of all kinds of nodes, or of each kind; -1: set by the first call.
        out_channels: H D, columns of the output.
        metadata: kinds of nodes, and kinds of edges (source, relation, target).
        heads: H, number of heads.
        backend: attention backend, see `fused3s.list_backends`.
        cache: whether `forward` caches the plan of the edge_index tensors; False: it plans at every call.

    Raises:
        ModuleNotFoundError: PyG is not installed.
        TypeError, ValueError: an argument is wrong; out_channels must be a multiple of heads.
    """

    def __init__(
        self,
        in_channels: int | dict[str, int],
        out_channels: int,
        metadata: tuple[list[str], list[Kind]],
        heads: int = 1,
        *,
        backend: str = "auto",
        cache: bool = True,
    ) -> None:
        if not HAS_PYG:
            raise ModuleNotFoundError("HGTConv is a subclass of PyG's layer: pip install torch_geometric")
        for name, size in (("out_channels", out_channels), ("heads", heads)):
            check_integer(name, size, 1, MOST_COLUMNS)
        super().__init__(in_channels, out_channels, metadata, heads)
        self.backend, self.cache = backend, cache

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Kind, Tensor]) -> dict[str, Tensor]:
        """[N, out_channels] of each kind of nodes that is a target in the metadata; without edges, attention gives 0.

        Args:
            x_dict: [N, F] of each kind of nodes.
            edge_index_dict: for each kind of edges, in any order, [2, E] int32 or int64, sources and targets; or a
                torch.sparse tensor [targets, sources]. The plan is kept until one of the tensors is freed or changed,
                see `TransformerConv.forward`; under torch.compile it is made at each call.

        Raises:
            TypeError, ValueError: an argument is wrong.
            RuntimeError: a gradient is needed, and the backend has no backward pass.
            NotImplementedError: `k_rel` or `v_rel` has hooks or was replaced.
        """
        self._check(x_dict, edge_index_dict)
        split = (3, self.heads, self.out_channels // self.heads)
        projected = {kind: each.unflatten(1, split).unbind(1) for kind, each in self.kqv_lin(x_dict).items()}
        targets, end = {}, 0
        for kind in projected:
            if kind in self.dst_node_types:
                targets[kind] = range(end, end := end + len(x_dict[kind]))
        relations, keys, values, end = [], [], [], 0
        weights = [each.weight.unflatten(0, (self.heads, -1)) for each in (self.k_rel, self.v_rel)]  # [H, R, D, D]
        for kind in edge_index_dict:
            key, _, value = projected[kind[0]]
            of_keys, of_values = (each[:, self.edge_types_map[kind]] for each in weights)
            keys.append(torch.einsum("nhc,hcd->nhd", key, of_keys * self.p_rel["__".join(kind)].view(-1, 1, 1)))
            values.append(torch.einsum("nhc,hcd->nhd", value, of_values))
            relations.append(Relation(kind, range(end, end := end + len(key)), targets[kind[2]]))
        edges = [with_memory(each) for each in edge_index_dict.values()]
        edges = merge_edges(tuple(relations), edges, cache=self.cache)
        query = torch.cat([projected[kind][1] for kind in targets])
        attended = self._attend(query, torch.cat(keys), torch.cat(values), edges).flatten(1)
        out = {kind: functional.gelu(attended[rows.start : rows.stop]) for kind, rows in targets.items()}
        out = self.out_lin(out)
        for kind, each in out.items():
            x = x_dict[kind]
            if each.shape[1] == x.shape[1]:
                gate = self.skip[kind].sigmoid()
                out[kind] = gate * each + (1 - gate) * x
        return out

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, edges: Tensor) -> Tensor:
        """[targets, H, D] for query [targets, H, D], key and value [sources, H, D]."""
        _, num_heads, head_dim = query.shape
        scale = head_dim**-0.5
        if is_traced(query):
            return attend_edges(query, key, value, edges, backend=self.backend, cache=False, scale=scale)
        plan = plan_edge_index(
            edges,
            (len(query), len(key)),
            backend=self.backend,
            dtype=input_type(query.dtype, query.device.type),
            head_dim=head_dim,
            num_heads=num_heads,
            backward=query.requires_grad or key.requires_grad or value.requires_grad,
            cache=self.cache,
        )
        out = plan(query, key, value, scale=scale)
        require_gradients(out, query, plan.backend)
        return out

    def _check(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Kind, Tensor]) -> None:
        """Raise an error for wrong dictionaries, and for relations whose hooks would not run."""
        for name, x in x_dict.items():
            if not isinstance(x, Tensor) or x.dim() != 2:
                got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise TypeError(f"x_dict[{name!r}]: got {got}; a tensor [N, F] is needed")
        for kind in edge_index_dict:
            if kind not in self.edge_types_map:
                allowed = ", ".join(map(str, self.edge_types))
                raise ValueError(f"edge_index_dict: got {kind}; the metadata have {allowed}")
            if kind[0] not in x_dict or kind[2] not in x_dict:
                raise ValueError(f"x_dict: got {', '.join(x_dict)}; edges {kind} need their sources and targets")
        if not edge_index_dict:
            raise ValueError("edge_index_dict: got no kind of edges; at least one is needed, it may be empty")
        for name in ("k_rel", "v_rel"):
            if not is_plain(getattr(self, name), HeteroLinear):
                raise NotImplementedError(
                    f"{name}: it was replaced or has hooks, which would not run, since only its weight is read; "
                    "take PyG's layer with the same state dict"
                )
