"""The programs of examples/ run as a reader starts them, and compute what the originals compute."""

import math
import re
import runpy
import sys
from copy import deepcopy
from functools import partial
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_gpu import fake_gpu
from torch.nn.functional import scaled_dot_product_attention
from torch_geometric import typing
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GINEConv, GPSConv, TransformerConv

import fused3s.nn
from data.dgl import import_dgl
from tests.cuda_shim.cuda_on_cpu import NEEDS_COMPILER

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def on_the_cpu(request, monkeypatch):
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a program with options; the losses that it prints."""

    def start(name, *options):
        monkeypatch.setattr(sys, "argv", [name, *map(str, options)])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]

    return start


@pytest.fixture
def program():
    """The names that a program defines."""
    return lambda name: runpy.run_path(str(EXAMPLES / f"{name}.py"))


PYG = (
    ("pyg_neighbor_loader", "--loader", "random", "--nodes", 200, "--epochs", 4),
    ("pyg_unimp_arxiv", "--nodes", 200, "--epochs", 4),
)


@pytest.mark.parametrize("command", PYG, ids=lambda command: command[0])
def test_losses_are_those_of_the_layer_of_pyg(run, monkeypatch, command):
    """The same program with PyG's layer: same weights from the seed, without dropout, whose masks differ."""
    losses = []
    for layer in (fused3s.nn.TransformerConv, TransformerConv):
        monkeypatch.setattr(
            fused3s.nn,
            "TransformerConv",
            lambda *sizes, layer=layer, **options: layer(*sizes, **options | {"dropout": 0.0}),
        )
        losses.append(run(*command))
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.skipif(not (typing.WITH_PYG_LIB or typing.WITH_TORCH_SPARSE), reason="neither pyg-lib nor torch-sparse")
def test_neighbor_loader(run):
    losses = run("pyg_neighbor_loader", "--nodes", 400, "--epochs", 4)
    assert losses[-1] < losses[0]


def test_a_missing_sampler_is_named(run, monkeypatch):
    for name in ("WITH_PYG_LIB", "WITH_TORCH_SPARSE"):
        monkeypatch.setattr(typing, name, False)
    with pytest.raises(SystemExit, match=r"NeighborLoader needs pyg-lib .* or torch-sparse"):
        run("pyg_neighbor_loader")


def dense(edge_index, shape):
    """How often each edge (query, key) occurs, [num_rows, num_cols]."""
    copies = torch.zeros(shape, dtype=torch.float64)
    return copies.index_put_((edge_index[1], edge_index[0]), torch.ones((), dtype=torch.float64), accumulate=True)


def test_plain_pytorch(run, program):
    """A block against PyTorch's attention with the logarithm of the number of copies of an edge as mask."""
    losses = run("plain_pytorch", "--nodes", 200, "--epochs", 4)
    assert losses[-1] < losses[0]
    example = program("plain_pytorch")
    block, x, edge_index = example["Block"](12, 3).double(), torch.randn(30, 12).double(), torch.randint(30, (2, 200))

    def attend(q, k, v):
        heads_first = (tensor.transpose(0, 1) for tensor in (q, k, v))
        out = scaled_dot_product_attention(*heads_first, attn_mask=dense(edge_index, (30, 30)).log())
        return out.transpose(0, 1)

    found = block(x, fused3s.plan_attention(edge_index, shape=(30, 30), device="cpu"))
    torch.testing.assert_close(found, block(x, attend), rtol=1e-9, atol=1e-9)


def test_captured_loop(program, run, monkeypatch):
    """The program with padded batches, and with its step as it is; the last batch is not full."""
    losses = run("captured_loop", "--graphs", 90, "--epochs", 2)
    monkeypatch.setattr(fused3s, "CapturedLoop", lambda step, *states, samples: step)
    assert run("captured_loop", "--graphs", 90, "--epochs", 2) == pytest.approx(losses, abs=1e-4)


