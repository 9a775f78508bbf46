"""The planning kernels, cuda/plan_*.cu, on the CPU (tests/cuda_shim): the bits of the oracle's plans."""

import numpy as np
import plan_oracle
import pytest
import torch
from gpu_plan_on_cpu import gpu_on_cpu
from plan_oracle import COUNT, WINDOW, make_tile_slots, row_item_arrays, schedule_of_form, tiles_of_csr

from fused3s.fused.choice import GraphSize
from fused3s.fused.planning import gpu_csr, gpu_plan
from fused3s.fused.planning.gpu_csr import EdgeSource, PlanNumber
from fused3s.fused.planning.gpu_plan import GPUPlan, PlanForm, most_words
from fused3s.fused.planning.schedule import SCHEDULE_NUMBERS, ScheduleForm, most_tiles_of
from fused3s.graph.csr import CSRPattern
from fused3s.graph.edges import canonical_csr
from fused3s.runtime.jit import KernelInstance
from tests.cuda_shim.cuda_on_cpu import MODES, ON_SHIM
from tests.cuda_shim.oracle import GRAPHS

pytestmark = ON_SHIM

CPU = torch.device("cpu")
# Heads in groups, few and many warps at once.
INPUTS = {
    "gpu": ScheduleForm(1, 4, 132 * 16),
    "half_full": ScheduleForm(1, 4, 40),
    "small_gpu": ScheduleForm(3, 2, 4),
    "one_warp": ScheduleForm(2, 1, 1),
}


def csr(graph):
    return torch.from_numpy(graph.indptr).long(), torch.from_numpy(graph.indices.copy()).int(), graph.shape


def check(monkeypatch, indptr, indices, shape, *forms, mode="late", label="", part_edges=0):
    """The exact plan with these schedules, row items and slots, compared with the oracle."""
    form = PlanForm(shape, indices.numel(), False, forms, part_edges, edge_data=part_edges > 0)
    with gpu_on_cpu(monkeypatch, mode):
        plan = GPUPlan(form, CPU)
        plan.fill(EdgeSource(indices, indptr.long()))
    numbers = plan.numbers.tolist()
    exact = plan.exact(plan.arrays(GraphSize(*shape, indices.numel()), None), numbers)
    offsets, columns = canonical_csr(CSRPattern(indptr, indices, shape), CPU)
    kv_tiles, tile_offset = tiles_of_csr(offsets, columns, shape[1])
    expected = {"offsets": offsets, "columns": columns, "tile_offset": tile_offset, "kv_tiles": kv_tiles}
    found = {"offsets": plan.csr.offsets[0], "columns": plan.csr.indices}
    found |= {"tile_offset": exact.tile_offset, "kv_tiles": exact.kv_tiles}
    if part_edges:
        expected |= row_item_arrays(offsets, None, part_edges) | make_tile_slots(kv_tiles, tile_offset)
        names = ("row_items", "row_parts", "tile_slots", "slot_edges", "slot_places")
        found |= {name: getattr(exact, name) for name in names}
        behind = plan.row_items[0][len(found["row_items"]) :]
        assert torch.equal(behind, torch.tensor([-1, 0, 0, -1], dtype=torch.int32).expand_as(behind)), label
    for which, (each, side) in enumerate(zip(forms, ("", "row_", "column_"), strict=False)):
        schedule = schedule_of_form(each, kv_tiles, tile_offset)
        expected |= {f"work items {which}": schedule.work_items}
        found |= {f"work items {which}": getattr(exact, f"{side}work_items")}
        by_warp, split, *rule = numbers[PlanNumber.SCHEDULES + SCHEDULE_NUMBERS * which :][3:8]
        windows = (by_warp, len(tile_offset) - 1 - by_warp - split, split, *rule)
        assert windows == schedule.windows_and_rule, label
        assert side or exact.windows == windows, label
        num_splits = getattr(exact, f"{side or 'num_'}splits")
        assert num_splits == schedule.num_splits <= plan.num_splits[which], label
        behind = plan.work_items[which][len(schedule.work_items) :]
        assert (behind[..., WINDOW] == -1).all(), f"{label}: work behind the last block"
        assert (behind[..., COUNT] == 0).all(), f"{label}: work behind the last block"
    for name, wanted in expected.items():
        assert torch.equal(found[name], wanted), f"{label}: {name}"
    assert len(kv_tiles) - 2 <= most_tiles_of(indices.numel(), shape[0]), label
    return exact


