"""`scripts/check_figures.py`: finds every file that is not what the CSVs give."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_rows import row
from PIL import Image
from scripts_as_modules import load_script
from typer.testing import CliRunner

from bench.records import append_rows
from report.frames import recorded
from report.readme import fill

ROOT = Path(__file__).resolve().parents[2]
MARKERS = "<!-- begin generated: kernel-times -->\n<!-- end generated: kernel-times -->\n"
ROWS = [
    row(name, series, milliseconds)
    for name, times in {"cora": (1.0, 2.0), "pubmed": (1.0, 8.0)}.items()
    for series, milliseconds in zip(("fused3s", "fused3s_paper"), times, strict=True)
]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A folder of results with everything that is drawn from it."""
    folder = tmp_path_factory.mktemp("recorded")
    append_rows(folder / "kernels.csv", ROWS)
    (folder / "README.md").write_text(fill(MARKERS, recorded(folder)), encoding="utf-8")
    for script, more in (("plot", ["--figures", str(folder / "figures")]), ("claims", [])):
        done = CliRunner().invoke(load_script(script).app, ["--results", str(folder), *more])
        assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def folder(drawn, tmp_path):
    return shutil.copytree(drawn, tmp_path / "results")


@pytest.fixture(scope="module")
def script():
    return load_script("check_figures")


def test_changed_rows_lost_files_and_left_over_files_are_found(folder):
    append_rows(folder / "kernels.csv", [row("cora", "fused3s", 0.5, date="2026-02-01T00:00:00Z")])
    lost, *_ = sorted((folder / "figures").glob("*.pdf"))
    lost.unlink()
    (folder / "figures" / "old.md").write_text("old")
    command = [sys.executable, "scripts/check_figures.py", "--results", folder, "--readme", folder / "README.md"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    lines = [line.replace(f"{folder}/", "") for line in done.stdout.splitlines()]
    assert {"differs    README.md", "differs    figures/kernels.md"} <= {*lines}
    assert any(line.startswith("differs    figures/") and line.endswith(".png") for line in lines)
    others = [line for line in lines if line.startswith(("missing", "no source"))]
    assert others == [f"missing    figures/{lost.name}", "no source  figures/old.md"]


def test_files_as_drawn_do_not_differ(script, drawn):
    assert [*script.texts_that_differ(recorded(drawn), drawn, drawn / "README.md")] == []


def test_a_changed_pixel_is_found_and_another_compression_is_not(script, folder):
    picture, *_ = sorted((folder / "figures").glob("*.png"))
    drawn = picture.read_bytes()
    image = Image.open(picture).convert("RGB")
    image.save(picture, compress_level=1)
    assert picture.read_bytes() != drawn
    assert script.same(drawn, picture)
    image.putpixel((3, 3), (1, 2, 3))
    image.save(picture)
    assert not script.same(drawn, picture)


def test_a_missing_page_of_claims_is_found(script, folder):
    (folder / "CLAIMS.md").unlink()
    found = script.texts_that_differ(recorded(folder), folder, folder / "README.md")
    assert [*found] == [f"missing    {folder / 'CLAIMS.md'}"]
