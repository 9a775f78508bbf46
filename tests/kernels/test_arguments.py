"""Bad arguments of plans and calls: each gets an error that names it, its value and what is allowed. Without a GPU."""

import math

import numpy as np
import pytest
import scipy.sparse
import torch

import bench.baselines  # noqa: F401  registers the backends that are named here
from fused3s import (
    BackendUnavailableError,
    Dropout,
    EdgeData,
    KeyLists,
    PlanRoom,
    ScoreTerm,
    capture_step,
    copy_padded_,
    list_backends,
    plan_attention,
    plan_many,
    sparse_attention,
    split_qkv,
)
from fused3s.nn import AGNNConv, GATConv, GATv2Conv, SparseMHA, TransformerConv

NESTED = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)])
GRAPH = scipy.sparse.random(20, 20, 0.2, format="csr", random_state=0)


def rows(dtype=torch.float32):
    return torch.ones(20, 2, 8).to(dtype)


def row_term(value) -> EdgeData:
    return EdgeData(score=ScoreTerm("s + a", row={"a": value}))


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
        ({"reorder": "auto", "backend": "dgl"}, ValueError, r"dgl cannot run .* cannot reorder rows .* only fused3s"),
        ({"reorder": torch.arange(20, device="meta")}, ValueError, "reorder: on the device meta, without values"),
        ({"edge_data": 1}, TypeError, "edge_data: got 1; True and False"),
        ({"backward": "yes"}, TypeError, "backward: got 'yes'; True and False"),
        ({"device": 10**30}, ValueError, "device: got 1000.*; allowed are 'cpu', 'cuda'"),
        ({"device": "cuda:1" + "0" * 30}, ValueError, "device: got 'cuda:1000.*; allowed are 'cpu', 'cuda'"),
        ({"backend": "fused"}, ValueError, "backend: got 'fused'; allowed are 'auto', 'fused3s', 'csr_unfused'"),
        ({"backend": []}, ValueError, r"backend: got \[\]; allowed are"),
        ({"device": "meta"}, ValueError, "device: got 'meta'; allowed are 'cpu', 'cuda'"),
        ({"graph": None}, TypeError, "graph: got builtins.NoneType; allowed are"),
        (
            {"graph": scipy.sparse.coo_array(np.ones((2, 2, 2))), "edge_data": True},
            TypeError,
            r"graph: got .* shape \(2, 2, 2\); 2-D, queries by keys",
        ),
        ({"graph": NESTED, "shape": (2, 2)}, ValueError, "graph: got a nested tensor; dense tensors are needed"),
        ({"graph": torch.ones(2, 3, device="meta").int(), "shape": (2, 2)}, ValueError, "graph: on the device meta"),
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
        ({"q": NESTED}, ValueError, "q: got a nested tensor; dense tensors are needed"),
        (dict.fromkeys("qkv", rows(torch.int32)), ValueError, "q: got torch.int32; allowed are torch.float16"),
        ({"scale": math.nan}, ValueError, "scale: got nan; a finite number"),
        *[
            ({"scale": each}, TypeError, "scale: got .*; a number is needed")
            for each in ("5", True, [1], torch.ones(2))
        ],
        ({"scale": 10**400}, ValueError, "scale: got inf; a finite number"),
        ({"scale": torch.ones((), requires_grad=True)}, ValueError, r"scale: got .* a gradient, .* detach\(\) it"),
        ({"out_dtype": torch.int32}, ValueError, "out_dtype: got torch.int32; allowed are"),
        ({"return_lse": 1}, TypeError, "return_lse: got 1; True and False"),
        ({"edges": EdgeData(clamp=math.nan)}, ValueError, "clamp: got nan"),
        ({"edges": EdgeData(clamp="5")}, TypeError, "clamp: got '5'; a number"),
        ({"edges": EdgeData(bias=torch.ones(80).to_sparse())}, ValueError, "bias: got layout torch.sparse_coo; dense"),
        ({"edges": EdgeData(bias=torch.ones(80, 0))}, ValueError, r"bias: got shape \(80, 0\); \[E\] or \[E, H\]"),
        ({"edges": EdgeData(bias=torch.ones(80).to(torch.float8_e4m3fn))}, ValueError, "bias: got torch.float8_e4m3fn"),
        ({"edges": EdgeData(types=torch.ones(80).int().to_sparse())}, ValueError, "types: got layout torch.sparse_coo"),
        ({"edges": row_term(NESTED)}, ValueError, "a: got a nested tensor"),
        ({"dropout": "0.5"}, TypeError, "dropout: got '0.5'; a number"),
        ({"dropout": torch.ones(2)}, TypeError, "dropout: got .*; a number"),
        ({"dropout": 1.5}, ValueError, "dropout: got 1.5; rates from 0 to 1 are allowed"),
        ({"dropout": math.nan}, ValueError, "dropout: got nan"),
        (seeded(1 << 63), ValueError, "dropout.seed: got 9223372036854775808; an integer of 64 bits"),
        (seeded(1.5), TypeError, r"dropout.seed: got float; an int, an int64 tensor \[1\] or None is needed"),
        (seeded(torch.zeros(2, dtype=torch.int64)), ValueError, r"dropout.seed: got torch.int64 \(2,\); int64 \[1\]"),
        (seeded(torch.zeros(1, dtype=torch.int64, device="meta")), ValueError, "dropout.seed: on meta, but q is on"),
    ],
)
def test_calls(arguments, error, message):
    plan = plan_attention(GRAPH, backend="reference", device="cpu", edge_data=True)
    with pytest.raises(error, match=message):
        plan(**(dict.fromkeys("qkv", rows()) | arguments))


