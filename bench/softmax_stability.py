"""The paper's section on mixed precision and stability, measured: what naive, stable and online softmax lose.

Two families of scores on a random graph whose rows all have the same number of edges:

    spread R   normal scores, scaled until the largest has magnitude R
    shift R    normal scores with R added to each, which changes no right output

Back ends named emulated_* are the arithmetic alone, in torch, with every intermediate result rounded to one type:

    emulated_naive    exp(s_i) / sum_j exp(s_j)
    emulated_stable   exp(s_i - m) / sum_j exp(s_j - m), m the row's maximum
    emulated_online   the same over blocks of 8 edges with a running maximum, sum and output, rescaled (Algorithm 1)

The others are the real kernels: `fused3s_paper` and `fused3s` (online), `flashsparse_naive`, `flashsparse_stable`, all
fp16 in with fp32 scores and sums as in the paper's precision table, and `dfgnn_tiling` (stable, fp32). Everything is
compared with float64 on the same inputs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

import kernels
from bench.checks import row_errors
from bench.kernels import FLOAT32, classify
from bench.provenance import NONE, Provenance
from bench.records import Row
from bench.timers import NOT_MEASURED, Spread
from kernels.formats.csr import CSRPattern

SPREADS = (1, 2, 4, 8, 11, 16, 32, 64, 80, 88, 96, 104, 128, 256)
SHIFTS = (0, *(sign * size for size in (4, 8, 11, 16, 32, 64, 80, 88, 96, 104, 128, 256, 1024) for sign in (1, -1)))
KERNELS = ("fused3s", "fused3s_paper", "flashsparse_naive", "flashsparse_stable", "dfgnn_tiling")
LOST = 0.1  # relative error of a row that lost its result rather than some bits
EMULATED = ("emulated_naive", "emulated_stable", "emulated_online")
ONLINE_BLOCK = 8  # keys: a TCB of the paper


@dataclass(frozen=True, eq=False)
class Scores:
    """Inputs whose scores are of one family and range.

    Attributes:
        family, size: "spread" or "shift", and R.
        num_rows, degree, dim: of the graph and of a head.
    """

    family: str
    size: int
    device: torch.device
    num_rows: int = 256
    degree: int = 64
    dim: int = 64

    @property
    def name(self) -> str:
        """Such as "spread 16" or "shift -88"; figures read it."""
        return f"{self.family} {self.size}"

    @cached_property
    def columns(self) -> torch.Tensor:
        """[num_rows, degree] int64: distinct ascending columns of each row."""
        order = torch.rand(self.num_rows, self.num_rows, generator=torch.Generator().manual_seed(1)).argsort(1)
        return order[:, : self.degree].sort(1).values.to(self.device)

    @cached_property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v [num_rows, dim] float16; the last dimension of Q and K makes the shift."""
        generator = torch.Generator().manual_seed(2)
        q, k, v = torch.randn(3, self.num_rows, self.dim, generator=generator).to(self.device)
        q[:, -1] = 1
        k[:, -1] = self.size * self.dim**0.5 if self.family == "shift" else 0
        return q.half(), k.half(), v.half()

    @cached_property
    def scale(self) -> float:
        if self.family == "shift":
            return self.dim**-0.5
        return self.size / self._products.abs().max().item()

    @cached_property
    def _products(self) -> torch.Tensor:
        q, k, _ = self.inputs
        return torch.einsum("nd,ned->ne", q.double(), k[self.columns].double())

    @property
    def exact_scores(self) -> torch.Tensor:
        """[num_rows, degree] float64."""
        return self._products * self.scale

    @cached_property
    def expected(self) -> torch.Tensor:
        """[num_rows, dim] float64."""
        weight = torch.softmax(self.exact_scores, 1)
        return torch.einsum("ne,ned->nd", weight, self.inputs[2][self.columns].double())

    def pattern(self) -> CSRPattern:
        indptr = torch.arange(0, self.columns.numel() + 1, self.degree, device=self.device)
        return CSRPattern(indptr, self.columns.flatten().int(), (self.num_rows, self.num_rows))


