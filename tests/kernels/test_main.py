"""`python -m fused3s`."""

import importlib.util
import platform
import runpy
import subprocess
import sys

import pytest
import torch

import fused3s


@pytest.fixture
def printed(monkeypatch, capsys):
    """A function that runs it and returns its lines."""
    monkeypatch.setattr(sys, "argv", ["fused3s"])

    def run() -> list[str]:
        runpy.run_module("fused3s", run_name="__main__", alter_sys=True)
        return capsys.readouterr().out.splitlines()

    return run


def line_of(lines: list[str], start: str) -> str:
    (line,) = [line for line in lines if line.startswith(start)]
    return line


def test_it_says_what_an_issue_needs(printed):
    lines = printed()
    assert lines[0] == f"fused3s {fused3s.__version__}: {fused3s.__file__}"
    assert platform.python_version() in line_of(lines, "Python ")
    assert torch.__version__ in line_of(lines, "torch ")
    for name, backend in fused3s.list_backends().items():
        assert line_of(lines, f"backend {name}: ").endswith(backend.unavailable or "runs")
    assert any(line.endswith("runs") for line in lines)


def test_without_cupy(printed, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *of: None if name == "cupy" else find_spec(name, *of))
    assert "CuPy: not installed" in printed()


def test_a_broken_cupy_and_a_cache_that_cannot_be_written(printed, monkeypatch):
    pytest.importorskip("cupy")

    def broken():
        raise ImportError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr("fused3s.runtime.kernel_cache.import_cupy", broken)
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    monkeypatch.setenv("CUPY_CACHE_DIR", "/proc/cache")
    lines = printed()
    assert line_of(lines, "CuPy") == "CuPy: ImportError: libcudart.so.12: cannot open shared object file"
    expected = "kernel cache /proc/cache, which cannot be written: No such file or directory"
    assert line_of(lines, "kernel cache") == expected


@pytest.mark.gpu
def test_gpu_is_named(printed):
    lines, gpu = printed(), torch.cuda.get_device_properties(0)
    assert f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}" in line_of(lines, "GPU 0: ")
    assert line_of(lines, "driver ").split()[1][0].isdigit()


def test_names_that_are_imported_on_use_are_listed():
    """For completion in a shell, and `from fused3s import *`."""
    code = "import fused3s, sys; print({*fused3s.__all__} - {*dir(fused3s)}, 'fused3s.captured_loop' in sys.modules)"
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert listed == "set() False\n"
