"""`scripts/predict_scaling.py` as a user runs it, on a small graph with the recorded kernel times."""

from pathlib import Path

import numpy as np
import pytest
from scripts_as_modules import load_script
from typer.testing import CliRunner

from bench.records import Row, append_rows, read_rows
from configs import load_config
from configs.scaling_schema import ScalingConfig

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs" / "scaling"
RECORDED = ROOT / "results" / "h200"
NODES = 400


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A data folder with the graph `mine`."""
    rng = np.random.default_rng(0)
    src, dst = np.unique(rng.integers(0, NODES, (2000, 2)), axis=0).T.astype(np.int32)
    np.savez(tmp_path / "mine.npz", src_li=src, dst_li=dst, num_nodes=NODES)
    return tmp_path


def run(root: Path, config: str, *overrides: str):
    found = [f"data.root={root}", *overrides]
    sets = [word for override in found for word in ("--set", override)]
    where = ["--recorded", str(RECORDED), "--results", str(root / "scaling.csv")]
    return CliRunner().invoke(load_script("predict_scaling").app, ["--config", str(FOLDER / config), *sets, *where])


MINE = ("data.source=file", "data.names=[mine]", "partition.methods=[contiguous]", "partition.ranks=[2]")


def values(rows: list[Row], **columns: object) -> list[float]:
    return [row.value for row in rows if all(getattr(row, name) == value for name, value in columns.items())]


def test_every_row_is_marked_as_predicted_and_a_second_run_replaces_the_first(root):
    done = run(root, "single.yaml", *MINE)
    assert done.exit_code == 0, done.stderr
    rows = read_rows(root / "scaling.csv")
    assert {(row.bench, row.status) for row in rows} == {("scaling", "predicted")}
    assert {(row.device, row.driver) for row in rows} == {("NVIDIA H200", "none")}
    assert sum(values(rows, ranks=2, metric="rows")) == NODES
    assert len(values(rows, ranks=2, metric="time", region="none", scope="attention", heads=1)) == 4  # 2 schemes, links
    assert len(values(rows, ranks=2, metric="time", region="none", scope="attention", heads=8)) == 6
    others = [row.model_copy(update={"config": "mine.yaml"}) for row in rows[:3]]
    append_rows(root / "scaling.csv", others)
    assert run(root, "single.yaml", *MINE, "nvlink.gb_per_s=100").exit_code == 0
    again = read_rows(root / "scaling.csv")
    assert [row.config for row in again].count("mine.yaml") == 3
    assert len(again) == len(rows) + 3
    assert values(again[3:], metric="bandwidth", link="NVLink") == [100]


def test_a_link_has_a_largest_number_of_ranks(root):
    assert run(root, "single.yaml", *MINE, "nvlink.most_ranks=2", "partition.ranks=[4]").exit_code == 0
    missing = [row for row in read_rows(root / "scaling.csv") if row.status == "unsupported"]
    assert {(row.link, row.ranks, row.reason) for row in missing} == {("NVLink", 4, "NVLink connects 2 ranks")}


def test_a_graph_lends_its_locality_to_a_larger_one(root):
    assert run(root, "papers100m.yaml", *MINE).exit_code == 0
    rows = read_rows(root / "scaling.csv")
    assert {row.order for row in rows if row.ranks} == {"contiguous of mine", "random"}
    assert {row.dataset for row in rows if row.ranks} == {"ogbn-papers100m"}
    assert sum(values(rows, order="contiguous of mine", ranks=2, metric="rows")) == pytest.approx(111_059_956, abs=2)


@pytest.mark.parametrize(
    ("config", "overrides", "text"),
    [
        (
            "papers100m.yaml",
            ("data.source=synthetic", "data.names=[cora]"),
            "cora is synthetic here and has no locality",
        ),
        ("single.yaml", (*MINE, "attention.shapes=[3x7]"), "attention of 3x7 on NVIDIA H200: 0 recorded graphs"),
        ("single.yaml", (*MINE, "attention.device=mine"), "mine: no peak rates are recorded"),
        ("single.yaml", (*MINE, "attention.shapes=[x128]"), "heads x head dimension is needed, such as 8x16"),
        ("single.yaml", (*MINE, "partition.ranks=[1]"), "partition.ranks.0 = 1"),
        ("single.yaml", (*MINE, "scale.random=true"), "name the graph with scale.to"),
        ("single.yaml", (*MINE, "scale.to=zinc"), "zinc"),
        ("single.yaml", (*MINE, "nvlink.gb_per_s=0"), "nvlink.gb_per_s = 0"),
        ("single.yaml", ("data.source=synthetic", "data.names=[zinc]"), "zinc is a collection of small graphs"),
    ],
)
def test_what_is_wrong_is_named(root, config, overrides, text):
    done = run(root, config, *overrides)
    assert done.exit_code == 2
    assert text in done.stderr
    assert not (root / "scaling.csv").exists()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_load_and_share_their_links(path):
    settings = load_config(path, [], ScalingConfig)
    assert settings.links == load_config(FOLDER / "papers100m.yaml", [], ScalingConfig).links


def test_the_hash_is_of_what_is_predicted():
    def sha(*overrides: str) -> str:
        return load_config(FOLDER / "single.yaml", overrides, ScalingConfig).sha()

    assert sha("data.root=elsewhere", "data.source=official") == sha()
    changes = ("data.names=[cora]", "nvlink.gb_per_s=1", "partition.ranks=[3]", "attention.shapes=[1x64]")
    assert len({sha(), *map(sha, changes)}) == 5
