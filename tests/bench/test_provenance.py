"""Provenance is complete where tools are there and says "none" where they are not."""

import re
import subprocess
from importlib import import_module

import pytest
import torch

from bench import provenance

MODULE = import_module("bench.provenance")  # the name in the package is the function
CPU = torch.device("cpu")


def test_no_field_is_blank():
    found = provenance(CPU).model_dump()
    assert all(found.values()), found
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", found["date"])
    assert found["torch"] == torch.__version__
    assert found["driver"] == "none"


def test_works_without_git_dgl_and_cupy(monkeypatch):
    def missing(*args, **kwargs):
        raise FileNotFoundError

    def not_installed(name):
        raise MODULE.metadata.PackageNotFoundError

    monkeypatch.delenv("FUSED3S_COMMIT", raising=False)
    monkeypatch.setattr(subprocess, "run", missing)
    monkeypatch.setattr(MODULE.metadata, "version", not_installed)
    found = provenance(CPU)
    assert (found.commit, found.dirty, found.cupy, found.dgl) == ("none", "none", "none", "none")


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
    monkeypatch.setattr(MODULE, "_ROOT", tmp_path.resolve())
    return tmp_path, git("rev-parse", "HEAD")


def test_commit_and_dirty_flag(repository):
    folder, commit = repository
    assert (provenance(CPU).commit, provenance(CPU).dirty) == (commit, "no")
    (folder / "untracked").write_text("a result")
    assert provenance(CPU).dirty == "no"
    (folder / "file").write_text("2")
    assert provenance(CPU).dirty == "yes"


def test_a_copy_inside_another_repository_does_not_take_its_commit(repository, monkeypatch):
    folder, _ = repository
    (folder / "copy").mkdir()
    monkeypatch.setattr(MODULE, "_ROOT", (folder / "copy").resolve())
    monkeypatch.delenv("FUSED3S_COMMIT", raising=False)
    assert provenance(CPU).commit == "none"
    monkeypatch.setenv("FUSED3S_COMMIT", "abc123")  # a copy can be told what it is a copy of
    assert (provenance(CPU).commit, provenance(CPU).dirty) == ("abc123", "none")
    monkeypatch.setattr(MODULE, "_ROOT", folder)  # also one whose .git stayed behind
    assert provenance(CPU).commit == "abc123"


@pytest.mark.gpu
def test_gpu_is_named():
    found = provenance(torch.device("cuda", 0))
    assert found.device == torch.cuda.get_device_name(0)
    assert found.driver != "none"
