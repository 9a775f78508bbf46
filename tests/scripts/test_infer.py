"""`scripts/infer.py` as a user runs it, from the root of the repository.

Importing torch and DGL takes most of a run, so tests that need no fresh process run the script in this one.
"""

import csv
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scripts_as_modules import load_script
from typer.testing import CliRunner

import data
from bench.baselines import REGISTRY
from common.cli import NOT_LOADED
from configs import load_config
from models import GraphTransformer
from models.dense.block import dense_block_unavailable

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()]
SYNTHETIC = ["data.source=synthetic", "model.blocks=2"]
QUICK = ["model.dim=16", "runtime.warmup=1", "runtime.repeats=4", "runtime.device=cpu"]


def without_this_clone() -> dict[str, str]:
    """The environment without this clone in PYTHONPATH; third-party packages may well come from there."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [str(Path(folder).resolve()) for folder in folders if folder and Path(folder).resolve() != ROOT]
    return os.environ | {"PYTHONPATH": os.pathsep.join(others), "COLUMNS": "200"}


@pytest.fixture
def arguments(tmp_path):
    """Arguments from options and `section.key=value` settings."""

    def arguments(*more, config="configs/infer/cora.yaml", settings=(*SYNTHETIC, *QUICK)):
        options = ["--config", config, "--results", tmp_path / "r.csv"]
        for one in (*settings, *more):
            is_setting = isinstance(one, str) and "=" in one and "." in one.partition("=")[0]
            options += ["--set", one] if is_setting else [one]
        return [*map(str, options)]

    return arguments


@pytest.fixture
def infer(arguments, monkeypatch, one_thread):
    """Run the script in this process."""
    script = load_script("infer")

    def infer(*more, **changes):
        monkeypatch.chdir(ROOT)
        monkeypatch.setenv("COLUMNS", "200")
        return CliRunner().invoke(script.app, arguments(*more, **changes))

    return infer


@pytest.fixture
def collection(tmp_path):
    """Configuration of a file of 50 labelled graphs in batches of 8, and the labels."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(2, 9, 50)
    u, v = (np.concatenate([np.arange(size - 1) + end for size in sizes]) for end in (0, 1))
    arrays = {"node_counts": sizes, "edge_counts": sizes - 1, "u": u, "v": v, "graph_label": rng.normal(size=(50, 2))}
    path = tmp_path / "mine.npz"
    np.savez(path, feat=rng.normal(size=(sizes.sum(), 5)), **arrays)
    config = tmp_path / "mine.yaml"
    config.write_text(f"data: {{name: mine, source: file, path: '{path}', batch_size: 8}}\nmodel: {{blocks: 2}}\n")
    return config, arrays["graph_label"]


