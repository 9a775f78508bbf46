"""Bad arguments of plans: each gets an error that names it, its value and what is allowed. Without a GPU."""

import math

import pytest
import scipy.sparse
import torch

from kernels import BackendUnavailableError, Dropout, EdgeData, plan_attention

GRAPH = scipy.sparse.random(20, 20, 0.2, format="csr", random_state=0)
HUGE = 10**30


def rows(dtype=torch.float32):
    return torch.ones(20, 2, 8).to(dtype)


@pytest.fixture(scope="module")
def plan():
    return plan_attention(GRAPH, backend="reference", device="cpu", edge_data=True)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device": 3.5}, TypeError, r"device: got 3.5; a torch.device, a text"),
        ({"device": True}, TypeError, "device: got True"),
        ({"device": "gpu"}, ValueError, "device: got 'gpu'; allowed are 'cpu', 'cuda'"),
        ({"device": "meta"}, ValueError, "device: got 'meta'; allowed are 'cpu', 'cuda'"),
        ({"device": "cuda:99"}, BackendUnavailableError, "device: got 'cuda:99', and .* device='cpu' runs everywhere"),
        ({"dtype": "float16"}, ValueError, "dtype: got 'float16'; allowed are torch.float16"),
        ({"dtype": torch.complex64}, ValueError, "dtype: got torch.complex64"),
        ({"dtype": torch.int64}, ValueError, "dtype: got torch.int64"),
        ({"out_dtype": torch.bool}, ValueError, "out_dtype: got torch.bool"),
        ({"head_dim": 0}, ValueError, "head_dim: got 0; 1 to 65,535"),
        ({"head_dim": True}, TypeError, "head_dim: got True; an integer"),
        ({"head_dim": 8.0}, TypeError, "head_dim: got 8.0"),
        ({"head_dim": HUGE}, ValueError, "head_dim: got 1000"),
        ({"num_heads": -1}, ValueError, "num_heads: got -1"),
        ({"num_heads": None}, TypeError, "num_heads: got None"),
        ({"num_heads": "8"}, TypeError, "num_heads: got '8'"),
        ({"reorder": "random"}, ValueError, "reorder: got 'random'; allowed are none, communities"),
        ({"edge_data": 1}, TypeError, "edge_data: got 1; True and False"),
        ({"backward": "yes"}, TypeError, "backward: got 'yes'; True and False"),
        ({"backend": None}, ValueError, "backend: got None; allowed are 'auto'"),
        ({"backend": "fused"}, ValueError, "backend: got 'fused'"),
        ({"graph": None}, TypeError, "graph: got builtins.NoneType; allowed are"),
        ({"graph": "cora"}, TypeError, "graph: got builtins.str"),
    ],
)
def test_plans(arguments, error, message):
    with pytest.raises(error, match=message):
        plan_attention(**({"graph": GRAPH, "device": "cpu"} | arguments))


def test_row_orders_without_a_backend_that_reorders():
    plan = plan_attention(GRAPH, device="cpu", reorder="auto")
    assert plan.order is None
    with pytest.raises(BackendUnavailableError, match="reorder='none' needs no such backend"):
        plan_attention(GRAPH, device="cpu", reorder="communities")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q": None}, TypeError, "q: got NoneType; a torch.Tensor is needed"),
        ({"k": [1.0]}, TypeError, "k: got list; a torch.Tensor"),
        ({"v": rows().numpy()}, TypeError, "v: got ndarray; a torch.Tensor"),
        ({"q": rows()[:19]}, ValueError, r"q: got shape \(19, 2, 8\), but the graph has 20 rows"),
        ({"q": torch.tensor(1.0)}, ValueError, r"q: got shape \(\); \[N, d\] or \[N, H, d\]"),
        ({"k": rows()[:, :1]}, ValueError, r"k: got shape \(20, 1, 8\), but q has"),
        ({"v": rows()[..., :4]}, ValueError, r"v: got shape"),
        ({"q": rows().to("meta")}, ValueError, "q: on meta, but the graph was planned for cpu"),
        ({"q": rows().half()}, ValueError, "k: got torch.float32, but q is torch.float16"),
        ({"k": rows().to_sparse()}, ValueError, "k: got layout torch.sparse_coo; dense tensors"),
        *(
            (dict.fromkeys("qkv", rows(dtype)), ValueError, f"q: got {dtype}; allowed are torch.float16")
            for dtype in (torch.int32, torch.bool, torch.complex64)
        ),
        ({"scale": math.nan}, ValueError, "scale: got nan; a finite number"),
        ({"scale": -math.inf}, ValueError, "scale: got -inf; a finite number"),
        ({"scale": "0.1"}, None, None),  # float() reads it
        ({"scale": "a"}, TypeError, "scale: got 'a'; a number is needed"),
        ({"scale": [1]}, TypeError, r"scale: got \[1\]; a number"),
        ({"out_dtype": torch.int32}, ValueError, "out_dtype: got torch.int32"),
        ({"return_lse": 1}, TypeError, "return_lse: got 1; True and False"),
        ({"edges": EdgeData(clamp=-1.0)}, ValueError, "clamp: got -1.0"),
        ({"edges": EdgeData(clamp=math.nan)}, ValueError, "clamp: got nan"),
        ({"dropout": 1.0}, ValueError, "dropout: got 1.0"),
        ({"dropout": -0.1}, ValueError, "dropout: got -0.1"),
        ({"dropout": math.nan}, ValueError, "dropout: got nan"),
        ({"dropout": Dropout(0.1, 1.5)}, TypeError, "dropout.seed: got float"),
        ({"dropout": Dropout(0.1, torch.zeros(2, dtype=torch.int64))}, ValueError, "dropout.seed: got torch.int64"),
    ],
)
def test_calls(plan, arguments, error, message):
    arguments = dict.fromkeys("qkv", rows()) | arguments
    if error is None:
        assert plan(**arguments).isfinite().all()
        return
    with pytest.raises(error, match=message):
        plan(**arguments)
