"""The paper's format table as a figure, from its CSV (`make tables` writes it)."""

from pathlib import Path

from matplotlib.figure import Figure

from bench.csv_files import read_table
from report.plots import style


def draw_formats(folder: Path) -> Figure:
    """Bits a nonzero by the paper's formulas, one line of markers for each data set and source.

    Args:
        folder: of formats.csv, and of datasets.csv, which has the number of nonzeros.
    """
    formats = read_table(folder / "formats.csv", ("dataset", "source", "format"), numbers=("formula_bits",))
    sizes = read_table(folder / "datasets.csv", ("dataset", "source", "metric", "ours"))
    sizes = (
        sizes.query("metric == 'nnz'").drop_duplicates(["dataset", "source"]).set_index(["dataset", "source"])["ours"]
    )
    by_set = formats.pivot_table("formula_bits", ["dataset", "source"], "format", sort=False)
    nnz = sizes.astype(float).reindex(by_set.index)
    by_set = by_set.div(nnz, axis=0)[formats["format"].unique()].loc[nnz.sort_values(kind="stable").index]

    figure, axes = style.new_figure(style.WIDTH, 1 + 0.18 * len(by_set))
    shades = [*style.PALETTE, style.OTHER]
    for shade, marker, (name, bits) in zip(shades, "osD^v<>*", by_set.items(), strict=False):
        axes.plot(bits, range(len(by_set)), marker, color=shade, mfc="none", label=name)  # some coincide
    style.log_axis(axes.xaxis)
    axes.set_xlabel("bits a nonzero, by the paper's formulas (blocks of 16 x 8)")
    shown = [(style.as_it_is(name), source) for name, source in by_set.index]
    names = [f"{name} (synthetic)" if source == "synthetic" else name for name, source in shown]
    axes.set_yticks(range(len(by_set)), names, size=7)
    axes.set_ylim(len(by_set) - 0.5, -0.5)
    axes.grid()
    style.legend_above(axes, "Sparse formats")
    return figure