def test_graphgps(run, program):
    """The layer against PyG's GPSConv, whose attention is torch.nn.MultiheadAttention on a padded batch."""
    losses = run("graphgps", "--graphs", 60, "--epochs", 3)
    assert losses[-1] < losses[0]
    example = program("graphgps")
    layer, sizes = example["GPSLayer"](12, 3).double(), [5, 1, 9, 2]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.3)
    original = GPSConv(12, GINEConv(layer.local_model.nn), heads=3).double()
    names = {"attn": "self_attn", "norm1.module": "norm1_local", "norm2.module": "norm1_attn", "norm3.module": "norm2"}
    names |= {"mlp.0": "ff_linear1", "mlp.3": "ff_linear2"}
    for name, of_layer in names.items():
        original.get_submodule(name).load_state_dict(layer.get_submodule(of_layer).state_dict())
    data = [Data(edge_index=torch.randint(size, (2, 2 * size)), num_nodes=size) for size in sizes]
    batch = Batch.from_data_list([example["with_pairs"](graph) for graph in data])
    x, edge_attr = torch.randn(17, 12).double(), torch.randn(batch.num_edges, 12).double()
    expected = original(x, batch.edge_index, batch.batch, edge_attr=edge_attr)
    plan = fused3s.plan_attention(batch.pair_index, shape=(17, 17), device="cpu")
    torch.testing.assert_close(layer(x, batch.edge_index, edge_attr, plan), expected, rtol=1e-9, atol=1e-9)


def test_exphormer(run, program):
    """The layer against Exphormer's formula: sums over edges, with repeated ones and a clamp that acts."""
    losses = run("exphormer", "--nodes", 60, "--epochs", 4)
    assert losses[-1] < losses[0]
    example = program("exphormer")
    x, (source, target), features = example["graph"](20)
    assert len(set(zip(source.tolist(), target.tolist(), strict=True))) < len(source)
    layer, embedding = example["ExphormerAttention"](12, 3).double(), torch.rand(features.shape[1], 12).double()
    with torch.no_grad():  # scores below zero, so that 1e-6 counts
        layer.K.weight.copy_(-layer.Q.weight.mul_(8))
        layer.E.weight.abs_()
    x, features = (1 + 0.3 * torch.randn(22, 12)).double(), features.double()
    options = {"shape": (22, 22), "device": "cpu", "backend": "reference", "edge_data": True}
    plan = fused3s.plan_attention(torch.stack([source, target]), **options)
    edges = plan.bind_edges(fused3s.EdgeData(features=features, clamp=5.0))

    q, k, v = (linear(x).view(22, 3, 4) for linear in (layer.Q, layer.K, layer.V))
    of_edge = layer.E(features @ embedding).view(-1, 3, 4)
    scores = (k[source] * q[target] / 2 * of_edge).sum(-1, keepdim=True)
    assert scores.min() < -5 < scores.max()
    weight = scores.clamp(-5, 5).exp()
    sums = torch.zeros(22, 3, 1).double().index_add(0, target, weight)
    expected = torch.zeros(22, 3, 4).double().index_add(0, target, weight * v[source]) / (sums + 1e-6)
    torch.testing.assert_close(
        layer(x, plan, edges, embedding), expected.flatten(1), rtol=1e-6, atol=1e-9
    )  # the LSE is float32


def anemoi_case(program):
    """A block of the example in float64, and inputs of a rectangular graph."""
    example = program("anemoi_block")
    block = example["Block"](24, 3, 4, 48).double()
    key, query = torch.randint(9, (60,)), torch.randint(14, (60,))
    key[0] = key[1] = query[0] = query[1] = 5  # a repeated edge
    attr = torch.randn(60, 4).double()
    return block, torch.randn(9, 24).double(), torch.randn(14, 24).double(), torch.stack([key, query]), attr


