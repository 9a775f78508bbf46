"""Attention as four groups of users have it, beside what they use: forward pass and all gradients, inputs by formula.

    group       attention                                                         type of q, k and v
    mesh        4 heads x 64 over the two hops of a triangulated grid and a        float32, bfloat16
                tenth more dilated edges; heads last (examples/mesh_transformer)
    weather     16 x 64 over a radius on the sphere, 11 edge columns in keys       bfloat16
                and values, of which gradients are needed (examples/anemoi_block)
    driving     six layers of 8 x 16 from points of a map to agents, 128 edge      float32
                columns in keys and values (examples/driving_attention)
    relational  8 x 32 with three masks over contexts (examples/relational_masks)  bfloat16

    backend         launch
    auto            eager     ours
    anemoi          eager     the Triton kernel of anemoi-models, whose version is in the note
    csr_unfused     eager     sampled product, softmax and sparse product of torch.sparse, head by head
    pyg             eager     gather, PyG's softmax and scatter, as the group's code does it
    pyg             compiled  the same after torch.compile, of each group's first type
    flex_attention  compiled  FlexAttention with masks made from booleans [B, S, S]

The relational sides also run in CUDA graphs (launch `cuda_graph`), since the host bounds their steps. `plan` is
"rebuilt" where the masks are made anew in every pass. `region` is "forward", without gradients, or "step", the forward
pass and all gradients. `peak_memory` is that of torch's allocator in an eager step, inputs included. Errors are those
of a small instance against the same formula in float64: the largest of a row of the output, and in the note the largest
of a gradient, norm over norm.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import layer_norm, linear

import fused3s
from bench.baselines import REGISTRY
from bench.checks import largest_row_error
from bench.layer_model import TYPES, LayerErrors
from bench.layers import checked
from bench.runner import Case, Context
from common.records import Row
from common.timers import Spread, peak_memory_mib, reset_peak_memory, time_passes
from configs.bench import DOORS, BenchConfig
from examples import anemoi_block, driving_attention, mesh_transformer, relational_masks

Leaves = dict[str, Tensor]
Run = Callable[[Leaves], Tensor]
Name = tuple[str, str, str]  # backend, launch, plan
OURS, EAGER, COMPILED = ("auto", "eager", "fixed"), ("pyg", "eager", "fixed"), ("pyg", "compiled", "fixed")
ANEMOI = ("anemoi", "eager", "fixed")
UNFUSED, FLEX = ("csr_unfused", "eager", "fixed"), ("flex_attention", "compiled", "fixed")
GRAPH = "cuda_graph"
OURS_NEW, FLEX_NEW = (*OURS[:2], "rebuilt"), (*FLEX[:2], "rebuilt")


@dataclass(frozen=True, eq=False)
class Problem:
    """Attention of one group on one graph.

    Attributes:
        leaves: inputs whose gradients are computed, by name.
        sides: makes what computes the output from them, by name of the side.
        exact: the formula, for leaves in float64.
        edges: their number.
    """

    leaves: Leaves
    sides: dict[Name, Callable[[], Run]]
    exact: Run
    edges: int


def message_passing(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, of_key: Tensor | None = None, of_value: Tensor | None = None
) -> Tensor:
    """Attention with PyG's softmax and sum; of_key, of_value: [E, H, d], added to keys and values of edges."""
    from torch_geometric.utils import scatter, softmax

    source, target = ends
    keys, values = k[source], v[source]
    if of_key is not None:
        keys, values = keys + of_key, values + of_value
    score = (q[target] * keys).sum(2) * q.shape[2] ** -0.5
    weight = softmax(score, target, num_nodes=len(q))
    return scatter(weight.unsqueeze(2) * values, target, dim_size=len(q))


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=False, fullgraph=True)  # an error in place of what runs without it


def normal(device: torch.device, dtype: torch.dtype, **shapes: tuple[int, ...]) -> Leaves:
    return {name: torch.randn(shape, device=device).to(dtype) for name, shape in shapes.items()}


_mesh = cache(mesh_transformer.mesh)  # triangulated on the host


