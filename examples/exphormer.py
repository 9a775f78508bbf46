"""Exphormer's attention over the edges of a graph, which have features, a random expander and virtual nodes."""

import argparse
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from fused3s import AttentionPlan, BoundEdges, EdgeData, plan_attention

WIDTH, HEADS, VIRTUAL, DEGREE = 32, 4, 2, 3


class ExphormerAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.Q, self.K, self.E, self.V = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, plan: AttentionPlan, edges: BoundEdges, embedding: Tensor) -> Tensor:
        """The edge_attr of Exphormer is (features of the edge) @ embedding, [r, width]."""
        layers = (self.Q, x), (self.K, x), (self.V, x), (self.E, embedding)
        q, k, v, factor = (layer(rows).unflatten(1, (self.heads, -1)) for layer, rows in layers)
        out, lse = plan(q, k, v, edges=replace(edges, key_factor=factor), return_lse=True)
        share = (lse - torch.tensor(1e-6).log()).sigmoid()  # Z / (Z + 1e-6), for the sum Z of exp(score)
        return (out * share[..., None]).flatten(1)


class Network(nn.Module):
    def __init__(self, num_features: int, num_layers: int = 2) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, WIDTH), nn.Linear(WIDTH, 1)
        self.virtual, self.embedding = nn.Embedding(VIRTUAL, WIDTH), nn.Embedding(num_features, WIDTH)
        self.layers = nn.ModuleList(ExphormerAttention(WIDTH, HEADS) for _ in range(num_layers))

    def forward(self, x: Tensor, plan: AttentionPlan, edges: BoundEdges) -> Tensor:
        h = torch.cat([self.first(x), self.virtual.weight])
        for layer in self.layers:
            h = h + layer(h, plan, edges, self.embedding.weight)
        return self.last(h[: len(x)].relu())[:, 0]


def graph(nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features [nodes, 1]; edges [2, E] of ring, expander (repeated ones count) and virtual nodes; their features."""
    node, ends = torch.arange(nodes), torch.cat([torch.randperm(nodes) for _ in range(DEGREE)])
    expander = torch.stack([torch.cat([node.repeat(DEGREE), ends]), torch.cat([ends, node.repeat(DEGREE)])])
    virtual = [torch.stack([node, torch.full((nodes,), nodes + i)]) for i in range(VIRTUAL)]
    parts = [torch.stack([node, node.roll(1)]), expander, *virtual, *(edges.flip(0) for edges in virtual)]
    kind = torch.cat([torch.full((edges.shape[1],), i) for i, edges in enumerate(parts, 2)])
    features = one_hot(kind).float()
    features[:nodes, :2] = torch.rand(nodes, 2)
    return torch.randn(nodes, 1), torch.cat(parts, 1), features


def main(nodes: int, epochs: int) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, edges, features = (tensor.to(device) for tensor in graph(nodes))
    y = (x[:, 0] > x.mean()).float()
    options = {"dtype": x.dtype, "head_dim": WIDTH // HEADS, "num_heads": HEADS, "edge_data": True, "backward": True}
    backend = "auto" if device == "cuda" else "reference"  # with log-sum-exp
    plan = plan_attention(edges, shape=(nodes + VIRTUAL,) * 2, backend=backend, **options)
    bound = plan.bind_edges(EdgeData(features=features, clamp=5.0))
    model = Network(features.shape[1]).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(1, epochs + 1):
        optimiser.zero_grad()
        loss = binary_cross_entropy_with_logits(model(x, plan, bound), y)
        loss.backward()
        optimiser.step()
        print(f"epoch {epoch}: loss {loss:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=20)
    main(**vars(parser.parse_args()))
