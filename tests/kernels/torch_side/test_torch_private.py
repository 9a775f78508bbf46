"""Private names of torch: they exist, their fallbacks agree, and no other module uses any."""

import re
from pathlib import Path

import pytest
import torch

from fused3s.torch_side import torch_private

ROOT = Path(__file__).resolve().parents[3]
PRIVATE = re.compile(
    r"torch\._(?!version)[A-Za-z]|\b_C\b|forward_ad\._|distributed_c10d\._|_dynamo_static_input_type|import _has_any"
)


def test_no_other_module_of_the_library_uses_private_names():
    found = []
    for folder in ("kernels", "dense", "models", "training", "parallel"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            if file.name != "torch_private.py":
                lines = file.read_text(encoding="utf-8").splitlines()
                found += [
                    f"{file.relative_to(ROOT)}:{i}: {line}" for i, line in enumerate(lines, 1) if PRIVATE.search(line)
                ]
    assert not found


def test_a_name_that_torch_lacks_is_an_import_error():
    with pytest.raises(ImportError, match=r"has no torch._C.no_such_name, which this library needs; use torch 2.6 to"):
        torch_private.needed(torch._C, "no_such_name")


@pytest.mark.parametrize("which", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"])
def test_hooks_of_all_modules_and_the_fallback(which):
    handle = getattr(torch.nn.modules.module, f"register_module_{which}")(lambda *given: None)
    try:
        assert torch_private.has_global_hooks()
        assert torch_private._any_global_hook()
    finally:
        handle.remove()
    assert not torch_private.has_global_hooks()
    assert not torch_private._any_global_hook()


def test_a_linear_layer_with_relu_and_its_fallback(monkeypatch):
    x, weight, bias = torch.randn(5, 4), torch.randn(3, 4), torch.randn(3)
    expected = torch.relu(x @ weight.t() + bias)
    torch.testing.assert_close(torch_private.linear_relu(x, weight, bias), expected)
    monkeypatch.setattr(torch_private, "_addmm_relu", None)
    torch.testing.assert_close(torch_private.linear_relu(x, weight, bias), expected)


@pytest.mark.gpu
def test_gpu_names_agree_with_their_fallbacks():
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            assert torch_private.raw_stream(0) == torch_private._stream_handle(0) == stream.cuda_stream
    assert torch_private.current_device_index() == torch.cuda.current_device()
