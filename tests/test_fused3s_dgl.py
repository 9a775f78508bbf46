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


def fake_dgl(folder: Path, libraries: list[str], with_graphbolt: bool = True) -> None:
    """A package `dgl` that, as DGL does, imports graphbolt, which fails unless its library is there."""
    package = folder / "dgl"
    package.mkdir()
    (package / "__init__.py").write_text("from . import graphbolt\n" if with_graphbolt else "")
    if with_graphbolt:
        (package / "graphbolt").mkdir()
        (package / "graphbolt" / "__init__.py").write_text(
            "import pathlib, torch\n"
            "release = torch.__version__.split('+')[0]\n"
            "here = pathlib.Path(__file__).parent\n"
            "if not (here / f'libgraphbolt_pytorch_{release}.so').exists():\n"
            "    raise FileNotFoundError('Cannot find DGL C++ graphbolt library')\n"
            "loaded = True\n"
        )
        for name in libraries:
            (package / "graphbolt" / name).touch()


def run(folder: Path, code: str) -> str:
    script = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]\n{code}"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return result.stdout.strip()


IMPORT = "from fused3s_dgl import import_dgl; dgl = import_dgl()\n"
RELEASE = torch.__version__.split("+")[0]


def test_installed_dgl_works_and_importing_kernels_does_not_import_it():
    assert run(ROOT, "import kernels; print('dgl' in sys.modules, 'cupy' in sys.modules)") == "False False"
    assert run(ROOT, IMPORT + "print(dgl.graph(([0, 1], [1, 2])).in_degrees().tolist())") == "[0, 1, 1]"


def install(folder: Path) -> None:
    """What an installed project leaves beside its modules: the entry points of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "fused3s-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fused3s\nVersion: 0.0.0\n")
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {target}" for name, target in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def run_script(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """A user's own script: nothing of this project is imported, and only PYTHONPATH names its folders."""
    paths = os.pathsep.join([str(folder), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": paths} | environment
    return subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


PLAIN = "import torch, dgl; print(hasattr(dgl.graphbolt, 'loaded'))"


@pytest.mark.parametrize(
    ("library", "expected"),
    [("libgraphbolt_pytorch_1.0.0.so", "False"), (f"libgraphbolt_pytorch_{RELEASE}.so", "True")],
)
def test_a_users_import_of_dgl_works_where_the_project_is_installed(tmp_path, library, expected):
    fake_dgl(tmp_path, [library])
    install(tmp_path)
    done = run_script(PLAIN, tmp_path)
    assert done.stdout.strip() == expected, done.stderr


def test_a_use_of_the_missing_graphbolt_says_why(tmp_path):
    fake_dgl(tmp_path, [])
    install(tmp_path)
    done = run_script("import torch, dgl; dgl.graphbolt.ItemSet", tmp_path)
    assert "AttributeError: dgl.graphbolt.ItemSet is not available: Left out: DGL has no library" in done.stderr


def test_torch_alone_does_not_import_dgl(tmp_path):
    fake_dgl(tmp_path, [])
    install(tmp_path)
    done = run_script("import sys, torch; print([name for name in sys.modules if name.startswith('dgl')])", tmp_path)
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