def mesh(device: torch.device, dtype: torch.dtype, nodes: int) -> Problem:
    heads, dim = 4, 64
    points, triangles = _mesh(nodes)
    nodes = len(points)
    ends = mesh_transformer.adjacency(triangles.to(device), nodes).flip(0)
    leaves = normal(device, dtype, **dict.fromkeys("qkv", (nodes, dim, heads)))

    def planned(backend: str) -> Run:
        options = {"dtype": dtype, "head_dim": dim, "num_heads": heads, "backward": True, "backend": backend}
        plan = fused3s.plan_attention(ends, shape=(nodes, nodes), device=device, **options)
        return lambda leaves: fused3s.edge_attention(**leaves, adj=plan, scale=dim**-0.5)

    def passed(function: Callable[..., Tensor] = message_passing) -> Run:  # heads first: edges are the larger part
        return lambda leaves: function(*(one.mT.contiguous() for one in leaves.values()), ends).mT

    sides = {name: partial(planned, name[0]) for name in (OURS, UNFUSED)}
    sides |= {EAGER: passed, COMPILED: lambda: passed(compiled(message_passing))}
    return Problem(leaves, sides, passed(), ends.shape[1])


def near_on_sphere(nlat: int, cutoff: float) -> np.ndarray:
    """[2, nnz] key and query of all points of a grid of nlat x 2 nlat within `cutoff` radians of each other, ordered by
    query and key. The grid is equiangular, with poles; a point is its own neighbour, and the distance may exceed the
    cutoff by 0.1 %, as in torch-harmonics."""
    from scipy.spatial import cKDTree

    theta, phi = (angle.ravel() for angle in np.indices((nlat, 2 * nlat)) * np.pi / [[[nlat - 1]], [[nlat]]])
    points = np.stack([np.sin(theta) * np.cos(phi), np.sin(theta) * np.sin(phi), np.cos(theta)], 1)
    near = cKDTree(points).query_pairs(2 * np.sin(1.001 * cutoff / 2), output_type="ndarray")
    own = np.arange(len(points)).repeat(2).reshape(-1, 2)
    ends = np.concatenate([near, near[:, ::-1], own]).T
    return np.ascontiguousarray(ends[:, np.lexsort(ends)])


def weather(device: torch.device, dtype: torch.dtype, nlat: int, cutoff: float) -> Problem:
    heads, dim, columns = 16, 64, 11
    nodes, ends = 2 * nlat**2, torch.as_tensor(near_on_sphere(nlat, cutoff), device=device)
    shapes = dict.fromkeys("qkv", (nodes, heads, dim)) | {"attr": (ends.shape[1], columns)}
    leaves = normal(device, dtype, **shapes, weight=(heads * dim, columns), bias=(heads * dim,))

    def planned() -> Run:
        def run(leaves: Leaves) -> Tensor:
            q, k, v, attr, weight, bias = leaves.values()
            block = SimpleNamespace(num_heads=heads, lin_edge=SimpleNamespace(weight=weight, bias=bias))
            return anemoi_block.Fused3SAttention.attention_block(block, q, k, v, attr, ends, nodes)

        return run

    def passed(function: Callable[..., Tensor] = message_passing) -> Run:
        def run(leaves: Leaves) -> Tensor:
            q, k, v, attr, weight, bias = leaves.values()
            edges = linear(attr, weight, bias).view(-1, heads, dim)
            return function(q, k, v, ends, edges, edges)

        return run

    def triton() -> Run:
        if device.type != "cuda":
            raise fused3s.BackendUnavailableError(f"its Triton kernel runs on a GPU, and these tensors are on {device}")
        try:
            from anemoi.models.triton.gt import graph_transformer_attention
        except ImportError as error:
            hint = "pip install --no-deps anemoi-models"
            raise fused3s.BackendUnavailableError(f"anemoi-models cannot be imported ({error}); {hint}") from error

        (source, query), starts = ends, torch.arange(nodes + 1, device=device)
        by_source = source.argsort(stable=True)
        of_sources, indptr = torch.searchsorted(source[by_source], starts), torch.searchsorted(query, starts)

        def run(leaves: Leaves) -> Tensor:
            q, k, v, attr, weight, bias = leaves.values()
            edges = linear(attr, weight, bias).view(-1, heads, dim)
            return graph_transformer_attention(q, k, v, edges, source, indptr, of_sources, by_source, ends[1])[0]

        return run

    sides = {OURS: planned, ANEMOI: triton, EAGER: passed, COMPILED: lambda: passed(compiled(message_passing))}
    return Problem(leaves, sides, passed(), ends.shape[1])


