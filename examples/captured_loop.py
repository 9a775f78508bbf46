"""A custom training loop as one CUDA graph: small graphs from PyG's DataLoader through TransformerConv.

python examples/captured_loop.py --graphs 1000    # on a CPU the steps run eagerly
"""

import argparse

import torch
from torch import Tensor, nn
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.datasets import FakeDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import global_mean_pool

from fused3s import PlanRoom, capture_step, copy_padded_
from fused3s.nn import TransformerConv

BATCH, FEATURES = 64, 9


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = TransformerConv(FEATURES, 16, heads=4), TransformerConv(64, 16, heads=4)
        self.readout = nn.Linear(64, 2)

    def forward(self, batch: Data) -> Tensor:
        x = self.conv1(batch.x, batch.edge_index).relu()
        return self.readout(global_mean_pool(self.conv2(x, batch.edge_index).relu(), batch.batch, len(batch.y)))


def captured(update, rows: int, edges: int, device: str, *states):
    """The update as a CUDA graph of fixed size: padding is one more graph, whose label -100 cross entropy ignores."""
    room = PlanRoom((rows, rows), edges, device=device, dtype=torch.float32, head_dim=16, num_heads=4, backward=True)
    fixed = Data(x=torch.zeros(rows, FEATURES), batch=torch.zeros(rows).long(), y=torch.zeros(BATCH + 1).long())
    fixed, edge_index = fixed.to(device), torch.full((2, edges), -1, device=device)

    def run() -> Tensor:
        room.fill(edge_index)
        fixed.edge_index = room.plan
        return update(fixed)

    def replay(batch: Data) -> Tensor:
        copy_padded_(edge_index.T, batch.edge_index.T, -1)
        for name, padding in {"x": 0, "batch": BATCH, "y": -100}.items():
            copy_padded_(fixed[name], batch[name], padding)
        return graph.replay()

    graph = capture_step(run, *states)
    return replay


def main(graphs: int, epochs: int, device: str) -> None:
    seed_everything(0)
    data = FakeDataset(graphs, avg_num_nodes=20, avg_degree=2, num_channels=FEATURES, num_classes=2)
    model = Network().to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=device == "cuda")

    def step(batch: Data) -> Tensor:
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), batch.y)
        loss.backward()
        optimiser.step()
        return loss.detach()

    if device == "cuda":
        most = (BATCH * max(getattr(graph, name) for graph in data) for name in ("num_nodes", "num_edges"))
        step = captured(step, *most, device, model, optimiser)
    for epoch in range(1, epochs + 1):
        losses = [step(batch.to(device)).clone() for batch in DataLoader(data, BATCH, shuffle=True)]
        print(f"epoch {epoch}: loss {torch.stack(losses).mean():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=5)
    main(**vars(parser.parse_args()), device="cuda" if torch.cuda.is_available() else "cpu")
