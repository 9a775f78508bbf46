"""The programs of examples/ run as a reader starts them, and compute what the originals compute."""

import math
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch_geometric import typing
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GINEConv, GPSConv, TransformerConv

import fused3s.nn
from data.dgl import import_dgl

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


def run_block(block, source, target, edge_index, attr):
    shape = len(target), len(source)
    plan = fused3s.plan_attention(edge_index, shape=shape, device="cpu", edge_data=True)
    return block(source, target, plan, torch.cat([attr, torch.ones(len(attr), 1).double()], 1))


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
    torch.testing.assert_close(run_block(block, source, target, edge_index, attr), expected, rtol=1e-9, atol=1e-9)


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
    found = run_block(block, source, target, edge_index, attr)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    gradients = [
        torch.autograd.grad(out.square().sum(), of.lin_edge.parameters())
        for out, of in ((found, block), (expected, original))
    ]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


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
@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_gpu_default_arguments(run, name):
    options = ("--loader", "random") if name == "pyg_neighbor_loader" else ()
    losses = run(name, *options)
    assert len(losses) >= 5
    assert min(losses) < losses[0]
