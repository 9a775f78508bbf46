"""Sparse attention on tensor cores: plans of graphs, the fused kernels and their backends.

    from fused3s import plan_attention, sparse_attention
    out = sparse_attention(q, k, v, graph)         # any graph; the fastest backend that can run
    plan = plan_attention(graph, device="cuda")    # or: build the sparse format once ...
    out = plan(q, k, v)                            # ... and call it often

Layers that replace those of PyG are in `fused3s.nn`, and those of DGL in `fused3s.nn.dgl`.
Direction: rows of A are queries, columns are keys. For a DGLGraph a node attends to the sources of its in-edges.
"""

if __name__ != "fused3s":  # a second copy would register the operators twice
    raise ImportError(
        "the folder kernels/ is the package fused3s: use `import fused3s`, after `make setup` or `pip install -e .`"
    )

__version__ = "0.2.0"  # pyproject.toml reads it here

from typing import TYPE_CHECKING, Any

from .attention import AttentionPlan, BackendInfo, list_backends, plan_attention, sparse_attention
from .errors import BackendUnavailableError, KernelCompileError, SlowerBackendWarning, UnsupportedGraphError
from .graph.key_lists import KeyLists
from .heads_last import edge_attention
from .terms.dropout import Dropout
from .terms.edge_data import BoundEdges, EdgeData
from .terms.score_term import ScoreTerm
from .torch_side.side_by_side import split_qkv

if TYPE_CHECKING:
    from .captured_loop import CapturedLoop
    from .captured_step import capture_step, copy_padded_
    from .plan_room import PlanRoom, plan_many

__all__ = [
    "AttentionPlan",
    "BackendInfo",
    "BackendUnavailableError",
    "BoundEdges",
    "CapturedLoop",
    "Dropout",
    "EdgeData",
    "KernelCompileError",
    "KeyLists",
    "PlanRoom",
    "ScoreTerm",
    "SlowerBackendWarning",
    "UnsupportedGraphError",
    "__version__",
    "capture_step",
    "copy_padded_",
    "edge_attention",
    "list_backends",
    "plan_attention",
    "plan_many",
    "sparse_attention",
    "split_qkv",
]

# Modules of names that are imported on use: they, and what they import, are of training steps on a GPU.
_ON_USE = {
    "CapturedLoop": "captured_loop",
    "PlanRoom": "plan_room",
    "capture_step": "captured_step",
    "copy_padded_": "captured_step",
    "plan_many": "plan_room",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    globals()[name] = found = getattr(import_module(f"{__name__}.{_ON_USE[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
