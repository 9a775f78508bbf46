"""Weights that change after a path copied them."""

import copy

import pytest
import torch

from kernels import plan_attention
from models import StaleWeightsError, prepare_execution
from models.weight_copies import CopiedModules


def prepared(make_graph, model, dense):
    graph = make_graph()
    attention = plan_attention(graph, backend="reference", device="cpu")
    with torch.inference_mode():
        return prepare_execution(model, model.prepare(graph, attention), backend="reference", dense=dense)


@pytest.fixture(autouse=True)
def traced_only(monkeypatch):
    """torch.compile without code generation, which takes most of a minute."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend="eager", **options))
    yield
    torch.compiler.reset()


def load(model, other):
    model.load_state_dict(other.state_dict())


@torch.no_grad()
def update_in_place(model, other):
    for parameter, new in zip(model.parameters(), other.parameters(), strict=True):
        parameter.copy_(new)


def assign(model, other):
    model.load_state_dict(other.state_dict(), assign=True)


def replace_data(model, other):
    for parameter, new in zip(model.parameters(), other.parameters(), strict=True):
        parameter.data = torch.zeros_like(new)
        parameter.data = new.detach().clone()  # perhaps where the first data were


def replace_a_module(model, other):
    model.load_state_dict(other.state_dict())
    model.embedding.linear = copy.deepcopy(other.embedding.linear)


def cast_there_and_back(model, other):
    model.load_state_dict(other.state_dict())
    model.double().float()


@pytest.mark.parametrize("change", [load, update_in_place, assign, replace_data, replace_a_module, cast_there_and_back])
def test_compiled_path_refuses_new_weights_until_prepared_again(make_graph, make_model, change):
    model, other = make_model(), make_model()
    execution = prepared(make_graph, model, "compiled")
    with torch.inference_mode():
        execution.run()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    change(model, other)
    with torch.inference_mode(), pytest.raises(StaleWeightsError, match="prepare_execution again"):
        execution.run()
    again = prepared(make_graph, model, "compiled")
    plain = prepared(make_graph, model, "plain")
    with torch.inference_mode():
        torch.testing.assert_close(again.run(), plain.run(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("change", [load, assign, replace_data])
def test_each_module_of_the_fused_path_is_watched(make_model, change):
    model, other = make_model(), make_model()
    copied = [CopiedModules(module) for module in (model.embedding, *model.blocks)]
    assert not any(one.have_changed() for one in copied)
    change(model, other)
    assert all(one.have_changed() for one in copied)