def test_anemoi_block(run, program):
    """The attention of the block against PyG's TransformerConv, whose edge features get the column of ones."""
    losses = run("anemoi_block", "--points", 80, "--steps", 12, "--heads", 2)
    assert sum(losses[6:]) < sum(losses[:6])
    block, source, target, edge_index, attr = anemoi_case(program)
    conv = TransformerConv(24, 8, heads=3, edge_dim=5).double()
    for name, layer in {"query": "query", "key": "key", "value": "value", "skip": "self"}.items():
        getattr(conv, f"lin_{name}").load_state_dict(getattr(block, f"lin_{layer}").state_dict())
    with torch.no_grad():
        conv.lin_edge.weight.copy_(torch.cat([block.lin_edge.weight, block.lin_edge.bias[:, None]], 1))
    normed = block.layer_norm_attention_src(source), block.layer_norm_attention(target)
    out = conv(normed, edge_index, torch.cat([attr, torch.ones(60, 1).double()], 1))
    out = block.projection(out) + target
    expected = block.node_dst_mlp["mlp"](block.layer_norm_mlp_dst(out)) + out
    torch.testing.assert_close(block(source, target, edge_index, attr), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["GraphTransformerMapperBlock", "GraphTransformerProcessorBlock"])
def test_anemoi_block_against_the_package(program, name):
    """With anemoi-models installed: its own blocks take the state dict and give the same numbers and gradients."""
    blocks = pytest.importorskip("anemoi.models.layers.block")
    utils = pytest.importorskip("anemoi.models.layers.utils")
    block, source, target, edge_index, attr = anemoi_case(program)
    is_processor = "Processor" in name
    if is_processor:
        source = target
    kernels = utils.load_layer_kernels({})
    options = {"in_channels": 24, "hidden_dim": 48, "out_channels": 24, "num_heads": 3, "edge_dim": 4}
    original = getattr(blocks, name)(**options, layer_kernels=kernels, graph_attention_backend="pyg").double()
    missing, unexpected = original.load_state_dict(block.state_dict(), strict=False)
    assert all("layer_norm_attention_dest" in name for name in missing)  # a second name of layer_norm_attention
    assert all("layer_norm_attention_src" in name and is_processor for name in unexpected)
    if is_processor:
        expected, _ = original(target, attr, edge_index, None, 1, len(target))
    else:
        (_, expected), _ = original((source, target), attr, edge_index, None, 1, (len(source), len(target)))
    found = block(source, target, edge_index, attr)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    with_fused3s = program("anemoi_block")["with_fused3s"]
    ours = with_fused3s(type(original))(**options, layer_kernels=kernels, graph_attention_backend="fused3s").double()
    ours.load_state_dict(original.state_dict())
    if is_processor:
        same, _ = ours(target, attr, edge_index, None, 1, len(target))
    else:
        (_, same), _ = ours((source, target), attr, edge_index, None, 1, (len(source), len(target)))
    torch.testing.assert_close(same, expected, rtol=1e-9, atol=1e-9)
    gradients = [
        torch.autograd.grad(out.square().sum(), of.lin_edge.parameters())
        for out, of in ((found, block), (expected, original))
    ]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


class TheirBlock(torch.nn.Module):
    """The way of anemoi's processor block, with its "pyg" attention: edges are [E, heads, columns]."""

    def __init__(self, graph_attention_backend="pyg"):
        super().__init__()
        self.num_heads, self.graph_attention_backend = 3, graph_attention_backend
        for name in ("lin_query", "lin_key", "lin_value"):
            self.add_module(name, torch.nn.Linear(24, 24))
        self.lin_edge, self.edge_pre_mlp = torch.nn.Linear(4, 24), torch.nn.Linear(4, 4)
        self.q_norm, self.k_norm = torch.nn.LayerNorm(8), torch.nn.LayerNorm(8)
        self.set_attention_function()

    def set_attention_function(self):
        assert self.graph_attention_backend in ("triton", "pyg")

    def get_qkve(self, x, edge_attr):
        return self.lin_query(x), self.lin_key(x), self.lin_value(x), self.lin_edge(self.edge_pre_mlp(edge_attr))

    def shard_qkve_heads(self, query, key, value, edges, shard_info, batch_size, model_comm_group=None):
        return *(each.unflatten(1, (self.num_heads, -1)) for each in (query, key, value, edges)), "sizes of shards"

    def attention_block(self, query, key, value, edges, edge_index, size, num_chunks, edges_are_dst_sorted=False):
        source, target = edge_index
        scores = (query[target] * (key[source] + edges)).sum(-1) / query.shape[-1] ** 0.5
        weight = scores.exp()
        sums = torch.zeros(size, self.num_heads).to(weight).index_add(0, target, weight)
        weight = weight / sums[target]
        return torch.zeros_like(query).index_add(0, target, weight[..., None] * (value[source] + edges))

    def forward(self, x, edge_attr, edge_index, group=None):
        *qkve, sizes = self.shard_qkve_heads(*self.get_qkve(x, edge_attr), None, 1, group)
        assert sizes == "sizes of shards"
        q, k, v, edges = qkve
        return self.attention_block(self.q_norm(q), self.k_norm(k), v, edges, edge_index, len(x), num_chunks=1)


