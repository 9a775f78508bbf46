"""The masks of a relational transformer as block-diagonal graphs: the cells of B contexts of S cells attend to their
row and its parents, to the rows that refer to it, and to their column. A CSR of each mask comes from sorted ids, on the
device and without waiting for it, in place of booleans [B, S, S]; so a whole step, masks included, is one CUDA graph.

python examples/relational_masks.py --contexts 4 --cells 64 --steps 20
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention

from fused3s import AttentionPlan, PlanRoom, capture_step, plan_attention

HEADS, HEAD_DIM, MASKS = 4, 16, ("feature", "neighbour", "column")
COLUMNS = torch.tensor([3, 5, 6, 8, 10, 12])  # of the six tables


def csr_of(keys: Tensor, queries: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """indptr [cells + 1] and indices [room] of all pairs of cells with equal ids; behind the last pair is padding.

    Args:
        keys, queries: [cells, n], [cells, m] ids of the cells of a batch, below 0 for none.
    """
    ids, order = keys.flatten().sort()
    key_cell = order // keys.shape[1]
    first, last = (torch.searchsorted(ids, queries.flatten(), right=right) for right in (False, True))
    end = torch.where(queries.flatten() < 0, 0, last - first).cumsum(0)
    place = torch.arange(room, device=ids.device)
    query = torch.searchsorted(end, place, right=True).clamp(max=len(end) - 1)
    nth = (place + (last - end)[query]).clamp(0, len(ids) - 1)
    return nn.functional.pad(end[queries.shape[1] - 1 :: queries.shape[1]], (1, 0)), key_cell[nth]


def masks_of(node: Tensor, parents: Tensor, column: Tensor, room: int) -> dict[str, tuple[Tensor, Tensor]]:
    """CSR of each of MASKS over B S cells, with room for so many pairs.

    Args:
        node, column: [B, S] ids of the row, and of table and column; parents: [B, S, P] ids of rows, -1 for none.
    """
    context = (torch.arange(len(node), device=node.device) << 32).view(-1, 1, 1)

    def distinct(ids: Tensor) -> Tensor:
        """ids [B, S, n], of one context each, as ids of the batch [B S, n]; a second copy in a cell is none."""
        is_copy = (ids.unsqueeze(3) == ids.unsqueeze(2)).tril(-1).any(3)
        return torch.where(is_copy | (ids < 0), -1, ids + context).flatten(0, 1)

    own, node = torch.cat([node.unsqueeze(2), parents], 2), node.unsqueeze(2)  # the row itself and its parents
    node, own, parents, column = map(distinct, (node, own, parents, column.unsqueeze(2)))
    keys = dict(zip(MASKS, (node, parents, column), strict=True))
    queries = dict(zip(MASKS, (own, node, column), strict=True))
    return {name: csr_of(keys[name], queries[name], room) for name in MASKS}


class Masks:
    """Plans of MASKS, filled in place by each batch on a GPU; on a CPU each batch has plans of its own."""

    def __init__(self, cells: int, room: int, device: str, **options) -> None:
        """cells: of a batch, B S; room: pairs of a mask; options: dtype, head_dim and num_heads of the plans."""
        self.shape, self.room, self.options = (cells, cells), room, options | {"device": device, "backward": True}
        on_gpu = torch.device(device).type == "cuda"
        self.rooms = {name: PlanRoom(self.shape, room, **self.options) for name in MASKS} if on_gpu else {}

    def fill(self, node: Tensor, parents: Tensor, column: Tensor) -> None:
        found = masks_of(node, parents, column, self.room)
        self.most = torch.stack([indptr[-1] for indptr, _ in found.values()]).max()
        if not self.rooms:
            self.check()
        for name, room in self.rooms.items():
            room.fill(found[name])
        self.plans = {name: room.plan for name, room in self.rooms.items()} or {
            name: plan_attention((indptr, indices[: indptr[-1]]), shape=self.shape, **self.options)
            for name, (indptr, indices) in found.items()
        }

    def check(self) -> None:
        """Wait for the last fill; a ValueError if a mask had no room for its pairs, which a GPU takes for no pairs."""
        if self.most > self.room:
            raise ValueError(f"room: got {self.room} pairs, but a mask has {self.most}; give it that many")


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.RMSNorm(width)
        for name in ("wq", "wk", "wv", "wo"):
            self.add_module(name, nn.Linear(width, width, bias=False))

    def forward(self, x: Tensor, plan: AttentionPlan | None = None) -> Tensor:
        """x: [cells, width]; without a plan [B, S, width], and all cells of a context attend to each other."""
        rows = self.norm(x)
        q, k, v = (layer(rows).unflatten(-1, (self.heads, -1)) for layer in (self.wq, self.wk, self.wv))
        if plan is not None:
            return x + self.wo(plan(q, k, v).flatten(1))
        out = scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)))
        return x + self.wo(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int = HEADS * HEAD_DIM, heads: int = HEADS) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({name: Attention(width, heads) for name in (*MASKS, "full")})

    def forward(self, x: Tensor, masks: Masks) -> Tensor:
        """x: [B, S, width]."""
        rows = x.flatten(0, 1)
        for name in ("column", "feature", "neighbour"):
            rows = self.attention[name](rows, masks.plans[name])
        return self.attention["full"](rows.view_as(x))


def contexts(count: int, cells: int) -> tuple[Tensor, Tensor, Tensor]:
    """node [B, S], parents [B, S, 3] and column [B, S] of random contexts: rows of six tables, each with the cells of
    all of its columns, and up to three parents among the rows before it."""
    table = torch.randint(len(COLUMNS), (count, cells))
    end = COLUMNS[table].cumsum(1)
    place = torch.arange(cells).expand(count, -1).contiguous()
    node = torch.searchsorted(end, place, right=True)
    parents = (torch.rand(count, cells, 3) * torch.arange(cells).view(1, -1, 1)).long()
    parents[torch.rand(parents.shape) < 0.5] = -1
    parents[:, 0] = -1
    first = (COLUMNS.cumsum(0) - COLUMNS)[table] - (end - COLUMNS[table])
    return node, parents.gather(1, node.unsqueeze(2).expand(-1, -1, 3)), place + first.gather(1, node)


def main(count: int, cells: int, steps: int) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"dtype": torch.float32, "head_dim": HEAD_DIM, "num_heads": HEADS}
    masks, width = Masks(count * cells, 64 * count * cells, device, **options), HEADS * HEAD_DIM
    model = nn.ModuleList([nn.Linear(2, width), Block(), Block(), nn.Linear(width, 1)]).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=device == "cuda")
    batch = [ids.to(device) for ids in contexts(count, cells)]  # tensors that each step reads

    def step() -> Tensor:
        node, _, column = batch
        masks.fill(*batch)
        value = torch.sin(column + 0.1 * node)  # cells of a column are alike
        is_hidden = torch.rand_like(value) < 0.2
        x = model[0](torch.stack([value * ~is_hidden, is_hidden.float()], 2))
        for block in model[1:-1]:
            x = block(x, masks)
        error = mse_loss(model[-1](x).squeeze(2), value, reduction="none")
        loss = (error * is_hidden).sum() / is_hidden.sum().clamp(min=1)  # a batch may have none
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        return loss.detach()

    run = capture_step(step, model, optimiser).replay if device == "cuda" else step
    for number in range(1, steps + 1):
        for own, new in zip(batch, contexts(count, cells), strict=True):
            own.copy_(new)
        print(f"step {number}: loss {run():.4f}")
        masks.check()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, default=4, dest="count")
    parser.add_argument("--cells", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    main(**vars(parser.parse_args()))
