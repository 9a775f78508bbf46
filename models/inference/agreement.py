"""Agreement of logits with a reference, and of 16-bit logits with float32."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Logits differ from those in float32 by rounding in layers and attention and by the order of sums, carried through the
# blocks. In units of eps (spacing of the dtype at 1), 10 blocks in float16 and bfloat16 gave up to 4.6 on the graphs of
# configs/bench/end_to_end_*.yaml, and float32 up to 6. Losing 1 % of the edges gives 7e-2 or more in any dtype, above
# the 6e-2 of bfloat16.
ALLOWED_EPS = {torch.float16: 8, torch.bfloat16: 8, torch.float32: 64, torch.float64: 64}
# The worst element was up to 10 times the mean error; more means a few wrong rows and not only rounding.
WORST_ELEMENT = 16


@dataclass(frozen=True)
class Agreement:
    """Difference between logits and their reference.

    Attributes:
        relative: root mean square of the difference, over that of the reference minus its mean row (a bias that all
            rows share would hide errors). The divisor is at least a quarter of the root mean square of the reference,
            for outputs whose rows hardly differ.
        max_abs: largest absolute difference.
        allowed, allowed_abs: largest values of both that pass.
        argmax_agreement: share of the rows with the same largest logit, 0 to 1; None for a single output.
    """

    relative: float
    max_abs: float
    allowed: float
    allowed_abs: float
    argmax_agreement: float | None

    @property
    def passed(self) -> bool:
        # False for NaN
        return self.relative <= self.allowed and self.max_abs <= self.allowed_abs

    def describe(self) -> str:
        return (
            f"relative error {self.relative:.1e} (allowed {self.allowed:.1e}), "
            f"largest {self.max_abs:.1e} (allowed {self.allowed_abs:.1e})"
        )


def compare(output: Tensor, reference: Tensor, *computed_in: torch.dtype) -> Agreement:
    """Compare logits [rows, classes], in float64.

    Args:
        computed_in: types of layers and attention, where they are not that of the logits (logits of graphs are float32
            behind layers in 16 bits). The coarsest of all types decides what is allowed.
    """
    dtypes = {output.dtype, *computed_in}
    same = None
    if reference.shape[1] > 1:
        same = (output.argmax(1) == reference.argmax(1)).double().mean().item()
    allowed = max(ALLOWED_EPS[dtype] * torch.finfo(dtype).eps for dtype in dtypes)
    output, reference = output.double(), reference.double()
    spread = max(_rms(reference - reference.mean(dim=0)), _rms(reference) / 4)
    difference = output - reference
    error = _rms(difference)
    return Agreement(
        relative=error / spread if spread else (0.0 if error == 0 else float("inf")),
        max_abs=difference.abs().max().item(),
        allowed=allowed,
        allowed_abs=WORST_ELEMENT * allowed * spread,
        argmax_agreement=same,
    )


def _rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()
