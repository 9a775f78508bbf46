"""Whatever walks over the tensors of a layer finds those of PyG's layer: savers, averages, optimisers with one buffer.

Each saves a layer that was called, and PyG's layer of other weights reads the result back. Copies and pickling:
test_threads.py. DDP and FSDP: tests/parallel/test_layers.py.
"""

import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch_geometric.nn as pyg
from accelerate import Accelerator
from huggingface_hub import load_torch_model, save_torch_model
from safetensors.torch import load_file, load_model, save_file, save_model
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fused3s.nn

NODES, COLUMNS, EDGE_DIM = 12, 8, 3
LAYERS = {
    "TransformerConv": (COLUMNS, 4, 2),
    "TransformerConv-edges": (COLUMNS, 4, 2, EDGE_DIM),
    "GATConv": (COLUMNS, 4, 2, EDGE_DIM),
    "GATv2Conv": (COLUMNS, 4, 2, EDGE_DIM),
    "AGNNConv": (),
    "SparseMHA": (COLUMNS, 2),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def layer_of(name, module=fused3s.nn):
    kind = name.partition("-")[0]
    channels, options = LAYERS[name], {}
    if len(channels) > 3:
        channels, options = channels[:3], {"edge_dim": channels[3]}
    return getattr(module, kind)(*channels, **options)


def called(name):
    """A layer after a call; its caches and its joint memory are in use."""
    layer, x = layer_of(name), torch.randn(NODES, COLUMNS)
    edge_index = torch.randint(NODES, (2, 40))
    if name == "SparseMHA":
        layer(fused3s.plan_attention(edge_index, shape=(NODES, NODES), head_dim=4, num_heads=2, device="cpu"), x)
    else:
        layer(x, edge_index, *([torch.randn(40, EDGE_DIM)] if len(LAYERS[name]) > 3 else []))
    return layer


def twin_of(name):
    """PyG's layer, which has tensors of the same names; for SparseMHA, which PyG lacks, another one of ours."""
    return layer_of(name, fused3s.nn if name == "SparseMHA" else pyg)


def safetensors_file(layer, twin, folder):
    save_file(layer.state_dict(), folder / "file")
    twin.load_state_dict(load_file(folder / "file"))


def safetensors_model(layer, twin, folder):
    save_model(layer, folder / "file")
    load_model(twin, folder / "file")


def safetensors_model_read_by_ours(layer, twin, folder):
    save_model(twin, folder / "file")
    load_model(layer, folder / "file")


def hub(layer, twin, folder):
    save_torch_model(layer, folder)
    load_torch_model(twin, folder)


def accelerate_model(layer, twin, folder):
    Accelerator(cpu=True).save_model(layer, folder)
    twin.load_state_dict(load_file(folder / "model.safetensors"))


def accelerate_state(layer, twin, folder):
    saving, loading = Accelerator(cpu=True), Accelerator(cpu=True)
    saving.prepare(layer)
    saving.save_state(folder)
    loading.prepare(twin)
    loading.load_state(folder)


def distributed_checkpoint(layer, twin, folder):
    dcp.save(get_model_state_dict(layer), checkpoint_id=folder, no_dist=True)
    found = twin.state_dict()
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    twin.load_state_dict(found)


def one_vector(layer, twin, folder):
    vector = parameters_to_vector(layer.parameters()).detach()
    vector_to_parameters(vector, layer.parameters())  # an optimiser with a flat buffer does the same
    vector_to_parameters(vector.clone(), twin.parameters())


def average_in_the_state_dict(layer, twin, folder):
    """As in many a training script: tensors of `state_dict()` are the parameters."""
    for name, tensor in layer.state_dict().items():
        tensor.mul_(0.5).add_(twin.state_dict()[name], alpha=0.5)
        twin.state_dict()[name].copy_(tensor)


def shared_memory(layer, twin, folder):
    twin.load_state_dict(layer.share_memory().state_dict())
    assert all(each.is_shared() for each in layer.parameters())


SAVERS = [
    *(safetensors_file, safetensors_model, safetensors_model_read_by_ours, hub, accelerate_model),
    *(accelerate_state, distributed_checkpoint, one_vector, average_in_the_state_dict, shared_memory),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("save", SAVERS, ids=lambda save: save.__name__)
@every_layer
def test_savers_find_the_tensors_of_pyg(name, save, tmp_path):
    torch.manual_seed(0)
    layer, twin = called(name), twin_of(name)
    save(layer, twin, tmp_path)
    mine, found = layer.state_dict(), twin.state_dict()
    assert mine.keys() == found.keys()
    for key, value in found.items():
        torch.testing.assert_close(value, mine[key], rtol=0, atol=0)


@every_layer
def test_a_saved_part_holds_no_other_part(name):
    """The size of a file; a view would save the memory that it is part of."""
    for mine, theirs in zip(called(name).children(), twin_of(name).children(), strict=False):
        files = [io.BytesIO(), io.BytesIO()]
        for file, module in zip(files, (mine, theirs), strict=True):
            torch.save(module.state_dict(), file)
        assert files[0].tell() <= files[1].tell() + 256
