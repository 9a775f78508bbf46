"""The layer of GraphGPS: a local GINE beside global attention, here sparse attention over a block-diagonal A.

    python examples/graphgps.py --graphs 300 --epochs 5

A has a dense block of n^2 edges for each graph, without padding to the largest. State dicts of GraphGPS' GPSLayer load.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.datasets import FakeDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINEConv, global_mean_pool

from fused3s import AttentionPlan, plan_attention, split_qkv

COLUMNS, WIDTH, HEADS, CLASSES = 8, 32, 4, 3


class GPSLayer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.local_model = GINEConv(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)))
        self.self_attn = nn.MultiheadAttention(width, heads)  # only its parameters are used
        self.norm1_local, self.norm1_attn, self.norm2 = (nn.BatchNorm1d(width) for _ in range(3))
        self.ff_linear1, self.ff_linear2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, plan: AttentionPlan) -> Tensor:
        local = self.norm1_local(x + self.dropout(self.local_model(x, edge_index, edge_attr)))
        q, k, v = split_qkv(linear(x, self.self_attn.in_proj_weight, self.self_attn.in_proj_bias), self.heads)
        x = local + self.norm1_attn(x + self.dropout(self.self_attn.out_proj(plan(q, k, v).flatten(1))))
        return self.norm2(x + self.dropout(self.ff_linear2(self.dropout(self.ff_linear1(x).relu()))))


class Network(nn.Module):
    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.nodes, self.edges, self.last = nn.Linear(COLUMNS, WIDTH), nn.Linear(2, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList(GPSLayer(WIDTH, HEADS) for _ in range(num_layers))

    def forward(self, batch: Data) -> Tensor:
        x, edge_attr = self.nodes(batch.x), self.edges(batch.edge_attr)
        options = {"dtype": x.dtype, "device": x.device, "head_dim": WIDTH // HEADS, "num_heads": HEADS}
        plan = plan_attention(batch.pair_index, shape=(len(x), len(x)), backward=torch.is_grad_enabled(), **options)
        for layer in self.layers:
            x = layer(x, batch.edge_index, edge_attr, plan)
        return self.last(global_mean_pool(x, batch.batch))


def with_pairs(graph: Data) -> Data:
    pairs = torch.ones(graph.num_nodes, graph.num_nodes).nonzero().T
    return graph.update({"pair_index": pairs})  # a batch shifts it like edge_index, since its name contains "index"


def main(graphs: int, epochs: int) -> None:
    seed_everything(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = FakeDataset(graphs, 15, 3, COLUMNS, edge_dim=2, num_classes=CLASSES, task="graph", transform=with_pairs)
    model = Network().to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(1, epochs + 1):
        for batch in DataLoader(data, batch_size=32, shuffle=True):
            optimiser.zero_grad()
            loss = cross_entropy(model(batch.to(device)), batch.y.to(device))
            loss.backward()
            optimiser.step()
        print(f"epoch {epoch}: loss {loss:.4f} in the last batch")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=5)
    main(**vars(parser.parse_args()))
