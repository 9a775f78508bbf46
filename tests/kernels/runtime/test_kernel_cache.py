"""Folders in which CuPy cannot keep kernels, in processes of their own: CuPy looks for its folder at import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cupy", reason="CuPy is not installed")

KERNELS = Path(__file__).resolve().parents[3] / "kernels"
# The module as a file, since the package imports torch.
IMPORT = """
import importlib.util, logging, sys
spec = importlib.util.spec_from_file_location("kernel_cache", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
logging.basicConfig(format="%(levelname)s %(message)s", level="INFO")
cupy = module.import_cupy()
assert module.import_cupy() is cupy
from cupy.cuda import compiler
print(compiler._get_bool_env_variable("CUPY_CACHE_IN_MEMORY", False))
"""


def import_cupy(folder: Path, **environment: str) -> tuple[str, list[str]]:
    """Whether CuPy writes no file, and the lines of the log."""
    command = [sys.executable, "-c", IMPORT, str(KERNELS / "runtime" / "kernel_cache.py")]
    environment = {**os.environ, "CUPY_CACHE_DIR": str(folder), **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), [line for line in done.stderr.splitlines() if "kernels" in line]


@pytest.fixture(params=["read-only", "a file", "proc"])
def unusable(request, tmp_path):
    """(folder, part of the reason)."""
    if request.param == "proc":  # root cannot write there either
        return Path("/proc/cache"), "No such file or directory"
    if request.param == "a file":
        (tmp_path / "file").touch()
        return tmp_path / "file", "File exists"
    if os.geteuid() == 0:
        pytest.skip("root may write to a folder without permissions")
    (tmp_path / "read_only").mkdir(0o500)
    return tmp_path / "read_only", "Permission denied"


def test_a_folder_that_cannot_be_written_is_named_once(unusable):
    folder, reason = unusable
    in_memory, (line,) = import_cupy(folder)
    assert in_memory == "True"
    assert line.startswith(f"WARNING compiled kernels cannot be kept in {folder} ({reason})")
    assert "set CUPY_CACHE_DIR to a folder" in line


def test_a_new_folder(tmp_path):
    folder = tmp_path / "new" / "cache"
    assert import_cupy(folder) == ("False", [f"INFO compiled kernels are kept in {folder} (CUPY_CACHE_DIR)"])
    assert folder.is_dir()


def test_a_cache_in_memory_needs_no_folder_and_no_word(tmp_path):
    (tmp_path / "file").touch()
    assert import_cupy(tmp_path / "file", CUPY_CACHE_IN_MEMORY="1") == ("True", [])
