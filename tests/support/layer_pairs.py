"""Layers of PyTorch Geometric and ours with the same weights, graphs for them, and what a training step gives."""

import torch
import torch_geometric.nn as pyg
from edge_cases import EDGE_LISTS

import fused3s.nn

KINDS = ("TransformerConv", "GATConv", "GATv2Conv", "AGNNConv")
WITH_EDGES = KINDS[:3]  # the layers with projections and edge features
DTYPE = torch.float64


def pair(kind, *sizes, backend="auto", dtype=DTYPE, device="cpu", std=None, ours_only=None, **options):
    """PyG's layer and ours: each draws the same weights from one seed, and has the other's state dict.

    Args:
        sizes: columns of x, columns of a head, heads.
        std: draw all parameters of both anew, with this deviation, so that biases are not 0.
        ours_only: more options of ours, such as `cache`.
    """
    sizes, made = () if kind == "AGNNConv" else sizes or (8, 4, 2), []
    for package, more in ((pyg, {}), (fused3s.nn, {"backend": backend} | (ours_only or {}))):
        torch.manual_seed(0)
        made.append(getattr(package, kind)(*sizes, **options, **more))
    theirs, ours = made
    assert list(theirs.state_dict()) == list(ours.state_dict())
    assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))
    if std is not None:
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.normal_(std=std)
        ours.load_state_dict(theirs.state_dict())
    return theirs.to(device, dtype), ours.to(device, dtype)


def random_graph(nodes=20, edges=60, columns=8, edge_dim=None, seed=1, dtype=DTYPE):
    """[x, edge_index with repeated edges], and edge_attr with an `edge_dim`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, columns, generator=generator).to(dtype)
    edge_index = torch.randint(nodes, (2, edges), generator=generator)
    return [x, edge_index] + ([torch.randn(edges, edge_dim, generator=generator).to(dtype)] if edge_dim else [])


def listed_graph(name, columns=8, edge_dim=None, dtype=DTYPE):
    """The same of a graph of EDGE_LISTS; x is a pair where it is bipartite."""
    graph, generator = EDGE_LISTS[name](), torch.Generator().manual_seed(1)
    sources, targets = (torch.randn(n, columns, generator=generator).to(dtype) for n in graph.shape[::-1])
    x = sources if graph.shape[0] == graph.shape[1] else (sources, targets)
    attr = [torch.randn(graph.num_edges, edge_dim, generator=generator).to(dtype)] if edge_dim else []
    return [x, torch.stack([graph.col, graph.row]), *attr]


def trained(layer, x, edges, *attr, **options):
    """Output, and gradients of x, edge_attr and the parameters, by name; by `backward`, as hooks want it."""
    layer.zero_grad()
    pairs = isinstance(x, tuple)
    ends = [each.detach().clone().requires_grad_() for each in (x if pairs else (x,))]
    attr = [each.detach().clone().requires_grad_(each.is_floating_point()) for each in attr]
    out = layer(tuple(ends) if pairs else ends[0], edges, *attr, **options)
    out.double().square().sum().backward()
    leaves = {f"x{i}": each for i, each in enumerate(ends)} | {f"edge_attr{i}": each for i, each in enumerate(attr)}
    return {"out": out.detach()} | {n: each.grad for n, each in (leaves | dict(layer.named_parameters())).items()}


def assert_same(found, expected, tolerance=1e-9):
    """Of `trained`; a gradient is None where PyG's is, or 0."""
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        if right is None or found[name] is None:
            assert found[name] is None or not found[name].any(), name
            assert right is None or not right.any(), name
        else:
            torch.testing.assert_close(
                found[name], right, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


def relative_error(out, expected):
    return float((out.double() - expected).norm().detach() / expected.norm().detach().clamp(min=1e-30))


def parameter_gradients(layer):
    """Of all parameters in one vector: a single one may be a sum whose terms cancel."""
    return torch.cat([parameter.grad.double().flatten() for _, parameter in sorted(layer.named_parameters())])