@pytest.mark.parametrize("name", GRAPHS)
def test_every_case(monkeypatch, name):
    graph = GRAPHS[name]()
    gpu, *several = INPUTS.values()
    check(monkeypatch, *csr(graph), gpu, label=name, part_edges=16)
    check(monkeypatch, *csr(graph), *several, mode="random", label=name, part_edges=1)


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
def test_each_way_of_a_window(monkeypatch, name):
    """Columns in any order; distinct ones; and one of those twice."""
    lengths, num_cols = WINDOWS[name]
    indptr, indices, shape = random_csr(lengths, num_cols, 1, "repeated")
    check(monkeypatch, indptr, indices, shape, INPUTS["gpu"], mode="random", label=f"{name}, repeated", part_edges=40)
    indptr, indices, shape = random_csr(lengths, num_cols, 1)
    check(monkeypatch, indptr, indices.int(), shape, INPUTS["gpu"], label=f"{name}, distinct", part_edges=40)
    longest = int(indptr[int(np.argmax(lengths))])
    indices[longest + 7] = indices[longest + 6]
    check(monkeypatch, indptr.int(), indices.int(), shape, INPUTS["gpu"], label=f"{name}, a copy", part_edges=40)


# Copies of the edges of a row, in three rows: of a window for a warp, for a block, and of more keys than it can sort.
COPIES = {"warp": [[90, 3, 41, 1], [2, 2, 2], [200]], "block": [[700, 1, 650, 3] * 2, [1] * 40 + [300], [5, 4]]}
COPIES["large"] = [[1500, 1499, 7, 1, 1], [1, 600, 2], [32] * 20]


@pytest.mark.parametrize("name", COPIES)
def test_edges_of_many_copies(monkeypatch, name):
    generator, rows = np.random.default_rng(2), []
    for copies in COPIES[name]:
        columns = np.sort(generator.choice(500, len(copies), replace=False))
        rows.append(generator.permutation(np.repeat(columns, copies)))
    indptr, indices = (torch.from_numpy(each) for each in (np.cumsum([0, *map(len, rows)]), np.concatenate(rows)))
    for mode in MODES if name == "warp" else ["random"]:
        check(monkeypatch, indptr, indices, (3, 500), INPUTS["gpu"], mode=mode, label=name)


@pytest.mark.parametrize("kind", ["repeated", "distinct"])
def test_a_csr_of_many_edges_has_sort_keys_for_its_large_windows_alone(monkeypatch, kind):
    monkeypatch.setattr(gpu_csr, "COUNTED_EDGES", 1)
    lengths = [300] * 32 + [256] * 16 + [5] * 16 * 8 + [2500] + [0] * 14 + [2600] + [257] + [256] * 15 + [2900] * 2
    indptr, indices, shape = random_csr(lengths, 3000, 1, kind)
    large = 2 * 4800 + 5100 + 4097 + 5800
    assert gpu_csr.num_keys(EdgeSource(indices, indptr), len(indices), False) == large
    for mode in ("late", "random"):
        check(monkeypatch, indptr, indices, shape, INPUTS["gpu"], mode=mode, label=kind, part_edges=40)


def test_the_last_of_the_most_columns(monkeypatch):
    num_cols = 1 << 28  # a gigabyte of counts
    indices = torch.tensor([num_cols - 1] * 16 + [5, num_cols - 2, 1 << 27])
    check(monkeypatch, torch.tensor([0, 16, 18, 19]), indices, (3, num_cols), INPUTS["gpu"])


def test_the_order_of_threads_does_not_matter(monkeypatch):
    indptr, indices, shape = random_csr([70] * 40 + [1, 0] * 60, 600, 3, "repeated")
    for inputs in (INPUTS["half_full"], INPUTS["one_warp"]):
        plans = [check(monkeypatch, indptr, indices, shape, inputs, mode=mode) for mode in MODES]
        for plan in plans[1:]:
            assert torch.equal(plan.kv_tiles, plans[0].kv_tiles)
            assert torch.equal(plan.work_items, plans[0].work_items)


