"""DGL beside a PyTorch that it was not built for: `dgl = import_dgl()`.

DGL 2.1.0, the newest release on PyPI, ships one graphbolt library for each PyTorch release it was built with, and
`import dgl` fails if the library for the installed PyTorch is missing. Graphbolt is DGL's data-loading engine, which is
not used here. An empty `dgl.graphbolt` in its place makes the rest of DGL work. A DGL that has its library (conda, a
source build, with or without CUDA) is imported unchanged.
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

GRAPHBOLT = "dgl.graphbolt"


@cache
def import_dgl() -> ModuleType:
    """Import `dgl`, with or without a graphbolt library for the installed PyTorch.

    Sets `DGLBACKEND=pytorch` unless the variable is set.

    Raises:
        ImportError: DGL is not installed, or fails for a reason other than graphbolt; the message is DGL's.
    """
    os.environ.setdefault("DGLBACKEND", "pytorch")
    if GRAPHBOLT not in sys.modules and _lacks_graphbolt_library():
        sys.modules[GRAPHBOLT] = ModuleType(GRAPHBOLT, "Left out: DGL has no library for this PyTorch.")
    with warnings.catch_warnings(), ogb_offline():
        # Python 3.12 warns about escapes in DGL's docstrings when it compiles them.
        warnings.simplefilter("ignore", SyntaxWarning)
        dgl = importlib.import_module("dgl")
    if GRAPHBOLT in sys.modules:
        dgl.graphbolt = sys.modules[GRAPHBOLT]  # an import sets it for its own modules alone
    return dgl


@contextmanager
def ogb_offline() -> Iterator[None]:
    """Import ogb (or DGL, which imports it) without its request to PyPI for the newest version.

    The request runs in a thread that keeps the process alive on a network that drops packets.
    """
    hidden = "outdated" not in sys.modules
    if hidden:
        sys.modules["outdated"] = None  # turns ogb's `import outdated` into an ImportError, which ogb handles
    try:
        yield
    finally:
        if hidden:
            del sys.modules["outdated"]


def _lacks_graphbolt_library() -> bool:
    """Whether the installed DGL has a graphbolt package without a library for the installed PyTorch."""
    import torch

    spec = importlib.util.find_spec("dgl")
    if spec is None or spec.origin is None:
        return False
    folder = Path(spec.origin).parent / "graphbolt"
    torch_release = torch.__version__.split("+", maxsplit=1)[0]
    return folder.is_dir() and not any(folder.glob(f"*graphbolt_pytorch_{torch_release}.*"))


def dgl_has_cuda() -> bool:
    """Whether the installed DGL was built with CUDA (the wheels on PyPI were not)."""
    import torch

    if not torch.cuda.is_available():
        return False
    dgl = import_dgl()
    try:
        dgl.graph(([0], [0])).to("cuda")
    except dgl.DGLError:
        return False
    return True