def test_a_block_of_anemoi_with_fused3s(program):
    """A block that was made by name, and one that was changed, against their own; edges without [E, heads, columns]."""
    example = program("anemoi_block")
    theirs, (_, _, x, edge_index, attr) = TheirBlock().double(), anemoi_case(program)
    edge_index[0] += 3
    named = example["with_fused3s"](TheirBlock)(graph_attention_backend="fused3s").double()
    changed = torch.nn.ModuleList([TheirBlock().double()])
    named.load_state_dict(theirs.state_dict())
    changed.load_state_dict({f"0.{name}": weight for name, weight in theirs.state_dict().items()})
    example["use_fused3s"](changed)
    example["use_fused3s"](changed)  # changes nothing more
    assert type(changed[0]).__mro__.count(example["Fused3SAttention"]) == 1
    assert changed[0].graph_attention_backend == named.graph_attention_backend == "fused3s"
    assert named.get_qkve(x, attr)[3].shape == attr.shape
    assert_same_gradients(
        [partial(block, x, attr, edge_index) for block in (theirs, named, changed[0])],
        [[attr.requires_grad_(), x.requires_grad_(), *block.parameters()] for block in (theirs, named, changed[0])],
    )
    with pytest.raises(ValueError, match="model_comm_group: got 2 GPUs"):
        named(x, attr, edge_index, SimpleNamespace(size=lambda: 2))


