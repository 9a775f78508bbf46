"""Batches of the layer benchmark, its checks and rows, on the CPU with small graphs; captured loops as calls."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bench_runs import CONFIGS
from torch import nn

import data
import fused3s
import fused3s.nn
from bench import captured_loop, layer_model, layers
from bench.layer_batches import draw_batches
from bench.layer_model import TYPES, LayerModel, TrainingStep, first_layer_errors, run_in_parts
from bench.measures import MEASURES
from bench.runner import Context, measured
from common.provenance import provenance
from configs import load_config
from configs.bench import BenchConfig, Shape, Workload
from data.dgl import import_dgl

CPU = torch.device("cpu")
SHAPE = Shape(2, 4)
OURS, PYG, CAPTURED = ("auto", "eager"), ("pyg", "eager"), ("auto", "cuda_graph")

pytest.importorskip("torch_geometric.nn", reason="torch_geometric is not installed")


def loaded(graph="cora"):
    return data.load(name=graph, source="synthetic", batch_size=30, features=False)


def draw(graph="cora", layers=3, count=2, **workload):
    options = {"layers": layers, "columns": SHAPE.width, "count": count, "seed": 0}
    return draw_batches(loaded(graph), Workload(graph=graph, **workload), **options)


def edges_of(graph) -> set[tuple[int, int]]:
    """(key, query) of each edge."""
    return {*zip(*(ends.tolist() for ends in graph.edges()), strict=True)}


def pairs(block) -> list[tuple[int, int]]:
    return [*zip(*block.edge_index.tolist(), strict=True)]


def test_a_whole_graph_is_one_batch_with_one_block_for_all_layers():
    problem = loaded()
    (batch,) = draw(count=5, edge_dim=3)
    assert len(batch.blocks) == 3
    assert len(batch.distinct_blocks) == 1
    block = batch.blocks[0]
    found = pairs(block)
    assert len(found) == problem.meta.num_edges
    assert {*found} == edges_of(problem.graph)
    assert block.num_sources == block.num_targets == len(batch.x) == len(batch.labels) == problem.meta.num_nodes
    assert block.edge_attr.shape == (problem.meta.num_edges, 3)
    assert batch.x.shape[1] == 8
    assert 0 <= batch.labels.min() <= batch.labels.max() < 8


def test_every_step_gets_other_molecules():
    problem = loaded("ogbg-molhiv")
    first, second = draw("ogbg-molhiv", batch=6)
    sizes = {*problem.graph.batch_num_nodes().tolist()}
    for batch in (first, second):
        (block,) = batch.distinct_blocks
        # No edge leaves its molecule: the parts that are connected are as large as molecules.
        count, part = parts_of(block)
        assert count == 6
        assert {*np.bincount(part)} <= sizes
        assert block.edge_attr is None
    assert first.x.shape != second.x.shape or not torch.equal(first.blocks[0].edge_index, second.blocks[0].edge_index)


def parts_of(block):
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    source, target = block.edge_index.numpy()
    shape = (block.num_targets, block.num_sources)
    return connected_components(coo_array((np.ones(len(source)), (target, source)), shape), directed=False)


def test_sampled_blocks_chain_from_the_outermost_neighbours_to_the_seeds():
    problem = loaded()
    assert problem.graph.in_degrees().max() > 4  # the fan-outs bind
    for batch in draw(layers=2, count=3, seeds=40, fan_out=[4, 2]):
        outer, inner = batch.blocks
        assert (inner.num_targets, len(batch.labels)) == (40, 40)
        assert outer.num_targets == inner.num_sources
        assert len(batch.x) == outer.num_sources
        for block, fan_out in ((outer, 2), (inner, 4)):
            source, target = block.edge_index.numpy()
            assert len({*pairs(block)}) == block.edge_index.shape[1]  # no edge twice
            assert np.bincount(target).max() <= fan_out
            assert source.max() < block.num_sources
            assert target.max() < block.num_targets
            assert (np.diff(target) >= 0).all()
            assert {*range(block.num_targets, block.num_sources)} <= {*source}  # each new node is a neighbour


def test_sampled_edges_are_edges_of_the_graph():
    """On a graph whose nodes tell their ids by their degree: node n has n keys, 0 .. n - 1."""
    nodes = 12
    query = np.repeat(np.arange(nodes), np.arange(nodes))
    key = np.concatenate([np.arange(n) for n in range(nodes)])
    graph = import_dgl().graph((key, query), num_nodes=nodes, idtype=torch.int32).formats("csc")
    meta = SimpleNamespace(num_nodes=nodes)
    workload = Workload(graph="mine", seeds=nodes, fan_out=[11])
    problem = SimpleNamespace(graph=graph, meta=meta)
    (batch,) = draw_batches(problem, workload, layers=1, columns=4, count=1, seed=0)
    (block,) = batch.blocks
    # The fan-out is more than any node's neighbours: the block is the graph, renumbered.
    assert block.num_sources == block.num_targets == nodes
    degree = np.bincount(block.edge_index[1].numpy(), minlength=nodes)
    assert sorted(degree) == [*range(nodes)]
    assert {(degree[source], degree[target]) for source, target in pairs(block)} == {
        (low, high) for high in range(nodes) for low in range(high)
    }


def test_new_edges_are_new_tensors_shared_by_the_layers():
    (batch,) = draw()
    new = batch.with_new_edges()
    assert len(new.distinct_blocks) == 1
    assert new.blocks[0].edge_index is not batch.blocks[0].edge_index
    assert torch.equal(new.blocks[0].edge_index, batch.blocks[0].edge_index)
    assert new.x is batch.x


def test_more_seeds_than_nodes_are_an_error():
    with pytest.raises(ValueError, match="seeds = 5000: cora has 2708 nodes"):
        draw(seeds=5000, fan_out=[2])


def make_models(edge_dim, dtype, layers=2):
    from torch_geometric.nn import TransformerConv

    torch.manual_seed(0)
    exact = LayerModel(TransformerConv, SHAPE, layers, edge_dim).double()
    found = []
    for layer in (fused3s.nn.TransformerConv, TransformerConv):
        model = LayerModel(layer, SHAPE, layers, edge_dim).to(dtype)
        model.load_state_dict(exact.state_dict())
        found.append(model)
    return *found, exact


@pytest.mark.parametrize("workload", [{}, {"edge_dim": 3}, {"seeds": 20, "fan_out": [3, 2], "edge_dim": 2}])
def test_both_models_with_the_same_weights_train_alike(workload):
    """In float64: the same outputs over several steps, so the same losses, gradients and optimiser."""
    batches = [batch.to(CPU, torch.float64) for batch in draw(layers=2, **workload)]
    ours, theirs, _ = make_models(workload.get("edge_dim"), torch.float64)
    types = replace(TYPES["float32"], parameters=torch.float64, inputs=torch.float64)
    steps = [TrainingStep(model, types) for model in (ours, theirs)]
    for batch in batches * 2:
        one, other = (step(batch) for step in steps)
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(one, make_models(workload.get("edge_dim"), torch.float64)[0](batch))  # weights moved


@pytest.mark.parametrize("precision", TYPES)
def test_errors_of_the_first_layer_tell_a_damaged_weight(precision):
    types = TYPES[precision]
    batch = draw(seeds=30, fan_out=[3, 2], layers=2)[0].to(CPU, types.parameters)
    ours, theirs, exact = make_models(None, types.parameters)
    for model in (ours, theirs):
        errors = first_layer_errors(model.layers[0], exact.layers[0], batch, types)
        assert 0 < errors.output < layers.ALLOWED[layers.dtype_names(types)[1]].output
        assert 0 < errors.gradients < layers.ALLOWED[layers.dtype_names(types)[1]].gradients
        assert layers.checked(errors, types)["status"] == "ok"

    class Damaged(fused3s.nn.TransformerConv):
        def forward(self, x, *arguments):
            output = super().forward(x, *arguments)
            return torch.cat([output[:-1], 1.5 * output[-1:]])

    damaged = Damaged(SHAPE.width, SHAPE.dim, heads=SHAPE.heads).to(types.parameters)
    errors = first_layer_errors(damaged, exact.layers[0], batch, types)
    assert layers.checked(errors, types)["status"] == "wrong"

    class Backwards(fused3s.nn.TransformerConv):
        """With the right output and wrong gradients."""

        def forward(self, *arguments):
            output = super().forward(*arguments)
            output.register_hook(lambda gradient: 1.5 * gradient)
            return output

    torch.manual_seed(0)
    backwards = Backwards(SHAPE.width, SHAPE.dim, heads=SHAPE.heads).to(types.parameters)
    errors = first_layer_errors(backwards, exact.layers[0], batch, types)
    assert errors.output < layers.ALLOWED[layers.dtype_names(types)[1]].output
    assert errors.gradients == pytest.approx(0.5, rel=0.05)
    assert layers.checked(errors, types)["status"] == "wrong"
    nan = errors._replace(output=float("nan"))
    assert layers.checked(nan, types)["status"] == "wrong"


WORKLOADS = """workloads={cora: {graph: cora},
  molecules: {graph: ogbg-molhiv, batch: 4, edge_dim: 2, captured: true},
  sampled: {graph: cora, seeds: 20, fan_out: [3, 2]}}"""


def bench(name: str, *overrides: str, device=CPU) -> Context:
    small = ["source=synthetic", "batch_size=20", "pool=2", "steps=2", "repeats=1", "shapes=[2x4]", WORKLOADS]
    small += ["launches=[eager]"]
    config = load_config(CONFIGS / "layers.yaml", [*small, *overrides], schema=BenchConfig)
    graph = config.load(config.graph_of(name), features=False)
    return Context(config, "layers.yaml", provenance(device), device, name, graph)


def rows_of(context: Context) -> list:
    return [row for _, rows in measured(MEASURES["layers"], context) for row in rows]


def test_a_case_has_a_row_of_each_layer_in_every_precision():
    found = bench("molecules")
    rows = rows_of(found)
    assert [(row.dtype, row.out_dtype, (row.backend, row.launch), row.status) for row in rows] == [
        (dtype, out_dtype, layer, status)
        for dtype, out_dtype in (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16"))
        for layer, status in ((OURS, "ok"), (PYG, "ok"), (CAPTURED, "unavailable"))
    ]
    assert {
        (row.variant, row.dataset, row.edges, row.plan, row.heads, row.dim, row.blocks, row.graphs) for row in rows
    } == {("molecules", "ogbg-molhiv", "features_2", "rebuilt", 2, 8, 3, 4)}
    assert {row.nnz for row in rows} == {round(sum(one.num_edges for one in layers.batches_of(found)) / 2)}
    timed = [row for row in rows if row.status == "ok"]
    assert all(0 < row.p10 <= row.value <= row.p90 and 0 <= row.relative_error < 0.05 for row in timed)
    assert not rows_of(found)  # all are known


def test_inference_is_a_forward_pass_that_keeps_no_gradients(monkeypatch):
    outputs = []

    class Watched(fused3s.nn.TransformerConv):
        def forward(self, *arguments):
            outputs.append((self.training, super().forward(*arguments)))
            return outputs[-1][1]

    monkeypatch.setitem(layers.LAYERS, "transformer", ("TransformerConv", Watched))
    rows = rows_of(bench("whole", "precisions=[float32]", "workloads={whole: {graph: cora, inference: true}}"))
    assert [(row.region, row.backend, row.status) for row in rows] == [
        ("forward", "auto", "ok"),
        ("forward", "pyg", "ok"),
    ]
    of_steps = [output for is_training, output in outputs if not is_training]
    assert sum(output.requires_grad for output in of_steps) == 1  # the check of the first layer's gradients
    assert len(of_steps) > 6


def test_a_whole_graph_keeps_its_edges_and_samples_bring_new_ones():
    for name, plan, blocks in (("cora", "fixed", 3), ("sampled", "rebuilt", 2)):
        found = bench(name)
        layers.begin(found)
        assert (found.extra["plan"], found.extra["blocks"]) == (plan, blocks)
        batch = layers.batches_of(found)[0]
        assert (layers.renewed(found, batch) is batch) == (plan == "fixed")


def test_a_layer_that_fails_or_is_wrong_leaves_the_other_ones_time(monkeypatch):
    class Wrong(fused3s.nn.TransformerConv):
        def forward(self, *arguments):
            return super().forward(*arguments) * 1.01

    class Failing(fused3s.nn.TransformerConv):
        def forward(self, *arguments):
            raise MemoryError("CUDA out of memory")

    for layer, status in ((Wrong, "wrong"), (Failing, "oom")):
        monkeypatch.setitem(layers.LAYERS, "transformer", ("TransformerConv", layer))
        ours, theirs = rows_of(bench("sampled", "precisions=[float32]"))
        assert (ours.status, theirs.status) == (status, "ok")


@pytest.mark.parametrize("name", ["cora", "sampled"])
def test_compiled_steps_are_rows_of_the_same_model(name, monkeypatch):
    """Without Inductor, which compiles for minutes."""
    compiled = []

    def compile_(model, *, mode, dynamic):
        compiled.append((mode, dynamic))
        nn.Module.compile(model, backend="eager", dynamic=dynamic)

    monkeypatch.setattr(LayerModel, "compile", compile_)
    rows = rows_of(bench(name, "precisions=[float32]", "launches=[compiled, reduce_overhead]"))
    launches = ["compiled"] if name == "sampled" else ["compiled", "reduce_overhead"]
    assert [(row.backend, row.launch, row.status) for row in rows] == [
        (backend, launch, "ok") for backend in ("auto", "pyg") for launch in launches
    ]
    assert all(0 <= row.relative_error < 1e-5 for row in rows)
    assert compiled == 2 * ([(None, True)] if name == "sampled" else [(None, None), ("reduce-overhead", None)])


@pytest.mark.parametrize("layer", ["TransformerConv", "GATConv"])
def test_a_layer_in_parts_of_rows_is_the_layer(layer, monkeypatch):
    import torch_geometric.nn as pyg

    monkeypatch.setattr(layer_model, "EXACT_EDGES", 100)
    torch.manual_seed(0)
    for batch in draw(edge_dim=3) + draw(layers=2, count=1, seeds=40, fan_out=[4, 2], edge_dim=3):
        batch, model = batch.to(CPU, torch.float64), LayerModel(getattr(pyg, layer), SHAPE, len(batch.blocks), 3)
        model.double()
        assert len([*layer_model.row_parts(batch.blocks[0])]) > 1
        torch.testing.assert_close(model(batch, run_in_parts), model(batch))


@pytest.fixture
def loops_on_cpu(monkeypatch):
    """Captured loops run on the CPU, by calls of the step on padded batches."""
    able = SimpleNamespace(unavailable=lambda device: None)
    monkeypatch.setattr(captured_loop, "REGISTRY", {"fused3s": able})


@pytest.mark.parametrize(
    "workload",
    [
        {"graph": "ogbg-molhiv", "batch": 5},
        {"graph": "ogbg-molhiv", "batch": 5, "edge_dim": 2},
        {"graph": "cora", "seeds": 20, "fan_out": [3, 2]},
    ],
)
def test_padded_batches_train_as_the_batches_themselves(loops_on_cpu, workload):
    batches = [batch.to(CPU, torch.float64) for batch in draw(layers=2, count=4, **workload)]
    assert len({len(batch.x) for batch in batches}) > 1
    types = replace(TYPES["float32"], parameters=torch.float64, inputs=torch.float64)
    eager, _, _ = make_models(workload.get("edge_dim"), torch.float64)
    captured, _, _ = make_models(workload.get("edge_dim"), torch.float64)
    step, loop = TrainingStep(eager, types), captured_loop.captured_loop(TrainingStep(captured, types), batches[:3])
    for batch in batches:
        torch.testing.assert_close(loop(batch), step(batch), rtol=1e-9, atol=1e-9)
    for one, other in zip(captured.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_a_captured_loop_has_a_row_which_is_checked(loops_on_cpu, monkeypatch):
    rows = rows_of(bench("molecules", "precisions=[float32]"))
    assert {((row.backend, row.launch), row.status) for row in rows} == {(OURS, "ok"), (PYG, "ok"), (CAPTURED, "ok")}
    assert 0 < rows[2].relative_error < 1e-4
    make = layers.captured_loop

    def wrong(*arguments):
        loop = make(*arguments)
        return lambda batch: loop(batch) * 1.1

    monkeypatch.setattr(layers, "captured_loop", wrong)
    rows = rows_of(bench("molecules", "precisions=[float32]"))
    assert [row.status for row in rows] == ["ok", "ok", "wrong"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "launch", "count"),
    [("cora", "eager", 2), ("molecules", "eager", 3), ("sampled", "eager", 2), ("cora", "reduce_overhead", 2)],
)
def test_on_a_gpu_every_layer_is_right_and_traced(name, launch, count):
    options = ["shapes=[8x16]", f"launches=[{launch}]"]
    options += ["precisions=[float32]"] if launch != "eager" else []  # each compiles for half a minute
    rows = rows_of(bench(name, *options, device=torch.device("cuda", torch.cuda.current_device())))
    for precision in {(row.dtype, row.out_dtype) for row in rows}:
        own = [row for row in rows if (row.dtype, row.out_dtype) == precision]
        found = {((row.backend, row.launch), row.metric): row for row in own}
        sides = {(row.backend, row.launch) for row in own}
        assert len(sides) == count
        for side in sides:
            assert found[side, "time"].status == "ok", rows
            assert found[side, "peak_memory"].value > 0
            assert 0 < found[side, "gpu_busy"].value < 20 * found[side, "time"].value
