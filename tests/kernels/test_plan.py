"""Plans as data: frozen, shared between inputs, moved, saved, loaded and printed; errors where that cannot be done."""

import importlib.util
import re
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace

import pytest
import torch
from attention_cases import EDGE_CASES
from instances import plan_for

from baselines import REGISTRY, flashsparse, fused3s_paper
from kernels import AttentionPlan, BackendUnavailableError, plan_attention
from kernels.backends import fused3s
from kernels.backends.base import InputSpec
from kernels.backends.cuda import CudaBackend
from kernels.formats.schedule import SplitHeuristic, make_schedule
from kernels.operators import Operands
from kernels.plan import FILE_VERSION
from kernels.runtime import jit
from kernels.runtime.device import GPULimits
from kernels.tensor_record import map_tensors, num_bytes, tensors_of

GPU = torch.device("cuda", 0)
HALF, FLOAT = torch.float16, torch.float32
WITH_DATA = [name for name, backend in REGISTRY.items() if backend.data_type is not None]
WITHOUT_DATA = ["dgl", "flex_attention"]
CUDA_BACKENDS = [name for name in WITH_DATA if isinstance(REGISTRY[name], CudaBackend)]


@pytest.fixture
def plannable(monkeypatch):
    """Every installed backend builds its data on the CPU; those with CUDA kernels, for an H200, do not run there."""
    for name in [*CUDA_BACKENDS, "flex_attention", "anemoi"]:
        monkeypatch.setattr(REGISTRY[name], "unavailable", lambda device: None)
    limits = GPULimits(num_sms=132, sm_shared_bytes=228 * 1024, block_shared_bytes=227 * 1024)
    plan_for(monkeypatch, limits)


def make_plan(backend: str, name: str = "n_one_past_16", **options) -> AttentionPlan:
    if backend == "pyg" and importlib.util.find_spec("torch_geometric") is None:
        pytest.skip("torch_geometric is not installed")
    if backend not in CUDA_BACKENDS:
        options = {"dtype": FLOAT, "head_dim": 16, "num_heads": 2} | options
    return plan_attention(EDGE_CASES[name](), backend=backend, device="cpu", **options)


def inputs(plan: AttentionPlan, dim: int = 16, dtype: torch.dtype = FLOAT) -> list[torch.Tensor]:
    rows, cols = plan.shape
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, 2, dim, generator=generator).to(dtype) for n in (rows, cols, cols)]
    return [tensor.to(plan.device) for tensor in tensors]


def assert_same_record(left, right) -> None:
    """Equal types, numbers and bits, all the way down."""
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.device) == (right.dtype, right.device)
        assert torch.equal(left, right)
    elif is_dataclass(left):
        for field in fields(left):
            assert_same_record(getattr(left, field.name), getattr(right, field.name))
    else:
        assert left == right


def assert_same_plan(left: AttentionPlan, right: AttentionPlan) -> None:
    names = ("backend", "shape", "device", "inputs")
    assert [getattr(left, name) for name in names] == [getattr(right, name) for name in names]
    assert_same_record(left.data, right.data)
    assert_same_record(left.order, right.order)


def test_only_the_named_backends_have_no_data():
    assert [name for name in REGISTRY if name not in WITH_DATA] == WITHOUT_DATA


@pytest.mark.parametrize("backend", WITH_DATA)
def test_plans_are_frozen_records_of_their_backends_type(plannable, backend):
    plan = make_plan(backend)
    assert type(plan.data) is REGISTRY[backend].data_type
    assert list(tensors_of(plan.data))
    for record in (plan, plan.inputs, *records_of(plan.data)):
        with pytest.raises(FrozenInstanceError):
            setattr(record, fields(record)[0].name, None)


def records_of(record):
    yield record
    for field in fields(record):
        if is_dataclass(getattr(record, field.name)):
            yield from records_of(getattr(record, field.name))


