"""The torch operators: torch's own checks of them, torch.compile without a graph break, export."""

import gc
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from edge_cases import EDGE_LISTS, FORMS, edge_inputs, map_tensors, qkv
from formula_backend import FormulaBackend
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from bench.baselines import REGISTRY
from fused3s import AttentionPlan, Dropout, plan_attention, sparse_attention
from fused3s.backends.base import Gradients
from models.graph_transformer import GraphTransformer

FUSED = pytest.param("fused3s", marks=pytest.mark.gpu)
BACKENDS = ["formula", FUSED]
OPAQUE = ["formula", "dgl", "csr_unfused", "scatter", FUSED]  # to torch.compile
SCALE = 0.3
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def formula(monkeypatch) -> Iterator[None]:
    monkeypatch.setitem(REGISTRY, "formula", FormulaBackend())
    yield
    torch.compiler.reset()


def device_of(backend: str) -> str:
    return "cuda" if backend == "fused3s" else "cpu"


def types_of(backend: str) -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16] if backend == "fused3s" else [torch.float32, torch.bfloat16]


class Case:
    """A graph with repeated edges: its plan, and inputs with edge data, by default of all kinds."""

    def __init__(
        self, backend: str, name: str = "repeated", dtype: torch.dtype | None = None, kind: str = "all", **options: Any
    ) -> None:
        graph = EDGE_LISTS[name]()
        made, _ = FORMS["scipy_coo"](graph)
        device = device_of(backend)
        dtype = types_of(backend)[0] if dtype is None else dtype
        options = {"edge_data": True, "backward": True} | options
        self.plan: AttentionPlan = plan_attention(made, backend=backend, device=device, **options)
        self.tensors = [tensor.to(device).requires_grad_() for tensor in qkv(graph.shape, 2, 8, dtype)]
        self.data = map_tensors(edge_inputs(kind, graph.num_edges, 2, 8, dtype), self._leaf)

    def _leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(self.tensors[0].device)
        return tensor.requires_grad_() if tensor.is_floating_point() else tensor

    @property
    def leaves(self) -> list[torch.Tensor]:
        values = (*self.tensors, *vars(self.data).values())
        return [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def assert_same_call(found: torch.Tensor, expected: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    """Equal outputs and equal gradients of a random sum."""
    same(found, expected)
    factors = torch.randn_like(expected)
    gradients = (torch.autograd.grad(output, leaves, factors) for output in (found, expected))
    same(*gradients)


def operator_arguments(case: Case, with_edges: bool) -> tuple[Any, ...]:
    """The arguments that both operators have behind q, k and v; all float tensors of edge data require gradients."""
    plan = (case.plan.backend, case.plan._number, SCALE)
    if not with_edges:
        return *plan, [], [False] * 12, [0.2], 0.0, ""
    seed = torch.tensor([5], device=case.plan.device)
    edges = case.plan.call(*case.tensors, edges=case.data, dropout=Dropout(0.3, seed)).edges
    given = [tensor.detach() for tensor in edges.tensors() if tensor is not None]
    for tensor in given:
        tensor.requires_grad_(tensor.is_floating_point())
    is_given = [tensor is not None for tensor in edges.tensors()]
    return *plan, given, is_given, [0.2, *edges.score_numbers], 0.3, edges.score


def detached(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of an operator without gradients."""
    *plan, given, is_given, numbers, rate, score = arguments
    return *plan, [tensor.detach() for tensor in given], is_given, numbers, rate, score


@pytest.mark.parametrize("with_edges", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_torchs_checks_of_both_operators(backend, with_edges):
    """Of every type, and with strided inputs."""
    forward = torch.ops.fused3s.attention
    for dtype in types_of(backend):
        case = Case(backend, dtype=dtype)
        rest = operator_arguments(case, with_edges)
        torch.library.opcheck(forward, (*case.tensors, *rest, torch.float32, True))
    q, k, v = (tensor.detach() for tensor in case.tensors)
    torch.library.opcheck(forward, (q, k, v, *detached(rest), dtype, False))
    q, k = torch.stack([q, k], 1).unbind(1)  # views of [N, 2, H, d]
    inputs = [tensor.requires_grad_() for tensor in (q, k, heads_first(v))]
    torch.library.opcheck(forward, (*inputs, *rest, torch.float32, True))
    inputs, rest = [tensor.detach() for tensor in inputs], detached(rest)
    output, lse = forward(*inputs, *rest, torch.float32, True)
    of_edges = {"edge_values", "padded_features", "value_weight", "type_weight"} if with_edges else set()
    wanted = [name in {"query", "value"} | of_edges for name in Gradients._fields]
    results = output, lse, heads_first(torch.randn_like(output)), torch.randn_like(lse)
    torch.library.opcheck(torch.ops.fused3s.attention_backward, (*inputs, *rest, *results, wanted))


def heads_first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def compiled(function: Any, backend: str) -> Any:
    """Compiled without a graph break; on the CPU without generated code, which takes long to compile."""
    return torch.compile(function, fullgraph=True, backend="inductor" if backend == "fused3s" else "aot_eager")


@pytest.mark.parametrize("backend", OPAQUE)
def test_a_compiled_call_has_the_gradients_of_an_eager_one(backend):
    case = Case(backend)

    def doubled(q, k, v):
        return 2 * case.plan(q, k, 3 * v, scale=SCALE)

    function = compiled(doubled, backend)
    assert_same_call(function(*case.tensors), doubled(*case.tensors), case.tensors)
    with torch.no_grad():
        output = function(*case.tensors)
        same(output, doubled(*case.tensors))
    assert not output.requires_grad


@pytest.mark.parametrize("backend", OPAQUE)
def test_a_call_is_traced_without_being_run(backend):
    """FakeTensors have no memory; a graph of make_fx computes, and holds no result of the call that it is made of."""
    case = Case(backend)
    tensors, others = ([torch.randn_like(each) for each in case.tensors] for _ in range(2))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        output = case.plan(*map(mode.from_tensor, tensors))
    assert (output.shape, output.dtype, output.device) == (tensors[0].shape, tensors[0].dtype, case.plan.device)
    same(make_fx(case.plan)(*tensors)(*others), case.plan(*others))


EDGE_DATA = [
    (backend, kind) for backend in ("formula", "csr_unfused") for kind in ("bias_per_head", "features", "types")
]
EDGE_DATA += [
    pytest.param("fused3s", kind, marks=pytest.mark.gpu) for kind in ("bias_per_head", "features", "types", "all")
]
EDGE_DATA += [(backend, "all") for backend in OPAQUE[:-1]]


@pytest.mark.parametrize(("backend", "kind"), EDGE_DATA)
def test_a_compiled_call_has_the_gradients_of_each_kind_of_edge_data(backend, kind):
    """With dropout of a new seed; of weights and of one tensor for both weights, too; weights come with the call, or
    change bound edges."""
    case = Case(backend, kind=kind)
    seed = torch.tensor([5], device=case.plan.device)
    weight = case.data.key_weight
    same_weight = {} if weight is None else {"key_weight": weight, "value_weight": weight}

    def attention(q, k, v, bound, seed):
        return case.plan(q, k, v, edges=bound, dropout=Dropout(0.3, seed))

    def of_shared_tensors(q, k, v, bound, seed):
        return torch.cat([case.plan(q, q, v, edges=replace(bound, **same_weight)), k])

    # Apart: of more than two gradients the compiled sum is rounded once, and the eager one after each addition.
    of_shared = [leaf for leaf in case.leaves if not same_weight or leaf is not case.data.value_weight]
    for function, leaves in ((attention, case.leaves), (of_shared_tensors, of_shared)):
        both = compiled(function, backend), function
        for _ in range(2):
            calls = (each(*case.tensors, case.plan.bind_edges(case.data), seed.clone()) for each in both)
            assert_same_call(*calls, leaves)
            seed += 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_plans_of_all_sizes_share_compiled_code(backend):
    """The plan is an input of the code, not part of it."""
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(lambda plan, *given: 2 * plan(*given), backend=counter, fullgraph=True, dynamic=True)
    names, compilations = ("repeated", "hub", "self_loops"), []
    for name in 2 * names:
        case = Case(backend, name, edge_data=False)
        assert_same_call(function(case.plan, *case.tensors), 2 * case.plan(*case.tensors), case.tensors)
        compilations.append(counter.frame_count)
    # torch compiles sizes of 0 and 1 on their own: one schedule has splits, another none.
    assert compilations[-1] == compilations[len(names) - 1]


def test_a_trace_with_gradients_needs_a_plan_with_a_backward_pass():
    case = Case("formula", backward=False)
    function = compiled(lambda *tensors: case.plan(*tensors), "formula")
    with torch.no_grad():
        same(function(*case.tensors), case.plan(*case.tensors))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"make it with plan_attention\(..., backward=True\)"):
        function(*case.tensors)


class Projected(torch.nn.Module):
    """Attention behind a linear map."""

    def __init__(self, plan: AttentionPlan, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8, device=plan.device, dtype=dtype)
        self.plan = plan

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.plan(self.linear(q), k, v)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exported_program_runs_while_its_plan_lives(backend, strict, tmp_path):
    case = Case(backend)
    tensors = tuple(tensor.detach() for tensor in case.tensors)
    module = Projected(case.plan, tensors[0].dtype)
    torch.export.save(torch.export.export(module, tensors, strict=strict), tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    outputs = loaded(*tensors), module(*tensors)
    same(*outputs)
    gradients = (
        torch.autograd.grad(output.sum(), list(each.parameters()))
        for output, each in zip(outputs, (loaded, module), strict=True)
    )
    same(*gradients)
    del module, case, outputs
    gc.collect()  # torch.export leaves cycles
    with pytest.raises(RuntimeError, match=f"a plan of backend {backend} that is gone"):
        loaded(*tensors)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_is_compiled_without_a_graph_break(backend):
    made, _ = FORMS["dgl"](EDGE_LISTS["self_loops"]())
    torch.manual_seed(0)
    made.ndata["feat"] = torch.randn(36, 7)
    dtype = types_of(backend)[0]
    plan = plan_attention(made, backend=backend, device=device_of(backend), backward=True)
    model = GraphTransformer(in_features=7, num_classes=3, dim=16, heads=2, blocks=2).to(plan.device, dtype)
    inputs = model.prepare(made, plan)
    outputs = compiled(model, backend)(inputs), model(inputs)
    gradients = [torch.autograd.grad(output.sum(), list(model.parameters())) for output in outputs]
    if backend != "fused3s":
        torch.testing.assert_close(*outputs)
        same(*gradients)
        return
    # Inductor keeps float32 between layers that it fuses, where eager layers round to 16 bits: neither is the other's
    # oracle.
    exact = deepcopy(model).cpu().double()
    output = exact(exact.prepare(made, plan_attention(made, backend="reference", device="cpu", backward=True)))
    expected = output, *torch.autograd.grad(output.sum(), list(exact.parameters()))
    of_compiled, of_eager = ((output, *each) for output, each in zip(outputs, gradients, strict=True))
    for left, right, one in zip(of_compiled, of_eager, expected, strict=True):
        errors = [(each.cpu().double() - one).norm() for each in (left, right)]
        assert errors[0] <= 2 * errors[1] + 1e-2 * one.norm()


@pytest.mark.gpu
def test_gpu_cuda_graphs_of_torch_compile_read_the_plan_in_place():
    case = Case("fused3s")
    function = torch.compile(lambda *tensors: case.plan(*tensors), fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        expected = case.plan(*case.tensors)
        for _ in range(4):
            torch.testing.assert_close(function(*case.tensors).clone(), expected)


def test_a_compiled_call_without_a_plan_breaks_the_graph_at_planning_alone():
    q, k, v = torch.randn(3, 20, 2, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def call(graph):
        return 2 * sparse_attention(q + 1, k, v, graph, shape=(20, 20))

    compiled = torch.compile(call, backend="aot_eager", dynamic=True)
    counters.clear()
    for seed in range(3):
        graph = torch.randint(20, (2, 50 + seed), generator=torch.Generator().manual_seed(seed))
        found, right = (torch.autograd.grad(one(graph).square().sum(), q)[0] for one in (compiled, call))
        torch.testing.assert_close(found, right)
    assert len(counters["graph_break"]) == 1, counters["graph_break"]  # one reason
    with pytest.raises(torch._dynamo.exc.Unsupported, match="plan_outside_of_the_graph"):
        torch.compile(call, backend="eager", fullgraph=True)(graph)
