"""Settings that this machine cannot run: one line with keys, reason and remedy, before any graph is loaded."""

import pytest
import torch

from bench.baselines import REGISTRY
from configs import Config, TrainConfig
from models.machine import check_machine, resolve_device, resolve_dtype

GPU = torch.device("cuda", 0)


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture
def with_gpu(monkeypatch):
    """Every backend says that it can run on the device."""
    for backend in REGISTRY.values():
        monkeypatch.setattr(backend, "unavailable", lambda device: None)
    monkeypatch.setattr("models.dense.block.cuda_unavailable", lambda device: None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA A100")


def problem(device: torch.device | None = None, name: str = "cora", schema: type = Config, **sections) -> str | None:
    config = schema(data={"name": name}, **sections)
    device = device or resolve_device(config.runtime.device)
    try:
        check_machine(config, device, resolve_dtype(config.attention.dtype, device))
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("sections", "key", "remedy"),
    [
        ({"runtime": {"dense": "fused"}}, "runtime.dense = 'fused'", "use auto"),
        ({"runtime": {"cuda_graph": True}}, "runtime.cuda_graph = True", "use auto"),
        (
            {"attention": {"reorder": "communities", "backend": "fused3s"}},
            "attention.backend = 'fused3s'",
            "with attention.reorder: none",
        ),
        ({"attention": {"backend": "fused3s_paper"}}, "attention.backend = 'fused3s_paper'", "there: csr_unfused, "),
    ],
    ids=str,
)
def test_without_a_gpu_the_keys_the_reason_and_the_remedy_are_given(sections, key, remedy):
    text = problem(**sections)
    assert text.startswith(f"{key} and runtime.device = 'auto' (here cpu): ")
    assert remedy in text
    assert "NVIDIA GPU" in text
    assert "\n" not in text


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"runtime": {"dense": "fused"}}, ["runtime.device = 'auto' (here cuda:0)", "A100 has compute capability 8.0"]),
        ({"attention": {"backend": "fused3s_paper", "dtype": "float32"}}, ["'fused3s_paper'", "float32"]),
        ({"attention": {"backend": "dgl", "reorder": "auto"}}, ["'dgl'", "attention.reorder = 'auto'"]),
        (
            {"name": "zinc", "model": {"edge_features": "stream"}, "attention": {"backend": "flex_attention"}},
            ["'flex_attention'", "takes no edge data"],
        ),
        ({"schema": TrainConfig, "attention": {"backend": "fused3s_paper"}}, ["it computes no gradients", "fused3s"]),
    ],
    ids=str,
)
def test_on_a_gpu_what_is_not_supported_is_named(sections, parts):
    text = problem(GPU, **sections)
    for part in parts:
        assert part in text


@pytest.mark.usefixtures("with_gpu")
def test_on_a_gpu_the_defaults_and_any_order_run():
    for reorder in ("none", "communities", "auto"):
        for dtype in ("auto", "float32"):
            assert problem(GPU, attention={"reorder": reorder, "dtype": dtype}) is None
    assert problem(GPU, runtime={"cuda_graph": True}) is None