@pytest.mark.parametrize("backend", WITH_DATA)
def test_a_saved_plan_comes_back(plannable, backend, tmp_path):
    plan = make_plan(backend, "hub" if backend != "sdpa_padded" else "n_one_past_16")
    plan.save(tmp_path / "plan.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.pt"]
    loaded = AttentionPlan.load(tmp_path / "plan.pt", "cpu")
    assert_same_plan(plan, loaded)
    assert repr(plan) == repr(loaded)
    if backend not in (*CUDA_BACKENDS, "anemoi"):
        assert torch.equal(plan(*inputs(plan)), loaded(*inputs(plan)))


@pytest.mark.parametrize("reorder", ["none", "rcm"])
def test_a_saved_plan_keeps_its_order_and_inputs(plannable, reorder, tmp_path):
    plan = make_plan("fused3s", "hub", num_heads=4, out_dtype=FLOAT, reorder=reorder)
    plan.save(tmp_path / "plan.pt")
    loaded = AttentionPlan.load(tmp_path / "plan.pt", "cpu")
    assert_same_plan(plan, loaded)
    assert loaded.inputs == InputSpec(None, None, 4, FLOAT)
    assert (loaded.order is None) == (reorder == "none")
    assert (loaded.data.row_ids is None) == (reorder == "none")


@pytest.mark.parametrize("backend", [name for name, backend in REGISTRY.items() if not backend.traceable])
def test_the_operands_of_a_plan_give_its_record(plannable, backend):
    options = {"edge_data": REGISTRY[backend].takes_edges, "backward": REGISTRY[backend].trains}
    plan = make_plan(backend, "hub", **options)
    operands = plan._operands
    joined, record = Operands.join(operands.tensors, operands.numbers, operands.layout)
    assert joined is REGISTRY[backend]
    if REGISTRY[backend].data_type is None:
        assert record is plan.data
        del plan, record
        with pytest.raises(RuntimeError, match=f"a plan of backend {backend} that is gone"):
            Operands.join(operands.tensors, operands.numbers, operands.layout)
        return
    assert_same_record(record, plan.data)
    assert [id(tensor) for tensor in operands.tensors] == [id(tensor) for tensor in tensors_of(plan.data)]


@pytest.mark.parametrize("backend", WITH_DATA)
def test_a_moved_plan_has_all_its_tensors_there(plannable, backend):
    plan = make_plan(backend)
    assert plan.to("cpu") is plan
    moved = plan.to("meta")
    assert moved.device == torch.device("meta")
    assert (moved.backend, moved.shape, moved.inputs) == (plan.backend, plan.shape, plan.inputs)
    assert {tensor.device.type for tensor in tensors_of(moved.data)} == {"meta"}
    assert {tensor.device.type for tensor in tensors_of(plan.data)} == {"cpu"}
    assert moved.nbytes == plan.nbytes


def test_bytes_are_those_of_all_tensors(plannable):
    plan = make_plan("fused3s", "hub", reorder="rcm")
    data = plan.data
    tensors = (data.kv_tiles, data.tile_offset, data.row_ids, data.schedule.work_items)
    assert plan.nbytes == sum(4 * tensor.numel() for tensor in tensors)
    assert plan.nbytes == num_bytes(map_tensors(plan.data, torch.clone))


def test_other_inputs_have_another_schedule(plannable):
    plan = make_plan("fused3s", "hub", reorder="rcm")
    other = plan.for_inputs(head_dim=64, num_heads=4096)
    assert other.inputs == InputSpec(None, 64, 4096)
    assert plan.inputs == InputSpec()
    for name in ("kv_tiles", "tile_offset", "row_ids"):
        assert torch.equal(getattr(other.data, name), getattr(plan.data, name))
    assert other.order is plan.order
    assert (plan.data.schedule.warps, other.data.schedule.warps) == (2, 4)
    assert other.data.schedule.heuristic != plan.data.schedule.heuristic
    assert_same_plan(other.for_inputs(), plan)


