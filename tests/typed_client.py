"""A program of a user, which `make check-wheel` checks with `mypy --strict` against the installed wheel; never run."""

import torch
from torch import Tensor, nn

import fused3s
from fused3s import AttentionPlan, BackendInfo, Dropout, EdgeData, PlanRoom, ScoreTerm
from fused3s.nn import AGNNConv, GATConv, GATv2Conv, SparseMHA, TransformerConv
from fused3s.nn import dgl as of_dgl


def attend(q: Tensor, k: Tensor, v: Tensor, edge_index: Tensor) -> Tensor:
    plan: AttentionPlan = fused3s.plan_attention(edge_index, shape=(len(q), len(k)), dtype=q.dtype, backward=True)
    out: Tensor = plan(q, k, v, scale=0.5, dropout=Dropout(0.1, torch.zeros(1, dtype=torch.int64)))
    output, lse = plan(q, k, v, return_lse=True)
    features: EdgeData = EdgeData(bias=torch.zeros(edge_index.shape[1]))
    heads_last: Tensor = fused3s.edge_attention(q, k, v, plan, scale=0.5, dropout=0.1)
    again: Tensor = fused3s.sparse_attention(q, k, v, edge_index, edges=features, backend="auto")
    moved: AttentionPlan = plan.to("cpu")
    bound = moved.bind_edges(EdgeData(score=ScoreTerm("s + edge0", edge={"edge0": torch.zeros(edge_index.shape[1])})))
    return out + output + again + heads_last + moved(q, k, v, edges=bound) + lse.sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([TransformerConv(8, 8, heads=2), GATConv(16, 8), GATv2Conv(8, 8), AGNNConv()])
        self.mha = SparseMHA(16, 2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edge_index)
        return x


def of_graph(graph: object, feat: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    feat = of_dgl.AGNNConv(init_beta=0.5)(graph, feat)
    feat = of_dgl.TransformerConv(8, 8)(graph, feat)
    feat = of_dgl.GATv2Conv(8, 8, 2, share_weights=True)(graph, feat)
    gat: Tensor | tuple[Tensor, Tensor] = of_dgl.GATConv(16, 8, 2, activation=torch.relu)(graph, feat.flatten(1))
    return gat


def filled(edge_index: Tensor) -> AttentionPlan:
    room = PlanRoom((16, 16), 64, dtype=torch.float16, head_dim=64)
    room.fill(edge_index)
    return room.plan


def backends() -> list[str]:
    found: dict[str, BackendInfo] = fused3s.list_backends("cpu")
    return [f"{info.name}: {info.summary}" for info in found.values() if info.unavailable is None]


version: str = fused3s.__version__
