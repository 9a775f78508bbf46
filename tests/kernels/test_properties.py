"""Drawn graphs, inputs and edge data against the formula in float64: outputs, log-sum-exp and gradients.

The kernels run on the CPU (tests/cuda_shim) and on a GPU. FUSED3S_CASES=20000 draws so many cases of each test, in
place of a few; pytest-xdist spreads them by instance, so that no two processes compile the same kernels:

    FUSED3S_CASES=20000 pytest -n 14 -m gpu tests/kernels/test_properties.py

Draws are the same in every run; a failure prints its smallest case.
"""

import os
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given, seed, settings
from hypothesis import strategies as st
from poison import poisoned_buffers

from fused3s import Dropout, EdgeData, ScoreTerm, plan_attention
from fused3s.dropout import kept_edges
from tests.cuda_shim.cuda_on_cpu import MODES, NEEDS_COMPILER, cuda_on_cpu

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = int(os.environ.get("FUSED3S_CASES", "0"))
HALF, BFLOAT, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = (HALF, BFLOAT, FLOAT)
UNIT = {HALF: 2**-11, BFLOAT: 2**-8, FLOAT: 2**-20, DOUBLE: 2**-46}  # relative error of a rounding; of a product
UNITS = 3  # roundings between input and result
TINY = {HALF: 2**-24}  # least positive number, where small weights are rounded to it
SLOPE, CLAMP, CAP, STEP = 0.2, 0.8, 0.7, 0.1
KINK = 1e-3  # scores nearer to a kink may fall on its other side
# H, H_kv, d, d_v, B (0: no batch)
SHAPES = (
    *((1, 1, 64, 64, 0), (4, 4, 8, 8, 0), (4, 2, 16, 16, 0), (8, 1, 16, 16, 0), (2, 2, 7, 5, 0), (4, 2, 3, 6, 2)),
    *((1, 1, 128, 128, 0), (3, 3, 13, 13, 0), (2, 2, 32, 48, 0)),
)
KINDS = (*("none", "bias", "clamp", "features", "types", "factor", "GAT", "cap", "distance", "where", "additive"),)
MATERIALISED = ("features", "types", "factor")  # kinds whose keys may be rounded
INSTANCES = [
    (kind, SHAPES[(i + 4 * j) % len(SHAPES)], dtype) for j, dtype in enumerate(DTYPES) for i, kind in enumerate(KINDS)
]
NAMES = [f"{kind}-{'x'.join(map(str, shape))}-{str(dtype)[6:]}" for kind, shape, dtype in INSTANCES]


class Case(NamedTuple):
    row: torch.Tensor
    col: torch.Tensor
    shape: tuple[int, int]
    form: str
    scale: float
    rate: float
    reorder: str
    seed: int
    with_gradients: bool
    strided: bool