def test_heads_that_go_edge_by_edge_have_its_items_and_others_have_none(plannable):
    """From wide heads to narrow ones and back: the arrays of either are those of a plan made for it at once."""
    wide = make_plan("fused3s", "empty_rows_and_windows", reorder="rcm", head_dim=128)
    narrow = make_plan("fused3s", "empty_rows_and_windows", reorder="rcm", head_dim=8, num_heads=8)
    assert wide.data.by_edge is None
    assert "edge by edge" not in repr(wide)
    num_rows = wide.shape[0]
    assert f"  edge by edge: {num_rows} items" in repr(narrow)
    assert sorted(narrow.data.by_edge.work.items[:, 0].tolist()) == list(range(num_rows))
    assert_same_record(wide.for_inputs(head_dim=8, num_heads=8).data, narrow.data)
    assert_same_record(narrow.for_inputs(head_dim=128).data, wide.data)


@pytest.mark.parametrize("reorder", ["none", "rcm"])
def test_plans_with_edge_data_are_moved_saved_and_loaded_whole(plannable, reorder, tmp_path):
    plan = make_plan("fused3s", "empty_rows_and_windows", edge_data=True, reorder=reorder)
    data = plan.data
    tensors = [data.kv_tiles, data.tile_offset, data.schedule.work_items, data.by_edge.indices]
    tensors += [data.by_edge.work.items, data.by_edge.work.parts, plan.edge_order.edge_of_csr]
    tensors += [data.offsets]
    tensors += [data.slots.tile_slots, data.slots.slot_edges, data.slots.slot_places]
    tensors += [] if data.row_ids is None else [data.row_ids]
    assert plan.nbytes == sum(tensor.nbytes for tensor in tensors)
    assert plan.to("meta").nbytes == plan.nbytes
    plan.save(tmp_path / "plan.pt")
    loaded = AttentionPlan.load(tmp_path / "plan.pt", "cpu")
    assert_same_plan(plan, loaded)
    assert_same_record(plan.edge_order, loaded.edge_order)
    assert loaded.data.num_rows == 90
    other = loaded.for_inputs(head_dim=8, num_heads=8)
    assert other.data.slots is None, "narrow heads go edge by edge here, with all edge data"
    assert other.edge_order is loaded.edge_order
    assert_same_plan(other.for_inputs(), plan)


def test_other_inputs_of_sdpa_padded_share_the_edges():
    plan = make_plan("sdpa_padded")
    other = plan.for_inputs(dtype=HALF, head_dim=16)
    assert other.data.row is plan.data.row
    assert (plan.data.mask.dtype, other.data.mask.dtype) == (FLOAT, HALF)
    assert plan.for_inputs().data.mask is None
    tensors = inputs(plan, dtype=HALF)
    assert torch.equal(other(*tensors), plan(*tensors)), "a mask made for the call differs from the planned one"


@pytest.mark.parametrize("existing", [False, True])
def test_a_half_written_file_never_appears(existing, tmp_path, monkeypatch):
    plan, path = make_plan("reference"), tmp_path / "plan.pt"
    if existing:
        plan.save(path)
    before = path.read_bytes() if existing else None

    def interrupted(content, file):
        file.write_bytes(b"half")
        assert (path.read_bytes() if path.exists() else None) == before
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plan.save(path)
    assert [file.name for file in tmp_path.iterdir()] == (["plan.pt"] if existing else [])
    assert (path.read_bytes() if existing else None) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content | {"version": FILE_VERSION + 1},
        lambda content: content | {"backend": "fused4s"},
        lambda content: {"weight": torch.zeros(3)},
        lambda content: [1, 2],
    ],
    ids=["version", "backend", "state_dict", "list"],
)
def test_a_file_of_another_version_or_content_is_refused(change, tmp_path):
    path = tmp_path / "plan.pt"
    make_plan("reference").save(path)
    torch.save(change(torch.load(path)), path)
    with pytest.raises(
        ValueError, match=rf"{re.escape(str(path))}: no plan of version {FILE_VERSION}; build the plan anew"
    ):
        AttentionPlan.load(path, "cpu")


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_a_damaged_file_is_refused(keep, tmp_path):
    path = tmp_path / "plan.pt"
    make_plan("reference").save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"plan\.pt: not a file of torch.save, or truncated"):
        AttentionPlan.load(path, "cpu")
    with pytest.raises(FileNotFoundError):
        AttentionPlan.load(tmp_path / "none.pt", "cpu")


class RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_file_that_would_run_code_is_refused(tmp_path):
    torch.save({"version": FILE_VERSION, "backend": RunsCode(tmp_path / "trace")}, tmp_path / "plan.pt")
    with pytest.raises(ValueError, match=r"plan\.pt: holds objects other than tensors"):
        AttentionPlan.load(tmp_path / "plan.pt", "cpu")
    assert not (tmp_path / "trace").exists()


def test_a_plan_is_not_loaded_where_its_backend_cannot_run(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(REGISTRY["fused3s_paper"], "unavailable", lambda device: None)
        make_plan("fused3s_paper").save(tmp_path / "plan.pt")
    with pytest.raises(BackendUnavailableError, match="backend fused3s_paper cannot run: "):
        AttentionPlan.load(tmp_path / "plan.pt", "cpu")


@pytest.mark.parametrize("backend", WITHOUT_DATA)
def test_formats_of_other_libraries_stay_where_they_are(plannable, backend, tmp_path):
    plan = make_plan(backend)
    assert plan.to("cpu") is plan
    with pytest.raises(TypeError, match=f"a plan of backend {backend} cannot be moved: .* build it anew"):
        plan.to("meta")
    with pytest.raises(TypeError, match=f"a plan of backend {backend} cannot be saved: "):
        plan.save(tmp_path / "plan.pt")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TypeError, match="cannot be measured"):
        _ = plan.nbytes
    assert "format of another library" in repr(plan)


def test_printed_plan_names_windows_tiles_ways_and_bytes(plannable):
    plan = make_plan("fused3s", "hub", reorder="rcm", num_heads=2, head_dim=64, out_dtype=FLOAT)
    schedule = plan.data.schedule
    by_warp, by_block, split = schedule.windows
    assert repr(plan) == (
        "AttentionPlan('fused3s', 2000 x 2000, cpu, any type, 2 x 64 -> float32)\n"
        f"  {plan.nbytes / 2**20:.1f} MiB; rows in order 'rcm'\n"
        f"  125 row windows, {plan.data.kv_tiles.shape[0] - 2} KV tiles of 16 keys\n"
        f"  windows by one warp {by_warp}, by one block {by_block}, by several blocks {split} "
        f"({schedule.num_splits} splits)\n"
        f"  {schedule.num_blocks} blocks of 4 warps a head; {schedule.heuristic}"
    )
    assert by_warp + by_block + split == 125
    assert split > 0
    assert repr(make_plan("reference")).startswith("AttentionPlan('reference', 65 x 65, cpu, float32, 2 x 16)\n")


def test_torch_compile_takes_a_launch_without_a_graph_break(plannable, monkeypatch):
    def launch(spec, data, query, key, value, scale, lse, edges):
        assert not torch.compiler.is_compiling()
        assert_same_record(data, plan.data)
        return value + scale

    monkeypatch.setattr(fused3s, "launch", launch)
    plan = make_plan("fused3s", reorder="rcm")
    q, k, v = inputs(plan, dtype=HALF)

    def doubled(q, k, v):
        return 2 * plan(q, k, 3 * v, scale=0.5)

    assert torch.equal(torch.compile(doubled, backend="eager", fullgraph=True)(q, k, v), 2 * (3 * v + 0.5))
    torch.compiler.reset()


