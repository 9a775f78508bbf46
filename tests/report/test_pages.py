"""Pages, README blocks and the scripts that write them."""

from pathlib import Path

import pytest
from kernel_rows import row
from scripts_as_modules import load_script
from typer.testing import CliRunner

from common.records import append_rows
from report.claims import judged
from report.engine import Data
from report.pages import blocks, fill
from report.rows import frame
from report.sentences import SENTENCES
from report.training import inference_changes, split_scores

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- begin generated: {} -->\n", "<!-- end generated: {} -->"


def test_text_between_markers_is_renewed_and_nothing_else():
    text = f"before\n{BEGIN.format('a')}old\n{END.format('a')}\nafter\n"
    assert fill(text, {"a": "new\n\n| t |\n"}) == f"before\n{BEGIN.format('a')}new\n\n| t |\n{END.format('a')}\nafter\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [(BEGIN.format("b") + END.format("b"), "no generated block b"), (BEGIN.format("a"), "needs an")],
)
def test_a_wrong_marker_is_an_error_that_names_it(text, message):
    with pytest.raises(ValueError, match=message):
        fill(text, {"a": "new"})


def test_sentences_of_the_readme_follow_from_rows_and_are_empty_without_them(tmp_path):
    step = {"bench": "layers", "plan": "fixed", "l2": "none", "region": "step", "dtype": "float32", "launch": "eager"}
    memory = {"metric": "peak_memory", "unit": "MiB"}
    sides = {"auto": ({}, 20.0, 2048.0), "pyg": ({"launch": "compiled"}, 90.0, 10_240.0)}
    rows = [
        row("power-law", name, value * factor, nnz=nnz, data_sha256=size, variant=size, **step | changes | metric)
        for name, (changes, time, peak) in sides.items()
        for value, metric in ((time, {}), (peak, memory))
        for size, nnz, factor in (("1m", 1_000_000, 0.1), ("17m", 16_777_216, 1.0))
    ]
    found = {name: sentence(Data(frame(rows))) for name, sentence in SENTENCES.items()}
    assert found == {
        "scale-in-short": "A training step on 16.8M edges (3 layers, float32, synthetic graph, one NVIDIA H200) takes "
        "**20 ms and 2 GiB**; compiled PyG takes 90 ms and 10 GiB ([table](docs/limits.md#when-it-is-worth-using)).",
        "kernels-in-short": "",
    }
    ratios = {"cora": 2.0, "ogbn-arxiv": 3.0, "pubmed": 9.0}
    kernels = [
        row(name, kernel, time, launch=launch)
        for name, ratio in ratios.items()
        for launch, isolated in (("back_to_back", 1.0), ("isolated", 0.5))
        for kernel, time in (("fused3s", 1.0), ("pyg", ratio * isolated))
    ]
    found = {name: sentence(Data(frame(kernels))) for name, sentence in SENTENCES.items()}
    assert "on 2 real graphs: ours is 2.00 to 3.00 times as fast" in found["kernels-in-short"]
    assert "and 1.00 to 1.50 times in isolated launches" in found["kernels-in-short"]
    assert found["scale-in-short"] == ""
    others = [
        one.model_copy(update={"device": "another GPU", "date": "2030", "value": 99.0})
        for one in rows
        if one.metric == "time"
    ]
    told = Data(frame([*rows, *others]))
    of_two_gpus = blocks(told, judged(told, tmp_path), "", tmp_path, {})["scale-in-short"]
    assert of_two_gpus == ""  # the one with most rows has no memory: the times are not told beside that of the other


def score(bench: str, backend: str, seed: int, value: float, **changes):
    model = {
        "bench": bench,
        "metric": "test_accuracy",
        "unit": "1",
        "scope": "model",
        "dim": 64,
        "blocks": 3,
        "plan": "none",
    }
    model |= {"launch": "eager", "l2": "none", "checkpoint": f"{seed}.safetensors", "variant": f"seed {seed}"}
    return row("cora", backend, value, "unchecked", **(model | changes))


def test_scores_by_hand():
    exact = [
        score("train", "reference", seed, value, dtype="float32", checkpoint=f"r{seed}")
        for seed, value in ((0, 0.5), (1, 0.7))
    ]
    ours = [score("train", "fused3s", seed, value) for seed, value in ((0, 0.6), (1, 0.9))]
    line = next(line for line in split_scores(Data(frame([*exact, *ours]))).splitlines() if "fused3s" in line)
    # means 0.75 and 0.6, standard errors 0.15 and 0.1; seed by seed +0.1 and +0.2
    assert line.endswith("| 2 | 0.7500 ± 0.1500 | +0.1500 ± 0.1803 | +0.1500 ± 0.0500 (n = 2) |")


def test_scores_of_another_configuration_are_a_line_of_their_own():
    """Also where it has the same seeds, and its weights the same path."""
    runs = [score("train", "fused3s", seed, 0.8) for seed in range(3)]
    runs += [score("train", "fused3s", seed, 0.4, config_sha="other") for seed in (0, 3)]
    lines = [line for line in split_scores(Data(frame(runs))).splitlines() if "fused3s" in line]
    assert [line.split(" | ")[6:8] for line in lines] == [["3", "0.8000 ± 0.0000"], ["2", "0.4000 ± 0.0000"]]


