"""`scripts/infer.py` as a user runs it, from the root of the repository.

Importing torch and DGL takes most of a run, so tests that need no fresh process run the script in this one.
"""

import csv
import os
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from scripts_as_modules import load_script
from typer.testing import CliRunner

from baselines import REGISTRY
from configs import load_config
from dense.block import dense_block_unavailable
from models import GraphTransformer

ROOT = Path(__file__).resolve().parents[2]
# With packages:
FOLDERS = (
    "bench",
    "baselines",
    "configs",
    "data",
    "dense",
    "inference",
    "kernels",
    "models",
    "parallel",
    "report",
    "training",
)
QUICK = ["--set", "data.source=synthetic", "--set", "model.blocks=2", "--set", "model.dim=16"]
QUICK += ["--set", "runtime.warmup=1", "--set", "runtime.repeats=4", "--set", "runtime.device=cpu"]


def without_this_clone() -> dict[str, str]:
    """The environment without this clone in PYTHONPATH; third-party packages may well come from there."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [str(Path(folder).resolve()) for folder in folders if folder and Path(folder).resolve() != ROOT]
    return os.environ | {"PYTHONPATH": os.pathsep.join(others)}


@pytest.fixture
def arguments(tmp_path):
    def arguments(*more, config="configs/infer/cora.yaml", quick=QUICK):
        return [*map(str, ["--config", config, *quick, "--results", tmp_path / "r.csv", *more])]

    return arguments


@pytest.fixture
def fresh_infer(arguments):
    """Run the script in a fresh process, without the packages on its path."""

    def fresh_infer(*more, **changes):
        environment = without_this_clone() | {"COLUMNS": "200"}
        command = [sys.executable, "scripts/infer.py", *arguments(*more, **changes)]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)

    return fresh_infer


@pytest.fixture(scope="module")
def script():
    return load_script("infer")


@pytest.fixture
def infer(script, arguments, monkeypatch):
    """Run the script in this process."""

    def infer(*more, **changes):
        monkeypatch.chdir(ROOT)
        monkeypatch.setenv("COLUMNS", "200")
        return CliRunner().invoke(script.app, arguments(*more, **changes))

    return infer


def rows(tmp_path):
    with (tmp_path / "r.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_report_results_and_predictions(fresh_infer, tmp_path):
    done = fresh_infer("--verify", "--output", tmp_path / "out.npz")
    assert done.returncode == 0, done.stderr
    for text in (
        "cora: SYNTHETIC s",
        "2,708 nodes, 10,556 edges",
        "2 blocks, d = 16, heads = 1, layer norm",
        "csr_unfused (chosen by auto)",
        "float32",
        "ms median (p10 ",
        "4 passes",
        "% of the forward pass",
        "MiB of the whole process",
        "agrees with the reference",
        "dim=16 heads=1 blocks=2",
    ):
        assert text in done.stdout, done.stdout
    repeat = next(line for line in done.stdout.splitlines() if line.startswith("to repeat"))
    python, *rest = shlex.split(repeat)[2:]
    assert shutil.which(python, path=os.environ["PATH"]) or (ROOT / python).samefile(sys.executable)
    assert rest[:3] == ["scripts/infer.py", "--config", "configs/infer/cora.yaml"]

    with np.load(tmp_path / "out.npz") as file:
        assert file["logits"].shape == (2708, 7)

    written = rows(tmp_path)
    assert [(row["scope"], row["metric"]) for row in written] == [
        ("model", "time"),
        ("attention", "share_of_model_time"),
        ("model", "peak_memory"),
        ("build", "time"),
    ]
    assert {row["status"] for row in written} == {"ok"}
    assert {row["data_source"] for row in written} == {"synthetic"}
    assert {row["backend"] for row in written} == {"csr_unfused"}
    assert float(written[0]["p10"]) <= float(written[0]["value"]) <= float(written[0]["p90"])
    assert 0 < float(written[1]["value"]) < 1

    saved = tmp_path / "configs" / f"{written[0]['config_sha']}.yaml"
    assert load_config(saved).sha() == written[0]["config_sha"]
    assert yaml.safe_load(saved.read_text())["model"]["dim"] == 16


def test_profile_and_accuracy(infer, tmp_path):
    done = infer("--profile", "--accuracy")
    assert done.exit_code == 0, done.stderr
    for text in (
        "against float32: 100.00% of the rows have the same largest output, relative error",
        "Time of an eager forward pass",
        "out projection",
    ):
        assert text in done.stdout
    written = rows(tmp_path)
    regions = ["embedding", "qkv", "attention", "out projection", "ffn", "norms", "readout"]
    assert [(row["metric"], row["region"]) for row in written[4:]] == [
        *(("time", region) for region in regions),
        *(("argmax_agreement", "none"), ("output_error", "none")),
    ]
    assert {(row["bench"], row["dense"], row["launch"]) for row in written} == {("infer", "plain", "eager")}
    trace = tmp_path / "traces" / f"cora_{written[0]['config_sha']}.json"
    assert str(trace) in done.stdout
    assert "forward pass, eager" in trace.read_text()


def test_the_report_names_the_execution_and_its_reason(infer):
    done = infer()
    assert "plain (chosen by auto; not fused: " in done.stdout
    assert "no (chosen by auto; a CUDA graph needs an NVIDIA GPU, and the model is on cpu)" in done.stdout
    done = infer("--set", "runtime.dense=plain", "--set", "runtime.cuda_graph=false")
    assert "plain (as configured)" in done.stdout
    assert "no (as configured)" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("runtime.cuda_graph=true", "error: runtime.cuda_graph = True and runtime.device = 'auto' (here cpu)"),
        (
            "attention.reorder=communities",
            "error: attention.reorder = 'communities' and runtime.device = 'auto' (here cpu)",
        ),
        ("runtime.dense=fused", "error: runtime.dense = 'fused' and runtime.device = 'auto' (here cpu)"),
    ],
)
def test_an_unavailable_execution_is_an_error_if_configured(infer, key, message):
    done = infer("--set", "runtime.device=auto", "--set", "model.dim=64", "--set", key)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "loading" not in done.stdout  # found out before


def test_same_seed_same_predictions_and_status_unchecked(infer, tmp_path):
    for name, backend in (("a.npy", "dgl"), ("b.npy", "dgl"), ("c.npy", "reference")):
        done = infer("--output", tmp_path / name, "--set", f"attention.backend={backend}")
        assert done.exit_code == 0, done.stderr
    a, b, c = (np.load(tmp_path / name) for name in ("a.npy", "b.npy", "c.npy"))
    np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(a, c, atol=1e-5)
    assert {row["status"] for row in rows(tmp_path)} == {"unchecked"}
    assert len({row["run_id"] for row in rows(tmp_path)}) == 3


def test_checkpoint_is_loaded_in_another_precision(infer, tmp_path):
    torch.manual_seed(7)
    model = GraphTransformer(in_features=1433, num_classes=7, dim=16, blocks=2)
    with torch.no_grad():
        model.readout.classes.bias[3] += 100
    torch.save(model.state_dict(), tmp_path / "w.pt")
    done = infer(
        *("--checkpoint", tmp_path / "w.pt", "--output", tmp_path / "out.pt", "--verify"),
        *("--set", "attention.dtype=bfloat16"),
    )
    assert done.exit_code == 0, done.stderr
    assert (torch.load(tmp_path / "out.pt").argmax(1) == 3).all()
    assert rows(tmp_path)[0]["dtype"] == "bfloat16"


def test_wrong_attention_fails_verification(infer, tmp_path, monkeypatch):
    right = REGISTRY["dgl"].attend
    monkeypatch.setattr(REGISTRY["dgl"], "attend", lambda *arguments: right(*arguments) * 1.01)
    done = infer("--set", "attention.backend=dgl", "--verify")
    assert done.exit_code == 1, done.stderr
    assert "DIFFERS FROM" in done.stdout
    assert {row["status"] for row in rows(tmp_path)} == {"wrong"}
    assert "relative error" in rows(tmp_path)[0]["reason"]


def test_graph_level_batch_with_positional_encoding(infer, tmp_path):
    done = infer(
        *("--set", "data.batch_size=20", "--set", "model.pos_enc=4", "--set", "model.heads=2", "--verify"),
        *("--set", "model.norm=batch", "--output", tmp_path / "out.npy"),
        config="configs/infer/ogbg-molhiv.yaml",
    )
    assert done.exit_code == 0, done.stderr
    assert "20 graphs" in done.stdout
    assert "4 Laplacian eigenvectors" in done.stdout
    assert np.load(tmp_path / "out.npy").shape[0] == 20


def test_the_shape_of_dgls_example(infer):
    few = ["--set", "data.source=synthetic", "--set", "data.batch_size=20", "--set", "model.blocks=2", *QUICK[6:]]
    done = infer("--verify", config="configs/infer/dgl-example.yaml", quick=few)
    assert done.exit_code == 0, done.stderr
    assert "2 blocks, d = 80, heads = 8, batch norm, 8 Laplacian eigenvectors" in done.stdout
    assert "agrees with the reference" in done.stdout


@pytest.fixture
def collection(tmp_path):
    """A file of 50 labelled graphs; its path and settings to run all of it in batches of 8."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(2, 9, 50)
    u, v = (np.concatenate([np.arange(size - 1) + end for size in sizes]) for end in (0, 1))
    arrays = {"node_counts": sizes, "edge_counts": sizes - 1, "u": u, "v": v, "graph_label": rng.normal(size=(50, 2))}
    path = tmp_path / "mine.npz"
    np.savez(path, feat=rng.normal(size=(sizes.sum(), 5)), **arrays)
    config = tmp_path / "mine.yaml"
    config.write_text(f"data: {{name: mine, source: file, path: '{path}', batch_size: 8}}\nmodel: {{pos_enc: 2}}\n")
    return config, arrays["graph_label"]


