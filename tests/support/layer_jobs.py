"""Jobs of ranks that train a layer of `fused3s.nn` by DDP or FSDP, each compared with PyG's layer in one process."""

import torch
from formula_backend import FormulaBackend
from layer_pairs import pair, random_graph, trained
from parallel_jobs import REGISTRY
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import fused3s.nn

NODES, EDGES = 30, 200
KINDS = {
    "TransformerConv": {"heads": 4},
    "TransformerConv-edges": {"heads": 4, "edge_dim": 8},
    "GATConv-edges": {"heads": 4, "edge_dim": 8},
    "GATv2Conv-edges": {"heads": 4, "edge_dim": 8},
}


def layers_of(kind, backend):
    """PyG's layer, ours with its weights, and what both are called with beside x."""
    name, _, has_features = kind.partition("-")
    layers = pair(name, 32, 16, backend=backend, dtype=torch.float32, **KINDS[kind])
    return *layers, random_graph(NODES, EDGES, 32, 8 if has_features else None, dtype=torch.float32)[1:]


def results_of(layer, graph):
    """Output, gradients of x and of the parameters by name; after a step before."""
    x = random_graph(NODES, EDGES, 32, dtype=torch.float32)[0]
    for _ in range(2):  # DDP misses an unused parameter in the second step
        found = trained(layer, x, *graph)
    found = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in found.items()}
    return {name.removeprefix("module.").removeprefix("_fsdp_wrapped_module."): each for name, each in found.items()}


def wrapped(layer, how, group):
    if how == "DDP":
        return nn.parallel.DistributedDataParallel(layer, process_group=group.handle)
    if how == "FSDP":
        return FullyShardedDataParallel(layer, process_group=group.handle, device_id=group.device)
    mesh = DeviceMesh.from_group(group.handle, "cpu")
    if how == "FSDP2 of each module":
        for each in layer.children():
            if isinstance(each, nn.Linear):
                fully_shard(each, mesh=mesh)
    return fully_shard(layer, mesh=mesh)


def layer_results(group, kind, backend, how):
    """Those of PyG's layer on this process, and those of ours on all of them; FSDP's gradients are left out, as it
    flattens them."""
    REGISTRY.setdefault("formula", FormulaBackend())
    theirs, ours, graph = layers_of(kind, backend)
    expected, found = results_of(theirs, graph), results_of(wrapped(ours, how, group), graph)
    return expected, {name: each for name, each in found.items() if how != "FSDP" or name in ("out", "x0")}


def layer_without_root(group, find_unused):
    layer = fused3s.nn.TransformerConv(32, 16, root_weight=False)
    options = {"process_group": group.handle, "find_unused_parameters": find_unused}
    try:
        results_of(nn.parallel.DistributedDataParallel(layer, **options), (torch.randint(NODES, (2, EDGES)),))
    except RuntimeError as error:
        return str(error)
    return ""


def heads_of_shards(group, how):
    """Outputs of SparseMHA, and of one that is sharded."""
    torch.manual_seed(0)
    layer = fused3s.nn.SparseMHA(32, 4)
    edges, x = torch.randint(NODES, (2, EDGES)), torch.randn(NODES, 32)
    options = {"dtype": x.dtype, "head_dim": 8, "num_heads": 4, "backward": True}
    plan = fused3s.plan_attention(edges, shape=(NODES, NODES), device="cpu", **options)
    expected = layer(plan, x).detach()
    return expected, wrapped(layer, how, group)(plan, x).detach()
