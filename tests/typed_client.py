"""A program of a user, which `make check-wheel` checks with `mypy --strict` against the installed wheel; never run."""

import torch
from torch import Tensor, nn

import fused3s
from fused3s import AttentionPlan, BackendInfo, Dropout, EdgeData, PlanRoom, ScoreTerm
from fused3s.nn import AGNNConv, GATConv, GATv2Conv, SparseMHA, TransformerConv


def attend(q: Tensor, k: Tensor, v: Tensor, edge_index: Tensor) -> Tensor:
    plan: AttentionPlan = fused3s.plan_attention(edge_index, shape=(len(q), len(k)), dtype=q.dtype, backward=True)
    out: Tensor = plan(q, k, v, scale=0.5, dropout=Dropout(0.1, torch.zeros(1, dtype=torch.int64)))
    output, lse = plan(q, k, v, return_lse=True)
    features: EdgeData = EdgeData(bias=torch.zeros(edge_index.shape[1]))
    again: Tensor = fused3s.sparse_attention(q, k, v, edge_index, edges=features, backend="auto")
    moved: AttentionPlan = plan.to("cpu")
    bound = moved.bind_edges(EdgeData(score=ScoreTerm("s + edge0", edge={"edge0": torch.zeros(edge_index.shape[1])})))
    return out + output + again + moved(q, k, v, edges=bound) + lse.sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([TransformerConv(8, 8, heads=2), GATConv(16, 8), GATv2Conv(8, 8), AGNNConv()])
        self.mha = SparseMHA(16, 2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edge_index)
        return x


def filled(edge_index: Tensor) -> AttentionPlan:
    room = PlanRoom((16, 16), 64, dtype=torch.float16, head_dim=64)
    room.fill(edge_index)
    return room.plan


def backends() -> list[str]:
    found: dict[str, BackendInfo] = fused3s.list_backends("cpu")
    return [f"{info.name}: {info.summary}" for info in found.values() if info.unavailable is None]


version: str = fused3s.__version__
