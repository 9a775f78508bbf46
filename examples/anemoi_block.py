"""Blocks of the graph transformer in ECMWF's anemoi-models: from a grid on the sphere to a mesh, on it, and back.

python examples/anemoi_block.py --points 400 --steps 10
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, normalize

from fused3s import AttentionPlan, EdgeData, plan_attention

FIELDS, HEAD_DIM = 4, 64


class Block(nn.Module):  # GraphTransformerMapperBlock, or ..ProcessorBlock where source is target; parameters as there
    def __init__(self, channels: int, heads: int, edge_dim: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        for name in ("lin_key", "lin_query", "lin_value", "lin_self", "projection"):
            self.add_module(name, nn.Linear(channels, channels))
        for name in ("layer_norm_attention_src", "layer_norm_attention", "layer_norm_mlp_dst"):
            self.add_module(name, nn.LayerNorm(channels))
        self.lin_edge = nn.Linear(edge_dim, channels)
        mlp = nn.Sequential(nn.Linear(channels, hidden), nn.GELU(), nn.Linear(hidden, channels))
        self.node_dst_mlp = nn.ModuleDict({"mlp": mlp})

    def forward(self, source: Tensor, target: Tensor, plan: AttentionPlan, edge_attr: Tensor) -> Tensor:
        """source: [sources, channels]; target: [targets, channels]; edge_attr: [E, edge_dim], then a column of ones."""
        x = self.layer_norm_attention(target)
        keys = x if source is target else self.layer_norm_attention_src(source)
        layers = (self.lin_query, x), (self.lin_key, keys), (self.lin_value, keys)
        q, k, v = (layer(rows).unflatten(1, (self.heads, -1)) for layer, rows in layers)
        weight = torch.cat([self.lin_edge.weight, self.lin_edge.bias[:, None]], 1).unflatten(0, (self.heads, -1))
        out = plan(q, k, v, edges=EdgeData(features=edge_attr, key_weight=weight, value_weight=weight)).flatten(1)
        out = self.projection(out + self.lin_self(x)) + target
        return self.node_dst_mlp["mlp"](self.layer_norm_mlp_dst(out)) + out


def nearest(sources: Tensor, targets: Tensor, count: int, heads: int) -> tuple[AttentionPlan, Tensor]:
    """Edges to each of the points [targets, 3] from its nearest [sources, 3], with length, direction and 1 [E, 5]."""
    key = torch.cdist(targets, sources).topk(count, largest=False).indices.flatten()
    query = torch.arange(len(targets), device=key.device).repeat_interleave(count)
    options = {"dtype": sources.dtype, "head_dim": HEAD_DIM, "num_heads": heads, "edge_data": True, "backward": True}
    plan = plan_attention(torch.stack([key, query]), shape=(len(targets), len(sources)), **options)
    offset = sources[key] - targets[query]
    return plan, torch.cat([offset.norm(dim=1, keepdim=True), offset, torch.ones_like(offset[:, :1])], 1)


def main(points: int, steps: int, heads: int) -> None:
    torch.manual_seed(0)
    device, channels = "cuda" if torch.cuda.is_available() else "cpu", heads * HEAD_DIM
    grid, mesh = (normalize(torch.randn(n, 3, device=device)) for n in (points, points // 8))
    graphs = [nearest(*each, heads) for each in ((grid, mesh, 12), (mesh, mesh, 8), (mesh, grid, 3))]
    encoder, processor, decoder = (Block(channels, heads, 4, 4 * channels) for _ in graphs)
    of_grid, of_mesh, out = nn.Linear(FIELDS, channels), nn.Linear(3, channels), nn.Linear(channels, FIELDS)
    model = nn.ModuleList([encoder, processor, decoder, of_grid, of_mesh, out]).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-5)
    for step in range(1, steps + 1):
        waves = 3 * torch.randn(3, FIELDS, device=device)  # another weather at each step, which moves a little
        today, tomorrow = (grid @ waves).sin(), ((grid + 0.2 * grid.roll(1, 1)) @ waves).sin()
        x = of_grid(today)
        latent = encoder(x, of_mesh(mesh), *graphs[0])
        latent = processor(latent, latent, *graphs[1])
        loss = mse_loss(out(decoder(latent, x, *graphs[2])), tomorrow)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        print(f"step {step}: loss {loss:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=400)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--heads", type=int, default=16)
    main(**vars(parser.parse_args()))