@st.composite
def cases(draw: st.DrawFn, largest: int) -> Case:
    """Edges with and without repetitions, empty rows, hubs; in any order, or as a CSR."""
    shape = draw(st.integers(1, largest)), draw(st.integers(1, largest))
    number = draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(number)
    mask = generator.random(shape) < draw(st.sampled_from([0.0, 0.02, 0.1, 0.4, 1.0]))
    hub = draw(st.sampled_from(["none", "row", "column"]))
    if hub != "none":
        mask[(shape[0] // 2,) if hub == "row" else (slice(None), shape[1] // 2)] = True
    places = np.argwhere(mask)
    places = places[generator.permutation(len(places))]
    repeats = min(len(places), draw(st.integers(0, 30)))
    row, col = torch.from_numpy(np.concatenate([places, places[:repeats]])).T
    form = draw(st.sampled_from(["edge_index", "csr"]))
    if form == "csr":
        row, order = torch.sort(row, stable=True)
        col = col[order]
    scale, rate = draw(st.sampled_from([0.3, -0.4, 0.0])), draw(st.sampled_from([0.0, 0.0, 0.25]))
    reorder, gradients = draw(st.sampled_from(["none", "none", "communities"])), draw(st.booleans())
    return Case(row, col, shape, form, scale, rate, reorder, number, gradients, draw(st.booleans()))


def edge_data(kind: str, case: Case, sizes: tuple[int, ...], dtype: torch.dtype, randn: Any) -> EdgeData | None:
    heads, kv_heads, dim, value_dim, _ = sizes
    (num_rows, num_cols), num_edges, wide = case.shape, len(case.row), torch.promote_types(dtype, FLOAT)
    match kind:
        case "none":
            return None
        case "bias":
            return EdgeData(bias=randn(num_edges, heads), multiplier=randn(num_edges))
        case "clamp":
            return EdgeData(bias=randn(num_edges), clamp=CLAMP)
        case "features":
            weights = {"key_weight": randn(kv_heads, dim, 5), "value_weight": randn(kv_heads, value_dim, 5)}
            return EdgeData(features=randn(num_edges, 5), **weights)
        case "types":
            types = torch.arange(num_edges, device=case.row.device) % 3
            return EdgeData(types=types, type_weight=randn(3, kv_heads, dim))
        case "factor":
            return EdgeData(features=randn(num_edges, 3), key_factor=randn(3, kv_heads, dim))
        case "GAT":
            row, col = {"a": randn(num_rows, heads, of=wide)}, {"b": randn(num_cols, kv_heads, of=wide)}
            return EdgeData(score=ScoreTerm("leaky_relu(a + b, slope)", row=row, col=col, slope=SLOPE))
        case "cap":
            return EdgeData(score=ScoreTerm("cap * tanh(s / cap) + b", col={"b": randn(num_cols, of=wide)}, cap=CAP))
        case "distance":
            edge, head = {"c": randn(num_edges)}, {"d": randn(heads, of=wide)}
            return EdgeData(score=ScoreTerm("s - d * c", edge=edge, head=head))
        case "where":
            row, edge = {"a": randn(num_rows, of=wide)}, {"c": randn(num_edges, heads)}
            term = ScoreTerm("where(s < step, s * c, sigmoid(s) + a)", row=row, edge=edge, step=STEP)
            return EdgeData(score=term)
        case "additive":
            return EdgeData(additive_weight=randn(kv_heads, dim), additive_slope=SLOPE)
    raise AssertionError(kind)


def leaves_of(data: EdgeData | None) -> dict[str, torch.Tensor]:
    """The float tensors by name; those of a term are a: rows, b: columns, c: edges, d: heads."""
    if data is None:
        return {}
    values = {} if data.score is None else {k: v for of in data.score.values.values() for k, v in of.items()}
    given = values | vars(data)
    return {k: v for k, v in given.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}


class Oracle:
    """The formula in float64, edge by edge; and how far a result may be off.

    Attributes:
        output, lse: [N, H, d_v] and [N, H].
        near_kink: whether a rounding may choose another branch of the score.
        error: [N, H], relative error of the weights of a row.
        values: [E, H], norm of v_ij.
        weight: [E, H], the softmax with dropout.
        product: [E, H], largest possible |q| |k_ij|.
    """

    def __init__(self, kind: str, case: Case, q, k, v, w: dict[str, torch.Tensor], dtype, types) -> None:
        self.row, self.col, (num_rows, _) = case.row, case.col, case.shape
        row, col, per = case.row, case.col, q.shape[1] // k.shape[1]

        def spread(tensor: torch.Tensor, at: int = 1) -> torch.Tensor:
            return tensor.repeat_interleave(per, at) if tensor.shape[at] > 1 or k.shape[1] == 1 else tensor

        keys, values, queries = spread(k)[col], spread(v)[col], q[row]
        if kind == "types":
            keys = keys * spread(w["type_weight"])[types]
        if kind == "factor":
            keys = keys * torch.einsum("er,rhd->ehd", w["features"], spread(w["key_factor"]))
        if kind == "features":
            keys = keys + torch.einsum("er,hdr->ehd", w["features"], spread(w["key_weight"], 0))
            values = values + torch.einsum("er,hdr->ehd", w["features"], spread(w["value_weight"], 0))
        score, steepness, kink = case.scale * (queries * keys).sum(-1), 1.0, None
        self.product = abs(case.scale) * queries.norm(dim=-1) * keys.norm(dim=-1)
        match kind:
            case "bias":
                score, steepness = score * w["multiplier"][:, None] + w["bias"], w["multiplier"].abs()[:, None]
            case "clamp":
                score = score + w["bias"][:, None]
                kink, score = (score.abs() - CLAMP).abs(), score.clamp(-CLAMP, CLAMP)
            case "GAT":
                score = torch.nn.functional.leaky_relu(w["a"][row] + spread(w["b"])[col], SLOPE)
            case "cap":
                score = CAP * torch.tanh(score / CAP) + w["b"][col, None]
            case "distance":
                score = score - w["d"] * w["c"][:, None]
            case "where":
                kink, steepness = (score - STEP).abs(), 1 + w["c"].abs()
                score = torch.where(score < STEP, score * w["c"], torch.sigmoid(score) + w["a"][row, None])
            case "additive":
                weight = spread(w["additive_weight"], 0)
                score = case.scale * (torch.nn.functional.leaky_relu(queries + keys, SLOPE) * weight).sum(-1)
                self.product = abs(case.scale) * ((queries.abs() + keys.abs()) * weight.abs()).sum(-1)
        self.near_kink = kink is not None and bool((kink < KINK).any())
        target = row[:, None].expand_as(score)
        top = score.new_full(q.shape[:2], -torch.inf).scatter_reduce(0, target, score.detach(), "amax")
        top = top.where(top > -torch.inf, 0.0)
        weight = torch.exp(score - top[row])
        total = torch.zeros_like(top).index_add(0, row, weight)
        self.lse = top + total.log()
        weight = weight / total[row]
        self.softmax = weight.detach()
        if case.rate:
            kept = kept_edges(Dropout(case.rate, torch.tensor([case.seed], device=row.device)), row, col, q.shape[1])
            weight = weight * kept / (1 - case.rate)
        self.output = torch.zeros(num_rows, *values.shape[1:], dtype=DOUBLE, device=row.device).index_add(
            0, row, weight[..., None] * values
        )
        self.weight, self.values, self.steepness = weight.detach(), values.detach().norm(dim=-1), steepness
        of_scores = UNIT[dtype] if kind in MATERIALISED else min(UNIT[dtype], 2**-20)
        largest = self._most(self.product.detach() * steepness + score.detach().abs())
        self.error = UNITS * (UNIT[dtype] + of_scores * largest)
        self.queries, self.keys = queries.detach(), keys.detach()
        self.scale, self.tiny = abs(case.scale), TINY.get(dtype, 0.0)

    def _most(self, of_edges: torch.Tensor) -> torch.Tensor:
        """[N, H]: the largest value of a row's edges."""
        target = self.row[:, None].expand_as(of_edges)
        return torch.zeros_like(self.lse).detach().scatter_reduce(0, target, of_edges.detach(), "amax")

    def allowed(self, rate: float) -> dict[str, torch.Tensor]:
        """Of output and lse, [N, H]."""
        return {
            "output": self.error * self._most(self.values) / (1 - rate) + self.tiny,
            "lse": self.error * (1 + self.lse.abs()),
        }

    def gradients_allowed(self, grad: torch.Tensor, grad_lse: torch.Tensor, k: torch.Tensor) -> dict[str, Any]:
        """[N, H], [M, H_kv] of rows of q, k and v; "edge": [E, H], of anything else by what an edge adds to it."""
        row, error = self.row, self.error[self.row]
        size = grad.norm(dim=-1)[row]
        most = (self._most(self.values)[row] + self.values) * size
        of_score = (error * (self.weight + self.softmax) + self.tiny) * (most + grad_lse.abs()[row]) * self.steepness
        of_key = of_score * self.scale * (1 + self.queries.norm(dim=-1))
        of_query = of_score * self.scale * self.keys.norm(dim=-1)

        def at_columns(of_edges: torch.Tensor) -> torch.Tensor:
            found = of_edges.new_zeros(len(k), of_edges.shape[1]).index_add(0, self.col, of_edges)
            return found.unflatten(1, (k.shape[1], -1)).sum(-1)

        return {
            "q": torch.zeros_like(self.lse).index_add(0, row, of_query),
            "k": at_columns(of_key),
            "v": at_columns((error * self.weight + self.tiny) * size),
            "edge": of_score * (1 + self.product) + error * self.weight * size,
        }


def check(kind: str, sizes: tuple[int, ...], dtype: torch.dtype, case: Case, backend: str, device: str) -> None:
    heads, kv_heads, dim, value_dim, batch = sizes
    is_fused, is_plain = backend == "fused3s", heads == kv_heads and not batch
    case = case._replace(row=case.row.to(device), col=case.col.to(device), rate=case.rate if is_plain else 0.0)
    generator = torch.Generator().manual_seed(case.seed)

    def randn(*size: int, of: torch.dtype = dtype) -> torch.Tensor:
        drawn = torch.randn(size, generator=generator).to(device, of)
        return drawn.mT.contiguous().mT if case.strided and len(size) > 1 else drawn

    lead = (batch,) if batch else ()
    (rows, cols), ends = case.shape, (heads, kv_heads, kv_heads)
    tensors = [randn(*lead, n, h, d) for n, h, d in zip((rows, cols, cols), ends, (dim, dim, value_dim), strict=True)]
    data = edge_data(kind, case, sizes, dtype, randn)
    named = dict(zip("qkv", tensors, strict=True)) | leaves_of(data)
    if case.with_gradients:
        for each in named.values():
            each.requires_grad_()
    graph = torch.stack([case.col, case.row])
    if case.form == "csr":
        counts = torch.bincount(case.row, minlength=rows)
        graph = torch.nn.functional.pad(counts.cumsum(0), (1, 0)), case.col
    plan = plan_attention(
        graph,
        shape=case.shape,
        backend=backend,
        device=device,
        dtype=dtype,
        head_dim=max(dim, value_dim),
        num_heads=heads * max(batch, 1),
        num_kv_heads=kv_heads * max(batch, 1),
        edge_data=data is not None,
        backward=case.with_gradients,
        reorder=case.reorder if is_fused else "none",
    )
    dropout = Dropout(case.rate, torch.tensor([case.seed], device=device)) if case.rate else 0.0
    options = {"scale": case.scale, "edges": data, "dropout": dropout}
    poison = partial(poisoned_buffers, pytest.MonkeyPatch()) if is_fused else nullcontext
    with poison():
        found = plan(*named_rows(named), return_lse=is_fused, **options)
    output, lse = found if is_fused else (found, None)
    exact = {name: each.detach().double().requires_grad_() for name, each in named.items()}
    of_batch = [
        Oracle(
            kind,
            case,
            *([each[b] for each in named_rows(exact)] if batch else named_rows(exact)),
            exact,
            dtype,
            None if data is None else data.types,
        )
        for b in range(max(batch, 1))
    ]
    assume(not any(each.near_kink for each in of_batch))
    grad, grad_lse = randn(*output.shape), randn(*output.shape[:-1], of=FLOAT) * (lse is not None)

    def of(tensor: torch.Tensor, b: int) -> torch.Tensor:
        return tensor[b] if batch else tensor

    loss = 0.0
    for b, oracle in enumerate(of_batch):
        allowed = oracle.allowed(case.rate)
        assert_near("output", of(output, b), oracle.output, allowed["output"])
        if lse is not None:
            assert_near("lse", of(lse, b)[..., None], oracle.lse[..., None], allowed["lse"])
        finite = oracle.lse.where(oracle.lse > -torch.inf, 0.0)
        loss = loss + (oracle.output * of(grad, b)).sum() + (finite * of(grad_lse, b)).sum()
    if not case.with_gradients:
        return
    results, factors = ([output], [grad]) if lse is None else ([output, lse], [grad, grad_lse])
    with poison():
        found = torch.autograd.grad(results, list(named.values()), factors, allow_unused=True)
    wanted = torch.autograd.grad(loss, list(exact.values()), allow_unused=True)
    bounds = [
        each.gradients_allowed(of(grad, b).double(), of(grad_lse, b).double(), of(tensors[1], b))
        for b, each in enumerate(of_batch)
    ]
    largest = max((float(each.detach().abs().max()) for name, each in named.items() if each.numel()), default=1.0)
    for name, left, right in zip(named, found, wanted, strict=True):
        shape = named[name].shape
        left, right = (torch.zeros(shape, device=device) if each is None else each for each in (left, right))
        if name in ("q", "k", "v"):
            for b, bound in enumerate(bounds):
                assert_near(f"gradient of {name}", of(left, b), of(right, b).double(), bound[name])
        elif left.numel():
            of_edges = sum(bound["edge"].sum(1) for bound in bounds)
            is_of_edges = name in ("bias", "multiplier", "features", "c")
            bound = (of_edges if is_of_edges else of_edges.sum().expand(shape[0])) * max(largest, 1) ** 2
            left, right = (each.reshape(shape[0], -1) for each in (left, right))
            assert_near(f"gradient of {name}", left, right.double(), bound)


def named_rows(named: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [named[name] for name in "qkv"]


def assert_near(what: str, found: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor) -> None:
    """Each row [..., d] is within `allowed`; what is -inf is so exactly."""
    assert not found.isnan().any(), f"{what}: NaN"
    is_finite = expected.isfinite()
    assert torch.equal(found.isfinite(), is_finite), f"{what}: infinite elsewhere"
    error = torch.where(is_finite, found.detach().double() - expected.detach(), 0.0).norm(dim=-1)
    allowed = torch.where(allowed.isfinite(), allowed, 0.0)
    ratio = float(torch.where(error > 0, error / allowed, 0.0).max()) if error.numel() else 0.0
    assert ratio <= 1, f"{what}: off by {ratio:.2f} of the allowed error, which is at most {allowed.max():.2e}"


def draw_cases(instance: int, count: int, largest: int, backend: str, device: str, dtype: torch.dtype) -> None:
    kind, sizes, _ = INSTANCES[instance]

    @seed(instance)
    @settings(max_examples=max(1, round(count / len(INSTANCES))), deadline=None, database=None, print_blob=True)
    @given(cases(largest))
    def drawn(case: Case) -> None:
        check(kind, sizes, dtype, case, backend, device)

    drawn()


@pytest.mark.parametrize("instance", range(len(INSTANCES)), ids=NAMES)
def test_backends_in_torch(instance):
    dtype = INSTANCES[instance][2]
    backend = ("scatter", "csr_unfused")[instance % 2]
    draw_cases(instance, CASES or 60, 40, backend, "cpu", {HALF: DOUBLE}.get(dtype, dtype))


@NEEDS_COMPILER
@pytest.mark.parametrize("instance", range(len(INSTANCES)), ids=NAMES)
def test_kernels_on_the_cpu(instance):
    mode = MODES[("late", "early", "random")[instance % 3]]
    with cuda_on_cpu(mode):
        draw_cases(instance, CASES or 60, 40, "fused3s", "cpu", INSTANCES[instance][2])


@pytest.mark.gpu
@pytest.mark.parametrize("instance", range(len(INSTANCES)), ids=NAMES)
def test_kernels_on_a_gpu(instance):
    draw_cases(instance, CASES or 200, 200, "fused3s", "cuda", INSTANCES[instance][2])
