"""Graphs as edge lists with edge data, the forms in which a caller may hand them in, and dense float64 attention."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from tolerance import FLOOR
from torch.nn.functional import leaky_relu

from data.dgl import import_dgl
from fused3s import BoundEdges, EdgeData
from fused3s.graph.edge_order import EdgeOrder
from fused3s.terms.edge_data import bind

RANK, TYPES, CLAMP = 11, 3, 0.8


@dataclass(frozen=True, eq=False)
class EdgeList:
    """Edges (row, col) [E] int64 of a matrix in no particular order; edges may be repeated."""

    row: torch.Tensor
    col: torch.Tensor
    shape: tuple[int, int]

    @property
    def num_edges(self) -> int:
        return self.row.numel()

    def table(self) -> torch.Tensor:
        """[num_rows, num_cols, copies]: the edges of the list at each place, in its order; -1 where there are fewer."""
        places = list(zip(self.row.tolist(), self.col.tolist(), strict=True))
        counts = Counter(places)
        table = np.full((*self.shape, max(counts.values(), default=1)), -1)
        found = Counter()
        for edge, place in enumerate(places):
            table[(*place, found[place])] = edge
            found[place] += 1
        return torch.from_numpy(table)

    def mask(self) -> torch.Tensor:
        """[num_rows, num_cols] bool: whether there is an edge."""
        return self.table()[..., 0] >= 0

    def csr_order(self, rows: torch.Tensor | None = None) -> torch.Tensor:
        """[E]: the edges row by row, first copies by column, then second ones, and so on; `rows`: the order of rows."""
        table = self.table().transpose(1, 2)
        table = table if rows is None else table[rows]
        return table[table >= 0]


def _edge_list(mask: np.ndarray, repeats: int = 0) -> EdgeList:
    """The nonzeros of a mask, and `repeats` of them again, shuffled."""
    generator = np.random.default_rng(mask.shape[0] + 7 * mask.shape[1])
    places = np.argwhere(mask)
    if repeats:
        places = np.concatenate([places, places[generator.integers(len(places), size=repeats)]])
    row, col = torch.from_numpy(generator.permutation(places)).T
    return EdgeList(row.clone(), col.clone(), mask.shape)


def _random(rows: int, cols: int, density: float = 0.2) -> np.ndarray:
    return np.random.default_rng(rows * 1000 + cols).random((rows, cols)) < density


def _hub(num_nodes: int) -> np.ndarray:
    mask = _random(num_nodes, num_nodes, 0.03)
    mask[num_nodes // 2] = True
    mask[:, 5] = True
    return mask


# Small enough for dense [N, M, H, d] tensors.
EDGE_LISTS: dict[str, Callable[[], EdgeList]] = {
    "one_node_no_edge": lambda: _edge_list(np.zeros((1, 1), bool)),
    "one_node_self_loop": lambda: _edge_list(np.ones((1, 1), bool)),
    "no_edges": lambda: _edge_list(np.zeros((20, 20), bool)),
    "n_multiple_of_16": lambda: _edge_list(_random(32, 32)),
    "n_one_past_16": lambda: _edge_list(_random(33, 33)),
    "n_one_short_of_16": lambda: _edge_list(_random(31, 31)),
    "empty_rows_and_windows": lambda: _edge_list(np.vstack([np.zeros((20, 40), bool), _random(25, 40, 0.06)])),
    "hub": lambda: _edge_list(_hub(70)),
    "directed": lambda: _edge_list(np.tril(_random(40, 40, 0.3), -1)),
    "self_loops": lambda: _edge_list(_random(36, 36, 0.1) | np.eye(36, dtype=bool)),
    "repeated": lambda: _edge_list(_random(34, 34, 0.1) | np.eye(34, dtype=bool), repeats=120),
    "wide": lambda: _edge_list(_random(7, 60, 0.4)),
    "tall": lambda: _edge_list(_random(60, 7, 0.4)),
}


def _as_dgl(graph: EdgeList) -> tuple[Any, torch.Tensor]:
    dgl = import_dgl()
    num_rows, num_cols = graph.shape
    ends = (graph.col, graph.row)  # from keys to queries
    if num_rows == num_cols:
        return dgl.graph(ends, num_nodes=num_rows), torch.arange(graph.num_edges)
    return dgl.create_block(ends, num_src_nodes=num_cols, num_dst_nodes=num_rows), torch.arange(graph.num_edges)


def _as_coo(graph: EdgeList) -> tuple[Any, torch.Tensor]:
    ones = np.ones(graph.num_edges, np.float32)
    return sp.coo_array((ones, (graph.row.numpy(), graph.col.numpy())), shape=graph.shape), torch.arange(
        graph.num_edges
    )


def compressed(graph: EdgeList, by_column: bool = False) -> tuple[list[torch.Tensor], torch.Tensor]:
    """[offsets, inner ids, values] of CSR or CSC, and the order of the edges: inner ids stay unsorted and repeated."""
    outer, inner = (graph.col, graph.row) if by_column else (graph.row, graph.col)
    order = torch.sort(outer, stable=True).indices
    offsets = torch.nn.functional.pad(torch.bincount(outer, minlength=graph.shape[by_column]).cumsum(0), (1, 0))
    return [offsets, inner[order], torch.ones(graph.num_edges)], order


def _as_scipy(graph: EdgeList, make: Callable[..., Any], by_column: bool) -> tuple[Any, torch.Tensor]:
    (offsets, ids, values), order = compressed(graph, by_column)
    return make((values.numpy(), ids.numpy(), offsets.numpy()), shape=graph.shape), order


def _as_torch(graph: EdgeList, make: Callable[..., Any], by_column: bool) -> tuple[Any, torch.Tensor]:
    arrays, order = compressed(graph, by_column)
    return make(*arrays, graph.shape, check_invariants=False), order


def _as_torch_coo(graph: EdgeList) -> tuple[Any, torch.Tensor]:
    indices, ones = torch.stack([graph.row, graph.col]), torch.ones(graph.num_edges)
    return torch.sparse_coo_tensor(indices, ones, graph.shape), torch.arange(graph.num_edges)


# Each form of an edge list, and the edge of the list for each of the form's own edges [E].
FORMS: dict[str, Callable[[EdgeList], tuple[Any, torch.Tensor]]] = {
    "dgl": _as_dgl,
    "scipy_coo": _as_coo,
    "scipy_csr": lambda graph: _as_scipy(graph, sp.csr_array, False),
    "scipy_csc": lambda graph: _as_scipy(graph, sp.csc_array, True),
    "torch_csr": lambda graph: _as_torch(graph, torch.sparse_csr_tensor, False),
    "torch_csc": lambda graph: _as_torch(graph, torch.sparse_csc_tensor, True),
    "torch_coo": _as_torch_coo,
}


def _as_edge_index(graph: EdgeList, change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, torch.Tensor]:
    return change(torch.stack([graph.col, graph.row])), torch.arange(graph.num_edges)


def _as_arrays(graph: EdgeList, change: Callable[[torch.Tensor], Any]) -> tuple[Any, torch.Tensor]:
    (offsets, ids, _), order = compressed(graph)
    return (change(offsets), change(ids)), order


# The same of forms without a shape of their own.
WITHOUT_SHAPE: dict[str, Callable[[EdgeList], tuple[Any, torch.Tensor]]] = {
    "edge_index": lambda graph: _as_edge_index(graph, lambda x: x),
    "edge_index, int32": lambda graph: _as_edge_index(graph, torch.Tensor.int),
    "edge_index, transposed": lambda graph: _as_edge_index(graph, lambda x: x.T.contiguous().T),
    "edge_index, strided": lambda graph: _as_edge_index(graph, lambda x: torch.stack([x, -1 - x], -1)[..., 0]),
    "(indptr, indices)": lambda graph: _as_arrays(graph, lambda x: x),
    "(indptr, indices), int32 of NumPy": lambda graph: _as_arrays(graph, lambda x: x.numpy().astype(np.int32)),
}

# Edge data by name; see `edge_inputs`.
KINDS: dict[str, tuple[str, ...]] = {
    "bias": ("bias",),
    "bias_per_head": ("bias_per_head",),
    "bias_minus_infinity": ("bias_minus_infinity",),
    "multiplier": ("multiplier",),
    "multiplier_per_head": ("multiplier_per_head",),
    "key_features": ("key_features",),
    "value_features": ("value_features",),
    "features": ("key_features", "value_features"),
    "types": ("types",),
    "key_factor": ("key_factor",),
    "key_factor_and_value_features": ("key_factor", "value_features"),
    "key_factor_and_features": ("key_factor", "key_features", "value_features", "multiplier"),
    "additive_features": ("additive", "key_features"),
    "additive_and_value_features": ("additive", "key_features", "value_features", "bias_per_head"),
    "clamp": ("clamp",),
    "bias_minus_infinity_clamped": ("bias_minus_infinity", "clamp"),
    "all": ("bias_per_head", "multiplier", "key_features", "value_features", "types", "clamp"),
}


OF_EDGES = ("bias", "multiplier", "features", "types")  # fields of `EdgeData` with an entry for each edge
WEIGHTS = ("key_weight", "value_weight", "type_weight", "key_factor", "additive_weight")


def map_tensors(data: EdgeData, change: Callable[[torch.Tensor], torch.Tensor]) -> EdgeData:
    return EdgeData(**{
        name: change(value) if isinstance(value, torch.Tensor) else value for name, value in vars(data).items()
    })  # fmt: skip


def in_order(data: EdgeData, order: torch.Tensor) -> EdgeData:
    """The data of a form with the edges `order`."""
    given = {name: getattr(data, name) for name in OF_EDGES}
    return replace(data, **{name: tensor[order] for name, tensor in given.items() if tensor is not None})


def edge_inputs(
    kind: str, num_edges: int, heads: int, dim: int, dtype: torch.dtype = torch.float32, rank: int = RANK
) -> EdgeData:
    """Random edge data of a kind in KINDS, in the order of an edge list; every edge has its own. `rank`: number of
    features; scores are as large as with RANK."""
    generator = torch.Generator().manual_seed(num_edges + 31 * heads + dim)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    data = EdgeData()
    for part in KINDS[kind]:
        if part == "bias":
            data = replace(data, bias=randn(num_edges))
        elif part == "bias_per_head":
            data = replace(data, bias=randn(num_edges, heads))
        elif part == "bias_minus_infinity":  # some rows lose all their edges
            hidden = torch.rand(num_edges, heads, generator=generator) < 0.7
            data = replace(data, bias=randn(num_edges, heads).masked_fill(hidden, -torch.inf))
        elif part == "multiplier":
            data = replace(data, multiplier=randn(num_edges))
        elif part == "multiplier_per_head":
            data = replace(data, multiplier=randn(num_edges, heads))
        elif part == "types":
            types = torch.randint(TYPES, (num_edges,), generator=generator)
            data = replace(data, types=types, type_weight=randn(TYPES, heads, dim))
        elif part == "additive":
            data = replace(data, additive_weight=randn(heads, dim))
        elif part == "clamp":
            data = replace(data, clamp=CLAMP)
        else:
            if data.features is None:
                data = replace(data, features=randn(num_edges, rank))
            if part == "key_factor":
                data = replace(data, key_factor=randn(rank, heads, dim) / rank**0.5)
            else:
                name = {"key_features": "key_weight", "value_features": "value_weight"}[part]
                data = replace(data, **{name: randn(heads, dim, rank) * (RANK / rank) ** 0.5})
    return data


def bound_edges(
    graph: EdgeList,
    kind: str | None,
    order: torch.Tensor,
    heads: int,
    dim: int,
    dtype: torch.dtype = torch.float32,
    rank: int = RANK,
) -> BoundEdges:
    """Edge data of a kind, bound to a format with the edges `order`; with nothing in it where the kind is None."""
    data = EdgeData() if kind is None else edge_inputs(kind, graph.num_edges, heads, dim, dtype, rank)
    return bind(data, EdgeOrder(order), graph.shape, order.device)


def qkv(shape: tuple[int, int], heads: int, dim: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Random q [num_rows, H, d], k and v [num_cols, H, d]."""
    generator = torch.Generator().manual_seed(17 * shape[0] + shape[1])
    return [torch.randn(n, heads, dim, generator=generator).to(dtype) for n in (shape[0], shape[1], shape[1])]


