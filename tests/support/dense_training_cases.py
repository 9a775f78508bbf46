"""A dense block of training against autograd, for the tests on a CPU and on a GPU."""

from dataclasses import dataclass

import torch
from dense_cases import EPS, block, parameters
from tolerance import FLOOR, assert_errors, row_errors

from fused3s.terms.dropout import Dropout, kept_edges
from models.dense.block_training import TrainingPacking, dense_block_backward, dense_block_forward

VECTORS = ("out_b", "norm1_w", "norm1_b", "up_b", "down_b", "norm2_w", "norm2_b")
MATRICES = ("out_w", "up_w", "down_w", "next_qkv_w")
SUMS = ("norm2_w", "norm2_b", "down_b", "up_b", "norm1_w", "norm1_b", "out_b")  # in the order of ColumnSums
BORDER = 0.02  # of a hidden unit before ReLU: closer to 0, rounding may choose its sign


@dataclass(frozen=True)
class Case:
    """A block with inputs and gradients of its outputs; `dropout` of its hidden units."""

    p: dict
    attn_out: torch.Tensor
    h: torch.Tensor
    grad: torch.Tensor
    qkv_grad: torch.Tensor | None
    dropout: Dropout | None

    @property
    def has_next(self) -> bool:
        return self.qkv_grad is not None


def make_case(rows: int, dim: int, has_next: bool, dtype: torch.dtype, device: str = "cpu", rate: float = 0.0) -> Case:
    generator = torch.Generator(device).manual_seed(rows + dim)

    def normal(columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator, device=device).to(dtype)

    dropout = Dropout(rate, torch.tensor([0x1234567890ABCDEF], device=device)) if rate else None
    qkv_grad = normal(3 * dim) if has_next else None
    return Case(parameters(dim, has_next, dtype, device), normal(dim), normal(dim), normal(dim), qkv_grad, dropout)


def packed_block(case: Case):
    """The block's weights, packed as the first or as the last of two blocks."""
    p, other = case.p, parameters(case.h.shape[1], not case.has_next, case.h.dtype, str(case.h.device))
    blocks = [p, other] if case.has_next else [other, p]
    packing = TrainingPacking(case.h.shape[1], case.h.dtype, 2, EPS, case.h.device)
    matrices = [[block[name] for name in MATRICES if block[name] is not None] for block in blocks]
    packed = packing.pack(matrices, [[block[name] for name in VECTORS] for block in blocks])
    return packed[0 if case.has_next else 1]


def run(case: Case) -> dict[str, torch.Tensor]:
    """Everything that both kernels write, by name."""
    packed = packed_block(case)
    h_next, qkv, kept = dense_block_forward(packed, case.attn_out, case.h, case.dropout, True)
    grads, sums = dense_block_backward(packed, kept, case.grad, case.qkv_grad, case.dropout)
    assert (qkv is None) is not case.has_next
    found = {"h_next": h_next, **kept._asdict(), **{f"d {name}": rows for name, rows in grads._asdict().items()}}
    found |= {f"d {name}": total for name, total in zip(SUMS, sums.total(), strict=True)}
    return found if qkv is None else found | {"qkv": qkv}


def expected(case: Case, dtype: torch.dtype, units: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same by autograd in a type. `units`: which hidden units are not 0, as the kernel found."""
    p = {name: value.detach().to(dtype).requires_grad_() for name, value in case.p.items() if torch.is_tensor(value)}
    attn_out = case.attn_out.to(dtype).requires_grad_()
    rescale = 1.0 if case.dropout is None else 1 / (1 - case.dropout.rate)
    found = block({"next_qkv_w": None} | p, attn_out, case.h.to(dtype), units * rescale)
    pairs = [(found["h_next"], case.grad.to(dtype))]
    if case.has_next:
        pairs.append((found["qkv"], case.qkv_grad.to(dtype)))
    names = {"hidden": "before"}  # the gradient of hidden units is the one before ReLU
    wanted = {name: found[names.get(name, name)] for name in ("sum2", "hidden", "sum1")} | {"attn_out": attn_out}
    wanted |= {name: p[name] for name in SUMS}
    outputs, grads = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(outputs, list(wanted.values()), grads)
    found |= {f"d {name}": each for name, each in zip(wanted, gradients, strict=True)}
    return {name: each.detach() for name, each in found.items()}


def assert_training_block(found: dict[str, torch.Tensor], case: Case, label: str) -> None:
    """No row, and no column sum as a whole, is further from float64 than twice torch's worst in the same type."""
    units = found["hidden"] > 0
    exact, plain = (expected(case, dtype, units) for dtype in (torch.float64, case.h.dtype))
    kept = torch.ones_like(units)
    if case.dropout is not None:
        row = torch.arange(len(units), device=units.device).repeat_interleave(units.shape[1])
        unit = torch.arange(units.shape[1], device=units.device).repeat(len(units))
        kept = kept_edges(case.dropout, row, unit, 1).view(units.shape)
    wrong = (units != (kept & (exact["before"] > 0))) & (~kept | (exact["before"].abs() > BORDER))
    assert not wrong.any(), f"{label}: {int(wrong.sum())} hidden units are 0 or not against ReLU and dropout"
    for name, output in found.items():
        if name == "statistics":
            continue
        assert output.dtype == case.h.dtype, f"{label}, {name}"
        assert torch.isfinite(output).all(), f"{label}, {name}: not all elements are finite"
        # A row of column sums is one row.
        errors, of_torch = (row_errors(each, exact[name]) for each in (output, plain[name]))
        assert_errors(errors, 2 * of_torch.max() + FLOOR, output, exact[name], f"{label}, {name}")
    for place, name in enumerate(("sum1", "sum2")):
        mean, scale = found["statistics"][place].double().unbind(1)
        rounded = found[name].double()
        torch.testing.assert_close(mean, rounded.mean(1), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(scale, (rounded.var(1, correction=0) + EPS).rsqrt(), rtol=1e-5, atol=0)
