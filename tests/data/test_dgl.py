"""`import_dgl`, with and without a graphbolt library for the installed PyTorch, each in a fresh interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data.dgl import import_dgl

ROOT = Path(__file__).resolve().parents[2]
RELEASE = torch.__version__.split("+")[0]
# As DGL does, it imports graphbolt, which fails unless its library is there.
GRAPHBOLT = """import pathlib, torch
release = torch.__version__.split('+')[0]
if not (pathlib.Path(__file__).parent / f'libgraphbolt_pytorch_{release}.so').exists():
    raise FileNotFoundError('Cannot find DGL C++ graphbolt library')
loaded = True
"""


@pytest.fixture
def user(tmp_path):
    """A function that runs a user's own script beside a fake `dgl`."""
    graphbolt = tmp_path / "dgl" / "graphbolt"
    graphbolt.mkdir(parents=True)
    (tmp_path / "dgl" / "__init__.py").write_text("from . import graphbolt\n")
    (graphbolt / "__init__.py").write_text(GRAPHBOLT)
    (tmp_path / "fused3s").symlink_to(ROOT / "kernels")
    (tmp_path / "data").symlink_to(ROOT / "data")

    def run(code: str, library: str = "libgraphbolt_pytorch_1.0.0.so") -> subprocess.CompletedProcess:
        (graphbolt / library).touch()
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-P", "-c", code]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    return run


def test_an_import_of_the_package_changes_nothing_and_a_library_that_is_there_is_left_alone(user):
    code = "import sys, torch; finders = [*sys.meta_path]; import fused3s; assert sys.meta_path == finders; "
    code += "print([name for name in sys.modules if name.startswith(('dgl', 'cupy', 'torch_geometric'))]); "
    code += "from data.dgl import import_dgl; print(import_dgl().graphbolt.loaded)"
    done = user(code, f"libgraphbolt_pytorch_{RELEASE}.so")
    assert done.stdout.split("\n") == ["[]", "True", ""], done.stderr


def test_a_missing_library_is_stepped_around(user):
    done = user("from data.dgl import import_dgl; print(import_dgl().graphbolt.__doc__)")
    assert done.stdout == "Left out: DGL has no library for this PyTorch.\n", done.stderr


def test_the_source_folder_is_no_second_package(user):
    done = user(f"import sys; sys.path.insert(0, {str(ROOT)!r}); import kernels")
    assert "ImportError: the folder kernels/ is the package fused3s" in done.stderr


def test_the_installed_dgl_computes():
    dgl = import_dgl()
    graph = dgl.graph(([0, 1], [1, 2]))
    assert (graph.in_degrees().tolist(), dgl.add_self_loop(graph).num_edges()) == ([0, 1, 1], 5)
