"""All figures and tables from rows of the same shape as recorded ones: as many back ends, variants and long names."""

import pytest
from figures_script import make_figures
from kernel_rows import row

from bench import Row, append_rows
from configs.bench_schema import VARIANTS
from report.plots.models import draw as draw_end_to_end
from report.plots.speedups import draw as draw_speedups

SINGLE = ("citeseer", "cora", "pubmed", "elliptic", "musae-github", "ogbn-arxiv", "igb-small")
KERNELS = (
    *("fused3s", "fused3s+reorder", "fused3s_paper", "flashsparse_naive", "flashsparse_stable", "dfgnn_tiling"),
    *("dfgnn_hyper", "pyg", "csr_unfused", *[*VARIANTS][:3]),
)
MODES = {
    "fused3s": ("plain", "plain+graph", "fused", "fused+graph", "compiled+graph"),
    "flashsparse_naive": ("plain",),
    "pyg": ("plain",),
} | dict.fromkeys(
    ("fused3s_paper", "flashsparse_stable", "dfgnn_tiling", "dfgnn_hyper", "csr_unfused"), ("plain", "plain+graph")
)
REGIONS = ("embedding", "qkv", "attention", "out projection", "ffn", "norms", "dense", "readout", "launch gaps")


def recorded() -> list[Row]:
    rows = []
    for nth, name in enumerate(SINGLE, start=1):
        graph = {"data_source": "synthetic" if name == "igb-small" else "file", "nnz": 10**nth}
        for bar, backend in enumerate(KERNELS, start=1):
            rows.append(row(name, backend, 0.01 * nth * bar, **graph))
        model = graph | {"scope": "model", "blocks": 10, "config": "configs/end_to_end/single.yaml", "dim": 256}
        for backend, modes in MODES.items():
            for bar, mode in enumerate(modes, start=1):
                if mode == "compiled+graph" and name != "ogbn-arxiv":
                    continue
                rows.append(row(name, backend, 2.345 * nth / bar, note=mode, **model))
                rows.append(row(name, backend, 0.5 * nth / bar, note=mode, **model | {"scope": "attention"}))
                if mode == "plain":
                    regions = (row(name, backend, 0.2, metric=f"time in {one}", note=mode, **model) for one in REGIONS)
                    rows += regions
    return rows


def test_the_script_draws_all_of_it_without_a_warning(tmp_path):
    append_rows(tmp_path / "r.csv", recorded())
    done = make_figures("--results", tmp_path, "--figures", tmp_path / "figures")  # warnings are errors there
    assert done.returncode == 0, done.stderr
    drawn = {path.stem.partition("_")[0] for path in (tmp_path / "figures").iterdir()}
    end_to_end = {"end-to-end", "end-to-end-attention", "end-to-end-regions", "end-to-end-paper"}
    tables = {"kernels", "beyond", "paper"}
    assert drawn == {"speedup", "ablation", "beyond-the-paper", "paper-means", "paper-times"} | end_to_end | tables


@pytest.mark.parametrize("draw", [draw_end_to_end, draw_speedups])
def test_no_legend_takes_the_axes_room(draw):
    for name, figure in draw(recorded()).items():
        figure.draw_without_rendering()
        assert all(axes.get_position().width > 0.8 for axes in figure.axes), name
