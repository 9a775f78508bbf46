"""A potential from distances: attention over a radius graph, with distances in the scores, keys and values.

python examples/distance_potential.py --structures 64 --epochs 20
"""

import argparse

import torch
from torch import Tensor, nn

from fused3s import EdgeData, ScoreTerm, plan_attention

WIDTH, HEADS, RADIAL, CUTOFF = 32, 4, 12, 2.0


class Potential(nn.Module):
    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.atom, self.slope = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.ones(num_layers, HEADS))
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(num_layers))
        self.radial = nn.Parameter(torch.randn(num_layers, 2, HEADS, WIDTH // HEADS, RADIAL) / 3)
        self.energy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def forward(self, positions: Tensor) -> Tensor:
        """positions [structures, atoms, 3] -> energies [structures]."""
        (edge_index, r), atoms = radius_graph(positions), positions[..., 0].numel()
        basis = torch.exp(-8 * (r[:, None] - torch.linspace(0.5, CUTOFF, RADIAL).to(r)).square())
        options = {"dtype": r.dtype, "head_dim": WIDTH // HEADS, "num_heads": HEADS, "edge_data": True}
        plan = plan_attention(edge_index, shape=(atoms, atoms), device=r.device, backward=True, **options)
        h = self.atom.expand(atoms, -1)
        for qkv, radial, slope in zip(self.qkv, self.radial, self.slope, strict=True):
            q, k, v = qkv(h).unflatten(1, (3, HEADS, -1)).unbind(1)
            score = ScoreTerm(  # the weight of an edge is 0 at the cutoff
                "s - slope * r + 2 * log(1 - r / cutoff)", edge={"r": r}, head={"slope": slope}, cutoff=CUTOFF
            )
            edges = EdgeData(features=basis, key_weight=radial[0], value_weight=radial[1], score=score)
            h = h + plan(q, k, v, edges=edges).flatten(1)
        return self.energy(h)[:, 0].view(len(positions), -1).sum(1)


def radius_graph(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Edges [2, E] between different atoms of a structure closer than CUTOFF, and their lengths [E]."""
    distance = (positions[:, :, None] - positions[:, None]).norm(dim=-1)
    structure, query, key = ((distance < CUTOFF) & (distance > 0)).nonzero().T
    return torch.stack([key, query]) + structure * positions.shape[1], distance[structure, query, key]


def morse(positions: Tensor) -> Tensor:
    x = torch.exp(1 - (positions[:, :, None] - positions[:, None]).norm(dim=-1))
    return (x * x - 2 * x).sum((1, 2)) / 2


def main(structures: int, epochs: int) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    positions = (torch.cartesian_prod(*[torch.tensor([0, 1.1])] * 3) + 0.1 * torch.randn(structures, 8, 3)).to(device)
    energies = morse(positions) - morse(positions).mean()
    model = Potential().to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(1, epochs + 1):
        optimiser.zero_grad()
        loss = (model(positions) - energies).square().mean()
        loss.backward()
        optimiser.step()
        print(f"epoch {epoch}: loss {loss:.4f}")
    # Training on forces takes second derivatives, an error with the backend fused3s.
    forces = -torch.autograd.grad(model(positions.requires_grad_()).sum(), positions)[0]
    print(f"forces {list(forces.shape)}, {forces.norm(dim=-1).mean():.3f} on average")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--structures", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=20)
    main(**vars(parser.parse_args()))
