"""The attention layer of driving-behaviour models (QCNet, SMART, catk): a vector r of each edge in keys and values, and
a gate. r is normalised and bound to the plan once for all layers; keys and values of edges are never stored.

python examples/driving_attention.py --agents 100 --steps 10
"""

import argparse
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, mse_loss

from fused3s import AttentionPlan, BoundEdges, EdgeData, plan_attention

HEADS, HEAD_DIM, LAYERS = 4, 8, 3


class AttentionLayer(nn.Module):  # arguments, parameters and numbers as theirs, with has_pos_emb=True
    def __init__(self, hidden_dim: int, num_heads: int, head_dim: int, dropout: float, bipartite: bool) -> None:
        super().__init__()
        self.num_heads, self.dropout, width = num_heads, dropout, num_heads * head_dim
        self.to_q, self.to_k = nn.Linear(hidden_dim, width), nn.Linear(hidden_dim, width, bias=False)
        self.to_k_r, self.to_v_r = nn.Linear(hidden_dim, width, bias=False), nn.Linear(hidden_dim, width)
        self.to_v, self.to_s = nn.Linear(hidden_dim, width), nn.Linear(hidden_dim, width)
        self.to_g, self.to_out = nn.Linear(width + hidden_dim, width), nn.Linear(width, hidden_dim)
        hidden = nn.Linear(hidden_dim, 4 * hidden_dim), nn.ReLU(inplace=True), nn.Dropout(dropout)
        self.ff_mlp = nn.Sequential(*hidden, nn.Linear(4 * hidden_dim, hidden_dim))
        for name in ("attn_prenorm_x_src", "attn_prenorm_r", "attn_postnorm", "ff_prenorm", "ff_postnorm"):
            self.add_module(name, nn.LayerNorm(hidden_dim))
        self.attn_prenorm_x_dst = nn.LayerNorm(hidden_dim) if bipartite else self.attn_prenorm_x_src

    def forward(self, x: Tensor | tuple[Tensor, Tensor], r: BoundEdges, plan: AttentionPlan) -> Tensor:
        """x: [nodes, hidden_dim], or those of the sources and of the targets; r: from `bind_normalised`."""
        source, target = x if isinstance(x, tuple) else (x, x)
        keys, x = self.attn_prenorm_x_src(source), self.attn_prenorm_x_dst(target)
        # LN(r) = normalised r * weight + bias: the weight is a factor of W_kr and W_vr. W_kr bias adds the same to all
        # scores of a row and drops out of the softmax; W_vr bias adds the same to all values.
        split = (self.num_heads, -1)
        weights = (each.weight * self.attn_prenorm_r.weight for each in (self.to_k_r, self.to_v_r))
        key_weight, value_weight = (weight.unflatten(0, split) for weight in weights)
        v = self.to_v(keys) + self.to_v_r(self.attn_prenorm_r.bias)
        q, k, v = (each.unflatten(1, split) for each in (self.to_q(x), self.to_k(keys), v))
        edges = replace(r, key_weight=key_weight, value_weight=value_weight)
        out = plan(q, k, v, edges=edges, dropout=self.dropout if self.training else 0.0).flatten(1)
        gate = torch.sigmoid(self.to_g(torch.cat([out, x], 1)))
        x = target + self.attn_postnorm(self.to_out(out + gate * (self.to_s(x) - out)))
        return x + self.ff_postnorm(self.ff_mlp(self.ff_prenorm(x)))


def bind_normalised(plan: AttentionPlan, r: Tensor) -> BoundEdges:
    """r [E, hidden_dim] in the order of the edge_index, normalised, for all layers of a step."""
    return plan.bind_edges(EdgeData(features=layer_norm(r, r.shape[1:])), check_values=False)


def plan_edges(edge_index: Tensor, sources: int, targets: int, num_heads: int, head_dim: int) -> AttentionPlan:
    options = {"dtype": torch.float32, "head_dim": head_dim, "num_heads": num_heads}
    return plan_attention(edge_index, shape=(targets, sources), edge_data=True, backward=True, **options)


def within(sources: Tensor, targets: Tensor, radius: float, most: int) -> Tensor:
    """edge_index from the nearest sources [n, 2] to each target [m, 2]: those within a radius, at most `most`."""
    distance, source = torch.cdist(targets, sources).topk(min(most, len(sources)), largest=False)
    target, nth = (distance < radius).nonzero(as_tuple=True)
    return torch.stack([source[target, nth], target])


class Network(nn.Module):
    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        self.of_map, self.of_agent = nn.Linear(2, hidden_dim), nn.Linear(2, hidden_dim)
        self.of_edge = nn.Sequential(nn.Linear(3, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, hidden_dim))
        options = {"num_heads": HEADS, "head_dim": HEAD_DIM, "dropout": 0.0, "bipartite": True}
        self.layers = nn.ModuleList(AttentionLayer(hidden_dim, **options) for _ in range(LAYERS))
        self.out = nn.Linear(hidden_dim, 2)

    def forward(self, lanes: Tensor, agents: Tensor, heading: Tensor, plan: AttentionPlan, ends: Tensor) -> Tensor:
        """The direction of the lanes around each agent, [agents, 2]; lanes: position and direction, [lanes, 4]."""
        offset = lanes[ends[0], :2] - agents[ends[1]]
        r = bind_normalised(plan, self.of_edge(torch.cat([offset, offset.norm(dim=1, keepdim=True)], 1)))
        points, x = self.of_map(lanes[:, 2:]), self.of_agent(heading)
        for layer in self.layers:
            x = layer((points, x), r, plan)
        return self.out(x)


def main(agents: int, steps: int, columns: int) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lanes, places = torch.rand(5 * agents, 2, device=device), torch.rand(agents, 2, device=device)
    flow = lambda points: torch.stack([(6 * points[:, 1]).sin(), (6 * points[:, 0]).cos()], 1)  # noqa: E731
    ends = within(lanes, places, 0.2, 300)
    plan = plan_edges(ends, len(lanes), agents, HEADS, HEAD_DIM)
    model = Network(columns).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, steps + 1):
        heading = flow(places) + 0.5 * torch.randn_like(places)
        loss = mse_loss(model(torch.cat([lanes, flow(lanes)], 1), places, heading, plan, ends), flow(places))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        print(f"step {step}: loss {loss:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--columns", type=int, default=128, help="of r and of all other vectors")
    main(**vars(parser.parse_args()))
