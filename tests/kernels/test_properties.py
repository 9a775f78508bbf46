"""Drawn graphs, inputs and edge data against the formula in float64: outputs, log-sum-exp and gradients.

FUSED3S_CASES=20000 draws so many cases for each test function, in place of few. A test item draws all cases of one
instance, so that no two processes of pytest-xdist compile the same kernels. Draws are the same in every run; a failure
prints its smallest case.

    FUSED3S_CASES=20000 pytest -n 14 --dist worksteal -m gpu tests/kernels/test_properties.py
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
from torch.nn.functional import leaky_relu, pad

from fused3s import Dropout, EdgeData, ScoreTerm, plan_attention
from fused3s.terms.dropout import kept_edges
from tests.cuda_shim.cuda_on_cpu import MODES, NEEDS_COMPILER, cuda_on_cpu

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = int(os.environ.get("FUSED3S_CASES", "0"))
HALF, BFLOAT, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
UNIT = {HALF: 2**-11, BFLOAT: 2**-8, FLOAT: 2**-21, DOUBLE: 2**-46}  # relative error of a rounding; of a product
UNITS = 3  # roundings between input and result
TINY = {HALF: 2**-24}  # least positive number, where small weights are rounded to it
SLOPE, CLAMP, CAP, STEP = 0.2, 0.8, 0.7, 0.1
KINK = 1e-5  # scores nearer to a kink may fall on its other side
# H, H_kv, d, d_v, B (0: no batch)
SHAPES = (
    *((1, 1, 64, 64, 0), (4, 4, 8, 8, 0), (4, 2, 16, 16, 0), (8, 1, 16, 16, 0), (2, 2, 7, 5, 0), (4, 2, 3, 6, 2)),
    *((1, 1, 128, 128, 0), (3, 3, 13, 13, 0), (2, 2, 32, 48, 0)),
)
KINDS = "none", "bias", "clamp", "features", "types", "factor", "GAT", "cap", "distance", "where", "additive"
ROUNDED = ("features", "types", "factor")  # kinds whose keys may be rounded
INSTANCES = [
    (kind, SHAPES[(i + 4 * j) % len(SHAPES)], dtype)
    for j, dtype in enumerate((HALF, BFLOAT, FLOAT))
    for i, kind in enumerate(KINDS)
]
NAMES = [f"{kind}-{'x'.join(map(str, shape))}-{str(dtype)[6:]}" for kind, shape, dtype in INSTANCES]
ALWAYS = NAMES.index("bias-4x4x8x8x0-float16")  # on the CPU; the others if cases are asked for


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


def formula(
    kind: str, case: Case, ends: list[torch.Tensor], data: dict[str, torch.Tensor], *, is_bound: bool = False
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Scores [E, H] and values [E, H, d_v] of the edges, and whether a rounding may choose another branch of a score.

    is_bound: of positive tensors, a score that grows with each of them at least as fast as the score does at most.
    """
    (q, k, v), row, col, scale = ends, case.row, case.col, abs(case.scale) if is_bound else case.scale
    per = q.shape[1] // k.shape[1]

    def spread(tensor: torch.Tensor, axis: int = 1) -> torch.Tensor:
        return tensor.repeat_interleave(per, axis)

    query, key, values, kink = q[row], spread(k)[col], spread(v)[col], None
    if kind == "types":
        key = key * spread(data["type_weight"])[torch.arange(len(row), device=row.device) % 3]
    if kind == "factor":
        key = key * torch.einsum("er,rhd->ehd", data["features"], spread(data["key_factor"]))
    if kind == "features":
        key = key + torch.einsum("er,hdr->ehd", data["features"], spread(data["key_weight"], 0))
        values = values + torch.einsum("er,hdr->ehd", data["features"], spread(data["value_weight"], 0))
    score = scale * (query * key).sum(-1)
    match kind:
        case "bias":
            score = score * data["multiplier"][:, None] + data["bias"]
        case "clamp":
            score = score + data["bias"][:, None]
            kink, clamped = score.abs() - CLAMP, score.clamp(-CLAMP, CLAMP)
            score = score if is_bound else clamped
        case "GAT":
            score = data["a"][row] + spread(data["b"])[col]
            score = score if is_bound else leaky_relu(score, SLOPE)
        case "cap":
            score = (score if is_bound else CAP * torch.tanh(score / CAP)) + data["b"][col, None]
        case "distance":
            score = score + (1 if is_bound else -1) * data["d"] * data["c"][:, None]
        case "where":
            of_row, factor = data["a"][row, None], data["c"]
            kink, low, high = score - STEP, score * factor, torch.sigmoid(score) + of_row
            score = low + score + of_row if is_bound else torch.where(score < STEP, low, high)
        case "additive":
            hidden = query + key if is_bound else leaky_relu(query + key, SLOPE)
            score = scale * (hidden * spread(data["additive_weight"], 0)).sum(-1)
    return score, values, kink is not None and bool((kink.abs() < KINK).any())


