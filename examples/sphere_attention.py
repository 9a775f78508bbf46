"""Neighbourhood attention on the sphere, as in torch-harmonics: each point counts by its area w in the softmax,

O_i = sum of w_j exp(s_ij) v_j / sum of w_j exp(s_ij)    over the points j within a radius of point i.

python examples/sphere_attention.py --latitudes 24 --steps 20
"""

import argparse
import math

import torch
from torch import Tensor, nn

from fused3s import AttentionPlan, BoundEdges, EdgeData, ScoreTerm, plan_attention, split_qkv

WIDTH, HEADS, FIELDS = 64, 4, 3


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, plan: AttentionPlan, areas: BoundEdges) -> Tensor:
        q, k, v = split_qkv(self.qkv(self.norm1(x)), self.heads)
        x = x + self.out(plan(q, k, v, edges=areas).flatten(1))
        return x + self.mlp(self.norm2(x))


def grid(latitudes: int) -> tuple[Tensor, Tensor]:
    """Points [n, 3] of an equiangular grid without poles, and their areas [n], together 4 pi."""
    bounds, longitude = torch.linspace(0, math.pi, latitudes + 1), torch.arange(2 * latitudes) * math.pi / latitudes
    colatitude = (bounds[1:, None] + bounds[:-1, None]) / 2
    x, y = colatitude.sin() * longitude.cos(), colatitude.sin() * longitude.sin()
    areas = (bounds[:-1].cos() - bounds[1:].cos()) * math.pi / latitudes
    return torch.stack([x, y, colatitude.cos().expand_as(x)], -1).flatten(0, 1), areas.repeat_interleave(2 * latitudes)


def plan_sphere(points: Tensor, areas: Tensor, radius: float) -> tuple[AttentionPlan, BoundEdges]:
    edge_index = (points @ points.T > math.cos(radius)).nonzero().T  # symmetric
    options = {"dtype": points.dtype, "head_dim": WIDTH // HEADS, "num_heads": HEADS, "backward": True}
    plan = plan_attention(edge_index, shape=(len(points), len(points)), device=points.device, **options)
    return plan, plan.bind_edges(EdgeData(score=ScoreTerm("s + log_area", col={"log_area": areas.log()})))


def main(latitudes: int, steps: int, radius: float) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    points, areas = (tensor.to(device) for tensor in grid(latitudes))
    plan, bound = plan_sphere(points, areas, radius)
    first, block, last = nn.Linear(FIELDS, WIDTH), Block(), nn.Linear(WIDTH, FIELDS)
    model = nn.ModuleList([first, block, last]).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        field = (points @ torch.randn(3, FIELDS, device=device)).sin()
        noisy = field + 0.5 * torch.randn_like(field)
        error = last(block(first(noisy), plan, bound)) - field
        loss = (areas @ error.square()).mean() / (4 * math.pi)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        print(f"step {step}: loss {loss:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latitudes", type=int, default=24)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--radius", type=float, default=0.3, help="in radians")
    main(**vars(parser.parse_args()))
