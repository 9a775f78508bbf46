"""Attention in another type than the model's."""

import pytest
import torch

from bench.checks import compare
from bench.models import ModelBench, attention_dtype, cast
from configs import load_config
from configs.end_to_end_schema import EndToEndConfig

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("backend", "of_model", "expected"),
    [
        ("csr_unfused", HALF, SINGLE),
        ("dfgnn_tiling", BRAIN, SINGLE),
        ("pyg", SINGLE, SINGLE),
        ("fused3s", HALF, HALF),
        ("fused3s", BRAIN, BRAIN),
        ("fused3s", SINGLE, HALF),
        ("flashsparse_stable", SINGLE, HALF),
    ],
)
def test_a_backend_computes_in_float32_or_in_16_bits_whatever_the_model(backend, of_model, expected):
    assert attention_dtype(backend, of_model) == expected


@pytest.mark.parametrize(
    ("of_model", "inside", "written"), [(HALF, SINGLE, SINGLE), (SINGLE, HALF, SINGLE), (SINGLE, SINGLE, SINGLE)]
)
def test_inputs_are_cast_and_the_output_has_the_models_type(of_model, inside, written):
    """A kernel of 16 bits writes float32 itself; one of float32 writes nothing else."""
    seen = []

    def attention(q, k, v, *, scale, out_dtype):
        seen.append((q.dtype, k.dtype, v.dtype, scale, out_dtype))
        return (q + k + v).to(out_dtype)

    q, k, v = torch.randn(5, 3, 2, 8).to(of_model).unbind(1)  # views with gaps, as a model passes them
    output = cast(attention, inside)(q, k, v, scale=0.5, out_dtype=of_model)
    assert seen == [(inside, inside, inside, 0.5, written)]
    assert output.dtype == of_model
    torch.testing.assert_close(output, (q + k + v).to(of_model), rtol=2e-3, atol=2e-3)


def test_cells_have_the_heads_of_the_model():
    settings = load_config("configs/end_to_end/single.yaml", ["model.heads=2"], EndToEndConfig)
    cells = ModelBench.cells(settings)
    assert {(cell.heads, cell.metric) for cell in cells} == {(2, "time"), (2, "output_error")}


def test_the_coarsest_of_logits_layers_and_attention_decides_what_is_allowed():
    exact = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    rounded = exact + 1e-3 * torch.randn(200, 4, generator=torch.Generator().manual_seed(1))
    assert not compare(rounded, exact).passed
    assert compare(rounded, exact, HALF).passed
    assert compare(rounded, exact, HALF, SINGLE).passed
    assert not compare(rounded + 0.1, exact, HALF).passed
    assert compare(rounded.half(), exact.half(), SINGLE).passed
