"""Plans of `fused3s` by the planning kernels, cuda/plan/*.cu, on the CPU (tests/cuda_shim): the bits of the oracle's
plans, damaged graphs, rooms. On a GPU: test_gpu_plans.py."""

from functools import partial

import numpy as np
import plan_oracle
import pytest
import scipy.sparse
import torch
from gpu_plan_on_cpu import gpu_on_cpu
from plan_cases import INPUTS, LISTS, PATTERNS, assert_equal_plans, edge_list
from plan_oracle import COUNT, WINDOW, expected_plan
from poison import poisoned_buffers

from bench.baselines import REGISTRY
from fused3s.backends.base import QKV, BackwardCall, Call, InputSpec
from fused3s.fused import backend as fused3s
from fused3s.fused.choice import GraphSize, goes_edge_by_edge
from fused3s.fused.planning import gpu_csr, gpu_plan
from fused3s.fused.planning.gpu_csr import EdgeSource, PlanNumber
from fused3s.fused.planning.gpu_plan import GPUPlan, PlanForm, most_words, plan_instances
from fused3s.fused.planning.plan import plan_graph, queue_plan
from fused3s.fused.planning.schedule import ScheduleForm, most_splits_of
from fused3s.fused.tuning import SM90
from fused3s.graph.csr import CSRPattern, csr_pattern
from fused3s.graph.edge_list import EdgeList
from fused3s.graph.edge_order import edge_order
from fused3s.graph.reorder.row_order import permute_rows
from fused3s.runtime.jit import KernelInstance
from tests.cuda_shim.cuda_on_cpu import MODES, ON_SHIM, cuda_on_cpu
from tests.cuda_shim.oracle import GRAPHS

pytestmark = ON_SHIM

CPU, HALF = torch.device("cpu"), torch.float16
# Heads in groups, few and many warps at once.
FORMS = {
    "gpu": ScheduleForm(1, 4, 132 * 16),
    "half_full": ScheduleForm(1, 4, 40),
    "small_gpu": ScheduleForm(3, 2, 4),
    "one_warp": ScheduleForm(2, 1, 1),
}


def forward_of(inputs: InputSpec):
    return partial(fused3s.forward_schedule, fused3s.gpu_limits(CPU), inputs, CPU.index)


@pytest.fixture
def planned(monkeypatch):
    """A function that plans by the kernels and compares with the oracle; it returns the plan and the launches. `form`:
    of the forward pass; `part_edges`: most edges of an item."""
    exact = GPUPlan.exact

    def checked(plan, arrays, numbers):
        """Behind what a plan uses, blocks have no work."""
        found = exact(plan, arrays, numbers)
        used = zip((found.work_items, found.row_work_items, found.column_work_items), plan.work_items, strict=False)
        for items, room in used:
            behind = room[len(items) :]
            assert (behind[..., WINDOW] == -1).all()
            assert (behind[..., COUNT] == 0).all()
        if found.row_items is not None:
            behind = plan.row_items[0][len(found.row_items) :]
            assert torch.equal(behind, torch.tensor([-1, 0, 0, -1], dtype=torch.int32).expand_as(behind))
        return found

    monkeypatch.setattr(GPUPlan, "exact", checked)

    def compare(graph, inputs, label, perm=None, mode="late", form=None, part_edges=None):
        graph = graph if isinstance(graph, EdgeList) else csr_pattern(graph)
        with cuda_on_cpu(), monkeypatch.context() as patch:
            if part_edges:
                patch.setattr("fused3s.fused.planning.plan.part_edges_for_heads", lambda *given: part_edges)
            forward = forward_of(inputs) if form is None else lambda most_tiles: form
            expected = expected_plan(graph, CPU, inputs, forward, perm)
            with gpu_on_cpu(monkeypatch, mode) as gpu:
                made = plan_graph(graph, CPU, inputs, forward, perm).arrays
        assert_equal_plans(made, expected.arrays, label)
        if inputs.edge_data and perm is None:
            assert torch.equal(made.edge_ids.long(), edge_order(graph, CPU).edge_of_csr), label
        return made, gpu.launched

    return compare


@pytest.fixture
def check(planned):
    """The same for a CSR: KV tiles alone, or with slots and items of at most `part_edges` edges."""

    def compare(indptr, indices, shape, form=FORMS["gpu"], mode="late", label="", part_edges=0):
        inputs = INPUTS["edge_data" if part_edges else "forward"]
        return planned(CSRPattern(indptr, indices, shape), inputs, label, None, mode, form, part_edges)[0]

    return compare


