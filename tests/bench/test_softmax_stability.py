"""The emulated softmaxes and their rows."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from bench_runs import config

from bench import softmax_stability
from bench.runner import Context
from bench.softmax_stability import EMULATED, KERNELS, ONLINE, Scores, emulate
from common.provenance import provenance

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Small(Scores):
    num_rows: int = 64
    degree: int = 20
    dim: int = 16


def scores(family: str, size: int, device: torch.device = CPU) -> Scores:
    return Small(family, size, device)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(softmax_stability, "Scores", Small)


def rows_of(one: Scores) -> dict:
    settings = config("stability")
    context = Context(settings, "c.yaml", provenance(one.device), one.device)
    context.extra = {"nodes": one.num_rows, "nnz": one.num_rows * one.degree}
    cases = softmax_stability.cases(settings, one.device)
    first = [case for case in cases if (case.scores, case.score_range) == (cases[0].scores, cases[0].score_range)]
    own = [replace(case, scores=one.family, score_range=one.size) for case in first]
    rows = [row for case in own for row in softmax_stability.measure(context, case)]
    return {(row.backend if row.variant == "none" else row.variant, row.dtype, row.metric): row for row in rows}


def test_scores_have_their_range():
    assert scores("spread", 32).exact_scores.abs().max() == pytest.approx(32)
    shifted, plain = scores("shift", -88).exact_scores, scores("shift", 0).exact_scores
    torch.testing.assert_close(shifted, plain - 88)
    torch.testing.assert_close(scores("shift", -88).expected, scores("shift", 0).expected)
    columns = scores("spread", 1).columns
    assert (columns.diff(dim=1) > 0).all()


@pytest.mark.parametrize("softmax", EMULATED)
def test_an_emulation_without_rounding_is_the_softmax(softmax):
    one = scores("spread", 40)
    output = emulate(softmax, one.exact_scores, one.inputs[2][one.columns].double())
    torch.testing.assert_close(output, one.expected, rtol=1e-12, atol=1e-12)


def test_a_type_rounds_every_step():
    one = scores("spread", 4)
    for softmax in EMULATED:
        half, single = (rows_of(one)[softmax, dtype, "relative_error"] for dtype in ("float16", "float32"))
        assert 1e-4 < half.value < 1e-2
        assert 1e-8 < single.value < 1e-6
        assert (half.status, half.repeats) == ("ok", 64)
        assert half.value <= half.p90 <= half.relative_error


@pytest.mark.parametrize(("dtype", "limit"), [("float16", math.log(65504)), ("float32", math.log(3.4e38))])
def test_only_naive_overflows_and_where_the_type_ends(dtype, limit):
    below, above = rows_of(scores("shift", int(limit) - 7)), rows_of(scores("shift", int(limit) + 8))
    assert below["naive", dtype, "relative_error"].status == "ok"
    naive = above["naive", dtype, "relative_error"]
    assert (naive.status, naive.value, naive.reason) == ("error", None, "no row of the output is finite")
    for softmax in ("stable", *ONLINE):
        assert above[softmax, dtype, "relative_error"].status == "ok"


def test_some_rows_that_overflow_are_a_wrong_row_with_the_others_error():
    naive = rows_of(scores("spread", 17))["naive", "float16", "relative_error"]
    assert naive.status == "wrong"
    assert 0 < naive.repeats < 64
    assert naive.reason == f"{64 - naive.repeats} of 64 rows are not finite"


@pytest.mark.parametrize("softmax", EMULATED)
def test_overflow_of_the_naive_softmax_breaks_its_gradients(softmax):
    def gradient(size: int, dtype: torch.dtype) -> torch.Tensor:
        one = scores("shift", size)
        score = one.exact_scores.to(dtype).requires_grad_()
        emulate(softmax, score, one.inputs[2].to(dtype)[one.columns]).square().sum().backward()
        return score.grad.double()

    for size in (0, 16):  # exp(16) overflows in float16
        found, expected = gradient(size, torch.float16), gradient(size, torch.float64)
        if softmax == "naive" and size:
            assert not found.isfinite().any(1).all()
        else:
            assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.gpu
def test_the_kernels_run_and_only_the_naive_one_overflows():
    device = torch.device("cuda", torch.cuda.current_device())
    rows = rows_of(scores("shift", 104, device))
    found = {key[0]: row for key, row in rows.items() if key[2] == "relative_error" and key[0] in KERNELS}
    assert {*found} == {*KERNELS}
    assert found.pop("flashsparse_naive").value is None
    assert {row.status for row in found.values()} == {"ok"}
    assert all(row.relative_error < 5e-3 for row in found.values())
