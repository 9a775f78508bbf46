"""The one place that imports ogb."""

import importlib
import sys
from typing import Any

from kernels.dgl_compat import import_dgl


def import_ogb(module: str) -> Any:
    """`ogb.<module>`, without the thread in which `import ogb` asks PyPI for its newest version."""
    import_dgl()  # ogb imports DGL, which must be made ready first
    hidden = "outdated" not in sys.modules
    if hidden:
        sys.modules["outdated"] = None  # makes ogb's `import outdated` an ImportError, which ogb expects
    try:
        return importlib.import_module(f"ogb.{module}")
    finally:
        if hidden:
            del sys.modules["outdated"]
