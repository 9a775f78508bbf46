"""Steps on padded batches against the same steps on the batches as they are; and what padding would change.

On the CPU a loop calls its step; on a GPU it replays a CUDA graph.
"""

import logging
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import fused3s.nn
from fused3s import CapturedLoop, captured_loop
from fused3s.runtime.cuda_graph import CaptureError

pyg_data = pytest.importorskip("torch_geometric.data", reason="torch_geometric is not installed")
from torch_geometric.nn import GATConv, GINEConv, global_mean_pool  # noqa: E402

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


def molecules(seed, count, device=CPU):
    """A batch of `count` small graphs with edge features; classes and targets of graphs, classes of nodes."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    graphs = []
    for nodes in torch.randint(3, 12, (count,), generator=generator).tolist():
        edge_index = torch.randint(nodes, (2, 3 * nodes), generator=generator)
        node_class = torch.randint(3, (nodes,), generator=generator)
        graph = pyg_data.Data(x=draw(nodes, 6), edge_index=edge_index, edge_attr=draw(3 * nodes, 2), target=draw(1))
        graphs.append(graph.update({"y": torch.randint(3, (1,), generator=generator), "node_class": node_class}))
    return pyg_data.Batch.from_data_list(graphs).to(device)


class Network(nn.Module):
    """Two layers with what stands between them, and a readout of graphs."""

    drops = False  # nodes, between the layers

    def __init__(self, conv=fused3s.nn.TransformerConv, between=nn.Identity, **options):
        super().__init__()
        self.first, self.second = conv(6, 4, heads=2, **options), conv(8, 4, heads=2, **options)
        self.between, self.readout = between(), nn.Linear(8, 3)

    def nodes(self, batch):
        edges = (batch.edge_index,) if self.first.edge_dim is None else (batch.edge_index, batch.edge_attr)
        x = self.between(self.first(batch.x, *edges)).relu()
        return self.second(functional.dropout(x, 0.5, self.training and self.drops), *edges)

    def forward(self, batch):
        return self.readout(global_mean_pool(self.nodes(batch), batch.batch, batch.num_graphs))


def of_graphs(model, batch):
    return functional.cross_entropy(model(batch), batch.y)


def of_targets(model, batch):
    error, real = (model(batch)[:, 0] - batch.target).square(), batch.is_real("target")
    return (error * real).sum() / real.sum()


def trainer(model, loss_of=of_graphs, **options):
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01, **options)

    def step(batch):
        optimiser.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimiser.step()
        return loss.detach()

    return step, optimiser


def network(device=CPU, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return Network(**options).to(device, dtype)


def in_double(batch):
    return batch.apply(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def with_masks(batch):
    """An unpadded batch with what a padded one offers."""
    batch.is_real = lambda name: torch.ones(len(batch[name]), dtype=torch.bool, device=batch.x.device)
    return batch


OURS = {
    "TransformerConv": {"conv": fused3s.nn.TransformerConv},
    "TransformerConv-edges": {"conv": fused3s.nn.TransformerConv, "edge_dim": 2},
    "GATConv": {"conv": fused3s.nn.GATConv},
    "GATv2Conv": {"conv": fused3s.nn.GATv2Conv},
}
CONVS = OURS | {"PyG": {"conv": GATConv}, "PyG-edges": {"conv": GATConv, "edge_dim": 2}}


@pytest.mark.parametrize("edges", [0, 63, 40_000])
def test_edges_of_padding_repeat_none_and_have_no_hub(edges):
    """Repeated edges and hubs would take the planning kernels longer than the batch."""

    def graph(edges):
        return {"x": torch.randn(100, 3), "edge_index": torch.randint(100, (2, edges))}

    seen = []
    samples = [graph(edges), graph(edges // 2), graph(0)]
    loop = CapturedLoop(lambda batch: seen.append(batch), nn.Linear(1, 1), samples=samples)
    loop(samples[-1])
    x, edge_index = seen[-1]["x"], seen[-1]["edge_index"]
    assert edge_index.shape[1] >= edges
    assert edge_index.min() >= 100
    assert edge_index.max() < len(x)
    assert len(edge_index.unique(dim=1).T) == edge_index.shape[1]
    assert len(x) < 100 + 200 + 2 * edges**0.5
    degrees = [torch.bincount(ids).max() for ids in edge_index]
    assert max(degrees) <= 64 + 2 * edges**0.5


ON_BOTH = [(CPU, conv) for conv in CONVS]
ON_BOTH += [pytest.param(torch.device("cuda", 0), conv, marks=pytest.mark.gpu, id=f"gpu-{conv}") for conv in OURS]


@pytest.mark.parametrize("loss_of", [of_graphs, of_targets])
@pytest.mark.parametrize(("device", "conv"), ON_BOTH)
def test_padded_batches_train_as_they_are(caplog, device, conv, loss_of):
    """Batches of other sizes than the samples; on the CPU the last one has fewer graphs, the first one no room. On a
    GPU 20 batches of changing size, of which the 10th does not fit."""
    dtype, options, exact, of_weights = torch.float64, {}, {"rel": 1e-9}, {"rtol": 1e-8, "atol": 1e-10}
    batches = [in_double(molecules(seed, count)) for seed, count in enumerate((9, 3, 4, 2, 1))]
    samples = [batches[3], batches[1]]
    if device != CPU:
        dtype, options = torch.float32, {"capturable": True, "eps": 1e-4}  # a smaller one magnifies rounding
        exact, of_weights = {"rel": 1e-3, "abs": 1e-4}, {"rtol": 5e-3, "atol": 5e-3}
        batches = [molecules(seed, 200 if seed == 9 else 20 + seed % 7, device) for seed in range(20)]
        samples = batches[:9]
    eager, padded = (network(device, dtype, **CONVS[conv]) for _ in range(2))
    step, _ = trainer(eager, loss_of, **options)
    expected = [step(with_masks(batch.clone())).item() for batch in batches]
    step, optimiser = trainer(padded, loss_of, **options)
    loop = CapturedLoop(step, padded, optimiser, samples=samples)
    with caplog.at_level(logging.WARNING, "fused3s"):
        losses = [loop(batch.cpu() if seed % 2 else batch) for seed, batch in enumerate(batches)]
    assert torch.stack(losses).tolist() == pytest.approx(expected, **exact)
    captured_anew = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert device == CPU or len(captured_anew) == 1
    for one, other in zip(padded.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, other, **of_weights)


class Everything(nn.Module):
    """A layer of messages with edge features, sums over all edges and nodes, and ids in other tensors."""

    def __init__(self):
        super().__init__()
        self.conv, self.out = GINEConv(nn.Linear(6, 3), edge_dim=2), nn.Linear(3, 3)

    def forward(self, batch):
        out = self.out(self.conv(batch["x"], batch["edge_index"], batch["edge_attr"]))
        return out[batch["picked_index"]], out


@pytest.mark.parametrize("as_mapping", [True, False])
def test_results_have_the_rows_of_the_batch(as_mapping):
    """Evaluation of nodes; numbers are tensors; a mapping as a Data, with ids of nodes of its own."""
    torch.manual_seed(0)
    model = Everything().double()

    def sample(seed):
        batch = in_double(molecules(seed, 2))
        found = {name: batch[name] for name in ("x", "edge_index", "edge_attr")} | {"weight": torch.ones(2)}
        found |= {"picked_index": torch.arange(0, len(batch.x), 3), "seeds": 2 + seed, "name": "left out"}
        return found if as_mapping else pyg_data.Data.from_dict(found)

    @torch.no_grad()
    def evaluate(batch):
        assert batch["weight"].shape == (2,)
        assert "name" not in (batch if as_mapping else batch.to_dict())
        picked, out = model(batch)
        is_seed = torch.arange(batch["num_nodes"]) < batch["seeds"]
        return {"picked": picked, "all": [out, out[:, 0] * is_seed], "total": (out.argmax(1) * is_seed).sum()}

    loop = CapturedLoop(evaluate, model, samples=[sample(seed) for seed in range(2)])
    kept = []
    for seed in (2, 3, 0):
        given, found = sample(seed), loop(sample(seed))
        with torch.no_grad():
            picked, out = model(given)
        first = out[:, 0].where(torch.arange(len(out)) < 2 + seed, 0)
        kept.append((found, {"picked": picked, "all": [out, first], "total": out[: 2 + seed].argmax(1).sum()}))
    for found, expected in kept:  # at the end: a result is not overwritten
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_ids_of_the_rows_of_two_tensors():
    """Pairs of graphs: which nodes the ids are of is refused, and told."""
    torch.manual_seed(0)
    conv = fused3s.nn.TransformerConv(6, 4).double()

    def pairs(seed, count):
        batches = {end: in_double(molecules(seed + place, count)) for place, end in enumerate("st")}
        found = {"num_graphs": count, "y": batches["s"].y, "x_s_ptr": batches["s"].ptr}
        for end, batch in batches.items():
            found |= {f"x_{end}": batch.x, f"edge_index_{end}": batch.edge_index, f"x_{end}_batch": batch.batch}
        return found

    @torch.no_grad()
    def alike(batch):
        ends = (
            global_mean_pool(
                conv(batch[f"x_{end}"], batch[f"edge_index_{end}"]), batch[f"x_{end}_batch"], batch["num_graphs"]
            )
            for end in "st"
        )
        return functional.cosine_similarity(*ends)

    samples = [pairs(0, 3), pairs(2, 4)]
    with pytest.raises(ValueError, match="padding of edge_index_s: ids of num_nodes, and no tensor has as many rows"):
        CapturedLoop(alike, conv, samples=samples)
    loop = CapturedLoop(alike, conv, samples=samples, padding={"edge_index_s": "x_s", "edge_index_t": "x_t"})
    for batch in (pairs(4, 9), pairs(6, 2)):
        torch.testing.assert_close(loop(batch), alike(batch), rtol=1e-9, atol=1e-12)


def test_the_loop_leaves_nothing_behind_before_its_first_step():
    """Weights, gradients, buffers, optimiser, scaler and random numbers, with dropout and a shuffled loader."""
    model = network(between=lambda: nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(8).eval()), dropout=0.5)
    model.drops = True

    def loss_of(model, batch):
        model.between[1].eval()
        return of_graphs(model, batch)

    step, optimiser = trainer(model, loss_of)
    model.first.lin_key.weight.grad = gradient = torch.ones_like(model.first.lin_key.weight)
    samples = DataLoader([in_double(molecules(seed, 2)) for seed in range(3)], batch_size=None, shuffle=True)
    random, before = torch.get_rng_state(), {name: each.clone() for name, each in model.state_dict().items()}
    loop = CapturedLoop(step, model, optimiser, samples=samples)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert not optimiser.state
    assert model.first.lin_key.weight.grad is gradient
    assert gradient.eq(1).all()
    assert model.first.lin_query.weight.grad is None
    loop(in_double(molecules(4, 2)))
    assert not torch.equal(torch.get_rng_state(), random)  # dropout draws in a step


def squared(model, batch):
    return (model(batch)[:, 0] - batch.target).square().mean()


def of_all_nodes(model, batch):
    return of_graphs(model, batch) + model.nodes(batch).mean()


def unlabelled(model, batch):
    return functional.cross_entropy(model.readout(model.nodes(batch)), batch.node_class)


REFUSED = {
    "batch norm": (lambda: nn.BatchNorm1d(8), of_graphs, "the buffer between.running_mean"),
    "batch norm without buffers": (lambda: nn.BatchNorm1d(8, track_running_stats=False), of_graphs, "the gradient of"),
    "mean over nodes": (nn.Identity, of_all_nodes, "the gradient of"),
    "loss over graphs": (nn.Identity, squared, "the gradient of"),
    "labels": (nn.Identity, unlabelled, "the gradient of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_step_that_padding_changes_is_refused(case):
    between, loss_of, named = REFUSED[case]
    model = network(between=between)
    step, optimiser = trainer(model, loss_of)
    with pytest.raises(ValueError, match=rf"step: padding changes {named}.*BatchNorm over nodes"):
        CapturedLoop(step, model, optimiser, samples=[in_double(molecules(0, 9))])
    if case == "labels":
        loop = CapturedLoop(step, model, optimiser, samples=[in_double(molecules(0, 9))], padding={"node_class": -100})
        assert loop(in_double(molecules(1, 4))).isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["formula", "auto"])
@pytest.mark.usefixtures("formula")
def test_rounding_is_no_difference(dtype, backend):
    """Also of a backend whose calls are operators where a mode of torch watches."""
    model = network(dtype=dtype, backend=backend)
    step, optimiser = trainer(model, lambda model, batch: functional.cross_entropy(model(batch).float(), batch.y))
    samples = [molecules(seed, 30) for seed in range(2)]
    for sample in samples:
        sample.x = sample.x.to(dtype)
    assert CapturedLoop(step, model, optimiser, samples=samples)(samples[0]).isfinite()


def test_a_batch_without_room_is_captured_anew(monkeypatch, caplog):
    """Once for each larger batch, with a tenth more room; the old tensors are gone by then."""
    rooms, make = [], captured_loop._Room.__init__

    def watched(room, *arguments, **options):
        assert all(each() is None for each in rooms)
        make(room, *arguments, **options)
        rooms.append(weakref.ref(room))

    model = network()
    step, optimiser = trainer(model)
    loop = CapturedLoop(step, model, optimiser, samples=[in_double(molecules(0, 4))])
    rooms.append(weakref.ref(loop._room))
    monkeypatch.setattr(captured_loop._Room, "__init__", watched)
    sizes = [5, 40, 41, 42, 40, 5, 90]
    with caplog.at_level(logging.WARNING, "fused3s"):
        for seed, count in enumerate(sizes):
            loop(in_double(molecules(seed, count)))
    assert [each for each in rooms if each()] == rooms[-1:]
    assert len(caplog.records) == len(rooms) - 1
    assert 2 <= len(caplog.records) <= 4
    assert "'num_graphs': 90" in caplog.text


def test_a_gradient_scaler_that_starts_too_high():
    """Its first gradients are infinite with and without padding, and it makes no step."""
    batches, losses = [molecules(seed, 5) for seed in range(6)], []
    for is_padded in (False, True):
        model = network(dtype=torch.float32)
        scaler = torch.amp.GradScaler("cpu", init_scale=torch.finfo(torch.float32).max)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(batch, model=model, scaler=scaler, optimiser=optimiser):
            optimiser.zero_grad()
            loss = of_graphs(model, batch)
            scaler.scale(16 * loss).backward()  # more than the largest float32
            scaler.step(optimiser)
            scaler.update()
            return loss.detach()

        run = CapturedLoop(step, model, optimiser, scaler, samples=batches) if is_padded else step
        losses.append([run(batch).item() for batch in batches] + [scaler.get_scale()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][-1] < 3e38


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_learning_rate_that_changes_is_a_tensor(rate):
    """A CUDA graph would keep the number."""
    model, batch = network(), in_double(molecules(0, 4))
    optimiser = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)

    def step(batch):
        loss = of_graphs(model, batch)
        loss.backward()
        optimiser.step()
        return loss.detach()

    loop = CapturedLoop(step, model, optimiser, samples=[batch])
    scheduler = torch.optim.lr_scheduler.StepLR(optimiser, 1)
    loop(batch)
    scheduler.step()
    refused = pytest.raises(CaptureError, match=r"optimiser: .* got {'lr': 0.01.*}.* such as lr=torch.tensor")
    with refused if isinstance(rate, float) else nullcontext():
        loop(batch)


def test_a_capture_without_memory_leaves_a_loop_for_smaller_batches(monkeypatch):
    model = network()
    step, optimiser = trainer(model)
    loop = CapturedLoop(step, model, optimiser, samples=[in_double(molecules(0, 4))])
    copy_padded_ = captured_loop.copy_padded_

    def limited(target, *others):
        if len(target) > 500:
            raise torch.OutOfMemoryError("no memory")
        copy_padded_(target, *others)

    monkeypatch.setattr(captured_loop, "copy_padded_", limited)
    with pytest.raises(torch.OutOfMemoryError):
        loop(in_double(molecules(1, 300)))
    assert loop(in_double(molecules(2, 4))).isfinite()


def loop_of(samples, step=lambda batch: batch["x"].sum(), **options):
    return CapturedLoop(step, nn.Linear(2, 2), samples=samples, **options)


def small(nodes=3, edges=4, **others):
    return {"x": torch.ones(nodes, 2), "edge_index": torch.zeros(2, edges).long(), **others}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: CapturedLoop(3, nn.Linear(1, 1), samples=[]), TypeError, "step: got int"),
        (lambda: CapturedLoop(print, 3, samples=[]), TypeError, "model: got int"),
        (lambda: CapturedLoop(print, nn.ReLU(), samples=[]), CaptureError, "this one has no parameters"),
        (lambda: loop_of([]), ValueError, "samples: got none"),
        (lambda: loop_of(small()), TypeError, "batch: got str; a PyG Data or Batch"),
        (lambda: loop_of([pyg_data.HeteroData()]), TypeError, "batch: got HeteroData"),
        (lambda: loop_of([small(), small(y=torch.ones(3))]), ValueError, r"one with .*'y'\], and one with"),
        (lambda: loop_of([small(adj_t=torch.eye(3).to_sparse())]), TypeError, "adj_t: got torch.sparse_coo"),
        (lambda: loop_of([small()], padding={"z": 1}), ValueError, r"padding: got \['z'\]"),
        (lambda: loop_of([small(batch=torch.zeros(3).long())]), ValueError, "padding of batch: ids of num_graphs"),
        (lambda: loop_of([small()], step=lambda batch: 1.0), TypeError, "step: the result is float"),
        (
            lambda: loop_of([small()], step=lambda batch: {"a": batch["x"].T}),
            ValueError,
            r"padding changes the result\['a'\], by inf",
        ),
        (lambda: loop_of([small()], step=lambda batch: batch["is_real"]("z")), ValueError, "is_real: got 'z'"),
        (lambda: loop_of([small()])(small(z=1)), ValueError, r"batch: got tensors \['edge_index', 'x', 'z'\]"),
        (lambda: loop_of([small(w=torch.ones(9))])(small(w=torch.ones(8))), ValueError, r"w: got .*\(8,\)\); .*\(9,\)"),
        (lambda: loop_of([small()])({**small(), "x": torch.ones(3, 2).half()}), ValueError, "x: got .*float16"),
        (lambda: loop_of([small(4)])(small(5)), ValueError, "edge_index: got length 4, and num_nodes has 5; .* differ"),
    ],
)
def test_wrong_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.fixture
def gpu():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
def test_gpu_memory_stays(gpu):
    """Over 300 steps; each larger batch frees the graph before it."""
    model = network(gpu, torch.float32)
    step, optimiser = trainer(model, capturable=True)
    loop, graphs = CapturedLoop(step, model, optimiser, samples=[molecules(0, 10, gpu)]), []
    for count in (100, 400, 1_600):
        graphs.append(weakref.ref(loop._graph))
        loop(molecules(0, count, gpu))
    assert not any(each() for each in graphs)
    allocated = []
    for seed in range(300):
        loop(molecules(seed % 10, 4 + seed % 20, gpu))
        allocated.append(torch.cuda.memory_allocated(gpu))
    assert max(allocated[20:]) <= max(allocated[:20])


@pytest.mark.gpu
def test_gpu_evaluation_has_the_rows_of_the_batch(gpu):
    model = network(gpu, torch.float32)
    model.drops = True
    batches = [molecules(seed, 5 + seed, gpu) for seed in range(8)]

    @torch.inference_mode()
    def evaluate(batch):
        return model.eval()(batch), model.nodes(batch)

    loop = CapturedLoop(evaluate, model, samples=batches[:3])
    found = [loop(batch) for batch in batches]
    for each, batch in zip(found, batches, strict=True):
        torch.testing.assert_close(each, evaluate(batch), rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_gpu_a_step_that_cannot_be_captured_is_refused(gpu):
    """With batch norm, or with a wait for the GPU; the model is as before, and eager steps follow."""
    batch = molecules(0, 9, gpu)
    model = network(gpu, torch.float32, between=lambda: nn.BatchNorm1d(8))
    step, optimiser = trainer(model, capturable=True)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"padding changes the buffer between.running_mean"):
        CapturedLoop(step, model, optimiser, samples=[batch])
    with pytest.raises(CaptureError, match=r"A step must not wait for the GPU: no \.item\(\)"):
        CapturedLoop(
            lambda batch: model.readout(batch.x[batch.x[:, 0] > 0][:, :1].expand(-1, 8)).sum(), model, samples=[batch]
        )
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert step(batch).isfinite()
