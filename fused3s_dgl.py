"""The one place that imports DGL: `dgl = import_dgl()`.

DGL 2.1.0, the newest release on PyPI, ships one graphbolt library for each PyTorch release it was built
with and fails in `import dgl` where the library of the installed PyTorch is absent. Graphbolt is DGL's data-loading
engine; nothing here uses it. Registering an empty `dgl.graphbolt` before the import makes the rest of DGL work.
A DGL that has its library (conda, a source build, CUDA or not) is imported untouched.
"""

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

import torch


@cache
def import_dgl() -> ModuleType:
    """Return the `dgl` module, whatever PyTorch it was built for.

    Sets `DGLBACKEND=pytorch` unless the variable is set.

    Raises:
        ImportError: DGL is not installed, or fails for another reason than graphbolt; its own message is kept.
    """
    os.environ.setdefault("DGLBACKEND", "pytorch")
    if "dgl" not in sys.modules and _lacks_graphbolt_library():
        sys.modules["dgl.graphbolt"] = ModuleType("dgl.graphbolt", "Left out: no library for this PyTorch.")
    with warnings.catch_warnings(), ogb_keeps_offline():
        # DGL's docstrings hold escapes that Python 3.12 warns of when it compiles them.
        warnings.simplefilter("ignore", SyntaxWarning)
        return importlib.import_module("dgl")


@contextmanager
def ogb_keeps_offline() -> Iterator[None]:
    """Import ogb, which DGL does too, without the thread in which it asks PyPI for its newest version: where a network
    drops packets, that thread keeps the process from ending."""
    hidden = "outdated" not in sys.modules
    if hidden:
        sys.modules["outdated"] = None  # makes ogb's `import outdated` an ImportError, which ogb expects
    try:
        yield
    finally:
        if hidden:
            del sys.modules["outdated"]


def _lacks_graphbolt_library() -> bool:
    """Whether the installed DGL has a graphbolt package without the library for the installed PyTorch."""
    spec = importlib.util.find_spec("dgl")
    if spec is None or spec.origin is None:
        return False
    folder = Path(spec.origin).parent / "graphbolt"
    torch_release = torch.__version__.split("+", maxsplit=1)[0]
    return folder.is_dir() and not any(folder.glob(f"*graphbolt_pytorch_{torch_release}.*"))


def dgl_has_cuda() -> bool:
    """Whether the installed DGL was built with CUDA (the wheels on PyPI were not)."""
    if not torch.cuda.is_available():
        return False
    dgl = import_dgl()
    try:
        dgl.graph(([0], [0])).to("cuda")
    except dgl.DGLError:
        return False
    return True