def test_random_sizes_of_windows(monkeypatch):
    generator = np.random.default_rng(5)
    for seed in range(10):
        num_windows = int(generator.integers(1, 90))
        scale = float(generator.choice([1, 5, 30]))
        lengths = np.minimum(generator.exponential(scale, 16 * num_windows - seed % 16), 700).astype(int)
        indptr, indices, shape = random_csr(lengths, 700, seed)
        inputs = ScheduleForm(*(int(generator.choice(each)) for each in ([1, 2, 8], [1, 2, 3, 4], [4, 40, 400])))
        check(monkeypatch, indptr, indices, shape, inputs, label=f"seed {seed}, {inputs}")


def test_more_blocks_and_windows_than_a_sort_takes(monkeypatch):
    """Sorted chunk by chunk: shared blocks by powers of two, and windows of one warp that are dealt."""
    monkeypatch.setattr(gpu_plan, "PLAN_SCHEDULE", KernelInstance("plan/plan_schedule.cu", "plan_schedule", (64,)))
    for many in (8, 64):
        monkeypatch.setattr(plan_oracle, "MANY_BLOCKS", many)
        monkeypatch.setattr(gpu_plan, "MANY_BLOCKS", many)
        lengths = np.random.default_rng(many).choice([0, 2, 20, 120], 16 * 150 - 3)
        indptr, indices, shape = random_csr(lengths, 2000, many)
        plan = check(monkeypatch, indptr, indices, shape, INPUTS["one_warp"])
        assert len(plan.work_items) > many
    lengths = np.random.default_rng(3).choice([0, 2, 5], 16 * 100)
    plan = check(monkeypatch, *random_csr(lengths, 900, 4), INPUTS["gpu"])
    assert plan.windows[-1] == 0, "all are sorted"
    assert plan.windows[0] > 64


@pytest.mark.parametrize("many", [1, 4096])
def test_blocks_of_just_warp_tiles_a_warp_do_not_lead(monkeypatch, many):
    monkeypatch.setattr(plan_oracle, "MANY_BLOCKS", many)
    monkeypatch.setattr(gpu_plan, "MANY_BLOCKS", many)
    lengths = [0] * 16 * 5
    lengths[::16] = [16 * 12, 16 * 13, 16 * 12 + 1, 5, 16 * 4]  # warp_tiles is 3, with 4 warps a block
    plan = check(monkeypatch, *random_csr(lengths, 900, 1), INPUTS["gpu"])
    assert plan.windows[:3] == (1, 4, 0)
    assert plan.work_items[:, 0, WINDOW].tolist() == [1, 2, 3, 0, 4]


def test_more_rows_than_a_block_counts(monkeypatch):
    """Several blocks count and number rows, of which some have parts."""
    lengths = np.random.default_rng(1).choice([0, 1, 3, 17, 100], 9000, p=[0.6, 0.2, 0.1, 0.09, 0.01])
    for mode in ("late", "random"):
        check(monkeypatch, *random_csr(lengths, 900, 2), INPUTS["gpu"], mode=mode, part_edges=16)


def test_the_memory_of_a_plan_has_a_bound_that_is_linear():
    """Of the largest forms, at sizes where each term dominates; arrays lie apart, in rows of 16 bytes."""
    generator = np.random.default_rng(0)
    schedules = tuple(ScheduleForm(1, 4, 132 * 16, of_transpose) for of_transpose in (False, False, True))
    for _ in range(300):
        edges, rows, columns = (int(10 ** generator.uniform(0, 5)) for _ in range(3))
        form = PlanForm((rows, columns), edges, True, schedules, 16, edge_data=True, column_slots=True)
        memory = torch.zeros(most_words(edges, rows, columns), dtype=torch.int32)
        plan = GPUPlan(form, CPU, memory=memory)
        csr = plan.csr
        arrays = [*plan.kv_tiles, *plan.work_items, *plan.row_items, *plan.row_parts, *plan.tile_offset, *csr.offsets]
        arrays += [
            csr.indices,
            csr.edges,
            csr.column_indices,
            csr.column_edges,
            csr.numbers,
            *(each for side in plan.slots for each in side),
        ]
        assert not any(each.data_ptr() % 16 for each in (*plan.kv_tiles, *plan.work_items, *plan.row_items))
        for each in arrays:
            each.view(torch.uint8).add_(1)
        assert memory.view(torch.uint8).max() == 1
        assert {each.untyped_storage().data_ptr() for each in arrays} == {memory.data_ptr()}