def assert_same_gradients(runs, leaves, tolerance=1e-9):
    """Outputs, and gradients of a random function of them, of each run in float64 are those of the first one."""
    outputs = [run() for run in runs]
    cotangent = torch.randn_like(outputs[0])
    gradients = [torch.autograd.grad(out, own, cotangent) for out, own in zip(outputs, leaves, strict=True)]
    for out, own in zip(outputs[1:], gradients[1:], strict=True):
        torch.testing.assert_close(out, outputs[0], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(own, gradients[0], rtol=tolerance, atol=tolerance)


def test_mesh_transformer(run, program):
    """Attention of dgl.sparse's formula, dense; the network without checkpoints; a rollout step by step."""
    losses = run("mesh_transformer", "--nodes", 100, "--steps", 12)
    assert sum(losses[6:]) < sum(losses[:6])
    example = program("mesh_transformer")
    points, x = torch.rand(9, 2).double(), torch.randn(9, 8, 2).double()
    block, features = example["Block"](16, 2).double(), torch.randn(9, 16, dtype=torch.float64, requires_grad=True)
    row, column = torch.randint(8, (2, 30))  # the last row is empty
    plan = fused3s.plan_attention(torch.stack([column, row]), shape=(9, 9), device="cpu", backend="scatter")

    def formula():
        q, k, v = block.qkv(block.norm(features)).view(9, 3, 8, 2).unbind(1)
        q, k = (example["rotate"](each, points) for each in (q, k))  # below against complex numbers
        weight = torch.einsum("ich,jch->hij", q / 8**0.5, k).exp() * dense(torch.stack([column, row]), (9, 9))
        out = torch.einsum("hij,jch->ich", weight / weight.sum(-1, keepdim=True).clamp(min=1e-300), v)
        return features + block.out(out.flatten(1)).relu()

    leaves = [features, *block.parameters()]
    assert_same_gradients([formula, lambda: block(features, points, plan)], [leaves, leaves])

    frequencies = 100.0 ** torch.linspace(0, 1, 2).double()
    angle = torch.cat([points[:, :1] * frequencies, points[:, 1:] * frequencies], 1)
    turned = torch.view_as_complex(x.transpose(1, 2).reshape(9, 2, 4, 2).contiguous()) * torch.exp(
        1j * angle
    ).unsqueeze(1)
    turned = torch.view_as_real(turned).flatten(2).transpose(1, 2)
    torch.testing.assert_close(example["rotate"](x, points), turned, rtol=1e-6, atol=1e-6)  # frequencies in float32

    network, state = example["Network"]().double(), torch.randn(9, 1, dtype=torch.float64)

    def without_checkpoints(last=state):
        hidden = network.first(last)
        for block in network.blocks:
            hidden = block(hidden, points, plan)
        return last + network.last(hidden)

    leaves = [*network.parameters()]
    assert_same_gradients([without_checkpoints, lambda: network(state, points, plan)], [leaves, leaves])
    final = example["rollout"](network, state, points, plan, 3)()
    expected = without_checkpoints(without_checkpoints(without_checkpoints()))
    torch.testing.assert_close(final, expected, rtol=1e-9, atol=1e-9)


def test_edges_of_a_mesh_are_those_within_two_hops_and_a_tenth_more(program):
    example = program("mesh_transformer")
    points, triangles = example["mesh"](50)
    assert points.shape == (49, 2)
    one_hop = np.eye(49, dtype=int)
    for corners in triangles.tolist():
        for one, other in permutations(corners, 2):
            one_hop[one, other] = 1
    two_hops = one_hop @ one_hop > 0
    row, column = example["adjacency"](triangles, 49)
    found = np.zeros((49, 49), int)
    np.add.at(found, (row, column), 1)
    assert found.max() == 1
    assert found[two_hops].all()
    assert 0 < len(row) - two_hops.sum() <= two_hops.sum() // 10


@pytest.mark.parametrize("columns", [12, 128])
@pytest.mark.parametrize("bipartite", [False, True])
def test_driving_attention(run, program, columns, bipartite):
    """The layer against its formula, edge by edge, with gradients of features, vectors of edges and all weights."""
    losses = run("driving_attention", "--agents", 30, "--steps", 12)
    assert losses[-1] < losses[0]
    example = program("driving_attention")
    layer = example["AttentionLayer"](columns, 2, 4, 0.0, bipartite).double()
    with torch.no_grad():  # also those that start as 0 or 1
        for parameter in layer.parameters():
            parameter.normal_(0, 0.5)
    x, others = torch.randn(7, columns).double().requires_grad_(), torch.randn(11, columns).double().requires_grad_()
    r = torch.randn(40, columns).double().requires_grad_()
    sources = others if bipartite else x
    source, target = torch.randint(len(sources), (40,)), torch.randint(6, (40,))  # the last row is empty
    source[0], target[0] = source[1], target[1]  # a repeated edge with two vectors

    def formula():
        keys = layer.attn_prenorm_x_src(sources)
        queries = layer.attn_prenorm_x_dst(x) if bipartite else keys
        normalised = layer.attn_prenorm_r(r)
        key, value = (
            to(keys)[source] + to_r(normalised) for to, to_r in ((layer.to_k, layer.to_k_r), (layer.to_v, layer.to_v_r))
        )
        weight = (layer.to_q(queries)[target] * key).view(-1, 2, 4).sum(-1).mul(0.5).exp()
        weight = weight / torch.zeros(7, 2).double().index_add(0, target, weight)[target]
        out = torch.zeros(7, 2, 4).double().index_add(0, target, weight[..., None] * value.view(-1, 2, 4)).flatten(1)
        gate = layer.to_g(torch.cat([out, queries], -1)).sigmoid()
        out = x + layer.attn_postnorm(layer.to_out((1 - gate) * out + gate * layer.to_s(queries)))
        return out + layer.ff_postnorm(layer.ff_mlp(layer.ff_prenorm(out)))

    def ours():
        edge_index = torch.stack([source, target])
        options = {"shape": (7, len(sources)), "device": "cpu", "backend": "scatter", "edge_data": True}
        plan = fused3s.plan_attention(edge_index, **options)
        return layer((others, x) if bipartite else x, example["bind_normalised"](plan, r), plan)

    leaves = [x, r, *([others] if bipartite else []), *layer.parameters()]
    leaves = [each for each in leaves if each is not layer.attn_prenorm_r.bias]  # below: two ways to nothing and to v
    assert_same_gradients([formula, ours], [leaves, leaves])
    of_bias = [torch.autograd.grad(each().square().sum(), layer.attn_prenorm_r.bias)[0] for each in (formula, ours)]
    torch.testing.assert_close(*of_bias, rtol=1e-7, atol=1e-9)
    assert example["within"](torch.rand(50, 2), torch.rand(8, 2), 9.0, 5).shape == (2, 40)


def relational_ids():
    """Two contexts of 12 cells: rows with themselves and one row twice among their parents, and cells of no row."""
    node = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4, -1], [5, 5, 5, 0, 0, 0, 0, 1, 1, 2, -1, -1]])
    column = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 9, -1], [0, 1, 2, 5, 6, 7, 8, 3, 4, 9, -1, -1]])
    parents = torch.full((2, 12, 3), -1)
    parents[0, 3:5] = torch.tensor([0, 0, -1])
    parents[0, 5:8] = torch.tensor([1, 2, 0])
    parents[0, 8:10] = torch.tensor([2, 2, 2])
    parents[1, 3:7] = torch.tensor([-1, 5, 1])
    return node, parents, column


