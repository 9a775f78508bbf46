"""The format table as a figure, drawn from its CSV alone and the same bytes on every run."""

import csv
import io
from pathlib import Path

from data.tables import write_atomically


def plot_formats(table: Path, figure: Path) -> None:
    """Bits a nonzero by the paper's formulas, one line of markers for each data set and source.

    Args:
        table: formats.csv, as `data.tables` writes it next to datasets.csv, which has the number of edges.
        figure: .svg to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    with table.with_name("datasets.csv").open(newline="") as file:
        nnz = {
            (row["dataset"], row["source"]): int(row["ours"]) for row in csv.DictReader(file) if row["metric"] == "nnz"
        }
    sets = list(dict.fromkeys((row["dataset"], row["source"]) for row in rows))
    formats = list(dict.fromkeys(row["format"] for row in rows))
    bits = {(row["dataset"], row["source"], row["format"]): float(row["formula_bits"]) for row in rows}

    with matplotlib.rc_context({"svg.hashsalt": "formats", "svg.fonttype": "none", "font.size": 8}):
        chart, axes = pyplot.subplots(figsize=(6.5, 1 + 0.2 * len(sets)))
        for name, marker in zip(formats, "osD^v<>*", strict=True):
            axes.plot([bits[(*key, name)] / nnz[key] for key in sets], range(len(sets)), marker, ms=4, label=name)
        axes.set_xscale("log")
        axes.set_xlabel("bits a nonzero, by the paper's formulas (blocks of 16 x 8)")
        axes.set_yticks(range(len(sets)), [f"{name} ({source})" for name, source in sets])
        axes.set_ylim(len(sets) - 0.5, -0.5)
        axes.grid(axis="y", linewidth=0.3)
        axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
        drawn = io.StringIO()
        chart.savefig(drawn, format="svg", bbox_inches="tight", metadata={"Date": None})
        pyplot.close(chart)
    write_atomically(figure, drawn.getvalue())
