"""UniMP on ogbn-arxiv, examples/unimp_arxiv.py of PyG: of the model, only the import of `TransformerConv` is changed.

python examples/pyg_unimp_arxiv.py                                # a small generated graph
python examples/pyg_unimp_arxiv.py --root datasets --epochs 500   # ogbn-arxiv, downloaded by ogb
"""

import argparse

import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from torch_geometric.data import Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage
from torch_geometric.nn import MaskLabel

from fused3s.nn import TransformerConv


class UniMP(torch.nn.Module):
    def __init__(self, in_channels, num_classes, hidden_channels=64, num_layers=3, heads=2, dropout=0.3) -> None:
        super().__init__()
        self.label_emb = MaskLabel(num_classes, in_channels)
        widths, options = [in_channels] + [hidden_channels] * (num_layers - 1), {"beta": True, "dropout": dropout}
        convs = [TransformerConv(width, hidden_channels // heads, heads, **options) for width in widths[:-1]]
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(hidden_channels) for _ in convs)
        self.convs = torch.nn.ModuleList([*convs, TransformerConv(widths[-1], num_classes, heads, False, **options)])

    def forward(self, x, y, edge_index, label_mask) -> torch.Tensor:
        x = self.label_emb(x, y, label_mask)
        for conv, norm in zip(self.convs[:-1], self.norms, strict=True):
            x = norm(conv(x, edge_index)).relu()
        return self.convs[-1](x, edge_index)


def arxiv(root: str) -> Data:
    from ogb.nodeproppred import PygNodePropPredDataset

    with torch.serialization.safe_globals([DataEdgeAttr, DataTensorAttr, GlobalStorage]):  # for torch.load within ogb
        dataset = PygNodePropPredDataset("ogbn-arxiv", root, T.ToUndirected())
    data, split = dataset[0], dataset.get_idx_split()
    masks = {name: torch.isin(torch.arange(data.num_nodes), ids) for name, ids in split.items()}
    return Data(x=data.x, y=data.y.view(-1), edge_index=data.edge_index, **masks)


def generated(nodes: int, classes: int = 8) -> Data:
    """A graph whose edges mostly stay within a class."""
    y, part, edges = torch.randint(classes, (nodes,)), torch.randint(4, (nodes,)), torch.randint(nodes, (2, 20 * nodes))
    edges = edges[:, (y[edges[0]] == y[edges[1]]) | (torch.rand(20 * nodes) < 0.05)]
    x = F.one_hot(y, classes) + torch.randn(nodes, classes)
    return T.ToUndirected()(Data(x=x, y=y, edge_index=edges, train=part < 2, valid=part == 2, test=part == 3))


def main(root: str | None, nodes: int, epochs: int) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = (generated(nodes) if root is None else arxiv(root)).to(device)
    model = UniMP(data.num_features, int(data.y.max()) + 1).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001, weight_decay=0.0005)

    right = torch.no_grad()(lambda known: model.eval()(data.x, data.y, data.edge_index, known).argmax(-1) == data.y)
    for epoch in range(1, epochs + 1):
        shown = MaskLabel.ratio_mask(data.train, ratio=0.65)  # labels that the model sees; it predicts the others
        asked = data.train ^ shown
        optimizer.zero_grad()
        loss = F.cross_entropy(model.train()(data.x, data.y, data.edge_index, shown)[asked], data.y[asked])
        loss.backward()
        optimizer.step()
        accuracy = right(data.train)[data.valid].float().mean()
        print(f"epoch {epoch}: loss {loss:.4f}, validation accuracy {accuracy:.4f}")
    print(f"test accuracy {right(data.train | data.valid)[data.test].float().mean():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder of OGB's data sets")
    parser.add_argument("--nodes", type=int, default=1_000, help="of the generated graph")
    parser.add_argument("--epochs", type=int, default=20)
    main(**vars(parser.parse_args()))
