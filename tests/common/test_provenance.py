"""Provenance: commit and changes of the code, versions, and "none" where a tool is missing."""

import ast
import re
import subprocess
from pathlib import Path

import pytest
import torch

from common import provenance as module
from common.provenance import provenance

CPU = torch.device("cpu")


def commit_and_state():
    found = provenance(CPU)
    return found["commit"], found["dirty"]


def test_versions_and_date():
    found = provenance(CPU)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", found["date"])
    assert (found["torch"], found["device_type"], found["driver"]) == (torch.__version__, "cpu", "none")
    assert found["dgl"] == module.metadata.version("dgl")
    assert found["pyg"] == module.metadata.version("torch_geometric")


def test_works_without_git_dgl_and_cupy(monkeypatch):
    def missing(*args, **kwargs):
        raise FileNotFoundError

    def not_installed(name):
        raise module.metadata.PackageNotFoundError

    monkeypatch.delenv("FUSED3S_COMMIT", raising=False)
    monkeypatch.setattr(subprocess, "run", missing)
    monkeypatch.setattr(module.metadata, "version", not_installed)
    found = provenance(CPU)
    assert {found[name] for name in ("commit", "dirty", "cupy", "dgl", "pyg")} == {"none"}


@pytest.fixture
def repository(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "--quiet")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "--quiet", "--message", "one")
    monkeypatch.setattr(module, "_ROOT", tmp_path.resolve())
    return tmp_path, git("rev-parse", "HEAD")


def test_any_change_of_the_code_is_dirty_and_new_results_are_not(repository, monkeypatch):
    monkeypatch.delenv("FUSED3S_COMMIT", raising=False)
    folder, commit = repository
    assert commit_and_state() == (commit, "no")
    (folder / "results").mkdir()
    (folder / "results" / "new.csv").write_text("measured")
    assert commit_and_state()[1] == "no"
    (folder / "untracked.py").write_text("code")
    assert commit_and_state()[1] == "yes"
    (folder / "untracked.py").unlink()
    (folder / "file").write_text("2")
    assert commit_and_state()[1] == "yes"


@pytest.mark.parametrize(
    "name",
    [
        "kernels/cuda/fused3s.cu",
        "models/fast.py",
        "models/training/step.py",
        "common/timers.py",
        "models/inference/batches.py",
    ],
)
def test_sources_are_all_code_that_a_time_depends_on(repository, name):
    (repository[0] / name).parent.mkdir(parents=True)
    (repository[0] / name).write_text("int(1);")
    before = module.sources.__wrapped__()
    (repository[0] / name).write_text("int(2);")
    assert module.sources.__wrapped__() != before


def test_whatever_a_benchmark_imports_is_hashed():
    """Folders of this repository that bench/ imports, and those that these import, as their sources say."""
    root = Path(module.__file__).parents[1]
    folders, left = {"bench"}, ["bench"]
    while left:
        for path in root.joinpath(left.pop()).rglob("*.py"):
            nodes = [*ast.walk(ast.parse(path.read_bytes()))]
            names = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
            names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
            tops = {"kernels" if (top := name.partition(".")[0]) == "fused3s" else top for name in names}
            new = {top for top in tops if root.joinpath(top).is_dir()} - folders
            folders, left = folders | new, [*left, *new]
    assert len(folders) > 5
    assert folders <= {*module.TIMED}


def test_a_comment_makes_no_time_stale(repository):
    (repository[0] / "models").mkdir()
    path = repository[0] / "models" / "fast.py"
    hashes = {path.write_text(text) and module.sources.__wrapped__() for text in ("a = 1", "a = 1  # one", "a = 2")}
    assert len(hashes) == 2


def test_a_copy_inside_another_repository_does_not_take_its_commit(repository, monkeypatch):
    folder, _ = repository
    (folder / "copy").mkdir()
    monkeypatch.setattr(module, "_ROOT", (folder / "copy").resolve())
    monkeypatch.delenv("FUSED3S_COMMIT", raising=False)
    assert commit_and_state() == ("none", "none")


@pytest.mark.parametrize(
    ("given", "commit", "dirty"),
    [("abc123", "abc123", "none"), ("abc123-clean", "abc123", "no"), ("abc123-dirty", "abc123", "yes")],
)
def test_the_environment_variable_has_commit_and_state(repository, monkeypatch, given, commit, dirty):
    monkeypatch.setenv("FUSED3S_COMMIT", given)
    assert commit_and_state() == (commit, dirty)


def test_a_malformed_variable_is_an_error(monkeypatch):
    monkeypatch.setenv("FUSED3S_COMMIT", "abc123-modified")
    with pytest.raises(ValueError, match="FUSED3S_COMMIT: got 'abc123-modified'; allowed are COMMIT, COMMIT-clean"):
        provenance(CPU)


@pytest.mark.gpu
def test_gpu_is_named():
    found = provenance(torch.device("cuda", 0))
    assert found["device"] == torch.cuda.get_device_name(0)
    assert found["driver"] != "none"
