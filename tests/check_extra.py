"""An extra of the wheel, alone in an environment: `make check-wheel` runs this file there, with the extra as
its argument."""

import importlib.util
import sys
import types
from pathlib import Path

import torch

import fused3s
from fused3s import nn

EDGES = torch.randint(50, (2, 200))
X = torch.randn(50, 16)


def pyg() -> None:
    from torch_geometric.nn import MessagePassing

    layer = nn.TransformerConv(16, 8)
    assert isinstance(layer, MessagePassing)
    assert layer(X, EDGES).shape == (50, 8)


def reorder() -> None:
    import numba  # noqa: F401
    import scipy.sparse

    matrix = scipy.sparse.random(50, 50, 0.1, format="csr")
    assert fused3s.plan_attention(matrix, device="cpu")(X, X, X).shape == X.shape


def dgl() -> None:
    sys.modules["dgl.graphbolt"] = types.ModuleType("dgl.graphbolt")  # as in docs/layers.md
    import dgl

    layer = nn.SparseMHA(hidden_size=16, num_heads=2)
    assert layer(layer.plan(dgl.rand_graph(50, 200)), X).shape == X.shape


def metis() -> None:
    import pymetis

    assert pymetis.part_graph(2, adjacency=[[1], [0], [3], [2]])[0] == 0


def molecules() -> None:
    import B3DB  # noqa: F401
    from rdkit import Chem

    assert Chem.MolFromSmiles("CCO").GetNumAtoms() == 3


def qm9() -> None:
    spec = importlib.util.find_spec(
        "qm9pack"
    )  # its import would need pkg_resources; data/sources/qm9.py reads the tables
    assert any(Path(spec.submodule_search_locations[0], "data").iterdir())


def cuda13() -> None:
    from cupy.cuda import nvrtc

    assert nvrtc.getVersion() >= (12, 0)  # CuPy takes that of PyTorch, which may be of another CUDA


cuda12 = cuda13
globals()[sys.argv[1]]()
print(f"{sys.argv[1]}: imported beside torch {torch.__version__}")
