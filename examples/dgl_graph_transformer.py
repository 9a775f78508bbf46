"""DGL's examples/sparse/graph_transformer.py without dgl.sparse: SparseMHA, with the same parameters, is of fused3s.

python examples/dgl_graph_transformer.py --molecules 200 --epochs 5
"""

import argparse
import sys
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused3s import AttentionPlan
from fused3s.nn import SparseMHA

sys.modules.setdefault("dgl.graphbolt", ModuleType("dgl.graphbolt"))  # DGL's has no build for a recent PyTorch
import dgl  # noqa: E402


class GTLayer(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.MHA = SparseMHA(hidden_size, num_heads)
        self.batchnorm1, self.batchnorm2 = nn.BatchNorm1d(hidden_size), nn.BatchNorm1d(hidden_size)
        self.FFN1, self.FFN2 = nn.Linear(hidden_size, hidden_size * 2), nn.Linear(hidden_size * 2, hidden_size)

    def forward(self, plan: AttentionPlan, h: Tensor) -> Tensor:
        h = self.batchnorm1(self.MHA(plan, h) + h)
        return self.batchnorm2(self.FFN2(F.relu(self.FFN1(h))) + h)


class GTModel(nn.Module):
    def __init__(self, out_size: int, hidden_size=80, pos_enc_size=8, num_layers=8, num_heads=8) -> None:
        super().__init__()
        self.atom_encoder = nn.Embedding(100, hidden_size)
        self.pos_linear = nn.Linear(pos_enc_size, hidden_size)
        self.layers = nn.ModuleList(GTLayer(hidden_size, num_heads) for _ in range(num_layers))
        first, second = nn.Linear(hidden_size, hidden_size // 2), nn.Linear(hidden_size // 2, hidden_size // 4)
        self.predictor = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(hidden_size // 4, out_size))

    def forward(self, g: "dgl.DGLGraph", atoms: Tensor, pos_enc: Tensor) -> Tensor:
        h = self.atom_encoder(atoms) + self.pos_linear(pos_enc)
        plan = self.layers[0].MHA.plan(g)  # once for all layers, in place of the sparse matrix A
        for layer in self.layers:
            h = layer(plan, h)
        return self.predictor(torch.segment_reduce(h, "sum", lengths=g.batch_num_nodes().to(h.device)))


def molecule(size: int) -> tuple["dgl.DGLGraph", Tensor]:
    """A ring of random atoms, labelled by whether most are of the first kind."""
    graph = dgl.to_bidirected(dgl.graph((torch.arange(size), torch.arange(size).roll(1))))
    graph.ndata["atom"], graph.ndata["PE"] = torch.randint(2, (size,)), dgl.lap_pe(graph, k=8, padding=True)
    return graph, (graph.ndata["atom"].float().mean(0, keepdim=True) < 0.5).float()


def main(molecules: int, epochs: int, layers: int) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = [molecule(size) for size in torch.randint(9, 25, (molecules,)).tolist()]
    model = GTModel(out_size=1, num_layers=layers).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    for epoch in range(1, epochs + 1):
        total = 0.0
        for graphs, labels in dgl.dataloading.GraphDataLoader(data, batch_size=32, shuffle=True):
            atoms, pos_enc = graphs.ndata["atom"].to(device), graphs.ndata["PE"].to(device)  # DGL may have no CUDA
            loss = F.binary_cross_entropy_with_logits(model(graphs, atoms, pos_enc), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(labels) / molecules
        print(f"epoch {epoch}: loss {total:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--molecules", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    main(**vars(parser.parse_args()))
