"""Outputs: what cannot be written is said before the work."""

import os
from pathlib import Path

import pytest

from common.places import check_folder, check_place


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder with a file, a folder, a pipe and a broken link in it."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("old")
    Path("folder").mkdir()
    os.mkfifo("pipe")
    Path("link").symlink_to("nowhere/at/all")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("folder", "is a folder; a file is needed"),
        ("pipe", "a device or a pipe"),  # opening it would wait for ever
        ("/dev/null", "a device or a pipe"),  # would be replaced by a file
        ("file/x.csv", "file is a file, not a folder"),
        ("/proc/x.csv", "cannot be written"),
        ("x" * 300 + ".csv", "File name too long"),
    ],
)
def test_a_place_that_cannot_be_written_is_named_with_its_option(here, path, reason):
    before = sorted(os.listdir())
    with pytest.raises(ValueError, match=f"^--output {path}: .*{reason}"):
        check_place("--output", Path(path))
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("path", ["new.csv", "file", "folder/new.csv", "a/b/c/new.csv", "link"])
def test_a_place_that_can_be_written_is_left_as_it_was(here, path):
    before = sorted(here.rglob("*"))
    check_place("--output", Path(path))
    check_folder("--figures", Path(path).parent)
    assert sorted(here.rglob("*")) == before
    assert Path("file").read_text() == "old"