def test_all_batches_of_a_collection(infer, tmp_path, collection):
    config, labels = collection
    small = QUICK[2:]
    done = infer("--set", "data.batch_size=50", "--output", tmp_path / "one.npz", config=config, quick=small)
    assert done.exit_code == 0, done.stderr
    more = ["--set", "data.batches=all", "--verify", "--accuracy", "--profile"]
    done = infer(*more, "--output", tmp_path / "all.npz", config=config, quick=small)
    assert done.exit_code == 0, done.stderr
    for text in (", 50 graphs", "50 graphs in 7 batches of up to 8", "graphs/s median", "agrees with the reference"):
        assert text in done.stdout
    assert "no (chosen by auto; a CUDA graph needs an NVIDIA GPU, and the model is on cpu)" in done.stdout
    with np.load(tmp_path / "one.npz") as one, np.load(tmp_path / "all.npz") as every:
        np.testing.assert_allclose(every["logits"], one["logits"], atol=1e-5)
        np.testing.assert_array_equal(every["graph_ids"], np.arange(50))
        np.testing.assert_allclose(every["labels"], labels, rtol=1e-6)
        expected = one["logits"]
    (rate,) = (row for row in rows(tmp_path) if row["metric"] == "throughput")
    assert (rate["unit"], rate["region"], rate["graphs"], rate["status"]) == ("graphs/s", "all batches", "50", "ok")
    share = next(row for row in rows(tmp_path) if row["metric"] == "share_in_forward_passes")
    assert 0 < float(share["value"]) <= 1

    done = infer(
        *("--set", "data.batches=3", "--set", "data.order=random", "--output", tmp_path / "some.npz"),
        config=config,
        quick=small,
    )
    assert "24 of 50 graphs" in done.stdout
    with np.load(tmp_path / "some.npz") as some:
        ids = some["graph_ids"]
        assert len(set(ids.tolist())) == 24
        assert ids.tolist() != sorted(ids)
        np.testing.assert_allclose(some["logits"], expected[ids], atol=1e-5)
        np.testing.assert_allclose(some["labels"], labels[ids], rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("data.batches=0", "data.batches = 0: should be greater than or equal to 1 or not known; allowed are 'all'"),
        ("data.batches=7", "batch_size: got 56; "),
        ("data.batch_size=51", "has 50 graphs. Set batch_size (data.batch_size times data.batches in a configuration)"),
        ("runtime.dense=compiled", "runtime.dense = 'compiled' and data.batches = 'all': batches differ in size"),
    ],
)
def test_batches_that_cannot_be(infer, collection, given, message):
    batches = "data.batches=all" if "runtime" in given else given
    done = infer("--set", batches, "--set", given, config=collection[0], quick=QUICK[2:])
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize("model", ["model.pos_enc=2", "model.edge_features=bias"])
def test_a_cuda_graph_for_all_batches_takes_plain_models(infer, collection, model):
    given = ["data.batches=all", "runtime.cuda_graph=true", model]
    done = infer(*(word for each in given for word in ("--set", each)), config=collection[0], quick=QUICK[2:-2])
    assert done.exit_code == 2, done.stderr
    assert "a CUDA graph for all batches takes models without pos_enc and edge_features" in done.stderr


