"""`make setup` with stand-ins for Python and pip: what it refuses, and what it makes of an environment left behind."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_PIP = f'#!/bin/sh\n[ "$2" = venv ] && set -- -m venv --without-pip "$3" "$4"\nexec {sys.executable} "$@"\n'


@pytest.fixture
def setup(tmp_path):
    """Run `make setup` in a folder with nothing but the Makefile and pyproject.toml."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)

    def setup(python: str, pip: str) -> subprocess.CompletedProcess:
        (tmp_path / "python").write_text(python, encoding="utf-8")
        (tmp_path / "python").chmod(0o755)
        command = ["make", "setup", "PYTHON=./python", f"PIP={pip}"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    return setup


def test_another_python_is_refused_before_anything_is_made(setup, tmp_path):
    done = setup("#!/bin/sh\nexit 1\n", "true")
    assert done.returncode
    assert "PYTHON=./python: Python 3.11 or 3.12 is needed" in done.stdout
    assert not (tmp_path / ".venv").exists()


def test_an_unfinished_environment_is_made_anew_and_finds_the_folders_of_the_clone(setup, tmp_path):
    python = tmp_path / ".venv" / "bin" / "python"
    assert setup(WITHOUT_PIP, "false").returncode
    python.unlink()
    python.symlink_to("/bin/false")  # as a Python that has no wheel of a package
    assert setup(WITHOUT_PIP, "true").returncode == 0
    paths = json.loads(
        subprocess.check_output([python, "-c", "import json, sys; print(json.dumps(sys.path))"], cwd="/")
    )
    assert str(tmp_path) in paths
    kept = tmp_path / ".venv" / "kept"
    kept.touch()
    (tmp_path / "pyproject.toml").touch()
    assert setup(WITHOUT_PIP, "true").returncode == 0
    assert kept.exists()


def test_the_environment_of_another_clone_is_not_changed(setup, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / ".venv").symlink_to("other")
    done = setup(WITHOUT_PIP, "true")
    assert done.returncode
    assert ".venv links to other: setup would change the environment of another clone" in done.stdout
    assert not [*(tmp_path / "other").iterdir()]
