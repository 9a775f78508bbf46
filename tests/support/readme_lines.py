"""Runs the Python blocks of a README statement by statement: `python readme_lines.py README.md`.

Prints JSON: for each statement its source, and None or the error that it ended with. After an error of a statement that
uses `plan` it is tried once more with a plan of the backend `reference`; "again" holds the outcome.
"""

import ast
import json
import re
import sys
from pathlib import Path

import dgl  # plainly, as a reader does
import torch
from torch_geometric.nn import TransformerConv

import kernels

NODES, EDGES = 40, 200
FENCE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def names_for(block: str) -> dict[str, object]:
    """What a block expects to be there."""
    torch.manual_seed(0)
    graph = dgl.rand_graph(NODES, EDGES)
    dim = 16 if "head_dim=16" in block else 64
    q, k, v = (torch.randn(NODES, 8, dim, requires_grad="backward" in block) for _ in "qkv")
    trained = TransformerConv(64, 16, heads=8, edge_dim=11, beta=True)
    return {
        "dgl": dgl,
        **{"graph": graph, "g": graph, "A": graph, "q": q, "k": k, "v": v, "h": torch.randn(NODES, 80)},
        **{"a": torch.randn(EDGES, 11), "b": torch.randn(EDGES, 8)},
        **{"W": torch.randn(8, dim, 11), "W2": torch.randn(8, dim, 11)},
        **{"trained": trained, "x": torch.randn(NODES, 64), "edge_attr": torch.randn(EDGES, 11)},
        "edge_index": torch.stack(graph.edges()),
        "plan_attention": kernels.plan_attention,  # a later block goes on where the first one imported it
        "EdgeData": kernels.EdgeData,
    }


def outcome(source: str, names: dict[str, object]) -> str | None:
    try:
        exec(source, names)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def run(text: str) -> list[dict[str, str | None]]:
    found = []
    for block in FENCE.findall(text):
        names = names_for(block)
        for statement in ast.parse(block).body:
            source = ast.unparse(statement)
            entry = {"source": source, "error": outcome(source, names)}
            if entry["error"] and isinstance(names.get("plan"), kernels.AttentionPlan):
                plan = kernels.plan_attention(names["graph"], backend="reference")
                entry["again"] = outcome(source, names | {"plan": plan})
            found.append(entry)
    return found


if __name__ == "__main__":
    json.dump(run(Path(sys.argv[1]).read_text(encoding="utf-8")), sys.stdout)