def test_torch_compile_traces_backends_made_of_torch_calls():
    plan = make_plan("reference")
    tensors = inputs(plan)
    compiled = torch.compile(lambda *tensors: plan(*tensors), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), plan(*tensors))
    torch.compiler.reset()


@pytest.mark.parametrize("backend", ["fused3s", "fused3s_paper", "flashsparse_stable"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float64])
def test_an_output_type_without_an_instance_is_named_before_anything_is_compiled(
    plannable, monkeypatch, backend, out_dtype
):
    for module in (fused3s, fused3s_paper, flashsparse):
        monkeypatch.setattr(module, "get_kernel", lambda spec, device_index: pytest.fail(f"compiled {spec}"))
    with pytest.raises(ValueError, match=r"out_dtype: got torch\.\w+; torch\.float32 and torch\.float16 are allowed"):
        make_plan(backend, dtype=HALF, head_dim=64, out_dtype=out_dtype)


def gpu_plan(**options) -> AttentionPlan:
    """A plan with split windows, whatever the GPU."""
    plan = plan_attention(EDGE_CASES["hub"](), backend="fused3s", device=GPU, **options)
    data = plan.data
    schedule = make_schedule(data.kv_tiles, data.tile_offset, data.schedule.warps, SplitHeuristic(2, 16, 32))
    assert schedule.num_splits > 0
    return replace(plan, data=replace(data, schedule=schedule))


@pytest.mark.gpu
@pytest.mark.parametrize("reorder", ["none", "rcm"])
def test_gpu_plan_runs_after_a_move_and_after_loading(reorder, tmp_path):
    plan = gpu_plan(dtype=HALF, head_dim=16, reorder=reorder)
    tensors = inputs(plan, dtype=HALF)
    expected = plan(*tensors)
    assert torch.equal(plan.to("cpu").to("cuda")(*tensors), expected)
    plan.save(tmp_path / "plan.pt")
    loaded = AttentionPlan.load(tmp_path / "plan.pt")
    assert_same_plan(plan, loaded)
    assert torch.equal(loaded(*tensors), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", CUDA_BACKENDS)
@pytest.mark.parametrize("out_dtype", [None, FLOAT])
def test_gpu_first_call_neither_compiles_nor_synchronises(backend, out_dtype, monkeypatch):
    dtype = HALF if REGISTRY[backend].unsupported(FLOAT, 40) else FLOAT
    monkeypatch.setattr(jit, "_kernels", {})
    graph = EDGE_CASES["n_one_past_16"]()
    plan = plan_attention(
        graph, backend=backend, device=GPU, dtype=dtype, head_dim=40, num_heads=2, out_dtype=out_dtype
    )
    tensors = inputs(plan, 40, dtype)
    torch.cuda.synchronize()
    compiled = set(jit._kernels)
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan(*tensors, out_dtype=out_dtype)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert set(jit._kernels) == compiled


@pytest.mark.gpu
def test_gpu_plan_runs_inside_compiled_functions():
    plan = gpu_plan(dtype=HALF, head_dim=16)
    tensors = inputs(plan, dtype=HALF)
    compiled = torch.compile(lambda q, k, v: 2 * plan(q, k, v + 1), mode="reduce-overhead")
    for _ in range(4):
        output = compiled(*tensors).clone()
        torch.testing.assert_close(output, 2 * plan(*tensors[:2], tensors[2] + 1))
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpu_plan_on_a_device_that_is_not_current():
    plan = gpu_plan(dtype=HALF, head_dim=16)
    tensors = inputs(plan, dtype=HALF)
    expected = plan(*tensors)
    other = plan.to("cuda:1")
    assert torch.cuda.current_device() == 0
    assert torch.equal(other(*(tensor.to("cuda:1") for tensor in tensors)).to(GPU), expected)
