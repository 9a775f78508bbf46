"""Plans of `fused3s` by the planning kernels on the CPU (tests/cuda_shim): the bits of the plans that torch makes."""

from dataclasses import replace

import pytest
import scipy.sparse
import torch
from gpu_plan_on_cpu import gpu_on_cpu
from plan_cases import INPUTS, LISTS, PATTERNS, assert_equal_plans, edge_list, random_graph

from kernels.backends import fused3s
from kernels.backends.base import InputSpec
from kernels.backends.fused3s_planning import make_room, plan_by_kernels, plan_by_torch, queue_plan
from kernels.backends.kernel_choice import GraphSize, takes_edges
from kernels.formats.bsb import BSB
from kernels.formats.csr import CSRPattern, csr_pattern
from kernels.formats.edge_list import EdgeList
from kernels.formats.edge_order import edge_order
from kernels.formats.gpu_csr import EdgeSource, PlanNumber
from kernels.formats.row_order import permute_rows
from tests.cuda_shim.cuda_on_cpu import COMPILER, cuda_on_cpu

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler found (g++ or clang++)"),
    pytest.mark.usefixtures("one_thread"),
]

CPU, HALF = torch.device("cpu"), torch.float16


@pytest.fixture
def planned(monkeypatch):
    """A function that plans by the kernels and compares with torch; it returns the plan and the launches."""

    def compare(graph, inputs, label, perm=None, mode="late"):
        graph = graph if isinstance(graph, (BSB, EdgeList)) else csr_pattern(graph)
        row_ids = None
        if perm is not None:
            row_ids = torch.nn.functional.pad(perm, (0, -len(perm) % 16), value=len(perm))
        with cuda_on_cpu():
            shapes = fused3s._block_shapes(fused3s.gpu_limits(CPU), inputs)
            expected = plan_by_torch(graph, CPU, inputs, shapes, row_ids)
            with gpu_on_cpu(monkeypatch, mode) as gpu:
                made = plan_by_kernels(graph, CPU, inputs, shapes, row_ids)
        assert_equal_plans(made, expected, label)
        if inputs.edge_data and perm is None:
            assert torch.equal(made.edge_ids.long(), edge_order(graph, CPU).edge_of_csr), label
        return made, gpu.launched

    return compare


@pytest.mark.parametrize("name", LISTS)
def test_a_plan_of_an_edge_list_has_the_bits_of_torchs(planned, name):
    for key, mode in (("forward", "random"), ("narrow_backward", "late"), ("edge_data_backward", "random")):
        planned(LISTS[name](), INPUTS[key], f"{name}, {key}", mode=mode)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_plan_of_a_csr_has_the_bits_of_torchs(planned, name):
    for key, inputs in INPUTS.items():
        planned(PATTERNS[name](), inputs, f"{name}, {key}")


@pytest.mark.parametrize("key", ["narrow_backward", "edge_data_backward", "backward"])
def test_a_plan_of_reordered_rows(planned, key):
    graph = PATTERNS["symmetric"]()
    perm = torch.randperm(graph.shape[0], generator=torch.Generator().manual_seed(1)).int()
    planned(permute_rows(csr_pattern(graph), perm), INPUTS[key], key, perm)


@pytest.mark.parametrize("num_rows", [1200, 9700])
def test_a_plan_of_reordered_rows_with_a_hub(planned, num_rows):
    """Windows of more edges than a warp sorts, and than fit shared memory, whose rows come in another order."""
    generator = torch.Generator().manual_seed(0)
    leaf = torch.arange(1, num_rows)
    row, col = torch.randint(num_rows, (2, 2 * num_rows), generator=generator)
    rows, cols = torch.cat([0 * leaf, leaf, row, col]), torch.cat([leaf, 0 * leaf, col, row])
    shape = (num_rows, num_rows)
    graph = scipy.sparse.coo_array((torch.ones(len(rows), dtype=torch.int8).numpy(), (rows, cols)), shape).tocsr()
    perm = torch.randperm(num_rows, generator=generator).int()
    for key in ("backward", "narrow_backward"):
        planned(permute_rows(csr_pattern(graph), perm), INPUTS[key], key, perm)


def test_a_plan_of_a_bsb(planned):
    for key in ("forward", "narrow_backward", "edge_data"):
        planned(BSB.from_graph(random_graph(70, 90, 9, 1)), INPUTS[key], key)
        made = planned(BSB.from_csr(*_csr_with_copies(), 3), INPUTS[key], f"{key}, copies")[0]
        assert made.size.num_edges == 6


def _csr_with_copies():
    return torch.tensor([0, 4, 6]), torch.tensor([2, 0, 0, 0, 1, 1])


@pytest.mark.parametrize("mode", ["early", "random"])
def test_the_order_of_threads_does_not_matter(planned, mode):
    for name in ("hubs with copies", "copies"):
        for key in ("backward", "edge_data_backward"):
            planned(LISTS[name](), INPUTS[key], f"{name}, {key}, {mode}", mode=mode)


