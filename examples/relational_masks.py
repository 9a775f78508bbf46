"""The masks of a relational transformer as block-diagonal graphs: the cells of B contexts of S cells attend to their
row and its parents, to the rows that refer to it, and to their column. Edges come from sorted ids, on the device and
without waiting for it, in place of booleans [B, S, S].

python examples/relational_masks.py --contexts 4 --cells 64 --steps 20
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention

from fused3s import AttentionPlan, PlanRoom, plan_attention

HEADS, HEAD_DIM, MASKS = 4, 16, ("feature", "neighbour", "column")
COLUMNS = torch.tensor([3, 5, 6, 8, 10, 12])  # of the six tables


def pairs(keys: Tensor, key_cells: Tensor, queries: Tensor, query_cells: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """Key and query cell of all pairs with equal ids, then -1: [2, room]; and the number of pairs, which may be more.

    Args:
        keys, queries: [n], [m] ids, below 0 for none; key_cells, query_cells: the cells that they belong to.
    """
    keys, order = keys.sort()
    first, last = (torch.searchsorted(keys, queries, right=right) for right in (False, True))
    end = torch.where(queries < 0, 0, last - first).cumsum(0)
    place = torch.arange(room, device=keys.device)
    query = torch.searchsorted(end, place, right=True).clamp(max=len(end) - 1)
    nth = (place - end[query] + last[query]).clamp(0, len(keys) - 1)
    return torch.where(place < end[-1], torch.stack([key_cells[order[nth]], query_cells[query]]), -1), end[-1]


def edges_of(node: Tensor, parents: Tensor, column: Tensor, room: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Edges of each of MASKS over B S cells, [2, room]; the cells in order of columns, which those of "column" count;
    and the largest number of edges.

    Args:
        node, column: [B, S] ids of the row, and of table and column; parents: [B, S, P] ids of rows, -1 for none.
    """
    cell = torch.arange(node.numel(), device=node.device)
    context = (torch.arange(len(node), device=node.device) << 32).view(-1, 1, 1)

    def distinct(ids: Tensor) -> Tensor:
        """ids [B, S, n], of one context each, as ids of the batch [B S n]; a second copy in a cell is none."""
        ids, _ = ids.sort(2)
        ids[..., 1:].masked_fill_(ids[..., 1:] == ids[..., :-1], -1)
        return torch.where(ids < 0, -1, ids + context).flatten()

    own, node = torch.cat([node.unsqueeze(2), parents], 2), node.unsqueeze(2)  # the row itself and its parents
    node, own, parents, column = map(distinct, (node, own, parents, column.unsqueeze(2)))
    of_own, of_parents = (cell.repeat_interleave(len(each) // len(cell)) for each in (own, parents))
    column, order = column.sort()
    found = {
        "feature": pairs(node, cell, own, of_own, room),
        "neighbour": pairs(parents, of_parents, node, cell, room),
        "column": pairs(column, cell, column, cell, room),
    }
    edges = {name: each for name, (each, _) in found.items()}
    return edges, order, torch.stack([count for _, count in found.values()]).max()


class Masks:
    """Plans of MASKS, filled in place by each batch on a GPU; on a CPU each batch has plans of its own.

    Attributes:
        order: cells in order of columns: the rows of the plan "column".
    """

    def __init__(self, cells: int, room: int, device: str, **options) -> None:
        """cells: of a batch, B S; room: edges of a mask; options: dtype, head_dim and num_heads of the plans."""
        self.shape, self.room, self.options = (cells, cells), room, options | {"device": device, "backward": True}
        on_gpu = torch.device(device).type == "cuda"
        self.rooms = {name: PlanRoom(self.shape, room, **self.options) for name in MASKS} if on_gpu else {}

    def fill(self, node: Tensor, parents: Tensor, column: Tensor) -> None:
        edges, self.order, self.most = edges_of(node, parents, column, self.room)
        for name, room in self.rooms.items():
            room.fill(edges[name])
        self.plans = {name: room.plan for name, room in self.rooms.items()} or {
            name: plan_attention(each[:, each[0] >= 0], shape=self.shape, **self.options)
            for name, each in edges.items()
        }

    def check(self) -> None:
        """Wait for the last fill, and raise a ValueError if a mask had no room for all of its edges."""
        if self.most > self.room:
            raise ValueError(f"room: got {self.room} edges, but a mask has {self.most}; give it that many")


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.RMSNorm(width)
        for name in ("wq", "wk", "wv", "wo"):
            self.add_module(name, nn.Linear(width, width, bias=False))

    def forward(self, x: Tensor, plan: AttentionPlan | None = None) -> Tensor:
        """x: [.., width], in the order of the rows of the plan; None: [B, S, width], all cells of a context."""
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
        by_column = self.attention["column"](rows[masks.order], masks.plans["column"])
        rows = torch.zeros_like(by_column).index_copy(0, masks.order, by_column)
        for name in ("feature", "neighbour"):
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
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, steps + 1):
        node, parents, column = (ids.to(device) for ids in contexts(count, cells))
        masks.fill(node, parents, column)
        value = torch.sin(column + 0.1 * node)  # cells of a column are alike
        is_hidden = torch.rand_like(value) < 0.2
        x = model[0](torch.stack([value * ~is_hidden, is_hidden.float()], 2))
        for block in model[1:-1]:
            x = block(x, masks)
        loss = mse_loss(model[-1](x).squeeze(2)[is_hidden], value[is_hidden])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        print(f"step {step}: loss {loss:.4f}")
    masks.check()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, default=4, dest="count")
    parser.add_argument("--cells", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    main(**vars(parser.parse_args()))
