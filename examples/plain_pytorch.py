"""A transformer whose nodes attend along the edges of a graph, in PyTorch alone: neither PyG nor DGL is needed.

python examples/plain_pytorch.py --nodes 1000 --epochs 20
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from fused3s import AttentionPlan, plan_attention, split_qkv

CLASSES, WIDTH, HEADS = 8, 64, 4


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, plan: AttentionPlan) -> Tensor:
        q, k, v = split_qkv(self.qkv(self.norm1(x)), self.heads)  # [nodes, heads, columns] each
        x = x + self.out(plan(q, k, v).flatten(1))
        return x + self.mlp(self.norm2(x))


class Network(nn.Module):
    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Block() for _ in range(num_layers))

    def forward(self, x: Tensor, plan: AttentionPlan) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, plan)
        return self.last(x)


def communities(nodes: int, degree: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy features [nodes, CLASSES], edges [2, E] that mostly stay within a class, and the classes."""
    y = torch.randint(CLASSES, (nodes,))
    source, target = torch.randint(nodes, (2, nodes * degree))
    keep = (y[source] == y[target]) | (torch.rand(len(source)) < 0.05)
    loops = torch.arange(nodes).expand(2, -1)
    edge_index = torch.cat([torch.stack([source, target])[:, keep], loops], 1)
    return one_hot(y, CLASSES) + torch.randn(nodes, CLASSES), edge_index, y


def main(nodes: int, epochs: int) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, edge_index, y = (tensor.to(device) for tensor in communities(nodes))
    is_train = torch.arange(nodes, device=device) < nodes // 2
    model = Network().to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    options = {"device": device, "dtype": x.dtype, "head_dim": WIDTH // HEADS, "num_heads": HEADS}
    plan = plan_attention(edge_index, shape=(nodes, nodes), backward=True, **options)  # once, for all layers and steps
    print(plan)
    for epoch in range(1, epochs + 1):
        optimiser.zero_grad()
        logits = model(x, plan)
        loss = cross_entropy(logits[is_train], y[is_train])
        loss.backward()
        optimiser.step()
        right = (logits.argmax(1) == y)[~is_train].float().mean()
        print(f"epoch {epoch}: loss {loss:.4f}, validation accuracy {right:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--epochs", type=int, default=20)
    main(**vars(parser.parse_args()))
