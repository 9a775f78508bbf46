"""Shared fixtures, and skips with a reason where the real graphs or the GPU are missing."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import clone  # noqa: F401, this clone's packages, whatever is installed
import pytest
import torch
from attention_cases import EDGE_CASES, Csr
from formula_backend import FormulaBackend

from bench.baselines import REGISTRY

os.environ["COLUMNS"] = "200"  # of tables, also in the worker processes of pytest-xdist

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def real_graph_dir() -> Path:
    """Folder of real graphs (`single/NAME.npz`, `batched/NAME.npz`): FUSED3S_TEST_DATA, else ../shared/data."""
    folder = Path(os.environ.get("FUSED3S_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "single").is_dir():
        pytest.skip(f"no real graphs under {folder}; set FUSED3S_TEST_DATA to a folder with single/ and batched/")
    return folder


@pytest.fixture(params=EDGE_CASES)
def edge_case(request: pytest.FixtureRequest) -> Csr:
    return EDGE_CASES[request.param]()


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch) -> FormulaBackend:
    """A backend with a backward pass of its own, registered as "formula"."""
    backend = FormulaBackend()
    monkeypatch.setitem(REGISTRY, "formula", backend)
    return backend


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One torch thread: on a busy machine, threads of tiny operations wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def compiles_eagerly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile that only traces and checks; generating code takes most of a minute."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend="eager", **options))
    torch.compiler.reset()  # torch keeps only a few compiled versions of a code object
    yield
    torch.compiler.reset()


def pytest_configure(config: pytest.Config) -> None:
    """In the process that starts those of pytest-xdist: share the cores, since threads that wait for a core spin.

    In a process that runs tests: collections of garbage begin when all tests are known.
    """
    if processes := config.getoption("numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // processes)))
    else:
        gc.disable()


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: collections of garbage need not look at them."""
    gc.enable()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Processes that share a GPU leave its memory to each other."""
    yield  # fixtures may have replaced functions of torch
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 4 << 30:
        gc.collect()
        torch.cuda.empty_cache()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU found"))