def rows(tmp_path):
    with (tmp_path / "r.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_report_results_and_predictions(infer, tmp_path):
    done = infer("--verify", "--accuracy", "--profile", "--output", tmp_path / "out.npz")
    assert done.exit_code == 0, done.stderr
    for text in ("csr_unfused (chosen by auto)", "agrees with the reference", "against float32: 100.00% of the rows"):
        assert text in done.stdout, done.stdout
    lines = done.stdout.splitlines()
    assert lines[0] == lines[-1] == "SYNTHETIC    cora is a surrogate, not the real graph (as configured)"
    with np.load(tmp_path / "out.npz") as file:
        assert file["logits"].shape == (2708, 7)

    written = rows(tmp_path)
    assert {(row["status"], row["data_source"], row["backend"]) for row in written} == {
        ("ok", "synthetic", "csr_unfused")
    }
    assert float(written[0]["p10"]) <= float(written[0]["value"]) <= float(written[0]["p90"])
    assert 0 < float(written[1]["value"]) < 1
    sha = written[0]["config_sha"]
    assert load_config(tmp_path / "configs" / f"{sha}.yaml").sha() == sha
    assert "forward pass, eager" in (tmp_path / "traces" / f"cora_{sha}.json").read_text()


def test_auto_that_falls_back_to_a_surrogate_says_so_first_and_last(infer, monkeypatch):
    load = data.load
    monkeypatch.setattr("data.load", lambda name, **options: load(name, **(options | {"source": "synthetic"})))
    done = infer(settings=["data.batch_size=8", "model.blocks=1", *QUICK], config="configs/infer/ogbg-molhiv.yaml")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == lines[-1]
    assert lines[0].startswith("SYNTHETIC    ogbg-molhiv is a surrogate, not the real graph (data.source = 'auto' ")


def test_checkpoint_is_loaded_in_another_precision_and_nan_is_reported(infer, tmp_path):
    torch.manual_seed(7)
    model = GraphTransformer(in_features=1433, num_classes=7, dim=16, blocks=2)
    with torch.no_grad():
        model.readout.classes.bias[3] += 100
        model.readout.classes.bias[0] = -torch.inf
    torch.save(model.state_dict(), tmp_path / "w.pt")
    options = ("--checkpoint", tmp_path / "w.pt", "--output", tmp_path / "out.pt")
    done = infer(*options, "attention.dtype=bfloat16")
    assert done.exit_code == 0, done.stderr
    assert (torch.load(tmp_path / "out.pt").argmax(1) == 3).all()
    assert rows(tmp_path)[0]["dtype"] == "bfloat16"
    assert "warning: 2708 of 18956 outputs are NaN or infinite" in done.stderr


def test_wrong_attention_fails_verification(infer, tmp_path, monkeypatch):
    right = REGISTRY["dgl"].attend
    monkeypatch.setattr(REGISTRY["dgl"], "attend", lambda *arguments: right(*arguments) * 1.01)
    done = infer("attention.backend=dgl", "--verify")
    assert done.exit_code == 1, done.stderr
    assert "DIFFERS FROM" in done.stdout
    assert {row["status"] for row in rows(tmp_path)} == {"wrong"}
    assert "relative error" in rows(tmp_path)[0]["reason"]


@pytest.mark.parametrize("config", ["dgl-example", "zinc-edges"])
def test_published_shapes_of_models(infer, config):
    """Eight heads of 10 columns with Laplacian eigenvectors; edge features as a stream."""
    few = [*SYNTHETIC, "data.batch_size=20", *QUICK[1:]]
    done = infer("--verify", config=f"configs/infer/{config}.yaml", settings=few)
    assert done.exit_code == 0, done.stderr
    assert "agrees with the reference" in done.stdout


def test_all_batches_of_a_collection(infer, tmp_path, collection):
    config, labels = collection
    own = {"config": config, "settings": [*QUICK, "model.pos_enc=2"]}
    done = infer("data.batch_size=50", "--output", tmp_path / "one.npz", **own)
    assert done.exit_code == 0, done.stderr
    more = ["data.batches=all", "--verify", "--accuracy", "--profile"]
    done = infer(*more, "--output", tmp_path / "all.npz", **own)
    assert done.exit_code == 0, done.stderr
    for text in (", 50 graphs", "50 graphs in 7 batches of up to 8", "graphs/s median", "agrees with the reference"):
        assert text in done.stdout
    with np.load(tmp_path / "one.npz") as one, np.load(tmp_path / "all.npz") as every:
        np.testing.assert_allclose(every["logits"], one["logits"], atol=1e-5)
        np.testing.assert_array_equal(every["graph_ids"], np.arange(50))
        np.testing.assert_allclose(every["labels"], labels, rtol=1e-6)
        expected = one["logits"]
    (rate,) = (row for row in rows(tmp_path) if row["metric"] == "throughput")
    assert (rate["unit"], rate["region"], rate["graphs"], rate["status"]) == ("graphs/s", "all batches", "50", "ok")

    done = infer("data.batches=3", "data.order=random", "--output", tmp_path / "some.npz", **own)
    assert "24 of 50 graphs" in done.stdout
    with np.load(tmp_path / "some.npz") as some:
        ids = some["graph_ids"]
        assert len(set(ids.tolist())) == 24
        assert ids.tolist() != sorted(ids)
        np.testing.assert_allclose(some["logits"], expected[ids], atol=1e-5)
        np.testing.assert_allclose(some["labels"], labels[ids], rtol=1e-6)


def test_the_template_predicts_for_a_file_of_the_users_with_its_ids(infer, tmp_path):
    (tmp_path / "own.csv").write_text("from,to\n10,20\n1000,5\n5,20\n20,10\n")
    quick = [f"data.path={tmp_path}/own.csv", *QUICK, "runtime.repeats=1"]
    options = ("--output", tmp_path / "o.csv", "--save", "classes", "softmax")
    done = infer(*options, config="configs/mine.yaml", settings=quick)
    assert done.exit_code == 0, done.stderr
    header, *lines = (tmp_path / "o.csv").read_text().splitlines()
    assert header.startswith("node,class,softmax_0,")
    assert [line.partition(",")[0] for line in lines] == ["5", "10", "20", "1000"]


def test_several_forms_beside_a_table_of_nodes(infer, tmp_path):
    (tmp_path / "own.csv").write_text("0,1\n1,2\n")
    (tmp_path / "own.nodes.csv").write_text("id,x,label,split\n0,1,1,train\n1,2,0,val\n2,0.5,,\n")
    quick = [f"data.path={tmp_path}/own.csv", *QUICK, "runtime.repeats=1"]
    output = ("--output", tmp_path / "o.csv")
    done = infer(*output, "--save", "softmax", "classes", config="configs/mine.yaml", settings=quick)
    assert done.exit_code == 0, done.stderr
    found = pd.read_csv(tmp_path / "o.csv", keep_default_na=False)
    assert [*found] == ["node", "split", "label", "class", "softmax_0", "softmax_1"]
    assert (found["split"].tolist(), found["label"].tolist()) == (["train", "valid", ""], [1, 0, -1])
    assert (found["class"] == (found["softmax_1"] > found["softmax_0"])).all()
    for name in ("own.csv", "own.nodes.csv"):
        before = (tmp_path / name).read_text()
        done = infer("--output", tmp_path / name, config="configs/mine.yaml", settings=quick)
        assert (done.exit_code, (tmp_path / name).read_text()) == (2, before)
        assert f"{name}: is an input of this run" in done.stderr


FULL, LAST = OSError(28, "No space left on device", "r.csv"), "report.append_rows"


@pytest.mark.parametrize(
    ("stage", "error"), [("infer.time_model", KeyboardInterrupt()), (LAST, KeyboardInterrupt()), (LAST, FULL)]
)
def test_what_an_end_before_the_end_leaves_behind(infer, tmp_path, monkeypatch, stage, error):
    def end(*_):
        raise error

    monkeypatch.setattr(f"models.inference.{stage}", end)
    done = infer("--output", tmp_path / "out.npy")
    written = f"the predictions in {tmp_path / 'out.npy'}" if stage == LAST else None
    if isinstance(error, OSError):
        assert done.exit_code == 2
        assert "No space left on device: 'r.csv'" in done.stderr
        assert written is None or f"kept: {written}" in done.stderr
    else:
        assert done.exit_code == 130
        assert done.stderr.splitlines()[-1] == f"interrupted: {written or 'nothing'} was written"
    assert [path.name for path in tmp_path.iterdir()] == ["out.npy"] * (written is not None)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (["--checkpoint", "README.md"], ["not a file of torch.save, or truncated; write it again"]),
        (["--output", "README.md/out.npy"], ["README.md is a file, not a folder"]),
        (["--results", "README.md/r.csv"], ["--results README.md/r.csv: cannot be written"]),
        (["runtime.device=cuda:99"], ["runtime.device = 'cuda:99': no such device", "allowed here are cpu"]),
    ],
    ids=str,
)
def test_a_user_error_is_a_message(infer, tmp_path, given, parts):
    done = infer(*given)
    assert done.exit_code == 2, done.stdout + done.stderr
    assert "error: " in done.stderr
    for part in parts:
        assert part in done.stderr
    assert not (tmp_path / "r.csv").exists()
    assert "warm-up" not in done.stdout  # rejected before any slow step