@pytest.mark.parametrize("layer", [GATConv, GATv2Conv, TransformerConv])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"heads": 0}, ValueError, "heads: got 0; 1 to 65,535"),
        ({"out_channels": 1.5}, TypeError, "out_channels: got 1.5; an integer"),
        ({"in_channels": "5"}, TypeError, "in_channels: got '5'; an integer"),
        ({"in_channels": (5, 5, 5)}, TypeError, r"in_channels: got \(5, 5, 5\); an integer, or those"),
        ({"edge_dim": 0}, ValueError, "edge_dim: got 0"),
        ({"dropout": 1.5}, ValueError, "dropout: got 1.5; a rate from 0 to 1"),
        ({"dropout": "x"}, TypeError, "dropout: got 'x'; a rate"),
    ],
)
def test_layers(layer, arguments, error, message):
    with pytest.raises(error, match=message):
        layer(**({"in_channels": 5, "out_channels": 4} | arguments))


@pytest.mark.parametrize("layer", [GATConv, GATv2Conv, TransformerConv])
def test_calls_of_layers(layer):
    ids = torch.zeros(2, 3, dtype=torch.int64)
    rows = torch.ones(2, 5)
    for x in (None, np.ones((2, 5)), (rows,), (rows, "a"), (None, rows), rows[0], rows[None]):
        with pytest.raises(TypeError, match=r"x: got .*; a tensor \[N, F\], or two"):
            layer(5, 4)(x, ids)
    for size in ("8", (2, 2, 2), -1, (2.0, 2)):
        with pytest.raises(ValueError, match=r"num_nodes: got .*; a number of nodes, or"):
            layer(5, 4).plan(ids, size)
    with pytest.raises(TypeError, match=r"edge_attr: got str; a torch\.Tensor"):
        layer(5, 4, edge_dim=2)(torch.ones(2, 5), ids, "a")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: AGNNConv()(torch.ones(5), None), ValueError, r"x: got torch.float32 \(5,\); .* \[N, F\] is needed"),
        (lambda: AGNNConv()(torch.ones(5, 1).int(), None), ValueError, "x: got torch.int32"),
        (lambda: AGNNConv()(None, None), TypeError, "x: got NoneType; a torch.Tensor"),
        (lambda: SparseMHA(8, 0), ValueError, "num_heads: got 0"),
        (lambda: SparseMHA("8", 2), TypeError, "hidden_size: got '8'"),
        (lambda: ScoreTerm("s + a", row=[1]), TypeError, "row: got list; a dict of tensors"),
        (lambda: ScoreTerm("s + a", col={5: rows()}), TypeError, "col: got the name 5; a text"),
        (lambda: ScoreTerm(["s"]), TypeError, "expression: got list; a text such as"),
        (lambda: ScoreTerm("s * a", a="5"), TypeError, "a: got '5'; a number"),
        (lambda: ScoreTerm("s + 1 / 0"), ValueError, r"expression: 's \+ 1 / 0' is not finite"),
        (lambda: ScoreTerm("s * sqrt(-1)"), ValueError, r"is not finite and real"),
        (lambda: split_qkv(rows()[:, 0], 0), ValueError, "num_heads: got 0"),
        (lambda: split_qkv([1], 1), TypeError, "qkv: got list"),
        (lambda: plan_many([GRAPH]), TypeError, r"graphs: a sequence of \(graph, shape\) is needed"),
        (lambda: plan_many(None), TypeError, r"graphs: a sequence of \(graph, shape\) is needed"),
        (lambda: plan_many((GRAPH, None) for _ in "ab"), TypeError, "graphs: a sequence of"),
        (lambda: KeyLists(torch.ones(2, 3).int().to_sparse()), ValueError, "KeyLists: got layout torch.sparse_coo;"),
        (lambda: capture_step(None, None), TypeError, "run: got NoneType; a function"),
        (lambda: capture_step(int, None), TypeError, "model: got NoneType; a torch.nn.Module is needed"),
        (lambda: capture_step(int, torch.nn.ReLU(), 5), TypeError, "states: got int; optimisers, gradient scalers"),
        (lambda: capture_step(int, torch.nn.ReLU()), RuntimeError, "a CUDA graph needs .* this one has no parameters"),
        (lambda: copy_padded_(torch.ones(3), [1]), TypeError, "rows: got list; a torch.Tensor"),
        (
            lambda: copy_padded_(torch.tensor(1.0), rows()),
            ValueError,
            r"rows: got shape .* the target has room for \(\)",
        ),
        (lambda: PlanRoom("ab", 5, dtype=torch.half, head_dim=8, device="cpu"), ValueError, "shape: got 'ab'"),
        (lambda: list_backends("x"), ValueError, "device: got 'x'; allowed are 'cpu'"),
    ],
)
def test_other_calls(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_single_call_checks_as_a_plan_does():
    with pytest.raises(ValueError, match=r"q: got shape \(19, 2, 8\), but the graph has 20 rows"):
        sparse_attention(rows()[:19], rows(), rows(), GRAPH)
    with pytest.raises(ValueError, match="device: got 'meta'; allowed are 'cpu', 'cuda'"):
        sparse_attention(*[rows().to("meta")] * 3, GRAPH)
    with pytest.raises(ValueError, match="q: got a nested tensor"):
        sparse_attention(NESTED, rows(), rows(), GRAPH)
    with pytest.raises(TypeError, match=r"graph: got builtins\.list"):
        sparse_attention(rows(), rows(), rows(), [1, 2])


def test_tracing_is_refused_by_name():
    plan = plan_attention(GRAPH, device="cpu")
    for call in (
        lambda q: plan(q, q, q),
        lambda q: plan_attention(GRAPH, device="cpu")(q, q, q),
        lambda q: sparse_attention(q, q, q, GRAPH),
    ):
        with pytest.raises(RuntimeError, match=r"torch\.jit\.trace cannot record attention"):
            torch.jit.trace(call, rows())


@pytest.mark.parametrize("backend", ["csr_unfused", "scatter", "reference"])
def test_a_subclass_of_tensor_is_a_tensor(backend):
    class Subclass(torch.Tensor):
        pass

    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(20, 2, 8, generator=generator, requires_grad=True) for _ in "qkv"]
    plan = plan_attention(GRAPH, device="cpu", backend=backend, backward=True)
    found, right = (
        torch.autograd.grad(plan(*given).square().sum(), tensors)
        for given in ([each.as_subclass(Subclass) for each in tensors], tensors)
    )
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one.as_subclass(torch.Tensor), other)