def emulate(softmax: str, score: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One of EMULATED, rounding every intermediate result to the type of the inputs, which the output has too.

    Args:
        score: [num_rows, degree]; value: [num_rows, degree, dim].
    """
    if softmax == "emulated_online":
        return _online(score, value)
    maximum = score.max(1, keepdim=True).values
    weight = torch.exp(score - maximum if softmax == "emulated_stable" else score)
    total = torch.zeros_like(weight[:, 0])
    for column in weight.unbind(1):
        total = total + column
    output = torch.zeros_like(value[:, 0])
    for column, row in zip((weight / total[:, None]).unbind(1), value.unbind(1), strict=True):
        output = output + column[:, None] * row
    return output


def _online(score: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    maximum = torch.full_like(score[:, 0], -torch.inf)
    total, output = torch.zeros_like(maximum), torch.zeros_like(value[:, 0])
    for block, rows in zip(score.split(ONLINE_BLOCK, 1), value.split(ONLINE_BLOCK, 1), strict=True):
        new_maximum = torch.maximum(maximum, block.max(1).values)
        rescale = torch.exp(maximum - new_maximum)
        total, output, maximum = total * rescale, output * rescale[:, None], new_maximum
        for column, row in zip(torch.exp(block - maximum[:, None]).unbind(1), rows.unbind(1), strict=True):
            total = total + column
            output = output + column[:, None] * row
    return output / total[:, None]


def all_scores(device: torch.device) -> list[Scores]:
    sizes = {"spread": SPREADS, "shift": sorted(SHIFTS)}
    return [Scores(family, size, device) for family in sizes for size in sizes[family]]


def measure_scores(scores: Scores, environment: Provenance) -> Iterator[Row]:
    """Two rows for each kernel that runs on the device and each emulation in float16 and float32.

    relative_error is of the rows of O that are finite: their number is `repeats`, the median and percentiles are over
    them, and the column `relative_error` holds the largest. share_not_finite is of all rows.
    """
    outputs = [(name, dtype) for name in EMULATED for dtype in (torch.float16, torch.float32)]
    available = kernels.list_backends(scores.device)
    outputs += [
        (name, torch.float32 if name in FLOAT32 else torch.float16)
        for name in KERNELS
        if available[name].unavailable is None
    ]
    for backend, dtype in outputs:
        shared = {
            **environment.model_dump(),
            "dataset": scores.name,
            "data_sha256": NONE,
            "data_source": "synthetic",
            "nodes": scores.num_rows,
            "nnz": scores.columns.numel(),
            "graphs": 1,
            "dim": scores.dim,
            "heads": 1,
            "blocks": 0,
            "dtype": str(dtype).removeprefix("torch."),
            "out_dtype": str(dtype if backend in EMULATED else torch.float32).removeprefix("torch."),
            "backend": backend,
            "scope": "attention",
            "unit": "1",
            "config": "scripts/stability.py",
            "config_sha": NONE,
        }
        try:
            output = _output(backend, dtype, scores)
            errors = row_errors(output, scores.expected)
        except Exception as error:  # whatever it is, the others go on
            status, reason = classify(error)
            yield Row(**shared, **NOT_MEASURED, metric="relative_error", status=status, reason=reason)
            continue
        finite = output.isfinite().all(1)
        share = Spread.of([1 - finite.double().mean().item()])
        yield Row(**shared, **share.columns(), metric="share_not_finite", status="unchecked")
        errors = errors[finite].tolist()
        if not errors:
            reason = "no row of the output is finite"
            yield Row(**shared, **NOT_MEASURED, metric="relative_error", status="error", reason=reason)
            continue
        check = {"status": "ok"}
        if len(errors) < scores.num_rows:
            bad = scores.num_rows - len(errors)
            check = {"status": "wrong", "reason": f"{bad} of {scores.num_rows} rows are not finite"}
        elif max(errors) > LOST:
            check = {"status": "wrong", "reason": f"a row is off by {max(errors):.2g} of its norm"}
        columns = Spread.of(errors).columns()
        yield Row(**shared, **columns, **check, metric="relative_error", relative_error=max(errors))


def _output(backend: str, dtype: torch.dtype, scores: Scores) -> torch.Tensor:
    if backend in EMULATED:
        value = scores.inputs[2].to(dtype)[scores.columns]
        return emulate(backend, scores.exact_scores.to(dtype), value)
    plan = kernels.plan_attention(scores.pattern(), backend=backend, device=scores.device)
    q, k, v = (tensor.to(dtype) for tensor in scores.inputs)
    return plan(q, k, v, scale=scores.scale, out_dtype=torch.float32)