class Oracle:
    """Attention in float64, edge by edge, and how far a result may be off.

    Attributes:
        output, lse: [N, H, d_v] and [N, H].
        near_kink: from `formula`.
    """

    def __init__(self, kind: str, case: Case, ends, data: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
        self._case, self._arguments, row = case, (kind, case), case.row
        score, values, self.near_kink = formula(kind, case, ends, data)
        target = row[:, None].expand_as(score)
        self._zeros = ends[0].detach().new_zeros(ends[0].shape[:2])
        top = self._zeros.sub(torch.inf).scatter_reduce(0, target, score.detach(), "amax")
        top = top.where(top > -torch.inf, 0.0)
        weight = torch.exp(score - top[row])
        total = self._zeros.index_add(0, row, weight)
        self.lse, weight = top + total.log(), weight / total[row]
        self._softmax = weight.detach()
        if case.rate:
            dropout = Dropout(case.rate, torch.tensor([case.seed], device=row.device))
            weight = weight * kept_edges(dropout, row, case.col, score.shape[1]) / (1 - case.rate)
        zeros = self._zeros.new_zeros(*self._zeros.shape, values.shape[2])
        self.output = zeros.index_add(0, row, weight[..., None] * values)
        self._weight, self._values = weight.detach(), values.detach().norm(dim=-1)
        size, _, _ = formula(kind, case, *positive(ends, data), is_bound=True)
        of_score = UNIT[dtype] if kind in ROUNDED else min(UNIT[dtype], UNIT[FLOAT])
        self._error = UNITS * (UNIT[dtype] + of_score * self._most(size))
        self._tiny = TINY.get(dtype, 0.0)

    def _most(self, of_edges: torch.Tensor) -> torch.Tensor:
        """[N, H]: the largest value of a row's edges."""
        target = self._case.row[:, None].expand_as(of_edges)
        return self._zeros.scatter_reduce(0, target, of_edges.detach(), "amax")

    def allowed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of rows of output and of lse, [N, H] each."""
        output = self._error * self._most(self._values) / (1 - self._case.rate) + self._tiny
        return output, self._error * (1 + self.lse.detach().abs())

    def bound(self, ends, data: dict[str, torch.Tensor], grad: torch.Tensor, grad_lse: torch.Tensor) -> torch.Tensor:
        """A number whose gradients are the allowed errors of the gradients; of positive tensors."""
        row, error = self._case.row, self._error[self._case.row]
        products = grad.norm(dim=-1)[row] * (self._most(self._values)[row] + self._values)  # of dO and v
        of_scores = (error * (self._weight + self._softmax) + self._tiny) * (products + grad_lse.abs()[row])
        of_values = (error * self._weight + self._tiny)[..., None] * grad.abs()[row]
        score, values, _ = formula(*self._arguments, ends, data, is_bound=True)
        return (score * of_scores).sum() + (values * of_values).sum()


def positive(ends, data: dict[str, torch.Tensor]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    return [each.abs() for each in ends], {name: each.abs() for name, each in data.items()}


def check(kind: str, sizes: tuple[int, ...], dtype: torch.dtype, case: Case, backend: str, device: str) -> None:
    heads, kv_heads, dim, value_dim, batch = sizes
    is_fused, is_plain = backend == "fused3s", heads == kv_heads and not batch
    # Rows of the mask of grouped queries, and its heads with a batch, are those of the planned graph.
    case = case._replace(row=case.row.to(device), col=case.col.to(device), rate=case.rate if is_plain else 0.0)
    generator = torch.Generator().manual_seed(case.seed)

    def randn(*size: int, of: torch.dtype = dtype) -> torch.Tensor:
        drawn = torch.randn(size, generator=generator).to(device, of)
        return drawn.mT.contiguous().mT if case.strided and len(size) > 1 else drawn

    (rows, cols), lead = case.shape, (batch,) if batch else ()
    columns = (rows, heads, dim), (cols, kv_heads, dim), (cols, kv_heads, value_dim)
    tensors = {name: randn(*lead, *size) for name, size in zip("qkv", columns, strict=True)}
    edges = edge_data(kind, case, sizes, dtype, randn)
    tensors |= leaves_of(edges)
    if case.with_gradients:
        for each in tensors.values():
            each.requires_grad_()
    graph = torch.stack([case.col, case.row])
    if case.form == "csr":
        graph = pad(torch.bincount(case.row, minlength=rows).cumsum(0), (1, 0)), case.col
    plan = plan_attention(
        graph,
        shape=case.shape,
        backend=backend,
        device=device,
        dtype=dtype,
        head_dim=max(dim, value_dim),
        num_heads=heads * max(batch, 1),
        num_kv_heads=kv_heads * max(batch, 1),
        edge_data=edges is not None,
        backward=case.with_gradients,
        reorder=case.reorder if is_fused else "none",
    )
    dropout = Dropout(case.rate, torch.tensor([case.seed], device=device)) if case.rate else 0.0
    poison = partial(poisoned_buffers, pytest.MonkeyPatch()) if is_fused else nullcontext
    with poison():
        q, k, v = (tensors[name] for name in "qkv")
        results = plan(q, k, v, scale=case.scale, edges=edges, dropout=dropout, return_lse=is_fused)
    results = list(results) if is_fused else [results]
    factors = [randn(*results[0].shape), randn(*results[0].shape[:-1], of=FLOAT)][: len(results)]

    exact = {name: each.detach().double().requires_grad_() for name, each in tensors.items()}
    sizes_of = {name: each.detach().abs().requires_grad_() for name, each in exact.items()}
    loss = bound = 0.0
    for b in range(batch) if batch else (...,):
        oracle = Oracle(kind, case, [exact[name][b] for name in "qkv"], exact, dtype)
        assume(not oracle.near_kink)
        expected = [oracle.output, oracle.lse]
        for what, found, wanted, allowed in zip(("output", "lse"), results, expected, oracle.allowed(), strict=False):
            shape = (*wanted.shape[:2], -1)
            assert_near(what, found[b].reshape(shape), wanted.reshape(shape), allowed)
        given = [each[b].double() for each in factors] + [torch.zeros_like(oracle.lse)] * (2 - len(factors))
        finite = oracle.lse.where(oracle.lse > -torch.inf, 0.0)
        loss = loss + (oracle.output * given[0]).sum() + (finite * given[1]).sum()
        bound = bound + oracle.bound([sizes_of[name][b] for name in "qkv"], sizes_of, *given)
    if not case.with_gradients:
        return
    with poison():
        found = torch.autograd.grad(results, list(tensors.values()), factors, allow_unused=True)
    wanted, allowed = (
        torch.autograd.grad(total, list(of.values()), allow_unused=True, materialize_grads=True)
        for total, of in ((loss, exact), (bound, sizes_of))
    )
    for name, left, right, limit in zip(tensors, found, wanted, allowed, strict=True):
        if left is None:
            assert not right.any(), f"no gradient of {name}"
        else:
            left, right, limit = (each.flatten(1) if each.dim() > 1 else each[:, None] for each in (left, right, limit))
            subnormal = TINY.get(left.dtype, 0.0) / 2 * left.shape[-1] ** 0.5  # error of rounding results near 0
            assert_near(f"gradient of {name}", left, right, limit.norm(dim=-1) + subnormal)


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
    draw_cases(instance, CASES or 165, 40, backend, "cpu", {HALF: DOUBLE}.get(dtype, dtype))


@NEEDS_COMPILER
@pytest.mark.parametrize("instance", range(len(INSTANCES)), ids=NAMES)
def test_kernels_on_the_cpu(instance):
    if not (CASES or instance == ALWAYS):
        pytest.skip("compiling its kernels takes long: FUSED3S_CASES=5000 draws cases for them")
    with cuda_on_cpu(MODES[("late", "early", "random")[instance % 3]]):
        draw_cases(instance, CASES or 330, 40, "fused3s", "cpu", INSTANCES[instance][2])


@pytest.mark.gpu
@pytest.mark.parametrize("instance", range(len(INSTANCES)), ids=NAMES)
def test_kernels_on_a_gpu(instance):
    draw_cases(instance, CASES or 330, 200, "fused3s", "cuda", INSTANCES[instance][2])