def test_one_graph_has_no_batches(infer, tmp_path):
    np.savez(tmp_path / "one.npz", src_li=[0, 1], dst_li=[1, 0], num_nodes=2)
    given = ["data.name=mine", f"data.path={tmp_path / 'one.npz'}", "data.source=file", "data.batches=all"]
    done = infer(*(part for each in given for part in ("--set", each)))
    assert done.exit_code == 2
    assert "one.npz holds one graph; only 1 is allowed" in done.stderr


@pytest.mark.parametrize("stage", ["run.time_model", "run.compare", "report.append_rows"])
def test_what_ctrl_c_leaves_behind(infer, tmp_path, monkeypatch, stage):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"inference.{stage}", interrupt)
    done = infer("--verify", "--output", tmp_path / "out.npy")
    assert done.exit_code == 130
    written = stage != "run.time_model"
    what = f"the predictions in {tmp_path / 'out.npy'}" if written else "nothing"
    assert done.stderr.splitlines()[-1] == f"interrupted: {what} was written"
    assert [path.name for path in tmp_path.iterdir()] == ["out.npy"] * written


def test_a_results_file_that_cannot_be_written_leaves_the_predictions(infer, tmp_path, monkeypatch):
    def full(path, rows):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("inference.report.append_rows", full)
    done = infer("--output", tmp_path / "out.npy")
    assert done.exit_code == 2
    assert f"No space left on device: '{tmp_path / 'r.csv'}'" in done.stderr
    assert f"kept: the predictions in {tmp_path / 'out.npy'}" in done.stderr
    assert np.load(tmp_path / "out.npy").shape == (2708, 7)


