"""Mini-batches of PyG's NeighborLoader through `TransformerConv`: the import of the layer is the only changed line.

python examples/pyg_neighbor_loader.py                    # NeighborLoader needs pyg-lib or torch-sparse
python examples/pyg_neighbor_loader.py --loader random    # parts of the graph, by PyG's RandomNodeLoader
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch_geometric import typing
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader, RandomNodeLoader

from fused3s.nn import TransformerConv  # in place of torch_geometric.nn

CLASSES = 8
NO_SAMPLER = (
    "NeighborLoader needs pyg-lib (https://data.pyg.org/whl) or torch-sparse, and neither is installed; "
    "--loader random needs neither"
)


class Network(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.conv1 = TransformerConv(CLASSES, width, heads=heads)
        self.conv2 = TransformerConv(heads * width, CLASSES, heads=heads, concat=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


def communities(nodes: int, degree: int = 40) -> Data:
    """A graph whose edges mostly stay within a class; half of the nodes are for training."""
    y = torch.randint(CLASSES, (nodes,))
    edge_index = torch.randint(nodes, (2, nodes * degree))
    same_class = y[edge_index[0]] == y[edge_index[1]]
    edge_index = edge_index[:, same_class | (torch.rand(edge_index.shape[1]) < 0.05)]
    x = one_hot(y, CLASSES) + torch.randn(nodes, CLASSES)
    return Data(x=x, edge_index=edge_index, y=y, train_mask=torch.rand(nodes) < 0.5)


def main(nodes: int, epochs: int, loader: str) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = communities(nodes)
    if loader == "random":
        batches = RandomNodeLoader(data, num_parts=4, shuffle=True)
    elif typing.WITH_PYG_LIB or typing.WITH_TORCH_SPARSE:
        batches = NeighborLoader(data, num_neighbors=[10, 10], batch_size=128, input_nodes=data.train_mask)
    else:
        raise SystemExit(NO_SAMPLER)
    model = Network().to(device)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.005)
    for epoch in range(1, epochs + 1):
        total = 0.0
        for batch in batches:
            batch = batch.to(device)
            seeds = slice(batch.batch_size) if "batch_size" in batch else batch.train_mask
            optimiser.zero_grad()
            loss = cross_entropy(model(batch.x, batch.edge_index)[seeds], batch.y[seeds])
            loss.backward()
            optimiser.step()
            total += loss.item() / len(batches)
        with torch.no_grad():
            right = model(data.x.to(device), data.edge_index.to(device)).argmax(1).cpu() == data.y
        print(f"epoch {epoch}: loss {total:.4f}, validation accuracy {right[~data.train_mask].float().mean():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--loader", choices=["neighbor", "random"], default="neighbor")
    main(**vars(parser.parse_args()))
