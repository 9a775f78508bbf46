"""cuda/plan_tiles.cu and cuda/plan_schedule.cu on the CPU (tests/cuda_shim): the bits of the plans that torch makes."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from gpu_plan_on_cpu import gpu_on_cpu

from kernels.formats import gpu_schedule, schedule
from kernels.formats.bsb import BSB
from kernels.formats.edges import is_distinct
from kernels.formats.gpu_plan import PlanSizes, make_gpu_plan, queue_plan
from kernels.formats.gpu_schedule import BlockShape, PlanScheduleSpec, ScheduleInputs, grid_of, make_gpu_schedules
from kernels.formats.schedule import Schedule, SplitHeuristic, make_kv_tiles, make_schedule
from tests.cuda_shim.cuda_on_cpu import COMPILER, MODES
from tests.cuda_shim.oracle import GRAPHS

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler found (g++ or clang++)"),
    pytest.mark.usefixtures("one_thread"),
]

# Heads in groups, blocks of small and of other graphs: few and many warps at once.
INPUTS = {
    "gpu": ScheduleInputs(1, 12 * 132, BlockShape(4, 132 * 16), BlockShape(2, 132 * 8)),
    "half_full": ScheduleInputs(1, 24, BlockShape(4, 40), BlockShape(4, 40)),
    "small_gpu": ScheduleInputs(3, 24, BlockShape(4, 8), BlockShape(2, 4)),
    "one_warp": ScheduleInputs(2, 0, BlockShape(4, 1), BlockShape(1, 1)),
}


def csr(graph):
    return torch.from_numpy(graph.indptr).long(), torch.from_numpy(graph.indices.copy()).int()


def heuristic_of(tiles, inputs):
    small = inputs.num_groups * int(tiles.sum()) < inputs.small_tiles
    shape = inputs.small if small else inputs.large
    return shape.warps, SplitHeuristic.of(tiles, shape.warps, shape.resident_warps, inputs.num_groups)


def assert_schedule(made, kv_tiles, tile_offset, inputs, label):
    warps, heuristic = heuristic_of(tile_offset.diff(), inputs)
    expected = make_schedule(kv_tiles, tile_offset, warps, heuristic)
    assert made.heuristic == expected.heuristic, label
    assert (made.num_splits, made.windows) == (expected.num_splits, expected.windows), label
    assert made.work_items.shape == expected.work_items.shape, label
    assert torch.equal(made.work_items, expected.work_items), label
    assert made.work_items.is_contiguous(), label


def assert_plan(plan, indptr, indices, shape, inputs, label):
    bsb = BSB.from_csr(indptr, indices, shape[1], (16, 16))
    kv_tiles = make_kv_tiles(bsb.col_sparse_to_dense, bsb.bitmap)
    assert torch.equal(plan.tile_offset, bsb.tcb_row_offset), label
    assert torch.equal(plan.kv_tiles, kv_tiles), label
    assert plan.nnz == bsb.nnz, label
    assert plan.sizes.num_tiles == bsb.num_tcbs, label
    assert plan.sizes.is_distinct == (is_distinct(indptr, indices, shape) or not len(indices)), label
    for made, each in zip(plan.schedules, inputs, strict=True):
        assert_schedule(made, kv_tiles, bsb.tcb_row_offset, each, f"{label}, {each}")


@dataclass
class Made:
    """A plan as the host has it at the end."""

    kv_tiles: torch.Tensor
    tile_offset: torch.Tensor
    schedules: list[Schedule]
    sizes: PlanSizes
    nnz: int

    @property
    def schedule(self):
        return self.schedules[0]


def check(monkeypatch, indptr, indices, shape, *inputs, mode="late", label=""):
    with gpu_on_cpu(monkeypatch, mode) as gpu:
        queued = queue_plan(indptr, indices, shape, inputs)
        sizes = queued.sizes()
        kv_tiles = queued.write_tiles(sizes)
        schedules = [queued.schedule(which, sizes, kv_tiles) for which in range(len(inputs))]
        plan = Made(kv_tiles, queued.tile_offset, schedules, sizes, queued.num_distinct(sizes))
    assert_plan(plan, indptr, indices, shape, inputs, label)
    return plan, gpu


@pytest.mark.parametrize("name", GRAPHS)
def test_every_case(monkeypatch, name):
    graph = GRAPHS[name]()
    gpu, *several = INPUTS.values()
    check(monkeypatch, *csr(graph), graph.shape, gpu, label=name)
    check(monkeypatch, *csr(graph), graph.shape, *several, mode="random", label=name)


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
    "most_columns": ([40] * 16 + [1] * 5, 1 << 28),
    "bitmap_ends_in_a_word": ([60] * 16, 4 * 128 + 33),
    "a_block_for_each": ([40] * 16 * 3 + [300] * 5, 500),
    "blocks_of_many_windows": ([2000] * 2 + [0] * 16 * 9 + [3] * 20 + [900] * 16, 3000),
}


@pytest.mark.parametrize("kind", ["distinct", "repeated"])
@pytest.mark.parametrize("name", WINDOWS)
def test_each_way_of_a_window(monkeypatch, name, kind):
    lengths, num_cols = WINDOWS[name]
    if num_cols == 1 << 28 and kind == "distinct":
        indptr, indices, shape = random_csr(lengths, num_cols, 1, "repeated")
        indices[-1] = num_cols - 1
        indices[:16] = num_cols - 1
    else:
        indptr, indices, shape = random_csr(lengths, num_cols, 1, kind)
    for dtype, mode in ((torch.int32, "late"), (torch.int64, "random")):
        plan, _ = check(
            monkeypatch, indptr, indices.to(dtype), shape, INPUTS["gpu"], mode=mode, label=f"{name}, {dtype}"
        )
    assert name == "most_columns" or (plan.nnz < len(indices)) == (kind == "repeated")


@pytest.mark.parametrize("name", WINDOWS)
def test_one_repeated_edge_among_ascending_ones(monkeypatch, name):
    lengths, num_cols = WINDOWS[name]
    indptr, indices, shape = random_csr(lengths, min(num_cols, 1 << 20), 1)
    longest = int(indptr[int(np.argmax(lengths))])
    indices[longest + 7] = indices[longest + 6]
    plan, _ = check(monkeypatch, indptr, indices.int(), shape, INPUTS["gpu"])
    assert plan.nnz == len(indices) - 1
    assert not plan.sizes.is_distinct


def test_int32_offsets(monkeypatch):
    indptr, indices, shape = random_csr([3, 0, 4] * 9, 50, 2)
    check(monkeypatch, indptr.int(), indices, shape, INPUTS["gpu"])


def test_the_order_of_threads_does_not_matter(monkeypatch):
    indptr, indices, shape = random_csr([70] * 40 + [1, 0] * 60, 600, 3, "repeated")
    for inputs in (INPUTS["half_full"], INPUTS["one_warp"]):
        plans = [check(monkeypatch, indptr, indices, shape, inputs, mode=mode)[0] for mode in MODES]
        for plan in plans[1:]:
            assert torch.equal(plan.kv_tiles, plans[0].kv_tiles)
            assert torch.equal(plan.schedule.work_items, plans[0].schedule.work_items)


def test_random_sizes_of_windows(monkeypatch):
    generator = np.random.default_rng(5)
    for seed in range(16):
        num_windows = int(generator.integers(1, 90))
        scale = float(generator.choice([1, 5, 30]))
        lengths = np.minimum(generator.exponential(scale, 16 * num_windows - seed % 16), 700).astype(int)
        indptr, indices, shape = random_csr(lengths, 700, seed)
        shapes = [
            BlockShape(int(generator.choice([1, 2, 3, 4])), int(generator.choice([4, 40, 400]))) for _ in range(2)
        ]
        inputs = ScheduleInputs(int(generator.choice([1, 2, 8])), int(generator.choice([0, 300, 10000])), *shapes)
        check(monkeypatch, indptr, indices, shape, inputs, label=f"seed {seed}, {inputs}")


def test_more_blocks_and_windows_than_a_sort_takes(monkeypatch):
    """Sorted chunk by chunk: shared blocks by powers of two, and windows of one warp that are dealt."""
    monkeypatch.setattr(gpu_schedule, "PLAN_SCHEDULE", PlanScheduleSpec(sort_keys=64))
    for many in (8, 64):
        monkeypatch.setattr(schedule, "MANY_BLOCKS", many)
        monkeypatch.setattr(gpu_schedule, "MANY_BLOCKS", many)
        lengths = np.random.default_rng(many).choice([0, 2, 20, 120], 16 * 150 - 3)
        indptr, indices, shape = random_csr(lengths, 2000, many)
        plan, _ = check(monkeypatch, indptr, indices, shape, INPUTS["one_warp"])
        assert plan.schedule.num_blocks > many
    lengths = np.random.default_rng(3).choice([0, 2, 5], 16 * 100)
    plan, _ = check(monkeypatch, *random_csr(lengths, 900, 4), INPUTS["gpu"])
    assert plan.schedule.heuristic.sort_segment is None
    assert plan.schedule.windows[0] > 64


@pytest.mark.parametrize("many", [1, 4096])
def test_blocks_of_just_warp_tiles_a_warp_do_not_lead(monkeypatch, many):
    monkeypatch.setattr(schedule, "MANY_BLOCKS", many)
    monkeypatch.setattr(gpu_schedule, "MANY_BLOCKS", many)
    lengths = [0] * 16 * 5
    lengths[::16] = [16 * 12, 16 * 13, 16 * 12 + 1, 5, 16 * 4]  # warp_tiles is 3, with 4 warps a block
    plan, _ = check(monkeypatch, *random_csr(lengths, 900, 1), INPUTS["gpu"])
    assert plan.schedule.windows == (1, 4, 0)
    assert plan.schedule.work_items[:, 0, schedule.WINDOW].tolist() == [1, 2, 3, 0, 4]


def test_many_windows(monkeypatch):
    lengths = np.random.default_rng(6).choice([0, 0, 0, 1], 16 * 4200 - 5)
    plan, _ = check(monkeypatch, *random_csr(lengths, 900, 7, "repeated"), INPUTS["half_full"])
    assert plan.schedule.windows[0] > 4096


def test_arrays_are_as_large_as_they_must_be(monkeypatch):
    indptr, indices, shape = random_csr([40] * 100, 300, 8)
    plan, gpu = check(monkeypatch, indptr, indices, shape, INPUTS["half_full"])
    for tensor in (plan.kv_tiles, plan.schedule.work_items):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert len(gpu.launched) == 4
    with gpu_on_cpu(monkeypatch) as gpu:
        others = [INPUTS["one_warp"], INPUTS["small_gpu"]]
        made = make_gpu_schedules(plan.kv_tiles, plan.tile_offset, *others)
    assert len(gpu.launched) == 3
    for each, inputs in zip(made, others, strict=True):
        assert_schedule(each, plan.kv_tiles, plan.tile_offset, inputs, "another schedule")


@pytest.mark.parametrize(
    ("what", "place", "value"),
    [
        ("indptr", 0, 1),
        ("indptr", -1, 799),
        ("indptr", -1, 801),
        ("indptr", 7, 2**40),
        ("indptr", 21, -5),
        ("indptr", 30, 3),
        ("indices", 0, -1),
        ("indices", 799, 90),
        ("indices", 15, -(2**31)),
        ("indices", 33, 2**31 - 1),
    ],
)
def test_damaged_csr(monkeypatch, what, place, value):
    indptr, indices, shape = random_csr([0] * 5 + [20] * 39 + [20], 90, 9)
    arrays = {"indptr": indptr, "indices": indices.int()}
    arrays[what][place] = value
    with gpu_on_cpu(monkeypatch):
        assert make_gpu_plan(*arrays.values(), shape, INPUTS["gpu"]) is None
    with pytest.raises(ValueError, match=what):
        BSB.from_csr(*arrays.values(), shape[1], (16, 16))


def test_offsets_that_do_not_start_at_0(monkeypatch):
    indptr, indices, shape = random_csr([20] * 40, 90, 9)
    indptr[0] = 3
    with gpu_on_cpu(monkeypatch):
        assert make_gpu_plan(indptr, indices, shape, INPUTS["gpu"]) is None


def test_grids():
    assert [grid_of(count, 8)[0] for count in (1, 8, 9, 8 * 31, 8 * 33, 8 * 1000)] == [1, 1, 2, 31, 34, 1024]


def test_damage_in_large_windows(monkeypatch):
    for lengths, num_cols in WINDOWS.values():
        if max(lengths) >= 60:
            indptr, indices, shape = random_csr(lengths, num_cols, 1)
            for value in (-1, num_cols, 2**40):
                broken = indices.clone()
                broken[5] = value
                with gpu_on_cpu(monkeypatch):
                    assert make_gpu_plan(indptr, broken, shape, INPUTS["gpu"]) is None


def test_what_the_kernels_do_not_take(monkeypatch):
    indptr, indices, shape = random_csr([2] * 20, 30, 1)
    none = torch.zeros(0, dtype=torch.int32)
    with gpu_on_cpu(monkeypatch) as gpu:
        assert make_gpu_plan(torch.zeros(1, dtype=torch.int64), none, (0, 5), INPUTS["gpu"]) is None
        assert make_gpu_plan(torch.zeros(6, dtype=torch.int64), none, (5, 0), INPUTS["gpu"]) is None
        assert make_gpu_plan(indptr, indices, (19, 30), INPUTS["gpu"]) is None
        assert make_gpu_plan(indptr, indices.float(), shape, INPUTS["gpu"]) is None
        assert make_gpu_plan(indptr, indices[None], shape, INPUTS["gpu"]) is None
        assert make_gpu_plan(indptr, indices, (20, (1 << 28) + 1), INPUTS["gpu"]) is None
    assert not gpu.launched


def test_fewer_indices_than_the_offsets_say(monkeypatch):
    indptr, indices, shape = random_csr([2] * 20, 30, 1)
    with gpu_on_cpu(monkeypatch):
        assert make_gpu_plan(indptr, indices[:0], shape, INPUTS["gpu"]) is None