@pytest.mark.parametrize("form", ["bias", "stream"])
def test_edge_features(infer, tmp_path, form):
    done = infer(
        *("--set", "data.batch_size=20", "--set", f"model.edge_features={form}", "--set", "model.heads=2"),
        *("--verify", "--profile"),
        config="configs/infer/zinc-edges.yaml",
    )
    assert done.exit_code == 0, done.stderr
    for text in ("1 categorical columns, random", f"edge features as a {form}", "agrees with the reference"):
        assert text in done.stdout
    written = rows(tmp_path)
    assert {row["edges"] for row in written} == {form}
    assert ("edges" in {row["region"] for row in written}) == (form == "stream")


def test_graph_of_the_user(infer, tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "mine.npz"
    np.savez(path, src_li=rng.integers(0, 50, 200), dst_li=rng.integers(0, 50, 200), num_nodes=50)
    config = tmp_path / "mine.yaml"
    config.write_text(f"data: {{name: mine, source: file, path: '{path}'}}\nmodel: {{blocks: 1, dim: 8}}\n")
    done = infer("--set", "runtime.device=cpu", config=config, quick=[])
    assert done.exit_code == 0, done.stderr
    assert "50 nodes" in done.stdout
    assert f"from the file {path}" in done.stdout
    assert rows(tmp_path)[0]["data_source"] == "file"


def test_outputs_that_are_not_finite_are_reported(infer, tmp_path):
    weights = GraphTransformer(in_features=1433, num_classes=7, dim=16, blocks=2).state_dict()
    weights["readout.classes.bias"][0] = torch.nan
    torch.save(weights, tmp_path / "w.pt")
    done = infer("--checkpoint", tmp_path / "w.pt")
    assert done.exit_code == 0, done.stderr
    assert "warning: 2708 of 18956 outputs are NaN or infinite" in done.stderr


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (["--set", "model.dmi=64"], ["cora.yaml", "model.dmi = 64", "did you mean 'dim'"]),
        (["--config", "none.yaml"], ["none.yaml: no such file"]),
        (["--checkpoint", "none.pt"], ["none.pt: no such file"]),
        (["--checkpoint", "OTHER"], ["of another shape: embedding.linear.weight [8, 1433], the model has [16, 1433]"]),
        (["--checkpoint", "TRUNCATED"], ["not a file of torch.save, or truncated; write it again"]),
        (["--output", "out.csv"], ["'.csv'; allowed are .npy, .npz, .pt"]),
        (["--output", "README.md/out.npy"], ["--output README.md/out.npy: cannot be written", "README.md is a file"]),
        (["--results", "README.md/r.csv"], ["--results README.md/r.csv: cannot be written", "README.md is a file"]),
        (["--set", "data.name=../../evil", "--set", "data.path=TRUNCATED"], ["data.name = '../../evil'", "data.path"]),
        (
            ["--set", "data.batches=2"],
            ["data.batches = 2 and data.name = 'cora': it is a single graph; only 1 is allowed"],
        ),
        (["--results", "FOREIGN"], ["holds other columns"]),
        (["--set", "data.source=file", "--set", "data.path=none.npz"], ["none.npz"]),
        (["--set", "data.source=file", "--set", "data.path=TRUNCATED"], ["w.pt"]),
        (["--set", "runtime.device=cuda:99"], ["runtime.device = 'cuda:99': no such device", "allowed here are cpu"]),
    ],
    ids=lambda value: value[-1] if value[0].startswith("--") else "message",
)
def test_a_user_error_is_a_message(infer, tmp_path, given, parts):
    content = GraphTransformer(in_features=1433, num_classes=7, dim=8, blocks=1).state_dict()
    torch.save(content, tmp_path / "other.pt")
    (tmp_path / "w.pt").write_bytes((tmp_path / "other.pt").read_bytes()[:1000])
    (tmp_path / "foreign.csv").write_text("a,b\n")
    files = {"OTHER": "other.pt", "TRUNCATED": "w.pt", "FOREIGN": "foreign.csv"}
    for word, file in files.items():
        given = [argument.replace(word, str(tmp_path / file)) for argument in given]
    done = infer(*given)
    assert done.exit_code == 2, done.stdout + done.stderr
    assert "error: " in done.stderr
    for part in parts:
        assert part in done.stderr
    assert not (tmp_path / "r.csv").exists()
    assert "warm-up" not in done.stdout  # rejected before any slow step


