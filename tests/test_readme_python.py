"""The blocks of the README and of the pages in docs/ run as they stand, without a GPU."""

import re
import textwrap
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml
from bench_runs import CPU, context
from kernel_rows import row
from scripts_as_modules import load_script
from torch import Tensor
from typer.testing import CliRunner

import data
from bench.baselines import REGISTRY
from configs import load_config
from configs.bench import BenchConfig
from data import registry
from report import figures, tables
from report.engine import Data
from report.rows import frame

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "kernels/README.md",
    "docs/datasets.md",
    "docs/dgl.md",
    "docs/layers.md",
    "docs/pyg.md",
    "docs/threads.md",
    "docs/training.md",
    "docs/backends.md",
    "docs/add/score-term.md",
    "docs/add/backend.md",
    "docs/add/benchmark.md",
)


def blocks(page: str, language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)
    assert found
    return [textwrap.dedent(block) for _, block in found]


def run_blocks(page: str) -> dict[str, object]:
    """The names that its Python blocks define; a block goes on where the one before it ended."""
    names: dict[str, object] = {}
    with patch.dict(REGISTRY):
        for block in blocks(page, "python"):
            exec(compile(block, page, "exec"), names)
    return names


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    run_blocks(page)


def test_radius_graphs_of_the_page_are_all_pairs_within_the_radius(monkeypatch):
    """In two and three dimensions, with points that coincide and batches; and the page's other graphs and losses."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    made = run_blocks("docs/pyg.md")
    for dim, radius in ((2, 0.13), (3, 0.3), (1, 2.0)):
        points, batch = torch.rand(200, dim), torch.randint(3, (200,))
        points[:5] = points[5:10]
        is_near = (torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist") < radius).fill_diagonal_(
            False
        )
        for given, expected in (((), is_near), ((batch,), is_near & (batch[:, None] == batch))):
            source, target = made["radius_graph"](points, radius, *given)
            found = torch.zeros(200, 200, dtype=torch.int64).index_put_(
                (source, target), torch.tensor(1), accumulate=True
            )
            assert torch.equal(found, expected.long())
    by_tree, by_cells = (
        {*zip(*edges.tolist(), strict=True)}
        for edges in (made["edge_index"], made["radius_graph"](made["points"], 0.1))
    )
    assert by_tree == by_cells
    assert len(made["losses"]) == len(made["loader"])


def test_layers_of_the_page_are_those_of_pyg_in_a_heteroconv(monkeypatch):
    from torch_geometric import nn

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    made = run_blocks("docs/pyg.md")
    convs = {
        made["writes"]: nn.GATv2Conv((32, 64), 16, heads=8, add_self_loops=False),
        made["cites"]: nn.TransformerConv(64, 16, heads=8),
    }
    theirs = nn.HeteroConv(convs, aggr="sum")
    theirs.load_state_dict(made["conv"].state_dict())
    x, edges = made["x"], made["edges"]
    torch.testing.assert_close(made["conv"](x, edges)["paper"], theirs(x, edges)["paper"], rtol=1e-4, atol=1e-5)


def test_normed_scores_of_the_page_are_those_of_float64(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    made = run_blocks("docs/layers.md")
    q, k, v = (made[name].double() for name in "qkv")
    q, k = (
        weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        for x, weight in zip((q, k), made["norm_weights"].double(), strict=True)
    )
    source, target = made["edge_index"]
    weights = ((q[target] * k[source]).sum(-1, keepdim=True) / 4).exp()  # [E, H, 1]; 4: the root of the columns
    total = torch.zeros(400, 8, 1).double().index_add(0, target, weights)
    expected = torch.zeros_like(v).index_add(0, target, weights * v[source]) / total.masked_fill(total == 0, 1.0)
    torch.testing.assert_close(made["out_of_normed"].double(), expected, rtol=1e-5, atol=1e-6)


def test_the_ten_blocks_of_the_dgl_page_learn_and_its_file_trains(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names = run_blocks("docs/dgl.md")
    losses = [loss.item() for loss in names["losses"]]
    assert min(losses[-5:]) < 0.8 * losses[0]
    (command,) = blocks("docs/dgl.md", "console")
    words = command.replace("configs/", f"{ROOT}/configs/").split()[3:]
    small = "runtime.device=cpu", "training.epochs=3", "model.dim=8"
    more = [*(word for one in small for word in ("--set", one)), "--output", "run", "--results", "rows.csv"]
    done = CliRunner().invoke(load_script("train").app, [*words, *more])
    assert done.exit_code == 0, done.output
    read = data.load("mine", path="mine.npz").graph
    of_page, of_file = (set(zip(*map(Tensor.tolist, each.edges()), strict=True)) for each in (names["graph"], read))
    assert of_file == of_page  # the loader merges repeated edges


def test_the_benchmark_of_the_page_measures(tmp_path):
    page = "docs/add/benchmark.md"
    made, (text,) = run_blocks(page), blocks(page, "yaml")
    (tmp_path / "own.yaml").write_text(text, encoding="utf-8")
    overrides = "source=synthetic", "graphs=[cora]", "backends=[scatter]", "repeats=2"
    config = load_config(tmp_path / "own.yaml", overrides, schema=BenchConfig)
    first, *more = made["cases"](config, CPU)
    assert len(more) == 1
    (found,) = made["measure"](context(config), first)
    assert (found.status, found.dataset, found.dim, found.value > 0) == ("ok", "cora", 128, True)


def test_the_data_set_of_the_page_is_an_entry():
    (text,) = blocks("docs/add/dataset.md", "yaml")
    ((name, fields),) = yaml.safe_load(text).items()
    entry = registry._entry(name, fields)
    assert (entry.name, entry.nnz, entry.official.member) == ("my-graph", 578_006, "my_graph/edges.csv")


def test_the_figure_and_the_table_of_the_page_are_made(monkeypatch):
    monkeypatch.setattr(figures, "FIGURES", {})
    made = run_blocks("docs/add/figure.md")
    monkeypatch.setitem(tables.TABLES, "over-pyg", made["over_pyg"])
    rows = Data(frame([row("cora", "fused3s", 2.0, dim=64), row("cora", "pyg", 3.0, dim=64)]))
    drawn = figures.draw(rows, "my-times", {"dim": 64})
    assert (drawn.file, drawn.figure.get_suptitle()) == ("my-times_dim-64", "Fastest: 2 ms")
    bars = drawn.figure.axes[0].patches
    assert sorted(bar.get_x() + bar.get_width() for bar in bars) == pytest.approx([2.0, 3.0])
    assert "| d = 64 | 1.50 (1) / 1.50 (1) |" in tables.render(rows, "over-pyg")