def dense_edge_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    *,
    bias: torch.Tensor | None = None,
    multiplier: torch.Tensor | None = None,
    features: torch.Tensor | None = None,
    types: torch.Tensor | None = None,
    key_weight: torch.Tensor | None = None,
    value_weight: torch.Tensor | None = None,
    type_weight: torch.Tensor | None = None,
    key_factor: torch.Tensor | None = None,
    additive_weight: torch.Tensor | None = None,
    clamp: float | None = None,
    rounded: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense float64 attention with edge data, from the formula alone; differentiable.

    Args:
        q: [N, H, d]; k, v: [M, H, d]; mask: [N, M] bool.
        bias, multiplier: [N, M, 1] or [N, M, H]; features: [N, M, r]; types: [N, M] int64. Where the mask is False,
            any finite value.
        key_weight, value_weight: [H, d, r]; type_weight: [T, H, d]; key_factor: [r, H, d];
            additive_weight: [H, d]; clamp: c.
        rounded: round k_ij, v_ij and the weights to this type, as code does that materialises them in it.

    Returns:
        (output [N, H, d], logarithm of the sum of exp(s) over each row [N, H]), float64. A row without an edge, or with
        scores of -inf only, gives 0 and -inf.
    """
    num_rows, num_cols = mask.shape
    keys = k.double().expand(num_rows, num_cols, *k.shape[1:])  # k_ij [N, M, H, d]
    values = v.double().expand(num_rows, num_cols, *v.shape[1:])
    if type_weight is not None:
        keys = type_weight.double()[types] * keys
    if key_factor is not None:
        keys = torch.einsum("nmr,rhd->nmhd", features.double(), key_factor.double()) * keys
    if key_weight is not None:
        keys = keys + torch.einsum("hdr,nmr->nmhd", key_weight.double(), features.double())
    if value_weight is not None:
        values = values + torch.einsum("hdr,nmr->nmhd", value_weight.double(), features.double())
    if rounded is not None:
        keys, values = keys.to(rounded).double(), values.to(rounded).double()
    if additive_weight is None:
        score = scale * torch.einsum("nhd,nmhd->nmh", q.double(), keys)
    else:
        score = scale * (leaky_relu(q.double()[:, None] + keys, 0.2) * additive_weight.double()).sum(-1)
    if multiplier is not None:
        score = multiplier.double() * score
    if bias is not None:
        score = score + bias.double()
    if clamp is not None:
        score = score.clamp(-clamp, clamp)
    score = torch.where(mask[..., None], score, -torch.inf)
    maximum = score.detach().amax(1, keepdim=True) if num_cols else score.new_zeros(num_rows, 1, score.shape[2])
    maximum = torch.where(maximum == -torch.inf, 0.0, maximum)
    weight = torch.exp(score - maximum)
    total = weight.sum(1)
    if rounded is not None:
        weight = weight.to(rounded).double()
    output = torch.einsum("nmh,nmhd->nhd", weight, values) / torch.where(total == 0, 1.0, total)[..., None]
    return output, maximum.squeeze(1) + torch.log(total)


def expected_attention(
    graph: EdgeList,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    data: EdgeData,
    scale: float,
    rounded: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`dense_edge_attention` of an edge list: each copy of an edge is a column of its own, with the same k and v."""
    table = graph.table()
    k, v = (each.repeat_interleave(table.shape[2], 0) for each in (k, v))
    table = table.flatten(1)
    dense = {name: getattr(data, name) for name in (*WEIGHTS, "clamp")}
    for name in OF_EDGES:
        tensor = getattr(data, name)
        if tensor is None:
            continue
        if tensor.shape[0] == 0:
            dense[name] = tensor.new_zeros(*table.shape, *tensor.shape[1:])
        else:
            dense[name] = tensor[table.clamp(min=0)]
        if name in ("bias", "multiplier") and tensor.dim() == 1:
            dense[name] = dense[name][..., None]
    return dense_edge_attention(q, k, v, table >= 0, scale, **dense, rounded=rounded)