@pytest.mark.parametrize("name", LISTS)
def test_a_plan_of_an_edge_list_has_the_bits_of_the_oracles(planned, name):
    large = LISTS[name]().num_edges > 3000 or "wider" in name
    for key, mode in (("edge_data_backward", "random"), ("narrow_backward", "late"))[: 2 - large]:
        planned(LISTS[name](), INPUTS[key], f"{name}, {key}", mode=mode)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_plan_of_a_csr_has_the_bits_of_the_oracles(planned, name):
    for key, inputs in INPUTS.items():
        planned(PATTERNS[name](), inputs, f"{name}, {key}")


@pytest.mark.parametrize("name", GRAPHS)
def test_every_form_of_a_schedule(check, name):
    graph = GRAPHS[name]()
    csr = torch.from_numpy(graph.indptr).long(), torch.from_numpy(graph.indices.copy()).int(), graph.shape
    for number, form in enumerate(FORMS.values()):
        check(*csr, form, ("late", "random")[number % 2], f"{name}, {form}", (16, 1, 0)[number % 3])


def random_csr(lengths, num_cols, seed, kind="distinct"):
    """Rows of such lengths: of distinct columns, ascending; "repeated": of any, in any order."""
    generator = np.random.default_rng(seed)
    rows = [
        generator.integers(0, num_cols, length)
        if kind == "repeated"
        else np.sort(generator.choice(num_cols, length, replace=False))
        for length in lengths
    ]
    indptr = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    return indptr, torch.from_numpy(np.concatenate(rows).astype(np.int64)), (len(lengths), num_cols)