def test_scores_on_other_edges_under_one_name_are_a_line_of_their_own():
    runs = [score("train", "fused3s", 0, 0.8), score("train", "fused3s", 1, 0.4, data_sha256="other")]
    lines = [line for line in split_scores(Data(frame(runs))).splitlines() if "fused3s" in line]
    assert [(line.split(" | ")[3], line.split(" | ")[7]) for line in lines] == [
        ("`abc`, `hash`", "0.8000"),
        ("`abc`, `othe`", "0.4000"),
    ]


def test_a_seed_that_was_trained_again_counts_once():
    runs = [score("train", "fused3s", seed, 0.4, checkpoint=f"one/{seed}", date="2026-11-01") for seed in (0, 1)]
    runs += [score("train", "fused3s", 0, 0.8, checkpoint="two/0", ranks=4, launch="none", date="2026-11-02")]
    line = next(line for line in split_scores(Data(frame(runs))).splitlines() if "fused3s" in line)
    assert line.split(" | ")[6:8] == ["2", "0.6000 ± 0.2000"]
    used = score("infer", "reference", 0, 0.5, variant="none", checkpoint="one/0", date="2026-11-03")
    assert "+0.10000 ± 0.00000 over 1 seeds" in inference_changes(Data(frame([*runs, used])))  # of weights in `one`


def test_scores_on_molecules_that_are_not_ogbs_are_labelled():
    one = score("train", "fused3s", 0, 0.8, data_sha256="4623aad1a8fefc37")
    table = split_scores(Data(frame([one.model_copy(update={"dataset": "ogbg-molhiv"})])))
    assert "| ogbg-molhiv (rebuilt) |" in table


def test_a_change_in_inference_is_of_the_same_weights():
    trained = [score("train", "fused3s", seed, value) for seed, value in ((0, 0.6), (1, 0.9))]
    used = [
        score("infer", "reference", seed, value, dtype="float32", variant="none")
        for seed, value in ((0, 0.7), (1, 0.9))
    ]
    again = score("train", "fused3s", 0, 0.1, config_sha="other", date="2030")  # into the same file, after its use
    assert "+0.00000 ± 0.00000 over 1 seeds" in inference_changes(Data(frame([*trained, *used, again])))
    text = inference_changes(Data(frame([*trained, *used])))
    assert (
        "at most +0.05000 ± 0.05000 over 2 seeds (cora, trained with fused3s in float16, reference in float32)" in text
    )


@pytest.fixture
def run(monkeypatch):
    """Run a script in this process."""
    monkeypatch.chdir(ROOT)
    return lambda name, *options: CliRunner().invoke(load_script(name).app, [*map(str, options)])


def test_what_the_script_wrote_passes_its_check_until_a_row_changes(run, tmp_path):
    csv, figure = tmp_path / "h200" / "kernels.csv", "hero"

    def record(name, time, **changes):
        append_rows(csv, [row("pubmed", name, time, launch="isolated", **changes)])

    record("fused3s", 1.0)
    record("fused3s_paper", 2.0)
    written = run("report", "--results", tmp_path)
    assert written.exit_code == 0, written.stderr
    assert {"RESULTS.md", "CLAIMS.md", "figures"} <= {path.name for path in tmp_path.iterdir()}
    assert run("report", "--results", tmp_path, "--check").exit_code == 0
    record("fused3s_paper", 2.002, date="2026-12-31T00:00:00Z")  # no pixel of a bar
    assert f"{figure}.png" in run("report", "--results", tmp_path, "--check").stdout
    record("fused3s", 0.5, date="2027-01-01T00:00:00Z")
    checked = run("report", "--results", tmp_path, "--check")
    assert checked.exit_code == 1
    assert "RESULTS.md" in checked.stdout
    drawn = run("plot", "hero", "--set", "dim=128", "--results", tmp_path, "--format", "pdf")
    assert drawn.exit_code == 0, drawn.stderr
    assert (tmp_path / "figures" / f"{figure}.pdf").exists()


def test_plot_leaves_the_folder_of_the_recorded_figures_alone(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    append_rows(tmp_path / "results" / "kernels.csv", [row("cora", "fused3s", 1.0)])
    assert run("plot", "kernel-times").exit_code == 0
    (drawn,) = tmp_path.rglob("*.png")
    assert drawn.parent == tmp_path / "results" / "local" / "figures"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "dim"), "write KEY=VALUE"),
        (("--format", "gif"), "is not one of 'png', 'pdf', 'svg'"),
        (("nothing",), "no such figure"),
    ],
)
def test_bad_input_of_plot_is_named(run, tmp_path, arguments, message):
    append_rows(tmp_path / "kernels.csv", [row("cora", "fused3s", 1.0)])
    done = run("plot", "--results", tmp_path, *arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split()) + " ".join(done.stdout.split())
