"""Attention over a mesh without dgl.sparse: heads last, two hops and dilated edges, RoPE, checkpoints, CUDA graphs.

python examples/mesh_transformer.py --nodes 1000 --steps 20
"""

import argparse
import math

import torch
from scipy.spatial import Delaunay
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from fused3s import AttentionPlan, capture_step, edge_attention, plan_attention

HEADS, HEAD_DIM, ROLLOUT = 4, 16, 10


def mesh(nodes: int) -> tuple[Tensor, Tensor]:
    """Points [N, 2] of a grid with jitter in the unit square, N a square up to `nodes`; their triangles [T, 3]."""
    side = math.isqrt(nodes)
    points = (torch.cartesian_prod(torch.arange(side), torch.arange(side)) + 0.8 * torch.rand(side**2, 2)) / side
    return points, torch.from_numpy(Delaunay(points.numpy()).simplices).long()


def adjacency(triangles: Tensor, nodes: int) -> Tensor:
    """Rows and columns of A [2, E], each pair once: nodes within two hops, itself included, and a tenth as many dilated
    (random) ones; computed where the triangles are."""
    ends = triangles[:, torch.cartesian_prod(torch.arange(3), torch.arange(3))].flatten(0, 1).T
    one_hop = torch.sparse_coo_tensor(ends, torch.ones(ends.shape[1], device=ends.device), (nodes, nodes))
    two_hops = torch.sparse.mm(one_hop, one_hop).coalesce().indices()
    row, column = torch.cat([two_hops, torch.randint(nodes, (2, two_hops.shape[1] // 10), device=ends.device)], 1)
    ids = torch.unique(row * nodes + column)
    return torch.stack([ids // nodes, ids % nodes])


def rotate(x: Tensor, points: Tensor) -> Tensor:
    """RoPE of x [nodes, columns, heads]: half of the pairs of columns turn by a coordinate, half by the other."""
    frequencies = 100.0 ** torch.linspace(0, 1, x.shape[1] // 4, device=x.device)
    angle = (points.unsqueeze(-1) * frequencies).flatten(1).unsqueeze(-1)
    (even, odd), cos, sin = (x[:, 0::2], x[:, 1::2]), angle.cos(), angle.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], 2).flatten(1, 2)


class Block(nn.Module):
    def __init__(self, width: int = HEADS * HEAD_DIM, heads: int = HEADS) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, points: Tensor, plan: AttentionPlan) -> Tensor:
        q, k, v = (part.unflatten(1, (-1, self.heads)) for part in self.qkv(self.norm(x)).chunk(3, 1))
        out = edge_attention(rotate(q, points), rotate(k, points), v, plan, scale=q.shape[1] ** -0.5)
        return x + self.out(out.flatten(1)).relu()


class Network(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, HEADS * HEAD_DIM), nn.Linear(HEADS * HEAD_DIM, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, state: Tensor, points: Tensor, plan: AttentionPlan) -> Tensor:
        """The next state, [nodes, 1]. Training keeps the inputs of the blocks alone and computes the rest again."""
        x = self.first(state)
        for block in self.blocks:
            x = checkpoint(block, x, points, plan, use_reentrant=False) if x.requires_grad else block(x, points, plan)
        return state + self.last(x)


def rollout(model: Network, state: Tensor, points: Tensor, plan: AttentionPlan, steps: int = ROLLOUT):
    """A function that gives the state `steps` steps after that in `state`: on a GPU one CUDA graph for all of them."""

    @torch.no_grad()
    def run() -> Tensor:
        last = state
        for _ in range(steps):
            last = model(last, points, plan)
        return last

    return capture_step(run, model).replay if state.is_cuda else run


def main(nodes: int, steps: int) -> None:
    torch.manual_seed(0)
    points, triangles = (tensor.to("cuda" if torch.cuda.is_available() else "cpu") for tensor in mesh(nodes))
    shape = len(points), len(points)
    options = {"dtype": points.dtype, "head_dim": HEAD_DIM, "num_heads": HEADS, "backward": True}
    plan = plan_attention(adjacency(triangles, len(points)).flip(0), shape=shape, **options)  # columns, then rows
    waves = (6 * points[:, :1] + 6 * points[:, 1:] - 0.3 * torch.arange(steps + ROLLOUT + 1).to(points)).sin()
    model = Network().to(points.device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        loss = mse_loss(model(waves[:, step, None], points, plan), waves[:, step + 1, None])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        print(f"step {step + 1}: loss {loss:.4f}")
    final = rollout(model, waves[:, steps, None], points, plan)()
    print(f"{ROLLOUT} steps later: error {mse_loss(final, waves[:, -1:]):.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--steps", type=int, default=20)
    main(**vars(parser.parse_args()))