def test_few_launches(planned):
    """Each takes the host as long as 5 us: molecules with narrow heads and with one head, both passes."""
    molecules = edge_list(3000, 3000, 6200)
    launches = {InputSpec(HALF, 16, 4, backward=True): 7, InputSpec(HALF, 128, backward=True): 9}
    for inputs, count in launches.items():
        assert len(planned(molecules, inputs, str(inputs))[1]) == count
    assert len(planned(molecules, InputSpec(HALF, 16, 4), "forward")[1]) == 6


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ids", [(-1, 3), (3, -1), (-1, -1), (90, 0), (0, 70), (2**31 - 1, 0), (-(2**31), 5)])
def test_an_edge_with_an_id_out_of_range(monkeypatch, ids, dtype):
    """It is named, and a plan that is not checked leaves it out."""
    graph = edge_list(70, 90, 400, dtype=dtype)
    graph.edge_index[:, 17] = torch.tensor(ids, dtype=dtype)
    kept = EdgeList(graph.edge_index[:, torch.arange(400) != 17], graph.shape)
    for key in ("backward", "edge_data_backward"):
        with cuda_on_cpu(), gpu_on_cpu(monkeypatch, "random"):
            shapes = fused3s._block_shapes(fused3s.gpu_limits(CPU), INPUTS[key])
            with pytest.raises(ValueError, match=r"edge_index: row \d \((sources|targets)\)|edge_index: row"):
                plan_by_kernels(graph, CPU, INPUTS[key], shapes)
            made = queue_plan(graph, CPU, INPUTS[key], shapes)
            expected = plan_by_kernels(kept, CPU, INPUTS[key], shapes)
        numbers = made.plan.numbers.tolist()
        assert 400 - numbers[PlanNumber.BAD_EDGE] == 17
        numbers[PlanNumber.BAD_EDGE] = 0
        exact = made.exact(numbers)
        assert torch.equal(exact.kv_tiles, expected.kv_tiles)
        assert made.plan.csr.indices[-1] == 0


@pytest.mark.parametrize(
    ("what", "place", "value"),
    [
        *(("indptr", 0, 1), ("indptr", 5, 10**6), ("indptr", 8, -(2**33)), ("indptr", 30, 3), ("indptr", -1, 799)),
        *(("indptr", -1, 10**4), ("indices", 3, 2**30), ("indices", 0, -1), ("indices", 7, 300), ("indices", -1, -7)),
    ],
)
def test_a_damaged_csr(monkeypatch, what, place, value):
    """Nothing is read or written out of bounds, the error names what is wrong, and the plan has no edges."""
    pattern = csr_pattern(PATTERNS["symmetric"]())
    arrays = {"indptr": torch.from_numpy(pattern.indptr).long(), "indices": torch.from_numpy(pattern.indices).long()}
    arrays[what][place] = value
    damaged = CSRPattern(*arrays.values(), pattern.shape)
    for key in ("backward", "narrow_backward", "edge_data_backward"):
        with cuda_on_cpu(), gpu_on_cpu(monkeypatch, "random"):
            shapes = fused3s._block_shapes(fused3s.gpu_limits(CPU), INPUTS[key])
            with pytest.raises(ValueError, match=what):
                plan_by_kernels(damaged, CPU, INPUTS[key], shapes)
            made = queue_plan(damaged, CPU, INPUTS[key], shapes)
        for offsets in made.plan.csr.offsets:
            assert (offsets == 0).all()
        for work in made.plan.row_items:
            assert sorted(work.items[:, 0].tolist())[-300:] == list(range(300))
        for schedule in made.plan.schedules:
            assert (schedule.work_items[..., 25] == 0).all()  # COUNT


@pytest.mark.parametrize("key", INPUTS)
def test_one_plan_is_filled_again_and_again(monkeypatch, key):
    """Larger, then smaller graphs, with padding: the used part is that of a plan of the graph alone."""
    inputs, shape, room = INPUTS[key], (200, 300), 9000
    graphs = [
        edge_list(*shape, 400, 1),
        edge_list(*shape, room, 2, torch.int32),
        edge_list(*shape, 0),
        edge_list(*shape, 3000, 3),
    ]
    with cuda_on_cpu():
        shapes = fused3s._block_shapes(fused3s.gpu_limits(CPU), inputs)
        with gpu_on_cpu(monkeypatch):
            made = make_room(GraphSize(*shape, room), CPU, inputs, shapes)
            for number, graph in enumerate(graphs):
                padded = torch.full((2, min(room, graph.num_edges + 50)), -1, dtype=graph.edge_index.dtype)
                padded[:, : graph.num_edges] = graph.edge_index
                padded = padded[:, torch.randperm(padded.shape[1], generator=torch.Generator().manual_seed(number))]
                made.plan.fill(EdgeSource(padded, has_padding=True))
                exact = made.exact(made.plan.numbers.tolist())
                alone = EdgeList(padded[:, padded[0] >= 0], shape)
                with monkeypatch.context() as patch:
                    # As the room, whatever the number of edges.
                    patch.setattr("kernels.backends.fused3s_planning.part_edges_for_heads", _part_edges(made))
                    patch.setattr("kernels.backends.fused3s_edges.part_edges_for_heads", _part_edges(made))
                    patch.setattr("kernels.backends.fused3s_planning.takes_edges", _choice_of(made))
                    expected = plan_by_torch(alone, CPU, inputs, shapes, None)
                _assert_used(exact, expected, alone.num_edges, f"{key}, graph {number}")