def driving_layer(lanes: Tensor, agents: Tensor, r: Tensor, ends: Tensor, weights: Leaves, heads: int) -> Tensor:
    """A layer as its authors compute it: keys and values of edges as tensors."""

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, x.shape[1:], weights[f"{name}.weight"], weights[f"{name}.bias"])

    def to(x: Tensor, name: str) -> Tensor:
        return linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def split(x: Tensor, name: str) -> Tensor:
        return to(x, name).unflatten(1, (heads, -1))

    keys, x, r = norm(lanes, "attn_prenorm_x_src"), norm(agents, "attn_prenorm_x_dst"), norm(r, "attn_prenorm_r")
    q, k, v = split(x, "to_q"), split(keys, "to_k"), split(keys, "to_v")
    out = message_passing(q, k, v, ends, split(r, "to_k_r"), split(r, "to_v_r")).flatten(1)
    out = out + to(torch.cat([out, x], 1), "to_g").sigmoid() * (to(x, "to_s") - out)
    x = agents + norm(to(out, "to_out"), "attn_postnorm")
    return x + norm(to(to(norm(x, "ff_prenorm"), "ff_mlp.0").relu(), "ff_mlp.3"), "ff_postnorm")


def driving(device: torch.device, dtype: torch.dtype, scenes: int, agents: int, points: int) -> Problem:
    """Scenes of 150 m x 150 m: each agent at each step attends to the points of the map within 40 m, at most 300."""
    layers, heads, dim, width = 6, 8, 16, 128
    found = []
    for scene in range(scenes):
        places = (150 * torch.rand(count, 2, device=device) for count in (points, agents))
        offset = torch.tensor([[scene * points], [scene * agents]], device=device)
        found.append(driving_attention.within(*places, 40.0, 300) + offset)
    ends, shape = torch.cat(found, 1), (scenes * agents, scenes * points)
    layer = driving_attention.AttentionLayer(width, heads, dim, 0.0, bipartite=True).to(device, dtype)
    inputs = {"lanes": (shape[1], width), "agents": (shape[0], width), "r": (ends.shape[1], width)}
    weights = {f"{nth}.{name}": one.shape for nth in range(layers) for name, one in layer.named_parameters()}
    leaves = normal(device, dtype, **inputs, **weights)
    for name in weights:
        leaves[name] = leaves[name] / width**0.5 + ("norm" in name and name.endswith("weight"))

    def in_layers(run_layer: Callable[..., Tensor], prepare: Callable[[Tensor], Any] = lambda r: r) -> Run:
        def run(leaves: Leaves) -> Tensor:
            lanes, x, r = (leaves[name] for name in inputs)
            r = prepare(r)
            for nth in range(layers):
                x = run_layer(lanes, x, r, {name: leaves[f"{nth}.{name}"] for name, _ in layer.named_parameters()})
            return x

        return run

    def planned() -> Run:
        plan = driving_attention.plan_edges(ends, *shape[::-1], heads, dim)

        def run_layer(lanes: Tensor, x: Tensor, r: fused3s.BoundEdges, weights: Leaves) -> Tensor:
            return functional_call(layer, weights, ((lanes, x), r, plan))

        return in_layers(run_layer, partial(driving_attention.bind_normalised, plan))

    def passed(function: Callable[..., Tensor] = driving_layer) -> Run:
        return in_layers(lambda lanes, x, r, weights: function(lanes, x, r, ends, weights, heads))

    sides = {OURS: planned, EAGER: passed, COMPILED: lambda: passed(compiled(driving_layer))}
    return Problem(leaves, sides, passed(), ends.shape[1])


def boolean_masks(node: Tensor, parents: Tensor, column: Tensor) -> list[Tensor]:
    """[B, S, S], in the order of `relational_masks.MASKS`."""
    is_parent = (node[:, None, :, None] == parents[:, :, None, :]).any(-1)
    same = [ids[:, :, None] == ids[:, None, :] for ids in (node, column)]
    return [same[0] | is_parent, is_parent.mT.contiguous(), same[1]]


