"""A graph transformer of DGL with sparse multi-head attention; fused3s takes the place of `dgl.sparse`.

python examples/dgl_graph_transformer.py --molecules 200 --epochs 5
"""

import argparse
import sys
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fused3s  # in place of: import dgl.sparse as dglsp

sys.modules.setdefault("dgl.graphbolt", ModuleType("dgl.graphbolt"))  # DGL's has no build for a recent PyTorch
import dgl  # noqa: E402


class Block(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.shape, self.scale = (3, hidden_size // num_heads, num_heads), (hidden_size // num_heads) ** -0.5
        self.qkv, self.out = nn.Linear(hidden_size, 3 * hidden_size), nn.Linear(hidden_size, hidden_size)
        self.norm1, self.norm2 = nn.BatchNorm1d(hidden_size), nn.BatchNorm1d(hidden_size)
        self.up, self.down = nn.Linear(hidden_size, 2 * hidden_size), nn.Linear(2 * hidden_size, hidden_size)

    def forward(self, graph: dgl.DGLGraph, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h).unflatten(1, self.shape).unbind(1)  # [nodes, columns, heads] each
        # In place of: dglsp.bspmm(dglsp.bsddmm(A, q * self.scale, k.transpose(1, 0)).softmax(), v)
        attended = fused3s.edge_attention(q, k, v, graph, scale=self.scale)
        h = self.norm1(h + self.out(attended.flatten(1)))
        return self.norm2(h + self.down(F.relu(self.up(h))))


class Network(nn.Module):
    def __init__(self, num_layers: int, hidden_size: int = 80, num_heads: int = 8) -> None:
        super().__init__()
        self.atoms, self.encoding = nn.Embedding(2, hidden_size), nn.Linear(8, hidden_size)
        self.blocks = nn.ModuleList(Block(hidden_size, num_heads) for _ in range(num_layers))
        self.head = nn.Linear(hidden_size, 1)

    def forward(self, graph: dgl.DGLGraph, atoms: Tensor, encoding: Tensor) -> Tensor:
        h = self.atoms(atoms) + self.encoding(encoding)
        for block in self.blocks:
            h = block(graph, h)
        return self.head(torch.segment_reduce(h, "sum", lengths=graph.batch_num_nodes().to(h.device)))


def molecule(size: int) -> tuple[dgl.DGLGraph, Tensor]:
    """A ring of random atoms, labelled by whether most are of the first kind."""
    graph = dgl.to_bidirected(dgl.graph((torch.arange(size), torch.arange(size).roll(1))))
    graph.ndata["atom"], graph.ndata["PE"] = torch.randint(2, (size,)), dgl.lap_pe(graph, k=8, padding=True)
    return graph, (graph.ndata["atom"].float().mean(0, keepdim=True) < 0.5).float()


def main(molecules: int, epochs: int, layers: int) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = [molecule(size) for size in torch.randint(9, 25, (molecules,)).tolist()]
    model = Network(layers).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    for epoch in range(1, epochs + 1):
        total = 0.0
        for graphs, labels in dgl.dataloading.GraphDataLoader(data, batch_size=32, shuffle=True):
            atoms, encoding = graphs.ndata["atom"].to(device), graphs.ndata["PE"].to(device)  # DGL may have no CUDA
            loss = F.binary_cross_entropy_with_logits(model(graphs, atoms, encoding), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(labels) / molecules
        print(f"epoch {epoch}: loss {total:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("molecules", 200), ("epochs", 5), ("layers", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    main(**vars(parser.parse_args()))
