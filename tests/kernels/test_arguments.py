"""Bad arguments of plans and calls: each gets an error that names it, its value and what is allowed. Without a GPU."""

import math

import pytest
import scipy.sparse
import torch

import baselines  # noqa: F401  registers the backends that are named here
from fused3s import BackendUnavailableError, Dropout, EdgeData, plan_attention, sparse_attention

GRAPH = scipy.sparse.random(20, 20, 0.2, format="csr", random_state=0)


def rows(dtype=torch.float32):
    return torch.ones(20, 2, 8).to(dtype)


def seeded(seed) -> dict:
    return {"dropout": Dropout(0.5, seed)}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device": 3.5}, TypeError, r"device: got 3.5; a torch.device, a text"),
        ({"device": "gpu"}, ValueError, "device: got 'gpu'; allowed are 'cpu', 'cuda'"),
        ({"device": "cuda:99"}, BackendUnavailableError, "device: got 'cuda:99', and .* device='cpu' runs everywhere"),
        ({"dtype": torch.int64}, ValueError, "dtype: got torch.int64; allowed are torch.float16"),
        ({"out_dtype": torch.bool}, ValueError, "out_dtype: got torch.bool"),
        ({"head_dim": 10**30}, ValueError, "head_dim: got 1000"),
        ({"head_dim": True}, TypeError, "head_dim: got True; an integer"),
        ({"num_heads": -1}, ValueError, "num_heads: got -1"),
        ({"reorder": "random"}, ValueError, "reorder: got 'random'; allowed are none, communities"),
        ({"reorder": "communities"}, BackendUnavailableError, "reorder='none' needs no such backend"),
        (
            {"reorder": "auto", "backend": "dgl"},
            ValueError,
            r"dgl cannot run .* cannot reorder rows .* only fused3s can",
        ),
        ({"edge_data": 1}, TypeError, "edge_data: got 1; True and False"),
        ({"backward": "yes"}, TypeError, "backward: got 'yes'; True and False"),
        ({"backend": "fused"}, ValueError, "backend: got 'fused'; allowed are 'auto', 'fused3s', 'csr_unfused'"),
        ({"graph": None}, TypeError, "graph: got builtins.NoneType; allowed are"),
    ],
)
def test_plans(arguments, error, message):
    with pytest.raises(error, match=message):
        plan_attention(**({"graph": GRAPH, "device": "cpu"} | arguments))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"v": rows().numpy()}, TypeError, r"v: got ndarray; a torch.Tensor"),
        ({"q": rows()[:19]}, ValueError, r"q: got shape \(19, 2, 8\), but the graph has 20 rows"),
        ({"k": rows()[:19]}, ValueError, r"k: got shape \(19, 2, 8\), but the graph has 20 columns"),
        ({"v": rows()[:19]}, ValueError, r"v: got shape \(19, 2, 8\), but k has \(20, 2, 8\)"),
        ({"q": torch.tensor(1.0)}, ValueError, r"q: got shape \(\); \[N, d\], \[N, H, d\] or \[B, N, H, d\]"),
        ({"k": rows()[:, :1]}, ValueError, r"k: got shape \(20, 1, 8\), but q has"),
        (dict.fromkeys("qkv", rows()[..., :0]), ValueError, "d must be at least 1"),
        (dict.fromkeys("qkv", rows()[:, :0]), ValueError, r"q: got shape \(20, 0, 8\); H and d must be at least 1"),
        ({"q": rows().to("meta")}, ValueError, "q: on meta, but the graph was planned for cpu"),
        ({"q": rows().half()}, ValueError, "k: got torch.float32, but q is torch.float16"),
        ({"k": rows().to_sparse()}, ValueError, "k: got layout torch.sparse_coo; dense tensors"),
        (dict.fromkeys("qkv", rows(torch.int32)), ValueError, "q: got torch.int32; allowed are torch.float16"),
        ({"scale": math.nan}, ValueError, "scale: got nan; a finite number"),
        ({"scale": "a"}, TypeError, "scale: got 'a'; a number is needed"),
        ({"out_dtype": torch.int32}, ValueError, "out_dtype: got torch.int32; allowed are"),
        ({"return_lse": 1}, TypeError, "return_lse: got 1; True and False"),
        ({"edges": EdgeData(clamp=math.nan)}, ValueError, "clamp: got nan"),
        ({"dropout": 1.0}, ValueError, "dropout: got 1.0; a rate between 0 and 1 is needed"),
        ({"dropout": math.nan}, ValueError, "dropout: got nan"),
        (seeded(1 << 63), ValueError, "dropout.seed: got 9223372036854775808; an integer of 64 bits"),
        (seeded(1.5), TypeError, r"dropout.seed: got float; an int, an int64 tensor \[1\] or None is needed"),
        (seeded(torch.zeros(2, dtype=torch.int64)), ValueError, r"dropout.seed: got torch.int64 \(2,\); int64 \[1\]"),
        (
            seeded(torch.zeros(1, dtype=torch.int64, device="meta")),
            ValueError,
            "dropout.seed: on meta, but q is on cpu",
        ),
    ],
)
def test_calls(arguments, error, message):
    plan = plan_attention(GRAPH, backend="reference", device="cpu", edge_data=True)
    with pytest.raises(error, match=message):
        plan(**(dict.fromkeys("qkv", rows()) | arguments))


def test_a_single_call_checks_as_a_plan_does():
    with pytest.raises(ValueError, match=r"q: got shape \(19, 2, 8\), but the graph has 20 rows"):
        sparse_attention(rows()[:19], rows(), rows(), GRAPH)
    with pytest.raises(TypeError, match=r"graph: got builtins\.list"):
        sparse_attention(rows(), rows(), rows(), [1, 2])