def test_a_sampled_block_is_planned_without_a_count_and_a_dense_graph_with_one():
    block, dense = GraphSize(28_160, 44_581, 144_630), GraphSize(1000, 1000, 50_000)
    for backward in (False, True):
        assert takes_edges(block, 8, 16, backward=backward) is True
        assert takes_edges(dense, 8, 16, backward=backward) is None
        counted = replace(dense, num_tiles=3200), replace(dense, num_tiles=500)  # 16 and 100 edges a KV tile
        assert [takes_edges(size, 8, 16, backward=backward) for size in counted] == [True, False]
    assert takes_edges(block, 1, 128) is False


def _part_edges(made):
    return lambda *arguments: made.plan.form.part_edges


def _choice_of(made):
    return lambda size, *arguments, **options: takes_edges(made.size, *arguments, **options) is not False


def _assert_used(made, expected, num_edges, label):
    if expected.by_edge:
        assert torch.equal(made.by_edge.indices[:num_edges], expected.by_edge.indices), label
        assert torch.equal(made.by_edge.work.items, expected.by_edge.work.items), label
        assert torch.equal(made.by_edge.work.parts, expected.by_edge.work.parts), label
        assert torch.equal(made.offsets, expected.offsets), label
    assert (made.kv_tiles is None) == (expected.kv_tiles is None), label
    if expected.kv_tiles is not None:
        assert torch.equal(made.kv_tiles, expected.kv_tiles), label
        assert torch.equal(made.schedule.work_items, expected.schedule.work_items), label
        assert made.schedule.num_splits == expected.schedule.num_splits, label
    if expected.slots:
        assert torch.equal(made.slots.slot_edges[:num_edges], expected.slots.slot_edges), label
    if expected.backward and expected.backward.tiles:
        for name in ("by_row", "by_column"):
            for_made, for_expected = (getattr(each.backward.tiles, name) for each in (made, expected))
            assert torch.equal(for_made.kv_tiles, for_expected.kv_tiles), label
            assert torch.equal(for_made.schedule.work_items, for_expected.schedule.work_items), label
    if expected.backward and expected.backward.edges:
        for_made, for_expected = (each.backward.edges for each in (made, expected))
        assert torch.equal(for_made.transposed.edge[:num_edges], for_expected.transposed.edge), label
        assert torch.equal(for_made.transposed.indices[:num_edges], for_expected.transposed.indices), label
        assert torch.equal(for_made.work.items, for_expected.work.items), label


def test_csr_with_unused_memory_behind(monkeypatch):
    pattern = csr_pattern(PATTERNS["directed"]())
    indptr, indices = torch.from_numpy(pattern.indptr).long(), torch.from_numpy(pattern.indices).int()
    longer = torch.cat([indices, torch.full((90,), -1, dtype=torch.int32)])
    inputs = INPUTS["edge_data_backward"]
    with cuda_on_cpu(), gpu_on_cpu(monkeypatch):
        shapes = fused3s._block_shapes(fused3s.gpu_limits(CPU), inputs)
        made = make_room(GraphSize(*pattern.shape, len(longer)), CPU, inputs, shapes)
        made.plan.fill(EdgeSource(longer, indptr, has_padding=True))
        exact = made.exact(made.plan.numbers.tolist())
    assert torch.equal(exact.by_edge.indices[: len(indices)], indices)
    assert (exact.by_edge.indices[len(indices) :] == 0).all()


@pytest.mark.parametrize(
    ("graph", "what"),
    [
        (EdgeList(torch.zeros((2, 1), dtype=torch.int64), (4, (1 << 28) + 1)), r"268435457 columns.*up to 268435456"),
        (EdgeList(torch.zeros((2, 1), dtype=torch.int64), ((1 << 28) + 1, 4)), r"268435457 rows.*up to 268435456"),
        (EdgeList(torch.zeros((2, 1), dtype=torch.int64).expand(2, 2**31), (4, 4)), r"2147483648 edges"),
    ],
)
def test_what_the_kernels_do_not_take(monkeypatch, graph, what):
    if graph.num_edges > 1:  # a contiguous copy would be 32 GB
        monkeypatch.setattr(torch.Tensor, "contiguous", lambda tensor: tensor)
    with cuda_on_cpu(), gpu_on_cpu(monkeypatch) as gpu:
        shapes = fused3s._block_shapes(fused3s.gpu_limits(CPU), INPUTS["backward"])
        with pytest.raises(ValueError, match=f"graph: got {what}"):
            plan_by_kernels(graph, CPU, INPUTS["backward"], shapes)
    assert not gpu.launched
