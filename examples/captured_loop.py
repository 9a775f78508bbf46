"""A custom training loop as one CUDA graph: small graphs from PyG's DataLoader through TransformerConv.

python examples/captured_loop.py --graphs 1000    # on a CPU the steps run eagerly, with the same padding
"""

import argparse

import torch
from torch import Tensor, nn
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.datasets import FakeDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import global_mean_pool

from fused3s import CapturedLoop
from fused3s.nn import TransformerConv

BATCH, FEATURES = 64, 9


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = TransformerConv(FEATURES, 16, heads=4), TransformerConv(64, 16, heads=4)
        self.readout = nn.Linear(64, 2)

    def forward(self, batch: Data) -> Tensor:
        x = self.conv1(batch.x, batch.edge_index).relu()
        return self.readout(global_mean_pool(self.conv2(x, batch.edge_index).relu(), batch.batch, batch.num_graphs))


def main(graphs: int, epochs: int, device: str) -> None:
    seed_everything(0)
    data = FakeDataset(graphs, avg_num_nodes=20, avg_degree=2, num_channels=FEATURES, num_classes=2)
    loader = DataLoader(data, BATCH, shuffle=True)
    model = Network().to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=device == "cuda")

    def step(batch: Data) -> Tensor:
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), batch.y)  # ignores -100, the label of padding
        loss.backward()
        optimiser.step()
        return loss.detach()

    loop = CapturedLoop(step, model, optimiser, samples=loader)
    for epoch in range(1, epochs + 1):
        losses = [loop(batch.to(device)) for batch in loader]
        print(f"epoch {epoch}: loss {torch.stack(losses).mean():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=5)
    main(**vars(parser.parse_args()), device="cuda" if torch.cuda.is_available() else "cpu")