def assert_edge_attention(
    output: torch.Tensor,
    graph: EdgeList,
    tensors: list[torch.Tensor],
    data: EdgeData,
    scale: float,
    label: str,
) -> None:
    """No row is further off than twice torch's worst that materialises keys, values and weights in the inputs' type."""
    expected, _ = expected_attention(graph, *tensors, data, scale)
    rounded, _ = expected_attention(graph, *tensors, data, scale, rounded=tensors[0].dtype)
    assert_near(output, expected, rounded, tensors[2], label)


def assert_near(
    output: torch.Tensor, expected: torch.Tensor, rounded: torch.Tensor, value: torch.Tensor, label: str
) -> None:
    """No row of `output` is further from `expected` than twice the worst of `rounded`, and empty rows are 0."""
    rounded = rounded.to(output.dtype)
    assert not output.isnan().any(), label
    # Rows may cancel against their edge features: errors are compared with the size of the values.
    size = value.double().norm(dim=-1).max() if value.numel() else 1.0
    error, allowed = ((each.double() - expected).norm(dim=-1) / size for each in (output, rounded))
    assert (output.double()[expected == 0] == 0).all(), f"{label}: a row without an edge is not 0"
    # At least two roundings of the largest output: where a row is one number, torch's worst of few rows may be lucky.
    largest = expected.norm(dim=-1).max() / size if expected.numel() else 0.0
    allowed = max(2 * allowed.max(), torch.finfo(output.dtype).eps * largest) + FLOOR if allowed.numel() else FLOOR
    assert (error <= allowed).all(), f"{label}: off by {error.max():.2e}, allowed {allowed:.2e}"