def dense_masks(node, parents, column):
    """[B, S, S] as the original makes them, and blocks of them over all cells."""
    real = (node >= 0)[:, :, None] & (node >= 0)[:, None, :]
    is_parent = (node[:, None, :, None] == parents[:, :, None, :]).any(-1) & real
    found = {"feature": ((node[:, :, None] == node[:, None, :]) & real) | is_parent}
    found["neighbour"] = (node[:, :, None, None] == parents[:, None, :, :]).any(-1) & real
    found["column"] = (column[:, :, None] == column[:, None, :]) & real
    return {name: torch.block_diag(*mask.int()).bool() for name, mask in found.items()}


@NEEDS_COMPILER
def test_driving_attention_by_the_kernels(program, monkeypatch):
    """Two layers on one r of 128 columns, on the CPU, against plain PyTorch in float64, with gradients."""
    example = program("driving_attention")
    layer = example["AttentionLayer"](128, 8, 16, 0.0, True)
    inputs = torch.randn(40, 128), torch.randn(30, 128), torch.randn(200, 128)
    edge_index = torch.stack([torch.randint(40, (200,)), torch.randint(30, (200,))])

    def both(layer, backend, dtype):
        lanes, agents, r = (each.to(dtype).requires_grad_() for each in inputs)
        options = {"shape": (30, 40), "dtype": dtype, "head_dim": 16, "num_heads": 8, "edge_data": True}
        plan = fused3s.plan_attention(edge_index, device="cpu", backend=backend, backward=True, **options)
        edges = example["bind_normalised"](plan, r)
        out = layer((lanes, layer((lanes, agents), edges, plan)), edges, plan)
        return out, *torch.autograd.grad(out.square().sum(), [lanes, agents, r, *layer.parameters()])

    expected = both(deepcopy(layer).double(), "scatter", torch.float64)
    with fake_gpu(monkeypatch):
        found = both(layer, "fused3s", torch.float32)
    for one, right in zip(found, expected, strict=True):
        assert (one - right).norm() <= 1e-5 * right.norm()


