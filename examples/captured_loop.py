"""A custom training loop as one CUDA graph: molecules from PyG's DataLoader through TransformerConv.

    python -m examples.captured_loop      # on a GPU captured; on a CPU eagerly

The captured step reads tensors of fixed size, which each batch fills. Larger batches run eagerly, as do all on a CPU.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import global_mean_pool

import fused3s.nn
from fused3s import AttentionPlan, PlanRoom, capture_step, copy_padded_

GRAPHS, ROWS, EDGES, FEATURES = 64, 1_600, 3_400, 9  # largest batch


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(fused3s.nn.TransformerConv(columns, 16, heads=4) for columns in (FEATURES, 64))
        self.readout = nn.Linear(64, 1)

    def forward(self, x: Tensor, graph: Tensor | AttentionPlan, batch: Tensor, num_graphs: int) -> Tensor:
        for layer in self.layers:
            x = layer(x, graph).relu()
        return self.readout(global_mean_pool(x, batch, num_graphs))[:, 0]


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the graphs with a label; NaN means no label."""
    known = ~labels.isnan()
    losses = binary_cross_entropy_with_logits(logits, labels.nan_to_num(), reduction="none")
    return (losses * known).sum() / known.sum()


def molecules(count: int) -> list[Data]:
    """Paths of 10 to 30 atoms in both directions, whose label depends on their features."""
    found = []
    for size in torch.randint(10, 30, (count,)).tolist():
        path = torch.stack([torch.arange(size - 1), torch.arange(1, size)])
        x = torch.randn(size, FEATURES)
        found.append(Data(x=x, edge_index=torch.cat([path, path.flip(0)], 1), y=(x.mean() > 0).float()))
    return found


def train(loader: DataLoader, device: torch.device, use_graph: bool, epochs: int = 3) -> list[float]:
    """Mean loss of each epoch."""
    model = Network().to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=device.type == "cuda")

    def update(*inputs: Tensor | AttentionPlan | int, labels: Tensor) -> Tensor:
        optimiser.zero_grad()
        loss = loss_of(model(*inputs), labels)
        loss.backward()
        optimiser.step()
        return loss.detach()

    def eager(batch: Data) -> Tensor:
        return update(batch.x, batch.edge_index, batch.batch, batch.num_graphs, labels=batch.y)

    run = captured(model, optimiser, update) if use_graph else eager
    losses = []
    for _ in range(epochs):
        total = torch.zeros((), device=device)
        for batch in loader:
            batch = batch.to(device, non_blocking=True)
            fits = batch.num_nodes <= ROWS and batch.num_edges <= EDGES
            total += (run if fits else eager)(batch)
        losses.append(total.item() / len(loader))
    return losses


def captured(
    model: Network, optimiser: torch.optim.Optimizer, update: Callable[..., Tensor]
) -> Callable[[Data], Tensor]:
    """The update as a CUDA graph. Padding atoms belong to an additional graph without a label."""
    device = next(model.parameters()).device
    x = torch.zeros(ROWS, FEATURES, device=device)
    edges = torch.full((2, EDGES), -1, device=device)
    graph_of = torch.full((ROWS,), GRAPHS, device=device)
    labels = torch.full((GRAPHS + 1,), torch.nan, device=device)
    room = PlanRoom((ROWS, ROWS), EDGES, device=device, dtype=x.dtype, head_dim=16, num_heads=4, backward=True)

    def step() -> Tensor:
        room.fill(edges)
        return update(x, room.plan, graph_of, GRAPHS + 1, labels=labels)

    graph = capture_step(step, model, optimiser)

    def run(batch: Data) -> Tensor:
        copy_padded_(x, batch.x)
        copy_padded_(edges.T, batch.edge_index.T, -1)
        copy_padded_(graph_of, batch.batch, GRAPHS)
        copy_padded_(labels, batch.y, torch.nan)
        return graph.replay()

    return run


if __name__ == "__main__":
    on_gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    loader = DataLoader(molecules(1_000), batch_size=GRAPHS, shuffle=True, pin_memory=on_gpu)
    for epoch, loss in enumerate(train(loader, torch.device("cuda" if on_gpu else "cpu"), use_graph=on_gpu), 1):
        print(f"epoch {epoch}: loss {loss:.4f}")