def test_a_missing_checkpoint_is_found_before_the_data_is_loaded(infer, tmp_path):
    done = infer("--checkpoint", tmp_path / "none.pt")
    assert (done.exit_code, "loading" in done.stdout) == (2, False), done.stdout + done.stderr


def test_packages_come_from_the_clone_that_the_script_is_in(tmp_path):
    """With several clones, or none installed, the script must not pick up another one's code."""
    for package in (*FOLDERS, "fused3s_dgl.py"):
        (tmp_path / package).symlink_to(ROOT / package)
    copies = shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    show = f"import sys; sys.path.insert(0, {str(copies)!r}); import infer; print(infer.kernels.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", show], cwd="/", env=without_this_clone(), capture_output=True, text=True
    )
    assert done.stdout.strip() == str(tmp_path / "kernels" / "__init__.py"), done.stderr


def test_a_message_is_no_traceback(fresh_infer):
    done = fresh_infer("--set", "model.dmi=64")
    assert done.returncode == 2
    assert done.stderr.startswith("error: configs/infer/cora.yaml --set ")
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_backend_without_a_gpu_names_the_reason_and_the_available_ones(infer):
    done = infer("--set", "attention.backend=fused3s_paper", "--set", "runtime.device=auto")
    assert done.exit_code == 2
    assert "attention.backend = 'fused3s_paper' and runtime.device = 'auto' (here cpu)" in done.stderr
    assert "no NVIDIA GPU found" in done.stderr
    assert "able to run this model there: csr_unfused, " in done.stderr


