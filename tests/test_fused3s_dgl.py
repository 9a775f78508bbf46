"""`import dgl` with and without a graphbolt library for the installed PyTorch, each in a fresh interpreter."""

import subprocess
import sys
from pathlib import Path

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


def test_missing_library_is_stepped_around(tmp_path):
    fake_dgl(tmp_path, ["libgraphbolt_pytorch_1.0.0.so"])
    assert run(tmp_path, IMPORT + "print(hasattr(dgl.graphbolt, 'loaded'))") == "False"


def test_present_library_is_left_alone(tmp_path):
    fake_dgl(tmp_path, [f"libgraphbolt_pytorch_{RELEASE}.so"])
    assert run(tmp_path, IMPORT + "print(dgl.graphbolt.loaded)") == "True"


def test_dgl_without_graphbolt_is_left_alone(tmp_path):
    fake_dgl(tmp_path, [], with_graphbolt=False)
    assert run(tmp_path, IMPORT + "print('dgl.graphbolt' in sys.modules)") == "False"


def test_backend_variable_is_set_unless_set():
    code = "import os; {}\n" + IMPORT + "print(os.environ['DGLBACKEND'])"
    assert run(ROOT, code.format("os.environ.pop('DGLBACKEND', None)")) == "pytorch"
    assert run(ROOT, code.format("os.environ['DGLBACKEND'] = 'pytorch'")) == "pytorch"


def test_installed_dgl_works_and_importing_kernels_does_not_import_it():
    assert run(ROOT, "import kernels; print('dgl' in sys.modules, 'cupy' in sys.modules)") == "False False"
    assert run(ROOT, IMPORT + "print(dgl.graph(([0, 1], [1, 2])).in_degrees().tolist())") == "[0, 1, 1]"
