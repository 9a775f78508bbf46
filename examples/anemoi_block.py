"""Blocks of the graph transformer in ECMWF's anemoi-models: from a grid on the sphere to a mesh, on it, and back. In
their own models: `use_fused3s(model)`, or `graph_attention_backend: fused3s` of a class made by `with_fused3s`.

python examples/anemoi_block.py --points 400 --steps 10
"""

import argparse
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, normalize

from fused3s import AttentionPlan, EdgeData, plan_attention

FIELDS, HEAD_DIM = 4, 64


@lru_cache(maxsize=8)  # by the tensor itself, which all blocks of a pass share
def plan_of(edge_index: Tensor, shape: tuple[int, int], **options) -> AttentionPlan:
    return plan_attention(edge_index, shape=shape, edge_data=True, backward=True, **options)


class Fused3SAttention:
    """A base class in front of their GraphTransformerProcessorBlock or ..MapperBlock (0.19), for one GPU: edge features
    stay narrow, without a tensor [edges, heads, columns]. q_norm and k_norm stay theirs."""

    def set_attention_function(self) -> None:
        """Theirs allows "triton" and "pyg" alone."""
        self.graph_attention_backend = "fused3s"

    def get_qkve(self, x: Tensor | tuple[Tensor, Tensor], edge_attr: Tensor) -> tuple[Tensor, ...]:
        source, target = x if isinstance(x, tuple) else (x, x)
        return self.lin_query(target), self.lin_key(source), self.lin_value(source), self.edge_pre_mlp(edge_attr)

    def shard_qkve_heads(self, query, key, value, edges, shard_info, batch_size, model_comm_group=None):
        if model_comm_group is not None and model_comm_group.size() > 1:
            raise ValueError(f"model_comm_group: got {model_comm_group.size()} GPUs; one is allowed with fused3s")
        given = query, key, value, query, shard_info, batch_size, model_comm_group
        query, key, value, _, *rest = super().shard_qkve_heads(*given)
        return query, key, value, edges, *rest

    def prepare_qkve_edge_sharding(self, query, key, value, edges):
        return *(each.unflatten(1, (self.num_heads, -1)) for each in (query, key, value)), edges

    def attention_block(self, query, key, value, edges, edge_index, size, num_chunks=1, **_) -> Tensor:
        """query, key, value: [nodes, heads, columns]; edges: [E, edge_dim]. Nothing is worth chunks."""
        options = {"dtype": value.dtype, "head_dim": value.shape[2], "num_heads": self.num_heads}
        plan = plan_of(edge_index, (len(query), len(key)), **options)
        weight = torch.cat([self.lin_edge.weight, self.lin_edge.bias[:, None]], 1).unflatten(0, value.shape[1:])
        features = torch.cat([edges, torch.ones_like(edges[:, :1])], 1)
        # Under autocast norms of queries and keys are float32.
        query, key, weight, features = (each.to(value.dtype) for each in (query, key, weight, features))
        return plan(query, key, value, edges=EdgeData(features=features, key_weight=weight, value_weight=weight))


def with_fused3s(block: type[nn.Module]) -> type[nn.Module]:
    """A class of theirs with this attention: arguments and state dict stay."""
    return type(f"Fused3S{block.__name__}", (Fused3SAttention, block), {})


def use_fused3s(model: nn.Module) -> None:
    """Change the blocks of a model that was built or loaded; `edge_index` must stay one tensor for plans to be kept."""
    for block in model.modules():
        if hasattr(block, "attention_block") and not isinstance(block, Fused3SAttention):
            block.__class__ = with_fused3s(type(block))
            block.set_attention_function()


class Block(Fused3SAttention, nn.Module):  # theirs without their package: parameters and numbers as there
    def __init__(self, channels: int, heads: int, edge_dim: int, hidden: int) -> None:
        super().__init__()
        self.num_heads, self.edge_pre_mlp = heads, nn.Identity()
        for name in ("lin_key", "lin_query", "lin_value", "lin_self", "projection"):
            self.add_module(name, nn.Linear(channels, channels))
        for name in ("layer_norm_attention_src", "layer_norm_attention", "layer_norm_mlp_dst"):
            self.add_module(name, nn.LayerNorm(channels))
        self.lin_edge = nn.Linear(edge_dim, channels)
        mlp = nn.Sequential(nn.Linear(channels, hidden), nn.GELU(), nn.Linear(hidden, channels))
        self.node_dst_mlp = nn.ModuleDict({"mlp": mlp})

    def forward(self, source: Tensor, target: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """source: [sources, channels]; target: [targets, channels]; edge_attr: [E, edge_dim]."""
        x = self.layer_norm_attention(target)
        keys = x if source is target else self.layer_norm_attention_src(source)
        q, k, v, edges = self.prepare_qkve_edge_sharding(*self.get_qkve((keys, x), edge_attr))
        out = self.attention_block(q, k, v, edges, edge_index, (len(source), len(target))).flatten(1)
        out = self.projection(out + self.lin_self(x)) + target
        return self.node_dst_mlp["mlp"](self.layer_norm_mlp_dst(out)) + out


def nearest(sources: Tensor, targets: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Edges [2, E] to each of the points [targets, 3] from its nearest [sources, 3]; length and direction [E, 4]."""
    key = torch.cdist(targets, sources).topk(count, largest=False).indices.flatten()
    query = torch.arange(len(targets), device=key.device).repeat_interleave(count)
    offset = sources[key] - targets[query]
    return torch.stack([key, query]), torch.cat([offset.norm(dim=1, keepdim=True), offset], 1)


def main(points: int, steps: int, heads: int) -> None:
    torch.manual_seed(0)
    device, channels = "cuda" if torch.cuda.is_available() else "cpu", heads * HEAD_DIM
    grid, mesh = (normalize(torch.randn(n, 3, device=device)) for n in (points, points // 8))
    graphs = [nearest(*each) for each in ((grid, mesh, 12), (mesh, mesh, 8), (mesh, grid, 3))]
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
