"""Settings that this machine cannot run: one line with key, reason and remedy, before any graph is loaded."""

import pytest
import torch

from baselines import REGISTRY
from configs import Config
from configs.resolve import check_machine, resolve_device, resolve_dtype

NO_GPU = "no NVIDIA GPU found"


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture
def with_gpu(monkeypatch):
    """Every backend says that it can run on the device."""
    for backend in REGISTRY.values():
        monkeypatch.setattr(type(backend), "unavailable", lambda self, device: None)
    monkeypatch.setattr("dense.block.cuda_unavailable", lambda device: None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA A100")


def problem(device: torch.device | None = None, **sections) -> str | None:
    config = Config(data={"name": "cora"}, **sections)
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
        ({"runtime": {"dense": "fused"}}, "runtime.dense = 'fused'", "use runtime.dense: auto"),
        (
            {"runtime": {"dense": "fused"}, "attention": {"dtype": "float16"}},
            "runtime.dense = 'fused'",
            "use runtime.dense: auto",
        ),
        ({"runtime": {"cuda_graph": True}}, "runtime.cuda_graph = True", "use runtime.cuda_graph: auto"),
        ({"attention": {"reorder": "communities"}}, "attention.reorder = 'communities'", "use attention.reorder: none"),
        (
            {"attention": {"reorder": "communities", "backend": "fused3s"}},
            "attention.backend = 'fused3s'",
            "with attention.reorder: none",
        ),
        ({"attention": {"backend": "fused3s_paper"}}, "attention.backend = 'fused3s_paper'", "csr_unfused, scatter"),
        ({"attention": {"backend": "flashsparse_naive"}}, "attention.backend = 'flashsparse_naive'", "use attention."),
    ],
    ids=str,
)
def test_without_a_gpu_the_key_the_reason_and_the_remedy_are_given(sections, key, remedy):
    text = problem(**sections)
    assert text.startswith(f"{key} and runtime.device = 'auto' (here cpu): ")
    assert remedy in text
    assert NO_GPU in text or "only an NVIDIA GPU" in text
    assert "float16 and bfloat16" not in text  # true, and not the reason
    assert "\n" not in text


@pytest.mark.usefixtures("without_gpu")
def test_the_remedies_work():
    assert problem() is None
    assert problem(attention={"reorder": "auto"}) is None  # keeps the rows' order
    assert problem(attention={"backend": "csr_unfused"}, runtime={"device": "cpu", "cuda_graph": False}) is None


@pytest.mark.usefixtures("without_gpu")
def test_each_problem_has_a_line():
    text = problem(runtime={"dense": "fused", "cuda_graph": True}, attention={"reorder": "communities"})
    assert [line.split(" = ")[0] for line in text.splitlines()] == [
        "runtime.dense",
        "runtime.cuda_graph",
        "attention.reorder",
    ]


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"runtime": {"dense": "fused"}}, ["runtime.device = 'auto' (here cuda:0)", "A100 has compute capability 8.0"]),
    ],
    ids=str,
)
def test_on_a_gpu_what_it_does_not_take_is_named(sections, parts):
    text = problem(torch.device("cuda", 0), **sections)
    for part in parts:
        assert part in text


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize("reorder", ["communities", "auto"])
def test_on_a_gpu_without_a_backend_that_reorders_rows(monkeypatch, reorder):
    monkeypatch.setattr(type(REGISTRY["fused3s"]), "unavailable", lambda self, device: "compute capability 7.5")
    text = problem(torch.device("cuda", 0), attention={"reorder": reorder})
    assert text.startswith(f"attention.reorder = '{reorder}'")
    assert text.endswith("(fused3s: compute capability 7.5); use attention.reorder: none")


@pytest.mark.usefixtures("with_gpu")
def test_on_a_gpu_the_defaults_and_any_order_run():
    for reorder in ("none", "communities", "auto"):
        for dtype in ("auto", "float32"):
            assert problem(torch.device("cuda", 0), attention={"reorder": reorder, "dtype": dtype}) is None
    assert problem(torch.device("cuda", 0), runtime={"cuda_graph": True}) is None