def test_a_data_set_that_cannot_be_had_has_its_own_status(infer, tmp_path, no_network):
    settings = [*QUICK, "data.source=official", f"data.root={tmp_path}"]
    done = infer(config="configs/train/citeseer.yaml", settings=settings)
    assert done.exit_code == NOT_LOADED, done.stderr
    assert f"\nerror: citeseer: not under {tmp_path}; no such host" in done.stderr


def test_packages_come_from_the_clone_that_the_script_is_in(tmp_path):
    """With several clones, or none installed, the script must not pick up another one's code."""
    for package in FOLDERS:
        (tmp_path / package).symlink_to(ROOT / package)
    copies = shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    show = f"import sys; sys.path.insert(0, {str(copies)!r}); import infer; print(infer.fused3s.__file__)"
    command = [sys.executable, "-c", show]
    done = subprocess.run(command, cwd="/", env=without_this_clone(), capture_output=True, text=True)
    assert done.stdout.strip() == str(tmp_path / "kernels" / "__init__.py"), done.stderr


def test_out_of_memory_names_the_bytes_and_what_makes_the_step_smaller(infer):
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**30, limits[1]))
    try:
        done = infer("model.dim=32768", "model.heads=1024")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert done.exit_code == 2, done.stderr
    assert "out of memory while building the model: 12,884,901,888 bytes were asked for at once" in done.stderr
    assert "model.dim = 32768" in done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), [("pubmed", "float16"), ("elliptic", "bfloat16")])
