"""Errors of naive, stable and online softmax over ranges of scores (paper, section on mixed precision and stability).

Two distributions of scores on a random graph whose rows all have the same number of edges:

    spread R   normal scores, scaled so that the largest has magnitude R
    shift R    normal scores plus R, which does not change the correct output

Backend "emulated" is the arithmetic in torch, with every intermediate result rounded to one type. Its variants:

    naive      exp(s_i) / sum_j exp(s_j)
    stable     exp(s_i - m) / sum_j exp(s_j - m), m the maximum of the row
    online_B   the same over blocks of B edges with a running maximum, sum and output, rescaled at each block
               (Algorithm 1). A TCB of the paper has 8 keys; a block of 256 is the whole row, without any rescaling

The kernels are `fused3s_paper` and `fused3s` (online), `flashsparse_naive` and `flashsparse_stable`, all with fp16
inputs and fp32 scores and sums as in the paper's precision table, and `dfgnn_tiling` (stable, fp32). All outputs are
compared with float64 on the same inputs.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

import fused3s
from bench.baselines import REGISTRY
from bench.checks import row_errors
from bench.runner import Case, Context
from common.columns import dtype_name
from common.records import NONE, Row
from common.timers import Spread
from configs.bench import BenchConfig
from fused3s.graph.csr import CSRPattern

SPREADS = (1, 2, 4, 8, 11, 16, 32, 64, 80, 88, 96, 104, 128, 256)
SHIFTS = (0, *(sign * size for size in (4, 8, 11, 16, 32, 64, 80, 88, 96, 104, 128, 256, 1024) for sign in (1, -1)))
KERNELS = ("fused3s", "fused3s_paper", "flashsparse_naive", "flashsparse_stable", "dfgnn_tiling")
LOST = 0.1  # relative error of a row that lost its result and not only some bits
ONLINE_BLOCKS = (8, 16, 64, 256)  # keys
ONLINE = tuple(f"online_{size}" for size in ONLINE_BLOCKS)
EMULATED = ("naive", "stable", *ONLINE)


@dataclass(frozen=True, eq=False)
class Scores:
    """Inputs whose scores have one distribution and range.

    Attributes:
        family, size: "spread" or "shift", and R.
        num_rows, degree: size of the graph.
        dim: of the head.
    """

    family: str
    size: int
    device: torch.device
    num_rows: int = 512
    degree: int = 256
    dim: int = 64

    @cached_property
    def columns(self) -> torch.Tensor:
        """[num_rows, degree] int64: distinct columns of each row, ascending."""
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
    """One of EMULATED, with every intermediate result rounded to the type of the inputs.

    Args:
        score: [num_rows, degree]; value: [num_rows, degree, dim].
    """
    if softmax in ONLINE:
        return _online(score, value, int(softmax.removeprefix("online_")))
    maximum = score.max(1, keepdim=True).values
    weight = torch.exp(score - maximum if softmax == "stable" else score)
    total = torch.zeros_like(weight[:, 0])
    for column in weight.unbind(1):
        total = total + column
    output = torch.zeros_like(value[:, 0])
    for column, row in zip((weight / total[:, None]).unbind(1), value.unbind(1), strict=True):
        output = output + column[:, None] * row
    return output


def _online(score: torch.Tensor, value: torch.Tensor, block_size: int) -> torch.Tensor:
    maximum = torch.full_like(score[:, 0], -torch.inf)
    total, output = torch.zeros_like(maximum), torch.zeros_like(value[:, 0])
    for block, rows in zip(score.split(block_size, 1), value.split(block_size, 1), strict=True):
        new_maximum = torch.maximum(maximum, block.max(1).values)
        rescale = torch.exp(maximum - new_maximum)
        total, output, maximum = total * rescale, output * rescale[:, None], new_maximum
        for column, row in zip(torch.exp(block - maximum[:, None]).unbind(1), rows.unbind(1), strict=True):
            total = total + column
            output = output + column[:, None] * row
    return output / total[:, None]


def cases(config: BenchConfig, device: torch.device) -> list[Case]:
    """Each kernel that runs on the device and each emulation in float16 and float32, over all scores."""
    first = Case("emulated", "attention", Scores.dim, metric="relative_error", unit="1")
    alone = [
        replace(first, dtype=dtype, out_dtype=dtype, variant=softmax)
        for softmax in EMULATED
        for dtype in ("float16", "float32")
    ]
    alone += [
        replace(first, backend=name, dtype=dtype_name(REGISTRY[name].computes_in), out_dtype="float32")
        for name in KERNELS
        if REGISTRY[name].unavailable(device) is None
    ]
    sizes = {"spread": SPREADS, "shift": sorted(SHIFTS)}
    return [
        replace(case, scores=family, score_range=size) for family in sizes for size in sizes[family] for case in alone
    ]


def begin(context: Context) -> None:
    graph = {"dataset": "uniform-degree", "data_source": "synthetic", "graphs": 1}
    context.extra = graph | {"nodes": Scores.num_rows, "nnz": Scores.num_rows * Scores.degree}


def measure(context: Context, case: Case) -> list[Row]:
    """relative_error: median and percentiles over the finite rows of O, whose number is `repeats`; the column
    `relative_error` holds the maximum."""
    family = (case.scores, case.score_range)
    scores = context.keep("scores", family, lambda: Scores(*family, context.device))
    output = _output(case, scores)
    errors = row_errors(output, scores.expected)[output.isfinite().all(1)].tolist()
    if not errors:
        return [context.row(case, status="error", reason="no row of the output is finite")]
    check = {"status": "ok"}
    if len(errors) < scores.num_rows:
        bad = scores.num_rows - len(errors)
        check = {"status": "wrong", "reason": f"{bad} of {scores.num_rows} rows are not finite"}
    elif max(errors) > LOST:
        check = {"status": "wrong", "reason": f"a row is off by {max(errors):.2g} of its norm"}
    return [context.row(case, **Spread.of(errors).columns(), **check, relative_error=max(errors))]


def _output(case: Case, scores: Scores) -> torch.Tensor:
    if case.variant != NONE:
        value = scores.inputs[2].to(case.torch_dtype)[scores.columns]
        return emulate(case.variant, scores.exact_scores.to(case.torch_dtype), value)
    plan = fused3s.plan_attention(scores.pattern(), backend=case.backend, device=scores.device)
    q, k, v = (tensor.to(case.torch_dtype) for tensor in scores.inputs)
    return plan(q, k, v, scale=scores.scale, out_dtype=torch.float32)