def _lookup(mask: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, q, k: mask[b, q, k]


def relational(device: torch.device, dtype: torch.dtype, contexts: int, cells: int) -> Problem:
    heads, dim = 8, 32
    ids = [each.to(device) for each in relational_masks.contexts(contexts, cells)]
    booleans, count = boolean_masks(*ids), contexts * cells
    leaves = normal(device, dtype, **dict.fromkeys("qkv", (count, heads, dim)))

    def planned(is_new: bool) -> Run:
        room = max(int(each.sum()) for each in booleans)
        options = {"dtype": dtype, "head_dim": dim, "num_heads": heads}
        masks = relational_masks.Masks(count, room, device, **options)
        masks.fill(*ids)
        masks.check()

        def run(leaves: Leaves) -> Tensor:
            if is_new:
                masks.fill(*ids)
            return torch.stack([masks.plans[name](*leaves.values()) for name in relational_masks.MASKS], 1)

        return run

    def split(leaves: Leaves) -> list[Tensor]:
        return [one.unflatten(0, (contexts, cells)).transpose(1, 2) for one in leaves.values()]

    def flex(is_new: bool) -> Run:
        if reason := REGISTRY["flex_attention"].unavailable(device):
            raise fused3s.BackendUnavailableError(reason)
        attend, make_mask, kept = compiled(flex_attention), compiled(create_block_mask), [*map(Tensor.clone, booleans)]
        mask_mods = [_lookup(each) for each in kept]

        def build() -> list:
            return [make_mask(each, contexts, None, cells, cells, device=device.type) for each in mask_mods]

        block_masks = build()

        def run(leaves: Leaves) -> Tensor:
            if is_new:
                for mask, new in zip(kept, boolean_masks(*ids), strict=True):
                    mask.copy_(new)
            masks = build() if is_new else block_masks
            out = [attend(*split(leaves), block_mask=mask) for mask in masks]
            return torch.stack(out, 2).permute(0, 3, 2, 1, 4).flatten(0, 1)

        return run

    def exact(leaves: Leaves) -> Tensor:
        q, k, v = split(leaves)
        found = []
        for mask in booleans:
            weight = (q @ k.mT * dim**-0.5).exp() * mask.unsqueeze(1)
            found.append((weight / weight.sum(-1, keepdim=True).clamp(min=1e-300)) @ v)
        return torch.stack(found, 2).permute(0, 3, 2, 1, 4).flatten(0, 1)

    sides = {name: partial(planned, name is OURS_NEW) for name in (OURS, OURS_NEW)}
    sides |= {name: partial(flex, name is FLEX_NEW) for name in (FLEX, FLEX_NEW)}
    if device.type == "cuda":
        sides |= {(backend, GRAPH, plan): make for (backend, _, plan), make in sides.items()}
    return Problem(leaves, sides, exact, int(sum(each.sum() for each in booleans)))


@dataclass(frozen=True)
class Group:
    """make: a problem of arguments `full`, or `small`; heads, dim, dtypes: of q, k and v."""

    make: Callable[..., Problem]
    heads: int
    dim: int
    dtypes: Sequence[str]
    full: dict[str, float]
    small: dict[str, float]


MESH = Group(mesh, 4, 64, ("float32", "bfloat16"), {"nodes": 300_000}, {"nodes": 400})
WEATHER = Group(weather, 16, 64, ("bfloat16",), {"nlat": 180, "cutoff": 0.03}, {"nlat": 8, "cutoff": 0.8})
IN_SCENES = {"scenes": 10, "agents": 64 * 18, "points": 1_300}, {"scenes": 2, "agents": 5, "points": 40}
DRIVING = Group(driving, 8, 16, ("float32",), *IN_SCENES)
IN_CONTEXTS = {"contexts": 32, "cells": 1024}, {"contexts": 2, "cells": 128}
RELATIONAL = Group(relational, 8, 32, ("bfloat16",), *IN_CONTEXTS)
SMALL = " (small)"  # end of the variant in rows of small inputs
GROUPS = dict(zip(DOORS, (MESH, WEATHER, DRIVING, RELATIONAL), strict=True))


def cases(config: BenchConfig, device: torch.device) -> list[Case]:
    """One for each group and type; it has the rows of all sides."""
    case = of_side(Case("auto", "attention", region="step"), OURS)
    found = [(name, GROUPS[name], dtype) for name in config.groups for dtype in GROUPS[name].dtypes]
    size = SMALL * (config.size == "small")
    return [
        replace(case, variant=name + size, heads=group.heads, dim=group.dim, dtype=dtype, out_dtype=dtype)
        for name, group, dtype in found
    ]


def of_side(case: Case, name: Name) -> Case:
    backend, launch, plan = name
    return replace(case, backend=backend, launch=launch, plan=plan)


def measure(context: Context, case: Case) -> list[Row]:
    group, config = GROUPS[case.variant.removesuffix(SMALL)], context.config
    torch.manual_seed(config.seed)
    small = group.make(context.device, case.torch_dtype, **group.small)
    problem = group.make(context.device, case.torch_dtype, **(group.full if config.size == "full" else group.small))
    rows = []
    for name in problem.sides:
        if name == COMPILED and case.dtype != group.dtypes[0]:
            continue
        own = of_side(case, name)
        try:
            rows += side_rows(context, own, name, small, problem)
        except Exception as error:  # the others are still measured
            rows.append(context.failed(own, error))
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def side_rows(context: Context, case: Case, name: Name, small: Problem, problem: Problem) -> list[Row]:
    device = context.device
    errors = errors_of(small, small.sides[name]())
    columns = checked(errors, TYPES[case.dtype])
    note = f"error of a small instance, of its gradients {errors.gradients:.1e}; {problem.edges:,} edges"
    if name == ANEMOI:
        note += f"; anemoi-models {metadata.version('anemoi-models')}"
    leaves = {leaf: one.requires_grad_() for leaf, one in problem.leaves.items()}
    on_gpu = device.type == "cuda"
    others = torch.cuda.memory_allocated(device) - sum(one.nbytes for one in leaves.values()) if on_gpu else 0
    run = problem.sides[name]()
    cotangent = torch.ones_like(run(leaves))

    def step() -> Sequence[Tensor]:
        return torch.autograd.grad(run(leaves), list(leaves.values()), cotangent)

    def forward() -> Sequence[Tensor]:
        with torch.no_grad():
            return [run(leaves)]

    forward()  # compiles, as `step` does
    step()
    reset_peak_memory(device)
    step()
    memory = peak_memory_mib(device) - others / 2**20
    passes = {"step": step, "forward": forward}
    if case.launch == GRAPH:
        passes = {region: captured(one) for region, one in passes.items()}
    peak = Spread.of([memory]).columns() | {"metric": "peak_memory", "unit": "MiB"}
    found = []
    for region, one in passes.items():
        found.append(time_passes(one, device=device, repeats=context.config.repeats).columns() | {"region": region})
    if on_gpu:
        found.append(peak)
    return [context.row(case, **each, **columns, note=note) for each in found]


def captured(passes: Callable[[], Sequence[Tensor]]) -> Callable[[], None]:
    """A replay of the passes as one CUDA graph, whose results are those of an eager call."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = passes()
    for each in found:
        each.fill_(torch.nan)
    graph.replay()
    for each, expected in zip(found, passes(), strict=True):
        if not (each - expected).norm() <= 1e-3 * expected.norm():
            raise RuntimeError("a replay of the CUDA graph gives another result than an eager call")
    return graph.replay


def errors_of(problem: Problem, run: Run) -> LayerErrors:
    """Largest error of a row of the output, and of a gradient, against the formula in float64 of the same numbers."""

    def both(run: Run, leaves: Leaves) -> tuple[Tensor, tuple[Tensor, ...]]:
        leaves = {name: one.detach().requires_grad_() for name, one in leaves.items()}
        out = run(leaves)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
        return out.detach(), torch.autograd.grad(out, list(leaves.values()), cotangent)

    found, gradients = both(run, problem.leaves)
    expected, right = both(problem.exact, {name: one.double() for name, one in problem.leaves.items()})
    pairs = zip(gradients, right, strict=True)
    of_gradients = [((one.double() - other).norm() / other.norm()).item() for one, other in pairs]
    return LayerErrors(largest_row_error(found, expected), max(of_gradients, key=lambda one: (one != one, one)))
