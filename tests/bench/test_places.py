"""Outputs: what cannot be written is said before the work, and what is written is there whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from bench.places import OutputPathError, check_folder, check_place, write_whole


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
        (".", "is a folder; a file is needed"),
        ("pipe", "is no regular file"),  # opening it would wait for ever
        ("/dev/null", "is a device"),  # would be replaced by a file
        ("/dev/full", "is a device"),
        ("file/x.csv", "file is a file, not a folder"),
        ("file/a/b/x.csv", "cannot be written"),
        ("/proc/x.csv", "cannot be written"),
        ("/sys/x.csv", "cannot be written"),
        ("x" * 300 + ".csv", "File name too long"),
        (f"{'x' * 300}/r.csv", "File name too long"),
    ],
)
def test_a_place_that_cannot_be_written_is_named_with_its_option(here, path, reason):
    before = sorted(os.listdir())
    with pytest.raises(OutputPathError) as caught:
        check_place("--output", Path(path))
    assert str(caught.value).startswith(f"--output {path}: ")
    assert reason in str(caught.value)
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("path", ["new.csv", "file", "folder/new.csv", "a/b/c/new.csv", "link"])
def test_a_place_that_can_be_written_is_left_as_it_was(here, path):
    before = sorted(here.rglob("*"))
    check_place("--output", Path(path))
    check_folder("--figures", Path(path).parent)
    assert sorted(here.rglob("*")) == before
    assert Path("file").read_text() == "old"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_what_is_not_permitted_is_named(here):
    Path("folder").chmod(0o500)
    Path("file").chmod(0o400)
    for path, reason in (("folder/x", "Permission denied"), ("file", "the file is read-only")):
        with pytest.raises(OutputPathError, match=reason):
            check_place("--output", Path(path))


@pytest.mark.parametrize("folder", ["file", "file/x", "/proc", "/proc/1/x", "pipe", "x" * 300])
def test_a_folder_that_cannot_be_written_into_is_named_with_its_option(here, folder):
    with pytest.raises(OutputPathError) as caught:
        check_folder("--figures", Path(folder))
    assert str(caught.value).startswith(f"--figures {folder}: cannot be written into (")


@pytest.mark.parametrize("path", ["file", "new", "made/for/it/new"])
def test_text_and_bytes_are_written_whole(here, path):
    for content in ("ä\n", b"\x00\r\n", "", "long" * 10_000):
        write_whole(Path(path), content)
        assert Path(path).read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert not list(here.rglob(".writing-*"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_a_full_disk_leaves_the_old_file_and_names_it(here, monkeypatch, number):
    whole = Path.write_bytes

    def half(self: Path, content: bytes) -> int:
        whole(self, content[: len(content) // 2])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_bytes", half)
    for path, before in (("file", "old"), ("new", None)):
        with pytest.raises(OutputPathError) as caught:
            write_whole(Path(path), "new content")
        assert str(caught.value) == (
            f"{path}: cannot be written ({os.strerror(number)}); what was there before is unchanged"
        )
        assert (Path(path).read_text() if Path(path).exists() else None) == before
    assert not list(here.rglob(".writing-*"))
