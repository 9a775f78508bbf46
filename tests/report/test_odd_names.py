"""Names of graphs are any text: a figure, a table and the HTML page show it, and nothing else reads it."""

import pytest
from kernel_rows import row
from matplotlib.text import Text
from scripts_as_modules import load_script
from typer.testing import CliRunner

from bench.records import append_rows
from report.frames import frame
from report.plots import beyond, speedups
from report.plots.style import MAX_NAME, png
from report.tables.kernels import kernel_tables

pytestmark = pytest.mark.filterwarnings("ignore:Glyph")  # of a font

ODD = ["a$b_{$", "$\\frac{$", "a|b", "<script>alert(1)</script>", "ä漢\u202e", "%s {name}", "x" * 3000, "`a`", "**a**"]


@pytest.fixture(scope="module")
def rows():
    return [row(name, series, 0.1) for name in ("cora", *ODD) for series in ("fused3s", "fused3s_paper", "pyg")]


def test_figures_show_the_names_as_they_are(rows):
    figures = [figure for draw in (speedups.draw, beyond.draw) for figure in draw(frame(rows)).values()]
    assert all(len(png(figure)) < 1_000_000 for figure in figures)
    shown = [text.get_text().replace("\\$", "$") for figure in figures for text in figure.findobj(Text)]  # \$ is a $
    for name in ODD:
        assert any(name[: MAX_NAME - 3] in text for text in shown), name


def test_a_table_keeps_its_columns(rows):
    lines = kernel_tables(frame(rows)).splitlines()
    for name in ODD:
        start = name.replace("|", "\\|")
        (own,) = (place for place, line in enumerate(lines) if line.startswith(f"| {start} "))
        rule = max(place for place in range(own) if lines[place].startswith("| ---"))
        assert lines[own].replace("\\|", "").count("|") == lines[rule].count("|")


def test_the_page_runs_no_script_of_a_name(tmp_path, rows):
    append_rows(tmp_path / "r.csv", rows)
    page = tmp_path / "page.html"
    arguments = ["--results", str(tmp_path), "--output", str(page)]
    assert CliRunner().invoke(load_script("html_report").app, arguments, catch_exceptions=False).exit_code == 0
    assert "alert(1)" in page.read_text()
    assert "<script>alert(1)" not in page.read_text()
