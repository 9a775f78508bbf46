"""Does a model's output agree with the reference back end's, made with the same weights in the same precision?"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Both outputs come from activations rounded to the model's dtype; they differ by the rounding and the order of sums
# inside attention, carried through the blocks. In units of eps (the dtype's spacing at 1), an attention that rounds
# its softmax weights to the dtype, as tensor-core kernels do, gave 1.6 to 2.6 for float16 and bfloat16 and up to 6 for
# float32 on cora, musae-github and elliptic with 10 blocks. Losing 1 % of the edges gives 7e-2 or more in any dtype,
# which is over even bfloat16's 6e-2.
_ALLOWED_EPS = {torch.float16: 8, torch.bfloat16: 8, torch.float32: 64, torch.float64: 64}
# The worst element was up to 10 times the mean error; more would mean a few rows that are wrong and not just rounded.
_WORST_ELEMENT = 16


@dataclass(frozen=True)
class Agreement:
    """How far an output is from its reference.

    Attributes:
        relative: root mean square of the difference, over that of the reference less its mean row: what all rows
            share, such as a bias, would otherwise hide errors. The divisor is at least a quarter of the reference's
            own root mean square, for outputs whose rows hardly differ.
        max_abs: largest absolute difference.
        allowed: the largest `relative` that passes.
        allowed_abs: the largest `max_abs` that passes.
    """

    relative: float
    max_abs: float
    allowed: float
    allowed_abs: float

    @property
    def passed(self) -> bool:
        # False for NaN, which agrees with nothing.
        return self.relative <= self.allowed and self.max_abs <= self.allowed_abs

    def describe(self) -> str:
        return (
            f"relative error {self.relative:.1e} (allowed {self.allowed:.1e}), "
            f"largest {self.max_abs:.1e} (allowed {self.allowed_abs:.1e})"
        )


def compare(output: Tensor, reference: Tensor) -> Agreement:
    """Compare logits [rows, classes] of one dtype, in float64."""
    allowed = _ALLOWED_EPS[output.dtype] * torch.finfo(output.dtype).eps
    output, reference = output.double(), reference.double()
    spread = max(_rms(reference - reference.mean(dim=0)), _rms(reference) / 4)
    difference = output - reference
    error = _rms(difference)
    return Agreement(
        relative=error / spread if spread else (0.0 if error == 0 else float("inf")),
        max_abs=difference.abs().max().item(),
        allowed=allowed,
        allowed_abs=_WORST_ELEMENT * allowed * spread,
    )


def _rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()
