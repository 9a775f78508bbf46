"""Execution of the model: plain, compiled and fused non-attention layers, and CUDA graphs, all with equal outputs."""

import copy

import pytest
import torch

from bench.baselines import REGISTRY
from data.dgl import import_dgl
from fused3s import plan_attention
from fused3s.backends.reference import ReferenceBackend
from models import CudaGraphError, DenseUnavailableError, StaleWeightsError, prepare_execution
from models.dense.block import dense_block_unavailable
from models.execution import CopiedModules
from models.fast import choose_path
from models.inference.agreement import compare

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def compiles_anew():
    yield
    torch.compiler.reset()  # torch keeps only a few compiled versions of a code object


def prepared(model, graph, backend="reference", **options):
    weight = model.readout.classes.weight
    attention = plan_attention(
        graph, backend=backend, device=weight.device, dtype=weight.dtype, head_dim=model.head_dim
    )
    with torch.inference_mode():
        return prepare_execution(model, model.prepare(graph, attention), backend=backend, **options)


def error(logits, expected):
    return compare(logits, expected).relative


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_compiled_parts_agree_with_plain_ones(make_graph, make_model, compiles_eagerly, norm):
    graph, model = make_graph(), make_model(norm=norm, heads=4)
    plain, compiled = (prepared(model, graph, dense=dense) for dense in ("plain", "compiled"))
    assert (plain.path, compiled.path) == ("plain", "compiled")
    with torch.inference_mode():
        torch.testing.assert_close(compiled.run(), plain.run(), rtol=0, atol=1e-6)


def load(model, other):
    model.load_state_dict(other.state_dict())


def assign(model, other):
    model.load_state_dict(other.state_dict(), assign=True)


def replace_data(model, other):
    for parameter, new in zip(model.parameters(), other.parameters(), strict=True):
        parameter.data = torch.zeros_like(new)
        parameter.data = new.detach().clone()  # perhaps where the first data were


def cast_there_and_back(model, other):
    model.load_state_dict(other.state_dict())
    model.double().float()


@pytest.mark.parametrize("change", [load, assign, replace_data, cast_there_and_back])
def test_compiled_path_refuses_new_weights_until_prepared_again(make_graph, make_model, compiles_eagerly, change):
    graph, model, other = make_graph(), make_model(), make_model()
    execution = prepared(model, graph, dense="compiled")
    with torch.inference_mode():
        execution.run()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    change(model, other)
    with torch.inference_mode(), pytest.raises(StaleWeightsError, match="prepare_execution again"):
        execution.run()
    again, plain = (prepared(model, graph, dense=dense) for dense in ("compiled", "plain"))
    with torch.inference_mode():
        torch.testing.assert_close(again.run(), plain.run(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("change", [load, assign, replace_data])
def test_each_module_of_the_fused_path_is_watched(make_model, change):
    model, other = make_model(), make_model()
    copied = [CopiedModules(module) for module in (model.embedding, *model.blocks)]
    assert not any(one.have_changed() for one in copied)
    change(model, other)
    assert all(one.have_changed() for one in copied)


def test_norms_with_other_epsilons_are_not_fused(make_model):
    model = make_model(dim=64)
    assert choose_path(model, "plain") == ("plain", "as configured")
    model.blocks[1].norm2.eps = 1e-3
    assert "the two norms' eps differ: 1e-05 and 0.001" in choose_path(model, "auto")[1]
    with pytest.raises(DenseUnavailableError, match="eps differ"):
        choose_path(model, "fused")


def test_an_unavailable_cuda_graph_is_an_error(make_graph, make_model):
    with pytest.raises(CudaGraphError, match="needs an NVIDIA GPU, and the model is on cpu"):
        prepared(make_model(), make_graph(), cuda_graph=True)


class Waits(ReferenceBackend):
    """The reference, with a synchronisation in each call."""

    name = "waits"

    def attend(self, *arguments):
        output = super().attend(*arguments)
        output.sum().item()
        return output


@pytest.mark.gpu
def test_gpu_backend_that_waits_is_eager_with_auto_and_refused_otherwise(make_graph, make_model, monkeypatch):
    monkeypatch.setitem(REGISTRY, "waits", Waits())
    graph, model = make_graph(), make_model(dim=64).to(GPU, torch.float16)
    with pytest.raises(CudaGraphError, match="backend waits cannot be captured"):
        prepared(model, graph, "waits", cuda_graph=True)
    run = prepared(model, graph, "waits")
    assert run.captured is None
    assert "backend waits cannot be captured" in run.graph_reason
    with torch.inference_mode():
        torch.testing.assert_close(run.run(), prepared(model, graph, cuda_graph=False).run(), rtol=0, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("task", ["node", "graph"])
@pytest.mark.parametrize(("dim", "heads"), [(64, 1), (80, 5), (128, 1), (192, 6), (256, 2)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gpu_all_backends_and_executions_agree(make_graph, make_model, dtype, dim, heads, task):
    # Errors of one way are compared with those of another, so that both need many logits: of nodes, or of 40 graphs.
    sizes = (700, 33, 1100) if task == "node" else range(20, 420, 10)
    graph = import_dgl().batch([make_graph(n, 5 * n, seed=n) for n in sizes])
    model = make_model(task=task, dim=dim, heads=heads, blocks=4).to(GPU, dtype)
    ways = ["plain"]
    if (dim, task) == (128, "node"):
        ways.append("compiled")  # slow to compile
    if (reason := dense_block_unavailable(GPU, dtype, dim)) is None:
        ways.append("fused")
    with torch.inference_mode():
        exact = prepared(copy.deepcopy(model).float(), graph, cuda_graph=False, dense="plain").run()
        rounding = error(prepared(model, graph, cuda_graph=False, dense="plain").run(), exact)
        assert 0 < rounding < 50 * torch.finfo(dtype).eps
        for backend in ("fused3s", "fused3s_paper", "flashsparse_stable", "csr_unfused"):
            for dense in ways if backend == "fused3s" else ways[:1]:
                for cuda_graph in (False, True) if backend.startswith("fused3s") else (False,):
                    run = prepared(model, graph, backend, dense=dense, cuda_graph=cuda_graph)
                    found = error(run.run(), exact)
                    assert found <= 2 * rounding, (backend, run.path, run.graph_reason, found, rounding)
    if reason:
        pytest.skip(f"compared without the fused dense block: {reason}")
