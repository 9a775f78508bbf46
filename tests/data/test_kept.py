"""A cache never decides whether a run succeeds."""

import builtins
import errno
import os
import pathlib
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import data
import data.synthetic.generate
from data.kept import keep, kept_graph, kept_path, read_kept

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def small(monkeypatch):
    """Loads cora's surrogate as a large one, which is kept."""
    monkeypatch.setattr(data.synthetic.generate, "CACHED_FROM_EDGES", 1)
    return lambda root: data.load("cora", root=root, source="synthetic")


def test_a_full_disk_costs_a_warning(tmp_path):
    """A process whose files may have 4 KiB writes its surrogate, as on a disk that is full after so many."""
    script = f"""
        import resource
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        import data
        import data.synthetic.generate
        data.synthetic.generate.CACHED_FROM_EDGES = 1
        data.load("citeseer", root={str(tmp_path)!r} + "/warm", source="synthetic")
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        print(data.load("cora", root={str(tmp_path)!r}, source="synthetic").meta.num_edges)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "10556\n"
    assert "not kept (File too large): the next run makes it again" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "synthetic").iterdir()) == []


@pytest.mark.parametrize("place", ["file", "below a file", "in proc"])
def test_a_root_that_cannot_be_written_costs_a_warning(tmp_path, small, caplog, place):
    (tmp_path / "file").write_text("")
    root = {"file": tmp_path / "file", "below a file": tmp_path / "file" / "data", "in proc": Path("/proc/datasets")}
    assert small(root[place]).meta.num_edges == 10_556
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"{root[place]}/synthetic/cora-seed0-")
    assert "not kept (" in warning
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_kept_file_that_cannot_be_opened_is_not_called_damaged(tmp_path, small, caplog, monkeypatch):
    small(tmp_path)
    (path,) = (tmp_path / "synthetic").iterdir()
    real = pathlib.Path.open

    def refuse(self, *arguments, **options):
        if self == path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(self, *arguments, **options)

    monkeypatch.setattr(pathlib.Path, "open", refuse)  # root may open everything
    assert small(tmp_path).meta.num_edges == 10_556
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning == f"{path}: cannot be opened (Permission denied), and is made again for this run"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do everything")
def test_without_permissions(tmp_path, small, caplog):
    small(tmp_path)
    (path,) = (tmp_path / "synthetic").iterdir()
    path.chmod(0)
    path.parent.chmod(0o500)
    assert small(tmp_path).meta.num_edges == 10_556
    assert "cannot be opened (Permission denied)" in caplog.text
    path.parent.chmod(0o700)


def test_a_kept_file_that_does_not_fit_is_a_memory_error(tmp_path, small, monkeypatch):
    small(tmp_path)
    monkeypatch.setattr("data.memory.available_bytes", lambda: 1000)
    with pytest.raises(MemoryError, match=r"cora-seed0-.*\.npz: the arrays recipe, indptr, col, "):
        data.load("cora", root=tmp_path, source="synthetic", features=False)


def test_two_processes_that_make_the_same_file(tmp_path, caplog):
    """The one that is later finds the other's file, and leaves it."""
    path = kept_path(tmp_path, "x", "recipe")
    keep(path, {"recipe": np.array("recipe"), "a": np.arange(3)})
    first = path.read_bytes()
    keep(path, {"recipe": np.array("recipe"), "a": np.arange(9)})
    assert path.read_bytes() == first
    assert read_kept(path, "recipe", dict)["a"].tolist() == [0, 1, 2]
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    assert not caplog.records


def test_a_kept_graph_is_the_one_that_was_made(tmp_path):
    made = data.loader.find_graph("cora", source="official")[1]
    csr = data.loader.to_csr(made)
    path = kept_path(tmp_path, "cora", "recipe")
    kept_graph(path, "recipe", lambda: csr)
    read = kept_graph(path, "recipe", lambda: pytest.fail("made again"))
    assert (read.sha256, read.origin, read.num_nodes) == (csr.sha256, csr.origin, 2708)
    for name in ("feat", "label", "train_mask"):
        assert np.array_equal(read.ndata[name], csr.ndata[name])
        assert read.ndata[name].dtype == csr.ndata[name].dtype
    assert {part: ids.size for part, ids in read.splits.items()} == {"train": 140, "valid": 500, "test": 1000}


def test_no_code_runs_from_a_kept_file(tmp_path, monkeypatch, caplog):
    class Code:
        def __reduce__(self):
            return builtins.exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

    path = kept_path(tmp_path, "x", "recipe")
    np.savez(path, recipe=np.array("recipe"), a=np.array([Code()], object))
    assert read_kept(path, "recipe", dict) is None
    assert "a holds pickled objects, which are refused" in caplog.text
    assert not (tmp_path / "ran").exists()