@pytest.mark.parametrize("drawn", [False, True])
def test_relational_masks(run, program, drawn):
    """Edges against masks of booleans, and a block against PyTorch's attention with them."""
    losses = run("relational_masks", "--contexts", 2, "--cells", 32, "--steps", 12)
    assert sum(losses[6:]) < sum(losses[:6])
    example = program("relational_masks")
    ids = example["contexts"](3, 40) if drawn else relational_ids()
    expected, cells = dense_masks(*ids), ids[0].numel()
    options = {"dtype": torch.float64, "head_dim": 4, "num_heads": 2}
    masks = example["Masks"](cells, 2_000, "cpu", **options)
    masks.fill(*ids)
    masks.check()
    for name, (indptr, indices) in example["masks_of"](*ids, 2_000).items():
        query = torch.arange(cells).repeat_interleave(indptr.diff())
        found = dense(torch.stack([indices[: indptr[-1]], query]), (cells, cells))  # counts a pair as often as it comes
        torch.testing.assert_close(found, expected[name].double())

    block, x = example["Block"](8, 2).double(), torch.randn(*ids[0].shape, 8, dtype=torch.float64, requires_grad=True)

    def formula():
        rows = x.flatten(0, 1)
        full = torch.block_diag(*torch.ones(len(x), ids[0].shape[1], ids[0].shape[1])).bool()
        for name, mask in {"column": expected["column"], **expected, "full": full}.items():
            layer = block.attention[name]
            q, k, v = (to(layer.norm(rows)).view(-1, 2, 4).transpose(0, 1) for to in (layer.wq, layer.wk, layer.wv))
            weight = (q @ k.mT / 2).exp() * mask
            out = weight @ v / weight.sum(-1, keepdim=True).clamp(min=1e-300)  # 0 in a row without an edge
            rows = rows + layer.wo(out.transpose(0, 1).flatten(1))
        return rows.view_as(x)

    leaves = [x, *block.parameters()]
    assert_same_gradients([formula, lambda: block(x, masks)], [leaves, leaves], 1e-7)
    small = example["Masks"](cells, 5, "cpu", **options)
    with pytest.raises(ValueError, match="room: got 5 pairs, but a mask has"):
        small.fill(*ids)


@NEEDS_COMPILER
def test_relational_masks_in_rooms(program, monkeypatch):
    """The kernels, on the CPU, in plans that two batches fill, against plans of each batch."""
    example = program("relational_masks")
    block, x = example["Block"](32, 2), torch.randn(2, 40, 32, requires_grad=True)
    batches = [example["contexts"](2, 40) for _ in range(2)]
    masks = example["Masks"](80, 2_000, "cpu", dtype=torch.float32, head_dim=16, num_heads=2)

    def both(ids):
        masks.fill(*ids)
        out = block(x, masks)
        return out, torch.autograd.grad(out.square().sum(), [x, *block.parameters()])

    expected = [both(ids) for ids in batches]
    with fake_gpu(monkeypatch):
        masks.rooms = {name: fused3s.PlanRoom((80, 80), 2_000, **masks.options) for name in example["MASKS"]}
        found = [both(ids) for ids in batches]
    assert {plan.backend for plan in masks.plans.values()} == {"fused3s"}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def sparse_formula(q, k, v, graph, scale):
    """bsddmm, softmax and bspmm of dgl.sparse, dense in float64."""
    mask = graph.adj_external().to_dense().T.double().log()
    scores = torch.einsum("ich,jch->hij", scale * q.double(), k.double()) + mask
    return torch.einsum("hij,jch->ich", scores.softmax(-1), v.double()).to(v.dtype)


def test_dgl_graph_transformer(run, monkeypatch):
    """The same program with DGL's formula. The eigenvectors of its lap_pe depend on what ran before."""
    monkeypatch.setattr(import_dgl(), "lap_pe", lambda graph, k, padding: torch.randn(graph.num_nodes(), k))
    command = "dgl_graph_transformer", "--molecules", 40, "--epochs", 3, "--layers", 2
    losses = run(*command)
    assert losses[-1] < losses[0]
    monkeypatch.setattr(fused3s, "edge_attention", sparse_formula)
    assert run(*command) == pytest.approx(losses, abs=2e-4)


