"""Forward passes and training steps: rows, references, launches, and attention in another type than the model's."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from bench_runs import config, run
from broken_backends import REASONS, register_broken

from bench import models
from bench.models import attention_dtype, cast
from bench.precision import matmul_precision
from bench.projection import Projection
from bench.rounds import Rounds
from common.records import Row
from common.timers import Spread
from configs.bench import BenchConfig
from models import prepare_execution
from models.inference.agreement import compare

pytestmark = pytest.mark.usefixtures("one_thread")
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


def forward(modes: str, *overrides: str) -> BenchConfig:
    small = ["shapes=[1x16]", "blocks=2", "repeats=3"]
    return config("end_to_end_smoke", *small, f"modes={{{modes}}}", *overrides)


def model_times(rows: list[Row]) -> dict[tuple[str, str], Row]:
    found = [row for row in rows if (row.scope, row.metric, row.region) == ("model", "time", "none")]
    return {(row.backend, row.dense + "+graph" * (row.launch == "cuda_graph")): row for row in found}


def test_failures_and_launches_have_rows_with_reasons(monkeypatch, tmp_path):
    broken = ", ".join(f"{name}: [plain]" for name in register_broken(monkeypatch))
    status, rows = run(forward(f"{broken}, reference: [plain, plain+graph, fused]"), tmp_path / "r.csv")
    assert status == 1
    found = {name: (row.status, row.reason) for name, row in model_times(rows).items()}
    assert {name: found.pop((name, "plain")) for name in REASONS} == REASONS
    assert {found.pop((name, "plain"))[0] for name in ("zero", "not_a_number")} == {"wrong"}
    assert found.pop(("reference", "plain+graph"))[1].startswith("a CUDA graph needs an NVIDIA GPU")
    assert found.pop(("reference", "fused"))[1].startswith("the fused dense block cannot run")
    assert found == {("reference", "plain"): ("ok", "none")}


def test_rows_of_a_case(tmp_path):
    status, rows = run(forward("reference: [plain]"), tmp_path / "r.csv")
    assert status == 0
    time = rows[0]
    assert [(row.scope, row.metric) for row in rows] == [("model", "time"), ("attention", "time")]
    assert (time.dtype, time.dim, time.heads, time.blocks) == ("float16", 16, 1, 2)
    assert 1e-4 < time.relative_error < 8e-3  # of layers in float16 against float32


def test_large_graphs_are_checked_against_another_fast_backend(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "REFERENCE_ELEMENTS", 0)
    monkeypatch.setattr(models, "FAST_REFERENCES", ("csr_unfused", "pyg"))
    settings = forward("csr_unfused: [plain], reference: [plain]", "precisions=[float32]")
    _, rows = run(settings, tmp_path / "r.csv")
    found = model_times(rows)
    assert found["csr_unfused", "plain"].note.startswith("checked against pyg")
    assert found["reference", "plain"].note.startswith("checked against csr_unfused")
    assert all(0 < row.relative_error < 1e-5 for row in found.values())


def test_a_reference_out_of_memory_is_not_the_backends_fault(tmp_path, monkeypatch):
    register_broken(monkeypatch)
    monkeypatch.setattr(models, "REFERENCE_ELEMENTS", 0)
    monkeypatch.setattr(models, "FAST_REFERENCES", ("hungry",))
    _, rows = run(forward("reference: [plain]"), tmp_path / "r.csv")
    (row,) = model_times(rows).values()
    assert (row.status, row.reason.partition(":")[0]) == (
        "oom",
        "the reference hungry, not reference, ran out of memory",
    )


def test_a_backend_of_another_type_runs_inside_a_model_of_the_configured_one(tmp_path):
    batch = ["graphs=[ogbg-molhiv]", "batch_size=9", "precisions=[float32]"]
    _, rows = run(forward("reference: [plain], sdpa_padded: [plain]", *batch), tmp_path / "r.csv")
    found = model_times(rows)
    assert {(row.dtype, row.out_dtype, row.graphs) for row in found.values()} == {("float32", "float32", 9)}
    assert found["reference", "plain"].relative_error == 0
    # Attention in float16 inside a model in float32: the error is that of 16 bits, and allowed as such.
    assert 1e-5 < found["sdpa_padded", "plain"].relative_error < 8e-3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("of_model", "reads"), [(SINGLE, HALF), (HALF, SINGLE), (HALF, HALF), (SINGLE, SINGLE), (SINGLE, BRAIN)]
)
def test_a_projection_writes_the_type_that_is_read(of_model, reads, device):
    linear = torch.nn.Linear(48, 144, bias=False).to(device, of_model)
    h = torch.randn(37, 48).to(device, of_model)
    written = Projection(linear, reads)(h)
    assert (written.dtype, written.shape) == (reads, (37, 144))
    exact = h.double() @ linear.weight.double().t()
    coarsest = max(torch.finfo(dtype).eps for dtype in (of_model, reads))
    torch.testing.assert_close(written.double(), exact, rtol=0, atol=4 * coarsest * exact.abs().max().item())


def test_no_backend_casts_what_the_projection_writes_in_any_precision(tmp_path, monkeypatch):
    read, precisions, compiled = set(), set(), []
    plan_of, compile_ = models.Width.plan, torch.compile

    def count(graph, inputs):  # tracing shows the same; generating code takes most of a minute
        compiled.append(graph)
        return graph

    def plan(width, backend, dtype, out_dtype):
        made = plan_of(width, backend, dtype, out_dtype)

        def attend(q, k, v, **options):
            if not torch.compiler.is_compiling():
                read.add((backend, q.dtype, k.dtype, v.dtype))
                precisions.add((backend, torch.get_float32_matmul_precision()))
            return made(q, k, v, **options)

        return attend

    def nothing_to_cast(attention, dtype, model_dtype):
        attend = cast(attention, dtype, model_dtype)

        def checked(q, k, v, **options):
            assert (q.dtype, k.dtype, v.dtype) == (dtype,) * 3
            return attend(q, k, v, **options)

        return checked

    monkeypatch.setattr(models.Width, "plan", plan)
    monkeypatch.setattr(models, "cast", nothing_to_cast)
    monkeypatch.setattr(torch, "compile", lambda run, **options: compile_(run, backend=count, **options))
    modes = "modes={sdpa_padded: [plain], csr_unfused: [plain], pyg: [plain, plain+compiled]}"
    small = ["graphs=[ogbg-molhiv]", "batch_size=9", "shapes=[1x16]", "blocks=2", "repeats=2", modes]
    status, rows = run(config("end_to_end", *small), tmp_path / "r.csv")
    assert status == 0
    assert len(compiled) == 3  # the blocks of a precision share one, without a break at attention
    assert read == {
        *(("sdpa_padded", HALF, HALF, HALF), ("csr_unfused", SINGLE, SINGLE, SINGLE)),
        *(("pyg", SINGLE, SINGLE, SINGLE), ("pyg", HALF, HALF, HALF)),
        ("reference", SINGLE, SINGLE, SINGLE),
    }
    # The reference logits are computed in float32, not in TF32.
    assert {one for one in precisions if one[0] == "reference"} == {("reference", "highest")}
    assert {precision for backend, precision in precisions if backend == "pyg"} == {"highest", "high"}
    assert torch.get_float32_matmul_precision() == "highest"

    types = {("float32", "float32"), ("float32", "tf32"), ("float16", "float16")}
    launches = {("sdpa_padded", "eager"), ("csr_unfused", "eager"), ("pyg", "eager"), ("pyg", "compiled")}
    times = {(row.dtype, row.out_dtype, row.backend, row.launch): row for row in rows if row.metric == "time"}
    assert {*times} == {(*pair, *way) for pair in types for way in launches}
    assert {row.status for row in rows} == {"ok"}
    # Layers and attention in float32 err by its rounding alone; 16 bits anywhere show.
    for (_, out_dtype, backend, _), row in times.items():
        is_exact = out_dtype != "float16" and backend != "sdpa_padded"
        assert (row.relative_error < 1e-5) == is_exact, row
    # Attention has a time of its own, and a share of the pass, unless it is inside compiled code.
    inside = [row for row in rows if row.scope == "attention"]
    assert {(row.backend, row.launch) for row in inside} == launches - {("pyg", "compiled")}


@pytest.fixture
def graphs_on_the_cpu(monkeypatch):
    """Executions with a CUDA graph whose replay is an eager pass."""

    def prepare(*arguments, cuda_graph, **options):
        eager = prepare_execution(*arguments, cuda_graph=False, **options)
        return replace(eager, captured=SimpleNamespace(replay=eager.eager)) if cuda_graph else eager

    monkeypatch.setattr(models, "prepare_execution", prepare)


@pytest.mark.usefixtures("graphs_on_the_cpu")
@pytest.mark.parametrize(("eager", "disturbed"), [(1.09, "no"), (1.11, "yes")])
def test_an_eager_time_far_above_that_of_the_gpu_is_set_by_the_host(tmp_path, monkeypatch, eager, disturbed):
    def rounds(milliseconds):
        return Rounds(Spread(milliseconds, milliseconds, milliseconds, 3), (milliseconds,) * 2, disturbed=False)

    monkeypatch.setattr(models, "busy_ms", lambda *_: 1.0)
    monkeypatch.setattr(models, "time_rounds", lambda *_: rounds(9.0))
    monkeypatch.setattr(models, "time_eager", lambda *_, **__: (rounds(eager), rounds(0.5)))
    _, rows = run(forward("reference: [plain, plain+graph]"), tmp_path / "r.csv")
    found = {(row.launch, row.scope): row.disturbed for row in rows if (row.metric, row.region) == ("time", "none")}
    assert found["eager", "model"] == found["eager", "attention"] == disturbed
    assert found["cuda_graph", "model"] == "no"


@pytest.mark.usefixtures("graphs_on_the_cpu")
def test_a_graph_that_leaves_no_memory_for_attention_alone_keeps_its_own_time(tmp_path, monkeypatch):
    def too_little(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 54.77 GiB. GPU 0 has 139.80 GiB")

    monkeypatch.setattr(models, "time_attention", too_little)
    _, (model, attention) = run(forward("reference: [plain+graph]"), tmp_path / "r.csv")
    assert (model.scope, model.status) == ("model", "ok")
    assert (attention.status, attention.reason) == ("oom", "CUDA out of memory. Tried to allocate 54.77 GiB")


@pytest.mark.parametrize(
    ("backend", "of_model", "expected"),
    [
        *(("csr_unfused", HALF, SINGLE), ("pyg", SINGLE, SINGLE), ("dfgnn_tiling", BRAIN, SINGLE)),
        *(("fused3s", HALF, HALF), ("fused3s", BRAIN, BRAIN), ("fused3s", SINGLE, HALF)),
    ],
)
def test_a_backend_computes_in_float32_or_in_16_bits_whatever_the_model(backend, of_model, expected):
    assert attention_dtype(backend, of_model) == expected


@pytest.mark.parametrize(("of_model", "inside"), [(HALF, SINGLE), (SINGLE, HALF), (SINGLE, SINGLE)])
def test_the_output_of_attention_has_the_models_type(of_model, inside):
    """A kernel of 16 bits writes float32 itself; one of float32 writes nothing else."""

    def attention(q, k, v, *, scale, out_dtype):
        assert {q.dtype, k.dtype, v.dtype} == {inside}
        assert (scale, out_dtype) == (0.5, SINGLE)
        return (q + k + v).to(out_dtype)

    q, k, v = torch.randn(5, 3, 2, 8).to(inside).unbind(1)  # views with gaps, as a model passes them
    # The model asks for the type of v, which is not its own where the projection writes what attention reads.
    output = cast(attention, inside, of_model)(q, k, v, scale=0.5, out_dtype=inside)
    assert output.dtype == of_model
    torch.testing.assert_close(output, (q + k + v).to(of_model), rtol=2e-3, atol=2e-3)


def test_the_coarsest_of_logits_layers_and_attention_decides_what_is_allowed():
    exact = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    rounded = exact + 1e-3 * torch.randn(200, 4, generator=torch.Generator().manual_seed(1))
    assert not compare(rounded, exact).passed
    assert compare(rounded, exact, HALF).passed
    assert not compare(rounded + 0.1, exact, HALF).passed


def test_a_precision_is_that_of_the_call_alone():
    before = torch.get_float32_matmul_precision()
    with matmul_precision("high"):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before
    with pytest.raises(ZeroDivisionError), matmul_precision("high"):
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.gpu
def test_on_a_gpu_the_host_sets_the_eager_time_of_a_small_graph(tmp_path):
    modes = "modes={csr_unfused: [plain, plain+graph], fused3s_paper: [plain, plain+graph], fused3s: [plain]}"
    settings = config("end_to_end_smoke", "graphs=[cora]", "source=official", "blocks=10", modes)
    device = torch.device("cuda", torch.cuda.current_device())
    status, rows = run(settings, tmp_path / "r.csv", device=device)
    assert status == 0
    found = model_times(rows)
    assert len(found) == 5
    assert found["csr_unfused", "plain"].disturbed == "yes"  # many kernels of microseconds
    assert {row.disturbed for (_, mode), row in found.items() if mode == "plain+graph"} == {"no"}