def test_gpu_runs_a_fused_kernel_on_real_graphs(infer, tmp_path, real_graph_dir, name, dtype):
    path = real_graph_dir / "single" / f"{name}.npz"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    settings = ["data.source=file", f"data.path={path}", f"attention.dtype={dtype}", f"data.name={name}"]
    done = infer("--verify", settings=settings)
    assert done.exit_code == 0, done.stdout + done.stderr
    assert "fused3s (chosen by auto)" in done.stdout
    assert "yes (chosen by auto)" in done.stdout  # a CUDA graph
    fused = dense_block_unavailable(torch.device("cuda", 0), getattr(torch, dtype), 64) is None
    assert ("fused (chosen by auto)" if fused else "plain (chosen by auto; not fused: ") in done.stdout
    assert {row["status"] for row in rows(tmp_path)} == {"ok"}


def test_two_configurations_are_two_runs_of_one_report(infer, tmp_path):
    """What `make infer` runs: the layers that predict Cora, then the ten blocks that are timed."""
    two = ("--config", "configs/infer/cora.yaml")
    quick = ("runtime.warmup=1", "runtime.repeats=1", "runtime.device=cpu")
    done = infer("--verify", *two, config="configs/train/cora.yaml", settings=quick)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.count("agrees with the reference") == 2
    assert "cora-2-layers.safetensors" in done.stdout
    found = {(row["config"], row["metric"]): float(row["value"]) for row in rows(tmp_path)}
    assert found["configs/train/cora.yaml", "test_accuracy"] == pytest.approx(0.829, abs=0.002)
    assert found["configs/infer/cora.yaml", "test_accuracy"] == pytest.approx(0.755, abs=0.002)
    assert [one for one, metric in found if metric == "share_of_model_time"] == ["configs/infer/cora.yaml"]
    refused = infer("--output", tmp_path / "o.npz", *two, config="configs/train/cora.yaml", settings=quick)
    assert (refused.exit_code, "2 --config: allowed without --output" in refused.stderr) == (2, True)