def test_sphere_attention(run, program):
    """A block against PyTorch's attention with the logarithm of the areas as mask; the areas integrate polynomials."""
    losses = run("sphere_attention", "--latitudes", 8, "--steps", 10, "--radius", 0.8)
    assert losses[-1] < losses[0]
    example = program("sphere_attention")
    points, areas = (tensor.double() for tensor in example["grid"](40))
    integrals = areas @ torch.stack([torch.ones(len(points)), points[:, 0] ** 2, points[:, 2] ** 2, points[:, 2]], 1)
    exact = 4 * math.pi * torch.tensor([1, 1 / 3, 1 / 3, 0]).double()
    torch.testing.assert_close(integrals, exact, rtol=2e-3, atol=1e-4)
    points, areas = (tensor.double() for tensor in example["grid"](6))
    block, x = example["Block"]().double(), torch.randn(72, 64).double()
    is_near = torch.acos((points @ points.T).clamp(-1, 1)) < 0.7

    def attend(q, k, v, edges):
        heads_first = (tensor.transpose(0, 1) for tensor in (q, k, v))
        mask = areas.log().masked_fill(~is_near, -torch.inf)
        return scaled_dot_product_attention(*heads_first, attn_mask=mask).transpose(0, 1)

    plan, bound = example["plan_sphere"](points, areas, 0.7)
    torch.testing.assert_close(block(x, plan, bound), block(x, attend, None), rtol=1e-9, atol=1e-9)


def test_distance_potential(run, program):
    """Energies against dense attention with distances in the mask, keys and values; forces against differences."""
    losses = run("distance_potential", "--structures", 16, "--epochs", 10)
    assert losses[-1] < losses[0]
    example = program("distance_potential")
    model = example["Potential"]().double()
    positions = (1.3 * torch.rand(2, 5, 3)).double().requires_grad_()

    def energy(points):
        """Of one structure. A pair (i, j) has its own key and value, so that each is attention of one query."""
        r = (points[:, None] - points + torch.eye(len(points))[..., None]).norm(dim=-1)  # a diagonal of no use
        is_edge = (r < 2.0) & ~torch.eye(len(points), dtype=torch.bool)
        basis = torch.exp(-8 * (r[..., None] - torch.linspace(0.5, 2.0, 12).double()) ** 2)
        h = model.atom.expand(len(points), -1)
        for qkv, radial, slope in zip(model.qkv, model.radial, model.slope, strict=True):
            q, k, v = qkv(h).view(len(points), 3, 4, 8).unbind(1)
            keys, values = (
                each + basis @ weight.flatten(0, 1).T.view(12, 32)
                for each, weight in zip((k.flatten(1), v.flatten(1)), radial, strict=True)
            )
            scores = torch.einsum("ihd,ijhd->ijh", q, keys.unflatten(-1, (4, 8))) / 8**0.5
            scores = scores - slope * r[..., None] + 2 * (1 - r / 2.0).clamp(min=1e-9).log()[..., None]
            weights = scores.masked_fill(~is_edge[..., None], -torch.inf).softmax(1)
            h = h + torch.einsum("ijh,ijhd->ihd", weights, values.unflatten(-1, (4, 8))).flatten(1)
        return model.energy(h).sum()

    found = model(positions)
    expected = torch.stack([energy(points) for points in positions])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    forces = [torch.autograd.grad(energies.sum(), positions)[0] for energies in (found, expected)]
    torch.testing.assert_close(*forces, rtol=1e-7, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.filterwarnings("error::fused3s.SlowerBackendWarning")
@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("[!_]*.py")))
def test_gpu_default_arguments(run, name):
    options = ("--loader", "random") if name == "pyg_neighbor_loader" else ()
    losses = run(name, *options)
    assert len(losses) >= 5
    assert min(losses) < losses[0]
