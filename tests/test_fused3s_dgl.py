"""`import dgl` with and without a graphbolt library for the installed PyTorch, each in a fresh interpreter."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
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
    """A function that runs a user's own script beside a fake `dgl`, where this project's entry points are."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info, graphbolt = tmp_path / "fused3s-0.0.0.dist-info", tmp_path / "dgl" / "graphbolt"
    info.mkdir()
    graphbolt.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fused3s\nVersion: 0.0.0\n")
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {target}" for name, target in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "dgl" / "__init__.py").write_text("from . import graphbolt\n")
    (graphbolt / "__init__.py").write_text(GRAPHBOLT)

    def run(code: str, library: str = "libgraphbolt_pytorch_1.0.0.so", **changes: str) -> subprocess.CompletedProcess:
        (graphbolt / library).touch()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])} | changes
        command = [sys.executable, "-P", "-c", code]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    return run


PLAIN = "import torch, dgl; print(hasattr(dgl.graphbolt, 'loaded'))"
BY_FUNCTION = "from fused3s_dgl import import_dgl; print(hasattr(import_dgl().graphbolt, 'loaded'))"


@pytest.mark.parametrize(
    ("code", "release", "loaded"),
    [(PLAIN, "1.0.0", "False"), (PLAIN, RELEASE, "True"), (BY_FUNCTION, "1.0.0", "False")],
)
def test_a_missing_library_is_stepped_around_and_one_that_is_there_left_alone(user, code, release, loaded):
    done = user(code, f"libgraphbolt_pytorch_{release}.so")
    assert done.stdout.strip() == loaded, done.stderr


def test_a_use_of_the_missing_graphbolt_says_why(user):
    done = user("import torch, dgl; dgl.graphbolt.ItemSet")
    assert "AttributeError: dgl.graphbolt.ItemSet is not available: Left out: DGL has no library" in done.stderr


def test_neither_torch_nor_kernels_import_dgl(user):
    done = user("import sys, torch, kernels; print([name for name in sys.modules if name.startswith(('dgl', 'cupy'))])")
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("first", ["import dgl", "import dgl.function, dgl.nn.pytorch as dglnn, dgl"])
def test_the_installed_dgl_is_imported_plainly_by_a_users_script(tmp_path, first):
    if not any(point.module == "fused3s_dgl" for point in entry_points(group="torch.backends")):
        pytest.skip("the project is not installed in this environment, or before its entry points: make setup")
    code = f"{first}\ng = dgl.graph(([0, 1], [1, 2]))\nprint(g.in_degrees().tolist(), dgl.add_self_loop(g).num_edges())"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["DGLBACKEND"] = "pytorch"
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[0, 1, 1] 5", done.stderr
