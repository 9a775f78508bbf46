"""The backward pass in table, README and figure: ratios worked out by hand; its benchmark on a CPU."""

import pandas as pd
import pytest
import torch
from kernel_rows import row

import kernels
from bench.gradients import float64_gradients, largest_gradient_error, torch_gradients
from configs.bench_schema import BenchConfig, Shape
from kernels.formats.csr import CSRPattern
from report.backward import TURBO, TURBO_BEST, PassTimes, over_ours, published
from report.frames import frame
from report.head_shapes import describe
from report.html.tables import tables
from report.plots.backward import draw
from report.readme import BLOCKS
from report.tables.backward import backward_tables

ARXIV = {"data_sha256": "68c8467f25c1af38", "nnz": 1_166_243}  # as in published_codes_graphs.csv
CORA = {"data_sha256": "71cccafe332d3db3"}
ONE = Shape(1, 128)


def backward_rows(dataset, forward, backward, forward_bytes, backward_bytes, status="ok", **changes):
    """Both passes of a graph, with a fifth of their bytes compulsory."""
    same = {"bench": "backward", "out_dtype": "float16"} | changes
    rows = [
        row(dataset, "fused3s", forward, region="forward", **same),
        row(dataset, "fused3s", backward, status if backward is None else "ok", region="backward", **same),
    ]
    untimed = same | {"launch": "none", "plan": "none", "unit": "B"}
    for region, size in (("forward", forward_bytes), ("backward", backward_bytes)):
        for metric, part in (("gathered_bytes", 0.8), ("compulsory_bytes", 0.2)):
            rows.append(row(dataset, "fused3s", size * part, metric=metric, region=region, **untimed))
    return rows


ROWS = [
    *backward_rows("ogbn-arxiv", 0.1, 0.25, 1000, 2000, **ARXIV),
    *backward_rows("cora", 0.01, 0.04, 1000, 2500, **CORA),
    *backward_rows("pubmed", 0.01, None, 1000, 2500, status="oom"),
]


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return frame(ROWS)


def test_ratios_by_hand(rows):
    times = PassTimes.of(rows)
    assert describe(times.over_forward(ONE)) == "3.16 (n = 2; 4.00 on cora)"  # 2.5 and 4
    assert times.over_bound(ONE).mean == pytest.approx((1.25 * 1.6) ** 0.5)
    assert times.over_forward(Shape(8, 16)) is None
    assert {graph.dataset: times.cell(graph, ONE, "backward") for graph in times.graphs}["pubmed"] == "oom"


def test_other_codes_are_found_by_the_hash_of_the_edges(rows):
    times = PassTimes.of(rows)
    best = over_ours(times, "NVIDIA H200", TURBO_BEST, ONE)
    assert {graph.dataset: ratio for graph, ratio in best.by_graph.items()} == pytest.approx(
        {"ogbn-arxiv": 1.8182 / 0.25, "cora": 0.0302 / 0.04}
    )
    hubs = over_ours(times, "NVIDIA H200", TURBO_BEST, ONE, hubs=True)
    assert [graph.dataset for graph in hubs.by_graph] == ["ogbn-arxiv"]
    assert over_ours(times, "another GPU", TURBO_BEST, ONE) is None
    assert len(published(TURBO_BEST, ONE)) == 14
    assert len(published(TURBO, Shape(16, 64))) == 6


def test_table_readme_figure_and_page(rows):
    text = backward_tables(rows)
    assert "3.16 (n = 2; 4.00 on cora)" in text
    assert "| ogbn-arxiv | 1,166,243 | 0.1000 | 0.2500 | 2.50 | 2.00 | 1.8182 |" in " ".join(text.split("  "))
    assert "3.16 (n = 2; 4.00 on cora)" in BLOCKS["backward"](rows)
    (figure,) = draw(rows).values()
    assert len(figure.axes[0].patches) == 2
    assert any("backward" in str(table) for table in tables(rows))


def test_the_benchmark_takes_no_edge_data():
    config = {"data": {"names": ["cora"]}, "kernel": {"backends": ["fused3s"], "backward": True, "edges": ["bias"]}}
    with pytest.raises(ValueError, match=r"kernel\.backward = true"):
        BenchConfig.model_validate(config)


def test_gradients_match_autograd_in_float64():
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand((50, 50), generator=generator) < 0.1
    mask[3] = False
    indptr = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    pattern = CSRPattern(indptr, mask.nonzero()[:, 1].int(), (50, 50))
    inputs = [torch.randn((50, 2, 8), generator=generator).half() for _ in range(4)]
    tensors = [x.double().requires_grad_() for x in inputs[:3]]
    output = kernels.sparse_attention(*tensors, pattern, scale=0.35, backend="reference")
    expected = torch.autograd.grad(output, tensors, inputs[3].double())
    assert largest_gradient_error(float64_gradients(*inputs, pattern, 0.35), expected) < 1e-6
    assert 1e-4 < largest_gradient_error(torch_gradients(*inputs, pattern, 0.35), expected) < 1e-2
    wrong = (expected[0], -expected[1], expected[2])
    assert largest_gradient_error(wrong, expected) > 1