def test_out_of_memory_names_the_bytes_and_what_makes_the_step_smaller(infer):
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**30, limits[1]))
    try:
        done = infer("--set", "model.dim=32768", "--set", "model.heads=1024")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert done.exit_code == 2, done.stderr
    assert "out of memory while building the model: 12,884,901,888 bytes were asked for at once" in done.stderr
    assert "model.dim = 32768" in done.stderr


@pytest.mark.parametrize(
    ("key", "value"),
    [("dim", 2**43), ("heads", 2**40), ("blocks", 2**40), ("pos_enc", 10**12), ("dim", 7.5), ("dropout", "much")],
)
def test_sizes_of_a_model_are_bounded(infer, key, value):
    done = infer("--set", f"model.{key}={value}")
    assert done.exit_code == 2, done.stderr
    assert f"model.{key} = {value!r}: " in done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["cora", "pubmed", "musae-github", "elliptic"])
def test_gpu_runs_a_fused_kernel_on_real_graphs(fresh_infer, tmp_path, real_graph_dir, name, dtype):
    path = real_graph_dir / "single" / f"{name}.npz"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    arguments = ["--set", "data.source=file", "--set", f"data.path={path}", "--set", f"attention.dtype={dtype}"]
    done = fresh_infer(*arguments, "--set", f"data.name={name}", "--verify", quick=[])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fused3s (chosen by auto)" in done.stdout
    assert "yes (chosen by auto)" in done.stdout  # a CUDA graph
    fused = dense_block_unavailable(torch.device("cuda", 0), getattr(torch, dtype), 128) is None
    assert ("fused (chosen by auto)" if fused else "plain (chosen by auto; not fused: ") in done.stdout
    assert {row["status"] for row in rows(tmp_path)} == {"ok"}


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 8])
def test_gpu_one_cuda_graph_for_all_batches(infer, tmp_path, collection, heads):
    found = {}
    for name, asked in (("eager", "false"), ("graph", "auto")):
        settings = ["data.batches=all", f"runtime.cuda_graph={asked}", "attention.backend=fused3s"]
        settings += [f"model.heads={heads}", "model.dim=128", "model.pos_enc=0", "runtime.device=cuda"]
        sets = [word for each in settings for word in ("--set", each)]
        done = infer(
            *sets, "--output", tmp_path / f"{name}.npy", config=collection[0], quick=[*QUICK[2:4], *QUICK[6:-2]]
        )
        assert done.exit_code == 0, done.stdout + done.stderr
        assert f"{'yes' if name == 'graph' else 'no'} (" in done.stdout
        found[name] = np.load(tmp_path / f"{name}.npy")
    assert np.array_equal(found["eager"], found["graph"])


@pytest.mark.gpu
def test_gpu_profile_has_launch_gaps(fresh_infer, tmp_path):
    more = ["--set", "runtime.device=cuda", "--set", "model.dim=64", "--profile", "--accuracy"]
    done = fresh_infer(*more, quick=[*QUICK[:4], "--set", "runtime.dense=plain"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "launch gaps" in done.stdout
    recorded = rows(tmp_path)
    assert {(row["dense"], row["launch"]) for row in recorded} == {("plain", "cuda_graph"), ("plain", "eager")}
    assert {row["note"] for row in recorded} == {"none", "against float32"}
    (trace,) = (tmp_path / "traces").iterdir()
    assert "forward pass, CUDA graph" in trace.read_text()