# Lengths of rows, columns. A window has up to 512, up to 8,192 and more edges; a bitmap has 2^18 columns.
WINDOWS = {
    "edges_at_the_limit_of_a_warp": ([32] * 16 + [33] + [32] * 15 + [0] * 40 + [512] + [0] * 15 + [1], 3000),
    "block_sorts": ([100] * 16 + [0] * 15 + [2000] + [3, 4], (1 << 18) + 7),
    "ranges": ([1000] * 3 + [0] * 9 + [2000, 5000, 1, 1], (1 << 19) + 5),
    "bitmap_ends_in_a_word": ([60] * 16, 4 * 128 + 33),
    "a_block_for_each": ([40] * 16 * 3 + [300] * 5, 500),
    "blocks_of_many_windows": ([2000] * 2 + [0] * 16 * 9 + [3] * 20 + [900] * 16, 3000),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_each_way_of_a_window(check, name):
    """Columns in any order; distinct ones; and one of those twice."""
    lengths, num_cols = WINDOWS[name]
    indptr, indices, shape = random_csr(lengths, num_cols, 1, "repeated")
    check(indptr, indices, shape, mode="random", label=f"{name}, repeated", part_edges=40)
    indptr, indices, shape = random_csr(lengths, num_cols, 1)
    check(indptr, indices.int(), shape, label=f"{name}, distinct", part_edges=40)
    longest = int(indptr[int(np.argmax(lengths))])
    indices[longest + 7] = indices[longest + 6]
    check(indptr.int(), indices.int(), shape, label=f"{name}, a copy", part_edges=40)


# Copies of the edges of a row, in three rows: of a window for a warp, for a block, and of more keys than it can sort.
COPIES = {"warp": [[90, 3, 41, 1], [2, 2, 2], [200]], "block": [[700, 1, 650, 3] * 2, [1] * 40 + [300], [5, 4]]}
COPIES["large"] = [[1500, 1499, 7, 1, 1], [1, 600, 2], [25] * 20]


@pytest.mark.parametrize("name", COPIES)
def test_edges_of_many_copies(check, name):
    generator, rows = np.random.default_rng(2), []
    for copies in COPIES[name]:
        columns = np.sort(generator.choice(500, len(copies), replace=False))
        rows.append(generator.permutation(np.repeat(columns, copies)))
    indptr, indices = (torch.from_numpy(each) for each in (np.cumsum([0, *map(len, rows)]), np.concatenate(rows)))
    for mode in MODES if name == "warp" else ["random"]:
        check(indptr, indices, (3, 500), mode=mode, label=name)


@pytest.mark.parametrize("kind", ["repeated", "distinct"])
def test_a_csr_of_many_edges_has_sort_keys_for_its_large_windows_alone(check, monkeypatch, kind):
    monkeypatch.setattr(gpu_csr, "COUNTED_EDGES", 1)
    lengths = [300] * 32 + [256] * 16 + [5] * 16 * 8 + [2500] + [0] * 14 + [2600] + [257] + [256] * 15 + [2900] * 2
    indptr, indices, shape = random_csr(lengths, 3000, 1, kind)
    large = 2 * 4800 + 5100 + 4097 + 5800
    assert gpu_csr.num_keys(EdgeSource(indices, indptr), len(indices), False) == large
    for mode in ("late", "random"):
        check(indptr, indices, shape, mode=mode, label=kind, part_edges=40)


def test_the_last_of_the_most_columns(check):
    num_cols = 1 << 28  # a gigabyte of counts
    indices = torch.tensor([num_cols - 1] * 16 + [5, num_cols - 2, 1 << 27])
    check(torch.tensor([0, 16, 18, 19]), indices, (3, num_cols))


def test_random_sizes_of_windows(check):
    generator = np.random.default_rng(5)
    for seed in range(10):
        num_windows = int(generator.integers(1, 90))
        scale = float(generator.choice([1, 5, 30]))
        lengths = np.minimum(generator.exponential(scale, 16 * num_windows - seed % 16), 700).astype(int)
        indptr, indices, shape = random_csr(lengths, 700, seed)
        form = ScheduleForm(*(int(generator.choice(each)) for each in ([1, 2, 8], [1, 2, 3, 4], [4, 40, 400])))
        check(indptr, indices, shape, form, label=f"seed {seed}, {form}")


def test_more_blocks_and_windows_than_a_sort_takes(check, monkeypatch):
    """Sorted chunk by chunk: shared blocks by powers of two, and windows of one warp that are dealt."""
    monkeypatch.setattr(gpu_plan, "PLAN_SCHEDULE", KernelInstance("plan/plan_schedule.cu", "plan_schedule", (64,)))
    for many in (8, 64):
        monkeypatch.setattr(plan_oracle, "MANY_BLOCKS", many)
        monkeypatch.setattr(gpu_plan, "MANY_BLOCKS", many)
        lengths = np.random.default_rng(many).choice([0, 2, 20, 120], 16 * 150 - 3)
        indptr, indices, shape = random_csr(lengths, 2000, many)
        plan = check(indptr, indices, shape, FORMS["one_warp"])
        assert len(plan.work_items) > many
    lengths = np.random.default_rng(3).choice([0, 2, 5], 16 * 100)
    plan = check(*random_csr(lengths, 900, 4))
    assert plan.windows[-1] == 0, "all are sorted"
    assert plan.windows[0] > 64


@pytest.mark.parametrize("many", [1, 4096])
def test_blocks_of_just_warp_tiles_a_warp_do_not_lead(check, monkeypatch, many):
    monkeypatch.setattr(plan_oracle, "MANY_BLOCKS", many)
    monkeypatch.setattr(gpu_plan, "MANY_BLOCKS", many)
    lengths = [0] * 16 * 5
    lengths[::16] = [16 * 12, 16 * 13, 16 * 12 + 1, 5, 16 * 4]  # warp_tiles is 3, with 4 warps a block
    plan = check(*random_csr(lengths, 900, 1))
    assert plan.windows[:3] == (1, 4, 0)
    assert plan.work_items[:, 0, WINDOW].tolist() == [1, 2, 3, 0, 4]


def test_more_rows_than_a_block_counts(check):
    """Several blocks count and number rows, of which some have parts."""
    lengths = np.random.default_rng(1).choice([0, 1, 3, 17, 100], 9000, p=[0.6, 0.2, 0.1, 0.09, 0.01])
    for mode in ("late", "random"):
        check(*random_csr(lengths, 900, 2), mode=mode, part_edges=16)


def test_the_memory_of_a_plan_has_a_bound_that_is_linear():
    """The largest forms fit it, at sizes where each term dominates; their arrays do not overlap, and are aligned."""
    generator = np.random.default_rng(0)
    schedules = tuple(ScheduleForm(1, 4, 132 * 16, of_transpose) for of_transpose in (False, False, True))
    for _ in range(300):
        edges, rows, columns = (int(10 ** generator.uniform(0, 5)) for _ in range(3))
        form = PlanForm((rows, columns), edges, True, schedules, 16, edge_data=True, column_slots=True)
        memory = torch.zeros(most_words(edges, rows, columns), dtype=torch.int32)
        plan = GPUPlan(form, CPU, memory=memory)
        csr = plan.csr
        arrays = [*plan.kv_tiles, *plan.work_items, *plan.row_items, *plan.row_parts, *plan.tile_offset, *csr.offsets]
        arrays += [csr.indices, csr.edges, csr.column_indices, csr.column_edges, csr.numbers]
        arrays += [each for side in plan.slots for each in side]
        assert not any(each.data_ptr() % 16 for each in (*plan.kv_tiles, *plan.work_items, *plan.row_items))
        for each in arrays:
            each.view(torch.uint8).add_(1)
        assert memory.view(torch.uint8).max() == 1
        assert {each.untyped_storage().data_ptr() for each in arrays} == {memory.data_ptr()}


def test_at_most_two_splits_for_each_share_of_a_block():
    """132 blocks of four warps at once: up to 4/3 of them, of windows with more than 32 tiles, and two more."""
    assert most_splits_of(200_000, 1600, ScheduleForm(1, 4, 4 * 132)) == 132 * 4 * 33 // (3 * 32) + 2


@pytest.mark.parametrize("graph", [LISTS["copies"](), PATTERNS["symmetric"]()], ids=["edge list", "csr"])
@pytest.mark.parametrize("key", ["forward", "narrow_backward", "edge_data_backward"])
def test_the_kernels_of_a_plan_are_named_before_they_are_launched(planned, monkeypatch, graph, key):
    named, fill = set(), GPUPlan.fill

    def named_first(plan, source, *row_ids):
        named.update(each.name for each in plan_instances(*plan.kernels(source)))
        fill(plan, source, *row_ids)

    monkeypatch.setattr(GPUPlan, "fill", named_first)
    _, launched = planned(graph, INPUTS[key], key)
    assert named == set(launched)


@pytest.mark.parametrize("key", ["narrow_backward", "edge_data_backward", "backward"])
def test_a_plan_of_reordered_rows(planned, key):
    graph = PATTERNS["symmetric"]()
    perm = torch.randperm(graph.shape[0], generator=torch.Generator().manual_seed(1)).int()
    planned(permute_rows(csr_pattern(graph), perm), INPUTS[key], key, perm)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_plan_of_every_second_column_of_a_tensor(planned, dtype):
    wide = torch.full((2, 800), -7, dtype=dtype)
    wide[:, ::2] = edge_list(70, 90, 400, dtype=dtype).edge_index
    made, _ = planned(EdgeList(wide[:, ::2], (70, 90)), INPUTS["edge_data_backward"], str(dtype))
    assert made.size.num_edges == 400


def test_counting_kv_tiles_fills_nothing_that_the_plan_fills_again(planned):
    _, launched = planned(edge_list(64, 64, 2000), INPUTS["narrow_backward"], "dense")
    again = {name for name in launched if launched.count(name) > 1}
    assert again == {"plan_tiles<false>"}


@pytest.mark.parametrize("mode", ["early", "random"])
def test_the_order_of_threads_does_not_matter(planned, mode):
    for name in ("hubs with copies", "copies"):
        for key in ("backward", "edge_data_backward"):
            planned(LISTS[name](), INPUTS[key], f"{name}, {key}, {mode}", mode=mode)


@pytest.mark.parametrize(
    ("ids", "dtype"),
    [
        *(((-1, 3), torch.int32), ((3, -1), torch.int64), ((90, 0), torch.int64), ((0, 70), torch.int32)),
        *(((2**31 - 1, 0), torch.int32), ((-(2**31), 5), torch.int64)),
    ],
)
def test_an_edge_with_an_id_out_of_range(monkeypatch, ids, dtype):
    """It is named, and a plan that is not checked leaves it out."""
    graph = edge_list(70, 90, 400, dtype=dtype)
    graph.edge_index[:, 17] = torch.tensor(ids, dtype=dtype)
    kept = EdgeList(graph.edge_index[:, torch.arange(400) != 17], graph.shape)
    for key in ("backward", "edge_data_backward"):
        with cuda_on_cpu(), gpu_on_cpu(monkeypatch, "random"):
            forward = forward_of(INPUTS[key])
            with pytest.raises(ValueError, match=r"edge_index: row \d \((sources|targets)\)|edge_index: row"):
                plan_graph(graph, CPU, INPUTS[key], forward)
            memory, arrays = queue_plan(graph, CPU, INPUTS[key], forward)
            expected = plan_graph(kept, CPU, INPUTS[key], forward).arrays
        numbers = memory.numbers.tolist()
        assert 400 - numbers[PlanNumber.BAD_EDGE] == 17
        numbers[PlanNumber.BAD_EDGE] = 0
        exact = memory.exact(arrays, numbers)
        assert torch.equal(exact.kv_tiles, expected.kv_tiles)
        assert memory.csr.indices[-1] == 0


@pytest.mark.parametrize(
    ("what", "place", "value"),
    [
        *(("indptr", 0, 1), ("indptr", 5, 10**6), ("indptr", 8, -(2**33)), ("indptr", 16, 2**40), ("indptr", 30, 3)),
        *(("indptr", -1, 799), ("indptr", -1, 10**4), ("indices", 3, 2**30), ("indices", 0, -1), ("indices", 7, 300)),
        ("indices", -1, -7),
    ],
)
def test_a_damaged_csr(monkeypatch, what, place, value):
    """Nothing is read or written out of bounds, the error names what is wrong, and the plan has no edges."""
    pattern = csr_pattern(PATTERNS["symmetric"]())
    arrays = {"indptr": torch.from_numpy(pattern.indptr).long(), "indices": torch.from_numpy(pattern.indices).long()}
    arrays[what][place] = value
    damaged = CSRPattern(*arrays.values(), pattern.shape)
    monkeypatch.setattr(gpu_csr, "COUNTED_EDGES", 1)  # the host reads the offsets of plans without a backward pass
    for key in ("forward", "backward", "edge_data_backward"):
        with cuda_on_cpu(), gpu_on_cpu(monkeypatch, "random"):
            forward = forward_of(INPUTS[key])
            with pytest.raises(ValueError, match=what):
                plan_graph(damaged, CPU, INPUTS[key], forward)
            memory, _ = queue_plan(damaged, CPU, INPUTS[key], forward)
        for offsets in memory.csr.offsets:
            assert (offsets == 0).all()
        for items in memory.row_items:
            assert sorted(items[:, 0].tolist())[-300:] == list(range(300))
        for work_items in memory.work_items:
            assert (work_items[..., 25] == 0).all()  # COUNT


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
        forward = forward_of(INPUTS["backward"])
        with pytest.raises(ValueError, match=f"graph: got {what}"):
            plan_graph(graph, CPU, INPUTS["backward"], forward)
    assert not gpu.launched


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
@pytest.mark.parametrize("heads", [1, 8])
def test_a_graph_without_rows_or_columns(monkeypatch, shape, heads):
    """Planned as one row or column without an edge; calls write zeros to the rows that there are, and nothing else."""
    inputs, backend = InputSpec(HALF, 8, heads, backward=True), REGISTRY["fused3s"]
    listed = EdgeList(torch.empty((2, 0), dtype=torch.int64), shape)
    for graph in (listed, csr_pattern(scipy.sparse.csr_array(shape))):
        with cuda_on_cpu():
            forward = forward_of(inputs)
            with gpu_on_cpu(monkeypatch):
                data = plan_graph(graph, CPU, inputs, forward)
            assert data.arrays.size == GraphSize(*shape, 0)
            query, key, value = (torch.randn(size, heads, 8).to(HALF) for size in (shape[0], shape[1], shape[1]))
            with poisoned_buffers(monkeypatch):
                lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
                call = Call(query, key, value, 1.0, HALF, lse)
                output = backend.attend(data, call)
                given = BackwardCall(call, output, torch.ones_like(output), QKV)
                found = backend.attend_backward(data, given)
        for got, like in zip((output, *found[:3]), (query, query, key, value), strict=True):
            assert got.shape == like.shape
            assert (got == 0).all()
        assert (lse == -torch.inf).all()


def test_a_sampled_block_is_planned_without_a_count_and_a_dense_graph_with_one():
    block, dense = GraphSize(28_160, 44_581, 144_630), GraphSize(1000, 1000, 50_000)
    for backward in (False, True):
        assert goes_edge_by_edge(SM90, block, 8, 16, backward=backward) is True
        assert goes_edge_by_edge(SM90, dense, 8, 16, backward=backward) is None
        counted = dense._replace(num_tiles=3200), dense._replace(num_tiles=500)  # 16 and 100 edges a KV tile
        assert [goes_edge_by_edge(SM90, size, 8, 16, backward=backward) for size in counted] == [True, False]
    assert goes_edge_by_edge(SM90, block, 1, 128) is False
